"""Takes a recorded step again with the run's code: selection, credit, minibatches, loss and metrics.

Only the model is missing: instead a learner answers with the recorded log-probs and entropies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np

from mmrl.commands.replay.recorded_critic import RecordedCritic
from mmrl.config.sections import Config
from mmrl.engine_api import Learner, Network, NetworkFiles, UpdateResult, Way
from mmrl.errors import DataError, plugin_errors
from mmrl.interfaces import Algorithm, Needs
from mmrl.ops.metrics import episode_metrics
from mmrl.ops.objective import PartialLoss, partial_loss, reduce_partials, score_loss, weighed_loss
from mmrl.plugin_host import registry
from mmrl.rollout.batch import SampledStep, batch_of, own_rollouts_of, rollouts_of, weights_of
from mmrl.rollout.collector import judge_of, select, step_metrics
from mmrl.rollout.records import RecordedStep
from mmrl.step.check import LogprobCheck
from mmrl.step.lag import learners_version
from mmrl.step.learn import LearnSettings, StepResult, Update, finished, learn
from mmrl.token_columns import COLUMNS, CRITIC, POLICY, REWARD, TokenColumn
from mmrl.types import (
    CreditedGroup,
    FloatArray,
    PreUpdateStatistics,
    Rollout,
    Sample,
    SampleKey,
    ScoredGroup,
    TrainingRow,
    earlier_turns,
    policy_turns,
)

ROUTERS_LOSS = "loss/router_aux"
"""The part of the loss that the routers of a mixture of experts add: a function of the model, not of the record."""


@dataclass(frozen=True, slots=True)
class RecordedNetwork(Network):
    """Implements ``engine_api.Network`` with the log-probs that a run recorded of a frozen network."""

    logprobs: Mapping[SampleKey, FloatArray]

    @classmethod
    def of(cls, column: TokenColumn, groups: Sequence[CreditedGroup]) -> Self:
        """The network that computed this column."""
        values = ((group.scored.rollouts, getattr(group, column.credited)) for group in groups)
        return cls({rollout.key: each for found in values for rollout, each in zip(*found, strict=False)})

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        return [self.logprobs[sample.key] for sample in samples]

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        raise AssertionError("it is frozen")


class RecordedLearner(Learner, Network):
    """Implements ``engine_api.Learner``, and the trained network as its ``Network``, with what a run recorded.

    Nothing is recorded of a rollout that was in no loss; the sampler's log-probs stand in for the learner's, which
    they equal up to rounding. What nobody sampled has none; its log-probs are then NaN. A reward model has scores.

    Args:
        algorithm: Gives the loss; ranks too have an instance of their own.
        groups: They hold all requested rollouts.
        reorders: True if optimizer steps may take in other rollouts than the run's: the first one begins from the
            log-probs before any, the others from those with which the run took the rollout in.

    Attributes:
        names: Metrics of an optimizer step: float32 sums, which a run adds up in another order.
        unknown: Metrics among them that need unrecorded values.
        scale: ``sum_i w_i sum_t |A_it| max(1, |l_it|)`` of each optimizer step, the size of its loss's terms.
        stood_in: Rollouts that the sampler's log-probs were used for.
    """

    def __init__(self, algorithm: Algorithm, groups: Sequence[CreditedGroup], *, reorders: bool = False) -> None:
        self._algorithm, self._reorders = algorithm, reorders
        self._recorded = {
            rollout.key: (group, index) for group in groups for index, rollout in enumerate(group.scored.rollouts)
        }
        frozen = [
            column for column in COLUMNS if column.known == "before the step" and column.role not in (POLICY, CRITIC)
        ]
        self.networks = {
            algorithm.network: self,
            CRITIC: RecordedCritic(algorithm, groups, self._noted),
            **{column.role: RecordedNetwork.of(column, groups) for column in frozen},
        }
        self._asked = Counter[SampleKey]()
        self.names, self.unknown = set[str](), set[str]()
        self.scale: list[float] = []
        self.stood_in = set[SampleKey]()

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        """The policy's log-probs; none ``wide``, as a run records none."""
        return [] if way == "wide" else [self._before(sample) for sample in samples]

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """Metrics of an optimizer step on the recorded log-probs; no step is taken."""
        import torch

        began = [_with_views(self._began(row.sample), row) for row in rows]
        if self._algorithm.network == REWARD:
            return self._update_scores(rows, began)
        if any(len(each.logprobs) < len(row.mask) for each, row in zip(began, rows, strict=True)):
            return UpdateResult.of({}, began, fault="it was skipped in the run")
        if not rows:
            return UpdateResult({}, [], [])
        seen = [*began, *(each.views[name] for each, row in zip(began, rows, strict=True) for name in row.own_views)]
        logprobs_T = torch.from_numpy(np.concatenate([each.logprobs for each in seen]))
        entropy_T = torch.from_numpy(np.concatenate([each.entropy for each in seen]))
        metrics = self._noted(partial_loss(self._algorithm, rows, logprobs_T, entropy_T))
        self.scale.append(sum(map(_size, rows, [each.logprobs for each in began])))
        return UpdateResult.of(metrics, began)

    def _update_scores(self, rows: Sequence[TrainingRow], began: Sequence[PreUpdateStatistics]) -> UpdateResult:
        """Metrics of a reward model's optimizer step on the recorded scores."""
        import torch

        if any(each.final_value is None for each in began):
            return UpdateResult.of({}, began, fault="it was skipped in the run")
        if not rows:
            return UpdateResult({}, [], [])
        scores_N = torch.tensor([each.final_value for each in began], dtype=torch.float32)
        metrics = self._noted(weighed_loss(rows, *score_loss(self._algorithm, rows, scores_N)))
        self.scale.append(float(sum(row.weight * np.count_nonzero(row.mask) for row in rows)))
        return UpdateResult.of(metrics, began)

    def _noted(self, partial: PartialLoss) -> dict[str, float]:
        """The step's metrics, whose names are noted."""
        metrics = reduce_partials([partial])
        self.names |= metrics.keys()
        self.unknown |= {name for name, value in metrics.items() if math.isnan(value)}
        return metrics

    def save(self, folder: Path) -> Mapping[str, NetworkFiles]:
        raise AssertionError("there are no weights")

    def _before(self, sample: Sample) -> FloatArray:
        group, index = self._recorded[sample.key]
        if len(group.logprobs[index]) < len(sample.token_ids):
            if group.scored.rollouts[index].is_given or sample.view:
                return np.full(len(sample.token_ids), np.nan, np.float32)
            self.stood_in.add(sample.key)
            return sample.sampler_logprobs
        return group.logprobs[index]

    def _began(self, sample: Sample) -> PreUpdateStatistics:
        """The statistics before the next optimizer step that takes the sample in."""
        group, index = self._recorded[sample.key]
        updates, number = group.updates[index], self._asked[sample.key]
        self._asked[sample.key] += 1
        if number < len(updates):
            is_first = self._reorders and not self.scale and len(updates[number].logprobs)
            return replace(updates[number], logprobs=self._before(sample)) if is_first else updates[number]
        if self._algorithm.network == REWARD:
            nothing, score = np.zeros(0, np.float32), group.final_values[index] if len(group.final_values) else np.nan
            return PreUpdateStatistics(nothing, nothing, final_value=float(score))
        before = self._before(sample)
        return PreUpdateStatistics(before, np.full_like(before, np.nan))


@dataclass(frozen=True, slots=True)
class Rerun:
    """The outcome of a step.

    Attributes:
        kept: For each sampled group in order, True if the algorithm keeps it.
        groups: The groups that were trained on.
        left_out: Recorded groups that the step would not have had, if nothing is rejected: they were carried over, or
            sampled in place of rejected ones.
        metrics: All functions of the record.
        updates: The rollouts of each optimizer step.
        refills: True if others are sampled in place of rejected groups.
        learner: The learner in the model's place.
    """

    kept: Sequence[bool]
    groups: Sequence[CreditedGroup]
    left_out: int
    metrics: Mapping[str, float]
    updates: Sequence[Sequence[SampleKey]]
    refills: bool
    learner: RecordedLearner


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything besides rollouts that decides about a step.

    Attributes:
        state: The algorithm's state before the step.
    """

    config: Config
    penalties: frozenset[str]
    state: Mapping[str, Any]

    def algorithm(self) -> Algorithm:
        """A new algorithm."""
        algorithm = registry.create("algorithm", self.config.algorithm)
        if self.state:
            with plugin_errors(algorithm, "restore"):
                algorithm.restore(self.state)
        return algorithm


def rerun(
    rules: Rules,
    step: int,
    record: RecordedStep,
    scored: Sequence[ScoredGroup],
    beside: Mapping[str, float] | None,
    *,
    reselect: bool,
) -> Rerun:
    """Take the step again.

    Args:
        scored: The record's groups with the scores to learn from.
        beside: Metrics that only the run could know, for ``observe``; None if it did not call it.
        reselect: Train on what the algorithm keeps now, not on what was trained on.

    Raises:
        DataError: The algorithm needs what was not recorded.
        PluginError: It fails.
    """
    algorithm, config = rules.algorithm(), rules.config
    needs, rounds = algorithm.needs(), list(_rounds(record))
    carried = [place for place, group in enumerate(record.groups) if group.credited.scored.place is None]
    if reselect and needs.refill is None:
        rounds, carried = rounds[:1], []
    places = [place for found in rounds for place in found]
    kept = [True] * len(places)
    if needs.refill is not None:
        kept = [keep for found in rounds for keep in select(algorithm, [scored[place] for place in found])]
    if reselect:
        trained = [*carried, *(place for place, keep in zip(places, kept, strict=True) if keep)]
    else:
        trained = [place for place, group in enumerate(record.groups) if group.credited.trained]
    missing = lacking(algorithm, config, record, trained)
    missing += otherwise_cut(needs, record, trained) if reselect else []
    if missing:
        raise DataError(
            f"step {step} has no record of {', '.join(missing)}",
            where=f"algorithm: {config.algorithm.name}",
            remedy=_remedy(record, reselect=reselect),
        )
    replaced = [replace(group.credited, scored=scores) for group, scores in zip(record.groups, scored, strict=True)]
    learner = RecordedLearner(rules.algorithm(), replaced, reorders=reselect)
    updates = list[Update]()
    recorded = [record.groups[place].credited.scored for place in places]
    found = [
        replace(scored[place], kept=keep if reselect else was.kept, place=was.place)
        for place, keep, was in zip(places, kept, recorded, strict=True)
    ]
    result = StepResult()
    if trained:
        settings = LearnSettings.of(config, rules.penalties, step)
        groups = [scored[place] for place in trained]
        batch = batch_of(groups, settings.weights, settings.penalties)
        known = _mismatched(needs, [record.groups[place].credited for place in trained])
        learning = learn(groups, algorithm, learner, settings, batch=replace(batch, **known))
        result = finished(learning, updates.append)
    values = dict(result.metrics)
    if "loss/total" in values and math.isfinite(routers := (beside or {}).get(ROUTERS_LOSS, 0.0)):
        values["loss/total"] += routers
    if found:
        rollouts = rollouts_of(found)
        gathered = SampledStep(step, rollouts[0].weight_version, found, episode_metrics(own_rollouts_of(found), None))
        batch = batch_of(found, weights_of(config), rules.penalties)
        values |= step_metrics(gathered, batch, judge_of(config, needs, batch), refills=needs.refill is not None)
    version = learners_version([group.scored for group in result.groups], beside or {})
    check = LogprobCheck("float32", "warn", event=lambda kind, **fields: None)
    values |= check.check_step(step, result.groups, version)
    if beside is not None:
        with plugin_errors(algorithm, "observe"):
            observed = dict(algorithm.observe({**beside, **values}))
        values |= observed
        learner.names |= {name for name in observed if name.startswith("correction/")}  # of sums in float32
    ledger = [update.samples for update in updates if update.samples]
    left_out = len(record.groups) - len(places) - len(carried) if reselect else 0
    return Rerun(kept, result.groups, left_out, values, ledger, needs.refill is not None, learner)


def _mismatched(needs: Needs, groups: Sequence[CreditedGroup]) -> dict[str, Any]:
    """The fields of ``Batch`` that ask for prompts with other rows' completions, as the run recorded them."""
    names = [column.mismatched for column in needs.mismatched_columns]
    return {name: [values for group in groups for values in getattr(group, name)] for name in names}


def _with_views(began: PreUpdateStatistics, row: TrainingRow) -> PreUpdateStatistics:
    """The statistics with those of all views that the loss takes; NaN where a run has not recorded them."""
    nothing = np.full(len(row.mask), np.nan, np.float32)
    views = {name: began.views.get(name, PreUpdateStatistics(nothing, nothing)) for name in row.own_views}
    return replace(began, views=views)


def sampled(record: RecordedStep) -> list[int]:
    """Places in the record of the groups that the step itself sampled, in that order."""
    places = [(group.credited.scored.place, index) for index, group in enumerate(record.groups)]
    return [index for _, index in sorted((place, index) for place, index in places if place is not None)]


def lacking(algorithm: Algorithm, config: Config, record: RecordedStep, trained: Sequence[int]) -> list[str]:
    """Values that the algorithm needs to learn from these groups and the record lacks."""
    with plugin_errors(algorithm, "needs"):
        needs = algorithm.needs()
    groups: list[CreditedGroup] = [record.groups[place].credited for place in trained]
    missing = []
    if needs.greedy_rollout and any(group.scored.greedy is None for group in groups):
        missing.append("greedy rollouts")
    if needs.branches and not all(any(each.branch for each in group.scored.rollouts) for group in groups):
        missing.append("episodes that go on from others")
    if needs.demonstration and not all(group.scored.rollouts[-1].is_given for group in groups):
        missing.append("demonstrations beside what was sampled")
    if needs.token_rewards and not all(group.scored.token_rewards for group in groups):
        missing.append("values of parts of texts")
    if not all(getattr(group, column.mismatched) for group in groups for column in needs.mismatched_columns):
        missing.append("log-probs of prompts with other rows' completions")
    columns = needs.columns(config.learner.minibatches * config.learner.epochs, algorithm.network)
    if algorithm.network == REWARD and not all(len(group.final_values) for group in groups):
        missing.append("a reward model's scores")
    for column in (each for each in columns if each.known == "before the step"):
        has = [bool(getattr(group, column.credited)) for group in groups] if column.may_lack else []
        if not all(has):
            missing.append(f"{column.title}{' of groups that were not trained on' if any(has) else ''}")
    asks_of_policy = any(column.known == "before the step" and not column.may_lack for column in columns)
    if groups and not record.is_complete and asks_of_policy:
        missing.append("what each optimizer step began from (it is of an older version)")
    if not record.is_complete and (needs.refill or not all(group.credited.scored.kept for group in record.groups)):
        missing.append("the rounds in which groups were sampled (it is of an older version)")
    return missing


def _remedy(record: RecordedStep, *, reselect: bool) -> str:
    """The thing to do where a record lacks what the algorithm needs."""
    if reselect:
        return "choose an algorithm, or options of it, that needs none"
    if all(group.credited.scored.is_given for group in record.groups):
        return "replay a run of this version; nothing was sampled here, so there are no rewards to look at"
    return "look at its rewards alone"


def otherwise_cut(needs: Needs, record: RecordedStep, trained: Sequence[int]) -> list[str]:
    """A phrase for demonstrations of which the algorithm learns other turns than the run did, if there are any."""
    given = [group.rollouts for group in (record.groups[place] for place in trained) if group.credited.scored.is_given]
    for rollout in (each for rollouts in given for each in rollouts):
        before = len(earlier_turns(rollout.messages)) if needs.all_turns else 0
        if len(policy_turns(rollout.segments)) != 1 + before:
            return [f"demonstrations with {'all turns' if needs.all_turns else 'the last turn alone'} to learn"]
    return []


def name_of(rollout: Rollout) -> SampleKey:
    """Its name in reports and events: greedy rollouts have index 0."""
    return *rollout.prompt.key, rollout.index


def _rounds(record: RecordedStep) -> Iterator[list[int]]:
    """Places of the groups of each round of sampling."""

    def number(place: int) -> int:
        found = record.groups[place].credited.scored.place
        assert found is not None
        return found[0]

    for _, places in groupby(sampled(record), number):
        yield list(places)


def _size(row: TrainingRow, logprobs: FloatArray) -> float:
    return row.weight * float((np.abs(row.advantages) * np.maximum(1.0, np.abs(logprobs)))[row.mask].sum())
