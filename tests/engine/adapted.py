"""Helpers that tests of learners with adapters share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mmrl.types import TrainingRow


def merged(learner: Any) -> dict[str, torch.Tensor]:
    """The policy's weights by name, as the sampler gets them, in float32."""
    return {name: weight.clone() for name, weight in learner.policy.named_weights(torch.float32)}


def held_to_reference(learner: Any, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The rows with the reference's log-probs, and a coefficient of the divergence from it."""
    known = zip(rows, learner.network("reference").score([row.sample for row in rows]), strict=True)
    return [
        replace(row, columns={**row.columns, "reference_logprobs": values}, constants={"kl_coef": 0.1})
        for row, values in known
    ]
