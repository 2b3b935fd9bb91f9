"""Compares a run's record of a step with its replay, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.commands.replay.rerun import ROUTERS_LOSS, Rerun, name_of, sampled
from mmrl.ops.metrics import ADAPTER_KEPT
from mmrl.rollout.records import RecordedGroup, RecordedStep
from mmrl.step.lag import learners_version
from mmrl.types import CreditedGroup, FloatArray, SampleKey, ScoredGroup

EXACT, SUMMED = 1e-12, 1e-5
"""Relative differences that count as none: of float64 from the same computation on another processor, and of float32
that was added up in another order."""
_TERM = 1e-6
"""Likewise of float32 sums, relative to the size of their terms, which may cancel."""
_TOTAL = "the sum"
NOT_RECORDED = (
    *(
        "perf/",
        "data/",
        "eval/",
        "eval_blank/",
        "monitor/",
        "lr",
        "policy/grad_norm",
        "critic/lr",
        "critic/grad_norm",
        ROUTERS_LOSS,
        "mismatch/rerouted_",
        "mismatch/probe_",
        "staleness/",
    ),
    *("episode/failed_calls_fraction", ADAPTER_KEPT),
)
"""Metrics that no record gives: clocks, rows that are left out, other rollouts, monitors, gradients, routers, probes,
the learner's version, failed calls, weights. (``*_failed_fraction`` and ``views/*_strength`` are others.)"""


@dataclass(frozen=True, slots=True)
class Difference:
    """One number or name that differs.

    Attributes:
        what: The name of a reward or metric, for example.
        rollout: The rollout's name; None for those of the whole step.
        greedy: True if that is the prompt's greedy rollout.
        why: Possible reasons.
    """

    what: str
    was: Any
    now: Any
    rollout: SampleKey | None = None
    greedy: bool = False
    why: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """For a program."""
        names = dict(zip(("epoch", "prompt", "member"), self.rollout or (), strict=False))
        greedy = {"greedy": self.greedy} if self.rollout else {}
        why = {"why": list(self.why)} if self.why else {}
        return {"what": self.what, **names, **greedy, "was": _plain(self.was), "now": _plain(self.now), **why}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a comparison.

    Attributes:
        compared: How many units were compared.
        note: The tolerance, or what was left out.
    """

    name: str
    unit: str
    compared: int
    differences: Sequence[Difference]
    note: str = ""


def reward_part(
    record: RecordedStep, now: Sequence[ScoredGroup], explain: Explanations | None = None, *, totals_only: bool = False
) -> Part:
    """Compare each rollout's rewards, by name, and their sum.

    Args:
        now: The record's groups, scored again.
        explain: Why a rollout's reward may differ.
        totals_only: Compare the weighted sums alone, for rewards of other names.
    """
    explain = explain or Explanations()
    pairs = [
        (group, was, scores, member)
        for group, scored in zip(record.groups, now, strict=True)
        for was, scores in both_with_greedy(group.credited.scored, scored)
        for member in range(len(was.rewards))
        if not was.is_given  # nothing has scored it
    ]
    found = [each for pair in pairs for each in _reward_differences(*pair, explain, totals_only=totals_only)]
    return Part("rewards", "rollouts", len(pairs), found)


@dataclass(frozen=True, slots=True)
class Explanations:
    """Why a rollout's reward may differ.

    Attributes:
        then: How a reward failed in the run, by epoch, prompt id, member and reward.
        now: How it fails now, by the rollout's key and the reward.
        unstable: Both values, likewise, of a reward that changed when it was asked again.
        of_reward: Changes by reward.
    """

    then: Mapping[tuple[int, str, int, str], str] = field(default_factory=dict)
    now: Mapping[tuple[SampleKey, str], str] = field(default_factory=dict)
    unstable: Mapping[tuple[SampleKey, str], tuple[float, float]] = field(default_factory=dict)
    of_reward: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of(self, group: RecordedGroup, rollout: Any, reward: str) -> Iterator[str]:
        if (pair := self.unstable.get((rollout.key, reward))) is not None:
            yield f"it is not deterministic: {number(pair[0])}, then {number(pair[1])}"
        if cause := self.then.get((*name_of(rollout), reward)):
            yield f"in the run it {cause}"
        if cause := self.now.get((rollout.key, reward)):
            yield f"now it {cause}"
        if group.lost_columns:
            yield f"JSON could not hold the columns {', '.join(group.lost_columns)}"
        yield from self.of_reward.get(reward, ())


def selection_part(record: RecordedStep, result: Rerun) -> Part:
    """Compare which sampled groups the algorithm keeps."""
    groups = [record.groups[place] for place in sampled(record)]
    found = [
        Difference("kept", group.credited.scored.kept, now, name_of(group.rollouts[0]))
        for group, now in zip(groups, result.kept, strict=True)
        if group.credited.scored.kept != now
    ]
    return Part("selection", "groups", len(groups), found)


def advantage_part(record: RecordedStep, result: Rerun) -> Part:
    """Compare the advantages of each trained rollout."""
    pairs = list(_trained_pairs(record, result))
    found = [
        Difference(f"advantage of token {token}", float(was[token]), float(now[token]), name_of(rollout))
        for rollout, was, now in pairs
        for token in _first_unequal(was, now)
    ]
    return Part("advantages", "rollouts", len(pairs), found, f"to {EXACT:g}")


def update_part(result: Rerun, ledger: Sequence[Sequence[SampleKey]]) -> Part:
    """Compare each optimizer step's rollouts with the ledger."""
    if result.updates and not ledger:
        return Part("updates", "optimizer steps", 0, [], "ledger.jsonl tells nothing of this step")
    found = []
    for number, (was, now) in enumerate(
        zip(_padded(ledger, result.updates), _padded(result.updates, ledger), strict=True)
    ):
        found += [Difference(f"in optimizer step {number + 1}", True, False, name) for name in was if name not in now]
        found += [Difference(f"in optimizer step {number + 1}", False, True, name) for name in now if name not in was]
    return Part("updates", "optimizer steps", len(ledger), found)


def metric_parts(result: Rerun, recorded: Mapping[str, float | None]) -> list[Part]:
    """Compare metrics: those of float64, and those that the learner adds up in float32."""
    summed, unknown, size = result.learner.names, result.learner.unknown, _TERM * _scale(result)
    known = {name: value for name, value in result.metrics.items() if name not in unknown}
    names = [name for name in dict.fromkeys([*recorded, *known]) if is_function(name) and name not in unknown]
    parts = []
    for kind, group in (
        ("metrics", [n for n in names if n not in summed]),
        ("loss", [n for n in names if n in summed]),
    ):
        found = [
            Difference(name, recorded.get(name), known.get(name))
            for name in group
            if not agree(result, name, recorded.get(name), known.get(name))
        ]
        rounding = f"float32 in another order: to {SUMMED:g}, or {size:.1g} where terms cancel"
        note = f"to {EXACT:g}" if kind == "metrics" else rounding
        parts.append(Part(kind, "numbers", len(group), found, note))
    return parts


def logprob_part(record: RecordedStep, recorded: Mapping[str, float | None]) -> Part:
    """Check that log-probs of sampler and learner are no further apart than the step's metric says.

    The metric is about tokens of the learner's own version.
    """
    largest = recorded.get("mismatch/logprob_abs_max")
    groups = [group.credited for group in record.groups if group.credited.trained]
    if largest is None:
        return Part("log-probs", "rollouts", 0, [])
    version = learners_version([group.scored for group in groups], recorded)
    found, compared = [], 0
    for group in groups:
        for rollout, learner in zip(group.scored.group.rollouts, group.logprobs, strict=True):
            if not len(learner) or rollout.view or not rollout.is_own:  # the sampler's are of other prompts or weights
                continue
            compared += 1
            own = rollout.mask if version is None else rollout.mask & (rollout.version_of_token == version)
            gap = np.where(own, np.abs(learner.astype(np.float64) - rollout.sampler_logprobs), 0.0)
            if not gap.max() <= largest:
                token = int(np.nanargmax(np.where(np.isnan(gap), np.inf, gap)))
                what = f"learner's log-prob of token {token}, against the sampler's"
                found.append(
                    Difference(what, float(rollout.sampler_logprobs[token]), float(learner[token]), name_of(rollout))
                )
    return Part(
        "log-probs", "rollouts", compared, found, f"sampler and learner within mismatch/logprob_abs_max = {largest:.3g}"
    )


def is_function(name: str) -> bool:
    """True if a metric is a function of the record."""
    is_strength = name.startswith("views/") and name.endswith("_strength")
    return not name.startswith(NOT_RECORDED) and not name.endswith("_failed_fraction") and not is_strength


@dataclass(frozen=True, slots=True)
class Change:
    """How advantages would have changed, over the rollouts that are trained on both times.

    Attributes:
        changed: Rollouts with another mean advantage.
        flipped: Rollouts whose mean advantage has the other sign.
        correlation: The mean advantages' correlation; None if one side has all the same.
        added: Groups that were not trained on and would be; ``removed`` is the opposite.
    """

    compared: int
    changed: int
    flipped: int
    correlation: float | None
    added: Sequence[str]
    removed: Sequence[str]


def advantage_change(record: RecordedStep, result: Rerun) -> Change:
    """How advantages and groups would change."""
    means = np.array([[_mean(was, r.mask), _mean(now, r.mask)] for r, was, now in _trained_pairs(record, result)])
    was, now = means.reshape(-1, 2).T
    moved = np.abs(was - now) > EXACT * np.maximum(1.0, np.abs(was))
    flat = len(was) < 2 or np.ptp(was) <= EXACT or np.ptp(now) <= EXACT
    before = {group.credited.key: group.rollouts[0] for group in record.groups if group.credited.trained}
    after = {group.key: group.scored.rollouts[0] for group in result.groups}
    return Change(
        compared=len(was),
        changed=int(moved.sum()),
        flipped=int((moved & (was * now < 0)).sum()),
        correlation=None if flat else float(np.corrcoef(was, now)[0, 1]),
        added=[_prompt(rollout) for key, rollout in after.items() if key not in before],
        removed=[_prompt(rollout) for key, rollout in before.items() if key not in after],
    )


def number(value: Any) -> str:
    """The value for a person."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "none"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def describe(difference: Difference) -> str:
    """A name such as ``prompt 'r3' (epoch 1), rollout 2``."""
    assert difference.rollout is not None
    epoch, prompt, member = difference.rollout
    kind = "the greedy rollout" if difference.greedy else f"rollout {member}"
    return f"prompt {prompt!r} (epoch {epoch}), {kind}"


def _prompt(rollout: Any) -> str:
    return f"{rollout.prompt.id!r} (epoch {rollout.prompt.epoch})"


def both_with_greedy(was: ScoredGroup, now: ScoredGroup) -> Iterator[tuple[ScoredGroup, ScoredGroup]]:
    """The two groups, then their greedy rollouts if both have one."""
    yield was, now
    if was.greedy is not None and now.greedy is not None:
        yield was.greedy, now.greedy


def _reward_differences(
    group: RecordedGroup, was: ScoredGroup, now: ScoredGroup, member: int, explain: Explanations, *, totals_only: bool
) -> Iterator[Difference]:
    rollout, greedy = was.group.rollouts[member], was is group.credited.scored.greedy
    names = [] if totals_only else list(dict.fromkeys([*was.components, *now.components]))
    nothing = np.full(len(was.rewards), np.nan)
    values = {
        name: (was.components.get(name, nothing)[member], now.components.get(name, nothing)[member]) for name in names
    }
    different = {name: pair for name, pair in values.items() if not close(*pair)}
    if not different:
        # A rollout without a score has the sum 0, which differs from a score of 0.
        pair = tuple(float(each.rewards[member]) if each.valid[member] else math.nan for each in (was, now))
        different = {} if close(*pair) else {_TOTAL: (pair[0], pair[1])}
    for name, (one, other) in different.items():
        why = tuple(explain.of(group, rollout, name))
        yield Difference(name, _none(one), _none(other), name_of(rollout), greedy, why)
    if was.token_rewards and now.token_rewards and not totals_only:
        before, after = was.token_rewards[member], now.token_rewards[member]
        for token in _first_unequal(before, after):
            what = f"value of parts that end with token {token}"
            yield Difference(what, float(before[token]), float(after[token]), name_of(rollout), greedy)


def _trained_pairs(record: RecordedStep, result: Rerun) -> Iterator[tuple[Any, FloatArray, FloatArray]]:
    """Each rollout that is trained on both times, with its advantages then and now."""
    before = {group.credited.key: group.credited for group in record.groups if group.credited.trained}
    for group in result.groups:
        recorded: CreditedGroup | None = before.get(group.key)
        if recorded is not None:
            yield from zip(group.scored.group.rollouts, recorded.advantages, group.advantages, strict=True)


def _first_unequal(was: FloatArray, now: FloatArray) -> list[int]:
    """The first token whose advantages differ, if there is one."""
    if was.shape != now.shape:
        return [0] if min(len(was), len(now)) else []
    equal = np.abs(was - now) <= EXACT * np.maximum(1.0, np.abs(was))
    return [int(token) for token in np.flatnonzero(~equal)[:1]]


def _padded(one: Sequence[Sequence[SampleKey]], other: Sequence[Sequence[SampleKey]]) -> list[list[SampleKey]]:
    """Optimizer steps of ``one``, and empty ones where ``other`` has more."""
    return [[(*name,) for name in each] for each in one] + [[]] * (len(other) - len(one))


def agree(result: Rerun, name: str, was: float | None, now: float | None) -> bool:
    """True if a metric is the same, but for rounding where the learner adds it up in float32."""
    if was is None or now is None or name not in result.learner.names:
        return close(was, now)
    size = _scale(result) if name.startswith("loss/") else 1.0
    return abs(was - now) <= SUMMED * max(abs(was), abs(now)) + _TERM * size


def _scale(result: Rerun) -> float:
    """The mean size of an optimizer step's loss, its terms' absolute values added up."""
    return float(np.mean(result.learner.scale)) if result.learner.scale else 0.0


def close(was: float | None, now: float | None) -> bool:
    """True if two float64 of the same computation are the same; None and NaN equal each other."""
    missing = [value is None or math.isnan(value) for value in (was, now)]
    if any(missing) or was is None or now is None:
        return all(missing)
    return abs(was - now) <= EXACT * max(1.0, abs(was))


def _none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _mean(values: FloatArray, mask: Any) -> float:
    return float(values[mask].mean()) if len(values) and mask.any() else 0.0


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
