"""Per-token estimators of the KL divergence to a reference policy (http://joschu.net/blog/kl-approx.html).

With ``x = log pi - log pi_ref`` on tokens sampled from ``pi``. Only the exponent is clamped (at 20, against
infinities): clamping the value much earlier would remove the gradient exactly where the penalty is needed.
"""

from __future__ import annotations

import torch

from mmrl.interfaces import KLEstimator

MAX_EXPONENT = 20.0


def kl_per_token(
    estimator: KLEstimator,
    logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T,) estimates; differentiable in ``logprobs_T``.

    - ``k1``: ``x``. As a loss its expected gradient is zero.
    - ``k2``, ``mse``: ``x^2/2``. Gradient of KL(pi || ref) in expectation.
    - ``k3``, ``low_var_kl``: ``exp(-x) - 1 + x``. As a loss, gradient of KL(ref || pi).
    - ``k3+``: the value of k3 with the gradient of k2.
    - ``k3_is``: ``rho k3`` with the gradient through ``rho = pi / pi_old`` (DeepSeek-V3.2); exact off-policy.
    - ``abs``: ``|x|``.

    Raises:
        ValueError: ``k3_is`` without ``old_logprobs_T``.
    """
    x_T = logprobs_T - reference_logprobs_T
    if estimator == "k1":
        return x_T
    if estimator == "abs":
        # Not Tensor.abs, whose gradient at 0 is 0: here it is 1, as for k1.
        return torch.where(x_T >= 0, x_T, -x_T)
    k2_T = x_T.square() / 2
    if estimator in ("k2", "mse"):
        return k2_T
    k3_T = (-x_T).clamp(max=MAX_EXPONENT).exp() - 1 + x_T
    if estimator == "k3+":
        return k3_T.detach() + k2_T - k2_T.detach()
    if estimator == "k3_is":
        if old_logprobs_T is None:
            raise ValueError("k3_is needs the old log-probs")
        return (logprobs_T - old_logprobs_T).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp() * k3_T
    return k3_T


def adapted_coefficient(coef: float, kl: float, *, target: float, horizon: float, num_sequences: int) -> float:
    """The next coefficient of a KL penalty that is steered to ``target`` (arXiv:1909.08593).

    ``coef (1 + clip(kl / target - 1, -0.2, 0.2) min(num_sequences / horizon, 1))``; ``kl`` and ``target`` in the same
    unit. A batch larger than the horizon changes it by a fifth at most: it never turns negative.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(num_sequences / horizon, 1.0))
