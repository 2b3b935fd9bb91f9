// The list of runs.

import { address, go, place } from "./addresses.js";
import { el, heading, link, quiet } from "./elements.js";
import { redrawn } from "./frame.js";
import { entriesOf, hasSeeds, metricPicker, runsTable, settingsTable, spreadNote, stateWords } from "./overview.js";
import { overview, runList } from "./runs.js";
import { counted } from "./text.js";

const PATIENCE_MS = 700;

export async function homePage() {
  const all = await runList();
  if (!all.length)
    return { title: "Runs", runs: [], node: [heading("Runs"), quiet("No run was given to `mmrl view`.")] };
  if (all.length === 1 && !all[0].problem) {
    go(address(`run/${all[0].run}/curves`), true);
    return null;
  }
  const reading = overview();
  const doc = await Promise.race([reading, new Promise((done) => setTimeout(() => done(null), PATIENCE_MS))]);
  if (!doc) reading.finally(() => place.path === "" && redrawn()).catch(() => null); // its problem is the page's then
  const entries = doc ? entriesOf(doc, all) : all.map((each) => ({ ...each, problem: null, last: {}, best: {} }));
  const list = { entries, settings: doc?.settings ?? [] };
  const settings = hasSeeds(list.settings)
    ? [el("h2", {}, "Settings"), settingsTable(list).node, spreadNote(), el("h2", {}, "Runs")]
    : "";
  const words = doc ? `${counted(all.length, "run")}: ${stateWords(entries)}` : "Reading what the runs have recorded …";
  const compared = all.length > 1 && link(address("compare"), { class: "button" }, "Compare them");
  return {
    title: "Runs",
    runs: [],
    node: [
      heading("Runs"),
      el("div", { class: "tools" }, compared, metricPicker(entries), el("span", { class: "quiet" }, words)),
      settings,
      runsTable(list).node,
    ],
    listed: redrawn,
  };
}
