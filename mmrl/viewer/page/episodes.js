// An episode's turns, calls and observations.

import { el, fold, inLine, quiet, textBlock, visible } from "./elements.js";
import { picture } from "./images.js";
import { branchOf, turnsOf } from "./members.js";
import { facts } from "./tables.js";
import { counted, known, mean, number } from "./text.js";

export function episodeNode(view, member) {
  const total = known(member.turn_rewards ?? []);
  const summary = facts([
    ["turns", number(member.episode.length)],
    ["end", inLine(member.finish_reason)],
    ["goes on", member.branch ? branchOf(member) : null],
    ["sum of rewards", total.length ? number(mean(total) * total.length) : null],
    ...Object.entries(member.components ?? {}).map(([name, value]) => [inLine(name), number(value)]),
  ]);
  return el(
    "div",
    { class: "episode-view" },
    summary,
    el(
      "ol",
      { class: "episode" },
      member.episode.map((turn, i) => turnNode(view, member, turn, i)),
    ),
  );
}

function turnNode(view, member, turn, i) {
  const counts = turnTokens(member, i);
  const reward = member.turn_rewards?.[i] ?? turn.reward;
  const head = el(
    "div",
    { class: "turn-head" },
    el("h3", {}, `Turn ${i + 1}`),
    counts ? el("span", {}, `${counted(counts.policy, "token")} of the policy, ${counts.given} inserted`) : "",
    member.branch && i < member.branch.turn ? el("span", { class: "tag" }, "shared") : "",
    turn.finish_reason === "length" ? el("span", { class: "tag cut" }, "cut") : "",
    typeof turn.tokens_left === "number" ? el("span", { class: "quiet" }, `${turn.tokens_left} left`) : "",
    el("span", { class: reward ? "tag reward" : "quiet" }, `reward ${number(reward ?? null)}`),
    turn.done ? el("span", { class: "tag" }, "done") : "",
  );
  const calls = (turn.calls ?? []).map(callNode);
  return el(
    "li",
    { class: "turn" },
    head,
    el(
      "div",
      { class: "exchange" },
      el(
        "div",
        { class: "bubble policy" },
        el("h4", {}, "policy"),
        textBlock(turn.text, { class: "text mono" }),
        calls,
      ),
      observationNode(view, turn, i),
    ),
  );
}

function callNode(call) {
  const given = call.arguments === null || call.arguments === undefined ? "" : JSON.stringify(call.arguments, null, 1);
  return el(
    "div",
    { class: call.error ? "call failed" : "call" },
    el("b", {}, "calls ", visible(call.name ?? "?")),
    given ? textBlock(given, { class: "text mono" }) : "",
    call.error ? el("p", { class: "problem" }, visible(call.error)) : "",
  );
}

function observationNode(view, turn, i) {
  const info = Object.keys(turn.info ?? {}).length
    ? fold(`turn/${i}/info`, "info", false, textBlock(JSON.stringify(turn.info, null, 1), { class: "text mono" }))
    : "";
  if (turn.content === null || turn.content === undefined)
    return el("div", { class: "bubble given" }, quiet("No answer of the environment: the episode ended here."), info);
  const parts = turn.content.map((part) =>
    part.image
      ? picture(view.run, part.image, { name: "observed image", side: 168 })
      : textBlock(part.text, { class: "text mono" }),
  );
  const none = parts.length ? "" : quiet("An answer without content.");
  return el("div", { class: "bubble given" }, el("h4", {}, visible(turn.role ?? "environment")), parts, none, info);
}

function turnTokens(member, turn) {
  const turns = turnsOf(member);
  if (!turns) return null;
  const own = member.tokens.mask.filter((_, i) => turns[i] === turn);
  return { policy: own.filter(Boolean).length, given: own.filter((isOwn) => !isOwn).length };
}
