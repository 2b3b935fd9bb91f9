r"""GSPO: group sequence policy optimization (arXiv:2507.18071).

The unit of reward is the sequence, and so is the unit of the ratio and of the clip:

    A_i = (R_i - mean(R)) / (std(R) + eps)
    s_i = (pi(y_i) / pi_old(y_i)) ^ (1 / |y_i|) = exp(1/|y_i| sum_t log(pi(y_t) / pi_old(y_t)))
    L_i = max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))
    L   = 1/G sum_i L_i,  no KL

The geometric mean moves little, hence clips of 3e-4 and 4e-4 where GRPO has 0.2. Many more tokens are clipped than
with GRPO, as intended: 7 to 32 % in the comparison of plugins/README.md. The loss of a sequence is one number, which
each of its tokens carries with weight ``1 / |y_i|``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from mmrl.interfaces import RunFacts
from mmrl.policy_gradient import ClipOptions, GroupRelative, Positive
from mmrl.types import PackedTokens, TokenLoss

WIDEST_CLIP = 0.05
"""A wider clip is surely intended for a ratio per token."""


class GSPO(GroupRelative):
    class Config(ClipOptions, GroupRelative.Config):
        clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
        """The sequence's ratio is clipped below `1 - clip_low`."""
        clip_high: Positive = 4e-4
        """The sequence's ratio is clipped above `1 + clip_high`."""
        aggregation: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"
        """Ratios of sequences go with means over sequences: no other mode is this algorithm."""

    config: Config

    def check(self, run: RunFacts) -> Sequence[str]:
        widest = max(self.config.clip_low, self.config.clip_high)
        wide = [f"a clip of {widest:g} is hardly ever reached by a ratio per sequence; the paper has 3e-4 and 4e-4"]
        return [*super().check(run), *(wide if widest > WIDEST_CLIP else [])]

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import sequence_clip

        return sequence_clip(tokens, **self.config.clip)
