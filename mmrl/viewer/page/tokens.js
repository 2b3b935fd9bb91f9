// A completion's tokens, coloured by a quantity.

import { wanted } from "./addresses.js";
import { announce, choice, control, el, fold, quiet, visible } from "./elements.js";
import { lineChart } from "./lines.js";
import { countOf, isGiven, turnsOf } from "./members.js";
import { facts, table } from "./tables.js";
import { extent, known, mean, number } from "./text.js";

const QUANTITIES = {
  advantage: { title: "advantage", centre: 0 },
  sampler_logprob: { title: "log-prob of the sampler", strongIsLow: true },
  learner_logprob: { title: "log-prob of the learner", strongIsLow: true },
  reference_logprob: { title: "log-prob of the reference", strongIsLow: true },
  log_ratio: { title: "log-ratio to the reference", centre: 0 },
  entropy: { title: "entropy" },
  ratio: { title: "ratio of the last update", centre: 1 },
  gap: { title: "gap: sampler less learner", centre: 0 },
  value: { title: "value of the critic", scaledWith: ["value", "return"] },
  return: { title: "return that the critic learns", scaledWith: ["value", "return"] },
  value_error: { title: "return less value", centre: 0 },
  token_reward: { title: "reward of what ends here", centre: 0 },
};

/** Quantities that are told first of what the dataset gives and of two that are compared: advantages are equal there. */
const OF_GIVEN = ["log_ratio", "learner_logprob"];

export function titleOfQuantity(name) {
  return QUANTITIES[name].title;
}

export function quantitiesOf(member) {
  return Object.keys(QUANTITIES).filter((name) => known(member.tokens?.[name]).length);
}

/** The quantity that the address asks for, as far as one of some members has it. */
export function chosenQuantity(view, members) {
  const names = [...new Set(members.flatMap(quantitiesOf))];
  const asked = wanted("color");
  if (names.includes(asked) || asked === "none") return asked;
  const { pair, members: all } = view.details;
  const first = pair?.compared || all.every(isGiven) ? OF_GIVEN.find((each) => names.includes(each)) : null;
  return first ?? names[0] ?? "none";
}

/**
 * From a value to {tone, strength}: how far it is from the centre, or from the weak end, on the scale of the group.
 *
 * Values and returns have one scale, so that equal colours are equal numbers.
 */
export function shading(view, name) {
  const { centre, strongIsLow, scaledWith = [name] } = QUANTITIES[name];
  const values = view.details.members.flatMap((member) => scaledWith.flatMap((each) => known(member.tokens?.[each])));
  if (centre !== undefined) {
    const most = quantile(
      values.map((value) => Math.abs(value - centre)),
      0.99,
    );
    if (most < 1e-12) return { ends: [centre], of: () => ({ tone: "high", strength: 0 }) };
    const tone = (value) => (value < centre ? "low" : "high");
    return {
      ends: [centre - most, centre, centre + most],
      of: (value) => ({ tone: tone(value), strength: Math.min(Math.abs(value - centre) / most, 1) }),
    };
  }
  const least = quantile(values, 0.01);
  const most = quantile(values, 0.99);
  const span = most - least || 1;
  const share = (value) => Math.min(Math.max((value - least) / span, 0), 1);
  return {
    ends: strongIsLow ? [most, least] : [least, most],
    of: (value) => ({ tone: "plain", strength: strongIsLow ? 1 - share(value) : share(value) }),
  };
}

function quantile(values, share) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted.length ? sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)] : 0;
}

export function tokensNode(view, member) {
  const name = chosenQuantity(view, [member]);
  const shade = name === "none" ? null : shading(view, name);
  const options = [...quantitiesOf(member).map((each) => [each, QUANTITIES[each].title]), ["none", "none"]];
  const details = el("div", { class: "token-details" }, quiet("Point at a token, or go through them with ← and →."));
  const flow = tokenFlow(member, name, shade, details);
  const sentence = view.info.tokens ? quiet(visible(view.info.tokens)) : "";
  const none = options.length === 1 ? quiet("No numbers are recorded for these tokens: they were in no loss.") : "";
  return el(
    "div",
    { class: "tokens-view" },
    sentence,
    none,
    el(
      "div",
      { class: "tools" },
      control("coloured by", choice(options, name, view.recolored, { "data-color": true })),
      shade ? legend(name, shade) : "",
      member.tokens.mask?.includes(false)
        ? el(
            "span",
            { class: "legend-item" },
            el("span", { class: "token given" }, "text"),
            " not written by the policy",
          )
        : "",
    ),
    flow,
    details,
    tokenSummary(member),
    name === "none" ? "" : tokenProfile(member, name, flow),
  );
}

export function legend(name, shade) {
  const isCentred = QUANTITIES[name].centre !== undefined;
  if (shade.ends.length === 1)
    return el("span", { class: "legend" }, `each value of the group is ${number(shade.ends[0], 3)}`);
  const ends = shade.ends.map((end) => el("span", {}, number(end, 3)));
  return el(
    "span",
    {
      class: "legend",
      role: "img",
      "aria-label": `colours from ${number(shade.ends[0], 3)} to ${number(shade.ends.at(-1), 3)}`,
    },
    ends[0],
    el("span", { class: isCentred ? "ramp centred-ramp" : "ramp" }),
    isCentred ? ends[1] : "",
    isCentred ? el("span", { class: "ramp second-ramp" }) : "",
    ends.at(-1),
  );
}

function pieceOf(tokens, i) {
  return tokens.text?.[i] ?? `#${tokens.ids[i]} `;
}

const SPECIAL =
  /^\s*(<[|｜][^<>]*[|｜]>|<\/?s>|<(pad|unk|eos|bos|mask)>|<\/?(think|tool_call|tool_response|answer)>|\[(PAD|UNK|CLS|SEP|EOS|BOS)\])\s*$/i;

function isSpecial(tokens, i) {
  return tokens.special ? tokens.special[i] : SPECIAL.test(pieceOf(tokens, i));
}

/**
 * The tokens as spans; one of them at a time can be reached with Tab, the others with arrows.
 *
 * `shared` says of each whether another completion, which it is shown beside, has it too.
 */
export function tokenFlow(member, name, shade, details, { label = "Tokens", shared = null } = {}) {
  const { tokens } = member;
  const count = countOf(member);
  const turns = turnsOf(member);
  const nodes = [];
  let before = null;
  for (let i = 0; i < count; i++) {
    const turn = turns?.[i];
    if (turn !== undefined && turn !== turns[i - 1]) nodes.push(el("span", { class: "turn-mark" }, `turn ${turn + 1}`));
    const version = tokens.version?.[i] ?? null;
    if (version !== null && version !== before) nodes.push(versionMark(version));
    before = version ?? before;
    nodes.push(tokenNode(tokens, i, name, shade, shared?.[i] === false));
  }
  const flow = el("div", { class: "tokens text mono", dir: "ltr", role: "group", "aria-label": label }, nodes);
  const at = (target) => target.closest?.(".token[data-at]");
  const shown = (token) => showToken(flow, member, Number(token.dataset.at), details, shared);
  flow.addEventListener("pointerover", (event) => at(event.target) && shown(at(event.target)));
  flow.addEventListener("focusin", (event) => at(event.target) && shown(at(event.target)));
  flow.addEventListener("click", (event) => at(event.target)?.focus());
  flow.addEventListener("keydown", (event) => moveToken(flow, event, at(event.target)));
  return flow;
}

/** Where tokens of other weights begin: a turn that went on in a later step, or a turn of later weights. */
function versionMark(version) {
  const title = "the version of the weights that sampled what follows";
  return el("span", { class: "tag version-mark", title }, `v${number(version)}`);
}

function tokenNode(tokens, i, name, shade, isAlone) {
  const value = shade ? tokens[name]?.[i] : null;
  const isKnown = typeof value === "number";
  const { tone, strength } = isKnown ? shade.of(value) : { tone: "", strength: 0 };
  const classes = [
    "token",
    isKnown ? tone : shade && "unknown",
    tokens.mask?.[i] === false && "given",
    isSpecial(tokens, i) && "special",
    isAlone && "alone",
  ];
  const attributes = {
    class: classes.filter(Boolean).join(" "),
    "data-at": i,
    tabindex: i ? "-1" : "0",
    vars: isKnown ? { "--strength": strength.toFixed(3) } : {},
  };
  return el("span", attributes, tokenText(pieceOf(tokens, i)));
}

/** A token's text with its whitespace as symbols. */
function tokenText(piece) {
  if (piece === "") return el("span", { class: "space" }, "∅");
  return piece
    .split(/([ \t\n]+)/)
    .filter((part) => part !== "")
    .flatMap((part) => {
      if (!/^[ \t\n]/.test(part)) return visible(part);
      return [...part].map((each) => el("span", { class: "space" }, { " ": "·", "\t": "→\t", "\n": "↵\n" }[each]));
    });
}

function showToken(flow, member, i, details, shared) {
  const { tokens } = member;
  flow.querySelector(".token.shown")?.classList.remove("shown");
  flow.querySelector(`[data-at="${i}"]`)?.classList.add("shown");
  const turn = turnsOf(member)?.[i];
  const pairs = [
    ["token", `${i + 1} of ${countOf(member)}`],
    ["text", el("span", { class: "mono token" }, tokenText(pieceOf(tokens, i)))],
    ["id", String(tokens.ids?.[i] ?? "–")],
    ["turn", turn === undefined ? null : String(turn + 1)],
    ["weights", typeof tokens.version?.[i] === "number" ? `version ${number(tokens.version[i])}` : null],
    ["by", tokens.mask?.[i] === false ? "environment" : isGiven(member) ? "dataset" : "policy"],
    ["in the other one", shared ? (shared[i] ? "yes" : "no") : null],
    ...quantitiesOf(member).map((name) => [QUANTITIES[name].title, exact(tokens[name][i])]),
  ];
  details.replaceChildren(facts(pairs));
}

function exact(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(8))) : "–";
}

function moveToken(flow, event, token) {
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (move === undefined || !token) return;
  event.preventDefault();
  const all = [...flow.querySelectorAll(".token")];
  const from = all.indexOf(token);
  const to = all[Math.min(Math.max(Number.isFinite(move) ? from + move : move, 0), all.length - 1)];
  token.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
  announce(flow.parentElement.querySelector(".token-details").textContent);
}

function tokenSummary(member) {
  const { tokens } = member;
  const isPolicy = (_, i) => tokens.mask?.[i] !== false;
  const rows = quantitiesOf(member)
    .map((name) => ({ name, values: known(tokens[name].filter(isPolicy)) }))
    .filter(({ values }) => values.length);
  if (!rows.length) return "";
  const column = (key, title, of) => ({ key, title, isNumber: true, cell: ({ values }) => number(of(values)) });
  const columns = [
    { key: "name", title: "over the policy's tokens", cell: ({ name }) => QUANTITIES[name].title },
    column("least", "least", (values) => extent(values)[0]),
    column("mean", "mean", mean),
    column("greatest", "greatest", (values) => extent(values)[1]),
    column("sum", "sum", (values) => mean(values) * values.length),
  ];
  return fold(
    "group/token-summary",
    "sums and means",
    false,
    table({ caption: "Numbers of the tokens", columns, rows }),
  );
}

function tokenProfile(member, name, flow) {
  const points = member.tokens[name].map((value, i) => [i + 1, value]).filter(([, value]) => typeof value === "number");
  const chart = lineChart({
    label: QUANTITIES[name].title,
    height: 140,
    range: [1, Math.max(2, countOf(member))],
    unit: "token",
    series: [{ name: QUANTITIES[name].title, index: 0, points }],
    picked: (at) => flow.querySelector(`[data-at="${at - 1}"]`)?.focus(),
  });
  return fold("group/profile", `${QUANTITIES[name].title} by token`, false, chart.node);
}
