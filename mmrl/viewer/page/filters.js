// The rollouts of a step that its address asks for.

import { encoded, stepPath, wanted } from "./addresses.js";
import { inReport, load, report } from "./documents.js";
import { orderOf } from "./members.js";
import { textOf } from "./text.js";

/** A test of a row by the address; `found` has the rows with the text that is searched. */
function matcher({ doc }, found) {
  const { rows } = doc;
  const groups = new Map(doc.groups.map((group) => [group.group, group]));
  const [rmin, rmax, lmin, lmax] = ["rmin", "rmax", "lmin", "lmax"].map((key) =>
    wanted(key) === "" ? null : Number(wanted(key)),
  );
  const within = (value, least, most) =>
    (least === null && most === null) ||
    (typeof value === "number" && value >= (least ?? -Infinity) && value <= (most ?? Infinity));
  const right = (value) => (value === null ? "unknown" : value ? "yes" : "no");
  const is = (key, value) => wanted(key) === "" || wanted(key) === value;
  return (row) => {
    const group = groups.get(rows.group[row]);
    const isEnd = wanted("finish") === "truncated" ? rows.truncated[row] : is("finish", rows.finish_reason[row]);
    return (
      Boolean(group) &&
      (!found || found.has(row)) &&
      isEnd &&
      is("state", stateOf(group)) &&
      is("source", textOf(group.source)) &&
      is("right", right(rows.right[row])) &&
      is("order", orderOf(group.pair?.preferred)) &&
      is("who", rows.greedy[row] ? "greedy" : "sampled") &&
      within(worthIn(rows, row), rmin, rmax) &&
      within(rows.length[row], lmin, lmax)
    );
  };
}

/** The reward of a rollout, or the score that the dataset gives a candidate. */
export function worthIn({ reward, score }, row) {
  return score?.[row] ?? reward[row];
}

/** True if the dataset gives all completions of a step: there are no rewards. */
export function areGiven({ groups }) {
  return groups.length > 0 && groups.every((group) => group.given);
}

/** The rows that the address asks for. */
export async function matchingRows(view) {
  const text = wanted("q");
  const all = view.doc.rows.group.map((_, row) => row);
  const found = text ? new Set(await searched(view, text)) : null;
  const rows = all.filter(matcher(view, found));
  return wanted("sample") ? sampledFrom(rows, 20, Number(wanted("sample"))) : rows;
}

async function searched(view, text) {
  if (!report) return (await load(`${stepPath(view.run, view.kind, view.step)}/search?q=${encoded(text)}`)).rows;
  const { rows, groups } = view.doc;
  const lower = text.toLowerCase();
  const heads = new Map(groups.map((group) => [group.group, `${textOf(group.prompt)}\n${textOf(group.prompt_id)}`]));
  return rows.group
    .map((_, row) => row)
    .filter((row) => {
      const group = inReport(`${stepPath(view.run, view.kind, view.step)}/group/${rows.group[row]}`);
      const member = group?.members?.find((each) => each.index === rows.index[row] && each.greedy === rows.greedy[row]);
      const texts = [
        rows.text[row],
        heads.get(rows.group[row]),
        group?.prompt,
        member?.text,
        ...(member?.episode ?? []).flatMap(turnTexts),
      ];
      return texts.some((each) => each && each.toLowerCase().includes(lower));
    });
}

function turnTexts(turn) {
  return [turn.text, ...(turn.content ?? []).map((part) => part.text)];
}

/** Some of the rows, always the same ones for a seed. */
function sampledFrom(rows, count, seed) {
  let state = seed + 0x6d2b79f5;
  const random = () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  const pool = [...rows];
  for (let i = 0; i < Math.min(count, pool.length); i++) {
    const j = i + Math.floor(random() * (pool.length - i));
    [pool[i], pool[j]] = [pool[j], pool[i]];
  }
  return pool.slice(0, count).sort((one, other) => one - other);
}

export function stateOf(group) {
  return group.trained ? "trained" : group.kept ? "kept" : "dropped";
}
