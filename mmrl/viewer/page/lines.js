// Curves over steps in SVG.

import { axes, canvas, frameOf, lazily, logTicks, redraw, roomy, scale, ticks } from "./charts.js";
import { announce, el, svg, visible } from "./elements.js";
import { counted, extent, number, plain } from "./text.js";

const FEW = 8;
const NEAREST = 6;

/** Exponentially smoothed values, without the bias of the first ones; deviations of a band likewise. */
function smoothed(points, weight) {
  let sum = 0;
  let spread = 0;
  let mass = 0;
  return points.map(([step, value, deviation, count]) => {
    sum = weight * sum + (1 - weight) * value;
    spread = weight * spread + (1 - weight) * (deviation ?? 0);
    mass = weight * mass + (1 - weight);
    return [step, sum / mass, typeof deviation === "number" ? spread / mass : deviation, count];
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

/** Stretches of a line by the number of runs in it; each begins where the one before ends. */
function stretches(points, most) {
  const found = [];
  points.forEach((point, i) => {
    const isWhole = point.length < 4 || point[3] === most;
    if (found.at(-1)?.isWhole !== isWhole) found.push({ isWhole, points: i ? [points[i - 1]] : [] });
    found.at(-1).points.push(point);
  });
  return found;
}

/** The outline of a band: its upper edge there, its lower edge back; a gap where there is one run or none. */
function bandPath(points, x, y, least, isShown) {
  const parts = [];
  let edges = [];
  const end = () => {
    const at = ([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`;
    const [upper, lower] = [edges.map(({ high }) => at(high)), edges.map(({ low }) => at(low)).reverse()];
    if (edges.length > 1) parts.push(`M${[...upper, ...lower].join("L")}Z`);
    else if (edges.length) parts.push(`M${upper[0]}h1L${lower[0]}h-1Z`);
    edges = [];
  };
  for (const [step, value, spread] of points) {
    if (typeof spread !== "number" || !isShown(value)) end();
    else edges.push({ high: [step, value + spread], low: [step, Math.max(value - spread, least)] });
  }
  end();
  return parts.join("");
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
 *
 * Points of several runs are [step, mean, deviation or null, number of runs], and their series has `most`, the number
 * of its runs. A series that `isSeed` is drawn thin. Series and marks may be getters, which are asked when the chart is
 * drawn.
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
  chart.light = (index) => light(chart, index);
  chart.box.addEventListener("keydown", (event) => moveCrosshair(chart, event));
  chart.box.addEventListener("blur", () => point(chart, null));
  lazily(chart.box, (width) => drawLines(chart, width));
  return chart;
}

function drawLines(chart, width) {
  const { spec } = chart;
  const frame = frameOf(width, spec.height);
  chart.series = spec.series;
  chart.marks = spec.marks ?? [];
  chart.steps = stepsOf(chart.series);
  const values = chart.series.flatMap(({ points }) => points.flatMap(edgesOf)).filter(shownOn(spec));
  if (!values.length) {
    const why = spec.log ? "No value above 0, so none on a log scale." : "No value yet.";
    chart.box.replaceChildren(el("p", { class: "quiet centred" }, why));
    return;
  }
  const [least, greatest] = spec.log ? widened(extent(values)) : roomy(extent(values));
  chart.x = scale(spec.range, [frame.left + 4, frame.right - 4]);
  chart.least = least;
  chart.y = scale([least, greatest], [frame.bottom, frame.top], spec.log);
  const picture = canvas(frame, `${spec.label}: ${allInWords(chart.series)}`);
  const rows = spec.log ? logTicks(least, greatest) : ticks(least, greatest, spec.height / 40);
  picture.append(axes(frame, chart.x, chart.y, stepTicks(spec.range, width), rows));
  picture.append(...chart.marks.map((mark) => markNode(mark, chart.x, frame)));
  const bands = chart.series.filter(({ most }) => most > 1).map((series) => bandNode(series, chart, width));
  picture.append(...bands, ...chart.series.map((series) => lineNode(series, chart, width)));
  chart.cross = svg("g", { class: "cross" });
  picture.append(chart.cross);
  chart.frame = frame;
  chart.box.replaceChildren(picture);
  picture.addEventListener("pointermove", (event) => point(chart, stepAt(chart, event), heightAt(chart, event)));
  picture.addEventListener("pointerleave", () => point(chart, null));
  picture.addEventListener("click", (event) => spec.picked?.(stepAt(chart, event)));
  point(chart, null);
}

/** A point's value, and the edges of the band there. */
function edgesOf([, value, spread]) {
  return typeof spread === "number" ? [value, value - spread, value + spread] : [value];
}

function widened([least, greatest]) {
  if (least !== greatest) return [least, greatest];
  return [Math.max(least / 2, Number.MIN_VALUE), Math.min(greatest * 2, Number.MAX_VALUE)];
}

function stepTicks(range, width) {
  return ticks(range[0], range[1], Math.max(2, width / 90)).filter(Number.isInteger);
}

/** Series for those who do not see them: each of a few, and the ends of many. */
function allInWords(all) {
  const lines = all.filter(({ isSeed }) => !isSeed);
  if (lines.length <= FEW) return lines.map(inWords).join("; ");
  const ranked = byLastValue(lines);
  if (!ranked.length) return `${lines.length} curves without a value`;
  return `${lines.length} curves, from the greatest last value: ${inWords(ranked[0])}; to the least: ${inWords(ranked.at(-1))}`;
}

function byLastValue(lines) {
  return lines
    .filter(({ points }) => points.length)
    .sort((one, other) => other.points.at(-1)[1] - one.points.at(-1)[1]);
}

function inWords({ name, points, most }) {
  if (!points.length) return `${plain(name)} has no value`;
  const values = points.map(([, value]) => value);
  const [least, greatest] = extent(values);
  const parts = [
    `${counted(points.length, "value")} up to ${number(points.at(-1)[0])}`,
    `last ${valueWords(points.at(-1), most)}`,
  ];
  const whose = most ? `, mean of ${counted(most, "run")},` : "";
  return `${plain(name)}${whose} ${parts.join(", ")}, least ${number(least)}, greatest ${number(greatest)}`;
}

/** The value of a point; of several runs with their deviation, and their number where some are missing. */
function valueWords([, value, spread, count], most) {
  if (!most) return number(value, 5);
  const range = typeof spread === "number" ? ` ± ${number(spread, 2)}` : "";
  return `${number(value)}${range}${count < most ? ` (${count} of ${most})` : ""}`;
}

/** The classes of a line's colour and dashes. */
export function lookOf(index) {
  return `s${index % 8}${index >= 8 ? ` d${Math.floor(index / 8) % 8}` : ""}`;
}

function bandNode(series, chart, width) {
  const { spec, x, y, least } = chart;
  const points = spec.smooth > 0 ? smoothed(series.points, spec.smooth) : series.points;
  const d = bandPath(thinned(points, width), x, y, least, shownOn(spec));
  return svg("path", { class: `band ${lookOf(series.index)}`, "data-line": series.index, d });
}

function lineNode(series, chart, width) {
  const { spec, x, y } = chart;
  const points = thinned(series.points, width);
  const nodes = [];
  const isSmooth = spec.smooth > 0 && points.length > 2;
  const isShown = shownOn(spec);
  const look = lookOf(series.index);
  const path = (some, more) => svg("path", { class: `line ${look}${more}`, d: pathOf(some, x, y, isShown) });
  if (isSmooth && !series.most && !series.isSeed) nodes.push(path(points, " raw"));
  const main = isSmooth ? thinned(smoothed(series.points, spec.smooth), width) : points;
  const seed = series.isSeed ? " seed" : "";
  for (const part of series.most ? stretches(main, series.most) : [{ isWhole: true, points: main }])
    nodes.push(path(part.points, part.isWhole ? seed : " few"));
  if (points.length <= 30 && !isSmooth && !series.isSeed) {
    nodes.push(
      ...points
        .filter(([, value]) => isShown(value))
        .map(([step, value]) =>
          svg("circle", { class: `dot ${look}`, cx: x(step), cy: y(value), r: points.length < 3 ? 3.5 : 2 }),
        ),
    );
  }
  return svg("g", { class: "series", "data-line": series.index }, nodes);
}

/** Make all lines but one pale; null makes none. */
function light(chart, index) {
  for (const node of chart.box.querySelectorAll("[data-line]"))
    node.classList.toggle("pale", index !== null && node.getAttribute("data-line") !== String(index));
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

function stepsOf(all) {
  const steps = new Set(all.flatMap(({ points }) => points.map(([step]) => step)));
  return [...steps].sort((one, other) => one - other);
}

function stepAt(chart, event) {
  const at = event.clientX - chart.box.getBoundingClientRect().left;
  let best = null;
  for (const step of chart.steps) {
    if (best === null || Math.abs(chart.x(step) - at) < Math.abs(chart.x(best) - at)) best = step;
  }
  return best;
}

function heightAt(chart, event) {
  return event.clientY - chart.box.getBoundingClientRect().top;
}

/** Put the crosshair on a step and say what is there, the nearest of many lines first; null takes it away. */
function point(chart, step, height = null) {
  chart.at = step;
  if (!chart.cross || !chart.series) return;
  const { spec, frame } = chart;
  if (step === null) {
    chart.cross.replaceChildren();
    chart.readout.replaceChildren(...lastValues(chart.series));
    light(chart, null);
    return;
  }
  const at = chart.x(step);
  const { found, left } = toldAt(chart, step, height);
  const dots = found.filter(([, entry]) => entry && shownOn(spec)(entry[1]));
  chart.cross.replaceChildren(
    svg("line", { x1: at, x2: at, y1: frame.top, y2: frame.bottom }),
    ...dots.map(([series, [, value]]) =>
      svg("circle", { class: `dot ${lookOf(series.index)}`, cx: at, cy: chart.y(value), r: 3.5 }),
    ),
  );
  const marks = chart.marks.filter((mark) => Math.abs(chart.x(mark.step) - at) < 5);
  chart.readout.replaceChildren(
    el("span", {}, `${spec.unit ?? "step"} ${number(step, 8)}`),
    ...found.map(([series, entry]) =>
      keyed(series, entry ? valueWords(entry, series.most) : number(null), chart.series.length > 1),
    ),
    left ? el("span", { class: "quiet" }, `and ${left} more`) : "",
    ...marks.map((mark) => el("span", { class: `mark-text ${mark.kind}` }, visible(mark.text))),
    spec.pickText ? el("span", { class: "quiet" }, spec.pickText) : "",
  );
}

/** The series with their entries at a step: all of a few, those that are nearest to the pointer of many. */
function toldAt(chart, step, height) {
  const all = chart.series.map((series) => [series, entryAt(series.points, step)]);
  const lines = all.filter(([{ isSeed }]) => !isSeed);
  const distance = ([, entry]) => (height === null ? -entry[1] : Math.abs(chart.y(entry[1]) - height));
  const sorted = (some) => some.filter(([, entry]) => entry).sort((one, other) => distance(one) - distance(other) || 0);
  if (height !== null && lines.length > 2) light(chart, sorted(lines)[0]?.[0].index ?? null);
  const seed = height === null ? [] : sorted(all.filter(([{ isSeed }]) => isSeed)).slice(0, 1);
  if (lines.length <= FEW) return { found: [...lines, ...seed], left: 0 };
  const ranked = sorted(lines);
  return { found: [...ranked.slice(0, NEAREST), ...seed], left: Math.max(ranked.length - NEAREST, 0) };
}

function entryAt(points, step) {
  let low = 0;
  let high = points.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] === step) return points[middle];
    if (points[middle][0] < step) low = middle + 1;
    else high = middle - 1;
  }
  return null;
}

function lastValues(all) {
  const lines = all.filter(({ isSeed, points }) => !isSeed && points.length);
  const text = (each) => valueWords(each.points.at(-1), each.most);
  if (lines.length <= FEW) return lines.map((each) => keyed(each, text(each), all.length > 1));
  return [el("span", { class: "quiet" }, `${lines.length} curves: point at one for its name`)];
}

/** A value with the key of its series. */
function keyed(series, text, isNamed) {
  const name = isNamed
    ? [el("i", { class: `key ${lookOf(series.index)}` }), el("span", { class: "of" }, visible(series.name)), " "]
    : [];
  return el("span", { class: "keyed" }, name, el("b", {}, text));
}

function moveCrosshair(chart, event) {
  const steps = chart.steps ?? [];
  if (event.key === "Enter" && chart.at !== null) chart.spec.picked?.(chart.at);
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (move === undefined || !steps.length) return;
  event.preventDefault();
  const from = chart.at === null ? (move > 0 ? -1 : steps.length) : steps.indexOf(chart.at);
  const to = Math.min(Math.max(Number.isFinite(move) ? from + move : move, 0), steps.length - 1);
  point(chart, steps[to]);
  announce(chart.readout.textContent);
}
