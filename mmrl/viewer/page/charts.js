// Curves, histograms and scatter plots in SVG.

import { announce, el, quiet, svg, visible } from "./elements.js";
import { counted, extent, number, plain } from "./text.js";

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

function lazily(box, draw) {
  drawers.set(box, { draw, inSight: false, width: 0, isStale: true });
  sizes.observe(box);
  sights.observe(box);
}

function redraw(box) {
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
function ticks(least, greatest, count) {
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
function logTicks(least, greatest) {
  const found = [];
  if (!(least > 0) || !Number.isFinite(greatest)) return [least];
  for (let power = Math.ceil(Math.log10(least)); power <= Math.log10(greatest); power++) found.push(10 ** power);
  const every = Math.ceil(found.length / 5);
  return found.length < 2 ? [least, greatest] : found.filter((_, i) => i % every === 0);
}

/** From values to pixels. */
function scale([least, greatest], [from, to], isLog = false) {
  if (isLog) {
    const inner = scale([Math.log(least), Math.log(greatest)], [from, to]);
    return (value) => inner(Math.log(value));
  }
  const span = greatest / 2 - least / 2; // the difference itself may be more than a number can be
  return (value) => (span === 0 ? (from + to) / 2 : from + ((value / 2 - least / 2) / span) * (to - from));
}

/** The extent with some room; a flat line gets room as well. */
function roomy([least, greatest]) {
  if (least === 0 && greatest === 0) return [-0.1, 1];
  const room = least === greatest ? Math.abs(least) * 0.1 : greatest * 0.05 - least * 0.05;
  return [Math.max(least - room, -Number.MAX_VALUE), Math.min(greatest + room, Number.MAX_VALUE)];
}

function frameOf(width, height) {
  return { width, height, left: 54, right: width - 10, top: 12, bottom: height - 20 };
}

function canvas(frame, label) {
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
function axes(frame, x, y, xTicks, yTicks) {
  const [text, xText] = [tickText(yTicks), tickText(xTicks)];
  const columns = xTicks.map((value) => label(xText(value), x(value), frame.height - 5, "middle"));
  const rows = yTicks.map((value) => [
    svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) }),
    label(text(value), frame.left - 6, y(value) + 4, "end"),
  ]);
  return svg("g", { "aria-hidden": "true" }, rows, columns);
}

/** Exponentially smoothed values, without the bias of the first ones. */
function smoothed(points, weight) {
  let sum = 0;
  let mass = 0;
  return points.map(([step, value]) => {
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return [step, sum / mass];
  });
}

/** No more points than a line of this width can show: the least and the greatest of each stretch. */
function thinned(points, width) {
  const stretch = Math.ceil(points.length / Math.max(width, 1));
  if (stretch < 3) return points;
  const found = [];
  for (let from = 0; from < points.length; from += stretch) {
    const part = points.slice(from, from + stretch);
    const low = part.reduce((best, each) => (each[1] < best[1] ? each : best));
    const high = part.reduce((best, each) => (each[1] > best[1] ? each : best));
    found.push(...(low[0] < high[0] ? [low, high] : [high, low]));
  }
  return found;
}

/** A line with gaps where values have no place on the scale; a point between two gaps is a short stroke. */
function pathOf(points, x, y, isShown) {
  const shown = points.map(([, value]) => isShown(value));
  return points
    .map(([step, value], i) => {
      if (!shown[i]) return "";
      const at = `${x(step).toFixed(1)},${y(value).toFixed(1)}`;
      return shown[i - 1] ? `L${at}` : `M${at}${shown[i + 1] ? "" : "h1"}`;
    })
    .join("");
}

/** True for a value that a scale has a place for. */
function shownOn({ log }) {
  return (value) => !log || value > 0;
}

/**
 * Curves over steps, with a crosshair, marks, and a line of text that says what is under it.
 *
 * spec: {label, height, log, smooth, range: [first, last step], marks: [{step, kind, text, index}],
 * series: [{name, index, points: [[step, value]]}], picked: step => ..., pickText}
 */
export function lineChart(spec) {
  const chart = { spec, at: null };
  chart.readout = el("p", { class: "readout" });
  chart.box = el("div", { class: "chart", tabindex: "0", vars: { "--height": `${spec.height}px` } });
  chart.node = el("div", { class: "line-chart" }, chart.box, chart.readout);
  chart.update = (next) => {
    chart.spec = next;
    redraw(chart.box);
  };
  chart.box.addEventListener("keydown", (event) => moveCrosshair(chart, event));
  chart.box.addEventListener("blur", () => point(chart, null));
  lazily(chart.box, (width) => drawLines(chart, width));
  return chart;
}

function drawLines(chart, width) {
  const { spec } = chart;
  const frame = frameOf(width, spec.height);
  chart.series = spec.series;
  const values = spec.series.flatMap(({ points }) => points.map(([, value]) => value)).filter(shownOn(spec));
  if (!values.length) {
    const why = spec.log ? "No value above 0, so none on a log scale." : "No value yet.";
    chart.box.replaceChildren(el("p", { class: "quiet centred" }, why));
    return;
  }
  const [least, greatest] = spec.log ? widened(extent(values)) : roomy(extent(values));
  chart.x = scale(spec.range, [frame.left + 4, frame.right - 4]);
  const y = scale([least, greatest], [frame.bottom, frame.top], spec.log);
  chart.y = y;
  const picture = canvas(frame, `${spec.label}: ${spec.series.map(inWords).join("; ")}`);
  const rows = spec.log ? logTicks(least, greatest) : ticks(least, greatest, spec.height / 40);
  picture.append(axes(frame, chart.x, y, stepTicks(spec.range, width), rows));
  picture.append(...(spec.marks ?? []).map((mark) => markNode(mark, chart.x, frame)));
  for (const series of spec.series) picture.append(...lineNodes(series, spec, chart, width));
  chart.cross = svg("g", { class: "cross" });
  picture.append(chart.cross);
  chart.frame = frame;
  chart.box.replaceChildren(picture);
  picture.addEventListener("pointermove", (event) => point(chart, stepAt(chart, event)));
  picture.addEventListener("pointerleave", () => point(chart, null));
  picture.addEventListener("click", (event) => spec.picked?.(stepAt(chart, event)));
  point(chart, null);
}

function widened([least, greatest]) {
  if (least !== greatest) return [least, greatest];
  return [Math.max(least / 2, Number.MIN_VALUE), Math.min(greatest * 2, Number.MAX_VALUE)];
}

function stepTicks(range, width) {
  return ticks(range[0], range[1], Math.max(2, width / 90)).filter(Number.isInteger);
}

/** A series for those who do not see it. */
function inWords({ name, points }) {
  if (!points.length) return `${plain(name)} has no value`;
  const values = points.map(([, value]) => value);
  const [least, greatest] = extent(values);
  const parts = [
    `${counted(points.length, "value")} up to ${number(points.at(-1)[0])}`,
    `last ${number(values.at(-1))}`,
  ];
  return `${plain(name)} ${parts.join(", ")}, least ${number(least)}, greatest ${number(greatest)}`;
}

function lineNodes(series, spec, chart, width) {
  const { x, y } = chart;
  const points = thinned(series.points, width);
  const nodes = [];
  const isSmooth = spec.smooth > 0 && points.length > 2;
  const isShown = shownOn(spec);
  const path = (some, more) =>
    svg("path", { class: `line s${series.index % 8}${more}`, d: pathOf(some, x, y, isShown) });
  if (isSmooth) nodes.push(path(points, " raw"));
  const main = isSmooth ? thinned(smoothed(series.points, spec.smooth), width) : points;
  nodes.push(path(main, ""));
  if (points.length <= 30 && !isSmooth) {
    nodes.push(
      ...points
        .filter(([, value]) => isShown(value))
        .map(([step, value]) =>
          svg("circle", {
            class: `dot s${series.index % 8}`,
            cx: x(step),
            cy: y(value),
            r: points.length < 3 ? 3.5 : 2,
          }),
        ),
    );
  }
  return nodes;
}

/** A vertical line: an alarm is solid with a triangle, an attempt is dashed. */
function markNode(mark, x, frame) {
  const at = x(mark.step);
  const top = frame.top - 4;
  const ends = { x1: at, x2: at, y1: top, y2: frame.bottom };
  const flag = mark.kind === "alarm" && svg("path", { class: "flag", d: `M${at - 5},${top - 7}h10l-5,8z` });
  const title = svg("title", {}, plain(mark.text));
  return svg(
    "g",
    { class: `mark ${mark.kind}` },
    title,
    svg("line", ends),
    flag,
    svg("line", { ...ends, class: "hit" }),
  );
}

function stepsOf(chart) {
  const all = new Set((chart.series ?? []).flatMap((series) => series.points.map(([step]) => step)));
  return [...all].sort((one, other) => one - other);
}

function stepAt(chart, event) {
  const at = event.clientX - chart.box.getBoundingClientRect().left;
  let best = null;
  for (const step of stepsOf(chart)) {
    if (best === null || Math.abs(chart.x(step) - at) < Math.abs(chart.x(best) - at)) best = step;
  }
  return best;
}

/** Put the crosshair on a step and say what is there; null takes it away. */
function point(chart, step) {
  chart.at = step;
  if (!chart.cross || !chart.series) return;
  const { spec, frame } = chart;
  if (step === null) {
    chart.cross.replaceChildren();
    chart.readout.replaceChildren(...lastValues(chart.series));
    return;
  }
  const at = chart.x(step);
  const found = chart.series.map((series) => [series, valueAt(series.points, step)]);
  const dots = found.filter(([, value]) => value !== null && shownOn(spec)(value));
  chart.cross.replaceChildren(
    svg("line", { x1: at, x2: at, y1: frame.top, y2: frame.bottom }),
    ...dots.map(([series, value]) =>
      svg("circle", { class: `dot s${series.index % 8}`, cx: at, cy: chart.y(value), r: 3.5 }),
    ),
  );
  const marks = (spec.marks ?? []).filter((mark) => Math.abs(chart.x(mark.step) - at) < 5);
  chart.readout.replaceChildren(
    el("span", {}, `${spec.unit ?? "step"} ${number(step, 8)}`),
    ...found.map(([series, value]) => keyed(series, number(value, 5), found.length > 1)),
    ...marks.map((mark) => el("span", { class: `mark-text ${mark.kind}` }, visible(mark.text))),
    spec.pickText ? el("span", { class: "quiet" }, spec.pickText) : "",
  );
}

function valueAt(points, step) {
  let low = 0;
  let high = points.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] === step) return points[middle][1];
    if (points[middle][0] < step) low = middle + 1;
    else high = middle - 1;
  }
  return null;
}

function lastValues(series) {
  return series
    .filter(({ points }) => points.length)
    .map((each) => keyed(each, number(each.points.at(-1)[1], 5), series.length > 1));
}

/** A value with the key of its series. */
function keyed(series, text, isNamed) {
  const name = isNamed
    ? [el("i", { class: `key s${series.index % 8}` }), el("span", { class: "of" }, visible(series.name)), " "]
    : [];
  return el("span", { class: "keyed" }, name, el("b", {}, text));
}

function moveCrosshair(chart, event) {
  const steps = stepsOf(chart);
  if (event.key === "Enter" && chart.at !== null) chart.spec.picked?.(chart.at);
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (move === undefined || !steps.length) return;
  event.preventDefault();
  const from = chart.at === null ? (move > 0 ? -1 : steps.length) : steps.indexOf(chart.at);
  const to = Math.min(Math.max(Number.isFinite(move) ? from + move : move, 0), steps.length - 1);
  point(chart, steps[to]);
  announce(chart.readout.textContent);
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
export function scatter({ title, xTitle, yTitle, points, picked, height = 280 }) {
  const box = el("div", { class: "chart", vars: { "--height": `${height}px` } });
  lazily(box, (width) => box.replaceChildren(drawScatter(width, { title, xTitle, yTitle, points, picked, height })));
  const names = quiet(`across: ${xTitle}; upwards: ${yTitle}; larger circles are several rollouts`);
  return el("figure", { class: "plot wide" }, el("figcaption", {}, title), box, names);
}

function drawScatter(width, { title, xTitle, yTitle, points, picked, height }) {
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
  const picture = canvas(frame, `${title}: ${counted(points.length, "rollout")}, ${xTitle} across, ${yTitle} upwards`);
  picture.append(axes(frame, x, y, ticks(...xs, width / 90), ticks(...ys, 5)));
  for (const some of cells.values()) {
    const at = { cx: x(some[0].x), cy: y(some[0].y), r: Math.min(2.5 + Math.sqrt(some.length - 1), 9) };
    const text = `${xTitle} ${number(some[0].x)}, ${yTitle} ${number(some[0].y)}: ${counted(some.length, "rollout")}`;
    const heard = picked ? { click: () => picked(some[0]) } : {};
    picture.append(svg("circle", { class: `point ${some[0].kind ?? ""}`, ...at, on: heard }, svg("title", {}, text)));
  }
  return picture;
}
