"""Rollout correction: weights for tokens whose sampling distribution is not the one that is trained.

The sampler's log-probs differ from the learner's (precision, kernels, stale weights); ``q = l_old - l_sampler`` tells
by how much. The weights are detached and multiply the loss of a token; its denominators stay those of the masks.
"""

from __future__ import annotations

import torch

from mmrl.interfaces import CORRECTION_BOUNDS, CorrectionMode
from mmrl.ops.surrogate import MAX_LOG_RATIO
from mmrl.types import PackedTokens


def correction_weights(
    tokens: PackedTokens, mode: CorrectionMode, *, low: float | None = None, high: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) weights, and (T,) the same weights without bounds.

    ``token-*`` weighs each token by ``exp(q_t)``, ``seq-*`` all tokens of a sequence by ``exp(sum_t q_t)``,
    ``seq-geo-*`` by ``exp(mean_t q_t)``. Then ``truncate`` bounds the weight (TIS), ``mask`` makes it 0 outside the
    bounds (IcePop), ``reject`` makes it 0 outside and 1 inside.

    Args:
        low: Lower bound, by default the mode's of ``CORRECTION_BOUNDS``.
        high: Upper bound, likewise.
    """
    scope, _, rule = mode.rpartition("-")
    default_low, default_high = CORRECTION_BOUNDS[mode]
    low, high = default_low if low is None else low, default_high if high is None else high
    log_T = (tokens.old_logprobs_T - tokens.sampler_logprobs_T).detach()
    if scope != "token":
        over_sequence = tokens.sequence_sum if scope == "seq" else tokens.sequence_mean
        log_T = over_sequence(log_T)[tokens.sequence_T]
    raw_T = log_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if rule == "truncate":
        return raw_T.clamp(low, high), raw_T
    inside_T = (raw_T >= (0.0 if low is None else low)) & (raw_T <= high)
    return torch.where(inside_T, torch.ones_like(raw_T) if rule == "reject" else raw_T, torch.zeros_like(raw_T)), raw_T


def correction_metrics(tokens: PackedTokens, weight_T: torch.Tensor, raw_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-token metrics of the weights.

    - ``correction/weight_mean``, ``correction/weight_square_mean``: of the weights ``w`` and of ``w^2``.
    - ``correction/changed_fraction``: tokens whose weight is not the plain one; nearly all with ``reject``, which
      weighs by 0 or 1.
    - ``correction/kl_k1``, ``correction/kl_k3``: estimates of KL(sampler || old): ``-q``, ``exp(q) - 1 - q``.
    """
    log_T = (tokens.old_logprobs_T - tokens.sampler_logprobs_T).detach()
    return {
        "correction/weight_mean": weight_T,
        "correction/weight_square_mean": weight_T.square(),
        "correction/changed_fraction": (weight_T != raw_T).to(weight_T),
        "correction/kl_k1": -log_T,
        "correction/kl_k3": log_T.clamp(max=MAX_LOG_RATIO).exp() - 1 - log_T,
    }
