// The page of evaluations.

import { address, go, note, promptAddress, stepPath, wanted } from "./addresses.js";
import { load } from "./documents.js";
import { choice, control, el, heading, inLine, later, link, quiet, replace, sentence } from "./elements.js";
import { redrawn } from "./frame.js";
import { lineChart } from "./lines.js";
import { PAGE_ROWS, ordered, pager, table } from "./tables.js";
import { counted, known, mean, number, plain, textOf, valueText } from "./text.js";

/** Changes that prompts are chosen by; what is at least `right` is right. Of a comparison 0.5 is a tie, and not. */
function changesOf({ compared }) {
  const right = compared ? 1 : 0.5;
  const wrong = compared ? "not right" : "wrong";
  return {
    "": ["all", () => true],
    learned: [`${wrong} at first, right at last`, ({ first, last }) => first < right && last >= right],
    lost: [`right at first, ${wrong} at last`, ({ first, last }) => first >= right && last < right],
    never: ["never right", ({ values }) => values.every((value) => value < right)],
    blind: ["right without its picture", ({ blanks }) => blanks.at(-1) >= right],
    needs: [
      "right with its picture only",
      ({ last, blanks }) => last >= right && blanks.length > 0 && blanks.at(-1) < right,
    ],
  };
}

export async function evaluationsPage(run) {
  const info = await load(`run/${run}`);
  const sets = setsOf(info);
  const set = sets.includes(wanted("set")) ? wanted("set") : (sets[0] ?? "");
  const doc = await load(`run/${run}/evaluations${set && `/${set}`}`);
  const page = { title: "Evaluations", run, runs: [run], update: redrawn };
  if (!doc.prompts?.length) {
    const text = `No evaluation of ${plain(info.name)} is recorded prompt by prompt. Its metrics are among the curves.`;
    return {
      ...page,
      node: [
        heading("Evaluations"),
        quiet(sentence(text)),
        link(address(`run/${run}/curves`, { q: "eval" }), {}, "curves of eval"),
      ],
    };
  }
  const view = { run, doc, set, sets, prompts: doc.prompts.map((prompt) => resultsOf(doc, prompt)), body: el("div") };
  drawEvaluations(view);
  const unknown = doc.compared && view.prompts.every(({ values, blanks }) => !values.length && !blanks.length);
  const words =
    "The answers to these prompts are given, and which of two the policy prefers is not known: each prompt has one " +
    "answer, or no log-probs are recorded.";
  const chart = unknown ? quiet(words) : evaluationChart(view);
  return { ...page, node: [heading("Evaluations"), chart, evaluationTools(view), view.body] };
}

/** The evaluation sets of a run; the name of one may be empty. */
function setsOf(info) {
  const named = Object.keys(info.named ?? {}).filter((kind) => kind.startsWith("evaluation."));
  return [...(info.evaluations.length ? [""] : []), ...named.map((kind) => kind.slice("evaluation.".length))];
}

function resultsOf(doc, prompt) {
  const values = known(doc.steps.map((step) => prompt.results?.[step]));
  const blanks = known(doc.blanks.map((step) => prompt.blank?.[step]));
  return {
    ...prompt,
    values,
    blanks,
    first: values[0],
    last: values.at(-1),
    change: values.length > 1 ? values.at(-1) - values[0] : null,
  };
}

function evaluationChart({ run, doc, set }) {
  const points = (steps, key) =>
    steps
      .map((step) => [step, mean(known(doc.prompts.map((prompt) => prompt[key]?.[step])))])
      .filter(([, value]) => value !== null);
  const having = (key) => doc.prompts.filter((prompt) => known(Object.values(prompt[key] ?? {})).length).length;
  const blanks = having("blank");
  const series = [
    { name: "with pictures", index: 0, points: points(doc.steps, "results") },
    { name: "blank pictures", index: 1, points: points(doc.blanks, "blank") },
  ].filter((each) => each.points.length);
  const last = Math.max(1, ...doc.steps, ...doc.blanks);
  const picked = (step) => {
    const kind = `${doc.steps.includes(step) ? "evaluation" : "blank"}${set && `.${set}`}`;
    go(address(stepPath(run, kind, step)));
  };
  const chart = lineChart({
    label: doc.compared ? "share of pairs in the right order" : "mean result of the prompts",
    height: 220,
    range: [0, last],
    series,
    picked,
    pickText: "click: rollouts",
  });
  return el(
    "article",
    { class: "card" },
    el(
      "h3",
      {},
      doc.compared
        ? `share of ${counted(having("results"), "pair")} whose chosen answer the policy prefers`
        : `mean result of ${counted(having("results"), "prompt")}`,
      blanks ? `, and of ${counted(blanks, doc.compared ? "pair" : "prompt")} with blank pictures` : "",
    ),
    chart.node,
  );
}

function evaluationTools(view) {
  const changed = (key) => (value) => {
    note({ [key]: value, page: "" });
    drawEvaluations(view);
  };
  const search = el("input", {
    type: "search",
    class: "search",
    value: wanted("q"),
    placeholder: "prompt id or reference answer",
  });
  search.addEventListener(
    "input",
    later(() => changed("q")(search.value), 200),
  );
  const options = Object.entries(changesOf(view.doc)).map(([key, [title, test]]) => [
    key,
    `${title} (${view.prompts.filter(test).length})`,
  ]);
  return el(
    "div",
    { class: "tools", role: "search" },
    view.sets.length > 1 &&
      control(
        "set",
        choice(
          view.sets.map((name) => [name, name || "without a name"]),
          view.set,
          (name) => go(address(`run/${view.run}/evaluations`, { set: name })),
        ),
      ),
    control("search", search),
    control("prompts", choice(options, wanted("which"), changed("which"))),
  );
}

function drawEvaluations(view) {
  const changes = changesOf(view.doc);
  const [, test] = changes[Object.hasOwn(changes, wanted("which")) ? wanted("which") : ""];
  const text = wanted("q").toLowerCase();
  const isFound = (prompt) => `${textOf(prompt.prompt_id)} ${valueText(prompt.answer)}`.toLowerCase().includes(text);
  const columns = evaluationColumns(view);
  const rows = ordered(
    view.prompts.filter((prompt) => test(prompt) && isFound(prompt)),
    columns,
    wanted("sort"),
  );
  const again = (values) => {
    note(values);
    drawEvaluations(view);
  };
  const page = Math.max(0, Math.min(Number(wanted("page", "0")) || 0, Math.ceil(rows.length / PAGE_ROWS) - 1));
  const whole = table({
    caption: "Prompts",
    columns,
    rows: rows.slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS),
    sort: wanted("sort"),
    sorted: (sort) => again({ sort, page: "" }),
  });
  const words = quiet(`${rows.length} of ${counted(view.prompts.length, "prompt")}`);
  replace(
    view.body,
    el(
      "div",
      { class: "count-line" },
      words,
      pager(rows.length, page, PAGE_ROWS, (to) => again({ page: to || "" })) ?? "",
    ),
    rows.length ? whole : quiet("No prompt is like that."),
  );
}

function evaluationColumns({ run, doc }) {
  const step = (key, title, each, steps) => ({
    key: `${key}${each}`,
    title: title,
    isNumber: true,
    class: "result",
    value: (prompt) => prompt[steps]?.[each] ?? null,
    cell: (prompt) => resultCell(prompt[steps]?.[each], doc.compared),
  });
  return [
    {
      key: "prompt_id",
      title: "prompt",
      value: (prompt) => prompt.prompt_id,
      cell: (prompt) => link(promptAddress(run, prompt.prompt_id), { class: "id" }, inLine(prompt.prompt_id)),
    },
    doc.prompts.some(({ answer }) => answer !== null) && {
      key: "answer",
      title: "reference answer",
      class: "short",
      cell: (prompt) => inLine(valueText(prompt.answer)),
    },
    {
      key: "change",
      title: "change",
      isNumber: true,
      value: (prompt) => prompt.change,
      cell: (prompt) => signed(prompt.change),
    },
    ...doc.steps.map((each) => step("step", `step ${each}`, each, "results")),
    ...doc.blanks.map((each) => step("blank", [`blank ${each}`], each, "blank")),
  ].filter(Boolean);
}

function signed(value) {
  return value === null ? "–" : `${value > 0 ? "+" : ""}${number(value, 3)}`;
}

function resultCell(value, isCompared) {
  if (typeof value !== "number") return el("span", { class: "quiet" }, "–");
  const text = value === 1 ? "✓" : value === 0 ? "✗" : isCompared && value === 0.5 ? "=" : number(value, 2);
  return el(
    "span",
    { class: "cell", title: number(value), vars: { "--share": Math.min(Math.max(value, 0), 1).toFixed(3) } },
    text,
  );
}
