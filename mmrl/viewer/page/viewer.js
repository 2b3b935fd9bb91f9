"use strict";
// The page of `mmrl view` and of a report. No imports and no build step, so that it works from a file too.
//
// Documents come from the server (`data/RESOURCE`) or lie in the report. Whatever a run recorded is hostile text: it
// enters the page by text nodes and through `visible` or `plain`, which show control characters as symbols.
//
// Formatted by prettier with a width of 120.

// ---- Elements

const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** The element with attributes and children; `on` has listeners, `vars` custom properties of its style. */
function filled(node, attributes, children) {
  const { on, vars, value, ...plainly } = attributes ?? {};
  for (const [key, given] of Object.entries(plainly)) {
    if (given !== null && given !== undefined && given !== false) node.setAttribute(key, given === true ? "" : given);
  }
  for (const [event, heard] of Object.entries(on ?? {})) node.addEventListener(event, heard);
  for (const [name, given] of Object.entries(vars ?? {})) node.style.setProperty(name, given);
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  if (value !== undefined) node.value = value;
  return node;
}

/** A link; `to` may be a function, which is asked again before the link is followed. */
function link(to, attributes, ...children) {
  if (typeof to !== "function") return el("a", { href: to, ...attributes }, ...children);
  const node = el("a", { href: to(), ...attributes }, ...children);
  for (const event of ["pointerover", "focus", "click", "auxclick"])
    node.addEventListener(event, () => node.setAttribute("href", to()));
  return node;
}

/** A link to where a function leads; greyed where it leads nowhere. */
function arrow(to, text, name) {
  if (!to()) return el("span", { class: "button off", "aria-hidden": "true" }, text);
  return link(to, { class: "button", "aria-label": name, title: name }, text);
}

function button(label, pressed, attributes) {
  return el("button", { type: "button", ...attributes, on: { click: pressed } }, label);
}

function control(label, input, attributes) {
  return el("label", { class: "control", ...attributes }, el("span", {}, label), input);
}

/** A select; `options` are [value, label] pairs. Values may be recorded texts, of which `chosen` gets the very same. */
function choice(options, value, chosen, attributes) {
  const nodes = options.map(([each, label]) =>
    el("option", { value: plain(each), selected: textOf(each) === textOf(value) }, label),
  );
  const heard = ({ target }) => chosen(textOf(options[target.selectedIndex][0]));
  return el("select", { ...attributes, on: { change: heard } }, nodes);
}

function checkbox(label, checked, changed) {
  const input = el("input", { type: "checkbox", on: { change: (event) => changed(event.target.checked) } });
  input.checked = checked;
  return el("label", { class: "check" }, input, el("span", {}, label));
}

function section(title, attributes, ...children) {
  return el("section", attributes, el("h2", {}, title), ...children);
}

function quiet(...children) {
  return el("p", { class: "quiet" }, ...children);
}

function problemNode(text, again) {
  const more = again ? [" ", button("Try again", again)] : [];
  return el("p", { class: "problem", role: "alert" }, sentence(text), more);
}

/** A sentence whose words between backticks are code. */
function sentence(text) {
  const parts = textOf(text).split("`");
  if (parts.length % 2 === 0) return visible(text);
  return parts.map((part, i) => (i % 2 ? el("code", {}, visible(part)) : visible(part)));
}

/** Other children of a box; the focus stays on the link or control that takes the place of the one that had it. */
function replace(box, ...children) {
  const active = document.activeElement;
  const key = box.contains(active) && active !== box ? focusKey(active) : null;
  box.replaceChildren(...children.flat(Infinity).filter((child) => child || child === 0));
  if (key === null) return;
  const all = [...box.querySelectorAll("a, button, select, input, summary, [tabindex]")];
  all.find((each) => focusKey(each) === key)?.focus({ preventScroll: true });
}

function focusKey(node) {
  const { key, at } = node.dataset;
  return [
    node.tagName,
    key ?? at ?? node.getAttribute("href") ?? node.getAttribute("aria-label") ?? node.textContent,
  ].join(" ");
}

/** A function that runs `act` once calls have ceased for some milliseconds. */
function later(act, wait) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...words), wait);
  };
}

// ---- Text and numbers

// Control, bidirectional and invisible characters, tags, and halves of surrogate pairs. Tab and newline stay.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u2800\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb" +
    "\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}\\ud800-\\udfff]",
  "gu",
);

const CONTROLS = [
  ..."NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI".split(" "),
  ..."DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" "),
];

/** A symbol that any font has. */
function symbolOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return `⟨${CONTROLS[code]}⟩`;
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** A recorded value as a text, which a number or an object may be where a text should be; nothing is empty. */
function textOf(value) {
  return value === null || value === undefined ? "" : valueText(value);
}

/** The text as one string without hidden characters, for attributes, options and titles. */
function plain(text) {
  return textOf(text).replace(HIDDEN, symbolOf);
}

/** The text as nodes, its hidden characters as marked symbols. */
function visible(text) {
  const given = textOf(text);
  const nodes = [];
  let end = 0;
  for (const match of given.matchAll(HIDDEN)) {
    nodes.push(given.slice(end, match.index), el("span", { class: "hidden-character" }, symbolOf(match[0])));
    end = match.index + match[0].length;
  }
  nodes.push(given.slice(end));
  return nodes.filter((node) => node !== "");
}

/** The text in one line, newlines and tabs as symbols too. */
function inLine(text) {
  return visible(textOf(text).replace(/\n/g, "⏎").replace(/\t/g, "→"));
}

/** A block of recorded text. */
function textBlock(text, attributes) {
  const isEmpty = text === null || text === undefined || text === "";
  const words = isEmpty ? el("span", { class: "quiet" }, "(empty)") : visible(text);
  return el("div", { class: "text", dir: "ltr", ...attributes }, words);
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return plain(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) {
    return value.toExponential(Math.max(2, digits - 2)).replace("e+", "e");
  }
  return String(Number(value.toPrecision(digits)));
}

function percent(share) {
  return share === null || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(1)} %`;
}

function counted(count, one, several) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : (several ?? `${one}s`)}`;
}

/** Any JSON value as a text. */
function valueText(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function timeText(seconds) {
  if (typeof seconds !== "number") return "–";
  const at = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

function durationText(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 120) return `${number(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function known(values) {
  return (values ?? []).filter((value) => typeof value === "number" && Number.isFinite(value));
}

/** Least and greatest value; Math.min(...values) fails on long lists. */
function extent(values) {
  let least = Infinity;
  let greatest = -Infinity;
  for (const value of values) {
    if (value < least) least = value;
    if (value > greatest) greatest = value;
  }
  return [least, greatest];
}

/** Pearson's correlation; null if one of the two does not vary. */
function correlation(ones, others) {
  const [one, other] = [mean(ones), mean(others)];
  let both = 0;
  let first = 0;
  let second = 0;
  ones.forEach((value, i) => {
    both += (value - one) * (others[i] - other);
    first += (value - one) ** 2;
    second += (others[i] - other) ** 2;
  });
  return first > 1e-12 && second > 1e-12 ? both / Math.sqrt(first * second) : null;
}

// ---- Documents

/** A sentence that is shown in place of a page. */
class Problem extends Error {
  constructor(text, mayPass = false) {
    super(text);
    this.mayPass = mayPass;
  }
}

const KEPT_DOCUMENTS = 80;
const documents = new Map();
const report = embeddedReport();

/** What a report has inside; null if the page is served. */
function embeddedReport() {
  const node = document.getElementById("report");
  return node ? JSON.parse(node.textContent) : null;
}

/** A document; a promise of it is kept, the least recently asked for goes first. */
function load(resource) {
  const kept = documents.get(resource);
  documents.delete(resource);
  const promise = kept ?? (report ? embedded(resource) : fetched(resource));
  documents.set(resource, promise);
  if (!kept) promise.catch(() => documents.get(resource) === promise && documents.delete(resource));
  if (documents.size > KEPT_DOCUMENTS) documents.delete(documents.keys().next().value);
  return promise;
}

function inReport(resource) {
  return report && Object.hasOwn(report.documents, resource) ? report.documents[resource] : undefined;
}

async function embedded(resource) {
  const found = inReport(resource);
  if (found !== undefined) return checked(found);
  throw new Problem("This report leaves that out: it holds a part of the run only. `mmrl view RUN` shows all of it.");
}

async function fetched(resource) {
  if (location.protocol === "file:") {
    throw new Problem(
      "This page has no data inside. `mmrl view RUN` serves it with a run, `mmrl report RUN -o FILE` writes one file.",
    );
  }
  let answer;
  try {
    answer = await fetch(`data/${resource}`, { cache: "no-store", credentials: "same-origin" });
  } catch {
    throw new Problem("The viewer's server does not answer: `mmrl view` may have ended. Start it again.", true);
  }
  const found = await answer.json().catch(() => null);
  if (answer.ok && found !== null) return checked(found);
  if (found?.problem) throw new Problem(found.problem, answer.status >= 500);
  if (answer.status === 401 || answer.status === 403) {
    throw new Problem("The server does not know this browser: open the address that `mmrl view` printed.");
  }
  throw new Problem(`The server's answer to ${resource} cannot be read (status ${answer.status}).`, true);
}

/** The document, unless it is nothing but a problem. */
function checked(found) {
  if (found && found.problem && Object.keys(found).length === 1) throw new Problem(found.problem);
  return found;
}

/** The document, or this if there is none. */
async function loadOr(resource, otherwise) {
  try {
    return await load(resource);
  } catch (error) {
    if (error instanceof Problem && !error.mayPass) return otherwise;
    throw error;
  }
}

function mediaSource(run, hash) {
  if (typeof hash !== "string" || !/^[0-9a-f]{64}$/.test(hash)) return null;
  if (!report) return `media/${run}/${hash}`;
  const found = Object.hasOwn(report.media ?? {}, hash) ? report.media[hash] : null;
  return found?.startsWith("data:image/") ? found : null;
}

// ---- Addresses

let place = { path: "", query: new URLSearchParams() };

function parsedAddress(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { path: path.replace(/\/$/, ""), query: new URLSearchParams(query ?? "") };
}

/** An address in the page; empty values are left out. */
function address(path, query) {
  const pairs = query instanceof URLSearchParams ? [...query] : Object.entries(query ?? {});
  const full = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(full).toString().replace(/%2F/g, "/").replace(/%2C/g, ",");
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** This page's address with other values. */
function addressWith(changes) {
  return address(place.path, { ...Object.fromEntries(place.query), ...changes });
}

function go(to, replaces = false) {
  if (to === location.hash) return;
  if (!replaces) location.hash = to;
  else {
    history.replaceState(null, "", to);
    show();
  }
}

/** Other values in the address, without drawing the page anew. */
function note(changes) {
  const to = addressWith(changes);
  history.replaceState(null, "", to);
  place = parsedAddress(to);
}

function wanted(name, otherwise = "") {
  return place.query.get(name) ?? otherwise;
}

/** A text within an address; halves of surrogate pairs have no code there. */
function encoded(text) {
  return encodeURIComponent(textOf(text).replace(/[\ud800-\udfff]/gu, "\ufffd"));
}

function list(text) {
  return text.split(",").filter((part) => part !== "");
}

// ---- Charts

// Charts are drawn when they come into sight, at the width that they have, and again when it changes.
const drawers = new WeakMap();
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => paint(target)));
const sights = new IntersectionObserver(
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
function lineChart(spec) {
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
function histogram({ title, bins, unit }) {
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
function binned(values, range) {
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
function scatter({ title, xTitle, yTitle, points, picked, height = 280 }) {
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

// ---- Tables

/**
 * A table in a region that scrolls sideways by itself.
 *
 * columns: [{key, title, cell: row => node, value: row => number or text (sortable), isNumber, class}]
 */
function table({ caption, columns, rows, sort = "", sorted, rowAttributes }) {
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
    button([column.title, arrow], () => sorted(next), { "data-key": column.key }),
  );
}

/** The rows in the order that `-key` or `key` asks for; unknown values last. */
function ordered(rows, columns, sort) {
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

function pager(total, page, size, turned) {
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

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    { class: "facts" },
    shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

// ---- Runs

const LIVE = report ? "live when this report was made" : "live";
const KINDS = { step: "training", evaluation: "evaluation", blank: "blank pictures" };

async function runList() {
  return load("runs");
}

/** What curves need of some runs; a run that cannot be read is a problem for all. */
async function loadRuns(indices) {
  return Promise.all(
    indices.map(async (run, index) => {
      const [info, metrics, events] = await Promise.all([
        load(`run/${run}`),
        load(`run/${run}/metrics`),
        loadOr(`run/${run}/events`, []),
      ]);
      return { run, index, info, metrics, events, name: info.name };
    }),
  );
}

/** The recorded steps of a kind that the page can show; a report holds some of them. */
function recordedOf(info, kind) {
  const all = { step: info.steps, evaluation: info.evaluations, blank: info.blanks }[kind] ?? [];
  return report ? all.filter((step) => inReport(stepPath(0, kind, step))) : all;
}

/** The alarms of steps that count, each once: a run that is killed before its step is logged tells them again. */
function alarmsOf(events) {
  const told = new Map();
  for (const event of events) {
    if (event.kind === "alarm" && !event.undone)
      told.set(JSON.stringify([event.step, event.monitor, event.message]), event);
  }
  return [...told.values()];
}

function alarmText(event) {
  return `${textOf(event.monitor ?? "alarm")}: ${textOf(event.message)}`;
}

/** Vertical lines of a run's curves: where attempts after the first went on, and alarms. */
function marksOf({ info, events, name, index }, isOneOfMany) {
  const who = isOneOfMany ? `${name}: ` : "";
  const attempts = (info.attempts ?? []).slice(1).map((attempt) => ({
    kind: "attempt",
    index,
    step: attempt.from_step ?? 0,
    text: `${who}attempt ${number(attempt.number)} went on from step ${number(attempt.from_step ?? 0)}${changesText(attempt)}`,
  }));
  const alarms = alarmsOf(events)
    .filter((event) => typeof event.step === "number")
    .map((event) => ({
      kind: "alarm",
      index,
      step: event.step,
      text: `${who}alarm at step ${number(event.step)}, ${alarmText(event)}`,
    }));
  return [...attempts, ...alarms];
}

function changesText(attempt) {
  const changes = attempt.changes ?? [];
  return changes.length ? `, with ${counted(changes.length, "change")} of the config` : "";
}

function pointsOf(metrics, name) {
  const values = Object.hasOwn(metrics.curves, name) ? metrics.curves[name] : [];
  const found = [];
  for (let i = 0; i < values.length; i++) if (values[i] !== null) found.push([metrics.steps[i], values[i]]);
  return found;
}

/** The recorded step that is nearest to this one; null if there is none. */
function nearest(steps, step) {
  let best = null;
  for (const each of steps) if (best === null || Math.abs(each - step) < Math.abs(best - step)) best = each;
  return best;
}

// ---- Curves

const SECTIONS = [
  "eval",
  "reward",
  "group",
  "advantage",
  "length",
  "policy",
  "loss",
  "value",
  "episode",
  "mismatch",
  "other",
  "perf",
];

function sectionOf(name) {
  const [first, ...rest] = name.split("/");
  return rest.length ? first : "other";
}

function sectionsOf(names) {
  const found = new Map();
  for (const name of names) found.set(sectionOf(name), [...(found.get(sectionOf(name)) ?? []), name]);
  const rank = (section) => (SECTIONS.includes(section) ? SECTIONS.indexOf(section) : SECTIONS.length - 2.5);
  return [...found].sort(([one], [other]) => rank(one) - rank(other) || one.localeCompare(other));
}

function matchesAny(name, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return !words.length || words.some((word) => name.toLowerCase().includes(word));
}

async function curvesPage(run) {
  const others = list(wanted("with")).map(Number);
  const all = (await runList()).filter((each) => each.run === run || !each.problem);
  const indices = [run, ...others.filter((each) => each !== run && all.some((known) => known.run === each))];
  const view = curvesView(await loadRuns(indices));
  const picker =
    all.length > 1 &&
    el(
      "fieldset",
      { class: "runs" },
      el("legend", {}, "over each other with"),
      all
        .filter((each) => each.run !== run)
        .map((each) =>
          checkbox(plain(each.name), others.includes(each.run), (on) => {
            const chosen = on ? [...others, each.run] : others.filter((other) => other !== each.run);
            go(addressWith({ with: chosen.join(",") }), true);
          }),
        ),
    );
  return {
    title: "Curves",
    run,
    runs: indices,
    node: [heading("Curves"), picker, view.node],
    update: async () => view.update(await loadRuns(indices)),
  };
}

/** Every metric of some runs: a toolbar, the alarms, and a chart for each metric by section. */
function curvesView(runs) {
  const view = { runs, cards: new Map() };
  view.alarms = el("div");
  view.body = el("div", { class: "curves" });
  view.node = el("div", {}, view.alarms, curveTools(view), view.body);
  view.update = (next) => {
    view.runs = next;
    if (shapeOf(view, namesOf(view)) === view.drawn) {
      for (const [name, card] of view.cards) card.update(curveSpec(view, name));
    } else drawCurves(view);
    view.alarms.replaceChildren(alarmList(view.runs));
  };
  drawCurves(view);
  view.alarms.replaceChildren(alarmList(runs));
  return view;
}

function curveTools(view) {
  const again = () => view.cards.forEach((card, name) => card.update(curveSpec(view, name)));
  const filter = el("input", { type: "search", class: "search", value: wanted("q"), placeholder: "reward eval/acc …" });
  filter.addEventListener(
    "input",
    later(() => {
      note({ q: filter.value });
      drawCurves(view);
    }, 120),
  );
  const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: wanted("smooth", "0") });
  const shown = el("output", {}, Number(wanted("smooth", "0")).toFixed(2));
  smooth.addEventListener("input", () => {
    shown.textContent = Number(smooth.value).toFixed(2);
    note({ smooth: Number(smooth.value) ? smooth.value : "" });
    again();
  });
  const log = checkbox("log scale", wanted("log") === "1", (on) => {
    note({ log: on ? "1" : "" });
    again();
  });
  const chosen = wanted("names") && link(() => addressWith({ names: "" }), { class: "button" }, "All curves");
  return el(
    "div",
    { class: "tools", role: "search" },
    control("metrics", filter),
    control("smoothing", smooth),
    shown,
    log,
    chosen,
  );
}

function namesOf(view) {
  const all = new Set(view.runs.flatMap(({ metrics }) => Object.keys(metrics.curves)));
  const names = list(wanted("names"));
  return names.length
    ? names.filter((name) => all.has(name))
    : [...all].filter((name) => matchesAny(name, wanted("q")));
}

/** A text that changes when another curve is there, or one moves to another place. */
function shapeOf(view, names) {
  return JSON.stringify(names.map((name) => [name, isFlat(view, name)]));
}

function drawCurves(view) {
  const names = namesOf(view);
  const isChosen = wanted("names") !== "";
  view.drawn = shapeOf(view, names);
  view.cards = new Map(names.map((name) => [name, lineChart(curveSpec(view, name))]));
  if (!names.length) {
    const some = view.runs.some(({ metrics }) => Object.keys(metrics.curves).length);
    view.body.replaceChildren(
      quiet(some ? "No metric has such a name." : "The run has no metrics yet: its first step is not finished."),
    );
    return;
  }
  const cards = (some) =>
    el(
      "div",
      { class: isChosen ? "cards large" : "cards" },
      some.map((name) => curveCard(view, name)),
    );
  if (isChosen) replace(view.body, cards(names));
  else
    replace(
      view.body,
      sectionsOf(names).map(([title, some]) => curveSection(view, title, some, cards)),
    );
}

/** The curves of a section; those that never change come last, folded. */
function curveSection(view, title, names, cards) {
  const flat = names.filter((name) => isFlat(view, name));
  const others = names.filter((name) => !flat.includes(name));
  const isOpen = !others.length && names.length < 4;
  const more = flat.length
    ? fold(`curves/${title}/flat`, [`${flat.length} that never changed`], isOpen, cards(flat))
    : "";
  const count = el("span", { class: "quiet" }, ` ${names.length}`);
  const section = fold(`curves/${title}`, [visible(title), count], true, others.length ? cards(others) : "", more);
  if (names.length === 1) section.classList.add("single");
  return section;
}

/** True if all runs have one and the same value at several steps. */
function isFlat({ runs }, name) {
  const values = runs.flatMap(({ metrics }) => pointsOf(metrics, name).map(([, value]) => value));
  return values.length > 2 && values.every((value) => value === values[0]);
}

function curveCard(view, name) {
  const title = link(() => addressWith({ names: name, q: "" }), { title: "this curve alone, larger" }, visible(name));
  return el("article", { class: "card", "data-metric": plain(name) }, el("h3", {}, title), view.cards.get(name).node);
}

function curveSpec(view, name) {
  const isMany = view.runs.length > 1;
  const shown = view.runs.filter(({ metrics }) => pointsOf(metrics, name).length);
  // Steps of the curve's own kind; of several runs a click could mean any.
  const kind = { eval: "evaluation", eval_blank: "blank" }[name.split("/")[0]] ?? "step";
  const steps = isMany ? [] : recordedOf(view.runs[0].info, kind);
  const last = Math.max(1, ...view.runs.map(({ metrics }) => metrics.steps.at(-1) ?? 0));
  const first = Math.min(...view.runs.map(({ metrics }) => metrics.steps[0] ?? 0));
  const chosen = list(wanted("names"));
  return {
    label: plain(name),
    height: chosen.length === 1 ? 380 : chosen.length ? 240 : 150,
    log: wanted("log") === "1",
    smooth: Number(wanted("smooth", "0")) || 0,
    range: [Math.min(first, last - 1), last],
    series: view.runs.map((each) => ({ name: each.name, index: each.index, points: pointsOf(each.metrics, name) })),
    marks: shown.flatMap((each) => marksOf(each, isMany)),
    pickText: steps.length ? "click: rollouts" : "",
    picked: (step) => {
      const found = nearest(steps, step);
      if (found !== null) go(address(stepPath(view.runs[0].run, kind, found)));
    },
  };
}

function alarmList(runs) {
  const found = runs.flatMap((each) => alarmsOf(each.events).map((event) => ({ each, event })));
  if (!found.length) return "";
  const items = found
    .slice(-20)
    .reverse()
    .map(({ each, event }) => {
      const step = typeof event.step === "number" ? nearest(recordedOf(each.info, "step"), event.step) : null;
      const where =
        step === null
          ? `step ${number(event.step)}`
          : link(address(`run/${each.run}/step/${step}`), {}, `step ${number(event.step)}`);
      const who = runs.length > 1 ? [visible(each.name), ", "] : [];
      return el(
        "li",
        {},
        el("b", {}, who, where),
        " ",
        el("span", { class: "tag" }, visible(event.monitor ?? "alarm")),
        " ",
        inLine(event.message),
      );
    });
  const more =
    found.length > items.length ? quiet(`and ${found.length - items.length} earlier ones, in the events`) : "";
  return el(
    "aside",
    { class: "alarms", "aria-label": "Alarms" },
    el("h2", {}, `▼ ${counted(found.length, "alarm")}`),
    el("ul", {}, items),
    more,
  );
}

// ---- A step's rollouts

const STEP_KEYS = [
  "q",
  "source",
  "finish",
  "state",
  "right",
  "who",
  "rmin",
  "rmax",
  "lmin",
  "lmax",
  "sort",
  "by",
  "sample",
];
const PAGE_ROWS = 100;

function stepPath(run, kind, step) {
  return `run/${run}/${kind}/${step}`;
}

/** What the address says of a step's filter, for links to its groups and back. */
function filterQuery() {
  return Object.fromEntries(STEP_KEYS.map((key) => [key, wanted(key)]));
}

async function newestPage(run) {
  const info = await load(`run/${run}`);
  const found = Object.keys(KINDS)
    .map((kind) => [kind, recordedOf(info, kind).at(-1)])
    .find(([, step]) => step !== undefined);
  if (!found) {
    const text = "No rollouts are recorded yet: they are written when the first step is finished.";
    return { title: "Rollouts", run, runs: [run], node: [heading("Rollouts"), quiet(text)], update: redrawn };
  }
  go(address(stepPath(run, ...found)), true);
  return null;
}

async function stepPage(run, kind, step) {
  const [info, doc] = await Promise.all([load(`run/${run}`), load(stepPath(run, kind, step))]);
  const view = { run, kind, step, doc, members: membersByGroup(doc) };
  view.body = el("div", { class: "step-body" });
  const bar = el("div", {}, stepBar(info, run, kind, step, ""));
  await drawStep(view);
  return {
    title: `${titleOf(kind, step)}`,
    run,
    runs: [run],
    node: [bar, heading(titleOf(kind, step)), stepSummary(view), stepTools(view), view.body],
    steps: () => stepTargets(info, kind, step, (next) => address(stepPath(run, kind, next), place.query)),
    firstGroup: () => groupAddress(view, view.order[0]),
    update: async () => stepChanged(bar, await load(`run/${run}`), run, kind, step, ""),
  };
}

function titleOf(kind, step) {
  return { step: `Step ${step}`, evaluation: `Evaluation at step ${step}`, blank: `Blank pictures at step ${step}` }[
    kind
  ];
}

function stepTargets(info, kind, step, to) {
  const steps = recordedOf(info, kind);
  const before = steps.filter((each) => each < step).at(-1);
  const after = steps.find((each) => each > step);
  return { before: before !== undefined && to(before), after: after !== undefined && to(after) };
}

/** Links to other steps and kinds; `rest` is what follows the step in the address. */
function stepBar(info, run, kind, step, rest) {
  const to = (next) => address(stepPath(run, kind, next) + rest, { ...filterQuery(), follow: wanted("follow") });
  const target = (which) => stepTargets(info, kind, step, to)[which];
  const steps = recordedOf(info, kind);
  const newest = steps.at(-1);
  const kinds = Object.keys(KINDS).filter((each) => recordedOf(info, each).length || each === kind);
  const kindLinks = kinds.map((each) =>
    link(
      address(stepPath(run, each, nearest(recordedOf(info, each), step) ?? step)),
      { "aria-current": each === kind ? "page" : null },
      KINDS[each],
    ),
  );
  const picker = choice(
    steps.map((each) => [each, `step ${each}`]),
    step,
    (next) => {
      document.activeElement?.blur(); // keys lead on from here
      go(to(Number(next)));
    },
    { "aria-label": "Step" },
  );
  const follow =
    !report &&
    info.live &&
    kind === "step" &&
    rest === "" &&
    checkbox("follow the newest", wanted("follow") === "1", (on) => {
      note({ follow: on ? "1" : "" });
      if (on && newest !== step) go(to(newest));
    });
  const news = follow && newest > step && link(to(newest), {}, `newest: step ${newest}`);
  return el(
    "nav",
    { class: "step-bar", "aria-label": "Steps" },
    kinds.length > 1 && el("span", { class: "tabs" }, kindLinks),
    arrow(() => target("before"), "‹", "Step before (p)"),
    picker,
    arrow(() => target("after"), "›", "Next step (n)"),
    news,
    follow,
    el(
      "span",
      { class: "tabs" },
      link(
        () => address(stepPath(run, kind, step), filterQuery()),
        { "aria-current": rest === "" ? "page" : null },
        "rollouts",
      ),
      link(
        address(`${stepPath(run, kind, step)}/plots`),
        { "aria-current": rest === "/plots" ? "page" : null },
        "plots",
      ),
    ),
  );
}

function stepChanged(bar, info, run, kind, step, rest) {
  const newest = recordedOf(info, kind).at(-1);
  if (wanted("follow") === "1" && newest > step) go(address(stepPath(run, kind, newest) + rest, place.query), true);
  else replace(bar, stepBar(info, run, kind, step, rest));
}

/** The rows of each group. */
function membersByGroup(doc) {
  const found = new Map(doc.groups.map((group) => [group.group, []]));
  doc.rows.group.forEach((group, row) => found.get(group)?.push(row));
  return found;
}

function stepSummary({ doc }) {
  const { rows, groups } = doc;
  const used = sampledRows(doc);
  const of = (values, some = used) => some.map((row) => values[row]);
  const scored = used.filter((row) => rows.valid[row] !== false);
  const sampled = used.length;
  const judged = known(of(rows.right, scored));
  const share = (flags) => percent(mean(flags.map(Number)));
  return facts([
    ["groups", number(groups.length)],
    ["trained on", number(groups.filter((group) => group.trained).length)],
    ["rejected", number(groups.filter((group) => !group.kept).length)],
    [
      "rollouts",
      `${sampled.toLocaleString("en")}${sampled < rows.group.length ? ` and ${rows.group.length - sampled} greedy` : ""}`,
    ],
    ["reward", number(mean(known(of(rows.reward, scored))))],
    ["right", judged.length ? share(judged) : null],
    ["length", number(mean(known(of(rows.length))))],
    ["truncated", share(of(rows.truncated))],
    ["unscored", scored.length < sampled ? number(sampled - scored.length) : null],
  ]);
}

/** The rows of rollouts that were sampled; metrics too are without greedy ones. */
function sampledRows({ rows }) {
  return rows.group.map((_, row) => row).filter((row) => !rows.greedy[row]);
}

// -- Filters

/** The texts of some values, each once and in order. */
function distinct(values) {
  return [...new Set(values.map(textOf).filter((value) => value !== ""))].sort();
}

function stepTools(view) {
  const { doc } = view;
  const changed = (key) => (value) => {
    note({ [key]: value, page: "" });
    drawStep(view);
  };
  const pick = (key, label, options) =>
    options.length > 1 &&
    control(
      label,
      choice(
        [["", "all"], ...options.map((each) => (Array.isArray(each) ? each : [each, plain(each)]))],
        wanted(key),
        changed(key),
      ),
    );
  const bound = (key, label) => {
    const input = el("input", {
      type: "number",
      step: "any",
      value: wanted(key),
      "aria-label": label,
      placeholder: label.split(" ")[0],
    });
    input.addEventListener(
      "input",
      later(() => changed(key)(input.value), 200),
    );
    return input;
  };
  const search = el("input", {
    type: "search",
    class: "search",
    value: wanted("q"),
    placeholder: "text of completions and prompts",
  });
  search.addEventListener(
    "input",
    later(() => changed("q")(search.value), 250),
  );
  const hasGreedy = doc.rows.greedy.includes(true);
  const isJudged = doc.rows.right.some((right) => right !== null);
  return el(
    "div",
    { class: "tools", role: "search" },
    control("search", search),
    control(
      "show",
      choice(
        [
          ["", "groups"],
          ["rollout", "rollouts"],
        ],
        wanted("by"),
        changed("by"),
      ),
    ),
    pick("state", "group", [
      ["trained", "trained on"],
      ["kept", "kept, not trained on"],
      ["dropped", "rejected"],
    ]),
    isJudged &&
      pick("right", "answer", [
        ["yes", "right"],
        ["no", "wrong"],
        ["unknown", "not judged"],
      ]),
    pick("finish", "end", [["truncated", "truncated"], ...distinct(doc.rows.finish_reason)]),
    pick("source", "source", distinct(doc.groups.map((group) => group.source))),
    hasGreedy &&
      pick("who", "who", [
        ["sampled", "sampled"],
        ["greedy", "greedy"],
      ]),
    el(
      "fieldset",
      { class: "range" },
      el("legend", {}, "reward"),
      bound("rmin", "least reward"),
      "–",
      bound("rmax", "most reward"),
    ),
    el(
      "fieldset",
      { class: "range" },
      el("legend", {}, "length"),
      bound("lmin", "least length"),
      "–",
      bound("lmax", "most length"),
    ),
    button("20 at random", () => changed("sample")(String(Math.floor(Math.random() * 1e6)))),
    button("Clear", () => go(address(place.path, { by: wanted("by"), follow: wanted("follow") }), true)),
  );
}

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
      is("who", rows.greedy[row] ? "greedy" : "sampled") &&
      within(rows.reward[row], rmin, rmax) &&
      within(rows.length[row], lmin, lmax)
    );
  };
}

/** The rows that the address asks for. */
async function matchingRows(view) {
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

// -- Tables of groups and of rollouts

/** Draw the rows that the address asks for; of several calls the last one counts. */
async function drawStep(view) {
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

function distinctInOrder(values) {
  return [...new Set(values)];
}

function groupsOf(view, rows) {
  const found = new Set(rows.map((row) => view.doc.rows.group[row]));
  return view.doc.groups.filter((group) => found.has(group.group));
}

function groupAddress(view, group, more) {
  if (group === undefined) return null;
  return address(`${stepPath(view.run, view.kind, view.step)}/group/${group}`, { ...filterQuery(), ...more });
}

function groupColumns(view, rows) {
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
    { key: "answer", title: "reference answer", class: "short", cell: (group) => inLine(valueText(group.answer)) },
    {
      key: "reward",
      title: "reward",
      isNumber: true,
      value: (group) => group.reward_mean,
      cell: (group) => number(group.reward_mean, 3),
    },
    {
      key: "std",
      title: "std",
      isNumber: true,
      value: (group) => group.reward_std,
      cell: (group) => number(group.reward_std, 3),
    },
    { key: "length", title: "length", isNumber: true, value: length, cell: (group) => number(length(group), 3) },
    { key: "members", title: "completions", cell: (group) => memberSquares(view, group, chosen) },
    {
      key: "state",
      title: "state",
      value: (group) => (group.trained ? 0 : group.kept ? 1 : 2),
      cell: (group) => stateTag(group),
    },
  ].filter(Boolean);
}

/** The beginning of what is asked: the user's message, or the rendered prompt without marks of the chat template. */
function questionOf({ question, prompt }) {
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

/** A square for each completion, filled by its reward; those that the filter leaves out are pale. */
function memberSquares(view, group, chosen) {
  const { rows } = view.doc;
  const [least, greatest] = (view.rewards ??= extent(known(rows.reward)));
  const squares = view.members.get(group.group).map((row) => {
    const name = rows.greedy[row] ? "greedy" : `completion ${number(rows.index[row])}`;
    const text = `${name}: reward ${number(rows.reward[row])}, ${counted(rows.length[row] ?? 0, "token")}, ${plain(rows.finish_reason[row])}`;
    const classes = [
      "square",
      rows.greedy[row] && "greedy",
      rows.truncated[row] && "cut",
      !rows.valid[row] && "invalid",
      !chosen.has(row) && "pale",
    ];
    const share =
      typeof rows.reward[row] === "number"
        ? greatest > least
          ? (rows.reward[row] - least) / (greatest - least)
          : 1
        : 0;
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

function memberKey(index, greedy) {
  return greedy ? "greedy" : plain(index);
}

function stateOf(group) {
  return group.trained ? "trained" : group.kept ? "kept" : "dropped";
}

function stateTag(group) {
  const text = { trained: "trained on", kept: "kept", dropped: "rejected" }[stateOf(group)];
  return el("span", { class: `tag ${stateOf(group)}`, title: plain(group.why) }, text);
}

function rolloutColumns(view) {
  const { rows } = view.doc;
  const to = (row) => groupAddress(view, rows.group[row], { member: memberKey(rows.index[row], rows.greedy[row]) });
  const hasTurns = known(rows.turns).some((turns) => turns > 0);
  const isJudged = rows.right.some((right) => right !== null);
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
    {
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
    {
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

function rightTag(right) {
  if (right === null || right === undefined) return "–";
  return el("span", { class: `tag ${right ? "right" : "wrong"}` }, right ? "✓ right" : "✗ wrong");
}

function endTag(reason, truncated, valid) {
  return [
    el("span", { class: truncated ? "tag cut" : "" }, inLine(reason ?? "–")),
    valid === false ? [" ", el("span", { class: "tag wrong" }, "unscored")] : "",
  ];
}

// ---- Images

/** An image with its size; a sentence where it is missing. */
function picture(run, image, { isSmall = false, name = "image", side = 224 } = {}) {
  const source = mediaSource(run, image.hash);
  const size = `${number(image.width)} × ${number(image.height)} pixels`;
  const missing = () =>
    isSmall
      ? el("span", { class: "quiet", title: "The image is missing." }, "✗")
      : el(
          "p",
          { class: "problem" },
          report ? "The report leaves this image out, " : "The run's folder has no such image, ",
          size,
          ": ",
          el("code", {}, plain(image.hash).slice(0, 12)),
        );
  if (source === null) return missing();
  const pixels = Math.max(1, Math.min(isSmall ? 1 : 8, Math.floor(side / Math.max(image.width, image.height, 1))));
  const alternative = isSmall ? "" : `${name}, ${size}`;
  const shown = el("img", { src: source, alt: alternative, loading: "lazy", class: pixels > 1 ? "pixels" : null });
  if (!isSmall) shown.style.setProperty("width", `${Math.min(image.width * pixels, 640)}px`);
  if (isSmall) {
    shown.addEventListener("error", () => shown.replaceWith(missing()));
    return shown;
  }
  const caption = [`${name}: ${size}`, pixels > 1 ? `, shown ×${pixels}` : image.width > 640 ? ", shown smaller" : ""];
  const whole = el(
    "figure",
    { class: "picture" },
    shown,
    el("figcaption", {}, caption, report ? " (a thumbnail of them)" : ""),
  );
  shown.addEventListener("error", () => whole.replaceWith(missing()));
  return whole;
}

function pictureRow(run, images) {
  const name = (i) => (images.length > 1 ? `image ${i + 1} of ${images.length}` : "image");
  const pictures = images.map((image, i) => picture(run, image, { name: name(i) }));
  return pictures.length ? el("div", { class: "pictures" }, pictures) : "";
}

// ---- A group

async function groupPage(run, kind, step, group) {
  const loading = load(`${stepPath(run, kind, step)}/group/${group}`).catch((error) => error);
  const [info, details] = await Promise.all([load(`run/${run}`), loading]);
  const bar = el("div", {}, stepBar(info, run, kind, step, ""));
  const ways = {
    run,
    runs: [run],
    steps: () =>
      stepTargets(info, kind, step, (next) => address(`${stepPath(run, kind, next)}/group/${group}`, place.query)),
    up: address(stepPath(run, kind, step), filterQuery()),
  };
  if (details instanceof Error) {
    const { node, ...failed } = problemPage(details);
    return { ...ways, ...failed, node: [bar, node] }; // another step may have fewer groups: the keys lead on
  }
  const view = { run, kind, step, details, group, info };
  view.title = el("div", { class: "title-line" }, groupTitle(view));
  view.ordered = groupOrder(view); // the step's table may be long to read: the group does not wait for it
  view.panel = el("div", { class: "member-panel" });
  view.cards = el("div", { class: "members" });
  drawMembers(view);
  return {
    ...ways,
    title: `Group ${group}, ${titleOf(kind, step).toLowerCase()}`,
    view,
    node: [
      bar,
      groupHead(view),
      groupPrompt(view),
      rewardTable(view),
      section("Completions", {}, view.cards),
      view.panel,
    ],
    groups: () => view.ordered.then(() => groupNeighbours(view)),
    update: async () => stepChanged(bar, await load(`run/${run}`), run, kind, step, ""),
  };
}

/** Find the step's groups as the table has them, and lead from one to the next. */
async function groupOrder(view) {
  const { path } = place;
  view.doc = await loadOr(stepPath(view.run, view.kind, view.step), null).catch(() => null);
  if (!view.doc || place.path !== path) return;
  view.members = membersByGroup(view.doc);
  view.order = await orderOfGroups(view).catch(() => undefined);
  replace(view.title, groupTitle(view));
}

async function orderOfGroups(view) {
  const rows = await matchingRows(view);
  const isByRollout = wanted("by") === "rollout";
  const columns = isByRollout ? rolloutColumns(view) : groupColumns(view, rows);
  const shown = ordered(isByRollout ? rows : groupsOf(view, rows), columns, wanted("sort"));
  return distinctInOrder(shown.map((each) => (isByRollout ? view.doc.rows.group[each] : each.group)));
}

function groupNeighbours(view) {
  const { group, order = [] } = view;
  const at = order.indexOf(group);
  const keep = { color: wanted("color"), view: wanted("view") };
  const to = (next) => next !== undefined && groupAddress(view, next, keep);
  if (at >= 0) return { before: to(order[at - 1]), after: to(order[at + 1]) };
  return { before: to(order.filter((each) => each < group).at(-1)), after: to(order.find((each) => each > group)) };
}

function groupTitle(view) {
  const { group, order } = view;
  const at = order?.indexOf(group) ?? -1;
  const all = () => address(stepPath(view.run, view.kind, view.step), filterQuery());
  return [
    arrow(() => groupNeighbours(view).before, "‹", "Group before (k)"),
    heading(`Group ${group}`),
    arrow(() => groupNeighbours(view).after, "›", "Next group (j)"),
    at < 0 ? "" : quiet(`${at + 1} of ${order.length}`),
    link(all, {}, `all of ${titleOf(view.kind, view.step).toLowerCase()}`),
  ];
}

function groupHead(view) {
  const { details } = view;
  return el(
    "div",
    { class: "group-head" },
    view.title,
    facts([
      ["prompt", link(promptAddress(view.run, details.prompt_id), { class: "id" }, inLine(details.prompt_id))],
      ["epoch", number(details.epoch)],
      ["source", details.source ? inLine(details.source) : null],
      ["reference answer", el("span", { class: "reference-answer" }, inLine(valueText(details.answer)))],
    ]),
    el("p", { class: `why ${stateOf(details)}` }, visible(details.why ?? "")),
  );
}

function groupPrompt(view) {
  const { details, run } = view;
  const messages = (details.messages ?? []).map((message) =>
    el("div", { class: "message" }, el("h3", {}, inLine(message.role)), textBlock(valueText(message.content))),
  );
  const choices = details.choices?.length
    ? facts([
        [
          "choices",
          el(
            "ol",
            { class: "choices", type: "A" },
            details.choices.map((each) => el("li", {}, inLine(each))),
          ),
        ],
      ])
    : "";
  const columns = Object.entries({ ...details.columns, ...details.columns_as_text });
  return section(
    "Prompt",
    { class: "prompt" },
    el(
      "div",
      { class: "prompt-parts" },
      pictureRow(run, details.images ?? []),
      el(
        "div",
        { class: "messages" },
        messages.length ? messages : textBlock(details.prompt),
        choices,
        candidatesNode(details.candidates ?? [], run),
        details.demonstration
          ? fold("group/demonstration", "demonstration", false, textBlock(details.demonstration))
          : "",
        fold("group/rendered", "as rendered for the model", false, textBlock(details.prompt, { class: "text mono" })),
        columns.length
          ? fold(
              "group/columns",
              `other columns of the row (${columns.length})`,
              false,
              facts(columns.map(([name, value]) => [inLine(name), visible(valueText(value))])),
            )
          : "",
      ),
    ),
  );
}

/** Both candidates of a comparison, with their images and scores. */
function candidatesNode(candidates, run) {
  if (!candidates.length) return "";
  const parts = candidates.map((each, i) =>
    el(
      "div",
      { class: "message" },
      el("h3", {}, `candidate ${i + 1}, score ${number(each.score)}`),
      textBlock(each.text),
      (each.images ?? []).map((image) => picture(run, image)),
    ),
  );
  return el("div", { class: "candidates" }, parts);
}

function rewardTable(view) {
  const { members } = view.details;
  const names = (key) => distinct(members.flatMap((member) => Object.keys(member[key] ?? {})));
  const parts = names("rewards");
  const scored = names("components").filter((name) => !parts.includes(name));
  const hasAdvantage = members.some((member) => known(member.tokens?.advantage).length);
  const columns = [
    {
      key: "member",
      title: "completion",
      class: "nowrap",
      cell: (member) =>
        link(() => addressWith({ member: keyOf(member) }), { "data-member": keyOf(member) }, memberName(member)),
    },
    { key: "reward", title: "reward", isNumber: true, cell: (member) => el("b", {}, number(member.reward)) },
    ...parts.map((name) => ({
      key: name,
      title: inLine(name),
      class: "read",
      cell: (member) => componentCell(member, name),
    })),
    ...scored.map((name) => ({
      key: name,
      title: inLine(name),
      isNumber: true,
      cell: (member) => number(Object.hasOwn(member.components ?? {}, name) ? member.components[name] : null),
    })),
    hasAdvantage && {
      key: "advantage",
      title: "advantage",
      isNumber: true,
      cell: (member) => number(mean(known(member.tokens?.advantage)), 3),
    },
    { key: "length", title: "tokens", isNumber: true, cell: (member) => number(lengthOf(member)) },
    {
      key: "end",
      title: "end",
      cell: (member) => endTag(member.finish_reason, member.finish_reason === "length", member.valid),
    },
    { key: "version", title: "weights", isNumber: true, cell: (member) => number(member.weight_version) },
    members.some((member) => member.failure) && {
      key: "failure",
      title: "failure",
      cell: (member) => inLine(member.failure ?? ""),
    },
  ].filter(Boolean);
  const marked = (member) => ({ class: keyOf(member) === keyOf(chosenMember(view)) ? "chosen" : null });
  view.rewards_ = el(
    "div",
    {},
    table({ caption: "Rewards of each completion", columns, rows: members, rowAttributes: marked }),
  );
  return section("Rewards", {}, view.rewards_);
}

/** A component's value, and the answer that the reward read. */
function componentCell(member, name) {
  const value = Object.hasOwn(member.rewards ?? {}, name) ? member.rewards[name] : null;
  const answer = Object.hasOwn(member.answers ?? {}, name) ? member.answers[name] : null;
  const read = answer === null ? "" : el("span", { class: "answer" }, " read ", el("q", {}, inLine(answer)));
  return [value === null ? el("span", { class: "tag wrong" }, "not scored") : number(value), read];
}

function keyOf(member) {
  return memberKey(member.index, member.greedy);
}

function memberName(member) {
  return member.greedy ? "greedy" : `completion ${number(member.index)}`;
}

/** The tokens that the policy wrote. */
function lengthOf(member) {
  const { tokens } = member;
  return tokens?.mask ? tokens.mask.filter(Boolean).length : countOf(member);
}

/** All tokens after the prompt, inserted ones too. */
function countOf({ tokens }) {
  return tokens?.ids?.length ?? tokens?.text?.length ?? null;
}

/** The turn of each token, from 0; inserted tokens belong to the turn before them. Null without an environment. */
function turnsOf(member) {
  if (!member.episode?.length || !member.tokens?.mask) return null;
  if (member.tokens.turn) return member.tokens.turn;
  let turn = 0;
  return member.tokens.mask.map((isOwn, i, mask) => (isOwn && i && !mask[i - 1] ? ++turn : turn));
}

function chosenMember(view) {
  const { members } = view.details;
  return members.find((member) => keyOf(member) === wanted("member")) ?? members[0];
}

function drawMembers(view) {
  const chosen = chosenMember(view);
  replace(
    view.cards,
    view.details.members.map((member) => memberCard(view, member, member === chosen)),
  );
  replace(view.panel, chosen ? memberPanel(view, chosen) : quiet("The group has no completion."));
}

function chooseMember(view, key) {
  note({ member: key });
  drawMembers(view);
  for (const row of view.rewards_.querySelectorAll("tbody tr")) {
    row.classList.toggle("chosen", row.querySelector("a")?.dataset.member === key);
  }
}

function memberCard(view, member, isChosen) {
  const pressed = button(
    [
      el("b", {}, memberName(member)),
      el("span", {}, `reward ${number(member.reward)}`),
      el("span", {}, counted(lengthOf(member) ?? 0, "token")),
      endTag(member.finish_reason, member.finish_reason === "length", member.valid),
    ],
    () => chooseMember(view, keyOf(member)),
    { class: "member-head", "aria-pressed": String(isChosen), "data-key": keyOf(member) },
  );
  return el(
    "article",
    { class: isChosen ? "member chosen" : "member", "data-member": keyOf(member) },
    pressed,
    memberText(member),
  );
}

const CARD_CHARACTERS = 5000;

/** The text of a completion, cut where that would be slow to lay out beside others; of an episode, each turn's. */
function memberText(member) {
  const attributes = { tabindex: "0", class: "text mono", role: "group", "aria-label": memberName(member) };
  const left = (member.text ?? "").length - CARD_CHARACTERS;
  if (!member.episode?.length && left > 0) {
    const rest = quiet(`${left.toLocaleString("en")} more characters: choose this completion to see them.`);
    return el("div", { ...attributes, dir: "ltr" }, visible(member.text.slice(0, CARD_CHARACTERS)), " …", rest);
  }
  return completionText(member, attributes);
}

/** The whole text of a completion; of an episode, each turn's. */
function completionText(member, attributes) {
  if (!member.episode?.length) return textBlock(member.text, attributes);
  const turns = member.episode.map((turn, i) =>
    el("div", {}, el("span", { class: "quiet" }, `${i + 1} `), visible(turn.text)),
  );
  return el("div", { ...attributes, dir: "ltr" }, turns);
}

// Each view of a completion: whether it has anything to show, and its node. A later kind of record adds one.
const MEMBER_VIEWS = {
  episode: { title: "Episode", has: (member) => member.episode?.length, node: episodeNode },
  tokens: { title: "Tokens", has: (member) => countOf(member), node: tokensNode },
  text: { title: "Text", has: () => true, node: (view, member) => completionText(member, { class: "text mono" }) },
};

function memberPanel(view, member) {
  const names = Object.keys(MEMBER_VIEWS).filter((name) => MEMBER_VIEWS[name].has(member));
  const name = names.includes(wanted("view")) ? wanted("view") : names[0];
  const tabs = names.map((each) =>
    button(
      MEMBER_VIEWS[each].title,
      () => {
        note({ view: each });
        replace(view.panel, memberPanel(view, member));
      },
      { "aria-pressed": String(each === name), "data-view": each },
    ),
  );
  const head = el(
    "div",
    { class: "panel-head" },
    el("h2", {}, member.greedy ? "Greedy completion" : `Completion ${number(member.index)}`),
    el("div", { class: "tabs" }, tabs),
  );
  return [
    head,
    member.failure ? el("p", { class: "problem" }, "Failed: ", visible(member.failure)) : "",
    MEMBER_VIEWS[name].node(view, member),
  ];
}

// ---- Tokens

const QUANTITIES = {
  advantage: { title: "advantage", centre: 0 },
  sampler_logprob: { title: "log-prob of the sampler", strongIsLow: true },
  learner_logprob: { title: "log-prob of the learner", strongIsLow: true },
  reference_logprob: { title: "log-prob of the reference", strongIsLow: true },
  entropy: { title: "entropy" },
  ratio: { title: "ratio of the last update", centre: 1 },
  gap: { title: "gap: sampler less learner", centre: 0 },
  value: { title: "value" },
};

function quantitiesOf(member) {
  return Object.keys(QUANTITIES).filter((name) => known(member.tokens?.[name]).length);
}

function chosenQuantity(member) {
  const names = quantitiesOf(member);
  const asked = wanted("color");
  return names.includes(asked) || asked === "none" ? asked : (names[0] ?? "none");
}

/** From a value to {tone, strength}: how far it is from the centre, or from the weak end, on the scale of the group. */
function shading(view, name) {
  const values = view.details.members.flatMap((member) => known(member.tokens?.[name]));
  const { centre, strongIsLow } = QUANTITIES[name];
  if (centre !== undefined) {
    const most = quantile(
      values.map((value) => Math.abs(value - centre)),
      0.99,
    );
    if (most < 1e-12) return { ends: [centre], of: () => ({ tone: "high", strength: 0 }) };
    const tone = (value) => (value < centre ? "low" : "high");
    return {
      ends: [centre - most, centre, centre + most],
      of: (value) => ({ tone: tone(value), strength: Math.min(Math.abs(value - centre) / most, 1) }),
    };
  }
  const least = quantile(values, 0.01);
  const most = quantile(values, 0.99);
  const span = most - least || 1;
  const share = (value) => Math.min(Math.max((value - least) / span, 0), 1);
  return {
    ends: strongIsLow ? [most, least] : [least, most],
    of: (value) => ({ tone: "plain", strength: strongIsLow ? 1 - share(value) : share(value) }),
  };
}

function quantile(values, share) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted.length ? sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)] : 0;
}

function tokensNode(view, member) {
  const name = chosenQuantity(member);
  const shade = name === "none" ? null : shading(view, name);
  const options = [...quantitiesOf(member).map((each) => [each, QUANTITIES[each].title]), ["none", "none"]];
  const recolored = (value) => {
    note({ color: value });
    replace(view.panel, memberPanel(view, member));
  };
  const details = el("div", { class: "token-details" }, quiet("Point at a token, or go through them with ← and →."));
  const flow = tokenFlow(member, name, shade, details);
  const sentence = view.info.tokens ? quiet(visible(view.info.tokens)) : "";
  const none = options.length === 1 ? quiet("No numbers are recorded for these tokens: they were in no loss.") : "";
  return el(
    "div",
    { class: "tokens-view" },
    sentence,
    none,
    el(
      "div",
      { class: "tools" },
      control("coloured by", choice(options, name, recolored, { "data-color": true })),
      shade ? legend(name, shade) : "",
      member.tokens.mask?.includes(false)
        ? el(
            "span",
            { class: "legend-item" },
            el("span", { class: "token given" }, "text"),
            " not written by the policy",
          )
        : "",
    ),
    flow,
    details,
    tokenSummary(member),
    name === "none" ? "" : tokenProfile(member, name, flow),
  );
}

function legend(name, shade) {
  const isCentred = QUANTITIES[name].centre !== undefined;
  if (shade.ends.length === 1)
    return el("span", { class: "legend" }, `each value of the group is ${number(shade.ends[0], 3)}`);
  const ends = shade.ends.map((end) => el("span", {}, number(end, 3)));
  return el(
    "span",
    {
      class: "legend",
      role: "img",
      "aria-label": `colours from ${number(shade.ends[0], 3)} to ${number(shade.ends.at(-1), 3)}`,
    },
    ends[0],
    el("span", { class: isCentred ? "ramp centred-ramp" : "ramp" }),
    isCentred ? ends[1] : "",
    isCentred ? el("span", { class: "ramp second-ramp" }) : "",
    ends.at(-1),
  );
}

function pieceOf(tokens, i) {
  return tokens.text?.[i] ?? `#${tokens.ids[i]} `;
}

const SPECIAL =
  /^\s*(<[|｜][^<>]*[|｜]>|<\/?s>|<(pad|unk|eos|bos|mask)>|<\/?(think|tool_call|tool_response|answer)>|\[(PAD|UNK|CLS|SEP|EOS|BOS)\])\s*$/i;

function isSpecial(tokens, i) {
  return tokens.special ? tokens.special[i] : SPECIAL.test(pieceOf(tokens, i));
}

/** The tokens as spans; one of them at a time can be reached with Tab, the others with arrows. */
function tokenFlow(member, name, shade, details) {
  const { tokens } = member;
  const count = countOf(member);
  const turns = turnsOf(member);
  const nodes = [];
  for (let i = 0; i < count; i++) {
    const turn = turns?.[i];
    if (turn !== undefined && turn !== turns[i - 1]) nodes.push(el("span", { class: "turn-mark" }, `turn ${turn + 1}`));
    nodes.push(tokenNode(tokens, i, name, shade));
  }
  const flow = el("div", { class: "tokens text mono", dir: "ltr", role: "group", "aria-label": "Tokens" }, nodes);
  const at = (target) => target.closest?.(".token[data-at]");
  const shown = (token) => showToken(flow, member, Number(token.dataset.at), details);
  flow.addEventListener("pointerover", (event) => at(event.target) && shown(at(event.target)));
  flow.addEventListener("focusin", (event) => at(event.target) && shown(at(event.target)));
  flow.addEventListener("click", (event) => at(event.target)?.focus());
  flow.addEventListener("keydown", (event) => moveToken(flow, event, at(event.target)));
  return flow;
}

function tokenNode(tokens, i, name, shade) {
  const value = shade ? tokens[name]?.[i] : null;
  const isKnown = typeof value === "number";
  const { tone, strength } = isKnown ? shade.of(value) : { tone: "", strength: 0 };
  const classes = [
    "token",
    isKnown ? tone : shade && "unknown",
    tokens.mask?.[i] === false && "given",
    isSpecial(tokens, i) && "special",
  ];
  const attributes = {
    class: classes.filter(Boolean).join(" "),
    "data-at": i,
    tabindex: i ? "-1" : "0",
    vars: isKnown ? { "--strength": strength.toFixed(3) } : {},
  };
  return el("span", attributes, tokenText(pieceOf(tokens, i)));
}

/** A token's text with its whitespace as symbols. */
function tokenText(piece) {
  if (piece === "") return el("span", { class: "space" }, "∅");
  return piece
    .split(/([ \t\n]+)/)
    .filter((part) => part !== "")
    .flatMap((part) => {
      if (!/^[ \t\n]/.test(part)) return visible(part);
      return [...part].map((each) => el("span", { class: "space" }, { " ": "·", "\t": "→\t", "\n": "↵\n" }[each]));
    });
}

function showToken(flow, member, i, details) {
  const { tokens } = member;
  flow.querySelector(".token.shown")?.classList.remove("shown");
  flow.querySelector(`[data-at="${i}"]`)?.classList.add("shown");
  const turn = turnsOf(member)?.[i];
  const pairs = [
    ["token", `${i + 1} of ${countOf(member)}`],
    ["text", el("span", { class: "mono token" }, tokenText(pieceOf(tokens, i)))],
    ["id", String(tokens.ids?.[i] ?? "–")],
    ["turn", turn === undefined ? null : String(turn + 1)],
    ["by", tokens.mask?.[i] === false ? "environment" : "policy"],
    ...quantitiesOf(member).map((name) => [QUANTITIES[name].title, exact(tokens[name][i])]),
  ];
  details.replaceChildren(facts(pairs));
}

function exact(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(8))) : "–";
}

function moveToken(flow, event, token) {
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (move === undefined || !token) return;
  event.preventDefault();
  const all = [...flow.querySelectorAll(".token")];
  const from = all.indexOf(token);
  const to = all[Math.min(Math.max(Number.isFinite(move) ? from + move : move, 0), all.length - 1)];
  token.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
  announce(flow.parentElement.querySelector(".token-details").textContent);
}

function tokenSummary(member) {
  const { tokens } = member;
  const isPolicy = (_, i) => tokens.mask?.[i] !== false;
  const rows = quantitiesOf(member)
    .map((name) => ({ name, values: known(tokens[name].filter(isPolicy)) }))
    .filter(({ values }) => values.length);
  if (!rows.length) return "";
  const column = (key, title, of) => ({ key, title, isNumber: true, cell: ({ values }) => number(of(values)) });
  const columns = [
    { key: "name", title: "over the policy's tokens", cell: ({ name }) => QUANTITIES[name].title },
    column("least", "least", (values) => extent(values)[0]),
    column("mean", "mean", mean),
    column("greatest", "greatest", (values) => extent(values)[1]),
    column("sum", "sum", (values) => mean(values) * values.length),
  ];
  return fold(
    "group/token-summary",
    "sums and means",
    false,
    table({ caption: "Numbers of the tokens", columns, rows }),
  );
}

function tokenProfile(member, name, flow) {
  const points = member.tokens[name].map((value, i) => [i + 1, value]).filter(([, value]) => typeof value === "number");
  const chart = lineChart({
    label: QUANTITIES[name].title,
    height: 140,
    range: [1, Math.max(2, countOf(member))],
    unit: "token",
    series: [{ name: QUANTITIES[name].title, index: 0, points }],
    picked: (at) => flow.querySelector(`[data-at="${at - 1}"]`)?.focus(),
  });
  return fold("group/profile", `${QUANTITIES[name].title} by token`, false, chart.node);
}

// ---- Episodes

function episodeNode(view, member) {
  const total = known(member.turn_rewards ?? []);
  const summary = facts([
    ["turns", number(member.episode.length)],
    ["end", inLine(member.finish_reason)],
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

// ---- One prompt over all epochs

function promptAddress(run, id) {
  return address(`run/${run}/prompt`, { id });
}

async function occurrencesOf(run, id) {
  const resource = `run/${run}/prompt?id=${encoded(id)}`;
  if (!report || inReport(resource)) return loadOr(resource, []);
  const found = [];
  for (const [name, doc] of Object.entries(report.documents)) {
    const match = name.match(/^run\/(\d+)\/(step|evaluation|blank)\/(\d+)$/);
    if (!match || Number(match[1]) !== run) continue;
    for (const group of (doc.groups ?? []).filter((each) => each.prompt_id === id)) {
      found.push({
        kind: match[2],
        step: Number(match[3]),
        group: group.group,
        epoch: group.epoch,
        prompt: group.prompt,
        question: group.question,
        answer: group.answer,
        images: group.images,
        members: embeddedMembers(doc, group.group),
      });
    }
  }
  return found;
}

function embeddedMembers({ rows }, group) {
  return rows.group
    .map((_, row) => row)
    .filter((row) => rows.group[row] === group)
    .map((row) => ({
      index: rows.index[row],
      greedy: rows.greedy[row],
      text: rows.text[row],
      reward: rows.reward[row],
      right: rows.right[row],
    }));
}

async function promptPage(run) {
  const id = wanted("id");
  const [info, found] = await Promise.all([load(`run/${run}`), occurrencesOf(run, id)]);
  const sorted = [...found].sort((one, other) => one.step - other.step || one.kind.localeCompare(other.kind));
  const body = sorted.length
    ? [askedNode(run, askedOf(sorted)), promptChart(run, sorted), sorted.map((each) => occurrenceNode(run, each))]
    : [
        quiet(
          `No recorded step of ${plain(info.name)} has a prompt with this id${report ? " among what the report holds" : ""}.`,
        ),
      ];
  return {
    title: `Prompt ${plain(id)}`,
    run,
    runs: [run],
    node: [
      heading("Prompt ", el("span", { class: "id" }, inLine(id))),
      quiet(
        counted(sorted.length, "occurrence"),
        ` in the ${report ? "steps that this report holds" : "recorded steps"}`,
      ),
      body,
    ],
    update: redrawn,
  };
}

/** The occurrence that tells what a prompt asks: the last one, and not with blank images. */
function askedOf(occurrences) {
  return occurrences.filter(({ kind }) => kind !== "blank").at(-1) ?? occurrences.at(-1);
}

/** Equal for prompts that ask the same. */
function sameAsked({ prompt, question, answer, images }) {
  return JSON.stringify([prompt, question, answer, (images ?? []).map(({ hash }) => hash)]);
}

function askedNode(run, asked) {
  return el(
    "div",
    { class: "prompt-parts asked" },
    pictureRow(run, asked.images ?? []),
    el("div", { class: "messages" }, textBlock(questionOf(asked)), facts([["reference answer", inLine(valueText(asked.answer))]])),
  );
}

function promptChart(run, occurrences) {
  const series = Object.keys(KINDS)
    .map((kind, index) => ({
      name: KINDS[kind],
      index,
      points: occurrences
        .filter((each) => each.kind === kind)
        .map((each) => [each.step, mean(known(each.members.map(({ reward }) => reward)))])
        .filter(([, value]) => value !== null),
    }))
    .filter(({ points }) => points.length);
  const last = Math.max(1, ...occurrences.map(({ step }) => step));
  const picked = (step) => {
    const each = occurrences.find((one) => one.step === step);
    if (each) go(address(`${stepPath(run, each.kind, each.step)}/group/${each.group}`));
  };
  return el(
    "article",
    { class: "card" },
    el("h3", {}, "mean reward of its completions"),
    lineChart({ label: "mean reward", height: 160, range: [0, last], series, picked }).node,
  );
}

function occurrenceNode(run, { kind, step, group, epoch, members }) {
  const to = (member) =>
    address(`${stepPath(run, kind, step)}/group/${group}`, { member: member ? keyOf(member) : "" });
  const columns = [
    { key: "member", title: "completion", class: "nowrap", cell: (member) => link(to(member), {}, memberName(member)) },
    { key: "reward", title: "reward", isNumber: true, cell: (member) => number(member.reward) },
    { key: "right", title: "answer", cell: (member) => rightTag(member.right) },
    {
      key: "text",
      title: "text",
      class: "long",
      cell: (member) => el("span", { class: "head mono" }, inLine(member.text)),
    },
  ];
  const title = [
    link(to(), {}, `${titleOf(kind, step)}`),
    el(
      "span",
      { class: "quiet" },
      ` epoch ${epoch ?? "–"}, mean reward ${number(mean(known(members.map(({ reward }) => reward))), 3)}`,
    ),
  ];
  return fold(
    `prompt/${kind}/${step}`,
    title,
    true,
    table({ caption: `Completions at ${kind} ${step}`, columns, rows: members }),
  );
}

// ---- Plots of a step

async function plotsPage(run, kind, step) {
  const [info, doc] = await Promise.all([load(`run/${run}`), load(stepPath(run, kind, step))]);
  const { rows } = doc;
  const used = sampledRows(doc).filter((row) => rows.valid[row] !== false);
  const both = used.filter((row) => typeof rows.reward[row] === "number" && typeof rows.length[row] === "number");
  const bar = el("div", {}, stepBar(info, run, kind, step, "/plots"));
  const plots = both.length
    ? stepPlots({ run, kind, step, doc }, both)
    : quiet("No sampled rollout has a reward and a length.");
  return {
    title: `Plots of ${titleOf(kind, step).toLowerCase()}`,
    run,
    runs: [run],
    node: [bar, heading(`Plots of ${titleOf(kind, step).toLowerCase()}`), plots],
    steps: () => stepTargets(info, kind, step, (next) => address(`${stepPath(run, kind, next)}/plots`)),
    up: address(stepPath(run, kind, step)),
    update: async () => stepChanged(bar, await load(`run/${run}`), run, kind, step, "/plots"),
  };
}

function stepPlots(view, used) {
  const { rows } = view.doc;
  const picked = ({ row }) => go(groupAddress(view, rows.group[row], { member: memberKey(rows.index[row], false) }));
  const points = used.map((row) => ({
    x: rows.length[row],
    y: rows.reward[row],
    row,
    kind: rows.truncated[row] ? "cut" : "",
  }));
  const within = withinGroups(view.doc, used);
  const whole = correlation(
    points.map(({ x }) => x),
    points.map(({ y }) => y),
  );
  const middle = mean(within.values);
  const sentence = within.values.length
    ? `Within groups, reward and length have a mean correlation of ${number(middle, 3)} over ${counted(within.values.length, "group")}; ${within.left} more have equal rewards or lengths and no correlation. Over all rollouts it is ${number(whole, 3)}.`
    : `No group has both different rewards and different lengths, so there is no correlation within groups. Over all rollouts it is ${number(whole, 3)}.`;
  const stds = known(view.doc.groups.map((group) => group.reward_std));
  return el(
    "div",
    { class: "plots" },
    scatter({ title: "Reward against length", xTitle: "tokens", yTitle: "reward", points, picked }),
    el(
      "p",
      { class: "wide" },
      sentence,
      points.some(({ kind }) => kind) ? " Truncated rollouts are drawn as rings." : "",
    ),
    histogram({ title: "Rewards", bins: binned(points.map(({ y }) => y)), unit: "rollout" }),
    histogram({ title: "Lengths in tokens", bins: binned(points.map(({ x }) => x)), unit: "rollout" }),
    within.values.length
      ? histogram({
          title: "Correlation of reward and length within each group",
          bins: binned(within.values, [-1, 1]),
          unit: "group",
        })
      : "",
    stds.length
      ? histogram({ title: "Standard deviation of rewards within each group", bins: binned(stds), unit: "group" })
      : "",
  );
}

function withinGroups({ rows }, used) {
  const groups = new Map();
  for (const row of used) groups.set(rows.group[row], [...(groups.get(rows.group[row]) ?? []), row]);
  const all = [...groups.values()].map((some) =>
    correlation(
      some.map((row) => rows.length[row]),
      some.map((row) => rows.reward[row]),
    ),
  );
  const values = all.filter((value) => value !== null);
  return { values, left: all.length - values.length };
}

// ---- Evaluations

const CHANGES = {
  "": ["all", () => true],
  learned: ["wrong at first, right at last", ({ first, last }) => first < 0.5 && last >= 0.5],
  lost: ["right at first, wrong at last", ({ first, last }) => first >= 0.5 && last < 0.5],
  never: ["never right", ({ values }) => values.every((value) => value < 0.5)],
  blind: ["right without its picture", ({ blanks }) => blanks.at(-1) >= 0.5],
  needs: ["right with its picture only", ({ last, blanks }) => last >= 0.5 && blanks.length > 0 && blanks.at(-1) < 0.5],
};

async function evaluationsPage(run) {
  const [info, doc] = await Promise.all([load(`run/${run}`), load(`run/${run}/evaluations`)]);
  const page = { title: "Evaluations", run, runs: [run], update: redrawn };
  if (!doc.prompts?.length) {
    const text = `No evaluation of ${plain(info.name)} is recorded prompt by prompt. Its metrics are among the curves.`;
    return {
      ...page,
      node: [
        heading("Evaluations"),
        quiet(text),
        link(address(`run/${run}/curves`, { q: "eval" }), {}, "curves of eval"),
      ],
    };
  }
  const view = { run, doc, prompts: doc.prompts.map((prompt) => resultsOf(doc, prompt)), body: el("div") };
  drawEvaluations(view);
  return { ...page, node: [heading("Evaluations"), evaluationChart(view), evaluationTools(view), view.body] };
}

function resultsOf(doc, prompt) {
  const values = known(doc.steps.map((step) => prompt.results?.[step]));
  const blanks = known(doc.blanks.map((step) => prompt.blank?.[step]));
  return {
    ...prompt,
    values,
    blanks,
    first: values[0],
    last: values.at(-1),
    change: values.length > 1 ? values.at(-1) - values[0] : null,
  };
}

function evaluationChart({ run, doc }) {
  const points = (steps, key) =>
    steps
      .map((step) => [step, mean(known(doc.prompts.map((prompt) => prompt[key]?.[step])))])
      .filter(([, value]) => value !== null);
  const having = (key) => doc.prompts.filter((prompt) => Object.keys(prompt[key] ?? {}).length).length;
  const blanks = having("blank");
  const series = [
    { name: "with pictures", index: 0, points: points(doc.steps, "results") },
    { name: "blank pictures", index: 1, points: points(doc.blanks, "blank") },
  ].filter((each) => each.points.length);
  const last = Math.max(1, ...doc.steps, ...doc.blanks);
  const picked = (step) => {
    const kind = doc.steps.includes(step) ? "evaluation" : "blank";
    go(address(stepPath(run, kind, step)));
  };
  const chart = lineChart({
    label: "mean result of the prompts",
    height: 220,
    range: [0, last],
    series,
    picked,
    pickText: "click: rollouts",
  });
  return el(
    "article",
    { class: "card" },
    el(
      "h3",
      {},
      `mean result of ${counted(having("results"), "prompt")}`,
      blanks ? `, and of ${counted(blanks, "prompt")} with blank pictures` : "",
    ),
    chart.node,
  );
}

function evaluationTools(view) {
  const changed = (key) => (value) => {
    note({ [key]: value, page: "" });
    drawEvaluations(view);
  };
  const search = el("input", { type: "search", class: "search", value: wanted("q"), placeholder: "prompt id or reference answer" });
  search.addEventListener(
    "input",
    later(() => changed("q")(search.value), 200),
  );
  const options = Object.entries(CHANGES).map(([key, [title, test]]) => [
    key,
    `${title} (${view.prompts.filter(test).length})`,
  ]);
  return el(
    "div",
    { class: "tools", role: "search" },
    control("search", search),
    control("prompts", choice(options, wanted("which"), changed("which"))),
  );
}

function drawEvaluations(view) {
  const [, test] = CHANGES[Object.hasOwn(CHANGES, wanted("which")) ? wanted("which") : ""];
  const text = wanted("q").toLowerCase();
  const isFound = (prompt) => `${textOf(prompt.prompt_id)} ${valueText(prompt.answer)}`.toLowerCase().includes(text);
  const columns = evaluationColumns(view);
  const rows = ordered(
    view.prompts.filter((prompt) => test(prompt) && isFound(prompt)),
    columns,
    wanted("sort"),
  );
  const again = (changes) => {
    note(changes);
    drawEvaluations(view);
  };
  const page = Math.max(0, Math.min(Number(wanted("page", "0")) || 0, Math.ceil(rows.length / PAGE_ROWS) - 1));
  const whole = table({
    caption: "Prompts",
    columns,
    rows: rows.slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS),
    sort: wanted("sort"),
    sorted: (sort) => again({ sort, page: "" }),
  });
  const words = quiet(`${rows.length} of ${counted(view.prompts.length, "prompt")}`);
  replace(
    view.body,
    el(
      "div",
      { class: "count-line" },
      words,
      pager(rows.length, page, PAGE_ROWS, (to) => again({ page: to || "" })) ?? "",
    ),
    rows.length ? whole : quiet("No prompt is like that."),
  );
}

function evaluationColumns({ run, doc }) {
  const step = (key, title, each, steps) => ({
    key: `${key}${each}`,
    title: title,
    isNumber: true,
    class: "result",
    value: (prompt) => prompt[steps]?.[each] ?? null,
    cell: (prompt) => resultCell(prompt[steps]?.[each]),
  });
  return [
    {
      key: "prompt_id",
      title: "prompt",
      value: (prompt) => prompt.prompt_id,
      cell: (prompt) => link(promptAddress(run, prompt.prompt_id), { class: "id" }, inLine(prompt.prompt_id)),
    },
    { key: "answer", title: "reference answer", class: "short", cell: (prompt) => inLine(valueText(prompt.answer)) },
    {
      key: "change",
      title: "change",
      isNumber: true,
      value: (prompt) => prompt.change,
      cell: (prompt) => signed(prompt.change),
    },
    ...doc.steps.map((each) => step("step", `step ${each}`, each, "results")),
    ...doc.blanks.map((each) => step("blank", [`blank ${each}`], each, "blank")),
  ];
}

function signed(value) {
  return value === null ? "–" : `${value > 0 ? "+" : ""}${number(value, 3)}`;
}

function resultCell(value) {
  if (typeof value !== "number") return el("span", { class: "quiet" }, "–");
  const text = value === 1 ? "✓" : value === 0 ? "✗" : number(value, 2);
  return el(
    "span",
    { class: "cell", title: number(value), vars: { "--share": Math.min(Math.max(value, 0), 1).toFixed(3) } },
    text,
  );
}

// ---- About a run

async function aboutPage(run) {
  const [info, metrics, events, ledger] = await Promise.all([
    load(`run/${run}`),
    loadOr(`run/${run}/metrics`, { steps: [], curves: {} }),
    loadOr(`run/${run}/events`, []),
    loadOr(`run/${run}/ledger`, []),
  ]);
  return {
    title: "About",
    run,
    runs: [run],
    update: redrawn,
    node: [
      heading("About ", visible(info.name)),
      aboutFacts(info),
      attemptsNode(info),
      configNode(info),
      phasesNode(metrics),
      eventsNode(run, info, events),
      ledgerNode(ledger),
      environmentNode(info),
    ],
  };
}

/** True if the last attempt has not told its end. */
function isCut({ attempts }) {
  const last = attempts?.at(-1);
  return last !== undefined && typeof last.end !== "number";
}

function aboutFacts(info) {
  return facts([
    ["folder", el("span", { class: "mono" }, inLine(info.path))],
    ["state", info.live ? LIVE : isCut(info) ? "cut off: it was killed, or its machine stopped" : "ended"],
    ["last step", number(info.last_step)],
    ["algorithm", inLine(valueText(info.algorithm))],
    ["recorded steps", number(info.steps.length)],
    ["checkpoints", info.checkpoints?.length ? inLine(info.checkpoints.map(valueText).join(", ")) : "none"],
  ]);
}

function attemptsNode(info) {
  const columns = [
    { key: "number", title: "attempt", isNumber: true, cell: (attempt) => number(attempt.number) },
    { key: "begin", title: "began", cell: (attempt) => timeText(attempt.begin) },
    {
      key: "time",
      title: "took",
      isNumber: true,
      cell: (attempt) =>
        attempt.begin && attempt.end ? durationText(attempt.end - attempt.begin) : info.live ? LIVE : "–",
    },
    { key: "from", title: "from step", isNumber: true, cell: (attempt) => number(attempt.from_step) },
    { key: "exit", title: "exit code", isNumber: true, cell: (attempt) => number(attempt.exit) },
    { key: "message", title: "message", class: "long", cell: (attempt) => visible(attempt.message ?? "") },
    {
      key: "changes",
      title: "changes of the config",
      class: "long",
      cell: (attempt) => changesNode(attempt.changes ?? []),
    },
  ];
  const rows = info.attempts ?? [];
  return section(
    "Attempts",
    {},
    rows.length ? table({ caption: "Attempts", columns, rows }) : quiet("No attempt is recorded."),
  );
}

function changesNode(changes) {
  return changes.length
    ? el(
        "ul",
        { class: "changes" },
        changes.map((change) => el("li", { class: "mono" }, visible(valueText(change)))),
      )
    : "none";
}

function configNode(info) {
  const body = el("div");
  const entries = Object.entries(info.config ?? {});
  const drawn = () => {
    const text = wanted("config").toLowerCase();
    const rows = entries.filter(([key, value]) => `${key} ${valueText(value)}`.toLowerCase().includes(text));
    const columns = [
      { key: "key", title: "key", cell: ([key]) => el("span", { class: "mono" }, inLine(key)) },
      {
        key: "value",
        title: "value",
        class: "long",
        cell: ([, value]) => el("span", { class: "mono" }, inLine(configText(value))),
      },
      { key: "origin", title: "written in", class: "long", cell: ([key]) => originNode(info, key) },
    ];
    body.replaceChildren(
      rows.length ? table({ caption: "Config", columns, rows }) : quiet("No key or value has this text."),
    );
  };
  const filter = el("input", { type: "search", class: "search", value: wanted("config"), placeholder: "key or value" });
  filter.addEventListener(
    "input",
    later(() => {
      note({ config: filter.value });
      drawn();
    }, 120),
  );
  drawn();
  return section(
    "Config",
    {},
    el("div", { class: "tools" }, control("filter", filter)),
    el("div", { class: "tall" }, body),
  );
}

function originNode(info, key) {
  const origins = info.origins ?? {};
  const origin = Object.hasOwn(origins, key) ? origins[key] : null;
  if (!Object.keys(origins).length) return "–";
  return origin ? el("span", { class: "mono quiet" }, inLine(origin)) : el("span", { class: "quiet" }, "default");
}

// Seconds that pass beside the phases of a step, or that several share.
const BESIDE = new Set([
  "perf/step_s",
  "perf/eval_s",
  "perf/save_s",
  "perf/environment_s",
  "perf/environment_wait_s",
  "perf/monitor_s",
]);

function phasesNode(metrics) {
  const names = Object.keys(metrics.curves).filter((name) => /^perf\/[^/]+_s$/.test(name) && !name.endsWith("_per_s"));
  const rows = names
    .map((name) => ({ name, values: pointsOf(metrics, name).map(([, value]) => value) }))
    .filter(({ values }) => values.length);
  if (!rows.length) return section("Seconds by phase", {}, quiet("No step has told its seconds yet."));
  const all = rows.map((row) => ({
    ...row,
    sum: mean(row.values) * row.values.length,
    isInside: !BESIDE.has(row.name),
  }));
  const whole =
    all.find(({ name }) => name === "perf/step_s")?.sum ??
    all.filter(({ isInside }) => isInside).reduce((sum, row) => sum + row.sum, 0);
  const shown = all.sort((one, other) => other.isInside - one.isInside || other.sum - one.sum);
  const columns = [
    { key: "name", title: "phase", cell: ({ name }) => inLine(name.replace(/^perf\/|_s$/g, "")) },
    { key: "mean", title: "mean of a step", isNumber: true, cell: ({ values }) => durationText(mean(values)) },
    { key: "sum", title: "in all", isNumber: true, cell: ({ sum }) => durationText(sum) },
    {
      key: "share",
      title: "share of the steps",
      cell: ({ sum, isInside }) =>
        isInside ? shareBar(sum / whole) : el("span", { class: "quiet" }, "beside the phases"),
    },
  ];
  return section("Seconds by phase", {}, table({ caption: "Seconds by phase", columns, rows: shown }));
}

function shareBar(share) {
  return el(
    "span",
    { class: "share" },
    el("span", { class: "share-bar", vars: { "--share": Math.min(share, 1).toFixed(4) } }),
    percent(share),
  );
}

function eventsNode(run, info, events) {
  const body = el("div");
  const kinds = distinct(events.map((event) => event.kind));
  const drawn = () => {
    const rows = events
      .filter((event) => !wanted("kind") || event.kind === wanted("kind"))
      .slice(-500)
      .reverse();
    const columns = [
      { key: "time", title: "time", class: "nowrap", cell: (event) => timeText(event.time) },
      {
        key: "kind",
        title: "kind",
        cell: (event) => el("span", { class: event.kind === "alarm" ? "tag alarm" : "tag" }, visible(event.kind)),
      },
      { key: "step", title: "step", isNumber: true, cell: (event) => eventStep(run, info, event) },
      {
        key: "message",
        title: "message",
        class: "long",
        cell: (event) => [event.undone ? el("span", { class: "tag" }, "undone") : "", " ", eventMessage(event)],
      },
    ];
    body.replaceChildren(
      rows.length ? table({ caption: "Events, newest first", columns, rows }) : quiet("No event is recorded."),
    );
  };
  drawn();
  const picker =
    kinds.length > 1 &&
    control(
      "kind",
      choice([["", "all"], ...kinds.map((kind) => [kind, plain(kind)])], wanted("kind"), (kind) => {
        note({ kind });
        drawn();
      }),
    );
  return section("Events", {}, el("div", { class: "tools" }, picker), el("div", { class: "tall" }, body));
}

function eventStep(run, info, event) {
  if (typeof event.step !== "number") return "–";
  const step = nearest(recordedOf(info, "step"), event.step);
  return step === event.step ? link(address(stepPath(run, "step", step)), {}, number(step)) : number(event.step);
}

function eventMessage(event) {
  const rest = Object.entries(event).filter(([key]) => !["time", "kind", "step", "message", "monitor"].includes(key));
  const more = rest.map(([key, value]) => `${key} ${valueText(value)}`).join(", ");
  return [
    event.monitor ? el("b", {}, visible(event.monitor), ": ") : "",
    visible(event.message ?? ""),
    more ? [" ", el("span", { class: "quiet" }, inLine(more.slice(0, 400)))] : "",
  ];
}

function ledgerNode(ledger) {
  const rows = ledger.slice(-500).reverse();
  const columns = ["step", "update", "samples"].map((key) => ({
    key,
    title: key,
    isNumber: true,
    cell: (row) => number(row[key]),
  }));
  const words = quiet(
    `${counted(ledger.length, "optimizer step")} that the newest weights learned from${ledger.length > 500 ? ", the last 500 of them here" : ""}.`,
  );
  return section(
    "Ledger",
    {},
    words,
    rows.length
      ? fold(
          "about/ledger",
          "samples of each optimizer step",
          false,
          el("div", { class: "tall" }, table({ caption: "Ledger", columns, rows })),
        )
      : "",
  );
}

function flattened(value, prefix = "") {
  if (value === null || typeof value !== "object") return [[prefix, value]];
  if (Array.isArray(value) && value.every((each) => each === null || typeof each !== "object"))
    return [[prefix, value]];
  return Object.entries(value).flatMap(([key, inner]) => flattened(inner, prefix ? `${prefix}.${key}` : key));
}

function environmentNode(info) {
  const rows = flattened(info.environment ?? {}).filter(([key]) => key);
  const columns = [
    { key: "key", title: "name", cell: ([key]) => el("span", { class: "mono" }, inLine(key)) },
    {
      key: "value",
      title: "value",
      class: "long",
      cell: ([, value]) => el("span", { class: "mono" }, inLine(valueText(value))),
    },
  ];
  return section(
    "Environment",
    {},
    rows.length
      ? fold(
          "about/environment",
          counted(rows.length, "entry", "entries"),
          true,
          el("div", { class: "tall" }, table({ caption: "Environment", columns, rows })),
        )
      : quiet("No environment.json is there."),
  );
}

// ---- Comparison of runs

const COMPARISONS = { curves: "curves", config: "config", prompt: "one prompt" };

async function comparePage() {
  const given = await runList();
  const all = given.filter((each) => !each.problem);
  const broken = given.filter((each) => each.problem).map((each) => problemNode(`${each.name}: ${each.problem}`));
  if (all.length < 2) {
    const text = "Comparing takes two runs that can be read. Give `mmrl view` several folders.";
    return { title: "Compare", runs: [], node: [heading("Compare"), broken, quiet(text)] };
  }
  const chosenRuns = list(wanted("runs"))
    .map(Number)
    .filter((run) => all.some((each) => each.run === run));
  const asked = chosenRuns.length ? chosenRuns : all.map((each) => each.run);
  const tab = Object.hasOwn(COMPARISONS, wanted("tab")) ? wanted("tab") : "curves";
  const runs = await loadRuns(asked);
  const picker = el(
    "fieldset",
    { class: "runs" },
    el("legend", {}, "runs"),
    all.map((each) =>
      checkbox([runKey(asked.indexOf(each.run)), plain(each.name)], asked.includes(each.run), (on) => {
        const chosen = on
          ? [...asked, each.run].sort((one, other) => one - other)
          : asked.filter((run) => run !== each.run);
        if (chosen.length) go(addressWith({ runs: chosen.join(",") }), true);
        else show();
      }),
    ),
  );
  const tabs = el(
    "nav",
    { class: "tabs", "aria-label": "What is compared" },
    Object.entries(COMPARISONS).map(([key, title]) =>
      link(() => addressWith({ tab: key }), { "aria-current": key === tab ? "page" : null }, title),
    ),
  );
  const view = {
    curves: () => curvesView(runs),
    config: () => ({ node: differencesNode(runs) }),
    prompt: () => samePrompt(runs),
  };
  const body = await view[tab]();
  const update = async () => body.update?.(await loadRuns(asked));
  return { title: "Compare", runs: asked, node: [heading("Compare"), broken, picker, tabs, body.node], update };
}

function runKey(index) {
  return index < 0 ? "" : el("i", { class: `key s${index % 8}` });
}

function differencesNode(runs) {
  const keys = distinct(runs.flatMap(({ info }) => Object.keys(info.config ?? {})));
  const of = ({ info }, key) => (Object.hasOwn(info.config ?? {}, key) ? JSON.stringify(info.config[key]) : undefined);
  const rows = keys.filter((key) => new Set(runs.map((each) => of(each, key))).size > 1);
  const isShared = (key) => runs.every((each) => of(each, key) !== undefined);
  const [shared, others] = [rows.filter(isShared), rows.filter((key) => !isShared(key))];
  const columns = [
    { key: "key", title: "key", cell: (key) => el("span", { class: "mono" }, inLine(key)) },
    ...runs.map((each) => ({
      key: String(each.run),
      title: [runKey(each.index), visible(each.name)],
      class: "long",
      cell: (key) => configCell(each.info, key),
    })),
  ];
  const all = quiet(`All ${keys.length - others.length} keys that they share have the same values.`);
  const some =
    others.length &&
    fold(
      "compare/some",
      `${counted(others.length, "key")} that only some of them have`,
      !shared.length,
      table({ caption: "Keys of some runs", columns, rows: others }),
    );
  return section(
    "Differences of the configs",
    {},
    shared.length ? table({ caption: "Differences", columns, rows: shared }) : all,
    some || "",
  );
}

function configCell(info, key) {
  if (!Object.hasOwn(info.config ?? {}, key)) return el("span", { class: "quiet" }, "not there");
  const origin = Object.hasOwn(info.origins ?? {}, key)
    ? el("div", { class: "mono quiet" }, inLine(info.origins[key]))
    : "";
  return [el("span", { class: "mono" }, inLine(configText(info.config[key]))), origin];
}

function configText(value) {
  return value === null ? "null" : valueText(value);
}

async function samePrompt(runs) {
  const shared = await sharedPrompts(runs);
  const id = wanted("prompt") || shared[0] || "";
  const input = el("input", { type: "search", class: "search", value: plain(id), list: "shared-prompts" });
  input.addEventListener("change", () => go(addressWith({ prompt: input.value }), true));
  const options = el(
    "datalist",
    { id: "shared-prompts" },
    shared
      .filter((each) => plain(each) === each)
      .slice(0, 500)
      .map((each) => el("option", { value: each })),
  );
  const found = await Promise.all(runs.map((each) => (id ? occurrencesOf(each.run, id) : [])));
  const asked = found.filter(({ length }) => length).map(askedOf);
  const isOne = new Set(asked.map(sameAsked)).size === 1;
  const columns = runs.map((each, i) =>
    el(
      "section",
      { class: "side" },
      el("h2", {}, runKey(each.index), visible(each.name)),
      found[i].length && !isOne ? askedNode(each.run, askedOf(found[i])) : "",
      found[i].length
        ? [...found[i]].sort((one, other) => other.step - one.step).map((one) => occurrenceNode(each.run, one))
        : quiet("No recorded step has this prompt."),
    ),
  );
  const words = quiet(`${counted(shared.length, "prompt")} in the newest recorded steps of all of these runs.`);
  return {
    node: el(
      "div",
      {},
      el("div", { class: "tools", role: "search" }, control("prompt id", input), options, words),
      isOne ? askedNode(runs[found.findIndex(({ length }) => length)].run, asked[0]) : "",
      el("div", { class: "sides" }, columns),
    ),
  };
}

/** Ids of prompts that the newest records of all runs have, with one reference answer; those of evaluations first. */
async function sharedPrompts(runs) {
  const sets = await Promise.all(
    runs.map(async ({ run, info }) => {
      const evaluations = await loadOr(`run/${run}/evaluations`, { prompts: [] });
      const newest = info.steps.length
        ? await loadOr(stepPath(run, "step", info.steps.at(-1)), { groups: [] })
        : { groups: [] };
      const all = [...(evaluations.prompts ?? []), ...newest.groups];
      return new Map(all.map((each) => [each.prompt_id, JSON.stringify(each.answer)]));
    }),
  );
  return [...(sets[0] ?? [])].filter(([id, answer]) => sets.every((set) => set.get(id) === answer)).map(([id]) => id);
}

// ---- The list of runs

async function homePage() {
  const all = await runList();
  if (!all.length)
    return { title: "Runs", runs: [], node: [heading("Runs"), quiet("No run was given to `mmrl view`.")] };
  if (all.length === 1 && !all[0].problem) {
    go(address(`run/${all[0].run}/curves`), true);
    return null;
  }
  const columns = [
    { key: "name", title: "run", cell: (each) => link(address(`run/${each.run}/curves`), {}, visible(each.name)) },
    { key: "path", title: "folder", class: "long", cell: (each) => el("span", { class: "mono" }, inLine(each.path)) },
    {
      key: "problem",
      title: "problem",
      class: "long",
      cell: (each) => (each.problem ? el("span", { class: "problem" }, visible(each.problem)) : ""),
    },
  ];
  return {
    title: "Runs",
    runs: [],
    node: [
      heading("Runs"),
      table({ caption: "Runs", columns, rows: all }),
      all.length > 1
        ? el(
            "p",
            {},
            link(
              address("compare", { runs: all.map((each) => each.run).join(",") }),
              { class: "button" },
              "Compare them",
            ),
          )
        : "",
    ],
  };
}

// ---- The frame

const PAGES = [
  [/^$/, () => homePage()],
  [/^run\/(\d+)(?:\/curves)?$/, (run) => curvesPage(run)],
  [/^run\/(\d+)\/rollouts$/, (run) => newestPage(run)],
  [/^run\/(\d+)\/(step|evaluation|blank)\/(\d+)$/, stepPage],
  [/^run\/(\d+)\/(step|evaluation|blank)\/(\d+)\/plots$/, plotsPage],
  [/^run\/(\d+)\/(step|evaluation|blank)\/(\d+)\/group\/(\d+)$/, groupPage],
  [/^run\/(\d+)\/prompt$/, (run) => promptPage(run)],
  [/^run\/(\d+)\/evaluations$/, (run) => evaluationsPage(run)],
  [/^run\/(\d+)\/about$/, (run) => aboutPage(run)],
  [/^compare$/, () => comparePage()],
];

const main = document.getElementById("main");
const folds = new Map();
let page = { title: "", runs: [] };
let asked = 0;
let drawnPath = null;

function heading(...words) {
  return el("h1", {}, ...words);
}

/** Details that stay as they were opened or closed, over all pages. */
function fold(key, title, isOpen, ...children) {
  const node = el("details", { class: "fold", open: folds.get(key) ?? isOpen }, el("summary", {}, title), children);
  node.addEventListener("toggle", () => folds.set(key, node.open));
  return node;
}

/** Say something to those who do not see the page. */
function announce(text) {
  document.getElementById("said").textContent = text;
}

async function pageOf(path) {
  for (const [pattern, made] of PAGES) {
    const match = path.match(pattern);
    if (match) return made(...match.slice(1).map((part) => (/^\d+$/.test(part) ? Number(part) : part)));
  }
  throw new Problem(`There is no page at this address: ${path}`);
}

/** Draw the page of the address; `keepsPlace` leaves the scrolling as it is. */
async function show(keepsPlace = false) {
  const ticket = ++asked;
  place = parsedAddress(location.hash);
  const slow = setTimeout(() => main.setAttribute("aria-busy", "true"), 150);
  let made;
  try {
    made = await pageOf(place.path);
  } catch (error) {
    made = problemPage(error);
  }
  clearTimeout(slow);
  if (ticket !== asked || made === null) return;
  await mount(made, keepsPlace || place.path === drawnPath);
}

/** Draw the page anew where it is, unless somebody is typing into it. */
async function redrawn() {
  if (!isTyping(document.activeElement)) await show(true);
}

function isTyping(node) {
  return Boolean(node?.closest?.("input:not([type=checkbox]):not([type=range]), textarea, select"));
}

function problemPage(error) {
  const isKnown = error instanceof Problem;
  const run = place.path.match(/^run\/(\d+)/);
  if (!isKnown) console.error(error);
  const text = isKnown
    ? error.message
    : `This page could not be drawn (${plain(error.message)}). The rest of the run can be looked at; please report it with the address.`;
  return {
    title: "Problem",
    run: run ? Number(run[1]) : undefined,
    runs: [],
    node: [heading("This cannot be shown"), problemNode(text, isKnown && error.mayPass ? () => show() : null)],
    isProblem: true,
  };
}

async function mount(made, keepsPlace) {
  page = made;
  const top = window.scrollY;
  const path = place.path;
  sizes.disconnect();
  sights.disconnect();
  const scrolled = keepsPlace ? scrolledRegions() : new Map();
  replace(main, made.node);
  for (const region of main.querySelectorAll(".scroll")) region.scrollTop = scrolled.get(region.ariaLabel) ?? 0;
  main.removeAttribute("aria-busy");
  main.dataset.page = path;
  main.dataset.drawn = String(asked);
  for (const box of main.querySelectorAll(".chart")) {
    sizes.observe(box);
    sights.observe(box);
  }
  window.scrollTo(0, keepsPlace ? top : 0);
  if (drawnPath !== null && path !== drawnPath) announce(made.title);
  drawnPath = path;
  await drawBar();
}

function scrolledRegions() {
  return new Map([...main.querySelectorAll(".scroll")].map((region) => [region.ariaLabel, region.scrollTop]));
}

async function drawBar() {
  const all = await runList().catch(() => []);
  const run = page.run ?? page.runs[0];
  const info = run === undefined ? null : await load(`run/${run}`).catch(() => null);
  document.title = [page.title, info && place.path !== "compare" && plain(info.name), "mmrl"]
    .filter(Boolean)
    .join(" · ");
  const at = (words) => (words.some((word) => new RegExp(`^run/\\d+/${word}`).test(place.path)) ? "page" : null);
  const to = (name, title, ...words) =>
    link(address(`run/${run}/${name}`), { "aria-current": at([name, ...words]) }, title);
  const picker =
    all.length > 1 && run !== undefined && place.path !== "compare"
      ? choice(
          all.map((each) => [each.run, plain(each.name)]),
          run,
          (next) => go(address(place.path.replace(/^run\/\d+.*/, (path) => sameOfRun(path, next)))),
          { "aria-label": "Run" },
        )
      : info && place.path !== "compare"
        ? el("span", { class: "run-name" }, visible(info.name))
        : "";
  const links =
    run === undefined || place.path === "compare"
      ? []
      : [
          to("curves", "Curves"),
          to("rollouts", "Rollouts", "step", "evaluation/", "blank", "prompt"),
          to("evaluations", "Evaluations"),
          to("about", "About"),
        ];
  if (all.length > 1)
    links.push(link(address("compare"), { "aria-current": place.path === "compare" ? "page" : null }, "Compare"));
  replace(
    document.getElementById("bar"),
    link("#/", { class: "brand" }, "mmrl"),
    picker,
    el("nav", { "aria-label": "Pages" }, links),
    info?.live ? el("span", { class: "live" }, `${LIVE}, step ${number(info.last_step ?? 0)}`) : "",
    button("?", openHelp, { class: "help-button", "aria-label": "Keys and help" }),
  );
  drawNotices(info);
}

/** The same kind of page of another run. */
function sameOfRun(path, run) {
  const kind = path.match(/^run\/\d+\/(curves|evaluations|about)/)?.[1] ?? "rollouts";
  return `run/${run}/${kind}`;
}

let lostAt = null;

function drawNotices(info) {
  const lost =
    lostAt &&
    problemNode(
      `The viewer's server has not answered since ${lostAt.toLocaleTimeString()}: what you see is as old. It is asked again every few seconds.`,
    );
  const problem = info?.problem && !page.isProblem && problemNode(info.problem);
  const left = report?.left_out ?? [];
  const about =
    report &&
    fold(
      "report",
      [
        `A report, made ${plain(report.made ?? "")}.`,
        left.length ? ` ${counted(left.length, "note")} on what it leaves out.` : "",
      ],
      false,
      el(
        "ul",
        {},
        left.map((each) => el("li", {}, visible(each))),
      ),
      quiet(sentence("`mmrl view RUN` shows the whole run.")),
    );
  const nodes = [lost, problem, about].filter(Boolean);
  const box = document.getElementById("notices");
  const texts = nodes.map((node) => node.textContent).join("\n");
  if (box.dataset.texts !== texts) box.replaceChildren(...nodes);
  box.dataset.texts = texts;
}

// ---- Keys

function openHelp() {
  const help = document.getElementById("help");
  if (!help.open) help.showModal();
}

const KEYS = {
  "?": openHelp,
  "/": () => main.querySelector("input.search")?.focus(),
  j: async () => follow(page.groups ? (await page.groups()).after : page.firstGroup?.()),
  k: async () => follow((await page.groups?.())?.before),
  n: () => follow(page.steps?.().after),
  p: () => follow(page.steps?.().before),
  u: () => follow(page.up),
  m: () => moveMember(1),
  M: () => moveMember(-1),
  c: nextQuantity,
};

function follow(to) {
  if (to) go(to);
  else announce("There is none.");
}

function moveMember(by) {
  const { view } = page;
  if (!view?.details) return;
  const keys = view.details.members.map(keyOf);
  const at = keys.indexOf(keyOf(chosenMember(view)));
  chooseMember(view, keys[(at + by + keys.length) % keys.length]);
}

function nextQuantity() {
  const select = main.querySelector("select[data-color]");
  if (!select) return;
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  select.dispatchEvent(new Event("change"));
}

function pressed(event) {
  const isInput = isTyping(event.target);
  if (event.key === "Escape" && isInput) event.target.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || isInput || document.getElementById("help").open) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

// ---- Live runs

const POLL_MS = 3000;
const SLOW_POLLS = 5;
let polls = 0;

/** Ask for what has changed of the runs on the page; a run that has ended is asked for less often. */
async function poll() {
  polls += 1;
  try {
    const news = new Set();
    for (const run of new Set([page.run, ...page.runs].filter((each) => each !== undefined))) {
      news.add(await refreshed(run));
    }
    if (lostAt) {
      lostAt = null;
      await drawBar();
    }
    if (news.has("attempt"))
      await redrawn(); // steps on the page may have been undone
    else if (news.has("more")) {
      await page.update?.();
      await drawBar();
    }
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.mayPass && !lostAt) {
      lostAt = new Date();
      await drawBar();
    }
  }
}

/** The kind of news that the run has, "attempt" or "more", which are among the documents then; empty without any. */
async function refreshed(run) {
  const before = await load(`run/${run}`).catch(() => null);
  if (before && !before.live && polls % SLOW_POLLS) return "";
  const after = await fetched(`run/${run}`);
  if (JSON.stringify(after) === JSON.stringify(before)) return "";
  const isResumed = before?.attempts?.length !== after.attempts?.length;
  const known = isResumed ? null : await documents.get(`run/${run}/metrics`)?.catch(() => null);
  for (const resource of [...documents.keys()]) {
    const isOfRun = resource.startsWith(`run/${run}/`);
    const isStep = /\/(step|evaluation|blank)\/\d+/.test(resource);
    if (isOfRun && (isResumed || !isStep)) documents.delete(resource);
  }
  documents.set(`run/${run}`, Promise.resolve(after));
  if (known) documents.set(`run/${run}/metrics`, Promise.resolve(await longerMetrics(run, known)));
  return isResumed ? "attempt" : "more";
}

/** The metrics with the steps that came since. */
async function longerMetrics(run, before) {
  const last = before.steps.at(-1) ?? -1;
  const news = await fetched(`run/${run}/metrics?after=${last}`);
  if (news.steps.length && news.steps[0] <= last) return news;
  const curves = Object.create(null);
  for (const name of new Set([...Object.keys(before.curves), ...Object.keys(news.curves)])) {
    const of = (doc) => (Object.hasOwn(doc.curves, name) ? doc.curves[name] : doc.steps.map(() => null));
    curves[name] = [...of(before), ...of(news)];
  }
  return { steps: [...before.steps, ...news.steps], curves };
}

async function keepPolling() {
  if (!document.hidden) await poll();
  setTimeout(keepPolling, POLL_MS);
}

// ---- Start

window.addEventListener("hashchange", () => show());
document.addEventListener("keydown", pressed);
document.getElementById("skip").addEventListener("click", () => main.focus());
show();
if (!report && location.protocol !== "file:") setTimeout(keepPolling, POLL_MS);
