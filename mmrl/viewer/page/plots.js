// The page of a step's plots.

import { address, go, groupAddress, stepPath } from "./addresses.js";
import { binned, histogram, scatter } from "./charts.js";
import { load } from "./documents.js";
import { el, heading, quiet } from "./elements.js";
import { memberKey } from "./members.js";
import { membersByGroup, sampledRows, stepBar, stepChanged, stepTargets, titleOf } from "./step.js";
import { correlation, counted, known, mean, number, percent } from "./text.js";

export async function plotsPage(run, kind, step) {
  const [info, doc] = await Promise.all([load(`run/${run}`), load(stepPath(run, kind, step))]);
  const { rows } = doc;
  const used = sampledRows(doc).filter((row) => rows.valid[row] !== false);
  const both = used.filter((row) => typeof rows.reward[row] === "number" && typeof rows.length[row] === "number");
  const bar = el("div", {}, stepBar(info, run, kind, step, "/plots"));
  const view = { run, kind, step, doc };
  const pairs = pairsOf(doc);
  const plots = both.length
    ? stepPlots(view, both)
    : pairs.length
      ? pairPlots(view, pairs)
      : quiet("No sampled rollout has a reward and a length, and no pair of candidates has a margin.");
  return {
    title: `Plots of ${titleOf(kind, step).toLowerCase()}`,
    run,
    runs: [run],
    node: [bar, heading(`Plots of ${titleOf(kind, step).toLowerCase()}`), plots],
    steps: () => stepTargets(run, info, kind, step, (next) => address(`${stepPath(run, kind, next)}/plots`)),
    up: address(stepPath(run, kind, step)),
    update: async () => stepChanged(bar, await load(`run/${run}`), run, kind, step, "/plots"),
  };
}

function stepPlots(view, used) {
  const { rows } = view.doc;
  const picked = ({ row }) => go(groupAddress(view, rows.group[row], { member: memberKey(rows.index[row], false) }));
  const points = used.map((row) => ({
    x: rows.length[row],
    y: rows.reward[row],
    row,
    kind: rows.truncated[row] ? "cut" : "",
  }));
  const within = withinGroups(view.doc, used);
  const whole = correlation(
    points.map(({ x }) => x),
    points.map(({ y }) => y),
  );
  const middle = mean(within.values);
  const sentence = within.values.length
    ? `Within groups, reward and length have a mean correlation of ${number(middle, 3)} over ${counted(within.values.length, "group")}; ${within.left} more have equal rewards or lengths and no correlation. Over all rollouts it is ${number(whole, 3)}.`
    : `No group has both different rewards and different lengths, so there is no correlation within groups. Over all rollouts it is ${number(whole, 3)}.`;
  const stds = known(view.doc.groups.map((group) => group.reward_std));
  return el(
    "div",
    { class: "plots" },
    scatter({ title: "Reward against length", xTitle: "tokens", yTitle: "reward", points, picked }),
    el(
      "p",
      { class: "wide" },
      sentence,
      points.some(({ kind }) => kind) ? " Truncated rollouts are drawn as rings." : "",
    ),
    histogram({ title: "Rewards", bins: binned(points.map(({ y }) => y)), unit: "rollout" }),
    histogram({ title: "Lengths in tokens", bins: binned(points.map(({ x }) => x)), unit: "rollout" }),
    within.values.length
      ? histogram({
          title: "Correlation of reward and length within each group",
          bins: binned(within.values, [-1, 1]),
          unit: "group",
        })
      : "",
    stds.length
      ? histogram({ title: "Standard deviation of rewards within each group", bins: binned(stds), unit: "group" })
      : "",
  );
}

/** Pairs of candidates with a margin: the group, the margin, and by how many tokens the chosen one is longer. */
function pairsOf(doc) {
  const { rows } = doc;
  const members = membersByGroup(doc);
  return doc.groups
    .filter(({ pair }) => typeof pair?.margin === "number")
    .map(({ group, pair }) => {
      const [chosen, rejected] = [pair.chosen, pair.rejected].map((place) => rows.length[members.get(group)[place]]);
      return { group, margin: pair.margin, longer: chosen - rejected };
    });
}

/** The margins of pairs, and whether they go with length: a policy that only learns to prefer long answers shows here. */
function pairPlots(view, pairs) {
  const longer = pairs.map((pair) => pair.longer);
  const margins = pairs.map((pair) => pair.margin);
  const share = longer.filter((tokens) => tokens > 0).length / longer.length;
  const together = correlation(longer, margins);
  const points = pairs.map((pair) => ({ x: pair.longer, y: pair.margin, group: pair.group, kind: "" }));
  return el(
    "div",
    { class: "plots" },
    scatter({
      title: "Margin against the difference of lengths",
      xTitle: "tokens of the chosen answer, less those of the rejected one",
      yTitle: "margin",
      points,
      picked: ({ group }) => go(groupAddress(view, group)),
      unit: "pair",
    }),
    el(
      "p",
      { class: "wide" },
      `The chosen answer is longer in ${percent(share)} of ${counted(pairs.length, "pair")}. `,
      together === null
        ? "Lengths or margins are all equal, so they have no correlation."
        : `Margins and differences of lengths have a correlation of ${number(together, 3)}: near 1 the policy prefers what is longer.`,
    ),
    histogram({ title: "Margins", bins: binned(margins), unit: "pair" }),
    together === null ? "" : histogram({ title: "Differences of lengths in tokens", bins: binned(longer), unit: "pair" }),
  );
}

function withinGroups({ rows }, used) {
  const groups = new Map();
  for (const row of used) groups.set(rows.group[row], [...(groups.get(rows.group[row]) ?? []), row]);
  const all = [...groups.values()].map((some) =>
    correlation(
      some.map((row) => rows.length[row]),
      some.map((row) => rows.reward[row]),
    ),
  );
  const values = all.filter((value) => value !== null);
  return { values, left: all.length - values.length };
}
