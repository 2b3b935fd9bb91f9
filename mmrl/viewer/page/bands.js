// Runs that differ in their seed alone, as one line with the band of their deviation.

import { pointsOf } from "./runs.js";
import { known } from "./text.js";

/** The lines of curves that have each run by itself. */
export function runLines(runs) {
  return runs.map((each, index) => ({ key: `run/${each.run}`, name: each.name, index, members: [each] }));
}

/** The lines of curves that have each setting once, with the runs that are there of it. */
export function settingLines(runs, settings) {
  const byRun = new Map(runs.map((each) => [each.run, each]));
  return settings
    .map((setting) => ({ setting, members: setting.runs.map((run) => byRun.get(run)).filter(Boolean) }))
    .filter(({ members }) => members.length)
    .map(({ setting, members }, index) => ({ key: `setting/${setting.runs[0]}`, name: setting.name, index, members }));
}

/** Mean, standard deviation of a sample and number of values; a deviation of two at least, and of what numbers can hold. */
function spreadOf(values) {
  const middle = values.length ? values.reduce((sum, value) => sum + value / values.length, 0) : null;
  const variance = values.reduce((sum, value) => sum + (value - middle) ** 2 / (values.length - 1), 0);
  const deviation = Math.sqrt(variance);
  const isShown = values.length > 1 && Number.isFinite(middle - deviation) && Number.isFinite(middle + deviation);
  return { mean: middle, deviation: isShown ? deviation : null, count: values.length };
}

/** What a chart draws of a line: a run's points, or the seeds' mean, deviation and number at each step. */
export function seriesOf({ name, index, members }, metric) {
  const curves = members.map(({ metrics }) => pointsOf(metrics, metric)).filter(({ length }) => length);
  if (members.length === 1) return { name, index, points: curves[0] ?? [] };
  const values = new Map();
  for (const [step, value] of curves.flat()) {
    if (values.has(step)) values.get(step).push(value);
    else values.set(step, [value]);
  }
  const points = [...values]
    .sort(([one], [other]) => one - other)
    .map(([step, some]) => {
      const found = spreadOf(some);
      return [step, found.mean, found.deviation, found.count];
    });
  return { name, index, most: curves.length, points };
}

/** The seeds of a line, each as a thin line of its own. */
export function seedSeries({ index, members }, metric) {
  return members.map(({ name, metrics }) => ({ name, index, isSeed: true, points: pointsOf(metrics, metric) }));
}

/** Mean, deviation and number of what runs have of a metric: of those that are done, or of all as long as none is. */
export function spreadOfRuns(entries, valueOf) {
  const done = entries.filter(({ state }) => state === "done");
  return { ...spreadOf(known((done.length ? done : entries).map(valueOf))), isEarly: !done.length };
}
