r"""GSPO-token: GSPO with a gradient per token (arXiv:2507.18071).

    s_it = sg[s_i] pi(y_t) / sg[pi(y_t)],  s_i as in GSPO, sg[.] without gradient
    L_it = max(-A_it s_it, -A_it clip(s_it, 1 - clip_low, 1 + clip_high))
    L    = 1/G sum_i 1/|y_i| sum_t L_it

With one advantage per sequence, as here, value and gradient are those of GSPO. The form is for advantages that differ
from token to token: subclass it and override ``advantages``.
"""

from __future__ import annotations

from mmrl.types import PackedTokens, TokenLoss
from mmrl_algorithms.gspo import GSPO


class GSPOToken(GSPO):
    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import sequence_clip_per_token

        return sequence_clip_per_token(tokens, **self.config.clip)
