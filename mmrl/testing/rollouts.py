"""Rollouts for checks: the kinds of completions that a reward meets, and groups of them with rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.types import EncodedPrompt, ImageRef, IntArray, Message, Prompt, Rollout, RolloutGroup, ScoredGroup, Segment

_COMPLETE = (
    "3 + 4 = 7, so the answer is \\boxed{7}.",
    "7",
    "<think>3 + 4 is 8</think> <answer>8</answer>",
    "",
    " \n\t",
    "答案是 7 ✓ — naïve, \u202e7\u202c, 🙂, \ufffd\x00",
)
_CUT_OFF = ("I start with 3 and add 1, and add 1, and add 1, and add 1, and add", "so it is \\boxed{7", "7")
OTHER_GOLDS = (["seven", "7"], 7, None)
"""Forms of reference answers in datasets besides text."""


def make_rollouts(
    texts: Sequence[str],
    *,
    answer: Any = None,
    columns: Mapping[str, Any] | None = None,
    truncated: bool = False,
    question: str = "What is 3 + 4?",
    images: Sequence[ImageRef] = (),
) -> list[Rollout]:
    """Completions of one prompt, without a model: one token for each byte of UTF-8, and one more that ends it.

    Args:
        texts: The completions.
        answer: The reference answer.
        columns: The row's columns; by default ``problem`` and ``answer``.
        truncated: True if all were cut at the length limit, and so lack the token that ends them.
        question: The prompt, which is its own id.
        images: The prompt's images.
    """
    columns = {"problem": question, "answer": answer} if columns is None else columns
    text = f"user: {question}\nassistant: "
    row = Prompt(question, (Message("user", question),), answer=answer, columns=columns)
    prompt = EncodedPrompt(prompt=row, text=text, token_ids=_token_ids(text), images=tuple(images))
    end: IntArray = np.zeros(0 if truncated else 1, np.int32)
    rollouts = []
    for index, completion in enumerate(texts):
        ids = np.append(_token_ids(completion), end)
        segment = Segment(ids, True, np.full(len(ids), -0.5, np.float32))
        rollouts.append(Rollout(prompt, (segment,), index, completion, "length" if truncated else "stop", 1))
    return rollouts


def sample_groups(answer: Any) -> list[list[Rollout]]:
    """Right, wrong, empty, odd, and cut-off answers to a question with that reference."""
    return [make_rollouts(texts, answer=answer, truncated=texts is _CUT_OFF) for texts in (_COMPLETE, _CUT_OFF)]


def scored_groups(*, with_greedy: bool, components: Sequence[str] = ("reward",)) -> tuple[ScoredGroup, ...]:
    """Groups of rewards that are mixed, all 1, all 0 or partly invalid; groups with one reward, one valid one, none."""
    nan = np.nan
    mixed: tuple[list[float], ...] = ([1, 0, 1, 0], [nan, 1, nan, 0], [0.25, 0.5], [0.0, 0.0, 1.0])
    alike: tuple[list[float], ...] = ([1, 1, 1, 1], [0, 0, 0, 0], [0.25], [nan, 1, nan, nan], [nan] * 4)
    greedy = _scored([1.0], components, None) if with_greedy else None
    return tuple(_scored(values, components, greedy) for values in (*mixed, *alike))


def _scored(scores: Sequence[float], components: Sequence[str], greedy: ScoredGroup | None) -> ScoredGroup:
    """Every component has these scores."""
    values_G = np.array(scores, float)
    valid_G = ~np.isnan(values_G)
    rollouts = make_rollouts(_COMPLETE[: len(scores)], answer="7")
    group = RolloutGroup(rollouts[0].prompt, tuple(rollouts))
    rewards_G = np.where(valid_G, len(components) * values_G, 0.0)
    return ScoredGroup(group, rewards_G, valid_G, {name: values_G.copy() for name in components}, greedy)


def _token_ids(text: str) -> IntArray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
