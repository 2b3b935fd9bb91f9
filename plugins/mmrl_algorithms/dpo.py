r"""DPO: direct preference optimization (arXiv:2305.18290), and its relatives that differ in the loss of a pair.

With the log-ratio ``x = sum_t (log pi(y_t) - log pi_ref(y_t))`` of a completion, ``h = x_c - x_j`` of a chosen and a
rejected one, and the logistic function ``s``, a pair's loss is, by ``variant``,

    sigmoid   -log s(beta h)
    cdpo      -(1 - e) log s(beta h) - e log s(-beta h)                  conservative DPO, e = label_smoothing
    robust    (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2e)     arXiv:2403.00409
    ipo       (h' - 1/(2 tau))^2, h' of means over tokens                arXiv:2310.12036
    ipo_sum   (h - 1/(2 tau))^2
    hinge     max(0, 1 - beta h)                                         arXiv:2309.06657
    dpop      -log s(beta (h - lam max(0, -x_c)))                        arXiv:2402.13228
    odpo      -log s(beta h - alpha log(score_c - score_j))              arXiv:2402.10571

and the step's is the mean over pairs. ``nll: c`` adds ``c`` times the chosen's mean negative log-prob per token
(arXiv:2404.19733), which holds up the chosen's log-prob where both fall.

``data: given`` compares the dataset's candidates by their scores: chosen 1 and rejected 0, or any numbers. ``data:
sampled`` compares completions of the policy by their rewards (online DPO, arXiv:2402.04792). Of a group of more than
two the best and the worst are the pair, the first of ties. A group without an order is left out, and counted:
``preference/ties``.

Where implementations disagree:

- The loss of IPO is of means over tokens in TRL, which its authors confirm, and of sums in the paper and in OpenRLHF.
  ``ipo`` and ``ipo_sum`` are both; with sums, one ``tau`` asks less of each token of longer completions.
- Label smoothing is of cDPO and of robust DPO alone. ``label_smoothing`` with another variant is refused.
- Rewards in metrics are ``beta x`` of whole completions for each variant, DPO's implicit reward up to a constant.
- At the first step policy and reference are equal, and the loss of ``sigmoid`` is log 2 whatever the code does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from mmrl.ops.pairs import PairAlgorithm, Pairs
from mmrl.policy_gradient import NotNegative, Positive

if TYPE_CHECKING:
    import torch

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "label_smoothing": ("cdpo", "robust"),
    "tau": ("ipo", "ipo_sum"),
    "alpha": ("odpo",),
    "lam": ("dpop",),
}
"""The variants that have an option."""


class DPO(PairAlgorithm):
    class Config(PairAlgorithm.Config):
        variant: Literal["sigmoid", "cdpo", "robust", "ipo", "ipo_sum", "hinge", "dpop", "odpo"] = "sigmoid"
        """The loss of a pair."""
        beta: Positive = 0.1
        """Weight of the log-ratio: the greater, the nearer the policy stays to the reference. `ipo` and `ipo_sum` have
        `tau` for it, and `beta` in their metrics alone."""
        label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
        """Share of pairs whose order is wrong, of `cdpo` and `robust`."""
        tau: Positive = 0.1
        """Weight of the log-ratio of `ipo` and `ipo_sum`, whose margin is driven to `1 / (2 tau)`."""
        alpha: Positive = 1.0
        """Weight of the logarithm of the difference of scores of `odpo`."""
        lam: NotNegative = 50.0
        """Weight of the fall of the chosen's log-ratio below 0 of `dpop`."""
        nll: NotNegative = 0.0
        """Weight of the chosen's mean negative log-prob, which is added."""

        @model_validator(mode="after")
        def _check(self) -> DPO.Config:
            for option, variants in VARIANTS.items():
                default = type(self).model_fields[option].default
                if self.variant not in variants and getattr(self, option) != default:
                    raise ValueError(f"{option} goes with variant {' or '.join(variants)}, not with {self.variant}")
            return self

    config: Config

    def losses(self, pairs: Pairs) -> Mapping[str, torch.Tensor]:
        losses = {"preference": self._preference(pairs)}
        if self.config.nll:
            losses["nll"] = -self.config.nll * pairs.mean_logprobs_N[pairs.chosen_M]
        return losses

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.config.beta * pairs.log_ratios_N

    def _preference(self, pairs: Pairs) -> torch.Tensor:
        from mmrl_algorithms import preference

        config, beta = self.config, self.config.beta
        margins_M = pairs.margins(pairs.log_ratios_N)
        match config.variant:
            case "sigmoid":
                return preference.dpo(margins_M, beta=beta)
            case "cdpo":
                return preference.cdpo(margins_M, beta=beta, label_smoothing=config.label_smoothing)
            case "robust":
                return preference.robust_dpo(margins_M, beta=beta, label_smoothing=config.label_smoothing)
            case "ipo":
                return preference.ipo(pairs.margins(pairs.mean_log_ratios_N), tau=config.tau)
            case "ipo_sum":
                return preference.ipo(margins_M, tau=config.tau)
            case "hinge":
                return preference.hinge(margins_M, beta=beta)
            case "dpop":
                chosen_M = pairs.log_ratios_N[pairs.chosen_M]
                return preference.dpop(margins_M, chosen_M, beta=beta, lam=config.lam)
            case "odpo":
                return preference.odpo(margins_M, pairs.score_differences_M, beta=beta, alpha=config.alpha)
