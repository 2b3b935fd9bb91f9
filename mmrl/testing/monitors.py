"""``check_monitor``: the rules that every monitor keeps; and alarms on metrics that are made by hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from mmrl.errors import MMRLError
from mmrl.interfaces import Alarm, Finding, Monitor, RunFacts, StepRecord, StepView
from mmrl.interfaces.monitors import PREFIX
from mmrl.ops.alarms import History, Watch, found_by, measured_by
from mmrl.plugin_host import registry
from mmrl.rollout.batch import sampled_and_given
from mmrl.testing.rollouts import scored_groups
from mmrl.testing.rules import broken, failed
from mmrl.types import GIVEN, CreditedGroup

STEPS = 50
_NAMES = (
    "reward/mean", "reward/std", "reward/unscored_fraction", "reward/reward_mean", "reward/reward_failed_fraction",
    "group/zero_signal_fraction", "group/all_correct_fraction", "group/all_wrong_fraction", "advantage/mean",
    "advantage/abs_mean", "advantage/max", "policy/entropy", "policy/grad_norm", "policy/clip_fraction_high",
    "policy/clip_fraction_low", "policy/ppo_kl", "policy/ppo_kl_k3", "policy/skipped_updates", "kl/reference",
    "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/kl", "mismatch/token_mult_prob_error",
    "length/completion_mean", "length/completion_max", "length/truncated_fraction", "loss/total", "loss/policy", "lr",
    "preference/accuracy", "preference/margin", "preference/reward_chosen", "preference/reward_rejected",
    "preference/logprob_chosen", "preference/logprob_rejected", "preference/length_chosen",
    "preference/length_rejected", "perf/step_s",
)  # fmt: skip
_OF_EVALUATIONS = (
    "eval/accuracy", "eval/reward_mean", "eval/unscored_fraction", "eval/length/completion_mean",
    "eval_blank/accuracy", "eval_blank/accuracy_gap", "eval_blank/mean_gap",
)  # fmt: skip
FACTS = RunFacts(
    group_size=4, prompts_per_step=8, max_new_tokens=64, updates_per_batch=2, rewards=("reward",), accuracy="reward"
)
Made = Callable[[int, np.random.Generator], float]
"""The value of every metric at a step."""


def alarms_of(
    monitor: Monitor,
    steps: Mapping[int, Mapping[str, float]],
    *,
    run: RunFacts = FACTS,
    num_steps: int | None = None,
    label: str = "mine",
    groups: Mapping[int, Sequence[CreditedGroup]] | None = None,
) -> list[Alarm]:
    """The alarms of a monitor on these metrics, by step, as a run would tell them.

    Args:
        steps: They may hold numbers that ``measure`` would have answered: ``monitor/<label>/<number>``.
        num_steps: By default the last of them.
        label: The monitor's name.
        groups: For ``measure``, sampled ones and given ones; without them it is not called.

    Raises:
        PluginError: The monitor raises, or answers what it must not.
    """
    faults = list[Exception]()
    watch = Watch({label: monitor}, run, num_steps or max(steps), lambda _, error: faults.append(error))
    found = list[Alarm]()
    for step, metrics in steps.items():
        of_step = (groups or {}).get(step)
        found += watch.look(step, metrics, None if of_step is None else _record(step, run, of_step)).alarms
        if faults:
            raise faults[0]
    return found


def _record(step: int, run: RunFacts, groups: Sequence[CreditedGroup]) -> StepRecord:
    sampled, given = sampled_and_given(groups)
    return StepRecord(step, run, lambda: sampled, read_given=lambda: given)


def check_monitor(monitor: str | type[Monitor] | Monitor, *, options: Mapping[str, Any] | None = None) -> None:
    """Raise at the first rule of monitors that this one breaks.

    The rules: it raises at no step that a run may have, be it without groups, evaluations or any metric at all, with
    numbers that are 0, huge or missing; what it measures are numbers by name; its findings have words, numbers and one
    cause each; the same steps give the same answers, also to another object that has not seen those before, because a
    run that goes on has one; groups stay as they are.

    Args:
        monitor: A registered name, a class, a monitor, or a name in a file, ``path/to/file.py:Name``.
        options: The monitor's options, unless it is an object already.

    Raises:
        PluginError: A rule is broken, or the monitor does not fit its interface.
        ConfigError: The options do not fit.
    """
    made = registry.given("monitor", monitor, options)
    runs: Mapping[str, Made | None] = {
        "a run that does not change": lambda step, rng: 0.5,
        "a run with noise": lambda step, rng: float(rng.uniform(0.2, 0.6)),
        "a run whose numbers are all 0": lambda step, rng: 0.0,
        "a run whose numbers grow without end": lambda step, rng: 10.0**step,
        "a run whose numbers fall": lambda step, rng: 0.5**step,
        "a run without metrics": None,
    }
    for name, values in runs.items():
        _check_run(made, name, values)


def _check_run(monitor: Monitor, name: str, values: Made | None) -> None:
    history, rng = History(), np.random.default_rng(0)
    groups = _groups()
    before = _content(groups)
    for step in range(STEPS + 1):
        metrics = dict(_metrics(step, values, rng))
        record = StepRecord(step, FACTS, *_readers(step, groups if values is not None else ()))
        where = f"{name}, step {step}"
        measured = _measured(monitor, record, where)
        metrics |= {f"{PREFIX}mine/{key}": value for key, value in measured.items()}
        history.add(step, metrics)
        view = StepView(step, STEPS, FACTS, metrics, "mine", history.curve)
        _check_findings(monitor, view, where)
    if _content(groups) != before:
        raise broken(monitor, "groups stay as they are", name, "work on copies of what they hold")


def _measured(monitor: Monitor, record: StepRecord, where: str) -> dict[str, float]:
    try:
        found, again = measured_by(monitor, record), measured_by(_other(monitor), record)
    except MMRLError as error:
        remedy = "answer {} where a step cannot tell: many have no groups, some groups have no valid rollout"
        raise failed(monitor, f"every step can be measured ({where})", error, remedy) from error
    if found != again:
        what = f"{where}: {found}, then {again}"
        raise broken(monitor, "the same groups give the same numbers", what, "keep nothing on self, and draw nothing")
    return found


def _check_findings(monitor: Monitor, view: StepView, where: str) -> None:
    try:
        found, again = found_by(monitor, view), found_by(_other(monitor), view)
    except MMRLError as error:
        remedy = "leave out a cause that a step does not tell of: StepView.get answers None where a metric is missing"
        raise failed(monitor, f"every step can be looked at ({where})", error, remedy) from error
    if found != again:
        remedy = "keep nothing on self: what was before is in StepView.curve, and numbers of groups come from measure"
        rule = "a monitor that has not seen the steps before finds the same"
        raise broken(monitor, rule, f"{where}: {found}, then {again}", remedy)
    for finding in found:
        if (fault := _fault(finding)) is not None:
            raise broken(monitor, f"a finding has {fault}", f"{where}: {finding}", "see mmrl.interfaces.Finding")


def _fault(finding: Finding) -> str | None:
    """The rule of findings that one breaks."""
    if not (finding.what and finding.remedy and not finding.what.endswith(".")):
        return "a sentence without its full stop, and a remedy"
    if not all(isinstance(name, str) and math.isfinite(value) for name, value in finding.values.items()):
        return "finite numbers by name"
    return None if finding.hits >= 1 else "at least one hit"


def _other(monitor: Monitor) -> Monitor:
    return type(monitor)(monitor.config)


def _metrics(step: int, values: Made | None, rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    if values is None:
        return
    is_evaluated = step % 5 == 0
    for name in chain(_NAMES if step else (), _OF_EVALUATIONS if is_evaluated else ()):
        yield name, values(step, rng)


def _readers(step: int, groups: Sequence[CreditedGroup]) -> tuple[Callable[[], Any], ...]:
    of_step = groups if step else ()
    evaluated = [CreditedGroup(g.scored, g.advantages, [np.zeros(0)] * len(g.logprobs)) for g in groups]
    evaluated = evaluated if step % 5 == 0 else []
    keys = frozenset(g.key for g in of_step[:2])
    return lambda: of_step, lambda: evaluated, lambda: evaluated, lambda: keys, lambda: [*map(_compared, of_step)]


def _compared(group: CreditedGroup) -> CreditedGroup:
    """The group as one of candidates, of which the first is for, the second against, and no other in the loss."""
    signs = [1.0, -1.0, *[0.0] * len(group.advantages)]
    advantages = [sign * np.ones_like(values) for sign, values in zip(signs, group.advantages, strict=False)]
    rollouts = tuple(replace(rollout, weight_version=GIVEN) for rollout in group.scored.rollouts)
    scored = replace(group.scored, group=replace(group.scored.group, rollouts=rollouts))
    return replace(group, scored=scored, advantages=advantages)


def _groups() -> list[CreditedGroup]:
    """Groups with rewards of every kind; the last one is not trained on."""
    found = [
        CreditedGroup(
            scored,
            [np.ones(len(rollout.token_ids)) for rollout in scored.rollouts],
            [rollout.sampler_logprobs + np.float32(0.01) for rollout in scored.rollouts],
            trained=True,
        )
        for scored in scored_groups(with_greedy=False)
    ]
    last = found[-1]
    return [*found[:-1], CreditedGroup(last.scored, last.advantages, [np.zeros(0, np.float32)] * len(last.logprobs))]


def _content(groups: Sequence[CreditedGroup]) -> str:
    with np.printoptions(threshold=sys.maxsize):
        return repr(groups)
