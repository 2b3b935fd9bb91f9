"""Documents of recorded steps: the table of a step's groups and rollouts, full-text search, a prompt over all steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import DataError
from mmrl.rollout.records.paging import IndexedGroup, Place
from mmrl.rollout.records.pairs import Likelihood, pair_of
from mmrl.types import GIVEN, TRUNCATED
from mmrl.viewer.documents import HEAD, LONG_HEAD, Document, NotThere, head
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.pairs import add_pairs, given_scores, pair_entry, preferences

_OF_GROUP = ("group", "epoch", "prompt_id", "source", "kept", "trained", "prompt", "messages", "answer", "images")
_OF_ROLLOUTS = (
    *("index", "greedy", "reward", "rewards", "mask", "turn_rewards", "finish_reason", "valid", "completion"),
    "weight_version",
)
_TABLES = 4
"""Tables of steps that are kept, 10 MB for 10,000 rollouts."""
_SENT_TABLES = 64
"""Those that are kept for a report, which holds them itself."""
_PROMPTS = 20_000
"""Steps whose prompts are known, 8 bytes for each group."""
_TOLERANCE = 1e-8
"""As in ``group/all_correct_fraction``."""


class StepIndex:
    """The table of a step, and the place of each group in the file.

    Attributes:
        document: As the page gets it.
        places: By the group's number.
        has_scores: True if some rollouts are candidates of the dataset.
    """

    def __init__(self, step: int, kind: str, groups: Iterator[IndexedGroup], accuracy: str | None) -> None:
        self.places: dict[int, Place] = {}
        rows: dict[str, list[Any]] = defaultdict(list)
        shown = []
        for found in groups:
            number = int(found.of_group["group"])
            self.places[number] = found.place
            shown.append(_group_entry(kind, found))
            rows["group"] += [number] * len(found.of_rollouts["index"])
            for name, values in _columns(found.of_rollouts, accuracy).items():
                rows[name] += values
        self.has_scores = any(score is not None for score in rows["score"])
        if not self.has_scores:
            del rows["score"]
        self.document: Document = {"step": step, "groups": shown, "rows": dict(rows)}


def step_index(run: ViewedRun, kind: str, step: int) -> StepIndex:
    """The index of a step; read once."""
    file = run.file(kind, step)

    def read() -> StepIndex:
        pages = run.pages(kind, step)
        found = StepIndex(step, kind, pages.index(_OF_GROUP, _OF_ROLLOUTS), run.judge(kind))
        if found.has_scores:
            add_pairs(found.document, pages)
        return found

    return run.kept(("index", kind), file, read, of=_SENT_TABLES if run.is_sent else _TABLES)


def step_document(run: ViewedRun, kind: str, step: int) -> Document:
    """The table of a step."""
    return step_index(run, kind, step).document


def search(run: ViewedRun, kind: str, step: int, query: str) -> Document:
    """The rows of a step whose completion, prompt or turns have a text in them, whatever its case."""
    wanted, found, row = query.casefold(), list[int](), 0
    of_rollouts = ("completion", "episode")
    for group in run.pages(kind, step).index(("prompt", "messages"), of_rollouts):
        texts = [group.of_group["prompt"], *(each["content"] for each in group.of_group["messages"])]
        is_prompts = any(wanted in text.casefold() for text in texts)
        for completion, episode in zip(*(group.of_rollouts[name] for name in of_rollouts), strict=True):
            if is_prompts or any(wanted in text.casefold() for text in _texts(completion, episode)):
                found.append(row)
            row += 1
    return {"rows": found}


def prompt_document(run: ViewedRun, prompt_id: str) -> Document:
    """The answers to one prompt in all steps and evaluations that have sampled it; damaged files are left out."""
    found = []
    for kind in run.kinds:
        for step, file in run.files(kind).items():
            with suppress(DataError):
                if hash(prompt_id) in _prompt_hashes(run, kind, step, file):
                    found += [_history(run, kind, step, each) for each in _of_prompt(run, kind, step, prompt_id)]
    if not found:
        raise NotThere("no step has sampled this prompt", where=str(run.path))
    return found


def _prompt_hashes(run: ViewedRun, kind: str, step: int, file: Path) -> Any:
    """Hashes of the prompts of a step, which tell where to look."""

    def read() -> Any:
        groups = run.pages(kind, step).index(("prompt_id",), ())
        return np.array([hash(each.of_group["prompt_id"]) for each in groups], np.int64)

    return run.kept(("prompts", kind), file, read, of=_PROMPTS)


def _of_prompt(run: ViewedRun, kind: str, step: int, prompt_id: str) -> list[IndexedGroup]:
    of_group = ("group", "epoch", "prompt_id", "prompt", "messages", "answer", "images")
    fields = of_group, ("index", "greedy", "completion", "reward", "rewards", "valid", "weight_version")
    return [each for each in run.pages(kind, step).index(*fields) if each.of_group["prompt_id"] == prompt_id]


def _history(run: ViewedRun, kind: str, step: int, group: IndexedGroup) -> Document:
    own, rollouts, accuracy = group.of_group, group.of_rollouts, run.judge(kind)
    scores, pair = given_scores(rollouts), None
    if any(score is not None for score in scores):
        pair = pair_of(scores, list(map(Likelihood.of, run.pages(kind, step).records(group.place))))
    members = [
        {
            "index": index,
            "greedy": rollouts["greedy"][place],
            "text": head(rollouts["completion"][place], LONG_HEAD),
            "reward": _reward(rollouts, place),
            "right": is_right(rollouts["rewards"][place], rollouts["valid"][place], accuracy),
            **({} if scores[place] is None else {"score": scores[place]}),
        }
        for place, index in enumerate(rollouts["index"])
    ]
    place = {"kind": kind, "step": step, "group": own["group"], "epoch": own["epoch"]}
    return {
        **place,
        **_asked(own, LONG_HEAD),
        "members": members,
        **({"pair": pair_entry(pair)} if pair else {}),
    }


def evaluations_document(run: ViewedRun, name: str = "") -> Document:
    """Each prompt's result over the evaluations: the mean of what tells right from wrong, else of the reward; of a pair
    1 if the policy prefers the better answer (``preferences``), and then ``compared`` is true.

    Args:
        name: The evaluation set's; empty for one without a name.
    """
    prompts, problems, compared = dict[str, dict[str, Any]](), list[str](), False
    pictured, blank = (f"{kind}.{name}" if name else kind for kind in ("evaluation", "blank"))
    for kind, key in ((pictured, "results"), (blank, "blank")):
        for step in run.files(kind):
            try:
                is_pairs, results = _results(run, kind, step)
            except DataError as error:
                problems.append(str(error))
                continue
            compared |= is_pairs
            for prompt_id, answer, result in results:
                new: dict[str, Any] = {"prompt_id": prompt_id, "answer": answer, "results": {}, "blank": {}}
                prompts.setdefault(prompt_id, new)[key][str(step)] = result
    steps, blanks = list(run.files(pictured)), list(run.files(blank))
    document: Document = {"steps": steps, "blanks": blanks, "prompts": list(prompts.values())}
    document |= {"compared": True} if compared else {}
    return document | ({"problem": "; ".join(problems)} if problems else {})


def _results(run: ViewedRun, kind: str, step: int) -> tuple[bool, list[tuple[str, Any, float | None]]]:
    """True if candidates were compared; and each prompt's id, answer and result."""
    fields = ("prompt_id", "answer"), ("reward", "rewards", "valid", "weight_version")
    accuracy = run.judge(kind)

    def read() -> tuple[bool, list[tuple[str, Any, float | None]]]:
        pages = run.pages(kind, step)
        groups = list(pages.index(*fields))
        compared = any(score is not None for group in groups for score in given_scores(group.of_rollouts))
        found = preferences(pages) if compared else [_mean(group.of_rollouts, accuracy) for group in groups]
        asked = [(group.of_group["prompt_id"], group.of_group["answer"]) for group in groups]
        return compared, [(*each, result) for each, result in zip(asked, found, strict=True)]

    return run.kept(("results", kind), run.file(kind, step), read)


def _mean(rollouts: Mapping[str, Sequence[Any]], accuracy: str | None) -> float | None:
    """The mean of what tells right from wrong over a group's rollouts, else of the reward."""
    columns = [rollouts[name] for name in ("reward", "rewards", "valid")]
    scores = [(rewards or {}).get(accuracy, reward) for reward, rewards, _ in zip(*columns, strict=True)]
    known = [score for score, valid in zip(scores, columns[2], strict=True) if valid and score is not None]
    return float(np.mean(known)) if known else None


def is_right(rewards: Mapping[str, float | None] | None, valid: bool, accuracy: str | None) -> bool | None:
    """True if the component that tells right from wrong is at least 1; None if it was not scored."""
    value = (rewards or {}).get(accuracy or "")
    return None if value is None or not valid else value >= 1 - _TOLERANCE


def why(kind: str, kept: bool, trained: bool, rewards: Sequence[float], is_given: bool = False) -> str:
    """A sentence: the reason why a group was kept or dropped, as far as its record tells.

    Args:
        rewards: Rewards of its valid rollouts, without the greedy one.
        is_given: True if nobody sampled it.
    """
    if kind != "step":
        return "An evaluation trains on nothing."
    if is_given:
        return f"The dataset's own; {'trained on' if trained else 'the step did not end'}."
    equal = len(set(rewards)) == 1
    same = f"all {len(rewards)} valid rewards are {rewards[0]:.6g}" if equal else ""
    if not rewards:
        return "No rollout of it could be scored, so nothing can be learned from it."
    if not kept:
        reason = f"{same}, so no rollout is better than another" if same else "its rewards differ, but not as it asks"
        return f"The algorithm rejected it: {reason}."
    if not trained:
        return "It was kept, but the step had enough groups or did not end; a later step may train on it."
    return f"Trained on; {same}, so a baseline within the group leaves no signal." if same else "Trained on."


def valid_rewards(rollouts: Mapping[str, Sequence[Any]]) -> list[float]:
    """The rewards that count in a group, of what was sampled."""
    columns = (rollouts[name] for name in ("reward", "valid", "greedy", "weight_version"))
    return [reward for reward, valid, greedy, by in zip(*columns, strict=True) if valid and not greedy and by != GIVEN]


def _group_entry(kind: str, found: IndexedGroup) -> Document:
    own, is_given = found.of_group, set(found.of_rollouts["weight_version"]) == {GIVEN}
    rewards = [] if is_given else valid_rewards(found.of_rollouts)
    trained = bool(own.get("trained", own["kept"]))
    return {
        **{name: own[name] for name in ("group", "prompt_id", "source", "kept")},
        **({"given": True} if is_given else {}),
        "epoch": own.get("epoch") or 0,
        "trained": trained,
        "why": why(kind, bool(own["kept"]), trained, rewards, is_given),
        **_asked(own),
        "reward_mean": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
    }


def _reward(rollouts: Mapping[str, Sequence[Any]], place: int) -> float | None:
    """The reward of a rollout; None if nobody sampled it."""
    reward: float = rollouts["reward"][place]
    return None if rollouts["weight_version"][place] == GIVEN else reward


def _asked(of_group: Mapping[str, Any], characters: int = HEAD) -> Document:
    """The question of a group's prompt, shortened, with its images and its answer."""
    users = (each["content"] for each in reversed(of_group["messages"]) if each["role"] == "user")
    return {
        "prompt": head(of_group["prompt"], characters),
        "question": head(next(users, None), characters),
        "answer": of_group["answer"],
        "images": of_group["images"],
    }


def _columns(rollouts: Mapping[str, Sequence[Any]], accuracy: str | None) -> dict[str, list[Any]]:
    reasons = rollouts["finish_reason"]
    return {
        "index": list(rollouts["index"]),
        "greedy": list(rollouts["greedy"]),
        "reward": [_reward(rollouts, place) for place in range(len(reasons))],
        "length": list(rollouts["mask"]),
        "turns": [1 if each is None else each for each in rollouts["turn_rewards"]],
        "finish_reason": list(reasons),
        "truncated": [each in TRUNCATED for each in reasons],
        "valid": list(rollouts["valid"]),
        "right": [
            is_right(rewards, valid, accuracy)
            for rewards, valid in zip(rollouts["rewards"], rollouts["valid"], strict=True)
        ],
        "text": [head(each) for each in rollouts["completion"]],
        "score": given_scores(rollouts),
    }


def _texts(completion: str, episode: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    yield completion
    for turn in episode or ():
        yield turn["text"]
        yield from (part["text"] for part in turn["content"] or () if "text" in part)
