"""Log-probs and entropy of completion tokens, from hidden states, without the logits of a whole row in memory.

Letters: ``T`` completion tokens, ``H`` hidden size, ``V`` vocabulary, ``C`` tokens in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

BANNED_SCORE = -1e9
"""Its probability is 0 all the same, but 0 * -inf would be NaN; and so would be the entropy's gradient with the lowest
finite number, which overflows in the product with the gradient from above."""


def token_logprobs(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    banned_V: torch.Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(C,) log-probs of the targets, with gradient, and (C,) entropies in nats, with gradient only if asked.

    The softmax is that of the sampler: logits divided by the temperature, over the vocabulary that may be sampled.

    Args:
        logits_CV: In any precision; computed in float32 at least.
        banned_V: (V,) bool, True for ids that are never sampled.
        temperature: Greater than 0.
    """
    scores_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
    scores_CV = scores_CV.masked_fill(banned_V, BANNED_SCORE)
    logprobs_CV = scores_CV.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    return logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropy_C


def chunked_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_TH: torch.Tensor,
    targets_T: torch.Tensor,
    banned_V: torch.Tensor,
    temperature: float,
    *,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``token_logprobs``, from hidden states, holding the logits of one chunk at a time.

    The backward pass recomputes each chunk's logits, so peak memory is ``chunk_tokens * V`` in both passes.
    """

    def score(hidden_CH: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(head(hidden_CH), targets_C, banned_V, temperature, entropy_gradient=entropy_gradient)

    if len(targets_T) <= chunk_tokens or not torch.is_grad_enabled():
        chunks = [score(h, t) for h, t in _chunks(hidden_TH, targets_T, chunk_tokens)]
    else:
        chunks = [checkpoint(score, h, t, use_reentrant=False) for h, t in _chunks(hidden_TH, targets_T, chunk_tokens)]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunks(hidden_TH: torch.Tensor, targets_T: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(hidden_TH.split(size), targets_T.split(size), strict=True))
