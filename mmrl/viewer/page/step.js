// The page of a step: its bar, tools and tables.

import { address, filterQuery, go, groupAddress, note, place, stepPath, wanted } from "./addresses.js";
import { load, report } from "./documents.js";
import { arrow, button, checkbox, choice, control, el, heading, later, link, quiet, replace } from "./elements.js";
import { areGiven } from "./filters.js";
import { redrawn } from "./frame.js";
import { kindTitle, kindsOf, nearest, recordedOf } from "./runs.js";
import { drawStep } from "./step_tables.js";
import { facts } from "./tables.js";
import { distinct, known, mean, number, percent, plain } from "./text.js";

export async function newestPage(run) {
  const info = await load(`run/${run}`);
  const found = kindsOf(info)
    .map((kind) => [kind, recordedOf(run, info, kind).at(-1)])
    .find(([, step]) => step !== undefined);
  if (!found) {
    const text = "No rollouts are recorded yet: they are written when the first step is finished.";
    return { title: "Rollouts", run, runs: [run], node: [heading("Rollouts"), quiet(text)], update: redrawn };
  }
  go(address(stepPath(run, ...found)), true);
  return null;
}

export async function stepPage(run, kind, step) {
  const [info, doc] = await Promise.all([load(`run/${run}`), load(stepPath(run, kind, step))]);
  const view = { run, kind, step, doc, members: membersByGroup(doc) };
  view.body = el("div", { class: "step-body" });
  const bar = el("div", {}, stepBar(info, run, kind, step, ""));
  await drawStep(view);
  return {
    title: `${titleOf(kind, step)}`,
    run,
    runs: [run],
    node: [bar, heading(titleOf(kind, step)), stepSummary(view), stepTools(view), view.body],
    steps: () => stepTargets(run, info, kind, step, (next) => address(stepPath(run, kind, next), place.query)),
    firstGroup: () => groupAddress(view, view.order[0]),
    update: async () => stepChanged(bar, await load(`run/${run}`), run, kind, step, ""),
  };
}

export function titleOf(kind, step) {
  const [word, name] = kind.split(".");
  const of = name ? ` of ${name}` : "";
  return {
    step: `Step ${step}`,
    evaluation: `Evaluation${of} at step ${step}`,
    blank: `Blank pictures${of} at step ${step}`,
  }[word];
}

export function stepTargets(run, info, kind, step, to) {
  const steps = recordedOf(run, info, kind);
  const before = steps.filter((each) => each < step).at(-1);
  const after = steps.find((each) => each > step);
  return { before: before !== undefined && to(before), after: after !== undefined && to(after) };
}

/** Links to other steps and kinds; `rest` is what follows the step in the address. */
export function stepBar(info, run, kind, step, rest) {
  const to = (next) => address(stepPath(run, kind, next) + rest, { ...filterQuery(), follow: wanted("follow") });
  const target = (which) => stepTargets(run, info, kind, step, to)[which];
  const steps = recordedOf(run, info, kind);
  const newest = steps.at(-1);
  const kinds = kindsOf(info).filter((each) => recordedOf(run, info, each).length || each === kind);
  const kindLinks = kinds.map((each) =>
    link(
      address(stepPath(run, each, nearest(recordedOf(run, info, each), step) ?? step)),
      { "aria-current": each === kind ? "page" : null },
      kindTitle(each),
    ),
  );
  const picker = choice(
    steps.map((each) => [each, `step ${each}`]),
    step,
    (next) => {
      document.activeElement?.blur(); // keys lead on from here
      go(to(Number(next)));
    },
    { "aria-label": "Step" },
  );
  const follow =
    !report &&
    info.live &&
    kind === "step" &&
    rest === "" &&
    checkbox("follow the newest", wanted("follow") === "1", (on) => {
      note({ follow: on ? "1" : "" });
      if (on && newest !== step) go(to(newest));
    });
  const news = follow && newest > step && link(to(newest), {}, `newest: step ${newest}`);
  return el(
    "nav",
    { class: "step-bar", "aria-label": "Steps" },
    kinds.length > 1 && el("span", { class: "tabs" }, kindLinks),
    arrow(() => target("before"), "‹", "Step before (p)"),
    picker,
    arrow(() => target("after"), "›", "Next step (n)"),
    news,
    follow,
    el(
      "span",
      { class: "tabs" },
      link(
        () => address(stepPath(run, kind, step), filterQuery()),
        { "aria-current": rest === "" ? "page" : null },
        "rollouts",
      ),
      link(
        address(`${stepPath(run, kind, step)}/plots`),
        { "aria-current": rest === "/plots" ? "page" : null },
        "plots",
      ),
    ),
  );
}

export function stepChanged(bar, info, run, kind, step, rest) {
  const newest = recordedOf(run, info, kind).at(-1);
  if (wanted("follow") === "1" && newest > step) go(address(stepPath(run, kind, newest) + rest, place.query), true);
  else replace(bar, stepBar(info, run, kind, step, rest));
}

/** The rows of each group. */
export function membersByGroup(doc) {
  const found = new Map(doc.groups.map((group) => [group.group, []]));
  doc.rows.group.forEach((group, row) => found.get(group)?.push(row));
  return found;
}

function stepSummary({ doc }) {
  const { rows, groups } = doc;
  const used = sampledRows(doc);
  const of = (values, some = used) => some.map((row) => values[row]);
  const scored = used.filter((row) => rows.valid[row] !== false);
  const sampled = used.length;
  const judged = known(of(rows.right, scored));
  const share = (flags) => percent(mean(flags.map(Number)));
  const pairs = groups.map((group) => group.pair).filter(Boolean);
  const preferred = known(pairs.map((pair) => pair.preferred));
  const length = number(mean(known(of(rows.length))));
  const counts = [
    ["groups", number(groups.length)],
    ["trained on", number(groups.filter((group) => group.trained).length)],
  ];
  if (areGiven(doc)) {
    return facts([
      ...counts,
      [rows.score ? "candidates" : "demonstrations", sampled.toLocaleString("en")],
      ["length", length],
      ["pairs", pairs.length ? number(pairs.length) : null],
      ["chosen preferred", preferred.length ? percent(mean(preferred)) : null],
      ["mean margin", preferred.length ? number(mean(known(pairs.map((pair) => pair.margin)))) : null],
    ]);
  }
  return facts([
    ...counts,
    ["rejected", number(groups.filter((group) => !group.kept).length)],
    [
      "rollouts",
      `${sampled.toLocaleString("en")}${sampled < rows.group.length ? ` and ${rows.group.length - sampled} greedy` : ""}`,
    ],
    ["reward", number(mean(known(of(rows.reward, scored))))],
    ["right", judged.length ? share(judged) : null],
    ["length", length],
    ["truncated", share(of(rows.truncated))],
    ["unscored", scored.length < sampled ? number(sampled - scored.length) : null],
  ]);
}

/** The rows of rollouts that were sampled; metrics too are without greedy ones. */
export function sampledRows({ rows }) {
  return rows.group.map((_, row) => row).filter((row) => !rows.greedy[row]);
}

function stepTools(view) {
  const { doc } = view;
  const changed = (key) => (value) => {
    note({ [key]: value, page: "" });
    drawStep(view);
  };
  const pick = (key, label, options) =>
    options.length > 1 &&
    control(
      label,
      choice(
        [["", "all"], ...options.map((each) => (Array.isArray(each) ? each : [each, plain(each)]))],
        wanted(key),
        changed(key),
      ),
    );
  const bound = (key, label) => {
    const input = el("input", {
      type: "number",
      step: "any",
      value: wanted(key),
      "aria-label": label,
      placeholder: label.split(" ")[0],
    });
    input.addEventListener(
      "input",
      later(() => changed(key)(input.value), 200),
    );
    return input;
  };
  const search = el("input", {
    type: "search",
    class: "search",
    value: wanted("q"),
    placeholder: "text of completions and prompts",
  });
  search.addEventListener(
    "input",
    later(() => changed("q")(search.value), 250),
  );
  const hasGreedy = doc.rows.greedy.includes(true);
  const isJudged = doc.rows.right.some((right) => right !== null);
  const worth = doc.rows.score ? "score" : "reward";
  const hasWorth = doc.rows.score || !areGiven(doc);
  return el(
    "div",
    { class: "tools", role: "search" },
    control("search", search),
    control(
      "show",
      choice(
        [
          ["", "groups"],
          ["rollout", "rollouts"],
        ],
        wanted("by"),
        changed("by"),
      ),
    ),
    pick("state", "group", [
      ["trained", "trained on"],
      ["kept", "kept, not trained on"],
      ["dropped", "rejected"],
    ]),
    isJudged &&
      pick("right", "answer", [
        ["yes", "right"],
        ["no", "wrong"],
        ["unknown", "not judged"],
      ]),
    doc.groups.some((group) => group.pair) &&
      pick("order", "preference", [
        ["right", "right"],
        ["wrong", "wrong"],
        ["tie", "tie"],
        ["unknown", "not known"],
      ]),
    !areGiven(doc) && pick("finish", "end", [["truncated", "truncated"], ...distinct(doc.rows.finish_reason)]),
    pick("source", "source", distinct(doc.groups.map((group) => group.source))),
    hasGreedy &&
      pick("who", "who", [
        ["sampled", "sampled"],
        ["greedy", "greedy"],
      ]),
    hasWorth &&
      el(
        "fieldset",
        { class: "range" },
        el("legend", {}, worth),
        bound("rmin", `least ${worth}`),
        "–",
        bound("rmax", `most ${worth}`),
      ),
    el(
      "fieldset",
      { class: "range" },
      el("legend", {}, "length"),
      bound("lmin", "least length"),
      "–",
      bound("lmax", "most length"),
    ),
    button("20 at random", () => changed("sample")(String(Math.floor(Math.random() * 1e6)))),
    button("Clear", () => go(address(place.path, { by: wanted("by"), follow: wanted("follow") }), true)),
  );
}
