"""Parts of texts in tokens."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence

from mmrl.types import Rollout, policy_turns


def last_tokens(rollout: Rollout, ends: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """For each beginning of a rollout's text, the place among its tokens of the one that completes it.

    The tokens are those of the last turn, whose text it is. A character of several tokens is complete with the last of
    them, and a token of several characters with the first of them.

    Args:
        ends: Lengths of beginnings, in characters, from 1 to that of the text.
        decode: Makes the text of tokens, without special ones. Of a text that it does not make, such as a recorded one
            without its secrets, what no token completes ends with the last token.
    """
    turn = policy_turns(rollout.segments)[-1]
    at = next(place for place, segment in enumerate(rollout.segments) if segment is turn[0])
    first = sum(len(segment.token_ids) for segment in rollout.segments[:at])
    ids = [token for segment in turn for token in segment.token_ids.tolist()]

    @functools.cache
    def text_of(count: int) -> str:
        return decode(ids[:count])

    def completes(end: int, count: int) -> bool:
        return text_of(count)[:end] == rollout.text[:end]

    counts = range(1, len(ids))
    return [first + bisect_left(counts, True, key=functools.partial(completes, end)) for end in ends]
