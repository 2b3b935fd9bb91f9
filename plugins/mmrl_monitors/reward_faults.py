"""Rewards that do not tell anything, or not of everything.

- ``unscored``: completions that a reward could not score.
- ``failed/<reward>``: completions that a reward hung, crashed or raised on.
- ``never_right``: no completion of any prompt has been right so far, or half right where the reward is graded:
  reference answers that nothing matches.
- ``constant/<component>``: one and the same value for every completion so far. 0 and 1 are left alone: penalties that
  nothing has earned yet are 0, and a form that a good model always keeps is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import BASELINE_STEPS, Finding, Monitor, PluginConfig, StepRecord, StepView
from mmrl_monitors.within import HALF, best_value


class RewardFaults(Monitor):
    """Completions are not scored, a reward fails, nothing is ever right, or a component never changes."""

    class Config(PluginConfig):
        unscored: Annotated[float, Field(gt=0, lt=1)] = 0.1
        """Share of the completions that could not be scored."""
        failed: Annotated[float, Field(gt=0, lt=1)] = 0.01
        """Share of the completions that a reward failed on; more than 5 % end a run anyway."""
        never_right_steps: Annotated[int, Field(ge=1)] = 10
        """First steps without anything right."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        """``range/<component>``: largest less smallest value of a step's scored completions; and ``best``."""
        scored = [group.scored for group in record.groups]
        found = best_value(scored, record.run.accuracy)
        for name in sorted({name for group in scored for name in group.components}):
            values = np.concatenate([group.component(name)[group.valid] for group in scored])
            values = values[~np.isnan(values)]
            found |= {f"range/{name}": float(np.ptp(values))} if len(values) else {}
        return found

    def look(self, step: StepView) -> Sequence[Finding]:
        return [*self._shares(step), *self._never_right(step), *self._constants(step)]

    def _shares(self, step: StepView) -> Iterator[Finding]:
        unscored = step.get("reward/unscored_fraction")
        if unscored is not None:
            what = "completions cannot be scored"
            remedy = "look at one of them (`mmrl rollouts RUN --where valid=false`), and at its reference answer"
            yield Finding(unscored / self.config.unscored, what, remedy, {"unscored": unscored}, "unscored")
        for name in sorted(step.metrics):
            if name.startswith("reward/") and name.endswith("_failed_fraction") and step.get(name) is not None:
                reward, share = name[len("reward/") : -len("_failed_fraction")], step.metrics[name]
                what, remedy = f"the reward {reward} fails", "RUN/events.jsonl has the completions and the errors"
                yield Finding(share / self.config.failed, what, remedy, {"failed": share}, f"failed/{reward}")

    def _never_right(self, step: StepView) -> Iterator[Finding]:
        wrong = step.curve("group/all_wrong_fraction")
        if step.get("group/all_wrong_fraction") is None:
            return
        is_hit = len(wrong) >= self.config.never_right_steps and wrong.values.min() >= 1
        is_hit &= bool((step.measured_curve("best").values < HALF).all())  # a graded reward may never be 1
        yield Finding(
            float(is_hit),
            "no completion of any prompt has been right",
            "compare completions with reference answers (`mmrl check`, `mmrl rewards test`): the column, the form of "
            "the answers or trainer.eval_metric may be wrong; else the prompts are too hard",
            {"steps": float(len(wrong))},
            "never_right",
            hits=1,
        )

    def _constants(self, step: StepView) -> Iterator[Finding]:
        for name in sorted(step.metrics):
            component = name.partition("/range/")[2]
            if not component or name != f"monitor/{step.label}/range/{component}":
                continue
            ranges, value = step.curve(name), step.get(f"reward/{component}_mean")
            if value is None or len(ranges) <= BASELINE_STEPS:
                continue
            is_constant = ranges.values.max() <= 1e-8 and min(abs(value), abs(value - 1)) > 1e-8
            what = f"the reward component {component} is the same for every completion of every prompt"
            remedy = "repair it or leave it out: it tells nothing (`mmrl rewards test`)"
            yield Finding(float(is_constant), what, remedy, {"value": value}, f"constant/{component}", hits=1)
