"""A run of comparisons made by hand: pairs, three candidates, one, equal ones, and a pair out of a sampled group.

python -m tests.viewer.made_pairs FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmrl.data.grid import ImageGrid
from mmrl.data.images import MediaStore
from mmrl.rollout.records.writing import write_groups
from mmrl.runs.checkpoints import Checkpoints
from mmrl.runs.directory import RunDirectory
from mmrl.system.redaction import Redactor
from mmrl.types import (
    GIVEN,
    SCORE,
    CreditedGroup,
    EncodedPrompt,
    PreUpdateStatistics,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Segment,
)
from tests.viewer.made_run import HOSTILE, fill, ids, prompt_of

CHOSEN = "The light on the left is red, so the car has stopped."
REJECTED = "The light on the left is green, so the car drives on."
CONFIG = """\
model: {path: models/tiny, dtype: auto}
data:
  train: {name: table, path: data/pairs}
  eval: {name: table, path: data/held-out}
rewards: []
algorithm: {name: dpo, data: given, beta: 0.5}
environment: null
sampler: {group_size: 1, max_new_tokens: 64}
trainer: {steps: 2, prompts_per_step: 4, blank_every: 1, best_metric: eval/accuracy, seed: 0}
trackers: []
"""


@dataclass(frozen=True)
class Answer:
    """A candidate.

    Attributes:
        slope: By how much each token's log-prob grows in a step; None if the candidate is in no loss.
    """

    text: str
    score: float
    slope: float | None


GROUPS = (
    (Answer(CHOSEN, 1.0, 0.5), Answer(REJECTED, 0.0, -0.25)),
    (Answer("a car", 0.2, -0.5), Answer(HOSTILE, 0.9, -0.75), Answer("a bus and a car", 0.5, None)),
    (Answer("yes", 1.0, 0.5),),
    (Answer("the same", 1.0, 0.0), Answer("the same", 0.0, 0.0)),
)
HELD_OUT = GROUPS[:3]


def make_pairs(folder: Path, *, has_reference: bool = True, old: bool = False) -> Path:
    """Make a run of two steps and three evaluations in an empty folder; returns it.

    Args:
        has_reference: False leaves the reference's log-probs out.
        old: True leaves log-probs out of evaluations, as earlier versions did.
    """
    directory = RunDirectory.create(folder)
    media = MediaStore(directory.media, ImageGrid(28, 28 * 28, 280 * 280))
    directory.begin_attempt(None, command=["mmrl", "train", "pairs.yaml"], changes=[])
    directory.write_config(CONFIG)
    (folder / "evaluations").mkdir()
    for step in (0, 1, 2):
        directory.append_metrics(step, _metrics(step))
        for name, blank in (("step", False), ("blank", True)):
            found = [
                _credited(media, n, 0 if blank else step, trained=False, blank=blank) for n in range(len(HELD_OUT))
            ]
            with (folder / "evaluations" / f"{name}-{step:06d}.parquet").open("wb") as file:
                write_groups(file, [_shown(each, has_reference, not old) for each in found], {}, Redactor())
        if step:
            made = [_shown(_credited(media, n, step - 1), has_reference) for n in range(len(GROUPS))]
            directory.write_rollouts(step, [*made, _sampled(media)] if step == 2 else made, {})
    Checkpoints(directory.checkpoints).write(2, fill)
    directory.end_attempt(0)
    directory.release()
    return folder


def _metrics(step: int) -> dict[str, float]:
    held_out = {"eval/accuracy": 0.5 * (step < 1) or 0.5 * step, "eval/margin": 0.4 * step, "eval_blank/accuracy": 0.5}
    names = ("accuracy", "margin", "reward_chosen", "reward_rejected", "logprob_chosen", "logprob_rejected")
    trained = {f"preference/{name}": 0.1 * step * place for place, name in enumerate(names)}
    trained |= {"loss/total": 0.7 - 0.1 * step, "data/equal_pairs": 1.0 * step, "reward_model/loss": 0.1 * step}
    return held_out if step == 0 else {**held_out, **trained}


def _credited(
    media: MediaStore, number: int, steps: int, *, trained: bool = True, blank: bool = False
) -> CreditedGroup:
    """A group of candidates as it is after so many steps, whose reference is the policy before them."""
    answers, prompt = GROUPS[number], prompt_of(media, number, 0, blank=blank)
    prompt = replace(prompt, prompt=replace(prompt.prompt, answer=None, choices=()))
    rollouts = tuple(_completion(prompt, place, each.text, GIVEN) for place, each in enumerate(answers))
    scores = np.array([each.score for each in answers])
    scored = ScoredGroup(
        RolloutGroup(prompt, rollouts), scores, np.ones(len(scores), np.bool_), {SCORE: scores}, place=(0, number)
    )
    reference = [-np.resize(np.array([0.5, 1.0, 1.5], np.float32), len(each.token_ids)) for each in rollouts]
    policy = [
        np.zeros(0, np.float32) if each.slope is None else own + np.float32(each.slope * steps)
        for each, own in zip(answers, reference, strict=True)
    ]
    updates = [[PreUpdateStatistics(own, np.full_like(own, 0.3))] if trained and len(own) else [] for own in policy]
    advantages = [np.full(len(own), float(trained)) for own in reference]
    return CreditedGroup(scored, advantages, policy, trained, reference, updates)


def _shown(group: CreditedGroup, has_reference: bool, has_logprobs: bool = True) -> CreditedGroup:
    """The group as a run without a reference has it, or one that recorded no log-probs."""
    if not has_logprobs:
        return replace(group, logprobs=[np.zeros(0, np.float32)] * len(group.logprobs), reference_logprobs=())
    return group if has_reference else replace(group, reference_logprobs=())


def _completion(prompt: EncodedPrompt, place: int, text: str, version: int) -> Rollout:
    tokens = ids(f"{text}<|im_end|>")
    return Rollout(prompt, (Segment(tokens, True, np.zeros(len(tokens), np.float32)),), place, text, "stop", version)


def _sampled(media: MediaStore) -> CreditedGroup:
    """Four completions of the policy, of which the best and the worst are in the loss."""
    prompt, texts = prompt_of(media, 4, 1), ("a tree", "the red car", "the blue car", "a cloud")
    rewards: Sequence[float] = (0.5, 1.0, 0.0, 0.5)
    rollouts = tuple(_completion(prompt, place, text, 1) for place, text in enumerate(texts))
    values = np.array(rewards)
    scored = ScoredGroup(
        RolloutGroup(prompt, rollouts), values, np.ones(4, np.bool_), {"exact": values}, place=(0, len(GROUPS))
    )
    reference = [-np.ones(len(each.token_ids), np.float32) for each in rollouts]
    policy = [own - np.float32(0.25) if place == 1 else own for place, own in enumerate(reference)]
    policy = [own if place in (1, 2) else np.zeros(0, np.float32) for place, own in enumerate(policy)]
    updates = [[PreUpdateStatistics(own, np.full_like(own, 0.3))] if len(own) else [] for own in policy]
    return CreditedGroup(scored, [np.zeros(len(own)) for own in reference], policy, True, reference, updates)


if __name__ == "__main__":
    print(make_pairs(Path(sys.argv[1])))
