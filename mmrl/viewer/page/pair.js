// Two completions of a group side by side: scores, log-probs, and the tokens in which they differ.

import { note, wanted } from "./addresses.js";
import { inCommon } from "./differences.js";
import { checkbox, choice, control, el, fold, quiet, replace, section, visible } from "./elements.js";
import { countOf, isGiven, keyOf, lengthOf, memberName, preferenceTag, worthOf } from "./members.js";
import { table } from "./tables.js";
import { capitalized, counted, known, number } from "./text.js";
import { chosenQuantity, legend, quantitiesOf, shading, titleOfQuantity, tokenFlow } from "./tokens.js";

const MEASURES = {
  log_ratio: "log-ratio to the reference",
  per_token: "log-prob per token",
  value: "score by the reward model",
};
const EXPLAINED = {
  log_ratio:
    "The log-ratio of an answer is the sum over its tokens of the policy's log-prob less the reference's: above 0 the " +
    "policy makes it more likely than the reference does. The margin is the difference of the two.",
  per_token:
    "The run records no reference for these. The margin is the difference of the policy's mean log-probs per token.",
  value:
    "The reward model reads the whole conversation, and its score stands after the last token; the record has it as it " +
    "was before the step's update. The margin is the difference of the two, the log-odds that the first is better.",
};

/** The section of a group's pair; a fold where the loss was not of two. Empty for a group of one. */
export function pairSection(view) {
  const { members, pair } = view.details;
  view.pair = el("div", { class: "pair" });
  if (members.length < 2) return "";
  if (pair?.compared) {
    drawPair(view);
    const [better, worse] = rolesOf(view);
    return section(`${capitalized(better)} and ${worse}`, {}, view.pair);
  }
  const node = fold("group/pair", "two completions side by side", false, view.pair);
  view.isFolded = () => !node.open;
  node.addEventListener("toggle", () => redrawPair(view));
  redrawPair(view);
  return node;
}

/** Draw the pair anew where it is shown. */
export function redrawPair(view) {
  if (view.details.members.length > 1 && !view.isFolded?.()) drawPair(view);
}

function drawPair(view) {
  const sides = sidesOf(view);
  const name = chosenQuantity(view, sides);
  const shade = name === "none" ? null : shading(view, name);
  const common = inCommon(...sides.map(({ tokens }) => tokens?.ids ?? []));
  replace(
    view.pair,
    verdict(view, sides, [...common.one, ...common.other].every(Boolean)),
    view.details.members.length > 2 ? pickers(view, sides) : "",
    pairTools(view, sides, name, shade),
    el(
      "div",
      { class: "sides" },
      [common.one, common.other].map((shared, i) => sideNode(view, sides, i, { name, shade, shared })),
    ),
    common.isWhole ? "" : quiet("What lies between their equal beginnings and ends is too long to be compared."),
    numbersTable(view, sides),
  );
}

function rolesOf({ details }) {
  return details.members.every(isGiven) ? ["chosen", "rejected"] : ["best", "worst"];
}

/** The two members that the address asks for, else the best and the worst, else the first two. */
function sidesOf({ details }) {
  const { members, pair } = details;
  const usual = pair ? [members[pair.chosen], members[pair.rejected]] : members;
  return ["left", "right"].map((key, i) => members.find((each) => keyOf(each) === wanted(key)) ?? usual[i]);
}

/** True if the sides are the best and the worst of the group, in this order. */
function arePair({ details }, sides) {
  const { members, pair } = details;
  return Boolean(pair) && sides[0] === members[pair.chosen] && sides[1] === members[pair.rejected];
}

function sideName(view, sides, i) {
  const name = memberName(sides[i]);
  return arePair(view, sides) ? `${rolesOf(view)[i]}: ${name}` : name;
}

/** Which of the two the policy prefers, and by how much; or why that is not known. */
function verdict(view, sides, areEqual) {
  const found = sides.map(({ likelihood }) => likelihood ?? {});
  const has = (key) => found.some((each) => known([each[key]]).length);
  const measure = has("value") ? "value" : has("reference") ? "log_ratio" : "per_token";
  const judge = measure === "value" ? "reward model" : "policy";
  const [left, right] = found.map((each) => each[measure]);
  if (known([left, right]).length < 2) return quiet(whyUnknown(view, found));
  const margin = left - right;
  const areThePair = arePair(view, sides);
  const names = areThePair ? rolesOf(view) : sides.map(memberName);
  const better = margin > 0 ? names[0] : names[1];
  const preferred = margin === 0 ? "neither" : areThePair ? `the ${better} one` : better;
  const order = areThePair ? preferenceTag(0.5 * (1 + Math.sign(margin)), `the ${judge} prefers ${preferred}`) : "";
  const less = measure === "log_ratio" ? lessLikely(names, left, right) : "";
  const remarks = [less, whyTied(measure, margin, areEqual)].filter(Boolean).join(" ");
  return el(
    "div",
    { class: "verdict" },
    el(
      "p",
      {},
      order || `The ${judge} prefers ${preferred}.`,
      ` ${capitalized(MEASURES[measure])}: ${names[0]} ${number(left)}, ${names[1]} ${number(right)}, margin `,
      el("b", {}, number(margin)),
    ),
    remarks && quiet(remarks),
    fold("group/pair/explained", "what these numbers are", false, quiet(EXPLAINED[measure])),
  );
}

function lessLikely(names, left, right) {
  if (left < 0 && right < 0) return "Both have become less likely than under the reference.";
  return left < 0 ? `${capitalized(names[0])} has become less likely than under the reference.` : "";
}

function whyTied(measure, margin, areEqual) {
  if (areEqual) return "Both have the same tokens, so there is nothing to prefer.";
  const isStart = margin === 0 && measure === "log_ratio";
  return isStart ? "Before the first update policy and reference are equal, and every pair is a tie." : "";
}

function whyUnknown({ kind }, found) {
  if (kind !== "step" && found.every((each) => !known([each.policy]).length)) {
    return "No log-probs are recorded of this evaluation, so which of the two the policy prefers is not known here.";
  }
  return "Log-probs are recorded of what was in a loss only, so which of these two the policy prefers is not known.";
}

function pickers(view, sides) {
  const options = view.details.members.map((each) => [keyOf(each), memberName(each)]);
  const picked = (key) => (value) => {
    note({ [key]: value });
    drawPair(view);
  };
  return el(
    "div",
    { class: "tools" },
    ["left", "right"].map((key, i) => control(key, choice(options, keyOf(sides[i]), picked(key), { "data-key": key }))),
  );
}

/** The numbers of both, and their differences. */
function numbersTable(view, sides) {
  const beta = view.details.pair?.compared ? Number(view.info.config?.["algorithm.beta"]) : 0;
  const of = (key) => sides.map(({ likelihood }) => likelihood?.[key]);
  const times = (values) => values.map((value) => (typeof value === "number" ? beta * value : value));
  const rows = [
    sides.some(({ score }) => score !== undefined)
      ? ["score", sides.map(({ score }) => score)]
      : ["reward", sides.map(({ reward }) => reward)],
    [MEASURES.value, of("value")],
    ["tokens", sides.map(lengthOf)],
    ["log-prob of the policy", of("policy")],
    ["log-prob of the reference", of("reference")],
    [MEASURES.log_ratio, of("log_ratio")],
    beta > 0 && [`× beta ${number(beta)}: implicit reward`, times(of("log_ratio"))],
    [MEASURES.per_token, of("per_token")],
  ].filter((row) => row && known(row[1]).length);
  const cell = (i) => ({
    key: String(i),
    title: sideName(view, sides, i),
    isNumber: true,
    cell: ([, values]) => number(values[i]),
  });
  const difference = ([, [left, right]]) =>
    known([left, right]).length === 2 ? `${left > right ? "+" : ""}${number(left - right)}` : "–";
  const columns = [
    { key: "name", title: "whole completions", cell: ([title]) => title },
    cell(0),
    cell(1),
    { key: "difference", title: "difference", isNumber: true, cell: difference },
  ];
  return el("div", { class: "list numbers" }, table({ caption: "Numbers of both completions", columns, rows }));
}

function pairTools(view, sides, name, shade) {
  const names = [...new Set(sides.flatMap(quantitiesOf))];
  const options = [...names.map((each) => [each, titleOfQuantity(each)]), ["none", "none"]];
  const marks = checkbox("underline what the other one lacks", wanted("marks") !== "0", (on) => {
    note({ marks: on ? "" : "0" });
    drawPair(view);
  });
  return el(
    "div",
    { class: "tools" },
    control("coloured by", choice(options, name, view.recolored, { "data-color": true })),
    shade ? legend(name, shade) : "",
    marks,
  );
}

function sideNode(view, sides, i, { name, shade, shared }) {
  const member = sides[i];
  const title = sideName(view, sides, i);
  const count = countOf(member) ?? 0;
  const details = el("div", { class: "token-details" }, quiet("Point at a token, or go through them with ← and →."));
  const marked = wanted("marks") === "0" ? null : shared;
  const flow = count
    ? tokenFlow(member, name, shade, details, { label: `Tokens, ${title}`, shared: marked })
    : quiet("It has no tokens.");
  const lacking = shared.filter((isShared) => !isShared).length;
  const words = lacking
    ? `${lacking} of ${counted(count, "token")} ${lacking === 1 ? "is" : "are"} not in the other one.`
    : `The other one has all of its ${counted(count, "token")}.`;
  return el(
    "article",
    { class: "side", "aria-label": title, "data-member": keyOf(member) },
    el("h3", {}, title, " ", el("span", { class: "tag" }, worthOf(member))),
    flow,
    quiet(words),
    details,
    member.failure ? el("p", { class: "problem" }, "Failed: ", visible(member.failure)) : "",
  );
}
