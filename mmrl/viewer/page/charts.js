// What charts in SVG share; histograms and scatter plots.

import { el, quiet, svg } from "./elements.js";
import { counted, extent, number } from "./text.js";

// Charts are drawn when they come into sight, at the width that they have, and again when it changes.
const drawers = new WeakMap();
export const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => paint(target)));
export const sights = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      drawers.get(target).inSight = isIntersecting;
      paint(target);
    }
  },
  { rootMargin: "300px" },
);

export function lazily(box, draw) {
  drawers.set(box, { draw, inSight: false, width: 0, isStale: true });
  sizes.observe(box);
  sights.observe(box);
}

export function redraw(box) {
  drawers.get(box).isStale = true;
  paint(box);
}

function paint(box) {
  const drawer = drawers.get(box);
  const width = Math.floor(box.clientWidth);
  if (!drawer.inSight || !width || (!drawer.isStale && width === drawer.width)) return;
  drawer.width = width;
  drawer.isStale = false;
  try {
    drawer.draw(width);
  } catch (error) {
    console.error(error); // the other charts are drawn
    box.replaceChildren(el("p", { class: "problem" }, "This chart cannot be drawn."));
  }
}

/** Some round numbers from least to greatest; one where there is no room between them for numbers that differ. */
export function ticks(least, greatest, count) {
  const span = greatest - least;
  const raw = span / count;
  if (!(raw > 1e-300) || !Number.isFinite(span)) return [least];
  if (span <= 1e-13 * Math.max(Math.abs(least), Math.abs(greatest))) return [least];
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = size * ([1, 2, 2.5, 5, 10].find((each) => each * size >= raw) ?? 10);
  const first = Math.ceil(least / step - 1e-9);
  const found = [];
  for (let i = 0; i <= count + 1 && (first + i) * step <= greatest + 1e-9 * span; i++) found.push((first + i) * step);
  return found;
}

/** Powers of ten, or a few values where there is less than one. */
export function logTicks(least, greatest) {
  const found = [];
  if (!(least > 0) || !Number.isFinite(greatest)) return [least];
  for (let power = Math.ceil(Math.log10(least)); power <= Math.log10(greatest); power++) found.push(10 ** power);
  const every = Math.ceil(found.length / 5);
  return found.length < 2 ? [least, greatest] : found.filter((_, i) => i % every === 0);
}

/** From values to pixels. */
export function scale([least, greatest], [from, to], isLog = false) {
  if (isLog) {
    const inner = scale([Math.log(least), Math.log(greatest)], [from, to]);
    return (value) => inner(Math.log(value));
  }
  const span = greatest / 2 - least / 2; // the difference itself may be more than a number can be
  return (value) => (span === 0 ? (from + to) / 2 : from + ((value / 2 - least / 2) / span) * (to - from));
}

/** The extent with some room; a flat line gets room as well. */
export function roomy([least, greatest]) {
  if (least === 0 && greatest === 0) return [-0.1, 1];
  const room = least === greatest ? Math.abs(least) * 0.1 : greatest * 0.05 - least * 0.05;
  return [Math.max(least - room, -Number.MAX_VALUE), Math.min(greatest + room, Number.MAX_VALUE)];
}

export function frameOf(width, height) {
  return { width, height, left: 54, right: width - 10, top: 12, bottom: height - 20 };
}

export function canvas(frame, label) {
  const size = { width: frame.width, height: frame.height, viewBox: `0 0 ${frame.width} ${frame.height}` };
  return svg("svg", { ...size, role: "img", "aria-label": label });
}

function label(text, x, y, anchor) {
  return svg("text", { class: "tick", x, y, "text-anchor": anchor }, text);
}

/** A function that writes each tick, with as few digits as tell them apart, at least 3. */
function tickText(values) {
  const digits = [3, 4, 5, 6].find(
    (each) => new Set(values.map((value) => number(value, each))).size === values.length,
  );
  return (value) => number(value, digits ?? 7);
}

/** Lines and labels of both axes. */
export function axes(frame, x, y, xTicks, yTicks) {
  const [text, xText] = [tickText(yTicks), tickText(xTicks)];
  const columns = xTicks.map((value) => label(xText(value), x(value), frame.height - 5, "middle"));
  const rows = yTicks.map((value) => [
    svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) }),
    label(text(value), frame.left - 6, y(value) + 4, "end"),
  ]);
  return svg("g", { "aria-hidden": "true" }, rows, columns);
}

/** Bars; `bins` are {from, to, count, kind}. */
export function histogram({ title, bins, unit }) {
  const box = el("div", { class: "chart", vars: { "--height": "200px" } });
  lazily(box, (width) => box.replaceChildren(drawBars(width, title, bins, unit)));
  return el("figure", { class: "plot" }, el("figcaption", {}, title), box);
}

function drawBars(width, title, bins, unit) {
  const frame = frameOf(width, 200);
  const greatest = Math.max(1, ...bins.map(({ count }) => count));
  const x = scale([bins[0].from, bins.at(-1).to], [frame.left + 2, frame.right]);
  const y = scale([0, greatest], [frame.bottom, frame.top]);
  const words = bins.filter(({ count }) => count).map((bin) => `${binText(bin)}: ${bin.count}`);
  const picture = canvas(frame, `${title}: ${words.join("; ")}`);
  const xTicks = ticks(bins[0].from, bins.at(-1).to, width / 90);
  picture.append(axes(frame, x, y, xTicks, ticks(0, greatest, 4).filter(Number.isInteger)));
  for (const bin of bins) {
    const left = x(bin.from) + 0.5;
    const wide = Math.max(x(bin.to) - left - 0.5, 1);
    const bar = { class: "bar", x: left, y: y(bin.count), width: wide, height: frame.bottom - y(bin.count) };
    picture.append(svg("rect", bar, svg("title", {}, `${binText(bin)}: ${counted(bin.count, unit)}`)));
  }
  return picture;
}

function binText({ from, to, isOne }) {
  return isOne ? number(from + (to - from) / 2) : `${number(from, 3)} to ${number(to, 3)}`;
}

/** Values counted in bins; a few distinct values get a bin each. */
export function binned(values, range) {
  const distinct = [...new Set(values)].sort((one, other) => one - other);
  const [least, greatest] = range ?? extent(values);
  if (distinct.length <= 2 || least === greatest) return binsOfFew(values, distinct);
  const isWhole = distinct.every(Number.isInteger);
  const span = greatest - least;
  if (!Number.isFinite(span)) return [{ from: least, to: greatest, count: values.length }];
  const width = isWhole ? Math.max(1, Math.ceil((span + 1) / 40)) : span / 30;
  const count = Math.max(1, isWhole ? Math.ceil((span + 1) / width) : 30);
  const bins = Array.from({ length: count }, (_, i) => ({
    from: least + i * width,
    to: least + (i + 1) * width,
    count: 0,
  }));
  for (const value of values) bins[Math.min(Math.floor((value - least) / width) || 0, count - 1)].count++;
  return bins;
}

function binsOfFew(values, distinct) {
  const width = distinct.length > 1 ? (distinct[1] - distinct[0]) / 2 : Math.max(Math.abs(distinct[0]) / 10, 0.5);
  return distinct.map((value) => ({
    from: value - width / 2,
    to: value + width / 2,
    count: values.filter((each) => each === value).length,
    isOne: true,
  }));
}

/** Points that fall on the same few pixels are one circle, so that ten thousand are drawn at once. */
export function scatter({ title, xTitle, yTitle, points, picked, unit = "rollout", height = 280 }) {
  const box = el("div", { class: "chart", vars: { "--height": `${height}px` } });
  lazily(box, (width) => box.replaceChildren(drawScatter(width, { title, xTitle, yTitle, points, picked, unit, height })));
  const names = quiet(`across: ${xTitle}; upwards: ${yTitle}; larger circles are several ${unit}s`);
  return el("figure", { class: "plot wide" }, el("figcaption", {}, title), box, names);
}

function drawScatter(width, { title, xTitle, yTitle, points, picked, unit, height }) {
  const frame = frameOf(width, height);
  const xs = roomy(extent(points.map(({ x }) => x)));
  const ys = roomy(extent(points.map(({ y }) => y)));
  const x = scale(xs, [frame.left, frame.right]);
  const y = scale(ys, [frame.bottom, frame.top]);
  const cells = new Map();
  for (const each of points) {
    const key = `${Math.round(x(each.x) / 6)},${Math.round(y(each.y) / 6)}`;
    cells.set(key, [...(cells.get(key) ?? []), each]);
  }
  const picture = canvas(frame, `${title}: ${counted(points.length, unit)}, ${xTitle} across, ${yTitle} upwards`);
  picture.append(axes(frame, x, y, ticks(...xs, width / 90), ticks(...ys, 5)));
  for (const some of cells.values()) {
    const at = { cx: x(some[0].x), cy: y(some[0].y), r: Math.min(2.5 + Math.sqrt(some.length - 1), 9) };
    const text = `${xTitle} ${number(some[0].x)}, ${yTitle} ${number(some[0].y)}: ${counted(some.length, unit)}`;
    const heard = picked ? { click: () => picked(some[0]) } : {};
    picture.append(svg("circle", { class: `point ${some[0].kind ?? ""}`, ...at, on: heard }, svg("title", {}, text)));
  }
  return picture;
}
