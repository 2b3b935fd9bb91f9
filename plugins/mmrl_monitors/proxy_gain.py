"""A reward that is won by other means than the right answer (reward overoptimisation, Gao et al., arXiv:2210.10760).

- ``held_out``: over the last three evaluations the training reward has risen by more than two deviations of a single
  step, and held-out accuracy has not risen at all.
- ``components``: within groups, completions that are right used to be those that another component of the reward likes.
  Now they are those that it does not like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Curve, Finding, Monitor, PluginConfig, StepRecord, StepView
from mmrl.types import FloatArray, ScoredGroup
from mmrl_monitors.within import mean, on_set, rank_correlation

EVALUATIONS = 3
SMOOTHED_STEPS = 5
"""Steps whose mean reward stands for the last of them."""


class ProxyGain(Monitor):
    """The training reward rises and held-out accuracy does not."""

    class Config(PluginConfig):
        deviations: Annotated[float, Field(gt=0)] = 2.0
        """Rise of the training reward over three evaluations, in standard deviations of a step's mean reward."""
        flat: Annotated[float, Field(ge=0, lt=1)] = 0.01
        """Rise of held-out accuracy up to which it is flat."""
        negative: Annotated[float, Field(gt=0, lt=1)] = 0.1
        """How far below 0 the rank correlation of two components has to fall."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        """``agreement``: rank correlation within groups of the component that tells right from wrong and that other one
        with which it is the lowest, mean over the groups in which both differ."""
        right = record.run.accuracy
        scored = [group.scored for group in record.groups]
        others = {name for group in scored for name in group.components} - {right}
        if right is None:
            return {}
        found = [mean(_agreement(group, right, name) for group in scored) for name in sorted(others) if "/" not in name]
        known = [each["mean"] for each in found if each]
        return {"agreement": min(known)} if known else {}

    def look(self, step: StepView) -> Sequence[Finding]:
        found = [self._held_out(step, of_set, judge) for of_set, judge in step.run.judges.items()]
        return [finding for finding in (*found, self._components(step)) if finding is not None]

    def _held_out(self, step: StepView, of_set: str, judge: str | None) -> Finding | None:
        name = f"eval/{of_set}{judge}_mean"  # that of a graded reward tells more than the share of value 1
        name = f"eval/{of_set}accuracy" if step.get(name) is None else name
        held_out, reward = step.curve(name), step.curve("reward/mean")
        if step.get(name) is None or len(held_out) <= EVALUATIONS or len(reward) < 2 * SMOOTHED_STEPS:
            return None
        before, *since = held_out.tail(EVALUATIONS + 1).tolist()
        begin = _level(reward, int(held_out.steps[-EVALUATIONS - 1]))
        end = _level(reward, step.step)
        deviation = float(np.diff(reward.tail(40)).std()) / np.sqrt(2)  # of a step's mean, whatever the trend
        rise = (end - begin) / max(deviation, 1e-6)
        is_flat = max(since) <= before + self.config.flat
        return Finding(
            rise / self.config.deviations if is_flat else 0.0,
            f"the training reward rises and held-out accuracy{on_set(of_set)} does not",
            "read completions with a high reward (`mmrl rollouts RUN --where 'reward>=1'`): what earns it may not be "
            "the answer; name the component that tells right from wrong in trainer.eval_metric",
            {"reward": end, "reward_before": begin, "held_out": since[-1], "held_out_before": before},
            f"{of_set}held_out",
            hits=2,
        )

    def _components(self, step: StepView) -> Finding | None:
        now, curve = step.measured("agreement"), step.measured_curve("agreement")
        if now is None or (baseline := curve.baseline()) is None or baseline.median <= 0:
            return None
        level = float(curve.tail(SMOOTHED_STEPS).mean())
        return Finding(
            (baseline.median - level) / (baseline.median + self.config.negative),
            "a component of the reward is now higher for wrong completions than for right ones",
            "compare the components of a few groups (`mmrl rollouts RUN --json`), lower the weight of the one that is "
            "won by wrong answers, or repair it",
            {"correlation": level, "baseline_correlation": baseline.median},
            "components",
        )


def _agreement(group: ScoredGroup, right: str, name: str) -> float | None:
    one, other = group.component(right), group.component(name)
    known = group.valid & ~np.isnan(one) & ~np.isnan(other)
    return rank_correlation(one[known], other[known])


def _level(reward: Curve, step: int) -> float:
    """The mean reward of the steps up to one; of the first ones, if there are none yet."""
    end = max(int(np.searchsorted(reward.steps, step, "right")), SMOOTHED_STEPS)
    values: FloatArray = reward.values[end - SMOOTHED_STEPS : end]
    return float(values.mean())
