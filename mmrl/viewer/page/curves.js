// The page of a run's metrics.

import { address, addressWith, go, list, note, stepPath, wanted } from "./addresses.js";
import { runLines, seedSeries, seriesOf } from "./bands.js";
import { checkbox, control, el, fold, heading, inLine, later, link, quiet, replace, visible } from "./elements.js";
import { lineChart } from "./lines.js";
import { alarmsOf, loadRuns, marksOf, nearest, pointsOf, recordedOf, runList } from "./runs.js";
import { counted, number, plain } from "./text.js";

const FEW_RUNS = 8;
const FEW_ALARMS = 5;
const SECTIONS = [
  "eval",
  "eval_blank",
  "preference",
  "reward",
  "group",
  "advantage",
  "length",
  "policy",
  "loss",
  "critic",
  "episode",
  "mismatch",
  "data",
  "other",
  "perf",
];

function sectionOf(name) {
  const [first, ...rest] = name.split("/");
  return rest.length ? first : "other";
}

function sectionsOf(names) {
  const found = new Map();
  for (const name of names) found.set(sectionOf(name), [...(found.get(sectionOf(name)) ?? []), name]);
  const rank = (section) => (SECTIONS.includes(section) ? SECTIONS.indexOf(section) : SECTIONS.length - 2.5);
  return [...found].sort(([one], [other]) => rank(one) - rank(other) || one.localeCompare(other));
}

function matchesAny(name, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return !words.length || words.some((word) => name.toLowerCase().includes(word));
}

export async function curvesPage(run) {
  const others = list(wanted("with")).map(Number);
  const all = (await runList()).filter((each) => each.run === run || !each.problem);
  const indices = [run, ...others.filter((each) => each !== run && all.some((known) => known.run === each))];
  const view = curvesView(await loadRuns(indices));
  const boxes = all
    .filter((each) => each.run !== run)
    .map((each) =>
      checkbox(plain(each.name), others.includes(each.run), (on) => {
        const chosen = on ? [...others, each.run] : others.filter((other) => other !== each.run);
        go(addressWith({ with: chosen.join(",") }), true);
      }),
    );
  const words = "over each other with";
  const picker =
    boxes.length > FEW_RUNS
      ? fold("curves/with", `${words} …`, others.length > 0, el("div", { class: "runs many" }, boxes))
      : boxes.length > 0 && el("fieldset", { class: "runs" }, el("legend", {}, words), boxes);
  return {
    title: "Curves",
    run,
    runs: indices,
    node: [heading("Curves"), picker, view.node],
    update: async () => view.update(await loadRuns(indices)),
  };
}

/**
 * Every metric of some runs: a toolbar, the alarms, and a chart for each metric by section.
 *
 * `linesOf` makes the lines of charts of the runs, by default one of each. `light(index)` of the view makes other lines
 * pale.
 */
export function curvesView(runs, linesOf = runLines) {
  const view = { runs, linesOf, lines: linesOf(runs), cards: new Map() };
  view.alarms = el("div");
  view.body = el("div", { class: "curves" });
  view.node = el("div", {}, view.alarms, curveTools(view), view.body);
  view.light = (index) => view.cards.forEach((card) => card.light(index));
  view.update = (next) => {
    view.runs = next;
    view.lines = linesOf(next);
    if (shapeOf(view, namesOf(view)) === view.drawn) {
      for (const [name, card] of view.cards) card.update(curveSpec(view, name));
    } else drawCurves(view);
    view.alarms.replaceChildren(alarmList(view.runs));
  };
  drawCurves(view);
  view.alarms.replaceChildren(alarmList(runs));
  return view;
}

function curveTools(view) {
  const again = () => view.cards.forEach((card, name) => card.update(curveSpec(view, name)));
  const filter = el("input", { type: "search", class: "search", value: wanted("q"), placeholder: "reward eval/acc …" });
  filter.addEventListener(
    "input",
    later(() => {
      note({ q: filter.value });
      drawCurves(view);
    }, 120),
  );
  const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: wanted("smooth", "0") });
  const shown = el("output", {}, Number(wanted("smooth", "0")).toFixed(2));
  smooth.addEventListener("input", () => {
    shown.textContent = Number(smooth.value).toFixed(2);
    note({ smooth: Number(smooth.value) ? smooth.value : "" });
    again();
  });
  const log = checkbox("log scale", wanted("log") === "1", (on) => {
    note({ log: on ? "1" : "" });
    again();
  });
  const seeds =
    view.lines.some(({ members }) => members.length > 1) &&
    checkbox("single seeds", wanted("seeds") === "1", (on) => {
      note({ seeds: on ? "1" : "" });
      again();
    });
  const chosen = wanted("names") && link(() => addressWith({ names: "" }), { class: "button" }, "All curves");
  return el(
    "div",
    { class: "tools", role: "search" },
    control("metrics", filter),
    control("smoothing", smooth),
    shown,
    log,
    seeds,
    chosen,
  );
}

function namesOf(view) {
  const all = new Set(view.runs.flatMap(({ metrics }) => Object.keys(metrics.curves)));
  const names = list(wanted("names"));
  return names.length
    ? names.filter((name) => all.has(name))
    : [...all].filter((name) => matchesAny(name, wanted("q")));
}

/** A text that changes when another curve is there, or one moves to another place. */
function shapeOf(view, names) {
  return JSON.stringify(names.map((name) => [name, isFlat(view, name)]));
}

function drawCurves(view) {
  const names = namesOf(view);
  const isChosen = wanted("names") !== "";
  view.drawn = shapeOf(view, names);
  view.cards = new Map(names.map((name) => [name, lineChart(curveSpec(view, name))]));
  if (!names.length) {
    const some = view.runs.some(({ metrics }) => Object.keys(metrics.curves).length);
    view.body.replaceChildren(
      quiet(some ? "No metric has such a name." : "The run has no metrics yet: its first step is not finished."),
    );
    return;
  }
  const cards = (some) =>
    el(
      "div",
      { class: isChosen ? "cards large" : "cards" },
      some.map((name) => curveCard(view, name)),
    );
  if (isChosen) replace(view.body, cards(names));
  else
    replace(
      view.body,
      sectionsOf(names).map(([title, some]) => curveSection(view, title, some, cards)),
    );
}

/** The curves of a section; those that never change come last, folded. */
function curveSection(view, title, names, cards) {
  const flat = names.filter((name) => isFlat(view, name));
  const others = names.filter((name) => !flat.includes(name));
  const isOpen = !others.length && names.length < 4;
  const more = flat.length
    ? fold(`curves/${title}/flat`, [`${flat.length} that never changed`], isOpen, cards(flat))
    : "";
  const count = el("span", { class: "quiet" }, ` ${names.length}`);
  const section = fold(`curves/${title}`, [visible(title), count], true, others.length ? cards(others) : "", more);
  if (names.length === 1) section.classList.add("single");
  return section;
}

/** True if all runs have one and the same value at several steps. */
function isFlat({ runs }, name) {
  let count = 0;
  let first = null;
  for (const { metrics } of runs) {
    for (const value of Object.hasOwn(metrics.curves, name) ? metrics.curves[name] : []) {
      if (value === null) continue;
      if (count === 0) first = value;
      else if (value !== first) return false;
      count += 1;
    }
  }
  return count > 2;
}

function curveCard(view, name) {
  const title = link(() => addressWith({ names: name, q: "" }), { title: "this curve alone, larger" }, visible(name));
  return el("article", { class: "card", "data-metric": plain(name) }, el("h3", {}, title), view.cards.get(name).node);
}

function curveSpec(view, name) {
  const { runs, lines } = view;
  // Steps of the curve's own kind; of several runs a click could mean any.
  const [section, set] = name.split("/");
  const word = { eval: "evaluation", eval_blank: "blank" }[section] ?? "step";
  const kind = runs[0].info.named?.[`${word}.${set}`] ? `${word}.${set}` : word;
  const steps = runs.length > 1 ? [] : recordedOf(runs[0].run, runs[0].info, kind);
  const last = Math.max(1, ...runs.map(({ metrics }) => metrics.steps.at(-1) ?? 0));
  const first = Math.min(...runs.map(({ metrics }) => metrics.steps[0] ?? 0));
  const chosen = list(wanted("names"));
  return {
    label: plain(name),
    height: chosen.length === 1 ? 380 : chosen.length ? 240 : 150,
    log: wanted("log") === "1",
    smooth: Number(wanted("smooth", "0")) || 0,
    range: [Math.min(first, last - 1), last],
    get series() {
      const bands = lines.filter(({ members }) => members.length > 1 && wanted("seeds") === "1");
      return [...bands.flatMap((line) => seedSeries(line, name)), ...lines.map((line) => seriesOf(line, name))];
    },
    get marks() {
      if (runs.length > FEW_RUNS) return [];
      const shown = runs.filter(({ metrics }) => pointsOf(metrics, name).length);
      return shown.flatMap((each) => marksOf(each, runs.length > 1));
    },
    pickText: steps.length ? "click: rollouts" : "",
    picked: (step) => {
      const found = nearest(steps, step);
      if (found !== null) go(address(stepPath(runs[0].run, kind, found)));
    },
  };
}

function alarmList(runs) {
  const found = runs.flatMap((each) => alarmsOf(each.events).map((event) => ({ each, event })));
  if (!found.length) return "";
  const items = found
    .slice(-20)
    .reverse()
    .map(({ each, event }) => {
      const step = typeof event.step === "number" ? nearest(recordedOf(each.run, each.info, "step"), event.step) : null;
      const where =
        step === null
          ? `step ${number(event.step)}`
          : link(address(`run/${each.run}/step/${step}`), {}, `step ${number(event.step)}`);
      const who = runs.length > 1 ? [visible(each.name), ", "] : [];
      return el(
        "li",
        {},
        el("b", {}, who, where),
        " ",
        el("span", { class: "tag" }, visible(event.monitor ?? "alarm")),
        " ",
        inLine(event.message),
      );
    });
  const more =
    found.length > items.length ? quiet(`and ${found.length - items.length} earlier ones, in the events`) : "";
  const title = `▼ ${counted(found.length, "alarm")}`;
  const body = [el("ul", {}, items), more];
  const isLong = runs.length > 1 && found.length > FEW_ALARMS;
  const shown = isLong ? fold("curves/alarms", el("h2", {}, title), false, body) : [el("h2", {}, title), body];
  return el("aside", { class: "alarms", "aria-label": "Alarms" }, shown);
}
