// Curves over steps in SVG.

import { axes, canvas, frameOf, lazily, logTicks, redraw, roomy, scale, ticks } from "./charts.js";
import { announce, el, svg, visible } from "./elements.js";
import { counted, extent, number, plain } from "./text.js";

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
