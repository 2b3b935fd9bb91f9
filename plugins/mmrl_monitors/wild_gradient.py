"""A gradient that has left its range and does not come back; a spike of a few steps is no alarm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepView

WINDOW, LEAST = 50, 10
"""Steps whose median is the usual norm, and how many there must be."""


class WildGradient(Monitor):
    """The gradient's norm is ten times its running median, for five steps."""

    class Config(PluginConfig):
        growth: Annotated[float, Field(gt=1)] = 10.0
        """The norm, in those of the last 50 steps."""
        steps: Annotated[int, Field(ge=1)] = 5
        """Steps in a row: a spike that is over by then is none."""

    config: Config

    def look(self, step: StepView) -> Sequence[Finding]:
        norm, curve = step.get("policy/grad_norm"), step.curve("policy/grad_norm")
        before = curve.values[: -self.config.steps][-WINDOW:]  # without those that may be wild
        if norm is None or len(before) < LEAST:
            return ()
        usual = float(np.median(before))
        return (
            Finding(
                norm / max(self.config.growth * usual, 1e-6),
                "the gradient is far larger than it was, and does not come back",
                "lower learner.lr or learner.max_grad_norm, warm up, and go back to a checkpoint before it",
                {"norm": norm, "usual_norm": usual},
                hits=self.config.steps,
            ),
        )
