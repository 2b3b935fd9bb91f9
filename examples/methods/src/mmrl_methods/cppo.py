r"""CPPO: completion pruning policy optimization (arXiv:2503.22342).

GRPO that learns only from the completions with the largest advantages. Of the ``G`` completions of a prompt

    A_i  = (R_i - mean(R)) / (std(R) + eps)
    k    = G - floor(G rate)
    keep = the k completions with the largest |A_i|
    L    = 1/k sum_{i kept} 1/|y_i| sum_t max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high))

The others take no part in the updates: no forward pass, no backward pass there. The paper prunes 50 to 94 %
of 16 completions. Its "dynamic completion allocation" fills the room with completions of further prompts: here that
is a larger ``trainer.prompts_per_step``, since a step packs whatever rows are kept.

Deviations from the paper, and why:

- Completions with equal ``|A|``, of which rewards of 0 and 1 give many, are ordered by a hash of their sampled
  log-probs: no completion is preferred for its place, its length or its probability.
- Log-probs that a run computes before its updates (several updates for a batch, a KL penalty) are those of all
  completions; the authors' code prunes first.
- ``over: batch`` prunes over all prompts at once, as the authors' code does over the completions of a device. A prompt
  whose rewards are all equal then keeps none, and one that teaches much keeps all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.interfaces import AggregationMode, RunFacts
from mmrl.ops.credit import members_of
from mmrl.policy_gradient import DualClipOptions, GroupRelative
from mmrl.types import Batch, BoolArray, Credit, FloatArray, IntArray, PackedTokens, TokenLoss
from mmrl_methods.groups import usable_rows

DIGITS = 8
"""Decimals to which sizes of advantages are compared: rounding must not decide which completion is kept."""


class CPPO(GroupRelative):
    class Config(DualClipOptions, GroupRelative.Config):
        rate: Annotated[float, Field(ge=0, lt=1)] = 0.5
        """Share of the completions that is pruned."""
        over: Literal["prompt", "batch"] = "prompt"
        """The completions that are compared: those of a prompt, or all of the step's."""
        aggregation: AggregationMode = "seq-mean-token-mean"
        """The average over per-token losses."""

    config: Config

    def check(self, run: RunFacts) -> Sequence[str]:
        warnings, size = list(super().check(run)), run.group_size
        if self.config.over == "prompt" and int(size * self.config.rate) == 0:
            warnings.append(f"rate {self.config.rate:g} of {size} completions prunes none; raise rate or group_size")
        return warnings

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        credit = super().advantages(batch, rewards, kl)
        assert isinstance(credit.advantages, np.ndarray)
        groups = batch.group_ids if self.config.over == "prompt" else np.zeros_like(batch.group_ids)
        usable_B = usable_rows(batch)
        keep_B = largest(credit.advantages, groups, batch, self.config.rate)
        pruned = 1 - keep_B.sum() / usable_B.sum() if usable_B.any() else 0.0
        return replace(credit, keep=keep_B, metrics={"cppo/pruned_fraction": float(pruned)})

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)


def largest(advantages: FloatArray, groups: IntArray, batch: Batch, rate: float) -> BoolArray:
    """(B,) True for the usable rows with the largest advantages, of each group all but ``floor(rate n)``."""
    keep_B = np.zeros(len(advantages), bool)
    sizes = np.round(np.abs(advantages), DIGITS)
    for members in members_of(groups, usable_rows(batch)):
        ordered = sorted(members, key=lambda row: (sizes[row], _hash(batch, row)))
        keep_B[ordered[int(len(members) * rate) :]] = True
    return keep_B


def _hash(batch: Batch, row: int) -> int:
    sampled = np.asarray(batch.sampler_logprobs[row], np.float32)[np.asarray(batch.masks[row], bool)]
    return zlib.crc32(sampled.tobytes())
