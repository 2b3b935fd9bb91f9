"""Surrogate losses of policy gradients: per token, minimised, unreduced.

With ``l`` the current log-prob of a token, ``d = l - l_old``, ``rho = exp(d)`` and ``A`` its advantage. Exponents are
clamped at +-20. Each function gives a ``TokenLoss`` whose one term is ``policy``, and per-token metrics that say where
a clip took the gradient away:

- ``policy/clip_fraction_high``: the upper clip (A > 0, the ratio above its bound).
- ``policy/clip_fraction_low``: the lower clip (A < 0, the ratio below its bound).
- ``policy/clip_fraction_dual``: the bound on the loss of negative advantages.
"""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.types import PackedTokens, TokenLoss

MAX_LOG_RATIO = 20.0


def reinforce(tokens: PackedTokens) -> TokenLoss:
    """``-A l`` (Williams, 1992); on-policy only, as it has no ratio."""
    return _surrogate(-tokens.advantages_T * tokens.logprobs_T)


def ppo_clip(tokens: PackedTokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> TokenLoss:
    """``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`` (PPO, arXiv:1707.06347 equation 7).

    With ``dual_clip = c``, the loss of a negative advantage is at most ``-c A`` (arXiv:1912.09729 equation 5).
    """
    return _clipped(_log_ratio(tokens).exp(), tokens.advantages_T, clip_low, clip_high, dual_clip)


def sequence_clip(
    tokens: PackedTokens, *, clip_low: float, clip_high: float, over: Literal["mean", "sum"] = "mean"
) -> TokenLoss:
    """``ppo_clip`` with one ratio per sequence, ``exp(mean_t d_t)`` (arXiv:2507.18071).

    The loss of a sequence is put on each of its tokens, to be averaged over sequences.

    Args:
        over: ``sum`` makes it the ratio of the sequences' probabilities.
    """
    log_ratio_T = _log_ratio(tokens)
    log_ratios = tokens.sequence_mean(log_ratio_T) if over == "mean" else tokens.sequence_sum(log_ratio_T)
    return _clipped(_exp(log_ratios)[tokens.sequence_T], tokens.advantages_T, clip_low, clip_high)


def sequence_clip_per_token(tokens: PackedTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``sequence_clip`` in value, with each token's own gradient and advantage (arXiv:2507.18071)."""
    ratios = _exp(tokens.sequence_mean(_log_ratio(tokens))).detach()
    ratio_T = ratios[tokens.sequence_T] * (tokens.logprobs_T - tokens.logprobs_T.detach()).exp()
    return _clipped(ratio_T, tokens.advantages_T, clip_low, clip_high)


def clipped_weight(tokens: PackedTokens, *, ratio_min: float, ratio_max: float) -> TokenLoss:
    """``-sg[clip(rho, ratio_min, ratio_max)] A l`` (arXiv:2506.13585): no token loses its gradient.

    The bounds are absolute. The clip fractions count tokens whose weight was bounded, whatever their advantage.
    """
    ratio_T = _log_ratio(tokens).exp().detach()
    loss_T = -ratio_T.clamp(ratio_min, ratio_max) * tokens.advantages_T * tokens.logprobs_T
    return _surrogate(loss_T, high=ratio_T > ratio_max, low=ratio_T < ratio_min)


def geometric_mean(tokens: PackedTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``-A exp(mean_t c_t)`` with ``c = min(d, clip_high)`` or ``max(d, -clip_low)`` by the sign of ``A``.

    From arXiv:2507.20673: the bounds are log-ratios, and act before the mean. To be averaged over sequences.
    """
    advantages_T, log_ratio_T = tokens.advantages_T, _log_ratio(tokens)
    bounded_T = torch.where(advantages_T >= 0, log_ratio_T.clamp(max=clip_high), log_ratio_T.clamp(min=-clip_low))
    ratios = _exp(tokens.sequence_mean(bounded_T))
    high_T, low_T = (advantages_T > 0) & (log_ratio_T > clip_high), (advantages_T < 0) & (log_ratio_T < -clip_low)
    return _surrogate(-advantages_T * ratios[tokens.sequence_T], high=high_T, low=low_T)


def soft_gate(tokens: PackedTokens, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """``-A (4 / tau) sigmoid(tau (rho - 1))`` with a ``tau`` for each sign of ``A`` (arXiv:2511.20347).

    The gate's slope is 1 at ``rho = 1`` and falls off smoothly on both sides: there is no clip.
    """
    advantages_T = tokens.advantages_T
    tau_T = torch.full_like(advantages_T, tau_negative).masked_fill(advantages_T > 0, tau_positive)
    return _surrogate(-advantages_T * 4 / tau_T * torch.sigmoid(tau_T * (_log_ratio(tokens).exp() - 1)))


def _clipped(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    loss_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high))
    dual_T = None
    if dual_clip is not None:
        dual_T = (advantages_T < 0) & (loss_T > -dual_clip * advantages_T)
        loss_T = torch.where(dual_T, -dual_clip * advantages_T, loss_T)
    high_T = (advantages_T > 0) & (ratio_T > 1 + clip_high)
    low_T = (advantages_T < 0) & (ratio_T < 1 - clip_low)
    return _surrogate(loss_T, high=high_T, low=low_T, dual=dual_T)


def _surrogate(loss_T: torch.Tensor, **clipped: torch.Tensor | None) -> TokenLoss:
    metrics = {f"policy/clip_fraction_{side}": where.to(loss_T) for side, where in clipped.items() if where is not None}
    return TokenLoss(loss_T, {"policy": loss_T}, metrics)


def _log_ratio(tokens: PackedTokens) -> torch.Tensor:
    return (tokens.logprobs_T - tokens.old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _exp(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
