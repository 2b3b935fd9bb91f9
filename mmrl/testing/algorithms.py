"""``check_algorithm``: the rules that every algorithm keeps, tried on random and odd batches."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from mmrl.errors import PluginError, plugin_errors
from mmrl.interfaces import Aggregation, Algorithm, Needs, RunFacts, served_needs
from mmrl.interfaces.views import try_views
from mmrl.ops.assignment import credit_of
from mmrl.plugin_host import registry
from mmrl.policy_gradient import PolicyGradient
from mmrl.rollout.experience import Memory, retried
from mmrl.testing.batches import (
    another_order,
    odd_batches,
    other_rewards,
    padded,
    polluted,
    random_batch,
    reordered,
    without,
)
from mmrl.testing.playback import RecordedBatch, Replay, play, replay
from mmrl.testing.recorded import Arrays
from mmrl.testing.rollouts import scored_groups
from mmrl.testing.rules import broken, failed, shown
from mmrl.testing.trees import check_branch, rows_in_use
from mmrl.token_columns import POLICY
from mmrl.types import ENVIRONMENT, BranchedRows, ScoredGroup

PARTITIONS = ((1, 4), (2, 2), (3, 1))
"""Ranks, and micro-batches of each rank, that are compared with one of each."""
RTOL, ATOL = 1e-7, 1e-10
_FIELDS = (
    *("loss", "sequence_weights", "advantages", "grad_log_probs", "grad_entropy", "grad_scores"),
    *("returns", "value_loss", "grad_values"),
)


def check_algorithm(
    algorithm: str | type[Algorithm] | Algorithm,
    *,
    options: Mapping[str, Any] | None = None,
    rewards: Sequence[str] = ("reward",),
) -> None:
    """Raise at the first rule of algorithms that this one breaks.

    ``credit`` and ``loss`` run on seeded batches through the packing, weighting and loss code of a run (``replay``).
    The rules: advantages, weights, loss, gradient and metrics have the right shapes and are finite, also when no reward
    is valid, all are equal, nothing is in the loss, or policies are 100 nats apart; what is masked or invalid, whether
    invalid rows are there at all, padding, the order of rows, the ids of groups, the number of ranks and micro-batches
    change nothing; the same batch gives the same numbers, and is not modified; only what ``needs`` asks for is used;
    there is a gradient at all; ``loss`` knows of ``credit`` only what its Credit says; an algorithm that takes over the
    ``state`` of one that has seen steps goes on as that one does, and JSON can hold it; ``select`` is there only where
    ``needs`` has ``refill``, and answers one bool for each group, whatever invalid rollouts are worth; ``retry``,
    ``remember`` and ``recall`` name what is there; rewards change nothing where ``needs`` has ``rewards=False``;
    ``branch`` is there only where ``needs`` has ``branches``, and names turns of any group of episodes, the same ones
    of the same group; a view answers an image, the same to the same seed, in its size if it is scored, and leaves the
    given one as it is. All of it holds for ``Credit.returns`` and ``value_loss`` too, also in steps in which the
    critic alone learns, where ``needs`` has ``values``.

    Args:
        algorithm: A registered name, a class, or an algorithm, which is copied and left as it is.
        options: The algorithm's options, if it is given by name or class.
        rewards: Names of the batches' reward components, for options that name one; the last of several is a penalty.

    Raises:
        PluginError: A rule is broken, or the algorithm does not fit its interface.
        ConfigError: The options do not fit.
    """
    subject = _Subject(registry.given("algorithm", algorithm, options), tuple(rewards))
    subject.check_declarations()
    batches = dict(_random_batches(subject.needs, subject.rewards, subject.network))
    results = {case: subject.replay(case, batch) for case, batch in batches.items()}
    for case, batch in batches.items():
        subject.check_credit_leaves(case, batch)
        subject.check_sameness(case, batch, results[case])
        subject.check_loss_is_apart(case, batch, results[case])
        subject.check_state(case, batch)
    if not any(result.grad_log_probs.any() or result.grad_scores.any() for result in results.values()):
        takes = "logprobs_T" if subject.network == POLICY else "final_values_N"
        others = ", and on tokens.advantages_T" * (subject.network == POLICY)
        raise broken(
            subject.algorithm,
            "something is learned from rewards of 0 and 1, or from others",
            "the gradient is 0 everywhere, in each batch",
            f"let loss depend on tokens.{takes} without detaching it{others}",
        )
    if subject.needs.values and not any(result.grad_values.any() for result in results.values()):
        rule, found = "the critic learns", "the gradient of value_loss is 0 everywhere, in each batch"
        raise broken(subject.algorithm, rule, found, "let value_loss depend on tokens.values_T without detaching it")
    for origin, batch in batches.items():
        for case, odd in odd_batches(batch).items():
            subject.replay(f"{origin}; {case}", odd, dtype="float32")
    if subject.needs.refill is not None:
        subject.check_select()
        subject.check_retry()
    if subject.needs.experience:
        subject.check_experience()
    if subject.needs.branches is not None:
        check_branch(subject.algorithm, subject.needs.branches)


def _random_batches(needs: Needs, components: Sequence[str], network: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Batches by description, with and without old log-probs, as several optimizer steps on a batch need them."""
    for seed, binary in enumerate((True, False)):
        batch = random_batch(needs, binary_rewards=binary, seed=seed, components=components, network=network)
        rewards = "rewards of 0 and 1" if binary else "normal rewards"
        yield f"{rewards}, several optimizer steps", batch
        for column in set(needs.columns(2, network)) - set(needs.columns(1, network)):
            yield f"{rewards}, one optimizer step", without(batch, column.replayed)
        if needs.values:
            yield f"{rewards}, the critic alone learns", {**batch, "pretrains": True}


class _Subject:
    """An algorithm under test. Every replay gets a copy, so that none sees the traces of another."""

    def __init__(self, algorithm: Algorithm, rewards: tuple[str, ...]) -> None:
        self.algorithm, self.rewards = algorithm, rewards
        with plugin_errors(algorithm, "needs"):
            self.needs, self.network = algorithm.needs(), algorithm.network

    def check_declarations(self) -> None:
        """``needs``, ``aggregation`` and ``check`` keep to the interface."""
        algorithm = self.algorithm
        if not isinstance(self.needs, Needs):
            raise broken(algorithm, "needs() answers Needs", repr(self.needs), "return mmrl.interfaces.Needs(...)")
        served_needs(algorithm)
        try_views(algorithm, self.needs.views, steps=7)
        for hook, plain in {"select": (Algorithm.select, PolicyGradient.select), "retry": (Algorithm.retry,)}.items():
            if getattr(type(algorithm), hook) not in plain and self._never("refill"):
                remedy = "let needs() return Needs(refill=Refill(...))"
                raise broken(algorithm, f"{hook} is asked", "needs() has no refill, whatever the options", remedy)
        if type(algorithm).branch is not Algorithm.branch and self._never("branches"):
            remedy = "let needs() return Needs(branches=Branches(...))"
            raise broken(algorithm, "branch is asked", "needs() has no branches, whatever the options", remedy)
        with plugin_errors(algorithm, "aggregation"):
            aggregation = algorithm.aggregation
        if not isinstance(aggregation, Aggregation):
            remedy = "make it a property that returns mmrl.interfaces.Aggregation(mode)"
            raise broken(algorithm, "aggregation is an Aggregation", repr(aggregation), remedy)
        try:
            with plugin_errors(algorithm, "check"):
                names = (*self.rewards, ENVIRONMENT) if self.needs.turns else self.rewards
                warnings = algorithm.check(RunFacts(8, 16, 512, updates_per_batch=2, rewards=names))
        except PluginError as error:
            if isinstance(error.__cause__, ValueError):  # the answer to options that do not suit a run
                return
            raise
        if isinstance(warnings, str) or not all(isinstance(warning, str) for warning in warnings):
            raise broken(algorithm, "check(run) answers a list of texts", repr(warnings), "return a list or a tuple")

    def _never(self, need: str) -> bool:
        """True if ``needs`` lacks this one and looks at no option that could change that."""
        if getattr(self.needs, need) is not None:
            return False
        blind = copy.copy(self.algorithm)
        blind.config = None
        try:
            return getattr(blind.needs(), need) is None
        except Exception:  # it looks
            return False

    def replay(self, case: str, batch: Arrays, remedy: str = "", **arguments: Any) -> Replay:
        """The result for a batch, which is finite; ``remedy`` is what to do if there is none."""
        try:
            result = replay(copy.deepcopy(self.algorithm), batch, **arguments)
        except PluginError as error:
            rule = f"there is a result ({case})"
            if remedy:  # a batch that means what another one does, for which there was one
                raise broken(self.algorithm, rule, shown(error), remedy) from error
            raise failed(self.algorithm, rule, error, self._remedy(error)) from error
        self._check_finite(case, result, remedy)
        of_entropy = [result.grad_entropy, *(each["entropy"] for each in result.grad_views.values())]
        if any(each.any() for each in of_entropy) and not self.needs.entropy_gradient:
            rule = f"only fields that needs() asks for are used ({case})"
            found = "the loss has a gradient with respect to entropy_T, which has none in a run"
            raise broken(self.algorithm, rule, found, "return Needs(entropy_gradient=True), or use entropy_T.detach()")
        return result

    def _remedy(self, error: PluginError) -> str:
        if isinstance(error.__cause__, KeyError):
            names = ", ".join(self.rewards)
            return (
                f"the components here are {names}: name others with rewards=(...), constants in Credit.constants, and "
                "views in Needs(views=...)"
            )
        return "make the hook answer for such a batch"

    def _check_finite(self, case: str, result: Replay, remedy: str) -> None:
        bound = "bound exponents, as the losses of mmrl.ops.surrogate do, and divide by nothing that can be 0"
        for name, values in _numbers(result).items():
            bad = np.argwhere(~np.isfinite(values))
            if len(bad):
                place = bad[0].tolist()
                found = f"{name}{place or ''} is {values[tuple(place)]}"
                raise broken(self.algorithm, f"{name} is finite ({case})", found, remedy or bound)
        for name, value in result.metrics.items():
            if not (isinstance(value, int | float | np.number) and math.isfinite(value)):
                remedy = remedy or "leave a metric out, or give it a value, where it is undefined, as a mean of nothing"
                raise broken(self.algorithm, f"every metric is a finite number ({case})", f"{name}: {value!r}", remedy)

    def check_sameness(self, case: str, batch: Arrays, expected: Replay) -> None:
        """A change of the batch that keeps its meaning keeps the result."""

        def compare(what: str, changed: Arrays, remedy: str, rows: Any = slice(None), **arguments: int) -> None:
            found = self.replay(f"{case}; {what}", changed, remedy, **arguments)
            if difference := _difference(expected, found, rows):
                raise broken(self.algorithm, f"{what} changes nothing ({case})", difference, remedy)

        compare("a repetition", batch, "use no random numbers, no clock, and no state outside the algorithm")
        for garbage in (math.nan, 1e30):
            remedy = "look at rewards only where batch.valid, and at tokens only where the mask is True"
            compare(f"{garbage} where the mask or the row's validity is False", polluted(batch, garbage), remedy)
        remedy = "count tokens by the mask, not by the length of arrays; tokens.sequence_mean does"
        compare("masked tokens at the end of rows", padded(batch, 3), remedy)
        is_ordered = self.needs.whole_groups or self.needs.branches is not None
        order = another_order(batch["group_ids"], whole=is_ordered)
        remedy = "take groups from batch.group_ids, whose values, order and places mean nothing"
        compare("another order of rows, with other ids of groups", reordered(batch, order), remedy, order)
        valid = rows_in_use(batch)
        remedy = (
            "let means, deviations and counts go over rows where batch.valid alone: an invalid row's reward is 0 there"
        )
        compare("leaving invalid rows out", reordered(batch, valid), remedy, valid)
        if not self.needs.rewards:
            remedy = "ask for rewards (Needs(rewards=True)), or do not look at them: a run may have none"
            compare("other rewards", other_rewards(batch), remedy)
        remedy = "compute in loss only what a token or its sequence needs: batch statistics belong into credit"
        for ranks, microbatches in PARTITIONS:
            parts = {"ranks": ranks, "microbatches": microbatches}
            compare(f"a split into {ranks} ranks with {microbatches} micro-batches each", batch, remedy, **parts)

    def check_credit_leaves(self, case: str, batch: Arrays) -> None:
        """``credit`` does not write into its batch."""
        record = RecordedBatch(batch, self.needs, self.network).batch
        before = copy.deepcopy(record)
        with plugin_errors(self.algorithm, "credit"):
            credit_of(copy.deepcopy(self.algorithm), record)
        for name in record.__dataclass_fields__:
            if not _equal(getattr(before, name), getattr(record, name)):
                remedy = "make a new array instead (rewards = batch.rewards - 1, not -=)"
                found = f"batch.{name} is another afterwards"
                raise broken(self.algorithm, f"credit leaves its batch as it is ({case})", found, remedy)

    def check_loss_is_apart(self, case: str, batch: Arrays, expected: Replay) -> None:
        """``loss`` depends on ``credit`` only through its Credit."""
        both = copy.deepcopy(self.algorithm)
        if difference := _difference(expected, play(both, both, batch), slice(None)):
            rule = f"loss depends on credit only through its Credit ({case})"
            found = f"with the attributes that credit has set on self, {difference}"
            raise broken(self.algorithm, rule, found, "pass it through Credit.constants: other processes compute loss")

    def check_state(self, case: str, batch: Arrays) -> None:
        """``state`` holds all that steps have changed, and ``restore`` brings it back."""
        old, new, learner = (copy.deepcopy(self.algorithm) for _ in range(3))
        for _ in range(3):
            play(old, learner, batch)
        with plugin_errors(old, "state"):
            answer = old.state()
        try:
            state = json.loads(json.dumps(dict(answer), allow_nan=False))
        except (TypeError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
            raise broken(
                self.algorithm, "state answers a dict that JSON can hold", found, "use plain numbers"
            ) from error
        try:
            with plugin_errors(new, "restore"):
                new.restore(state) if state else None
        except PluginError as error:
            rule = f"restore takes the JSON that state answered ({case})"
            raise failed(self.algorithm, rule, error, "read every key, as a plain number, list or text") from error
        if difference := _difference(play(old, learner, batch), play(new, learner, batch), slice(None)):
            rule = f"a run that goes on from a checkpoint goes on the same ({case})"
            found = f"with the state of one that has seen three steps, {difference}"
            remedy = "let state answer everything that credit and observe change on self, and restore set it"
            raise broken(self.algorithm, rule, found, remedy)

    def check_select(self) -> None:
        """``select`` answers one bool for each group, whatever its rewards."""
        groups = scored_groups(with_greedy=self.needs.greedy_rollout, components=self.rewards)
        for some in (groups, groups[:1], groups[-1:]):
            algorithm = copy.deepcopy(self.algorithm)
            try:
                with plugin_errors(algorithm, "select"):
                    kept = algorithm.select(some)
            except PluginError as error:
                raise failed(self.algorithm, "groups can be selected", error, self._remedy(error)) from error
            one_each = isinstance(kept, Sequence | np.ndarray) and len(kept) == len(some)
            if not (one_each and all(isinstance(keep, bool | np.bool_) for keep in kept)):
                rule = f"select answers one bool for each of {len(some)} groups"
                raise broken(self.algorithm, rule, repr(kept), "return a list of True and False, in order")
        for group in groups:
            self._check_selects_by_valid(group)

    def check_retry(self) -> None:
        """``retry`` answers the row with other messages, or None, and the same again."""
        for group in scored_groups(with_greedy=self.needs.greedy_rollout, components=self.rewards):
            first, again = (retried(copy.deepcopy(self.algorithm), group) for _ in range(2))
            if first != again:
                rule = "retry answers the same of the same group"
                raise broken(self.algorithm, rule, f"{first}, then {again}", "let it depend on the group alone")

    def check_experience(self) -> None:
        """``remember`` and ``recall`` name what is there, and change nothing."""
        groups = scored_groups(with_greedy=self.needs.greedy_rollout, components=self.rewards)
        groups = tuple(group for group in groups if len(group.rollouts) >= self.needs.min_group_size)
        memory = Memory(copy.deepcopy(self.algorithm), {})
        for group in (*groups, *groups):
            before = copy.deepcopy(group)
            memory.exchanged([group])
            if not (np.array_equal(before.rewards, group.rewards) and np.array_equal(before.valid, group.valid)):
                remedy = "make new arrays instead"
                raise broken(self.algorithm, "remember and recall leave groups as they are", "rewards changed", remedy)

    def _check_selects_by_valid(self, group: ScoredGroup) -> None:
        """The answer about a group is the same without its invalid rollouts, and whatever these are worth."""
        places = np.flatnonzero(group.valid)
        whole = group.group
        polluted = {name: np.where(group.valid, each, 7.0) for name, each in group.components.items()}
        same = {"whatever invalid rollouts have": replace(group, components=polluted)}
        if len(places):
            same["leaving invalid rollouts out"] = replace(
                group,
                group=replace(whole, rollouts=tuple(whole.rollouts[place] for place in places)),
                rewards=group.rewards[places],
                valid=group.valid[places],
                components={name: each[places] for name, each in group.components.items()},
            )
        with plugin_errors(self.algorithm, "select"):
            expected, *found = (
                bool(copy.deepcopy(self.algorithm).select([each])[0]) for each in (group, *same.values())
            )
        for what, kept in zip(same, found, strict=True):
            if kept != expected:
                rewards = np.where(group.valid, group.rewards, np.nan).tolist()
                rule = f"{what} changes nothing in select (rewards {rewards})"
                told = f"the group is {'kept' if kept else 'rejected'}, and was {'kept' if expected else 'rejected'}"
                raise broken(self.algorithm, rule, told, "look at group.rewards and components where group.valid alone")


def _numbers(result: Replay) -> dict[str, Any]:
    """The arrays of a result by name."""
    of_views = result.grad_views.items()
    return {name: np.asarray(getattr(result, name)) for name in _FIELDS} | {
        f"grad_views[{view!r}][{key!r}]": values for view, arrays in of_views for key, values in arrays.items()
    }


def _difference(expected: Replay, found: Replay, rows: Any) -> str | None:
    """The first number that differs; ``rows`` gives the original places of the rows of ``found``."""
    others = _numbers(found)
    for name, one in _numbers(expected).items():
        other = others[name]
        one = one[rows] if one.ndim else one
        if one.ndim == 2:  # padding, if it differs
            other = other[:, : one.shape[1]]
        if one.shape != other.shape:
            return f"{name} has shape {other.shape}, and had {one.shape}"
        bad = np.argwhere(~np.isclose(other, one, rtol=RTOL, atol=ATOL))
        if len(bad):
            place = tuple(bad[0])
            return f"{name}{bad[0].tolist() or ''} is {other[place]}, and was {one[place]}"
    if expected.metrics.keys() != found.metrics.keys():
        return f"metrics {sorted(found.metrics)}, and were {sorted(expected.metrics)}"
    for name, value in expected.metrics.items():
        if not np.isclose(found.metrics[name], value, rtol=RTOL, atol=ATOL):
            return f"metric {name} is {found.metrics[name]}, and was {value}"
    return None


def _equal(one: Any, other: Any) -> bool:
    """True if two fields of a batch are equal; NaN equals NaN."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, BranchedRows):
        return all(_equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return bool(one == other)
