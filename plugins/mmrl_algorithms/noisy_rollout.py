r"""NoisyRollout: a part of each group is sampled from noised images (arXiv:2504.13055).

A share of the ``G`` completions of a prompt, ``noisy_share``, is sampled given its images with noise, the others given
the images themselves. Both are rewarded and compared as one group, and learned as completions of the images themselves:

    A_i  = (R_i - mean(R)) / (std(R) + eps)                over all G
    rho  = pi(y_t | clean) / pi_old(y_t | clean)           for those that were sampled given noise too
    L_it = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high))
    L    = 1/G sum_i 1/|y_i| sum_t L_it,  no KL

The noise is that of a diffusion's forward process (``mmrl.ops.image_views.diffused``) after ``a_t`` of its 1,000 steps,
which a sigmoid brings down over the run's steps ``t`` of ``T``:

    a_t = a_0 (1 - 1 / (1 + exp(-decay_coef (t - mid) / T)))

``a_0`` is ``noise_step``, 500 as for Geometry3K, ``decay_coef`` 30, and ``mid`` step 40 of 60: here two thirds of the
run's steps unless ``decay_mid_step`` names one.

Deviations from the paper and its code, and why:

- ``sampler.group_size`` is the number of all completions of a prompt; the paper's code has it for each of the halves.
- All noisy completions of a prompt see the same noise, whose seed follows from the run's, the epoch and the prompt, so
  that a run that goes on has the same.
- ``correction``, which compares sampler and learner, leaves completions alone that were sampled given noise: what the
  sampler says of those is about other images.
- The vision tower is trained unless ``model.freeze`` names it; the paper's runs freeze it.
- A prompt without images has a group of completions that are all its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from mmrl.interfaces import AggregationMode, Needs, View
from mmrl.ops.image_views import diffused
from mmrl.policy_gradient import DualClipOptions, GroupRelative, Positive
from mmrl.types import PackedTokens, TokenLoss

VIEW = "noised"
MID = 2 / 3
"""The middle of the decay, in the run's steps, unless one is named."""


def noised(image: Any, rng: Any, strength: float) -> Any:
    """The view of an image, after so many steps of diffusion."""
    return diffused(image, rng, int(strength))


class NoisyRollout(GroupRelative):
    class Config(DualClipOptions, GroupRelative.Config):
        noisy_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
        """Share of a prompt's completions that are sampled given noised images."""
        noise_step: Annotated[int, Field(ge=0, lt=1000)] = 500
        """Diffusion steps at the start, a_0."""
        decay: Literal["sigmoid", "linear", "none"] = "sigmoid"
        """The way in which the noise becomes less; linear ends at none."""
        decay_coef: Positive = 30.0
        """Steepness of the sigmoid."""
        decay_mid_step: Annotated[float, Field(gt=0)] | None = None
        """Step in which the sigmoid has halved the noise; null is two thirds of the run's."""
        aggregation: AggregationMode = "seq-mean-token-mean"
        """The average over per-token losses."""

    config: Config

    def needs(self) -> Needs:
        view = View(VIEW, noised, sampled=self.config.noisy_share, strength=self.strength)
        return replace(super().needs(), views=(view,))

    def strength(self, step: int, steps: int) -> float:
        """Diffusion steps in a step of the run, a_t."""
        config = self.config
        if config.decay == "none":
            return float(config.noise_step)
        if config.decay == "linear":
            return config.noise_step * (1 - step / steps)
        mid = MID * steps if config.decay_mid_step is None else config.decay_mid_step
        exponent = min(max(config.decay_coef * (step - mid) / steps, -700.0), 700.0)
        return config.noise_step / (1 + math.exp(exponent))

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
