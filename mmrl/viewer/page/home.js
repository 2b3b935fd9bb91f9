// The list of runs.

import { address, go } from "./addresses.js";
import { el, heading, inLine, link, quiet, visible } from "./elements.js";
import { runList } from "./runs.js";
import { table } from "./tables.js";

export async function homePage() {
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
