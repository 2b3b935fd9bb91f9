r"""EndoRM: the endogenous reward of a language model (arXiv:2506.23235, sections 4.1 and 4.2).

A model that was trained by next-token prediction is a solution of inverse soft Q-learning: its logits are the soft
Q-function of its training texts, and the inverse soft Bellman operator gives their reward. With the logits ``Q``, a
completion ``a_1..a_H`` that meets the states ``s_1..s_H`` (the prompt and the tokens so far), and ``alpha``:

    V(s)       = alpha log sum_a exp(Q(s, a) / alpha)
    r(s_h,a_h) = Q(s_h, a_h) - V(s_{h+1})
               = alpha log pi(a_h | s_h) + V(s_h) - V(s_{h+1}),   pi = softmax(Q / alpha)
    R          = sum_h r(s_h, a_h),  with V = 0 after the end

So ``R = alpha log pi(a_1..a_H) + V(s_1)``: within a group, where ``V(s_1)`` is a constant, it is the log-likelihood of
the completion under the model. Nothing is trained, and no reference answer is read. The model is the policy's first
form, or another one with the same tokens: it reads the ids that the policy sampled.

The component beside the score is ``per_token``, ``R / H``. A sum of log-probs favours what is short.

Deviations, and why:

- A completion that the limit has cut off does not end, so ``V`` of the state after its last token is taken off.
- In an episode only the policy's tokens have a reward; ``s_{h+1}`` is then what the policy reads after the token.
- ``alpha`` is 1 by default: the distribution that the model was trained with. The paper's other values are not known to
  us. Its prompts, which ask a chat model for a verdict first, are left out.
- Images are not read: rows that have some are unscored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field

from mmrl.errors import ConfigError
from mmrl.interfaces import Reward
from mmrl.types import EncodedPrompt, FloatArray, Rollout, Score, Unscored
from mmrl_methods.local_models import LocalModelConfig, loaded


class EndoRM(Reward):
    workers = 1

    class Config(LocalModelConfig):
        alpha: float = Field(default=1.0, gt=0, allow_inf_nan=False)
        """Weight of the entropy in the soft Q-function whose logits these are."""

    config: Config

    def prepare(self) -> None:
        _ = self._model

    def check_rows(self, prompts: Sequence[EncodedPrompt]) -> Sequence[str]:
        count = sum(bool(prompt.images) for prompt in prompts)
        return [f"{count} of {len(prompts)} rows have images, which endorm does not read"] if count else []

    def score_one(self, rollout: Rollout) -> Score | Unscored:
        if rollout.all_images:
            return Unscored("reads no images")
        if rollout.num_tokens > self.config.max_tokens:
            return Unscored(f"reads at most {self.config.max_tokens} tokens, and there are {rollout.num_tokens}")
        if not rollout.mask.any():
            return {"score": 0.0, "per_token": 0.0}
        rewards_T = self._rewards(rollout)[rollout.mask]
        return {"score": float(rewards_T.sum()), "per_token": float(rewards_T.mean())}

    def _rewards(self, rollout: Rollout) -> FloatArray:
        """(T,) ``r(s_h, a_h)`` of each token after the prompt."""
        import torch

        model, alpha = self._model, self.config.alpha
        ids = np.concatenate([rollout.prompt.token_ids, rollout.token_ids]).astype(np.int64)
        known = model.get_input_embeddings().num_embeddings
        if ids.max(initial=0) >= known:
            what = f"the policy's token {ids.max()} is not among the model's {known}"
            raise ConfigError(what, where=f"path: {self.config.path}", possible="a model with the policy's tokenizer")
        tokens = torch.from_numpy(ids).to(model.device)
        with torch.inference_mode():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].double()
        begin = len(rollout.prompt.token_ids)
        values = alpha * torch.logsumexp(logits / alpha, -1)
        chosen_T = logits[begin - 1 : -1].gather(-1, tokens[begin:, None])[:, 0]
        after_T = values[begin:].clone()
        if not rollout.truncated:
            after_T[-1] = 0.0
        rewards_T: FloatArray = (chosen_T - after_T).cpu().numpy()
        return rewards_T

    @cached_property
    def _model(self) -> Any:
        return loaded(self.config, "CausalLM")
