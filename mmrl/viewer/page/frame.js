// The frame around every page: what is drawn, where, and what is told of the run.

import { address, arrive, go, place } from "./addresses.js";
import { sights, sizes } from "./charts.js";
import { Problem, load, report } from "./documents.js";
import {
  announce,
  button,
  choice,
  el,
  fold,
  heading,
  link,
  main,
  problemNode,
  quiet,
  replace,
  sentence,
  visible,
} from "./elements.js";
import { LIVE, runList } from "./runs.js";
import { counted, number, plain } from "./text.js";

export let page = { title: "", runs: [] };
let asked = 0;
let drawnPath = null;

let pages = [];

/** Draw the window's address, now and when it changes; `table` has patterns of paths and the functions of pages. */
export function begin(table) {
  pages = table;
  window.addEventListener("hashchange", () => show());
  document.getElementById("skip").addEventListener("click", () => main.focus());
  show();
}

async function pageOf(path) {
  for (const [pattern, made] of pages) {
    const match = path.match(pattern);
    if (match) return made(...match.slice(1).map((part) => (/^\d+$/.test(part) ? Number(part) : part)));
  }
  throw new Problem(`There is no page at this address: ${path}`);
}

/** Draw the page of the address; `keepsPlace` leaves the scrolling as it is. */
export async function show(keepsPlace = false) {
  const ticket = ++asked;
  arrive();
  const slow = setTimeout(() => main.setAttribute("aria-busy", "true"), 150);
  let made;
  try {
    made = await pageOf(place.path);
  } catch (error) {
    made = problemPage(error);
  }
  clearTimeout(slow);
  if (ticket !== asked || made === null) return;
  await mount(made, keepsPlace || place.path === drawnPath);
}

/** Draw the page anew where it is, unless somebody is typing into it. */
export async function redrawn() {
  if (!isTyping(document.activeElement)) await show(true);
}

export function isTyping(node) {
  return Boolean(node?.closest?.("input:not([type=checkbox]):not([type=range]), textarea, select"));
}

export function problemPage(error) {
  const isKnown = error instanceof Problem;
  const run = place.path.match(/^run\/(\d+)/);
  if (!isKnown) console.error(error);
  const text = isKnown
    ? error.message
    : `This page could not be drawn (${plain(error.message)}). The rest of the run can be looked at; please report it with the address.`;
  return {
    title: "Problem",
    run: run ? Number(run[1]) : undefined,
    runs: [],
    node: [heading("This cannot be shown"), problemNode(text, isKnown && error.mayPass ? () => show() : null)],
    isProblem: true,
  };
}

async function mount(made, keepsPlace) {
  page = made;
  const top = window.scrollY;
  const path = place.path;
  sizes.disconnect();
  sights.disconnect();
  const scrolled = keepsPlace ? scrolledRegions() : new Map();
  replace(main, made.node);
  for (const region of main.querySelectorAll(".scroll")) region.scrollTop = scrolled.get(region.ariaLabel) ?? 0;
  main.removeAttribute("aria-busy");
  main.dataset.page = path;
  main.dataset.drawn = String(asked);
  for (const box of main.querySelectorAll(".chart")) {
    sizes.observe(box);
    sights.observe(box);
  }
  window.scrollTo(0, keepsPlace ? top : 0);
  if (drawnPath !== null && path !== drawnPath) announce(made.title);
  drawnPath = path;
  await drawBar();
}

function scrolledRegions() {
  return new Map([...main.querySelectorAll(".scroll")].map((region) => [region.ariaLabel, region.scrollTop]));
}

export async function drawBar() {
  const all = await runList().catch(() => []);
  const run = page.run ?? page.runs[0];
  const info = run === undefined ? null : await load(`run/${run}`).catch(() => null);
  document.title = [page.title, info && place.path !== "compare" && plain(info.name), "mmrl"]
    .filter(Boolean)
    .join(" · ");
  const at = (words) => (words.some((word) => new RegExp(`^run/\\d+/${word}`).test(place.path)) ? "page" : null);
  const to = (name, title, ...words) =>
    link(address(`run/${run}/${name}`), { "aria-current": at([name, ...words]) }, title);
  const picker =
    all.length > 1 && run !== undefined && place.path !== "compare"
      ? choice(
          all.map((each) => [each.run, plain(each.name)]),
          run,
          (next) => go(address(place.path.replace(/^run\/\d+.*/, (path) => sameOfRun(path, next)))),
          { "aria-label": "Run" },
        )
      : info && place.path !== "compare"
        ? el("span", { class: "run-name" }, visible(info.name))
        : "";
  const links =
    run === undefined || place.path === "compare"
      ? []
      : [
          to("curves", "Curves"),
          to("rollouts", "Rollouts", "step", "evaluation/", "evaluation\\.", "blank", "prompt"),
          to("evaluations", "Evaluations"),
          to("about", "About"),
        ];
  if (all.length > 1)
    links.push(
      link("#/", { "aria-current": place.path === "" ? "page" : null }, "Runs"),
      link(address("compare"), { "aria-current": place.path === "compare" ? "page" : null }, "Compare"),
    );
  replace(
    document.getElementById("bar"),
    link("#/", { class: "brand" }, "mmrl"),
    picker,
    el("nav", { "aria-label": "Pages" }, links),
    info?.live ? el("span", { class: "live" }, `${LIVE}, step ${number(info.last_step ?? 0)}`) : "",
    button("?", openHelp, { class: "help-button", "aria-label": "Keys and help" }),
  );
  drawNotices(info);
}

/** The same kind of page of another run. */
function sameOfRun(path, run) {
  const kind = path.match(/^run\/\d+\/(curves|evaluations|about)/)?.[1] ?? "rollouts";
  return `run/${run}/${kind}`;
}

export let lostAt = null;

/** Draw the bar and the notices with the time since which the server has not answered; null if it does. */
export async function drawLost(since) {
  lostAt = since;
  await drawBar();
}

function drawNotices(info) {
  const lost =
    lostAt &&
    problemNode(
      `The viewer's server has not answered since ${lostAt.toLocaleTimeString()}: what you see is as old. It is asked again every few seconds.`,
    );
  const problem = info?.problem && !page.isProblem && problemNode(info.problem);
  const left = report?.left_out ?? [];
  const about =
    report &&
    fold(
      "report",
      [
        `A report, made ${plain(report.made ?? "")}.`,
        left.length ? ` ${counted(left.length, "note")} on what it leaves out.` : "",
      ],
      false,
      el(
        "ul",
        {},
        left.map((each) => el("li", {}, visible(each))),
      ),
      quiet(sentence("`mmrl view RUN` shows the whole run.")),
    );
  const nodes = [lost, problem, about].filter(Boolean);
  const box = document.getElementById("notices");
  const texts = nodes.map((node) => node.textContent).join("\n");
  if (box.dataset.texts !== texts) box.replaceChildren(...nodes);
  box.dataset.texts = texts;
}

export function openHelp() {
  const help = document.getElementById("help");
  if (!help.open) help.showModal();
}
