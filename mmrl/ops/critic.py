"""The loss of a critic: squared errors of its values, per token, minimised, unreduced."""

from __future__ import annotations

import torch

from mmrl.types import PackedTokens, TokenLoss

CLIP_FRACTION = "critic/clip_fraction"
"""The share of tokens whose gradient the clip takes away."""


def clipped_value_loss(tokens: PackedTokens, *, clip: float | None = None) -> TokenLoss:
    """``0.5 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2)`` of values ``V`` and returns ``G``.

    A value that has left the band around the one before the step learns only if it is further from the return than the
    edge of the band. A ``clip`` of None clips nothing.
    """
    assert tokens.values_T is not None, "these are no critic's rows"
    assert tokens.old_values_T is not None
    assert tokens.returns_T is not None
    plain_T = (tokens.values_T - tokens.returns_T) ** 2
    if clip is None:
        return TokenLoss(0.5 * plain_T, metrics={CLIP_FRACTION: torch.zeros_like(plain_T)})
    change_T = tokens.values_T - tokens.old_values_T
    edge_T = tokens.old_values_T + change_T.detach().clamp(-clip, clip)
    edge_T = (edge_T - tokens.returns_T) ** 2
    is_clipped_T = (change_T.abs() > clip) & (edge_T > plain_T)  # within the band both are equal but for rounding
    return TokenLoss(
        0.5 * torch.where(is_clipped_T, edge_T, plain_T), metrics={CLIP_FRACTION: is_clipped_T.to(plain_T.dtype)}
    )
