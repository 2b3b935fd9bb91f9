"""Rollouts for checks: the kinds of completions that a reward meets, and groups of them with rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmrl.types import EncodedPrompt, FinishReason, Message, Rollout, RolloutGroup, ScoredGroup, Segment

_COMPLETIONS: tuple[tuple[str, FinishReason], ...] = (
    ("3 + 4 = 7, so the answer is \\boxed{7}.", "stop"),
    ("7", "stop"),
    ("<think>3 + 4 is 8</think> <answer>8</answer>", "stop"),
    ("", "stop"),
    (" \n\t", "stop"),
    ("I start with 3 and add 1, and add 1, and add 1, and add 1, and add", "length"),
    ("so it is \\boxed{7", "length"),
    ("答案是 7 ✓ — naïve, \u202e7\u202c, 🙂, \ufffd\x00", "stop"),
)
_ANSWERS = ("7", ["seven", "7"], 7, None)


def sample_rollouts() -> list[Rollout]:
    """Right, wrong, empty, cut off and odd answers to a question, once for each way in which its gold can be given.

    The gold is a text, a list of texts, a number, or None; token ids are those of the completion's UTF-8 bytes.
    """
    return [
        rollout
        for number, answer in enumerate(_ANSWERS)
        for rollout in _group(f"prompt {number}", answer, _COMPLETIONS).rollouts
    ]


def scored_groups(*, with_greedy: bool) -> tuple[ScoredGroup, ...]:
    """Groups of rewards that are mixed, all 1, all 0, partly invalid, all invalid; and of one valid reward."""
    nan = np.nan
    scores: tuple[list[float], ...] = (
        [1, 0, 1, 0],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
        [nan, 1, nan, 0],
        [0.25],
        [nan, 1, nan, nan],
        [nan] * 4,
    )
    greedy = _scored("greedy", [1.0], None) if with_greedy else None
    return tuple(_scored(f"prompt {number}", values, greedy) for number, values in enumerate(scores))


def _scored(name: str, scores: Sequence[float], greedy: ScoredGroup | None) -> ScoredGroup:
    values_G = np.array(scores, float)
    valid_G = ~np.isnan(values_G)
    group = _group(name, "7", _COMPLETIONS[: len(scores)])
    return ScoredGroup(group, np.where(valid_G, values_G, 0.0), valid_G, {"reward": values_G}, greedy)


def _group(name: str, answer: Any, completions: Sequence[tuple[str, FinishReason]]) -> RolloutGroup:
    question = "What is 3 + 4?"
    columns = {"problem": question, "answer": answer}
    text = f"user: {question}\nassistant: "
    prompt = EncodedPrompt(name, (Message("user", question),), answer, columns, None, text, _token_ids(text), ())
    return RolloutGroup(prompt, tuple(_rollout(prompt, index, *each) for index, each in enumerate(completions)))


def _rollout(prompt: EncodedPrompt, index: int, text: str, finish_reason: FinishReason) -> Rollout:
    ids = np.append(_token_ids(text), np.int32(0)) if finish_reason == "stop" else _token_ids(text)
    segment = Segment(ids, True, np.full(len(ids), -0.5, np.float32))
    return Rollout(prompt, (segment,), index, text, finish_reason, weight_version=1)


def _token_ids(text: str) -> Any:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
