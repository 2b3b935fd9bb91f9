// The page of `mmrl view` and of a report: modules without a build step, which are joined for a report.
//
// Whatever a run recorded is hostile text: it enters the page by text nodes and through `visible` or `plain`, which show
// control characters as symbols. Formatted by prettier with a width of 120.

import { aboutPage } from "./about.js";
import { comparePage } from "./comparison.js";
import { curvesPage } from "./curves.js";
import { report } from "./documents.js";
import { evaluationsPage } from "./evaluations.js";
import { begin } from "./frame.js";
import { groupPage } from "./group.js";
import { homePage } from "./home.js";
import { pressed } from "./keys.js";
import { POLL_MS, keepPolling } from "./live.js";
import { plotsPage } from "./plots.js";
import { promptPage } from "./prompt.js";
import { newestPage, stepPage } from "./step.js";

const PAGES = [
  [/^$/, () => homePage()],
  [/^run\/(\d+)(?:\/curves)?$/, (run) => curvesPage(run)],
  [/^run\/(\d+)\/rollouts$/, (run) => newestPage(run)],
  [/^run\/(\d+)\/(step|(?:evaluation|blank)(?:\.[\w-]+)?)\/(\d+)$/, stepPage],
  [/^run\/(\d+)\/(step|(?:evaluation|blank)(?:\.[\w-]+)?)\/(\d+)\/plots$/, plotsPage],
  [/^run\/(\d+)\/(step|(?:evaluation|blank)(?:\.[\w-]+)?)\/(\d+)\/group\/(\d+)$/, groupPage],
  [/^run\/(\d+)\/prompt$/, (run) => promptPage(run)],
  [/^run\/(\d+)\/evaluations$/, (run) => evaluationsPage(run)],
  [/^run\/(\d+)\/about$/, (run) => aboutPage(run)],
  [/^compare$/, () => comparePage()],
];

document.addEventListener("keydown", pressed);
begin(PAGES);
if (!report && location.protocol !== "file:") setTimeout(keepPolling, POLL_MS);
