"""Evaluation by forward passes: an algorithm's loss and its means over sequences, on groups that the dataset gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.engine_api import Learner, Network, NetworkFiles, UpdateResult, Way
from mmrl.interfaces import Algorithm
from mmrl.ops.objective import reduce_partials, score_loss, seen_samples, token_loss, weighed_loss
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.token_columns import MISMATCHED_COLUMNS, REWARD
from mmrl.types import (
    CreditedGroup,
    FloatArray,
    PackedTokens,
    PreUpdateStatistics,
    Sample,
    SampleKey,
    ScoredGroup,
    TokenLoss,
    TrainingRow,
)


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of an evaluation.

    Attributes:
        groups: As they are recorded, in the order of the prompts.
        metrics: Means over the groups, by name.
        values: By name, an array (S,) for each group: the values of its S rollouts whose mean is a metric, NaN where a
            rollout has none. ``accuracy`` is there if anything tells right from wrong.
    """

    groups: Sequence[CreditedGroup]
    metrics: Mapping[str, float]
    values: Mapping[str, Sequence[FloatArray]] = field(default_factory=dict)

    @property
    def right(self) -> Sequence[FloatArray]:
        """For each group the accuracies of its rollouts; NaN where nothing tells right from wrong."""
        return self.values.get("accuracy", [np.full(len(group.scored.rollouts), np.nan) for group in self.groups])


Judge = Callable[[Sequence[ScoredGroup]], Judged]
"""Judges groups that nobody sampled; its metrics have no section."""


_Found = tuple[list[PreUpdateStatistics], PackedTokens, TokenLoss]


class ForwardPass(Learner, Network):
    """Implements ``Learner`` and its trained network over another learner: an optimizer step that stops at its loss.

    Entropies are 0: networks do not tell them with log-probs. A reward model has scores alone.

    Args:
        algorithm: Gives the loss.

    Attributes:
        means: The means over sequences, by name.
        values: Likewise the values of the sequences, by their keys.
    """

    def __init__(self, learner: Learner, algorithm: Algorithm) -> None:
        self._trained, self._algorithm = learner.network(algorithm.network), algorithm
        self.networks: Mapping[str, Network] = {**learner.networks, algorithm.network: self}
        self.means: dict[str, float] = {}
        self.values: dict[str, dict[SampleKey, float]] = {}

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        return self._trained.score(samples, way=way)

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        return self._trained.final_values(samples)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """The metrics of the loss; no weight moves."""
        if not rows:
            return UpdateResult({}, [], [])
        statistics, tokens, loss = (self._of_scores if self._algorithm.network == REWARD else self._of_logprobs)(rows)
        partial = weighed_loss(rows, tokens, loss)
        metrics = reduce_partials([partial])
        keys = [row.sample.key for row in rows]
        for name, values_N in loss.sequence_metrics.items():
            self.values[name] = dict(zip(keys, values_N.double().tolist(), strict=True))
        self.means = {name: metrics[name] for name in partial.sequences if name in metrics}
        return UpdateResult.of(metrics, statistics)

    def _of_logprobs(self, rows: Sequence[TrainingRow]) -> _Found:
        import torch

        logprobs = self._trained.score(seen_samples(rows))
        logprobs_T = torch.from_numpy(np.concatenate(logprobs))
        own = [PreUpdateStatistics(values, np.zeros_like(values)) for values in logprobs[: len(rows)]]
        return own, *token_loss(self._algorithm, rows, logprobs_T, torch.zeros_like(logprobs_T))

    def _of_scores(self, rows: Sequence[TrainingRow]) -> _Found:
        import torch

        scores, nothing = self._trained.final_values([row.sample for row in rows]), np.zeros(0, np.float32)
        own = [PreUpdateStatistics(nothing, nothing, final_value=float(score)) for score in scores]
        return own, *score_loss(self._algorithm, rows, torch.from_numpy(scores))

    def save(self, folder: Path) -> Mapping[str, NetworkFiles]:
        raise AssertionError("an evaluation changes no weights")


def judged(groups: Sequence[ScoredGroup], algorithm: Algorithm, learner: Learner, settings: LearnSettings) -> Judged:
    """The groups with their log-probs or scores, and the means over sequences of the algorithm's loss, such as
    ``accuracy`` for ``preference/accuracy``, and its ``loss``; no metric if no group is in the loss.

    The algorithm's state stays as it is.

    Args:
        groups: At least one.

    Raises:
        PluginError: The algorithm fails.
    """
    own = copy.deepcopy(algorithm)
    forward = ForwardPass(learner, own)
    result = finished(learn(groups, own, forward, settings))
    nothing: dict[str, Any] = {column.mismatched: () for column in MISMATCHED_COLUMNS}
    seen = [
        replace(
            each,
            trained=False,
            updates=(),
            advantages=[np.zeros_like(values) for values in each.advantages],
            **nothing,
        )
        for each in result.groups
    ]
    if "loss/total" not in result.metrics:
        return Judged(seen, {})
    means = {_short(name): value for name, value in forward.means.items()}
    values = {_short(name): _of_groups(groups, known) for name, known in forward.values.items()}
    return Judged(seen, {**means, "loss": result.metrics["loss/total"]}, values)


def _short(name: str) -> str:
    """``accuracy`` for ``preference/accuracy``."""
    return name.rpartition("/")[2]


def _of_groups(groups: Sequence[ScoredGroup], known: Mapping[SampleKey, float]) -> list[FloatArray]:
    return [np.array([known.get(rollout.key, np.nan) for rollout in group.rollouts]) for group in groups]
