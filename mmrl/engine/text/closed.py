"""Whole conversations in tokens: a prompt that several share, and what follows it in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmrl.errors import DataError
from mmrl.types import EncodedPrompt, Sample, Segment


def closed_samples(
    prompt: EncodedPrompt, head: Sequence[int], wholes: Sequence[Sequence[int]], *, end: int, image: int
) -> tuple[Sample, ...]:
    """Conversations as samples with one prompt, which is what all of them and the given one begin with.

    An inserted segment holds all that follows the last end of a turn.

    Args:
        prompt: Without tokens where only the lengths of the completions are asked for.
        head: The prompt's tokens, one for each image.
        wholes: Likewise those of the conversations.
        end: The token that ends a turn.
        image: The token of an image.

    Raises:
        DataError: They begin otherwise than the prompt.
    """
    shared = min(_num_equal(head, whole) for whole in wholes)
    left = head[shared:]
    if shared == 0 or image in left or any(shared == len(whole) for whole in wholes):
        raise DataError(
            "the model's chat template writes another beginning of the conversation once the answer is there",
            where=prompt.id,
            remedy="choose a model whose template keeps the prompt as it is, or set data.template_options",
        )
    if left and len(prompt.token_ids):
        prompt = replace(prompt, token_ids=prompt.token_ids[: -len(left)])
    return tuple(Sample(prompt, _segments(whole[shared:], end)) for whole in wholes)


def _segments(ids: Sequence[int], end: int) -> tuple[Segment, ...]:
    """An answer with its end, and what closes the conversation after it."""
    split = max((place + 1 for place, token in enumerate(ids) if token == end), default=len(ids))
    parts = (ids[:split], True, "assistant"), (ids[split:], False, "user")
    return tuple(
        Segment(np.array(own, np.int32), by_policy, np.zeros(len(own), np.float32), role=role)
        for own, by_policy, role in parts
        if len(own)
    )


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
