"""Tries a reward on recorded completions, without a model: its values, its speed, and where the record differs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
from pydantic import ValidationError

from mmrl.config.plugin_specs import RewardSpec
from mmrl.config.problems import options_errors
from mmrl.config.sections import is_component
from mmrl.config.yaml_tree import Located, join_errors, read_tree
from mmrl.errors import DataError, plural
from mmrl.plugin_host import registry
from mmrl.rollout.records import RecordedRollout, read_rollouts
from mmrl.rollout.rewards.failures import Failures, RewardError
from mmrl.rollout.rewards.scorer import reward_pools
from mmrl.system.console import visible
from mmrl.system.table import table
from mmrl.testing.rollouts import sample_groups

_ROWS_SHOWN, _WIDTH, _COLUMNS = 40, 48, 5
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class TriedRollout:
    """A rollout and the reward's answer to it.

    Attributes:
        value: The reward; None if it is unscored.
        components: The values that the reward answers beside it, by name.
        recorded: The record's value of the same component; None where that was unscored, or there is none.
        failure: How the reward failed on it; empty if it did not.
        why: Why it is unscored, if the reward says so.
        agrees: True if value, components and record are the same, within 1e-6; None where there is nothing to compare.
    """

    where: str
    prompt: str
    member: int
    completion: str
    value: float | None
    recorded: float | None
    seconds: float
    failure: str
    agrees: bool | None
    components: Mapping[str, float | None] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, slots=True)
class TriedReward:
    """The outcome of a reward's trial.

    Attributes:
        component: The reward's name in the record.
        other_sources: Rollouts left aside, since the reward does not score rows of their sources.
        error: The first error that would stop a run; None if there is none.
    """

    component: str
    rollouts: Sequence[TriedRollout]
    recorded_components: Sequence[str]
    error: RewardError | None
    other_sources: int = 0

    @property
    def failed(self) -> list[TriedRollout]:
        return [each for each in self.rollouts if each.failure]

    @property
    def disagreeing(self) -> list[TriedRollout]:
        return [each for each in self.rollouts if each.agrees is False]

    def means(self) -> dict[str, float | None]:
        """Mean of each value beside the score, over the rollouts that have one."""
        found: dict[str, list[float]] = {}
        for each in self.rollouts:
            for name, value in each.components.items():
                found.setdefault(name, []).extend([] if value is None else [value])
        return {name: sum(values) / len(values) if values else None for name, values in found.items()}

    def totals(self) -> dict[str, Any]:
        """Counts, and seconds per rollout."""
        values = [each.value for each in self.rollouts if each.value is not None]
        slowest = max(self.rollouts, key=lambda each: each.seconds)
        seconds = np.array([each.seconds for each in self.rollouts])
        return {
            "reward": self.component,
            "rollouts": len(self.rollouts),
            "scored": len(values),
            "unscored": sum(each.value is None and not each.failure for each in self.rollouts),
            "failed": len(self.failed),
            "other_sources": self.other_sources,
            "mean": sum(values) / len(values) if values else None,
            "components": self.means(),
            "compared": sum(each.agrees is not None for each in self.rollouts),
            "disagreements": len(self.disagreeing),
            "recorded_components": list(self.recorded_components),
            "p50_s": float(np.percentile(seconds, 50)),
            "p95_s": float(np.percentile(seconds, 95)),
            "max_s": slowest.seconds,
            "slowest": slowest.where,
        }

    def data(self) -> dict[str, Any]:
        """Everything, for a program."""
        return {**self.totals(), "samples": [asdict(each) for each in self.rollouts]}

    def lines(self) -> Iterator[str]:
        """The same for a person."""
        yield from _table(self.rollouts[:_ROWS_SHOWN], list(self.means()))
        if len(self.rollouts) > _ROWS_SHOWN:
            yield f"... and {len(self.rollouts) - _ROWS_SHOWN} more (--json has all)"
        totals = self.totals()
        yield ""
        mean = "" if totals["mean"] is None else f", mean {totals['mean']:.4g}"
        parts = ", ".join(
            f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in totals["components"].items()
        )
        mean += visible(f" ({parts})") if parts else ""
        scored = f"{plural(totals['rollouts'], 'rollout')}: {totals['scored']} scored{mean}"
        aside = f"; {self.other_sources} of other sources" if self.other_sources else ""
        yield f"{scored}, {totals['unscored']} unscored, {totals['failed']} failed{aside}"
        times = f"p50 {_ms(totals['p50_s'])}, p95 {_ms(totals['p95_s'])}, max {_ms(totals['max_s'])}"
        yield visible(f"time per rollout: {times} ({totals['slowest']})")
        if totals["compared"]:
            yield f"record: {totals['disagreements']} of {totals['compared']} disagree with {self.component!r}"
            yield from _table(self.disagreeing[:_ROWS_SHOWN], list(self.means()))
        elif self.recorded_components:
            known = ", ".join(self.recorded_components)
            yield visible(f"record: it has no {self.component!r} to compare with, but {known} (--set label=NAME)")
        yield from _causes("failed", [(each.failure, each.where) for each in self.failed])
        yield from _causes("unscored", [(each.why, each.where) for each in self.rollouts if each.why])


def reward_spec(name: str, settings: Sequence[str] = (), timeout_s: float | None = None) -> RewardSpec:
    """The reward of that name with ``key=value`` settings, as an entry of ``rewards`` would have them.

    Raises:
        ConfigError: The settings do not fit.
        PluginError: The reward cannot be used.
    """
    tree, problems = read_tree([], settings)
    if problems:
        raise join_errors(problems)
    given = {"name": name, **tree.plain(), **({} if timeout_s is None else {"timeout_s": timeout_s})}
    try:
        model: Any = RewardSpec
        spec = RewardSpec.model_validate({**given, "on_error": "skip"})
        model = registry.options_class("reward", spec)
        model.model_validate(spec.options)
    except ValidationError as error:
        place = Located.of(given, f"reward {name}")
        raise join_errors(options_errors(error, model, "", place, RewardSpec)) from error
    return spec


def try_reward(spec: RewardSpec, paths: Sequence[str] = (), limit: int | None = None) -> TriedReward:
    """Score recorded rollouts, or else those of ``mmrl.testing``, in a run's own worker processes.

    Args:
        paths: See ``read_rollouts``.
        limit: Most rollouts to score.

    Raises:
        DataError: There are no rollouts, or none of the reward's sources.
    """
    others = Counter[str]()
    recorded = list(islice(_of_sources(_rollouts(paths), spec.sources, others), limit))
    if not recorded:
        what = "there are no recorded rollouts" + (f" of {', '.join(spec.sources or ())}" if others else "")
        known = ", ".join(f"{source!r} ({count})" for source, count in others.items())
        remedy = "name files that have some" + (", or other sources" if others else "")
        raise DataError(what, where=", ".join(paths), possible=known, remedy=remedy)
    groups = [list(group) for _, group in groupby(recorded, lambda each: each.rollout.prompt.key)]
    failures = [Failures(bounded=False) for _ in groups]
    tried, errors = list[TriedRollout](), list[RewardError]()
    ((_, pool),) = reward_pools([spec])
    try:
        wanted = frozenset({0})
        futures = [
            pool.submit([each.rollout for each in group], wanted, own)
            for group, own in zip(groups, failures, strict=True)
        ]
        for group, future, own in zip(groups, futures, failures, strict=True):
            tried += _tried(spec.metric, group, future, own, errors)
    finally:
        pool.close()
    components = dict.fromkeys(name for each in recorded for name in each.rewards)
    return TriedReward(spec.metric, tried, list(components), next(iter(errors), None), others.total())


def _rollouts(paths: Sequence[str]) -> Iterator[RecordedRollout]:
    if paths:
        return chain.from_iterable(map(read_rollouts, paths))
    samples = [rollout for group in sample_groups("7") for rollout in group]
    return iter([RecordedRollout(each, {}, True, False, f"built-in sample {i}") for i, each in enumerate(samples)])


def _of_sources(
    recorded: Iterable[RecordedRollout], sources: Sequence[str] | None, others: Counter[str]
) -> Iterator[RecordedRollout]:
    """Rollouts that a run would have the reward score; the others are counted by source."""
    for each in recorded:
        source = each.rollout.source
        if not sources or source in sources:
            yield each
        else:
            others[source] += 1


def _tried(
    name: str, group: Sequence[RecordedRollout], future: Future[Any], failures: Failures, errors: list[RewardError]
) -> Iterator[TriedRollout]:
    try:
        answer = future.result()[0]
        scores, seconds, reason = answer.scores, answer.seconds, ""
        parts = answer.parts or [{}] * len(group)
    except RewardError as error:
        errors.append(error)
        scores, seconds, reason = [None] * len(group), [0.0] * len(group), error.what
        parts = [{}] * len(group)
    causes = {failure.rollout.key: failure.cause for failure in failures.since(0)}
    reasons = {unscored.rollout.key: unscored.cause for unscored in failures.unscored_since(0)}
    for each, value, took, beside in zip(group, scores, seconds, parts, strict=True):
        rollout, recorded, failure = each.rollout, each.rewards.get(name), reason or causes.get(each.rollout.key, "")
        # If a valid rollout has no value, no reward of that name was asked.
        comparable = name in each.rewards and not (recorded is None and each.valid) and not failure
        yield TriedRollout(
            where=each.where,
            prompt=rollout.prompt.id,
            member=rollout.index,
            completion=rollout.text,
            value=value,
            recorded=recorded,
            seconds=took,
            failure=failure,
            agrees=_agrees(name, value, beside, each.rewards) if comparable else None,
            components=beside,
            why=reasons.get(rollout.key, ""),
        )


def _agrees(
    label: str, value: float | None, parts: Mapping[str, float | None], recorded: Mapping[str, float | None]
) -> bool:
    """True if the record has the same value, and the same of the components that it knows."""
    now = {label: value, **{f"{label}/{name}": part for name, part in parts.items()}}
    return all(_same(now.get(name), recorded[name]) for name in recorded if is_component(name, [label]))


def _same(value: float | None, recorded: float | None) -> bool:
    if value is None or recorded is None:
        return value is recorded
    return math.isclose(value, recorded, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _table(rollouts: Sequence[TriedRollout], components: Sequence[str]) -> list[str]:
    """One line for each rollout, with a column for each value beside the score, of up to ``_COLUMNS``."""
    names = components[:_COLUMNS]
    titles = [_short(name, 12) for name in names]
    rows = [["prompt", "rollout", "value", *titles, "recorded", "time", "completion"]] if rollouts else []
    for each in rollouts:
        value = "failed" if each.failure else _number(each.value)
        recorded = "" if each.agrees is None else _number(each.recorded)
        prompt, text = _short(each.prompt, 20), _short(each.completion, _WIDTH)
        parts = ["" if (part := each.components.get(name)) is None else _number(part) for name in names]
        rows.append([prompt, str(each.member), value, *parts, recorded, _ms(each.seconds), text])
    return table(rows, f"<{'>' * (4 + len(names))}<")


def _causes(what: str, found: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each cause: how often it was, and the place of the first."""
    first = dict(reversed(found))
    for cause, count in Counter(cause for cause, _ in found).most_common(_ROWS_SHOWN):
        yield visible(f"{what}: {count} x {cause} (first: {first[cause]})")


def _short(text: str, width: int) -> str:
    shown = visible(text[: width + 1])
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def _number(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.6g}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
