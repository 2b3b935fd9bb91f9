r"""GRPO with process supervision (arXiv:2402.03300, section 4.1.3).

For each prompt, ``G`` completions whose steps ``j`` have rewards ``r_ij``, at the last token of each step:

    z_ij = (r_ij - mean(r)) / (std(r) + eps)     over all steps of all completions of the prompt
    A_it = sum of z_ij over the steps that end at token t or later
    L_it = max(-A_it rho, -A_it clip(rho, 1 - clip_low, 1 + clip_high)) + beta KL_t(pi || pi_ref)
    L    = 1/G sum_i 1/|y_i| sum_t L_it

Steps are what rewards answer with ``Spans``, such as ``process``. ``outcome`` names rewards of the whole completion,
such as ``exact``, whose sum is one more step that ends with the last token.

Deviations from the paper, and why:

- ``std`` is the sample's. Steps of a prompt that are all equal have ``z`` exactly 0.
- Two steps that end with the same token are one, whose reward is their sum. A step whose reward is 0 is none: the value
  of a token does not tell the two apart.
- ``kl.coef`` is 0 by default (the paper has 0.04), and then no reference policy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from mmrl.interfaces import Needs, RunFacts
from mmrl.ops.credit import group_advantages, reward_to_go, valid_masks
from mmrl.types import Batch, Credit, FloatArray
from mmrl_methods.grpo import GRPO
from mmrl_methods.token_credit import check_outcome, rewards_of_tokens


class GRPOProcess(GRPO):
    class Config(GRPO.Config):
        outcome: tuple[str, ...] = Field(default=(), strict=False)
        """Components that are rewards of the whole completion, each times its weight: one step more, at its end."""

    config: Config

    def needs(self) -> Needs:
        return replace(super().needs(), token_rewards=True)

    def check(self, run: RunFacts) -> Sequence[str]:
        check_outcome(self.config.outcome, run.rewards)
        return super().check(run)

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        masks = valid_masks(batch)
        steps = rewards_of_tokens(batch, self.config.outcome, masks)
        places = [np.flatnonzero(steps_T) for steps_T in steps]
        counts = [len(each) for each in places]
        rewards_N = np.concatenate([np.zeros(0), *(steps_T[at] for steps_T, at in zip(steps, places, strict=True))])
        valid_N, groups_N = np.repeat(batch.valid, counts), np.repeat(batch.group_ids, counts)
        relative_N = group_advantages(rewards_N, groups_N, valid_N, **self.config.std)
        relative: list[FloatArray] = [np.zeros(len(mask)) for mask in masks]
        rows = zip(relative, places, np.split(relative_N, np.cumsum(counts)[:-1]), strict=True)
        for relative_T, at, values in rows:
            relative_T[at] = values
        if kl is not None:
            relative = [relative_T - kl_T for relative_T, kl_T in zip(relative, kl, strict=True)]
        steps_mean = float(np.array(counts)[batch.valid].mean()) if batch.valid.any() else 0.0
        return Credit(reward_to_go(relative, masks), metrics={"reward/steps_mean": steps_mean})
