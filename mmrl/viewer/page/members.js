// A completion of a group: its key, name, lengths and turns.

import { el } from "./elements.js";
import { number, plain } from "./text.js";

export function memberKey(index, greedy) {
  return greedy ? "greedy" : plain(index);
}

export function keyOf(member) {
  return memberKey(member.index, member.greedy);
}

export function memberName(member) {
  return member.shown ? "demonstration" : nameOfMember(member.index, member.greedy, member.score);
}

/** The name of a completion; one that the dataset gives with a score is a candidate. */
export function nameOfMember(index, greedy, score) {
  return greedy ? "greedy" : `${typeof score === "number" ? "candidate" : "completion"} ${number(index)}`;
}

/** The place at which an episode goes on from another one of its group, in words. */
export function branchOf({ branch }) {
  return `from ${nameOfMember(branch.member)}, before its turn ${number(branch.turn + 1)}`;
}

/** True if the dataset gives it: nobody sampled it. */
export function isGiven(member) {
  return member.weight_version < 0;
}

/** The score of a candidate or the reward of a rollout, in words; empty for a demonstration that nothing has scored. */
export function worthOf(member) {
  if (typeof member.score === "number") return `score ${number(member.score)}`;
  return typeof member.reward !== "number" && isGiven(member) ? "" : `reward ${number(member.reward)}`;
}

/** The tokens that the policy wrote. */
export function lengthOf(member) {
  const { tokens } = member;
  return tokens?.mask ? tokens.mask.filter(Boolean).length : countOf(member);
}

/** All tokens after the prompt, inserted ones too. */
export function countOf({ tokens }) {
  return tokens?.ids?.length ?? tokens?.text?.length ?? null;
}

/** The turn of each token, from 0; inserted tokens belong to the turn before them. Null without an environment. */
export function turnsOf(member) {
  if (!member.episode?.length || !member.tokens?.mask) return null;
  if (member.tokens.turn) return member.tokens.turn;
  let turn = 0;
  return member.tokens.mask.map((isOwn, i, mask) => (isOwn && i && !mask[i - 1] ? ++turn : turn));
}

/** 1 where the policy, or the reward model, prefers the better one of two, 0 the other one, 0.5 neither; "–" where it is not known. */
export function preferenceTag(preferred, words) {
  if (typeof preferred !== "number") return "–";
  const [tone, sign, short] = { 1: ["right", "✓", "right"], 0: ["wrong", "✗", "wrong"] }[preferred] ?? ["", "=", "tie"];
  return el("span", { class: `tag ${tone}` }, `${sign} ${words ?? short}`);
}

/** The word for a preference in addresses. */
export function orderOf(preferred) {
  return typeof preferred === "number" ? ({ 1: "right", 0: "wrong" }[preferred] ?? "tie") : "unknown";
}
