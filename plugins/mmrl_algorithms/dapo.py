r"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv:2503.14476).

GRPO with four changes:

1. Clip-higher: ``clip(rho, 1 - 0.2, 1 + 0.28)``, which leaves unlikely tokens room to grow.
2. Dynamic sampling: a group enters the batch only if its completions are not all equally right; another prompt takes
   its place (``dynamic_sampling``).
3. Token-level loss: ``L = 1/sum_i |y_i| sum_i sum_t L_it``, so that long completions weigh by their length.
4. Overlong reward shaping: the reward ``overlong``, to be listed among ``rewards``; it is not part of the algorithm.

    A_i  = (R_i - mean(R)) / (std(R) + eps)
    L_it = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high)),  no KL

Deviations from the paper, and why:

- Its equation averages tokens within each prompt and then prompts; its code, and this default, average over all tokens
  of the optimizer batch. ``aggregation: prompt-mean-token-mean`` is the equation.
- A group is judged by the range of its raw accuracy, not by ``0 < number right < G``: that also works for rewards that
  are not 0 or 1.
- One prompt replaces each rejected group, in rounds, instead of whole further batches. When the rounds are used up the
  smaller batch is trained on.
"""

from __future__ import annotations

from mmrl.policy_gradient import DualClipOptions, DynamicSamplingOptions, GroupRelative, Positive
from mmrl.types import PackedTokens, TokenLoss


class DAPO(GroupRelative):
    class Config(DualClipOptions, GroupRelative.Config):
        clip_high: Positive = 0.28
        """The ratio is clipped above `1 + clip_high`."""
        dynamic_sampling: DynamicSamplingOptions | None = DynamicSamplingOptions()
        """Replace groups without a signal; null trains on all sampled groups."""

    config: Config

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
