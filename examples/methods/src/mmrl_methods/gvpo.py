r"""GVPO: group variance policy optimization (arXiv:2504.19599).

For each prompt, ``k`` completions with rewards ``R_1..R_k``. With the log-ratio of a completion to the policy ``pi'``
that sampled it, and ``mean`` over the prompt's completions,

    x_i = sum_t (log pi(y_it) - log pi'(y_it))
    A_i = R_i - mean(R)
    L   = 1/(2 (k - 1)) sum_i (beta (x_i - mean(x)) - A_i)^2

and the step's loss is the mean over prompts. At its minimum the policy is the solution of reward maximisation with a
KL penalty of weight ``beta``: there ``beta x_i`` is the reward up to a constant of the prompt, which both means
remove. There is no ratio and no clip. The gradient is that of the paper's weighted likelihood,

    dL = -beta/(k - 1) sum_i (A_i - beta (x_i - mean(x))) d log pi(y_i)

The authors' code has the square too, and ``beta`` 0.1.

Deviations from the paper, and why:

- The mean is over completions, each weighed by ``k / (k - 1)``: that is the mean over prompts unless some completion
  could not be scored, and then its prompt counts less.
- ``against: reference`` takes ``pi'`` as the reference. The penalty is then the distance to it over the whole run, and
  not to the policy of the step before.
- With one optimizer step a batch ``x`` is 0 in it, and the step is that of an unclipped policy gradient whose baseline
  is the group's mean. The penalty acts from the second on (``learner.epochs``, ``learner.minibatches``).
"""

from __future__ import annotations

from mmrl.policy_gradient import Positive
from mmrl.types import PackedTokens, TokenLoss
from mmrl_methods.groups import group_means, group_sizes
from mmrl_methods.regression import GroupRegression, regression_loss


class GVPO(GroupRegression):
    class Config(GroupRegression.Config):
        beta: Positive = 0.1
        """Weight of the KL penalty: the greater, the nearer the policy stays to the one that sampled."""

    config: Config

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        ratios_N = self.log_ratios(tokens)
        rewards_N = tokens.sequence_mean(tokens.advantages_T)
        residuals_N = self.config.beta * (ratios_N - group_means(tokens, ratios_N)) - rewards_N
        sizes_N = group_sizes(tokens, residuals_N)
        losses_N = sizes_N / (sizes_N - 1) * residuals_N.square() / 2
        return regression_loss(tokens, losses_N, ratios_N, residuals_N)
