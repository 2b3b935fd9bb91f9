r"""PAPO: perception-aware policy optimization (arXiv:2507.06448).

GRPO, or DAPO, and two terms that make the answer depend on the image. ``p`` is the policy given the prompt, ``p'`` the
policy given the same prompt with its images masked: black squares of ``mask_patch`` pixels, each with probability
``mask_ratio``. For each token of a completion,

    r    = p'(y_t) / p(y_t)
    KL_t = r - log r - 1
    L_it = L_it of GRPO - gamma KL_t - eta1 log p(y_t) - eta2 log p'(y_t)

The second term, maximised, is the implicit perception loss: an estimate of ``KL(p || p')``, with the gradient of both
policies. Nothing bounds it, and the two last terms, the double entropy loss, hold it back: ``-log p(y_t)`` estimates
the entropies, which are minimised. The defaults of ``gamma`` and both ``eta`` are the paper's for training without a
reference policy, with DAPO and with GRPO alike; with ``kl.coef: 0.01`` it has ``gamma`` 0.02, and ``eta`` 0.05 at 7B
and 0 at 3B.

``variant: dapo`` sets what is not given itself to DAPO's: ``clip_high: 0.28``, ``aggregation: token-mean`` and
``dynamic_sampling``.

Deviations from the paper and its code, and why:

- All completions of a prompt share one masked view, whose seed follows from the run's, the epoch and the prompt: they
  then share it in the packed row too, and a run that goes on has the same masks. The paper's code draws one for each
  completion.
- The three terms are weighed as the policy's, by ``aggregation``, so that ``gamma`` and ``eta`` keep their meaning.
- A prompt without images has no view: its second and fourth terms are 0.
- ``kl.coef`` is 0 by default, as in ``grpo``.
- ``perception_clip`` bounds ``KL_t``, beyond which it has no gradient: 10, as the paper's code has it.
- ``entropy: full`` takes the entropies of the whole distributions instead of the estimates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmrl.interfaces import AggregationMode, Needs, View
from mmrl.ops.image_views import masked_patches
from mmrl.policy_gradient import DualClipOptions, GroupRelative, NotNegative, Positive
from mmrl.types import PackedTokens, TokenLoss
from mmrl_algorithms.grpo import KL

VIEW = "masked"


def masked(image: Any, rng: Any, strength: float, *, ratio: float, patch: int) -> Any:
    """The view of an image."""
    return masked_patches(image, rng, ratio=ratio, patch=patch)


class PAPO(GroupRelative):
    class Config(DualClipOptions, GroupRelative.Config):
        variant: Literal["grpo", "dapo"] = "grpo"
        """The algorithm beneath, whose defaults the options have that are not given."""
        perception_coef: NotNegative = 0.01
        """Weight of the implicit perception loss, gamma."""
        perception_clip: Positive | None = 10.0
        """Bound on a token's implicit perception loss; null is none."""
        entropy_own_coef: NotNegative = 0.03
        """Weight of the entropy given the prompt, which is minimised, eta1."""
        entropy_masked_coef: NotNegative = 0.03
        """Weight of the entropy given the masked view, which is minimised, eta2."""
        entropy: Literal["sampled", "full"] = "sampled"
        """Entropies by the log-probs of what was sampled, or of whole distributions."""
        mask_ratio: Annotated[float, Field(gt=0, le=1)] = 0.6
        """Probability of each square of an image to be black."""
        mask_patch: Annotated[int, Field(ge=1)] = 14
        """Side of a square in pixels of the image as the model sees it."""
        view_gradient: bool = True
        """The terms have a gradient through the policy given the masked view too; false takes that policy as given."""
        aggregation: AggregationMode = "seq-mean-token-mean"
        """The average over per-token losses."""
        kl: KL = KL()
        """The penalty for leaving the initial policy."""

        @model_validator(mode="before")
        @classmethod
        def _fill(cls, options: Any) -> Any:
            if not isinstance(options, dict) or options.get("variant") != "dapo":
                return options
            return {"clip_high": 0.28, "aggregation": "token-mean", "dynamic_sampling": {}, **options}

    config: Config

    def needs(self) -> Needs:
        config, needs = self.config, super().needs()
        change = partial(masked, ratio=config.mask_ratio, patch=config.mask_patch)
        weighs_full = config.entropy == "full" and bool(config.entropy_own_coef or config.entropy_masked_coef)
        return replace(
            needs,
            views=(View(VIEW, change, scored=True, gradient=config.view_gradient),),
            entropy_gradient=needs.entropy_gradient or weighs_full,
        )

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        import torch

        from mmrl.ops.kl import kl_per_token

        config, result, view = self.config, super().loss(tokens), tokens.views[VIEW]
        zeros_T = torch.zeros_like(tokens.logprobs_T)
        kl_T = torch.where(view.present_T, kl_per_token("k3", tokens.logprobs_T, view.logprobs_T), zeros_T)
        if config.perception_clip is not None:
            kl_T = kl_T.clamp(max=config.perception_clip)
        own_T, masked_T = -tokens.logprobs_T, -view.logprobs_T
        if config.entropy == "full":
            own_T, masked_T = tokens.entropy_T, view.entropy_T
        masked_T = torch.where(view.present_T, masked_T, zeros_T)
        terms = {
            "perception": -config.perception_coef * kl_T,
            "entropy_own": config.entropy_own_coef * own_T,
            "entropy_masked": config.entropy_masked_coef * masked_T,
        }
        metrics = {"perception/kl": kl_T, "perception/masked_entropy": masked_T}
        return TokenLoss(
            result.loss_T + terms["perception"] + terms["entropy_own"] + terms["entropy_masked"],
            {**result.terms, **terms},
            {**result.metrics, **metrics},
        )
