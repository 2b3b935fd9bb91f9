r"""SPIN: self-play fine-tuning (arXiv:2401.01335).

The policy learns to tell the dataset's demonstration from what the policy of the iteration before writes. With the
log-ratio ``x = sum_t (log pi(y_t) - log pi_k(y_t))`` to that policy and the logistic function ``s``, for the
demonstration ``d`` of a prompt and each of its ``G`` sampled completions ``j``,

    L = 1/G sum_j -log s(beta (x_d - x_j))

and the step's loss is the mean over prompts. ``variant: hinge`` is ``max(0, 1 - beta (x_d - x_j))``, which the
authors' code has too. It asks for no reward: those that there are, are metrics.

``pi_k`` is the reference; the paper's iterations are ``reference.reset_every``, and its opponent, which samples, is
the policy itself: between two resets it moves away from the reference, where the paper samples a whole dataset before
each iteration.

Deviations from the paper, and why:

- ``G`` is ``sampler.group_size``; the paper has 1.
- A prompt whose completions were all invalid leaves the loss.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig
from mmrl.policy_gradient import Positive
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss
from mmrl_methods.groups import group_sums, usable_rows


class SPIN(Algorithm):
    class Config(PluginConfig):
        variant: Literal["sigmoid", "hinge"] = "sigmoid"
        """The loss of a demonstration and a sampled completion."""
        beta: Positive = 0.1
        """Weight of the log-ratio: the greater, the nearer the policy stays to the reference."""

    config: Config

    def needs(self) -> Needs:
        return Needs(reference_logprobs=True, rewards=False, whole_groups=True, demonstration=True)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("seq-mean-token-mean")

    def credit(self, batch: Batch) -> Credit:
        """1 for demonstrations and -1 for what was sampled."""
        assert batch.given is not None
        usable_B = usable_rows(batch)
        both = set(batch.group_ids[usable_B & batch.given]) & set(batch.group_ids[usable_B & ~batch.given])
        keep_B = usable_B & np.isin(batch.group_ids, list(both))
        return Credit(np.where(batch.given, 1.0, -1.0) * keep_B, keep=keep_B)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        import torch
        from torch.nn.functional import logsigmoid

        ratios_N, given_N = tokens.sequence_sum(tokens.log_ratio_T), tokens.given_N
        sampled_N = (~given_N).to(ratios_N)
        margins_N = self.config.beta * (group_sums(tokens, ratios_N * given_N) - ratios_N)
        losses_N = -logsigmoid(margins_N) if self.config.variant == "sigmoid" else (1 - margins_N).clamp(min=0)
        counts_N, sampled = group_sums(tokens, torch.ones_like(ratios_N)), group_sums(tokens, sampled_N)
        # The mean over a group's sequences is that over its sampled ones.
        loss_T = (sampled_N * losses_N * counts_N / sampled.clamp(min=1))[tokens.sequence_T]
        of_sampled_N = margins_N.detach().where(~given_N, margins_N.new_tensor(float("nan")))
        metrics = {"preference/margin": of_sampled_N, "preference/accuracy": 0.5 * (1 + of_sampled_N.sign())}
        return TokenLoss(loss_T, {"preference": loss_T}, sequence_metrics=metrics)
