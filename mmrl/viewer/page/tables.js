// Tables that are sorted and shown in parts.

import { button, el } from "./elements.js";
import { plain, textOf } from "./text.js";

/**
 * A table in a region that scrolls sideways by itself.
 *
 * columns: [{key, title, cell: row => node, value: row => number or text (sortable), isNumber, class}]
 */
export function table({ caption, columns, rows, sort = "", sorted, rowAttributes }) {
  const head = columns.map((column) => headCell(column, sort, sorted));
  const body = rows.map((row, i) =>
    el(
      "tr",
      rowAttributes?.(row, i),
      columns.map((column, c) =>
        el(c === 0 ? "th" : "td", { scope: c === 0 ? "row" : null, class: classOf(column) }, column.cell(row, i)),
      ),
    ),
  );
  const whole = el(
    "table",
    {},
    el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, body),
  );
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}

function classOf(column) {
  return [column.isNumber ? "number" : "", column.class ?? ""].join(" ").trim() || null;
}

function headCell(column, sort, sorted) {
  const attributes = { scope: "col", class: classOf(column) };
  if (!sorted || !column.value) return el("th", attributes, column.title);
  const direction = sort === column.key ? 1 : sort === `-${column.key}` ? -1 : 0;
  const next = direction === -1 ? column.key : direction === 1 ? "" : `-${column.key}`;
  const arrow = el("span", { class: "arrow", "aria-hidden": "true" }, direction ? (direction > 0 ? " ▲" : " ▼") : "");
  const order = direction ? (direction > 0 ? "ascending" : "descending") : "none";
  return el(
    "th",
    { ...attributes, "aria-sort": order },
    button([column.title, arrow], () => sorted(next), { "data-key": plain(column.key) }),
  );
}

/** The rows in the order that `-key` or `key` asks for; unknown values last. */
export function ordered(rows, columns, sort) {
  const key = sort.replace(/^-/, "");
  const column = columns.find((each) => each.key === key && each.value);
  if (!column) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);
  return [...rows].sort((row, otherRow) => {
    const one = column.value(row);
    const other = column.value(otherRow);
    if (isMissing(one) || isMissing(other)) return isMissing(one) - isMissing(other);
    const areNumbers = typeof one === "number" && typeof other === "number";
    return sign * (areNumbers ? one - other : textOf(one).localeCompare(textOf(other)));
  });
}

export function pager(total, page, size, turned) {
  const pages = Math.max(1, Math.ceil(total / size));
  if (pages === 1) return null;
  const turn = (to, text, name) =>
    button(text, () => turned(to), { disabled: to < 0 || to >= pages, "aria-label": name });
  const first = page * size + 1;
  const last = Math.min(total, (page + 1) * size);
  const text = `${first.toLocaleString("en")} to ${last.toLocaleString("en")} of ${total.toLocaleString("en")}`;
  return el(
    "nav",
    { class: "pager", "aria-label": "Pages of the table" },
    turn(page - 1, "‹", "Previous page"),
    el("span", {}, text),
    turn(page + 1, "›", "Next page"),
  );
}

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    { class: "facts" },
    shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}
export const PAGE_ROWS = 100;
