"""Made-up answers as completions, for rewards to be tried on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmrl.engine.text.thoughts import closing
from mmrl.types import EncodedPrompt, FinishReason, IntArray, Rollout, RolloutGroup, Segment


def completions(prompt: EncodedPrompt, texts: Sequence[str], cut_at: int | None = None) -> RolloutGroup:
    """The texts as completions of a prompt: one token per byte, or cut off at ``cut_at`` tokens.

    Where the chat template has opened a thought, they close it first: a text within it would be no answer.
    """
    finish: FinishReason = "stop" if cut_at is None else "length"
    closed, rollouts = closing(prompt.text), list[Rollout]()
    for index, answer in enumerate(texts):
        text = f"{closed}\n\n{answer}" if closed and answer else answer
        ids: IntArray = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)
        ids = np.append(ids, 0).astype(np.int32) if cut_at is None else np.resize(ids, cut_at).astype(np.int32)
        segment = Segment(ids, True, np.zeros(len(ids), np.float32))
        rollouts.append(Rollout(prompt, (segment,), index, text, finish, 0))
    return RolloutGroup(prompt, tuple(rollouts))
