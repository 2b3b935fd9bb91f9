// What the ranks did when: a lane for those that sample, and one for those that learn.

import { canvas, lazily, scale, ticks } from "./charts.js";
import { choice, control, el, quiet, section, svg } from "./elements.js";
import { table } from "./tables.js";
import { counted, durationText, number, percent } from "./text.js";

// The sides, each with its verb, which is also the kind of most of its spans.
const SIDES = { sampler: "sample", learner: "learn" };
const SPANS = {
  sync: "new weights",
  sample: "sampling",
  evaluate: "evaluation",
  publish: "weights set aside",
  learn: "learning",
  save: "checkpoint",
};
const SHOWN_STEPS = 12;
const TIMELINE_HEIGHT = 118;

/** The last steps as lanes over seconds; `found` is the document of the time line. */
export function timelineNode(found) {
  const { steps, apart } = found;
  if (!steps?.length) return section("Time line", {}, quiet("No step has told its seconds yet."));
  const body = el("div");
  const counts = [SHOWN_STEPS, 50, steps.length].filter(
    (count, i, all) => count <= steps.length && all.indexOf(count) === i,
  );
  const drawn = (count) => body.replaceChildren(lanesNode(steps.slice(-count)), waitsNode(steps.slice(-count)));
  drawn(Math.min(SHOWN_STEPS, steps.length));
  const options = (counts.length ? counts : [steps.length]).map((count) => [String(count), counted(count, "step")]);
  const picker = options.length > 1 && control("last", choice(options, options[0][0], (text) => drawn(Number(text))));
  const words = apart
    ? "Ranks that sample and ranks that learn work beside each other; what is empty is time that a side waited."
    : "The same ranks sample and learn, in turns.";
  return section("Time line", {}, el("div", { class: "tools" }, picker, spanLegend()), quiet(words), body);
}

function spanLegend() {
  return Object.entries(SPANS).map(([kind, title]) =>
    el("span", { class: "legend-item" }, el("i", { class: `key span-${kind}` }), title),
  );
}

function timeExtent(steps) {
  const spans = steps.flatMap((each) => each.spans);
  return [Math.min(...spans.map((span) => span[2])), Math.max(...spans.map((span) => span[3]))];
}

function lanesNode(steps) {
  const box = el("div", { class: "chart timeline", vars: { "--height": `${TIMELINE_HEIGHT}px` } });
  lazily(box, (width) => box.replaceChildren(drawLanes(width, steps)));
  return box;
}

function drawLanes(width, steps) {
  const [begin, end] = timeExtent(steps);
  const frame = { width, height: TIMELINE_HEIGHT, left: 60, right: width - 10, top: 18, bottom: TIMELINE_HEIGHT - 22 };
  const x = scale([begin, end], [frame.left, frame.right]);
  const places = steps.map((each) => each.step);
  const name = `Time line of steps ${number(places[0])} to ${number(places.at(-1))}`;
  const picture = canvas(frame, `${name}: ${timelineWords(steps)}`);
  const size = (frame.bottom - frame.top) / 2 - 6;
  const top = { sampler: frame.top, learner: frame.top + size + 10 };
  for (const [side, verb] of Object.entries(SIDES)) {
    const at = { x: frame.left, y: top[side], width: frame.right - frame.left, height: size };
    picture.append(
      svg("rect", { class: "lane", ...at }),
      svg("text", { class: "tick", x: frame.left - 6, y: top[side] + size / 2 + 4, "text-anchor": "end" }, verb),
    );
  }
  for (const { step, spans } of steps)
    for (const [side, kind, from, to] of spans) {
      const at = { x: x(from), y: top[side], width: Math.max(x(to) - x(from), 0.5), height: size };
      const text = `step ${number(step)}: ${SPANS[kind]}, ${durationText(to - from)}`;
      picture.append(svg("rect", { class: `span-${kind} ${step % 2 ? "odd" : "even"}`, ...at }, svg("title", {}, text)));
      if (kind === SIDES[side] && x(to) - x(from) > 26)
        picture.append(
          svg(
            "text",
            { class: "span-step", x: (x(from) + x(to)) / 2, y: top[side] + size / 2 + 4, "text-anchor": "middle" },
            number(step),
          ),
        );
    }
  for (const value of ticks(0, end - begin, width / 110))
    picture.append(
      svg("text", { class: "tick", x: x(begin + value), y: TIMELINE_HEIGHT - 6, "text-anchor": "middle" }, durationText(value)),
    );
  return picture;
}

/** The seconds of each side's spans, and of what lies between them. */
function sumsOf(steps) {
  const [begin, end] = timeExtent(steps);
  return Object.keys(SIDES).map((side) => {
    const own = steps.flatMap((each) => each.spans).filter((span) => span[0] === side);
    const of = (kind) => own.filter((span) => span[1] === kind).reduce((sum, span) => sum + span[3] - span[2], 0);
    const busy = own.reduce((sum, span) => sum + span[3] - span[2], 0);
    return { side, busy, waits: Math.max(end - begin - busy, 0), whole: end - begin, of };
  });
}

function timelineWords(steps) {
  return sumsOf(steps)
    .map(({ side, waits, whole }) => `ranks that ${SIDES[side]} do not ${percent(whole ? waits / whole : 0)} of the time`)
    .join(", ");
}

function waitsNode(steps) {
  const columns = [
    { key: "side", title: "ranks that", cell: ({ side }) => SIDES[side] },
    ...Object.entries(SPANS).map(([kind, title]) => ({
      key: kind,
      title,
      isNumber: true,
      cell: ({ of }) => (of(kind) ? durationText(of(kind)) : "–"),
    })),
    { key: "waits", title: "neither", isNumber: true, cell: ({ waits }) => durationText(waits) },
    { key: "share", title: "of the time", isNumber: true, cell: ({ waits, whole }) => percent(whole ? waits / whole : 0) },
  ];
  return table({ caption: "Seconds of both sides", columns, rows: sumsOf(steps) });
}
