"""Answers that ``mmrl check`` makes up go on where the prompt stops."""

from __future__ import annotations

import numpy as np
import pytest

from mmrl.plugin_host import registry
from mmrl.runs.made_up import completions
from mmrl.types import EncodedPrompt, Prompt


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ("<think>\n", "</think>\n\n\\boxed{7}"),
        ("<reasoning>", "</reasoning>\n\n\\boxed{7}"),
        ("<think>\n\n</think>\n\n", "\\boxed{7}"),
        ("", "\\boxed{7}"),
    ],
)
def test_a_thought_that_the_template_opened_is_closed_before_an_answer(head: str, text: str) -> None:
    row = Prompt("row", (), answer="7")
    prompt = EncodedPrompt(prompt=row, text=f"assistant\n{head}", token_ids=np.zeros(0, np.int32), images=())
    right, empty = completions(prompt, ["\\boxed{7}", ""]).rollouts
    assert (right.text, empty.text) == (text, "")
    assert len(right.segments[0].token_ids) == len(text) + 1
    assert [registry.given("reward", name).score_one(right) for name in ("math", "exact")] == [1, 1]
