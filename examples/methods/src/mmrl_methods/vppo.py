r"""VPPO: visually-perceptive policy optimization (arXiv:2510.09285).

GRPO that learns at the tokens for which the picture matters, and more from completions that depend on it. ``p`` is
the policy given the prompt, ``p'`` the policy given the same prompt with black squares in its images. A token's
dependency on the picture, and a completion's, are

    S_it = min(p'(y_t)/p(y_t) - log(p'(y_t)/p(y_t)) - 1, 10)        S_i = mean over t of S_it

    m_it = 1 for the ``share`` of a completion's tokens with the largest S_it, else 0
    w_i  = scale_min + (1 - scale_min) S_i / mean(S)
    L_it = m_it max(-w_i A_i rho, -w_i A_i clip(rho, 1 - clip_low, 1 + clip_high)) - ...

``ceil(share n)`` of ``n`` tokens count. ``share`` 0.4, ``scale_min`` 0.9 and the squares of 14 pixels with probability
0.5 are those of the authors' runs with 7B; their penalty of the entropy there, 0.06, is not built in.

Deviations from the paper and its code, and why:

- ``mean(S)`` is that of the step before: a step's own is known when its loss has been computed. In the first step
  ``w`` is 1. The authors' code subtracts the batch's least ``S_i`` from both ``S_i`` and the mean; here that is taken
  as 0. Both weights have mean 1 where ``mean(S)`` stays.
- ``S`` is that of the policy as it learns; with several optimizer steps a batch the authors have that of before the
  step.
- All completions of a prompt share one view, whose seed follows from the run's, the epoch and the prompt.
- A prompt without images has no view: all of its tokens count, with ``w`` 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from mmrl.interfaces import AggregationMode, Needs, View
from mmrl.ops.image_views import masked_patches
from mmrl.policy_gradient import DualClipOptions, GroupRelative, Positive
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss

if TYPE_CHECKING:
    import torch

VIEW = "masked"
MAX_DEPENDENCY = 10.0
MAX_LOG_RATIO = 20.0


def masked(image: Any, rng: Any, strength: float, *, ratio: float, patch: int) -> Any:
    """The view of an image."""
    return masked_patches(image, rng, ratio=ratio, patch=patch)


class VPPO(GroupRelative):
    class Config(DualClipOptions, GroupRelative.Config):
        share: Annotated[float, Field(gt=0, le=1)] = 0.4
        """Share of a completion's tokens that are learned, those that depend on the image most."""
        scale_min: Annotated[float, Field(ge=0, le=1)] = 0.9
        """Weight of the advantage of a completion that does not depend on the image; 1 weighs all alike."""
        mask_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
        """Probability of each square of an image to be black."""
        mask_patch: Annotated[int, Field(ge=1)] = 14
        """Side of a square in pixels of the image as the model sees it."""
        clip_high: Positive = 0.28
        """The ratio is clipped above `1 + clip_high`."""
        aggregation: AggregationMode = "token-mean"
        """The average over per-token losses."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._dependency = 0.0

    def needs(self) -> Needs:
        change = partial(masked, ratio=self.config.mask_ratio, patch=self.config.mask_patch)
        return replace(super().needs(), views=(View(VIEW, change, scored=True, gradient=False),))

    def credit(self, batch: Batch) -> Credit:
        credit = super().credit(batch)
        return replace(credit, constants={**credit.constants, "dependency": self._dependency})

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        import torch

        from mmrl.ops.surrogate import ppo_clip

        config, view = self.config, tokens.views[VIEW]
        log_ratio_T = (view.logprobs_T - tokens.logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        dependency_T = (log_ratio_T.exp() - log_ratio_T - 1).clamp(max=MAX_DEPENDENCY)
        sequences_N, present_T = tokens.sequence_mean(dependency_T), view.present_T
        scale, weight_T = tokens.constants["dependency"], torch.ones_like(dependency_T)
        if scale > 0:
            shared_T = config.scale_min + (1 - config.scale_min) * sequences_N[tokens.sequence_T] / scale
            weight_T = torch.where(present_T, shared_T, weight_T)
        chosen_T = largest_of_sequences(tokens, dependency_T, config.share) | ~present_T
        result = ppo_clip(replace(tokens, advantages_T=tokens.advantages_T * weight_T), **config.clip)
        loss_T = torch.where(chosen_T, result.loss_T, torch.zeros_like(result.loss_T))
        seen_N = tokens.sequence_sum(present_T.to(loss_T)) > 0
        return TokenLoss(
            loss_T,
            {"policy": loss_T},
            {**result.metrics, "perception/token_fraction": chosen_T.to(loss_T)},
            {"perception/dependency": torch.where(seen_N, sequences_N, torch.full_like(sequences_N, torch.nan))},
        )

    def observe(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        self._dependency = float(metrics.get("perception/dependency", self._dependency))
        return super().observe(metrics)

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "dependency": self._dependency}

    def restore(self, state: Mapping[str, Any]) -> None:
        if "kl_coef" in state:
            super().restore(state)
        self._dependency = float(state["dependency"])


def largest_of_sequences(tokens: PackedTokens, values_T: torch.Tensor, share: float) -> torch.Tensor:
    """(T,) bool, True for the ``ceil(share n)`` largest values of each sequence's ``n`` tokens in the loss; of ties the
    first."""
    import torch

    ordered_T = torch.where(tokens.mask_T, values_T, torch.full_like(values_T, -torch.inf))
    by_value_T = ordered_T.argsort(descending=True, stable=True)
    by_sequence_T = by_value_T[tokens.sequence_T[by_value_T].argsort(stable=True)]
    lengths_N = torch.bincount(tokens.sequence_T, minlength=tokens.num_sequences)
    starts_N = lengths_N.cumsum(0) - lengths_N
    places_T = torch.arange(len(values_T), device=values_T.device) - starts_N[tokens.sequence_T[by_sequence_T]]
    counts_N = (share * tokens.sequence_sum(tokens.mask_T.to(values_T))).sub(1e-6).ceil()
    chosen_T = torch.zeros_like(tokens.mask_T)
    chosen_T[by_sequence_T] = places_T < counts_N[tokens.sequence_T[by_sequence_T]]
    return chosen_T & tokens.mask_T
