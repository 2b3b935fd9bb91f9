"""The tokens with which parts of texts end, for tokenizers of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders

from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.text.spans import last_tokens
from mmrl.types import EncodedPrompt, Prompt, Rollout, Segment

TEXT = "The first step: 3 + 4 = 7, naïve 🙂 答案是 7.\n\n  So it is\t\\boxed{7}."

STRIP = decoders.Strip(" ", 1, 0)
PROMPT = EncodedPrompt(prompt=Prompt("p", ()), text="", token_ids=np.zeros(1, np.int32), images=())


def segment(ids: list[int], by_policy: bool = True, continues: bool = False) -> Segment:
    return Segment(np.array(ids, np.int32), by_policy, np.zeros(len(ids), np.float32), continues=continues)


def byte_pieces(models: Callable[[str], Path]) -> tuple[list[int], Callable[[Sequence[int]], str]]:
    """Pieces of bytes, of which a character may take several; the last token is special."""
    tokenizer = ModelFolder.open(str(models("qwen2"))).tokenizer
    ids = [*tokenizer(TEXT, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return ids, partial(tokenizer.decode, skip_special_tokens=True)


def sentence_pieces(models: Callable[[str], Path]) -> tuple[list[int], Callable[[Sequence[int]], str]]:
    """Words with a mark for the space before them, which is left out before the first; the last token is special."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), STRIP])
    pieces = [f"▁{word}" for word in TEXT.split(" ")]
    smile = pieces.index("▁🙂")
    pieces[smile : smile + 1] = ["▁", *(f"<0x{byte:02X}>" for byte in "🙂".encode())]
    return [*range(len(pieces) + 1)], lambda ids: decoder.decode([pieces[i] for i in ids if i < len(pieces)])


@pytest.mark.parametrize("kind", [byte_pieces, sentence_pieces])
def test_a_part_ends_with_the_first_token_after_which_the_text_has_it(kind: Any, models: Any) -> None:
    """Each end is looked for from the first token on, which is the definition."""
    ids, decode = kind(models)
    text = decode(ids)
    assert text == TEXT
    plain = Rollout(PROMPT, (segment(ids),), 0, text, "stop", 0)
    ends = range(1, len(text) + 1)
    expected = [next(i for i in range(len(ids)) if decode(ids[: i + 1])[:end] == text[:end]) for end in ends]
    assert last_tokens(plain, ends, decode) == expected
    assert expected == sorted(expected) and expected[-1] == len(ids) - 2 and len(set(expected)) > 14
    assert last_tokens(plain, [], decode) == []
    # The last turn of an episode, which was sampled in two parts; its environment's last words follow.
    parts = (
        segment([5, 6]),
        segment([7], False),
        segment(ids[:9]),
        segment(ids[9:], continues=True),
        segment([8], False),
    )
    episode = Rollout(PROMPT, parts, 0, text, "environment", 0)
    assert last_tokens(episode, ends, decode) == [3 + place for place in expected]


def test_a_part_of_a_text_that_the_tokens_do_not_make_ends_with_the_last_one() -> None:
    hidden = Rollout(PROMPT, (segment([65, 66, 67]),), 0, "A*C", "stop", 0)
    assert last_tokens(hidden, [1, 2, 3], lambda ids: bytes(ids).decode()) == [0, 2, 2]
