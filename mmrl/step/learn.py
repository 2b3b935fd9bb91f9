"""One step's learning: log-probs, credit, minibatches and optimizer steps, each told as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import Learner, Network, UpdateResult
from mmrl.interfaces import Aggregation, Algorithm, Needs
from mmrl.ops import metrics
from mmrl.ops.assignment import assign_credit, columns_before, loss_masks, value_masks
from mmrl.ops.objective import check_whole_groups, training_rows
from mmrl.ops.packing import offsets
from mmrl.rollout.batch import batch_of, rollouts_of, weights_of
from mmrl.step.mismatched import mismatched_logprobs
from mmrl.system.clock import Clock
from mmrl.token_columns import COLUMNS, CRITIC, POLICY, REWARD, TokenColumn
from mmrl.types import (
    Batch,
    Credit,
    CreditedGroup,
    FloatArray,
    IntArray,
    PreUpdateStatistics,
    Sample,
    SampleKey,
    ScoredGroup,
    TrainingRow,
)


@dataclass(frozen=True, slots=True)
class LearnSettings:
    """The settings of one step's learning.

    Attributes:
        seed: Decides with the epoch which samples share a minibatch.
        minibatches: Optimizer steps in an epoch.
        epochs: Passes over the samples.
        max_tokens: The length constant of an algorithm's aggregation that names none.
        weights: Factors of the components in the rewards.
        penalties: Names of the components that are penalties.
        pretrains: True if the critic alone learns.
    """

    seed: Sequence[int] = (0,)
    minibatches: int = 1
    epochs: int = 1
    max_tokens: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    penalties: frozenset[str] = frozenset()
    pretrains: bool = False

    @classmethod
    def of(cls, config: Config, penalties: frozenset[str], step: int) -> Self:
        """Those of a run's step."""
        learner, tokens, weights = config.learner, config.sampler.max_new_tokens, weights_of(config)
        seed, pretrains = (config.trainer.seed, step), config.critic is not None and config.critic.pretrains(step)
        return cls(seed, learner.minibatches, learner.epochs, tokens, weights, penalties, pretrains)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of a step; fewer where there are fewer samples than minibatches."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True)
class Update:
    """A part of a step's learning that is done.

    Attributes:
        phase: ``logprob`` and ``credit`` come once each, in this order; then ``update`` after every optimizer step.
        rows: The optimizer step's rows; it came to nothing if ``result`` has a fault.
        result: The optimizer step's.
        done: Optimizer steps that this network took so far.
        network: The role of the network that took it.
    """

    phase: Literal["logprob", "credit", "update"]
    rows: Sequence[TrainingRow] = ()
    result: UpdateResult = field(default_factory=lambda: UpdateResult({}, [], []))
    done: int = 0
    network: str = POLICY

    @property
    def samples(self) -> list[SampleKey]:
        """The samples that the policy, or the reward model, has learned from; none of an optimizer step that came to
        nothing, or was a critic's."""
        return [] if self.result.fault or self.network == CRITIC else [row.sample.key for row in self.rows]

    @property
    def num_tokens(self) -> int:
        """Completion tokens in the loss."""
        return sum(int(row.mask.sum()) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step's optimizer steps.

    Attributes:
        groups: Groups that were trained on, in order.
        credit: The algorithm's answer.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    groups: Sequence[CreditedGroup] = ()
    credit: Credit = field(default_factory=lambda: Credit(()))


Learning = Generator[Update, None, StepResult]
"""A step's learning, as far as it is asked for: what it has done so far, and its result at the end."""


def learn(
    groups: Sequence[ScoredGroup],
    algorithm: Algorithm,
    learner: Learner,
    settings: LearnSettings,
    *,
    batch: Batch | None = None,
) -> Learning:
    """Assign credit and update: for each minibatch the critic, if there is one, and then the policy.

    No rank works while the caller has an ``Update``, so the caller may close the generator there.

    Args:
        groups: At least one.
        batch: The groups' rollouts as ``Algorithm.credit`` sees them, if it is not ``batch_of`` them. Log-probs that it
            has are not computed.

    Raises:
        PluginError: The algorithm fails.
    """
    samples, needs = rollouts_of(groups), algorithm.needs()
    batch = batch_of(groups, settings.weights, settings.penalties) if batch is None else batch
    batch = replace(_asked_for(batch, needs), pretrains=settings.pretrains)
    batch = _with_columns(batch, samples, needs.columns(settings.num_updates, algorithm.network), learner)
    batch = replace(batch, **mismatched_logprobs(batch, samples, needs, learner))
    if needs.values and needs.last_state and batch.final_values is None:
        batch = replace(batch, final_values=_final_values(batch, samples, learner.network(CRITIC)))
    yield Update("logprob")
    credit = assign_credit(algorithm, batch)
    masks = loss_masks(batch, credit)
    if needs.whole_groups:
        check_whole_groups(algorithm, samples, masks, batch.group_ids)
    columns = columns_before(batch, credit, masks)
    yield Update("credit")
    rows_of = partial(
        training_rows,
        samples,
        masks,
        columns,
        batch.group_ids,
        algorithm.aggregation.with_default(settings.max_tokens),
        constants=credit.constants,
        views=needs.scored_views,
        scores=batch.rewards,
        whole_groups=needs.whole_groups,
        given=batch.given,
    )
    network = learner.network(algorithm.network)
    trained = [] if settings.pretrains else [_Trained(algorithm.network, network, rows_of, len(samples))]
    found: dict[str, Any] = {column.credited: columns[column.name] for column in COLUMNS if column.name in columns}
    values = dict(credit.metrics)
    if not settings.pretrains:
        values |= metrics.advantage_metrics(masks, columns["advantages"])
    if needs.values:
        critic, of_critic, told = _critic(samples, batch, credit, learner)
        trained, found, values = [critic, *trained], {**found, **of_critic}, {**values, **told}
    parts = minibatches(batch.group_ids, settings.minibatches, settings.epochs, settings.seed, whole=needs.whole_groups)
    for part in parts:
        for each in trained:
            yield each.update(part)
    updates = trained[-1].updates if not settings.pretrains else [[] for _ in samples]
    found |= {"logprobs": _logprobs(batch, updates), "updates": updates}
    found |= {"final_values": _first_values(updates)} if algorithm.network == REWARD else {}
    found |= {column.mismatched: getattr(batch, column.mismatched) for column in needs.mismatched_columns}
    return StepResult({**_means(trained), **values}, _credited(groups, found), credit)


def _asked_for(batch: Batch, needs: Needs) -> Batch:
    """The batch without what the algorithm does not ask for, and with zeros where it asks for what no row has."""
    values, none = batch.token_rewards, np.zeros(len(batch.masks), np.bool_)
    if values is None:
        values = [np.zeros(len(mask)) for mask in batch.masks]
    return replace(
        batch,
        token_rewards=values if needs.token_rewards else None,
        given=(none if batch.given is None else batch.given) if needs.demonstration else None,
        recalled=(none if batch.recalled is None else batch.recalled) if needs.experience else None,
    )


def finished(
    learning: Learning, note: Callable[[Update], None] = lambda update: None, clock: Clock | None = None
) -> StepResult:
    """The result of a step's learning, which runs to its end.

    Args:
        note: Called with each part that is done; what it raises ends the learning there.
        clock: Counts its phases.

    Raises:
        RuntimeError: The learning was left half-way before, and has no result.
    """
    clock = Clock() if clock is None else clock
    try:
        for phase in ("logprob", "credit"):
            with clock.phase(phase):
                update = next(learning)
            note(update)
        with clock.phase("update"):
            while True:
                update = next(learning)
                clock.count("update", update.num_tokens)
                clock.count_flops(update.result.flops)
                note(update)
    except StopIteration as end:
        if end.value is None:
            what = "a step's learning that was closed before its last optimizer step has no result"
            raise RuntimeError(f"{what}; call learn again to take the step from its start") from None
        result: StepResult = end.value
        return result
    finally:
        learning.close()


def _with_columns(batch: Batch, samples: Sequence[Sample], columns: Sequence[TokenColumn], learner: Learner) -> Batch:
    """The batch with those of a run's columns that networks compute before the step."""
    found: dict[str, Any] = {
        column.name: _of_each(samples, learner.network(column.role))
        for column in columns
        if column.known == "before the step" and getattr(batch, column.name) is None
    }
    return replace(batch, **found)


def _final_values(batch: Batch, samples: Sequence[Sample], critic: Network) -> FloatArray:
    """(B,) the critic's values after the last token of rows that a limit ended; 0 for the others."""
    values_B = np.zeros(len(samples), np.float32)
    places = [place for place in np.flatnonzero(batch.truncated) if len(samples[place].token_ids)]
    if places:
        values_B[places] = critic.final_values([samples[place] for place in places])
    return values_B


class _Trained:
    """The optimizer steps of a network in one step.

    Attributes:
        updates: For each sample, the statistics of each of them that took it in.
        steps: The metrics of those that were taken.
        skipped: Those that came to nothing.
        memory_bytes: Allocated in each, where that is known.
    """

    def __init__(
        self, role: str, network: Network, rows_of: Callable[[Sequence[int]], Mapping[int, TrainingRow]], samples: int
    ) -> None:
        self._role, self._network, self._rows_of = role, network, rows_of
        self.updates: list[list[PreUpdateStatistics]] = [[] for _ in range(samples)]
        self.steps: list[Mapping[str, float]] = []
        self.skipped, self.memory_bytes = 0, list[float]()

    @property
    def skipped_metric(self) -> str:
        return f"{CRITIC if self._role == CRITIC else POLICY}/skipped_updates"

    def update(self, part: Sequence[int]) -> Update:
        """Take an optimizer step on these samples."""
        rows = self._rows_of(part)
        result = self._network.update(list(rows.values()))
        self.memory_bytes += [] if result.memory_bytes is None else [float(result.memory_bytes)]
        if result.fault:
            self.skipped += 1
            nothing = np.zeros(0, np.float32)
            for index in rows:  # they may not be finite
                self.updates[index].append(PreUpdateStatistics(nothing, nothing))
        else:
            self.steps.append(result.metrics)
            for index, values in zip(rows, result.statistics, strict=True):
                self.updates[index].append(values)
        return Update("update", list(rows.values()), result, len(self.steps), self._role)


def _critic(
    samples: Sequence[Sample], batch: Batch, credit: Credit, learner: Learner
) -> tuple[_Trained, dict[str, Any], dict[str, float]]:
    """The critic, the columns of ``CreditedGroup`` that are its own, and what is known of it before it learns."""
    masks = value_masks(batch)
    columns = columns_before(batch, credit, masks, critic=True)
    rows_of = partial(training_rows, samples, masks, columns, batch.group_ids, Aggregation("token-mean"))
    critic = _Trained(CRITIC, learner.network(CRITIC), rows_of, len(samples))
    found: dict[str, Any] = {**columns, "critic_updates": critic.updates}
    found |= {} if batch.final_values is None else {"final_values": batch.final_values}
    return critic, found, metrics.critic_metrics(masks, columns["values"], columns["returns"])


def _means(trained: Sequence[_Trained]) -> dict[str, float]:
    """The means of the optimizer steps' metrics, and how many came to nothing."""
    means = {f"{POLICY}/skipped_updates": 0.0}
    for each in trained:
        means |= metrics.average(each.steps) | {each.skipped_metric: float(each.skipped)}
    memory = [most for each in trained for most in each.memory_bytes]
    return means | ({"perf/update_memory_bytes_max": max(memory)} if memory else {})


def _logprobs(batch: Batch, updates: Sequence[Sequence[PreUpdateStatistics]]) -> list[FloatArray]:
    """Each sample's log-probs before the optimizer steps; empty if it is in no loss and they were not asked for, or if
    they are not known."""
    nothing = np.zeros(0, np.float32)
    if batch.old_logprobs is None:
        taken = [[each.logprobs for each in of_sample if len(each.logprobs)] for of_sample in updates]
        return [each[-1] if each else nothing for each in taken]
    came_to_nothing = [any(not len(each.logprobs) for each in of_sample) for of_sample in updates]
    return [
        nothing if is_faulty and not np.isfinite(logprobs).all() else logprobs
        for logprobs, is_faulty in zip(batch.old_logprobs, came_to_nothing, strict=True)
    ]


def _first_values(updates: Sequence[Sequence[PreUpdateStatistics]]) -> FloatArray:
    """(B,) each sample's score before the first optimizer step that took it in; NaN where none did."""
    known = [[each.final_value for each in of_sample if each.final_value is not None] for of_sample in updates]
    return np.array([values[0] if values else np.nan for values in known], np.float32)


def _of_each(samples: Sequence[Sample], network: Network) -> list[FloatArray]:
    """Each sample's log-probs; none of an episode without tokens, which failed in ``reset`` and cannot be packed."""
    places = [place for place, sample in enumerate(samples) if len(sample.token_ids)]
    found: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
    scored = network.score([samples[place] for place in places]) if places else ()
    for place, values in zip(places, scored, strict=True):
        found[place] = values
    return found


def minibatches(
    group_ids: IntArray, parts: int, epochs: int, seed: Sequence[int], *, whole: bool = False
) -> Iterator[list[int]]:
    """Sample indices of each optimizer step: every epoch covers all, in an order of its own if there are parts.

    Groups stay whole, as their completions share a prompt; unless there are fewer than parts.

    Args:
        whole: True keeps groups whole in any case; there may then be fewer optimizer steps.
    """
    _, units = np.unique(group_ids, return_inverse=True)
    if units.max(initial=0) + 1 < parts and not whole:
        units = np.arange(len(group_ids))
    for epoch in range(epochs):
        order = np.arange(units.max(initial=-1) + 1)
        if parts > 1:
            np.random.default_rng([*seed, epoch]).shuffle(order)
        yield from (np.flatnonzero(np.isin(units, part)).tolist() for part in np.array_split(order, parts) if len(part))


def _credited(
    groups: Sequence[ScoredGroup],
    columns: Mapping[str, Any],
) -> list[CreditedGroup]:
    """The groups with these columns of all samples, by the attribute of ``CreditedGroup``."""
    bounds = offsets([len(group.rollouts) for group in groups])
    return [
        CreditedGroup(
            scored=group,
            trained=True,
            **{name: values[start:end] for name, values in columns.items()},
        )
        for group, start, end in zip(groups, bounds, bounds[1:], strict=False)
    ]
