// Tables of a step's groups and of its rollouts.

import { groupAddress, note, promptAddress, wanted } from "./addresses.js";
import { Problem } from "./documents.js";
import { el, inLine, link, problemNode, quiet, replace } from "./elements.js";
import { areGiven, matchingRows, stateOf, worthIn } from "./filters.js";
import { picture } from "./images.js";
import { memberKey, nameOfMember, preferenceTag } from "./members.js";
import { PAGE_ROWS, ordered, pager, table } from "./tables.js";
import { counted, distinct, distinctInOrder, extent, known, mean, number, plain, textOf, valueText } from "./text.js";

/** Draw the rows that the address asks for; of several calls the last one counts. */
export async function drawStep(view) {
  const ticket = (view.ticket = (view.ticket ?? 0) + 1);
  try {
    const rows = await matchingRows(view);
    if (ticket === view.ticket) drawRows(view, rows);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    view.order = [];
    view.body.replaceChildren(problemNode(error.message, error.mayPass ? () => drawStep(view) : null));
  }
}

function drawRows(view, rows) {
  const isByRollout = wanted("by") === "rollout";
  const columns = isByRollout ? rolloutColumns(view) : groupColumns(view, rows);
  const all = isByRollout ? rows : groupsOf(view, rows);
  const shown = ordered(all, columns, wanted("sort"));
  view.order = distinctInOrder(
    isByRollout ? shown.map((row) => view.doc.rows.group[row]) : shown.map((group) => group.group),
  );
  const page = Math.min(Number(wanted("page", "0")) || 0, Math.ceil(shown.length / PAGE_ROWS) - 1);
  const turned = (to) => {
    note({ page: to || "" });
    drawStep(view);
  };
  const part = shown.slice(Math.max(page, 0) * PAGE_ROWS, (Math.max(page, 0) + 1) * PAGE_ROWS);
  const total = isByRollout ? counted(view.doc.rows.group.length, "rollout") : counted(view.doc.groups.length, "group");
  const words = quiet(
    all.length === (isByRollout ? view.doc.rows.group.length : view.doc.groups.length)
      ? total
      : `${all.length.toLocaleString("en")} of ${total}${wanted("sample") ? ", 20 rollouts drawn at random" : ""}`,
  );
  const sorted = (sort) => {
    note({ sort, page: "" });
    drawStep(view);
  };
  const empty = !all.length && quiet("Nothing fits these filters.");
  const whole = table({
    caption: isByRollout ? "Rollouts" : "Groups",
    columns,
    rows: part,
    sort: wanted("sort"),
    sorted,
  });
  const pages = pager(shown.length, Math.max(page, 0), PAGE_ROWS, turned);
  replace(view.body, el("div", { class: "count-line" }, words, pages), empty || whole);
}

export function groupsOf(view, rows) {
  const found = new Set(rows.map((row) => view.doc.rows.group[row]));
  return view.doc.groups.filter((group) => found.has(group.group));
}

export function groupColumns(view, rows) {
  const { rows: columns } = view.doc;
  const chosen = new Set(rows);
  const averages = (key) => (group) =>
    mean(
      known(
        view.members
          .get(group.group)
          .filter((row) => !columns.greedy[row])
          .map((row) => columns[key][row]),
      ),
    );
  const length = averages("length");
  const isMixed = distinct(view.doc.groups.map((group) => group.source)).length > 1;
  const hasImages = view.doc.groups.some((group) => group.images?.length);
  const hasRewards = !areGiven(view.doc);
  const hasAnswers = hasRewards || view.doc.groups.some((group) => group.answer !== null);
  const hasPairs = view.doc.groups.some((group) => group.pair);
  return [
    {
      key: "group",
      title: "group",
      isNumber: true,
      value: (group) => group.group,
      cell: (group) => link(groupAddress(view, group.group), {}, number(group.group)),
    },
    {
      key: "prompt_id",
      title: "prompt",
      value: (group) => group.prompt_id,
      cell: (group) => link(promptAddress(view.run, group.prompt_id), { class: "id" }, inLine(group.prompt_id)),
    },
    isMixed && {
      key: "source",
      title: "source",
      value: (group) => group.source ?? "",
      cell: (group) => inLine(group.source ?? "–"),
    },
    hasImages && { key: "images", title: "image", cell: (group) => thumbnails(view.run, group.images ?? []) },
    {
      key: "text",
      title: "question",
      class: "long",
      cell: (group) => link(groupAddress(view, group.group), { class: "head" }, inLine(questionOf(group))),
    },
    hasAnswers && {
      key: "answer",
      title: "reference answer",
      class: "short",
      cell: (group) => inLine(valueText(group.answer)),
    },
    hasPairs && {
      key: "order",
      title: "preference",
      value: (group) => group.pair?.preferred ?? null,
      cell: (group) => preferenceTag(group.pair?.preferred),
    },
    hasPairs && {
      key: "margin",
      title: "margin",
      isNumber: true,
      value: (group) => group.pair?.margin ?? null,
      cell: (group) => number(group.pair?.margin, 3),
    },
    hasRewards && {
      key: "reward",
      title: "reward",
      isNumber: true,
      value: (group) => group.reward_mean,
      cell: (group) => number(group.reward_mean, 3),
    },
    hasRewards && {
      key: "std",
      title: "std",
      isNumber: true,
      value: (group) => group.reward_std,
      cell: (group) => number(group.reward_std, 3),
    },
    { key: "length", title: "length", isNumber: true, value: length, cell: (group) => number(length(group), 3) },
    { key: "members", title: view.doc.rows.score ? "candidates" : "completions", cell: (group) => memberSquares(view, group, chosen) },
    {
      key: "state",
      title: "state",
      value: (group) => (group.trained ? 0 : group.kept ? 1 : 2),
      cell: (group) => stateTag(group),
    },
  ].filter(Boolean);
}

/** The beginning of what is asked: the user's message, or the rendered prompt without marks of the chat template. */
export function questionOf({ question, prompt }) {
  return (
    textOf(question).replace(/<image>\s*/g, "") ||
    textOf(prompt)
      .replace(/<\|[^|<>]*\|>(system|user|assistant)?/g, " ")
      .replace(/\s+/g, " ")
      .trim()
  );
}

function thumbnails(run, images) {
  return el(
    "span",
    { class: "thumbnails" },
    images.slice(0, 3).map((image) => picture(run, image, { isSmall: true })),
    images.length > 3 ? quiet(`+${images.length - 3}`) : "",
  );
}

/** A square for each completion, filled by its reward or score; those that the filter leaves out are pale. */
function memberSquares(view, group, chosen) {
  const { rows } = view.doc;
  const [least, greatest] = (view.rewards ??= extent(known(rows.group.map((_, row) => worthIn(rows, row)))));
  const squares = view.members.get(group.group).map((row) => {
    const name = nameOfMember(rows.index[row], rows.greedy[row], rows.score?.[row]);
    const worth = worthIn(rows, row);
    const words = [
      `${typeof rows.score?.[row] === "number" ? "score" : "reward"} ${number(worth)}`,
      counted(rows.length[row] ?? 0, "token"),
      plain(rows.finish_reason[row]),
    ];
    const text = `${name}: ${(group.given ? words.slice(worth === null ? 1 : 0, 2) : words).join(", ")}`;
    const classes = [
      "square",
      rows.greedy[row] && "greedy",
      rows.truncated[row] && "cut",
      !rows.valid[row] && "invalid",
      !chosen.has(row) && "pale",
    ];
    const share = typeof worth === "number" ? (greatest > least ? (worth - least) / (greatest - least) : 1) : 0;
    const to = groupAddress(view, group.group, { member: memberKey(rows.index[row], rows.greedy[row]) });
    return link(to, {
      class: classes.filter(Boolean).join(" "),
      title: text,
      "aria-label": text,
      tabindex: "-1",
      vars: { "--share": share.toFixed(3) },
    });
  });
  return el("span", { class: "squares" }, squares);
}

function stateTag(group) {
  const text = { trained: "trained on", kept: "kept", dropped: "rejected" }[stateOf(group)];
  return el("span", { class: `tag ${stateOf(group)}`, title: plain(group.why) }, text);
}

export function rolloutColumns(view) {
  const { rows } = view.doc;
  const to = (row) => groupAddress(view, rows.group[row], { member: memberKey(rows.index[row], rows.greedy[row]) });
  const hasRewards = !areGiven(view.doc);
  const hasTurns = hasRewards && known(rows.turns).some((turns) => turns > 0);
  const isJudged = rows.right.some((right) => right !== null);
  const ofCandidates = (key, title) =>
    rows[key] && {
      key,
      title,
      isNumber: true,
      value: (row) => rows[key][row],
      cell: (row) => number(rows[key][row]),
    };
  return [
    {
      key: "group",
      title: "group",
      isNumber: true,
      value: (row) => rows.group[row],
      cell: (row) => link(to(row), {}, number(rows.group[row])),
    },
    {
      key: "index",
      title: "member",
      isNumber: true,
      value: (row) => rows.index[row],
      cell: (row) => memberKey(rows.index[row], rows.greedy[row]),
    },
    ofCandidates("score", "score"),
    ofCandidates("log_ratio", "log-ratio"),
    ofCandidates("value", "score by the model"),
    hasRewards && {
      key: "reward",
      title: "reward",
      isNumber: true,
      value: (row) => rows.reward[row],
      cell: (row) => number(rows.reward[row]),
    },
    isJudged && {
      key: "right",
      title: "answer",
      value: (row) => (rows.right[row] === null ? null : Number(rows.right[row])),
      cell: (row) => rightTag(rows.right[row]),
    },
    {
      key: "length",
      title: "length",
      isNumber: true,
      value: (row) => rows.length[row],
      cell: (row) => number(rows.length[row]),
    },
    hasTurns && {
      key: "turns",
      title: "turns",
      isNumber: true,
      value: (row) => rows.turns[row],
      cell: (row) => number(rows.turns[row]),
    },
    hasRewards && {
      key: "finish",
      title: "end",
      value: (row) => rows.finish_reason[row],
      cell: (row) => endTag(rows.finish_reason[row], rows.truncated[row], rows.valid[row]),
    },
    {
      key: "text",
      title: hasTurns ? "last turn" : "completion",
      class: "long",
      cell: (row) => link(to(row), { class: "head mono" }, inLine(rows.text[row])),
    },
  ].filter(Boolean);
}

export function rightTag(right) {
  if (right === null || right === undefined) return "–";
  return el("span", { class: `tag ${right ? "right" : "wrong"}` }, right ? "✓ right" : "✗ wrong");
}

export function endTag(reason, truncated, valid) {
  return [
    el("span", { class: truncated ? "tag cut" : "" }, inLine(reason ?? "–")),
    valid === false ? [" ", el("span", { class: "tag wrong" }, "unscored")] : "",
  ];
}
