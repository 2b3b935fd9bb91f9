// The page that compares runs.

import { addressWith, go, list, stepPath, wanted } from "./addresses.js";
import { curvesView } from "./curves.js";
import { loadOr } from "./documents.js";
import {
  checkbox,
  control,
  el,
  fold,
  heading,
  inLine,
  link,
  problemNode,
  quiet,
  section,
  visible,
} from "./elements.js";
import { show } from "./frame.js";
import { askedNode, askedOf, occurrenceNode, occurrencesOf, sameAsked } from "./prompt.js";
import { loadRuns, runList } from "./runs.js";
import { table } from "./tables.js";
import { counted, distinct, plain, valueText } from "./text.js";

const COMPARISONS = { curves: "curves", config: "config", prompt: "one prompt" };

export async function comparePage() {
  const given = await runList();
  const all = given.filter((each) => !each.problem);
  const broken = given.filter((each) => each.problem).map((each) => problemNode(`${each.name}: ${each.problem}`));
  if (all.length < 2) {
    const text = "Comparing takes two runs that can be read. Give `mmrl view` several folders.";
    return { title: "Compare", runs: [], node: [heading("Compare"), broken, quiet(text)] };
  }
  const chosenRuns = list(wanted("runs"))
    .map(Number)
    .filter((run) => all.some((each) => each.run === run));
  const asked = chosenRuns.length ? chosenRuns : all.map((each) => each.run);
  const tab = Object.hasOwn(COMPARISONS, wanted("tab")) ? wanted("tab") : "curves";
  const runs = await loadRuns(asked);
  const picker = el(
    "fieldset",
    { class: "runs" },
    el("legend", {}, "runs"),
    all.map((each) =>
      checkbox([runKey(asked.indexOf(each.run)), plain(each.name)], asked.includes(each.run), (on) => {
        const chosen = on
          ? [...asked, each.run].sort((one, other) => one - other)
          : asked.filter((run) => run !== each.run);
        if (chosen.length) go(addressWith({ runs: chosen.join(",") }), true);
        else show();
      }),
    ),
  );
  const tabs = el(
    "nav",
    { class: "tabs", "aria-label": "What is compared" },
    Object.entries(COMPARISONS).map(([key, title]) =>
      link(() => addressWith({ tab: key }), { "aria-current": key === tab ? "page" : null }, title),
    ),
  );
  const view = {
    curves: () => curvesView(runs),
    config: () => ({ node: differencesNode(runs) }),
    prompt: () => samePrompt(runs),
  };
  const body = await view[tab]();
  const update = async () => body.update?.(await loadRuns(asked));
  return { title: "Compare", runs: asked, node: [heading("Compare"), broken, picker, tabs, body.node], update };
}

function runKey(index) {
  return index < 0 ? "" : el("i", { class: `key s${index % 8}` });
}

function differencesNode(runs) {
  const keys = distinct(runs.flatMap(({ info }) => Object.keys(info.config ?? {})));
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

async function samePrompt(runs) {
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
  return {
    node: el(
      "div",
      {},
      el("div", { class: "tools", role: "search" }, control("prompt id", input), options, words),
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
