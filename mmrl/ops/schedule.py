"""Learning rates over a run."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, schedule: Schedule) -> float:
    """The rate of optimizer step ``step`` (from 0): a linear rise over the warm-up, then the schedule down to 0.

    ``constant`` stays at the peak. The last step of ``linear`` and ``cosine`` is still above 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return peak * (1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)
