// The page of what a run is: config, attempts, events, ledger, environment, seconds.

import { address, note, stepPath, wanted } from "./addresses.js";
import { configText } from "./comparison.js";
import { load, loadOr } from "./documents.js";
import { choice, control, el, fold, heading, inLine, later, link, quiet, section, visible } from "./elements.js";
import { redrawn } from "./frame.js";
import { LIVE, nearest, pointsOf, recordedOf } from "./runs.js";
import { facts, table } from "./tables.js";
import { timelineNode } from "./timeline.js";
import { counted, distinct, durationText, mean, number, percent, plain, timeText, valueText } from "./text.js";

export async function aboutPage(run) {
  const [info, metrics, timeline, events, ledger] = await Promise.all([
    load(`run/${run}`),
    loadOr(`run/${run}/metrics`, { steps: [], curves: {} }),
    loadOr(`run/${run}/timeline`, { steps: [] }),
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
      timelineNode(timeline),
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
  "perf/gather_s",
  "perf/queued_s",
]);

// Those of gathering, which pass beside other steps where groups are sampled ahead.
const GATHERS = new Set(["perf/prompts_s", "perf/sync_s", "perf/generate_s", "perf/score_s"]);

function phasesNode(metrics) {
  const isAhead = Object.hasOwn(metrics.curves, "perf/gather_s");
  const names = Object.keys(metrics.curves).filter((name) => /^perf\/[^/]+_s$/.test(name) && !name.endsWith("_per_s"));
  const rows = names
    .map((name) => ({ name, values: pointsOf(metrics, name).map(([, value]) => value) }))
    .filter(({ values }) => values.length);
  if (!rows.length) return section("Seconds by phase", {}, quiet("No step has told its seconds yet."));
  const all = rows.map((row) => ({
    ...row,
    sum: mean(row.values) * row.values.length,
    isInside: !BESIDE.has(row.name) && !(isAhead && GATHERS.has(row.name)),
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
  const step = nearest(recordedOf(run, info, "step"), event.step);
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
