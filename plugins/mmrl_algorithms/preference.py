"""Losses of preferences: pure functions of log-probs, one value per pair or per sequence, minimised, unreduced.

Letters: ``M`` pairs, ``N`` sequences. Of a completion, ``p`` is the sum of its tokens' log-probs under the policy,
``r`` that under the reference, ``n`` its tokens, ``x = p - r`` its log-ratio. With ``c`` the chosen and ``j`` the
rejected one, ``h = x_c - x_j`` is the margin of log-ratios. ``s`` is the logistic function.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HIGHEST_MEAN = -1e-6
"""The highest mean log-prob that ``orpo`` takes the odds of: those of a certain completion are infinite."""


def logsigmoid(values: torch.Tensor) -> torch.Tensor:
    """``log(1 / (1 + exp(-x)))``, stable for any ``x``."""
    from torch.nn.functional import logsigmoid as stable

    return stable(values)


def log1mexp(values: torch.Tensor) -> torch.Tensor:
    """``log(1 - exp(x))`` for ``x < 0``, exact on both sides.

    After Maechler, 2012, "Accurately computing log(1 - exp(-|a|))":
    ``log1p(-exp(x))`` loses all digits as ``x`` goes to 0, and ``log(-expm1(x))`` as it goes to minus infinity.
    """
    import torch

    near = values > -math.log(2)
    # Each side gets values of its own: the branch that is not taken would else have a gradient that is not finite.
    small, large = (
        torch.where(near, values, -torch.ones_like(values)),
        torch.where(near, -torch.ones_like(values), values),
    )
    return torch.where(near, (-small.expm1()).log(), (-large.exp()).log1p())


def dpo(margins: torch.Tensor, *, beta: float) -> torch.Tensor:
    """(M,) ``-log s(beta h)`` (DPO, arXiv:2305.18290 equation 7)."""
    return -logsigmoid(beta * margins)


def cdpo(margins: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """(M,) ``-(1 - e) log s(beta h) - e log s(-beta h)`` (conservative DPO; Mitchell, 2023, "A note on DPO with noisy
    preferences and relationship to IPO").

    Args:
        label_smoothing: The share of pairs ``e`` whose order is wrong.
    """
    right, wrong = dpo(margins, beta=beta), dpo(-margins, beta=beta)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def robust_dpo(margins: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """(M,) ``(-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2e)`` (arXiv:2403.00409): its mean is
    DPO's of the right orders, where a share ``e < 1/2`` of them is wrong."""
    right, wrong = dpo(margins, beta=beta), dpo(-margins, beta=beta)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def odpo(margins: torch.Tensor, differences: torch.Tensor, *, beta: float, alpha: float) -> torch.Tensor:
    """(M,) ``-log s(beta h - alpha log(d))`` (ODPO, arXiv:2402.10571).

    Args:
        differences: (M,) the chosen's score less the rejected's, ``d``.

    Raises:
        ValueError: A difference is not above 0.
    """
    if not bool((differences > 0).all()):
        found = differences[~(differences > 0)][0].item()
        raise ValueError(f"a difference of scores is {found}, and its offset is alpha log(difference): it is above 0")
    return -logsigmoid(beta * margins - alpha * differences.log())


def hinge(margins: torch.Tensor, *, beta: float) -> torch.Tensor:
    """(M,) ``max(0, 1 - beta h)`` (SLiC's loss on DPO's margin, as in RSO, arXiv:2309.06657)."""
    return (1 - beta * margins).clamp(min=0)


def ipo(margins: torch.Tensor, *, tau: float) -> torch.Tensor:
    """(M,) ``(h - 1 / (2 tau))^2`` (IPO, arXiv:2310.12036 equation 17).

    Args:
        margins: (M,) of sums as the paper has them, or of means over each completion's tokens.
    """
    return (margins - 1 / (2 * tau)) ** 2


def dpop(margins: torch.Tensor, chosen: torch.Tensor, *, beta: float, lam: float) -> torch.Tensor:
    """(M,) ``-log s(beta (h - lam max(0, -x_c)))`` (DPO-Positive, arXiv:2402.13228).

    Args:
        chosen: (M,) the chosen's log-ratio ``x_c``.
    """
    return -logsigmoid(beta * (margins - lam * (-chosen).clamp(min=0)))


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, gamma: float) -> torch.Tensor:
    """(M,) ``-log s(beta (p_c / n_c - p_j / n_j) - gamma)`` (SimPO, arXiv:2405.14734 equation 6).

    Args:
        chosen: (M,) mean log-probs ``p_c / n_c``, likewise ``rejected``.
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def log_odds(means: torch.Tensor) -> torch.Tensor:
    """``log(q / (1 - q))`` of ``q = exp(p / n)``, from mean log-probs that are at most ``HIGHEST_MEAN``."""
    bounded = means.clamp(max=HIGHEST_MEAN)
    return bounded - log1mexp(bounded)


def odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """(M,) ``-log s(log_odds_c - log_odds_j)`` (ORPO, arXiv:2403.07691 equation 7).

    Args:
        chosen: (M,) mean log-probs ``p_c / n_c``, likewise ``rejected``.
    """
    return -logsigmoid(log_odds(chosen) - log_odds(rejected))


def kto(
    log_ratios: torch.Tensor, desirable: torch.Tensor, z0: float, *, beta: float, lam_d: float, lam_u: float
) -> torch.Tensor:
    """(N,) ``lam_d (1 - s(beta (x - z0)))`` of desirable sequences, ``lam_u (1 - s(beta (z0 - x)))`` of others (KTO,
    arXiv:2402.01306).

    Args:
        log_ratios: (N,) ``x``.
        desirable: (N,) bool.
        z0: The KL from the reference that the sequences are compared with, without a gradient.
    """
    import torch

    values = beta * (log_ratios - z0)
    return torch.where(desirable, lam_d * torch.sigmoid(-values), lam_u * torch.sigmoid(values))


def bco(chosen: torch.Tensor, rejected: torch.Tensor, shift: float, *, beta: float) -> torch.Tensor:
    """(M,) ``-log s(beta x_c - shift) - log s(shift - beta x_j)`` (BCO, arXiv:2404.04656).

    Args:
        chosen: (M,) the chosen's log-ratio ``x_c``, likewise ``rejected``.
        shift: The mean of rewards ``beta x``, without a gradient.
    """
    return -logsigmoid(beta * chosen - shift) - logsigmoid(shift - beta * rejected)


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | float = 0.0) -> torch.Tensor:
    """(M,) ``-log s(s_c - s_j - m)`` of a reward model's scores (Bradley and Terry, 1952; margin: arXiv:2307.09288).

    Args:
        margin: (M,) the least difference ``m`` that is asked for, or one for all.
    """
    return -logsigmoid(chosen - rejected - margin)
