// A completion of a group: its key, name, lengths and turns.

import { number, plain } from "./text.js";

export function memberKey(index, greedy) {
  return greedy ? "greedy" : plain(index);
}

export function keyOf(member) {
  return memberKey(member.index, member.greedy);
}

export function memberName(member) {
  return member.greedy ? "greedy" : `completion ${number(member.index)}`;
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
