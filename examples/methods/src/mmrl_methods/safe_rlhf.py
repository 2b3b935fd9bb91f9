r"""Safe RLHF: a reward under a constraint on a cost, whose multiplier is learned (arXiv:2310.12773, section 3.3).

The cost ``C`` is a component of its own, above 0 where a completion does harm. The policy maximises the reward ``R``
while the mean cost is at most the threshold ``d``:

    max_pi min_{lambda >= 0}  J_R - lambda (J_C - d)

    A          = (A_R - lambda A_C) / (1 + lambda)
    log lambda = log lambda + lambda_lr lambda (mean(C) - d),  at most log(lambda_max)

with the clipped surrogate of PPO. The mean is over the costs of the last ``window`` completions. The division by
``1 + lambda`` keeps the size of a step when lambda grows.

    rewards:
      - {name: exact}
      - {name: costs.py:harm, label: cost, weight: 0}
    algorithm: {name: safe_rlhf, cost: cost, threshold: 0.1}

The cost is in no sum: a weight that it has is taken out again. The step of lambda and the default options are those of
ports and notes of the authors' code, which was not read itself: ``lambda_init`` 1, ``lambda_lr`` 0.1, ``lambda_max`` 5,
``window`` 128, ``kl`` 0.01. There the penalty for leaving the initial policy is taken off the reward and added to the
cost, which after the division is the frame's KL in the reward.

Deviations from the paper, and why:

- ``A_R`` and ``A_C`` are rewards and costs less the mean of the group, and come from no critics: a run has one. They
  are not divided by a deviation, which would cancel ``1 + lambda``.
- Lambda moves at a step's end, after its costs; in those ports it moves before the update of the same step.
- Rows that no cost scores (``rewards[].sources``) have cost 0 in the advantage, and are not in the mean.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from mmrl.interfaces import RunFacts
from mmrl.ops.credit import group_advantages, less_sequence_kl
from mmrl.policy_gradient import ClipOptions, KLOptions, NotNegative, PolicyGradient, Positive
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss

_TO_LAMBDA = "safe_rlhf/cost_mean"


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy."""

    coef: NotNegative = 0.01
    """Its weight, beta; 0 loads no reference policy."""
    where: Literal["loss", "reward"] = "reward"
    """Added to each token's loss, or subtracted from the reward, token by token, before advantages."""


class SafeRLHF(PolicyGradient):
    min_group_size = 2

    class Config(ClipOptions, PolicyGradient.Config):
        kl: KL = KL()
        """The penalty for leaving the initial policy."""
        cost: str = "cost"
        """The component that is the cost, above the threshold where a completion does harm."""
        threshold: float = 0.0
        """The mean cost that the policy may have, d."""
        lambda_init: Positive = 1.0
        """The multiplier of the first step."""
        lambda_lr: Positive = 0.1
        """Step size of its logarithm."""
        lambda_max: Positive = 5.0
        """The largest multiplier."""
        window: Annotated[int, Field(ge=1)] = 128
        """Completions whose mean cost moves the multiplier: the newest ones."""
        delay_steps: Annotated[int, Field(ge=0)] = 0
        """Steps before the multiplier moves."""

        @model_validator(mode="after")
        def _keeps_the_cost_apart(self) -> SafeRLHF.Config:
            if self.reward_norm != "none" or self.reward_clip is not None:
                raise ValueError("reward_norm and reward_clip shape the sum of rewards, in which the cost must not be")
            if self.lambda_init > self.lambda_max:
                raise ValueError(f"lambda_init is {self.lambda_init}, above lambda_max, {self.lambda_max}")
            return self

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._log_lambda = math.log(config.lambda_init)
        self._costs = deque[float](maxlen=config.window)
        self._steps = 0

    def check(self, run: RunFacts) -> Sequence[str]:
        if not run.has_component(self.config.cost):
            raise ValueError(f"cost is {self.config.cost!r}, and the rewards are {', '.join(run.rewards)}")
        if self.config.cost == run.accuracy:
            raise ValueError(f"the cost {self.config.cost!r} is the accuracy too; set trainer.eval_metric to a reward")
        return super().check(run)

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        costs_B = batch.component(self.config.cost)
        has_cost_B = batch.valid & ~np.isnan(costs_B)
        costs_B = np.where(has_cost_B, costs_B, 0.0)
        self._costs.extend(costs_B[has_cost_B].tolist())
        multiplier = math.exp(self._log_lambda)
        rewards_B = rewards - batch.weights.get(self.config.cost, 0.0) * costs_B
        combined_B = less_sequence_kl((rewards_B - multiplier * costs_B) / (1 + multiplier), kl)
        advantages_B = group_advantages(combined_B, batch.group_ids, batch.valid, scale="none")
        metrics = {"safe_rlhf/lambda": multiplier}
        if has_cost_B.any():
            metrics[_TO_LAMBDA] = float(costs_B[has_cost_B].mean())
        return Credit(advantages_B, metrics=metrics)

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)

    def observe(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Moves lambda by the mean of the newest costs."""
        self._steps += 1
        if self._costs and self._steps > self.config.delay_steps:
            excess = sum(self._costs) / len(self._costs) - self.config.threshold
            moved = self._log_lambda + self.config.lambda_lr * math.exp(self._log_lambda) * excess
            self._log_lambda = min(moved, math.log(self.config.lambda_max))
        return super().observe(metrics)

    def state(self) -> Mapping[str, object]:
        own = {"log_lambda": self._log_lambda, "costs": list(self._costs), "steps": self._steps}
        return {**super().state(), **own}

    def restore(self, state: Mapping[str, object]) -> None:
        if "kl_coef" in state:
            super().restore(state)
        self._log_lambda, self._steps = state["log_lambda"], state["steps"]  # type: ignore[assignment]
        self._costs = deque(state["costs"], maxlen=self.config.window)  # type: ignore[call-overload]
