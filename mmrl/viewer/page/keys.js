// Keys.

import { go } from "./addresses.js";
import { announce, main } from "./elements.js";
import { isTyping, openHelp, page } from "./frame.js";
import { chooseMember, chosenMember } from "./group.js";
import { keyOf } from "./members.js";

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

export function pressed(event) {
  const isInput = isTyping(event.target);
  if (event.key === "Escape" && isInput) event.target.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || isInput || document.getElementById("help").open) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}
