// The address of what is shown, after `#`.

import { textOf } from "./text.js";

export let place = { path: "", query: new URLSearchParams() };

function parsedAddress(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { path: path.replace(/\/$/, ""), query: new URLSearchParams(query ?? "") };
}

/** An address in the page; empty values are left out. */
export function address(path, query) {
  const pairs = query instanceof URLSearchParams ? [...query] : Object.entries(query ?? {});
  const full = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(full).toString().replace(/%2F/g, "/").replace(/%2C/g, ",");
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** This page's address with other values. */
export function addressWith(changes) {
  return address(place.path, { ...Object.fromEntries(place.query), ...changes });
}

export function go(to, replaces = false) {
  if (to === location.hash) return;
  if (!replaces) location.hash = to;
  else {
    history.replaceState(null, "", to);
    window.dispatchEvent(new Event("hashchange"));
  }
}

/** Take over the address of the window. */
export function arrive() {
  place = parsedAddress(location.hash);
}

/** Other values in the address, without drawing the page anew. */
export function note(changes) {
  const to = addressWith(changes);
  history.replaceState(null, "", to);
  place = parsedAddress(to);
}

export function wanted(name, otherwise = "") {
  return place.query.get(name) ?? otherwise;
}

/** A text within an address; halves of surrogate pairs have no code there. */
export function encoded(text) {
  return encodeURIComponent(textOf(text).replace(/[\ud800-\udfff]/gu, "\ufffd"));
}

export function list(text) {
  return text.split(",").filter((part) => part !== "");
}

const STEP_KEYS = [
  "q",
  "source",
  "finish",
  "state",
  "right",
  "order",
  "who",
  "rmin",
  "rmax",
  "lmin",
  "lmax",
  "sort",
  "by",
  "sample",
];

export function stepPath(run, kind, step) {
  return `run/${run}/${kind}/${step}`;
}

/** What the address says of a step's filter, for links to its groups and back. */
export function filterQuery() {
  return Object.fromEntries(STEP_KEYS.map((key) => [key, wanted(key)]));
}

export function groupAddress(view, group, more) {
  if (group === undefined) return null;
  return address(`${stepPath(view.run, view.kind, view.step)}/group/${group}`, { ...filterQuery(), ...more });
}

export function promptAddress(run, id) {
  return address(`run/${run}/prompt`, { id });
}
