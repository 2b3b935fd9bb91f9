"""A policy that makes the better answers less likely too (likelihood displacement, arXiv:2410.08847).

A loss of pairs learns a difference, and lowers both of its sides where that is easier. Some fall is usual. What is
lost in a large one goes to answers that nobody has compared. The log-prob of a token is looked at, and not that of a
whole answer, so that answers of any length have one threshold; it is compared with that of the first steps, beyond what
the draw of the rows explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepView
from mmrl.types import FloatArray

STEPS = 5
"""Steps at the start, and last ones, whose means are compared."""
SURE = 3.0
"""Standard errors of their difference that a fall has at least."""


class FallingChosen(Monitor):
    """The chosen answers' log-prob falls, and not the rejected ones' alone."""

    class Config(PluginConfig):
        share: Annotated[float, Field(gt=0)] = 0.2
        """Fall of the mean log-prob of a token of the chosen answers, in that at the start."""
        least: Annotated[float, Field(gt=0)] = 0.1
        """The same in nats."""

    config: Config

    def look(self, step: StepView) -> Sequence[Finding]:
        chosen, rejected = (_of_tokens(step, side) for side in ("chosen", "rejected"))
        if step.get("preference/logprob_chosen") is None or len(chosen) < 2 * STEPS:
            return ()
        start, now = float(chosen[:STEPS].mean()), float(chosen[-STEPS:].mean())
        error = float(np.diff(chosen).std() / np.sqrt(STEPS))  # of a difference of two means
        fall = start - now
        least = max(self.config.least, self.config.share * abs(start), SURE * error)
        values = {"chosen": now, "chosen_at_the_start": start}
        if len(rejected) >= 2 * STEPS:
            values |= {
                "rejected": float(rejected[-STEPS:].mean()),
                "rejected_at_the_start": float(rejected[:STEPS].mean()),
            }
        return (
            Finding(
                max(fall, 0.0) / least,
                "the log-prob of the chosen answers falls",
                "hold it up: add their negative log-likelihood to the loss (nll of dpo, variant dpop, mpo), lower "
                "learner.lr, raise beta, or warm up on the chosen answers",
                values,
            ),
        )


def _of_tokens(step: StepView, side: str) -> FloatArray:
    """The mean log-prob of a token of one side, for each step that has it."""
    sums, lengths = step.curve(f"preference/logprob_{side}"), step.curve(f"preference/length_{side}")
    _, of_sums, of_lengths = np.intersect1d(sums.steps, lengths.steps, assume_unique=True, return_indices=True)
    found: FloatArray = sums.values[of_sums] / np.maximum(lengths.values[of_lengths], 1.0)
    return found
