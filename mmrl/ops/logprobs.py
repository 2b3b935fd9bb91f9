"""Log-probs and entropy of completion tokens, from hidden states, without the logits of a whole row in memory.

Letters: ``T`` completion tokens, ``H`` hidden size, ``V`` vocabulary, ``C`` tokens in a chunk, ``B`` in a block of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

BANNED_SCORE = -1e9
"""Score of a banned token. Its probability is 0, but 0 * -inf would be NaN. The lowest finite number would overflow in
the entropy's gradient, and make that NaN."""

BLOCK_BYTES = {"cpu": 2**21, "cuda": 2**26}
"""Scores that are worked on at a time: they stay in a CPU's cache, and keep temporary memory small on a GPU."""


def token_logprobs(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    banned_V: torch.Tensor,
    temperature: float,
    *,
    entropy: bool = True,
    entropy_gradient: bool = False,
    overwrite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(C,) log-probs of the targets, with gradient, and (C,) entropies in nats, or (0,) if they are not asked for.

    The softmax is that of the sampler: logits divided by the temperature, over the vocabulary that may be sampled.

    Args:
        logits_CV: In any precision; computed in float32 at least.
        targets_C: Ids that are not banned.
        banned_V: (V,) bool, True for ids that are never sampled.
        temperature: Greater than 0.
        entropy: True to compute entropies; they have a gradient with ``entropy_gradient`` only.
        overwrite: True to use the logits' memory. Then one buffer of their size serves both passes.
    """
    scores_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if scores_CV is logits_CV and not overwrite:
        scores_CV = logits_CV.clone()
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _TokenLogprobs.apply  # torch has no types for it
    return apply(scores_CV, targets_C, banned_V, temperature, entropy, entropy_gradient)


class _TokenLogprobs(torch.autograd.Function):
    """``token_logprobs`` in the memory of its first argument, which becomes the gradient: backward runs once.

    With scores s and probabilities p, the gradient of a target's log-prob is (onehot - p), and that of the entropy H is
    -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores_CV: torch.Tensor,
        targets_C: torch.Tensor,
        banned_V: torch.Tensor,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_sum_C, entropy_C = (scores_CV.new_empty(size) for size in (len(scores_CV), entropy * len(scores_CV)))
        for part in _blocks(scores_CV):
            scores_BV = scores_CV[part]
            if temperature != 1.0:
                scores_BV.div_(temperature)
            scores_BV.masked_fill_(banned_V, BANNED_SCORE)
            scores_BV.sub_(scores_BV.amax(-1, keepdim=True))
            powers_BV = scores_BV.exp()
            sum_B = powers_BV.sum(-1)
            log_sum_C[part] = sum_B.log()
            if entropy:
                entropy_C[part] = log_sum_C[part] - powers_BV.mul_(scores_BV).sum(-1) / sum_B
        logprobs_C = scores_CV.gather(-1, targets_C[:, None])[:, 0] - log_sum_C
        ctx.save_for_backward(scores_CV, targets_C, log_sum_C, entropy_C)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_C)
        return logprobs_C, entropy_C

    @staticmethod
    def backward(ctx: Any, from_logprobs_C: torch.Tensor, from_entropy_C: torch.Tensor) -> Any:
        scores_CV, targets_C, log_sum_C, entropy_C = ctx.saved_tensors
        for part in _blocks(scores_CV):
            gradient_B1 = from_logprobs_C[part, None]
            scores_BV = scores_CV[part].sub_(log_sum_C[part, None])
            if ctx.entropy_gradient:
                probabilities_BV = scores_BV.exp()
                scores_BV.add_(entropy_C[part, None]).mul_(from_entropy_C[part, None]).add_(gradient_B1)
                scores_BV.mul_(probabilities_BV).neg_()
            else:
                scores_BV.exp_().mul_(-gradient_B1)
            scores_BV.scatter_add_(-1, targets_C[part, None], gradient_B1)
            if ctx.temperature != 1.0:
                scores_BV.div_(ctx.temperature)
        return scores_CV, None, None, None, None, None


def _blocks(scores_CV: torch.Tensor) -> Iterator[slice]:
    size, width = scores_CV.shape
    step = max(BLOCK_BYTES[scores_CV.device.type] // (width * scores_CV.element_size()), 1)
    return (slice(start, start + step) for start in range(0, size, step))


def chunked_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_TH: torch.Tensor,
    targets_T: torch.Tensor,
    banned_V: torch.Tensor,
    temperature: float,
    *,
    chunk_tokens: int,
    entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``token_logprobs``, from hidden states, holding the logits of one chunk at a time.

    The backward pass recomputes each chunk's logits, so peak memory is ``chunk_tokens * V`` in both passes. A single
    chunk is not recomputed.
    """

    def score(hidden_CH: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked = {"entropy": entropy, "entropy_gradient": entropy_gradient}
        return token_logprobs(head(hidden_CH), targets_C, banned_V, temperature, **asked, overwrite=True)

    if len(targets_T) <= chunk_tokens or not torch.is_grad_enabled():
        chunks = [score(h, t) for h, t in _chunks(hidden_TH, targets_T, chunk_tokens)]
    else:
        chunks = [checkpoint(score, h, t, use_reentrant=False) for h, t in _chunks(hidden_TH, targets_T, chunk_tokens)]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunks(hidden_TH: torch.Tensor, targets_T: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(hidden_TH.split(size), targets_T.split(size), strict=True))
