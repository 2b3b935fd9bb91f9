// The page of one prompt over all epochs.

import { address, encoded, go, stepPath, wanted } from "./addresses.js";
import { inReport, load, loadOr, report } from "./documents.js";
import { el, fold, heading, inLine, link, quiet, textBlock } from "./elements.js";
import { redrawn } from "./frame.js";
import { pictureRow } from "./images.js";
import { lineChart } from "./lines.js";
import { keyOf, memberName } from "./members.js";
import { KINDS, kindTitle } from "./runs.js";
import { titleOf } from "./step.js";
import { questionOf, rightTag } from "./step_tables.js";
import { facts, table } from "./tables.js";
import { counted, known, mean, number, plain, valueText } from "./text.js";

export async function occurrencesOf(run, id) {
  const resource = `run/${run}/prompt?id=${encoded(id)}`;
  if (!report || inReport(resource)) return loadOr(resource, []);
  const found = [];
  for (const [name, doc] of Object.entries(report.documents)) {
    const match = name.match(/^run\/(\d+)\/(step|(?:evaluation|blank)(?:\.[\w-]+)?)\/(\d+)$/);
    if (!match || Number(match[1]) !== run) continue;
    for (const group of (doc.groups ?? []).filter((each) => each.prompt_id === id)) {
      found.push({
        kind: match[2],
        step: Number(match[3]),
        group: group.group,
        epoch: group.epoch,
        prompt: group.prompt,
        question: group.question,
        answer: group.answer,
        images: group.images,
        members: embeddedMembers(doc, group.group),
        pair: group.pair,
      });
    }
  }
  return found;
}

function embeddedMembers({ rows }, group) {
  return rows.group
    .map((_, row) => row)
    .filter((row) => rows.group[row] === group)
    .map((row) => ({
      index: rows.index[row],
      greedy: rows.greedy[row],
      text: rows.text[row],
      reward: rows.reward[row],
      right: rows.right[row],
      ...(typeof rows.score?.[row] === "number" ? { score: rows.score[row] } : {}),
    }));
}

export async function promptPage(run) {
  const id = wanted("id");
  const [info, found] = await Promise.all([load(`run/${run}`), occurrencesOf(run, id)]);
  const sorted = [...found].sort((one, other) => one.step - other.step || one.kind.localeCompare(other.kind));
  const body = sorted.length
    ? [askedNode(run, askedOf(sorted)), promptChart(run, sorted), sorted.map((each) => occurrenceNode(run, each))]
    : [
        quiet(
          `No recorded step of ${plain(info.name)} has a prompt with this id${report ? " among what the report holds" : ""}.`,
        ),
      ];
  return {
    title: `Prompt ${plain(id)}`,
    run,
    runs: [run],
    node: [
      heading("Prompt ", el("span", { class: "id" }, inLine(id))),
      quiet(
        counted(sorted.length, "occurrence"),
        ` in the ${report ? "steps that this report holds" : "recorded steps"}`,
      ),
      body,
    ],
    update: redrawn,
  };
}

/** The occurrence that tells what a prompt asks: the last one, and not with blank images. */
export function askedOf(occurrences) {
  return occurrences.filter(({ kind }) => !kind.startsWith("blank")).at(-1) ?? occurrences.at(-1);
}

/** Equal for prompts that ask the same. */
export function sameAsked({ prompt, question, answer, images }) {
  return JSON.stringify([prompt, question, answer, (images ?? []).map(({ hash }) => hash)]);
}

export function askedNode(run, asked) {
  return el(
    "div",
    { class: "prompt-parts asked" },
    pictureRow(run, asked.images ?? []),
    el(
      "div",
      { class: "messages" },
      textBlock(questionOf(asked)),
      asked.answer === null ? "" : facts([["reference answer", inLine(valueText(asked.answer))]]),
    ),
  );
}

/** What is compared over the steps: the margin of a pair, else the mean reward. */
function resultOf({ pair, members }) {
  return pair ? pair.margin : mean(known(members.map(({ reward }) => reward)));
}

function promptChart(run, occurrences) {
  const arePairs = occurrences.some(({ pair }) => pair);
  const series = [...new Set([...Object.keys(KINDS), ...occurrences.map(({ kind }) => kind)])]
    .map((kind, index) => ({
      name: kindTitle(kind),
      index,
      points: occurrences
        .filter((each) => each.kind === kind)
        .map((each) => [each.step, resultOf(each)])
        .filter(([, value]) => typeof value === "number"),
    }))
    .filter(({ points }) => points.length);
  const last = Math.max(1, ...occurrences.map(({ step }) => step));
  const picked = (step) => {
    const each = occurrences.find((one) => one.step === step);
    if (each) go(address(`${stepPath(run, each.kind, each.step)}/group/${each.group}`));
  };
  return el(
    "article",
    { class: "card" },
    el("h3", {}, arePairs ? "margin of the chosen answer over the rejected one" : "mean reward of its completions"),
    lineChart({ label: arePairs ? "margin" : "mean reward", height: 160, range: [0, last], series, picked }).node,
  );
}

export function occurrenceNode(run, { kind, step, group, epoch, members, pair }) {
  const to = (member) =>
    address(`${stepPath(run, kind, step)}/group/${group}`, { member: member ? keyOf(member) : "" });
  const columns = [
    { key: "member", title: "completion", class: "nowrap", cell: (member) => link(to(member), {}, memberName(member)) },
    ...(members.some(({ score }) => score !== undefined)
      ? [{ key: "score", title: "score", isNumber: true, cell: (member) => number(member.score) }]
      : [
          { key: "reward", title: "reward", isNumber: true, cell: (member) => number(member.reward) },
          { key: "right", title: "answer", cell: (member) => rightTag(member.right) },
        ]),
    {
      key: "text",
      title: "text",
      class: "long",
      cell: (member) => el("span", { class: "head mono" }, inLine(member.text)),
    },
  ];
  const title = [
    link(to(), {}, `${titleOf(kind, step)}`),
    el(
      "span",
      { class: "quiet" },
      ` epoch ${epoch ?? "–"}, ${pair ? "margin" : "mean reward"} ${number(resultOf({ pair, members }), 3)}`,
    ),
  ];
  return fold(
    `prompt/${kind}/${step}`,
    title,
    true,
    table({ caption: `Completions at ${kind} ${step}`, columns, rows: members }),
  );
}
