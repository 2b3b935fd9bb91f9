// Elements, and the parts that several pages have. Recorded texts enter by text nodes, through `visible`.

import { HIDDEN, plain, symbolOf, textOf } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes, ...children) {
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
export function link(to, attributes, ...children) {
  if (typeof to !== "function") return el("a", { href: to, ...attributes }, ...children);
  const node = el("a", { href: to(), ...attributes }, ...children);
  for (const event of ["pointerover", "focus", "click", "auxclick"])
    node.addEventListener(event, () => node.setAttribute("href", to()));
  return node;
}

/** A link to where a function leads; greyed where it leads nowhere. */
export function arrow(to, text, name) {
  if (!to()) return el("span", { class: "button off", "aria-hidden": "true" }, text);
  return link(to, { class: "button", "aria-label": name, title: name }, text);
}

export function button(label, pressed, attributes) {
  return el("button", { type: "button", ...attributes, on: { click: pressed } }, label);
}

export function control(label, input, attributes) {
  return el("label", { class: "control", ...attributes }, el("span", {}, label), input);
}

/** A select; `options` are [value, label] pairs. Values may be recorded texts, of which `chosen` gets the very same. */
export function choice(options, value, chosen, attributes) {
  const nodes = options.map(([each, label]) =>
    el("option", { value: plain(each), selected: textOf(each) === textOf(value) }, label),
  );
  const heard = ({ target }) => chosen(textOf(options[target.selectedIndex][0]));
  return el("select", { ...attributes, on: { change: heard } }, nodes);
}

export function checkbox(label, checked, changed) {
  const input = el("input", { type: "checkbox", on: { change: (event) => changed(event.target.checked) } });
  input.checked = checked;
  return el("label", { class: "check" }, input, el("span", {}, label));
}

export function section(title, attributes, ...children) {
  return el("section", attributes, el("h2", {}, title), ...children);
}

export function quiet(...children) {
  return el("p", { class: "quiet" }, ...children);
}

export function problemNode(text, again) {
  const more = again ? [" ", button("Try again", again)] : [];
  return el("p", { class: "problem", role: "alert" }, sentence(text), more);
}

/** A sentence whose words between backticks are code. */
export function sentence(text) {
  const parts = textOf(text).split("`");
  if (parts.length % 2 === 0) return visible(text);
  return parts.map((part, i) => (i % 2 ? el("code", {}, visible(part)) : visible(part)));
}

/** Other children of a box; the focus stays on the link or control that takes the place of the one that had it. */
export function replace(box, ...children) {
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
export function later(act, wait) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...words), wait);
  };
}

/** The text as nodes, its hidden characters as marked symbols. */
export function visible(text) {
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
export function inLine(text) {
  return visible(textOf(text).replace(/\n/g, "⏎").replace(/\t/g, "→"));
}

/** A block of recorded text. */
export function textBlock(text, attributes) {
  const isEmpty = text === null || text === undefined || text === "";
  const words = isEmpty ? el("span", { class: "quiet" }, "(empty)") : visible(text);
  return el("div", { class: "text", dir: "ltr", ...attributes }, words);
}

export const main = document.getElementById("main");
const folds = new Map();

export function heading(...words) {
  return el("h1", {}, ...words);
}

/** Details that stay as they were opened or closed, over all pages. */
export function fold(key, title, isOpen, ...children) {
  const node = el("details", { class: "fold", open: folds.get(key) ?? isOpen }, el("summary", {}, title), children);
  node.addEventListener("toggle", () => folds.set(key, node.open));
  return node;
}

/** Say something to those who do not see the page. */
export function announce(text) {
  document.getElementById("said").textContent = text;
}
