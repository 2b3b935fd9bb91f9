"""The frame of algorithms that regress log-ratios of whole completions on their rewards.

The loss of a completion stands on each of its tokens, and with ``seq-mean-token-mean`` the step's loss is the mean
over completions, for any packing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig
from mmrl.ops.credit import group_advantages, grouped
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss
from mmrl_methods.groups import usable_rows

if TYPE_CHECKING:
    import torch


class Regression(Algorithm):
    """Base of algorithms that regress log-ratios to another policy."""

    class Config(PluginConfig):
        against: Literal["old", "reference"] = "old"
        """The policy that log-ratios are taken to: the one before the step, or the reference."""

    config: Config

    def needs(self) -> Needs:
        return Needs(reference_logprobs=self.config.against == "reference", min_group_size=2)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("seq-mean-token-mean")

    def log_ratios(self, tokens: PackedTokens) -> torch.Tensor:
        """(N,) ``x = sum_t (log pi(y_t) - log pi'(y_t))``, with gradient; ``pi'`` is the policy of ``against``."""
        if self.config.against == "reference":
            return tokens.sequence_sum(tokens.log_ratio_T)
        return tokens.sequence_sum(tokens.logprobs_T - tokens.old_logprobs_T.detach())


class GroupRegression(Regression):
    """Base of those that compare the log-ratios of a prompt's completions with each other.

    All usable rows of groups with two or more enter the loss. Their advantages are rewards less the mean of the group.
    """

    def needs(self) -> Needs:
        return replace(super().needs(), whole_groups=True)

    def credit(self, batch: Batch) -> Credit:
        keep_B = grouped(batch.group_ids, usable_rows(batch))
        return Credit(group_advantages(batch.rewards, batch.group_ids, keep_B, scale="none"), keep=keep_B)


def regression_loss(
    tokens: PackedTokens, losses_N: torch.Tensor, ratios_N: torch.Tensor, residuals_N: torch.Tensor
) -> TokenLoss:
    """The losses of sequences on their tokens, with two metrics.

    ``regression/log_ratio`` is the mean log-ratio of a sequence, ``regression/residual_abs`` the mean size of what is
    left to fit.
    """
    loss_T = losses_N[tokens.sequence_T]
    metrics = {
        "regression/log_ratio": ratios_N.detach(),
        "regression/residual_abs": residuals_N.detach().abs(),
    }
    return TokenLoss(loss_T, {"policy": loss_T}, sequence_metrics=metrics)
