r"""GRPO-lambda: a length penalty only where most completions are right (arXiv:2505.18086).

Another GRPO-lambda (arXiv:2510.00194) has eligibility traces; this is the one of the paper named here.

A penalty of length makes a policy that often fails fail more. So each step sorts its prompts by the share of
completions that are right, and only the first ``lambda`` of them are rewarded for being short:

    r_i = R_i (1 - alpha s((|y_i| - mean) / std))    prompts with a high share of right completions
    r_i = R_i                                        the others

with the logistic function ``s``, and mean and deviation of the lengths of the prompt's right completions. Then come
the advantages and the loss of GRPO, ``A_i = (r_i - mean(r)) / (std(r) + eps)``.

The switch by the top ``lambda`` of the batch is the paper's, with ``lambda`` 0.2. The form of the penalty could not be
read there: it is that of arXiv:2502.04463, equation 2, which is in common use, and its ``alpha`` is chosen here.

Deviations, and why:

- A completion is right if its reward, the weighted sum, is above ``right_above``; ``R_i`` need not be 1.
- Prompts with the same share as the last of the first ``lambda`` count among them, since nothing decides between
  them. A prompt without a right completion never does.
- Lengths are the policy's own tokens. Where all right completions are equally long, ``s`` is 1/2 for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import AggregationMode
from mmrl.ops.credit import members_of
from mmrl.policy_gradient import DualClipOptions, GroupRelative
from mmrl.types import Batch, Credit, FloatArray, IntArray, PackedTokens, TokenLoss
from mmrl_methods.groups import usable_rows


class GRPOLambda(GroupRelative):
    class Config(DualClipOptions, GroupRelative.Config):
        share: Annotated[float, Field(ge=0, le=1)] = 0.2
        """Share of the prompts that are rewarded for short completions, the paper's lambda."""
        alpha: Annotated[float, Field(gt=0, lt=1)] = 0.2
        """The largest part of a reward that length costs."""
        right_above: float = 0.5
        """A completion with a reward above it is right."""
        aggregation: AggregationMode = "seq-mean-token-mean"
        """The average over per-token losses."""

    config: Config

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        groups = members_of(batch.group_ids, usable_rows(batch))
        right_B = rewards > self.config.right_above
        chosen = self._efficient(groups, [float(right_B[rows].mean()) for rows in groups])
        lengths_B = np.array([np.count_nonzero(mask) for mask in batch.masks], np.float64)
        shaped_B = np.array(rewards, np.float64)
        for rows in chosen:
            right = rows[right_B[rows]]
            shaped_B[right] *= 1 - self.config.alpha * relative_lengths(lengths_B[right])
        credit = super().advantages(batch, shaped_B, kl)
        lengths = {"grpo_lambda/penalised_prompts": float(len(chosen))}
        return Credit(credit.advantages, credit.keep, {**credit.metrics, **lengths})

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)

    def _efficient(self, groups: Sequence[IntArray], shares: Sequence[float]) -> list[IntArray]:
        """The groups with the highest shares of right completions."""
        number = math.floor(self.config.share * len(groups) + 1e-9)
        if not number:
            return []
        last = sorted(shares, reverse=True)[number - 1]
        return [rows for rows, share in zip(groups, shares, strict=True) if share > 0 and share >= last]


def relative_lengths(lengths: FloatArray) -> FloatArray:
    """``s((n - mean) / std)`` of each length, with the logistic function ``s``; 1/2 of equal ones."""
    std = lengths.std()
    relative = (lengths - lengths.mean()) / (std if std > 0 else 1.0)
    return np.asarray(1 / (1 + np.exp(-relative)), np.float64)
