r"""KTO: Kahneman-Tversky optimization of completions that are desirable or not, without pairs (arXiv:2402.01306).

With the log-ratio ``x = sum_t (log pi(y_t) - log pi_ref(y_t))`` of a completion and the logistic function ``s``, its
loss is

    lam_d (1 - s(beta (x - z0)))    desirable
    lam_u (1 - s(beta (z0 - x)))    others

and the step's is the mean over completions. ``z0 = max(0, mean of x')`` estimates the KL from the reference, over the
log-ratios ``x'`` of each prompt with another row's completion, the next one whose prompt and completion both differ. It
has no gradient, and is 0 where no row has such a one.

A completion is desirable if its score is above 0: the dataset's label, 1 or 0. Both members of a pair count, each by
itself. With ``n_d`` and ``n_u`` of each kind, the paper has ``lam_d n_d / (lam_u n_u)`` between 1 and 4/3.

``z0`` is a mean over the optimizer step, computed before it: several updates on a batch are refused.

Where implementations disagree: TRL's z0 is a mean of the means of each device, here it is one over all ranks. A prompt
that stands in two rows is never matched with its own completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig, RunFacts
from mmrl.ops.credit import mismatched_kl
from mmrl.ops.pairs import side_metrics
from mmrl.policy_gradient import Positive
from mmrl.types import Batch, Credit, PackedTokens, Prompt, TokenLoss

if TYPE_CHECKING:
    import torch


class KTO(Algorithm):
    source = "comparisons"

    class Config(PluginConfig):
        beta: Positive = 0.1
        """Weight of the log-ratio: the greater, the nearer the policy stays to the reference."""
        lam_d: Positive = 1.0
        """Weight of desirable completions."""
        lam_u: Positive = 1.0
        """Weight of the others."""

    config: Config

    def needs(self) -> Needs:
        return Needs(reference_logprobs=True, mismatched=True)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("seq-mean-token-mean")

    def check(self, run: RunFacts) -> Sequence[str]:
        if run.updates_per_batch > 1:
            what = f"{run.updates_per_batch} updates per batch, and z0 is a mean over the optimizer step"
            raise ValueError(f"{what}; set learner.minibatches: 1 and learner.epochs: 1")
        return ()

    def check_rows(self, rows: Iterable[Prompt]) -> Sequence[str]:
        known = set[bool]()
        for row in rows:
            known |= {(candidate.score or 0.0) > 0 for candidate in row.candidates}
            if len(known) > 1:
                return ()
        kind = "desirable (its score is above 0)" if True in known else "undesirable (its score is 0 or less)"
        what = f"every completion is {kind}, and the loss compares both kinds"
        raise ValueError(f"{what}; name the column of verdicts (data.train.desirable), or add rows of the other kind")

    def credit(self, batch: Batch) -> Credit:
        """1 for what is desirable and -1 for the rest; ``z0`` for the loss, and the share of the former for metrics."""
        in_loss_B = batch.valid & np.array([mask.any() for mask in batch.masks], bool)
        signs_B = np.where(np.where(batch.valid, batch.rewards, 0.0) > 0, 1.0, -1.0)
        z0 = max(0.0, mismatched_kl(batch, in_loss_B))
        desirable = float((signs_B[in_loss_B] > 0).mean()) if in_loss_B.any() else 0.0
        metrics = {"preference/z0": z0, "preference/desirable_fraction": desirable}
        return Credit(
            np.where(batch.valid, signs_B, 0.0), metrics=metrics, constants={"z0": z0, "desirable": desirable}
        )

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl_algorithms.preference import kto

        config, desirable_N = self.config, tokens.score_N > 0
        ratios_N = tokens.sequence_sum(tokens.log_ratio_T)
        weights = {"beta": config.beta, "lam_d": config.lam_d, "lam_u": config.lam_u}
        loss_T = kto(ratios_N, desirable_N, tokens.constants["z0"], **weights)[tokens.sequence_T]
        rewards_N = config.beta * ratios_N
        metrics = {
            "preference/margin": _shares(rewards_N.detach(), desirable_N, tokens.constants["desirable"]),
            **side_metrics(tokens, rewards_N, desirable_N, ~desirable_N),
        }
        return TokenLoss(loss_T, {"preference": loss_T}, sequence_metrics=metrics)


def _shares(rewards_N: torch.Tensor, desirable_N: torch.Tensor, share: float) -> torch.Tensor:
    """(N,) values whose mean over a step is the mean reward of desirable completions less that of the others.

    Args:
        share: Share of the step's completions that are desirable; all are NaN where that is all or none.
    """
    if not 0 < share < 1:
        return rewards_N.new_full(rewards_N.shape, float("nan"))
    return (rewards_N / share).where(desirable_N, -rewards_N / (1 - share))
