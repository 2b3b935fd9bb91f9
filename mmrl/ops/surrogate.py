"""Surrogate losses: per-token, minimised, unreduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class ClippedLoss:
    """A clipped surrogate.

    Attributes:
        loss_T: What is minimised.
        clipped_high_T: 1 where the upper clip removed the gradient (A > 0, ratio > 1 + clip_high).
        clipped_low_T: 1 where the lower clip did (A < 0, ratio < 1 - clip_low).
    """

    loss_T: torch.Tensor
    clipped_high_T: torch.Tensor
    clipped_low_T: torch.Tensor


def importance_ratio(logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor) -> torch.Tensor:
    """(T,) ``pi / pi_old``, the exponent clamped to +-20."""
    return (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedLoss:
    """``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`` (PPO, arXiv:1707.06347 eq. 7).

    With ``dual_clip = c``, the loss of a negative advantage is at most ``-c A`` (arXiv:1912.09729 eq. 5).
    """
    ratio_T = importance_ratio(logprobs_T, old_logprobs_T)
    loss_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, -dual_clip * advantages_T), loss_T)
    high_T = (advantages_T > 0) & (ratio_T > 1 + clip_high)
    low_T = (advantages_T < 0) & (ratio_T < 1 - clip_low)
    return ClippedLoss(loss_T, high_T.to(loss_T.dtype), low_T.to(loss_T.dtype))
