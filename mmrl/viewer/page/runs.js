// What a run has recorded.

import { stepPath } from "./addresses.js";
import { inReport, load, loadOr, report } from "./documents.js";
import { counted, number, textOf } from "./text.js";

export const LIVE = report ? "live when this report was made" : "live";
export const KINDS = { step: "training", evaluation: "evaluation", blank: "blank pictures" };

/** The kinds of records of a run: those of an evaluation set that has a name are `evaluation.NAME` and `blank.NAME`. */
export function kindsOf(info) {
  return [...Object.keys(KINDS), ...Object.keys(info.named ?? {})];
}

export function kindTitle(kind) {
  const [word, name] = kind.split(".");
  return name ? `${KINDS[word]} ${name}` : KINDS[word];
}

export async function runList() {
  const all = await load("runs");
  if (!report || all.length === 1) return all;
  const leftOut = "this report leaves it out: `mmrl view` shows it";
  return all.map((each) =>
    each.problem || inReport(`run/${each.run}/metrics`) ? each : { ...each, problem: leftOut },
  );
}

/** State, step and last values of all runs, and the settings that they are seeds of. */
export async function overview() {
  return load("overview");
}

/** What curves need of some runs; a run that cannot be read is a problem for all. */
export async function loadRuns(indices) {
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
export function recordedOf(run, info, kind) {
  const all = { step: info.steps, evaluation: info.evaluations, blank: info.blanks, ...info.named }[kind] ?? [];
  return report ? all.filter((step) => inReport(stepPath(run, kind, step))) : all;
}

/** The alarms of steps that count, each once: a run that is killed before its step is logged tells them again. */
export function alarmsOf(events) {
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
export function marksOf({ info, events, name, index }, isOneOfMany) {
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

export function pointsOf(metrics, name) {
  const values = Object.hasOwn(metrics.curves, name) ? metrics.curves[name] : [];
  const found = [];
  for (let i = 0; i < values.length; i++) if (values[i] !== null) found.push([metrics.steps[i], values[i]]);
  return found;
}

/** The recorded step that is nearest to this one; null if there is none. */
export function nearest(steps, step) {
  let best = null;
  for (const each of steps) if (best === null || Math.abs(each - step) < Math.abs(best - step)) best = each;
  return best;
}
