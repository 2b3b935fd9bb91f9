// The list of runs.

import { address, go } from "./addresses.js";
import { el, heading, link, quiet } from "./elements.js";
import { redrawn } from "./frame.js";
import { entriesOf, hasSeeds, metricPicker, runsTable, settingsTable, spreadNote, stateWords } from "./overview.js";
import { overview, runList } from "./runs.js";
import { counted } from "./text.js";

export async function homePage() {
  const all = await runList();
  if (!all.length)
    return { title: "Runs", runs: [], node: [heading("Runs"), quiet("No run was given to `mmrl view`.")] };
  if (all.length === 1 && !all[0].problem) {
    go(address(`run/${all[0].run}/curves`), true);
    return null;
  }
  const doc = await overview();
  const entries = entriesOf(doc, all);
  const list = { entries, settings: doc.settings };
  const settings = hasSeeds(doc.settings)
    ? [el("h2", {}, "Settings"), settingsTable(list).node, spreadNote(), el("h2", {}, "Runs")]
    : "";
  const compared = all.length > 1 && link(address("compare"), { class: "button" }, "Compare them");
  return {
    title: "Runs",
    runs: [],
    node: [
      heading("Runs"),
      el(
        "div",
        { class: "tools" },
        compared,
        metricPicker(entries),
        el("span", { class: "quiet" }, `${counted(all.length, "run")}: ${stateWords(entries)}`),
      ),
      settings,
      runsTable(list).node,
    ],
    listed: redrawn,
  };
}
