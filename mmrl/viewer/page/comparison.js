// The page that compares runs.

import { addressWith, go, list, stepPath, wanted } from "./addresses.js";
import { runLines, settingLines } from "./bands.js";
import { curvesView } from "./curves.js";
import { loadOr } from "./documents.js";
import {
  button,
  checkbox,
  control,
  el,
  fold,
  heading,
  inLine,
  link,
  problemNode,
  quiet,
  replace,
  section,
  sentence,
  visible,
} from "./elements.js";
import { redrawn, show } from "./frame.js";
import { lookOf } from "./lines.js";
import { entriesOf, hasSeeds, metricPicker, runsTable, settingsTable, spreadNote, stateWords } from "./overview.js";
import { askedNode, askedOf, occurrenceNode, occurrencesOf, sameAsked } from "./prompt.js";
import { loadRuns, overview, runList } from "./runs.js";
import { table } from "./tables.js";
import { counted, distinct, plain, valueText } from "./text.js";

const FEW_LINES = 8;
const SEEDS = ["trainer.seed", "trainer.run_dir"];
const COMPARISONS = { curves: "curves", config: "config", prompt: "one prompt" };

export async function comparePage() {
  const [given, doc] = await Promise.all([runList(), overview()]);
  const all = given.filter((each) => !each.problem);
  const entries = entriesOf(doc, given);
  const isWaiting = ({ run }) => entries[run].state === "waiting";
  const broken = given
    .filter((each) => each.problem && !isWaiting(each))
    .map((each) => problemNode(`${each.name}: ${each.problem}`));
  if (all.length < 2) {
    const text = "Comparing takes two runs that can be read. Give `mmrl view` several folders, or that of a sweep.";
    return { title: "Compare", runs: [], node: [heading("Compare"), broken, quiet(sentence(text))], listed: redrawn };
  }
  const chosenRuns = list(wanted("runs"))
    .map(Number)
    .filter((run) => all.some((each) => each.run === run));
  const asked = chosenRuns.length ? chosenRuns : all.map((each) => each.run);
  const tab = Object.hasOwn(COMPARISONS, wanted("tab")) ? wanted("tab") : "curves";
  const loaded = await loadRuns(asked);
  const bySetting = hasSeeds(doc.settings) && wanted("by") !== "run";
  const linesOf = (runs) => (bySetting ? settingLines(runs, doc.settings) : runLines(runs));
  const view = {
    curves: () => curvesView(loaded, linesOf),
    config: () => ({ node: differencesNode(linesOf(loaded), bySetting) }),
    prompt: () => samePrompt(loaded),
  };
  const body = await view[tab]();
  const compared = { all, entries, settings: doc.settings, asked, lines: linesOf(loaded), bySetting, body };
  const legend = el("div", {}, legendNode(compared));
  return {
    title: "Compare",
    runs: asked,
    node: [heading("Compare"), broken, legend, tabsNode(tab, hasSeeds(doc.settings), bySetting), body.node],
    update: async () => body.update?.(await loadRuns(asked)),
    listed: async () => {
      const [runs, next] = await Promise.all([runList(), overview()]);
      const isSame = (one, other) => JSON.stringify(one) === JSON.stringify(other);
      if (!isSame(runs, given) || !isSame(next.settings, doc.settings)) await redrawn();
      else {
        const top = legend.querySelector(".scroll").scrollTop;
        replace(legend, legendNode({ ...compared, entries: entriesOf(next, runs) }));
        legend.querySelector(".scroll").scrollTop = top;
      }
    },
  };
}

function tabsNode(tab, haveSeeds, bySetting) {
  const tabs = el(
    "nav",
    { class: "tabs", "aria-label": "What is compared" },
    Object.entries(COMPARISONS).map(([key, title]) =>
      link(() => addressWith({ tab: key }), { "aria-current": key === tab ? "page" : null }, title),
    ),
  );
  if (!haveSeeds) return tabs;
  const way = (by, title) =>
    link(() => addressWith({ by, sort: "" }), { "aria-current": bySetting === (by === "") ? "page" : null }, title);
  const ways = el("nav", { class: "tabs", "aria-label": "Lines" }, way("", "settings"), way("run", "runs"));
  return el("div", { class: "title-line" }, tabs, ways);
}

/** The table of what may be compared: which of it is, and in which colour. */
function legendNode({ all, entries, settings, asked, lines, bySetting, body }) {
  const readable = new Set(all.map(({ run }) => run));
  const lineOf = new Map(lines.flatMap((line) => line.members.map(({ run }) => [run, line])));
  const runsOf = (row) => (bySetting ? row.runs : [row.run]).filter((run) => readable.has(run));
  const indexOf = (row) => runsOf(row).map((run) => lineOf.get(run)?.index)[0] ?? -1;
  const chosen = (runs) => go(addressWith({ runs: runs.length < all.length ? runs.join(",") : "" }), true);
  const first = (row) => {
    const own = runsOf(row);
    if (!own.length) return "";
    const box = checkbox(
      runKey(indexOf(row)),
      own.some((run) => asked.includes(run)),
      (on) => {
        const others = asked.filter((run) => !own.includes(run));
        const next = on ? [...others, ...own].sort((one, other) => one - other) : others;
        if (next.length) chosen(next);
        else show();
      },
    );
    box.querySelector("input").setAttribute("aria-label", `Compare ${plain(row.name)}`);
    box.querySelector("input").dataset.key = plain(row.name);
    return box;
  };
  const lit = (row) => body.light?.(row && indexOf(row) >= 0 && lines.length > 1 ? indexOf(row) : null);
  const rowAttributes = (row) => ({
    class: indexOf(row) < 0 ? "unchosen" : null,
    on: {
      pointerenter: () => lit(row),
      pointerleave: () => lit(null),
      focusin: () => lit(row),
      focusout: () => lit(null),
    },
  });
  const made = (bySetting ? settingsTable : runsTable)({ entries, settings, first, rowAttributes });
  const whole = asked.length < all.length && button("All", () => chosen([]), {});
  const rows = made
    .rows()
    .map(runsOf)
    .filter(({ length }) => length);
  const some =
    rows.length > FEW_LINES &&
    button(
      `First ${FEW_LINES} as sorted`,
      () =>
        chosen(
          made
            .rows()
            .map(runsOf)
            .filter(({ length }) => length)
            .slice(0, FEW_LINES)
            .flat()
            .sort((one, other) => one - other),
        ),
      {},
    );
  const words = `${counted(asked.length, "run")} of ${entries.length} compared`;
  return fold(
    "compare/list",
    words,
    true,
    el(
      "div",
      { class: "tools" },
      metricPicker(entries),
      whole,
      some,
      el("span", { class: "quiet" }, stateWords(entries)),
    ),
    made.node,
    bySetting ? spreadNote() : "",
  );
}

function runKey(index) {
  return index < 0 ? "" : el("i", { class: `key ${lookOf(index)}` });
}

/** The keys whose values differ, with a column for each run, or for each setting: its runs differ in their seed alone. */
function differencesNode(lines, bySetting) {
  const runs = lines.map(({ name, index, members }) => ({ ...members[0], name, index }));
  const isShown = (key) => !bySetting || !SEEDS.includes(key);
  const keys = distinct(runs.flatMap(({ info }) => Object.keys(info.config ?? {}))).filter(isShown);
  const of = ({ info }, key) => (Object.hasOwn(info.config ?? {}, key) ? JSON.stringify(info.config[key]) : undefined);
  const rows = keys.filter((key) => new Set(runs.map((each) => of(each, key))).size > 1);
  const isShared = (key) => runs.every((each) => of(each, key) !== undefined);
  const [shared, others] = [rows.filter(isShared), rows.filter((key) => !isShared(key))];
  const columns = [
    { key: "key", title: "key", cell: (key) => el("span", { class: "mono" }, inLine(key)) },
    ...runs.map((each) => ({
      key: String(each.run),
      title: [runKey(each.index), visible(each.name)],
      class: "long",
      cell: (key) => configCell(each.info, key),
    })),
  ];
  const all = quiet(`All ${keys.length - others.length} keys that they share have the same values.`);
  const some =
    others.length &&
    fold(
      "compare/some",
      `${counted(others.length, "key")} that only some of them have`,
      !shared.length,
      table({ caption: "Keys of some runs", columns, rows: others }),
    );
  return section(
    "Differences of the configs",
    {},
    shared.length ? table({ caption: "Differences", columns, rows: shared }) : all,
    some || "",
    bySetting
      ? quiet(sentence("Runs of one setting differ in `trainer.seed` and `trainer.run_dir`, which are left out."))
      : "",
  );
}

function configCell(info, key) {
  if (!Object.hasOwn(info.config ?? {}, key)) return el("span", { class: "quiet" }, "not there");
  const origin = Object.hasOwn(info.origins ?? {}, key)
    ? el("div", { class: "mono quiet" }, inLine(info.origins[key]))
    : "";
  return [el("span", { class: "mono" }, inLine(configText(info.config[key]))), origin];
}

export function configText(value) {
  return value === null ? "null" : valueText(value);
}

async function samePrompt(given) {
  const runs = given.slice(0, FEW_LINES);
  const shared = await sharedPrompts(runs);
  const id = wanted("prompt") || shared[0] || "";
  const input = el("input", { type: "search", class: "search", value: plain(id), list: "shared-prompts" });
  input.addEventListener("change", () => go(addressWith({ prompt: input.value }), true));
  const options = el(
    "datalist",
    { id: "shared-prompts" },
    shared
      .filter((each) => plain(each) === each)
      .slice(0, 500)
      .map((each) => el("option", { value: each })),
  );
  const found = await Promise.all(runs.map((each) => (id ? occurrencesOf(each.run, id) : [])));
  const asked = found.filter(({ length }) => length).map(askedOf);
  const isOne = new Set(asked.map(sameAsked)).size === 1;
  const columns = runs.map((each, i) =>
    el(
      "section",
      { class: "side" },
      el("h2", {}, runKey(each.index), visible(each.name)),
      found[i].length && !isOne ? askedNode(each.run, askedOf(found[i])) : "",
      found[i].length
        ? [...found[i]].sort((one, other) => other.step - one.step).map((one) => occurrenceNode(each.run, one))
        : quiet("No recorded step has this prompt."),
    ),
  );
  const words = quiet(`${counted(shared.length, "prompt")} in the newest recorded steps of all of these runs.`);
  const left =
    given.length > runs.length &&
    quiet(`The first ${runs.length} of ${given.length} runs are shown: choose others in the list above.`);
  return {
    node: el(
      "div",
      {},
      el("div", { class: "tools", role: "search" }, control("prompt id", input), options, words, left),
      isOne ? askedNode(runs[found.findIndex(({ length }) => length)].run, asked[0]) : "",
      el("div", { class: "sides" }, columns),
    ),
  };
}

/** Ids of prompts that the newest records of all runs have, with one reference answer; those of evaluations first. */
async function sharedPrompts(runs) {
  const sets = await Promise.all(
    runs.map(async ({ run, info }) => {
      const evaluations = await loadOr(`run/${run}/evaluations`, { prompts: [] });
      const newest = info.steps.length
        ? await loadOr(stepPath(run, "step", info.steps.at(-1)), { groups: [] })
        : { groups: [] };
      const all = [...(evaluations.prompts ?? []), ...newest.groups];
      return new Map(all.map((each) => [each.prompt_id, JSON.stringify(each.answer)]));
    }),
  );
  return [...(sets[0] ?? [])].filter(([id, answer]) => sets.every((set) => set.get(id) === answer)).map(([id]) => id);
}
