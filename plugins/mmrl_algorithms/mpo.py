r"""MPO: mixed preference optimization of multimodal models (arXiv:2411.10442).

The order of two completions, the quality of each, and how to write the better one are learned in one loss. With the
log-ratio ``x = sum_t (log pi(y_t) - log pi_ref(y_t))`` of a completion, the mean log-prob ``m`` of its tokens and the
logistic function ``s``, a pair's loss is

    L = dpo L_dpo + bco L_bco + nll L_nll
    L_dpo = -log s(beta (x_c - x_j))
    L_bco = -log s(beta x_c - d) - log s(d - beta x_j)      arXiv:2404.04656
    L_nll = -m_c

and the step's is the mean over pairs. ``d`` is the mean of the rewards ``beta x`` of both members of all pairs of
earlier steps, 0 at the first one, where they are 0. It is the algorithm's state: a run that goes on has it. A step has
one ``d``: several updates on a batch are refused.

``data`` is as in ``dpo``. Where implementations disagree: TRL and the authors' code count the rewards of the step
itself in ``d``, which a run knows before its update only at the price of one more forward pass; the paper says earlier
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.interfaces import RunFacts
from mmrl.ops.pairs import PairAlgorithm, Pairs
from mmrl.policy_gradient import NotNegative, Positive
from mmrl.types import Batch, Credit

if TYPE_CHECKING:
    import torch


class MPO(PairAlgorithm):
    class Config(PairAlgorithm.Config):
        beta: Positive = 0.1
        """Weight of the log-ratio: the greater, the nearer the policy stays to the reference."""
        dpo: NotNegative = 0.8
        """Weight of the loss of preference."""
        bco: NotNegative = 0.2
        """Weight of the loss of quality."""
        nll: NotNegative = 1.0
        """Weight of the chosen's mean negative log-prob."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._mean, self._pairs, self._pairs_of_step = 0.0, 0, 0

    def check(self, run: RunFacts) -> Sequence[str]:
        if run.updates_per_batch > 1:
            what = f"{run.updates_per_batch} updates per batch, and the shift of rewards is one of an optimizer step"
            raise ValueError(f"{what}; set learner.minibatches: 1 and learner.epochs: 1")
        return super().check(run)

    def credit(self, batch: Batch) -> Credit:
        credit = super().credit(batch)
        self._pairs_of_step = int(np.count_nonzero(credit.advantages)) // 2
        metrics = {**credit.metrics, "preference/reward_shift": self._mean}
        return replace(credit, metrics=metrics, constants={"shift": self._mean})

    def losses(self, pairs: Pairs) -> Mapping[str, torch.Tensor]:
        from mmrl_algorithms.preference import bco, dpo

        config, ratios_N, shift = self.config, pairs.log_ratios_N, pairs.tokens.constants["shift"]
        chosen_M, rejected_M = ratios_N[pairs.chosen_M], ratios_N[pairs.rejected_M]
        return {
            "preference": config.dpo * dpo(chosen_M - rejected_M, beta=config.beta),
            "quality": config.bco * bco(chosen_M, rejected_M, shift, beta=config.beta),
            "nll": -config.nll * pairs.mean_logprobs_N[pairs.chosen_M],
        }

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.config.beta * pairs.log_ratios_N

    def observe(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Counts the step's rewards in the mean; a step without an update has none."""
        sides = [metrics.get(f"preference/reward_{side}") for side in ("chosen", "rejected")]
        known = [each for each in sides if each is not None and np.isfinite(each)]
        if len(known) == len(sides) and self._pairs_of_step:
            self._pairs += self._pairs_of_step
            self._mean += (sum(known) / 2 - self._mean) * self._pairs_of_step / self._pairs
        return {}

    def state(self) -> Mapping[str, Any]:
        return {"mean": self._mean, "pairs": self._pairs} if self._pairs else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._mean, self._pairs = float(state["mean"]), int(state["pairs"])
