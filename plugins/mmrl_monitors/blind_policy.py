"""A policy that answers without looking: its images are worth less and less.

At the evaluations with blank images (``trainer.blank_every``), 64 prompts are answered again with grey ones. The gap is
the accuracy that the images add, as the mean of the last three evaluations: that of one with 64 prompts is off by some
0.07. Two thirds of the errors of reasoning vision-language models are errors of perception
(PAPO, arXiv:2507.06448), and rewards of answers do not tell them from others.

- ``blind``: the gap is under 0.4 of the largest that the run has had.
- ``guesses``: accuracy without images has risen, while the gap has fallen as much.

The paper's comparison is with the start; the largest gap so far is the same in a run that unlearns, and is no alarm in
one whose images are not yet worth anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepView
from mmrl_monitors.within import on_set

_REMEDY = (
    "look at the answers without images (RUN/evaluations/blank-*.parquet), check that training images are what they "
    "should be, leave out prompts whose text tells the answer, or go back to a checkpoint with a lower learner.lr"
)
_MEAN = 3
"""Evaluations over which the gap is averaged."""


class BlindPolicy(Monitor):
    """The images add less accuracy than before; needs `trainer.blank_every`."""

    class Config(PluginConfig):
        share: Annotated[float, Field(gt=0, lt=1)] = 0.4
        """Share of the largest gap so far below which the policy is blind."""
        least_gap: Annotated[float, Field(gt=0, lt=1)] = 0.2
        """Gap that the images must have been worth before they can be missed: less may be chance."""
        rise: Annotated[float, Field(gt=0, lt=1)] = 0.2
        """Rise of the accuracy without images, and fall of the gap, that together are guessing."""

    config: Config

    def look(self, step: StepView) -> Sequence[Finding]:
        return [each for of_set, judge in step.run.judges.items() for each in self._of_set(step, of_set, judge)]

    def _of_set(self, step: StepView, of_set: str, judge: str | None) -> Sequence[Finding]:
        """The findings of an evaluation set, of which all metrics have ``of_set`` before their own names."""
        section = f"eval_blank/{of_set}"
        name, of_gap = f"{section}{judge}_mean", f"{section}mean_gap"  # the reward may be graded
        if step.get(name) is None or step.get(of_gap) is None:
            name, of_gap = f"{section}accuracy", f"{section}accuracy_gap"
        blank = step.get(name)
        if blank is None or step.get(of_gap) is None:
            return ()
        gaps = step.curve(of_gap).values
        *earlier, gap = (float(gaps[max(0, end - _MEAN) : end].mean()) for end in range(1, len(gaps) + 1))
        largest = max(earlier, default=0.0)
        if largest < self.config.least_gap:
            return ()
        first = float(step.curve(name).values[0])
        values = {"gap": gap, "largest_gap": largest, "accuracy_without_images": blank}
        blind = self.config.share * largest / max(gap, 1e-6)
        guesses = max(min(blank - first, largest - gap), 0.0) / self.config.rise
        on = on_set(of_set)
        what = f"the policy answers nearly as well without its images{on}"
        growing = f"the policy gets better at answering without its images{on}, and worse at using them"
        return (
            Finding(blind, what, _REMEDY, values, f"{of_set}blind", hits=2),
            Finding(
                guesses,
                growing,
                _REMEDY,
                {**values, "first_accuracy_without_images": first},
                f"{of_set}guesses",
                hits=2,
            ),
        )
