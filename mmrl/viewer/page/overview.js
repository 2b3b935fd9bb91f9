// Lists of runs and of their settings, which are sorted by what they show.

import { address, addressWith, go, note, wanted } from "./addresses.js";
import { spreadOfRuns } from "./bands.js";
import { choice, control, el, inLine, link, quiet, replace, visible } from "./elements.js";
import { ordered, table } from "./tables.js";
import { distinctInOrder, durationText, number, plain, textOf, valueText } from "./text.js";

const ACCURACY = /^eval\/(?:([^/]+)\/)?accuracy$/;
const OTHERWISE = ["reward/mean", "loss/total"];
const FEW_ACCURACIES = 3;
const STATES = ["running", "done", "stopped", "failed", "waiting"];

/** The entries of a document of all runs, with their names and folders. */
export function entriesOf(doc, runs) {
  return doc.runs.map((entry) => ({ ...runs[entry.run], ...entry }));
}

function metricNames(entries) {
  return distinctInOrder(entries.flatMap(({ last }) => Object.keys(last)));
}

/** What lists show of metrics: accuracies or else another one, the best of what runs ask for, and the address's one. */
function measuresOf(entries) {
  const all = metricNames(entries);
  const accuracies = all.filter((name) => ACCURACY.test(name)).slice(0, FEW_ACCURACIES);
  const others = accuracies.length ? accuracies : OTHERWISE.filter((name) => all.includes(name)).slice(0, 1);
  const names = distinctInOrder([...others, ...all.filter((name) => name === wanted("metric"))]);
  const best = distinctInOrder(entries.flatMap((entry) => Object.keys(entry.best)));
  const own = (values, name) => (Object.hasOwn(values, name) ? values[name] : null);
  return [
    ...names.map((name) => ({ key: `last:${name}`, title: metricTitle(name), of: ({ last }) => own(last, name) })),
    ...best.map((name) => ({
      key: `best:${name}`,
      title: ["best ", visible(name)],
      of: (entry) => own(entry.best, name),
    })),
  ];
}

function metricTitle(name) {
  const match = name.match(ACCURACY);
  if (!match) return visible(name);
  return match[1] ? ["last accuracy, ", visible(match[1])] : "last accuracy";
}

/** A select of all metrics; the chosen one becomes a column that the rows are sorted by. */
export function metricPicker(entries) {
  const names = metricNames(entries);
  if (!names.length) return "";
  const options = [["", "–"], ...names.map((name) => [name, plain(name)])];
  const sortOf = (name) => (name.startsWith("loss/") ? `last:${name}` : `-last:${name}`);
  const chosen = (name) => go(addressWith({ metric: name, sort: name && sortOf(name) }), true);
  return control("sort by metric", choice(options, wanted("metric"), chosen));
}

/** The keys whose values tell settings apart. */
function axesOf(settings) {
  return distinctInOrder(settings.flatMap(({ values }) => Object.keys(values)));
}

function axisColumn(key, valuesOf) {
  const value = (row) => (Object.hasOwn(valuesOf(row), key) ? valuesOf(row)[key] : null);
  const text = (found) => (typeof found === "number" ? number(found) : inLine(valueText(found)));
  return { key: `value:${key}`, title: visible(key), class: "short", value, cell: (row) => text(value(row)) };
}

/** A table that sorts itself anew where it is, by what `sort` of the address says, and its rows as they are sorted. */
function sortedTable({ caption, columns, rows, rowAttributes }) {
  const node = el("div", { class: "tall list" });
  const sorted = () => ordered(rows, columns, wanted("sort"));
  const draw = () =>
    replace(
      node,
      table({
        caption,
        columns,
        rows: sorted(),
        sort: wanted("sort"),
        sorted: (sort) => {
          note({ sort });
          draw();
        },
        rowAttributes,
      }),
    );
  draw();
  return { node, rows: sorted };
}

/** The runs; `first` may put something before a name, `rowAttributes` is as of `table`. */
export function runsTable({ entries, settings, first, rowAttributes }) {
  const values = new Map(settings.flatMap((setting) => setting.runs.map((run) => [run, setting.values])));
  const haveSeeds = new Set(entries.map(({ seed }) => textOf(seed))).size > 1;
  const columns = [
    { key: "name", title: "run", value: ({ name }) => name, cell: (row) => [first?.(row) ?? "", nameOf(row)] },
    ...axesOf(settings).map((key) => axisColumn(key, ({ run }) => values.get(run) ?? {})),
    haveSeeds && {
      key: "seed",
      title: "seed",
      isNumber: true,
      value: ({ seed }) => seed,
      cell: (row) => number(row.seed),
    },
    { key: "state", title: "state", value: ({ state }) => rankOf(state), cell: stateCell },
    { key: "step", title: "step", isNumber: true, value: ({ step }) => step, cell: stepCell },
    ...measuresOf(entries).map(({ key, title, of }) => ({
      key,
      title,
      isNumber: true,
      value: of,
      cell: (row) => number(of(row)),
    })),
    {
      key: "time",
      title: "took",
      isNumber: true,
      value: (row) => row.seconds,
      cell: (row) => durationText(row.seconds),
    },
    { key: "path", title: "folder", class: "long", cell: ({ path }) => el("span", { class: "mono" }, inLine(path)) },
  ].filter(Boolean);
  return sortedTable({ caption: "Runs", columns, rows: entries, rowAttributes });
}

function rankOf(state) {
  return STATES.includes(state) ? STATES.indexOf(state) : null;
}

function nameOf({ run, name, problem }) {
  return problem ? visible(name) : link(address(`run/${run}/curves`), {}, visible(name));
}

function stateCell({ state, reason, problem }) {
  const tag = state && el("span", { class: `tag ${rankOf(state) === null ? "" : state}` }, visible(state));
  const isBroken = problem && state !== "waiting";
  const why = isBroken ? el("div", { class: "problem" }, visible(problem)) : "";
  return [tag || "", reason ? el("div", { class: "head reason", title: plain(reason) }, inLine(reason)) : "", why];
}

function stepCell({ step, steps }) {
  return typeof steps === "number" && step !== null ? `${number(step)} of ${number(steps)}` : number(step);
}

/** The settings, each with the mean and the deviation of its runs; as `runsTable`. */
export function settingsTable({ entries, settings, first, rowAttributes }) {
  const byRun = new Map(entries.map((each) => [each.run, each]));
  const rows = settings
    .map((setting) => ({ ...setting, entries: setting.runs.map((run) => byRun.get(run)).filter(Boolean) }))
    .filter((row) => row.entries.length);
  const axes = axesOf(rows);
  const name = {
    key: "setting",
    title: "setting",
    value: (row) => (axes.length === 1 && Object.hasOwn(row.values, axes[0]) ? row.values[axes[0]] : row.name),
    cell: (row) => [first?.(row) ?? "", visible(row.name)],
  };
  const columns = [
    name,
    ...(axes.length > 1 ? axes.map((key) => axisColumn(key, ({ values }) => values)) : []),
    {
      key: "seeds",
      title: "runs",
      isNumber: true,
      value: (row) => row.entries.length,
      cell: (row) => number(row.entries.length),
    },
    {
      key: "state",
      title: "states",
      class: "nowrap",
      value: (row) => stateWords(row.entries),
      cell: (row) => stateWords(row.entries),
    },
    ...measuresOf(entries).map(({ key, title, of }) => ({
      key,
      title: [title, ", mean ± deviation"],
      isNumber: true,
      value: (row) => spreadOfRuns(row.entries, of).mean,
      cell: (row) => spreadWords(spreadOfRuns(row.entries, of), row.entries.length),
    })),
  ];
  return sortedTable({ caption: "Settings", columns, rows, rowAttributes });
}

/** States with their numbers, such as "2 done, 1 failed". */
export function stateWords(entries) {
  const counts = STATES.map((state) => [state, entries.filter((each) => each.state === state).length]);
  const unknown = entries.length - counts.reduce((sum, [, count]) => sum + count, 0);
  return [...counts, ["unknown", unknown]]
    .filter(([, count]) => count)
    .map(([state, count]) => `${count} ${state}`)
    .join(", ");
}

function spreadWords(found, count) {
  if (!found.count) return number(null);
  const range = found.deviation === null ? "" : ` ± ${number(found.deviation, 2)}`;
  const some = found.count < count ? ` (${found.count} of ${count})` : "";
  return [`${number(found.mean)}${range}`, el("span", { class: "quiet" }, some, found.isEarly ? " so far" : "")];
}

/** True if some of the settings have several runs. */
export function hasSeeds(settings) {
  return settings.some(({ runs }) => runs.length > 1);
}

/** A sentence on what the deviation is of. */
export function spreadNote() {
  return quiet(
    "Mean and standard deviation (of a sample) over the runs of a setting that are done, or as long as none is over all. They differ in their seed alone.",
  );
}
