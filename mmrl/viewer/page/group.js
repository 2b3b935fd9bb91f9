// The page of a group.

import {
  address,
  addressWith,
  filterQuery,
  groupAddress,
  note,
  place,
  promptAddress,
  stepPath,
  wanted,
} from "./addresses.js";
import { load, loadOr } from "./documents.js";
import {
  arrow,
  button,
  el,
  fold,
  heading,
  inLine,
  link,
  quiet,
  replace,
  section,
  textBlock,
  visible,
} from "./elements.js";
import { episodeNode } from "./episodes.js";
import { matchingRows, stateOf } from "./filters.js";
import { problemPage } from "./frame.js";
import { picture, pictureRow } from "./images.js";
import { branchOf, countOf, isGiven, keyOf, lengthOf, memberName, worthOf } from "./members.js";
import { pairSection, redrawPair } from "./pair.js";
import { membersByGroup, stepBar, stepChanged, stepTargets, titleOf } from "./step.js";
import { endTag, groupColumns, groupsOf, rolloutColumns } from "./step_tables.js";
import { facts, ordered, table } from "./tables.js";
import { capitalized, counted, distinct, distinctInOrder, known, mean, number, plain, valueText } from "./text.js";
import { tokensNode } from "./tokens.js";

export async function groupPage(run, kind, step, group) {
  const loading = load(`${stepPath(run, kind, step)}/group/${group}`).catch((error) => error);
  const [info, details] = await Promise.all([load(`run/${run}`), loading]);
  const bar = el("div", {}, stepBar(info, run, kind, step, ""));
  const ways = {
    run,
    runs: [run],
    steps: () =>
      stepTargets(run, info, kind, step, (next) => address(`${stepPath(run, kind, next)}/group/${group}`, place.query)),
    up: address(stepPath(run, kind, step), filterQuery()),
  };
  if (details instanceof Error) {
    const { node, ...failed } = problemPage(details);
    return { ...ways, ...failed, node: [bar, node] }; // another step may have fewer groups: the keys lead on
  }
  const view = { run, kind, step, details, group, info };
  view.title = el("div", { class: "title-line" }, groupTitle(view));
  view.ordered = groupOrder(view); // the step's table may be long to read: the group does not wait for it
  view.panel = el("div", { class: "member-panel" });
  view.cards = el("div", { class: "members" });
  view.recolored = (value) => {
    note({ color: value });
    drawMembers(view);
    redrawPair(view);
  };
  drawMembers(view);
  return {
    ...ways,
    title: `Group ${group}, ${titleOf(kind, step).toLowerCase()}`,
    view,
    node: [
      bar,
      groupHead(view),
      groupPrompt(view),
      completionNodes(view),
    ],
    groups: () => view.ordered.then(() => groupNeighbours(view)),
    update: async () => stepChanged(bar, await load(`run/${run}`), run, kind, step, ""),
  };
}

/** The pair, and each completion; a pair that the dataset gives is all that there is, so the rest is folded. */
function completionNodes(view) {
  const { members, pair } = view.details;
  const each = [rewardTable(view), section("Completions", {}, view.cards), view.panel];
  if (!pair?.compared) return [each[0], each[1], pairSection(view), each[2]];
  if (members.length > 2) return [pairSection(view), each];
  view.each = fold("group/each", "each by itself", false, each);
  return [pairSection(view), view.each];
}

/** Find the step's groups as the table has them, and lead from one to the next. */
async function groupOrder(view) {
  const { path } = place;
  view.doc = await loadOr(stepPath(view.run, view.kind, view.step), null).catch(() => null);
  if (!view.doc || place.path !== path) return;
  view.members = membersByGroup(view.doc);
  view.order = await orderOfGroups(view).catch(() => undefined);
  replace(view.title, groupTitle(view));
}

async function orderOfGroups(view) {
  const rows = await matchingRows(view);
  const isByRollout = wanted("by") === "rollout";
  const columns = isByRollout ? rolloutColumns(view) : groupColumns(view, rows);
  const shown = ordered(isByRollout ? rows : groupsOf(view, rows), columns, wanted("sort"));
  return distinctInOrder(shown.map((each) => (isByRollout ? view.doc.rows.group[each] : each.group)));
}

function groupNeighbours(view) {
  const { group, order = [] } = view;
  const at = order.indexOf(group);
  const keep = { color: wanted("color"), view: wanted("view") };
  const to = (next) => next !== undefined && groupAddress(view, next, keep);
  if (at >= 0) return { before: to(order[at - 1]), after: to(order[at + 1]) };
  return { before: to(order.filter((each) => each < group).at(-1)), after: to(order.find((each) => each > group)) };
}

function groupTitle(view) {
  const { group, order } = view;
  const at = order?.indexOf(group) ?? -1;
  const all = () => address(stepPath(view.run, view.kind, view.step), filterQuery());
  return [
    arrow(() => groupNeighbours(view).before, "‹", "Group before (k)"),
    heading(`Group ${group}`),
    arrow(() => groupNeighbours(view).after, "›", "Next group (j)"),
    at < 0 ? "" : quiet(`${at + 1} of ${order.length}`),
    link(all, {}, `all of ${titleOf(view.kind, view.step).toLowerCase()}`),
  ];
}

function groupHead(view) {
  const { details } = view;
  return el(
    "div",
    { class: "group-head" },
    view.title,
    facts([
      ["prompt", link(promptAddress(view.run, details.prompt_id), { class: "id" }, inLine(details.prompt_id))],
      ["epoch", number(details.epoch)],
      ["retries", details.retries ? `${number(details.retries)}: in place of a rejected group of this prompt` : null],
      ["source", details.source ? inLine(details.source) : null],
      [
        "reference answer",
        details.answer === null && details.members.every(isGiven)
          ? null
          : el("span", { class: "reference-answer" }, inLine(valueText(details.answer))),
      ],
    ]),
    el("p", { class: `why ${stateOf(details)}` }, visible(details.why ?? "")),
  );
}

function groupPrompt(view) {
  const { details, run } = view;
  const messages = (details.messages ?? []).map((message) =>
    el("div", { class: "message" }, el("h3", {}, inLine(message.role)), textBlock(valueText(message.content))),
  );
  const choices = details.choices?.length
    ? facts([
        [
          "choices",
          el(
            "ol",
            { class: "choices", type: "A" },
            details.choices.map((each) => el("li", {}, inLine(each))),
          ),
        ],
      ])
    : "";
  const columns = Object.entries({ ...details.columns, ...details.columns_as_text });
  return section(
    "Prompt",
    { class: "prompt" },
    el(
      "div",
      { class: "prompt-parts" },
      pictureRow(run, details.images ?? []),
      (details.views ?? []).map((view) =>
        fold(`group/view/${view.name}`, `view ${plain(view.name)}`, false, pictureRow(run, view.images)),
      ),
      el(
        "div",
        { class: "messages" },
        messages.length ? messages : textBlock(details.prompt),
        choices,
        candidatesNode(details.candidates ?? [], run),
        details.demonstration
          ? fold("group/demonstration", "demonstration", false, textBlock(details.demonstration))
          : "",
        fold("group/rendered", "as rendered for the model", false, textBlock(details.prompt, { class: "text mono" })),
        columns.length
          ? fold(
              "group/columns",
              `other columns of the row (${columns.length})`,
              false,
              facts(columns.map(([name, value]) => [inLine(name), visible(valueText(value))])),
            )
          : "",
      ),
    ),
  );
}

/** Both candidates of a comparison, with their images and scores. */
function candidatesNode(candidates, run) {
  if (!candidates.length) return "";
  const parts = candidates.map((each, i) =>
    el(
      "div",
      { class: "message" },
      el("h3", {}, `candidate ${i + 1}, score ${number(each.score)}`),
      textBlock(each.text),
      (each.images ?? []).map((image) => picture(run, image)),
    ),
  );
  return el("div", { class: "candidates" }, parts);
}

function rewardTable(view) {
  const { members } = view.details;
  const names = (key) => distinct(members.flatMap((member) => Object.keys(member[key] ?? {})));
  const parts = names("rewards");
  const scored = names("components").filter((name) => !parts.includes(name));
  const areGiven = members.every(isGiven);
  const hasAdvantage = members.some((member) => known(member.tokens?.advantage).length);
  const columns = [
    {
      key: "member",
      title: members.some(({ score }) => score !== undefined) ? "candidate" : "completion",
      class: "nowrap",
      cell: (member) =>
        link(() => addressWith({ member: keyOf(member) }), { "data-member": keyOf(member) }, memberName(member)),
    },
    !areGiven && {
      key: "reward",
      title: "reward",
      isNumber: true,
      cell: (member) => el("b", {}, number(member.reward)),
    },
    ...parts.map((name) => ({
      key: name,
      title: inLine(name),
      class: "read",
      cell: (member) => componentCell(member, name),
    })),
    ...scored.map((name) => ({
      key: name,
      title: inLine(name),
      isNumber: true,
      cell: (member) => number(Object.hasOwn(member.components ?? {}, name) ? member.components[name] : null),
    })),
    hasAdvantage && {
      key: "advantage",
      title: "advantage",
      isNumber: true,
      cell: (member) => number(mean(known(member.tokens?.advantage)), 3),
    },
    { key: "length", title: "tokens", isNumber: true, cell: (member) => number(lengthOf(member)) },
    members.some((member) => typeof member.likelihood?.value === "number") && {
      key: "value",
      title: "score by the model",
      isNumber: true,
      cell: (member) => number(member.likelihood?.value),
    },
    members.some((member) => typeof member.likelihood?.policy === "number") && {
      key: "policy",
      title: "log-prob",
      isNumber: true,
      cell: (member) => number(member.likelihood?.policy),
    },
    members.some((member) => typeof member.likelihood?.log_ratio === "number") && {
      key: "log_ratio",
      title: "log-ratio",
      isNumber: true,
      cell: (member) => number(member.likelihood?.log_ratio),
    },
    !areGiven && {
      key: "end",
      title: "end",
      cell: (member) => endTag(member.finish_reason, member.finish_reason === "length", member.valid),
    },
    !areGiven && {
      key: "version",
      title: "weights",
      isNumber: true,
      cell: (member) => number(member.weight_version),
    },
    members.some((member) => member.failure) && {
      key: "failure",
      title: "failure",
      cell: (member) => inLine(member.failure ?? ""),
    },
  ].filter(Boolean);
  const marked = (member) => ({ class: keyOf(member) === keyOf(chosenMember(view)) ? "chosen" : null });
  view.rewards_ = el(
    "div",
    {},
    table({
      caption: areGiven ? "Numbers of each completion" : "Rewards of each completion",
      columns,
      rows: members,
      rowAttributes: marked,
    }),
  );
  return section(areGiven ? "Given by the dataset" : "Rewards", {}, view.rewards_);
}

/** A component's value, and the answer that the reward read. */
function componentCell(member, name) {
  const value = Object.hasOwn(member.rewards ?? {}, name) ? member.rewards[name] : null;
  const answer = Object.hasOwn(member.answers ?? {}, name) ? member.answers[name] : null;
  const read = answer === null ? "" : el("span", { class: "answer" }, " read ", el("q", {}, inLine(answer)));
  return [value === null ? el("span", { class: "tag wrong" }, "not scored") : number(value), read];
}

export function chosenMember(view) {
  const { members } = view.details;
  return members.find((member) => keyOf(member) === wanted("member")) ?? members[0];
}

function drawMembers(view) {
  const chosen = chosenMember(view);
  replace(
    view.cards,
    view.details.members.map((member) => memberCard(view, member, member === chosen)),
  );
  replace(view.panel, chosen ? memberPanel(view, chosen) : quiet("The group has no completion."));
}

export function chooseMember(view, key) {
  note({ member: key });
  if (view.each) view.each.open = true;
  drawMembers(view);
  for (const row of view.rewards_.querySelectorAll("tbody tr")) {
    row.classList.toggle("chosen", row.querySelector("a")?.dataset.member === key);
  }
}

function memberCard(view, member, isChosen) {
  const pressed = button(
    [
      el("b", {}, memberName(member)),
      el("span", {}, worthOf(member)),
      el("span", {}, counted(lengthOf(member) ?? 0, "token")),
      isGiven(member) ? "" : endTag(member.finish_reason, member.finish_reason === "length", member.valid),
      member.view ? el("span", { class: "tag" }, `from view ${plain(member.view)}`) : "",
      member.branch ? el("span", { class: "tag" }, branchOf(member)) : "",
      member.recalled ? el("span", { class: "tag" }, "recalled from an earlier step") : "",
    ],
    () => chooseMember(view, keyOf(member)),
    { class: "member-head", "aria-pressed": String(isChosen), "data-key": keyOf(member) },
  );
  return el(
    "article",
    { class: isChosen ? "member chosen" : "member", "data-member": keyOf(member) },
    pressed,
    memberText(member),
  );
}

const CARD_CHARACTERS = 5000;

/** The text of a completion, cut where that would be slow to lay out beside others; of an episode, each turn's. */
function memberText(member) {
  const attributes = { tabindex: "0", class: "text mono", role: "group", "aria-label": memberName(member) };
  const left = (member.text ?? "").length - CARD_CHARACTERS;
  if (!member.episode?.length && left > 0) {
    const rest = quiet(`${left.toLocaleString("en")} more characters: choose this completion to see them.`);
    return el("div", { ...attributes, dir: "ltr" }, visible(member.text.slice(0, CARD_CHARACTERS)), " …", rest);
  }
  return completionText(member, attributes);
}

/** The whole text of a completion; of an episode, each turn's. */
function completionText(member, attributes) {
  if (!member.episode?.length) return textBlock(member.text, attributes);
  const turns = member.episode.map((turn, i) =>
    el("div", {}, el("span", { class: "quiet" }, `${i + 1} `), visible(turn.text)),
  );
  return el("div", { ...attributes, dir: "ltr" }, turns);
}

// Each view of a completion: whether it has anything to show, and its node. A later kind of record adds one.
const MEMBER_VIEWS = {
  episode: { title: "Episode", has: (member) => member.episode?.length, node: episodeNode },
  tokens: { title: "Tokens", has: (member) => countOf(member), node: tokensNode },
  text: { title: "Text", has: () => true, node: (view, member) => completionText(member, { class: "text mono" }) },
};

function memberPanel(view, member) {
  const names = Object.keys(MEMBER_VIEWS).filter((name) => MEMBER_VIEWS[name].has(member));
  const name = names.includes(wanted("view")) ? wanted("view") : names[0];
  const tabs = names.map((each) =>
    button(
      MEMBER_VIEWS[each].title,
      () => {
        note({ view: each });
        replace(view.panel, memberPanel(view, member));
      },
      { "aria-pressed": String(each === name), "data-view": each },
    ),
  );
  const head = el(
    "div",
    { class: "panel-head" },
    el("h2", {}, member.greedy ? "Greedy completion" : capitalized(memberName(member))),
    el("div", { class: "tabs" }, tabs),
  );
  return [
    head,
    member.failure ? el("p", { class: "problem" }, "Failed: ", visible(member.failure)) : "",
    MEMBER_VIEWS[name].node(view, member),
  ];
}
