"""Prompts whose completions all earn the same, so that nothing is learned from them (DAPO, arXiv:2503.14476).

One finding, told apart by what the prompts are: all wrong, all right, or equal in another way. Prompts that are always
right are what a run is for, so more of them are needed. An algorithm that replaces such prompts is left alone: its own
metrics tell what that costs. So is a run with one completion for each prompt, which has no others to differ from. Where
nothing was ever right, ``reward_faults`` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView
from mmrl_monitors.within import HALF, best_value


class DeadGroups(Monitor):
    """Most prompts of a step have no signal, for ten steps."""

    class Config(PluginConfig):
        wrong: Annotated[float, Field(gt=0, le=1)] = 0.6
        """Share of the prompts without a signal, where most of these are not right throughout."""
        equal: Annotated[float, Field(gt=0, le=1)] = 0.85
        """Share of the prompts without a signal, whatever they are."""
        steps: Annotated[int, Field(ge=1)] = 10
        """Steps in a row."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        """``best``: the largest value of what tells right from wrong."""
        return best_value([group.scored for group in record.groups], record.run.accuracy)

    def look(self, step: StepView) -> Sequence[Finding]:
        equal, right = step.get("group/zero_signal_fraction"), step.get("group/all_correct_fraction")
        wrong = step.get("group/all_wrong_fraction")
        if equal is None or right is None or wrong is None or step.get("rollout/acceptance_rate") is not None:
            return ()
        if step.run.group_size == 1:
            return ()
        best = step.measured_curve("best").values
        if step.curve("group/all_wrong_fraction").values.min() >= 1 and (best < HALF).all():
            return ()
        what, remedy = _told(equal, right, wrong)
        values = {"no_signal": equal, "all_right": right, "all_wrong": wrong}
        severity = max(equal / self.config.wrong if 2 * right < equal else 0.0, equal / self.config.equal)
        return (Finding(severity, what, remedy, values, hits=self.config.steps),)


def _told(equal: float, right: float, wrong: float) -> tuple[str, str]:
    """Words for such prompts, and what to do."""
    more = "raise sampler.group_size, or replace prompts without a signal (an algorithm with dynamic sampling)"
    if wrong >= max(right, equal / 2):
        what = "most prompts are wrong in all of their completions, and teach nothing"
        return what, f"use easier prompts, warm up on demonstrations, reward parts of an answer; {more}"
    if right >= equal / 2 and right > 2 * wrong:
        return "most prompts are right in all of their completions, and teach nothing", f"use harder prompts; {more}"
    return "most prompts earn the same in all of their completions, and teach nothing", more
