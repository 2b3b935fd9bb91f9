from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import ConfigError, DataError
from mmrl.prompts import Part, PromptOrder, PromptSource, request_seed
from mmrl.types import EncodedPrompt, Message, Prompt, RawImage, Sample

PINNED_ORDER = [7, 0, 2, 5, 4, 6, 3, 1, 4, 3, 6, 1, 5, 7, 2, 0]
PINNED_SEED = 112500882025349120


class WordCounter:
    """An encoder whose tokens are words."""

    def num_tokens(self, prompt: Prompt) -> int:
        return sum(len(message.content.split()) for message in prompt.messages)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        raise NotImplementedError

    def demonstrate(self, prompt: EncodedPrompt) -> Sample:
        raise NotImplementedError


def row(index: int, num_words: int, text: str = "word", **columns: Any) -> Prompt:
    return Prompt(f"train/{index}", (Message("user", " ".join([text] * num_words)),), columns=columns)


def source(rows: list[Prompt], **options: Any) -> PromptSource:
    return PromptSource([Part("kit", rows)], WordCounter(), **{"max_prompt_tokens": 10} | options)


def contents(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in prompt.messages]


def test_every_row_comes_once_per_epoch_in_another_order() -> None:
    order = PromptOrder(50, seed=3)
    taken = order.take(0, 150)
    epochs = [[index for epoch, index in taken if epoch == e] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert PromptOrder(50, seed=4).take(0, 50) != taken[:50]


def test_a_position_has_its_row_whatever_was_asked_before() -> None:
    order, fresh = PromptOrder(7, seed=1), PromptOrder(7, seed=1)
    taken = order.take(0, 30)
    assert [fresh.at(position) for position in (29, 3, 15, 3)] == [taken[29], taken[3], taken[15], taken[3]]


def test_the_order_is_pinned() -> None:
    assert [index for _, index in PromptOrder(8, seed=0).take(0, 16)] == PINNED_ORDER


def test_request_seeds_are_pinned_and_the_same_in_another_process() -> None:
    assert request_seed(0, 1, "train/17", 2) == PINNED_SEED
    code = "from mmrl.prompts import request_seed; print(request_seed(0, 1, 'train/17', 2))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(answer) == PINNED_SEED


def test_request_seeds_leave_room_for_the_members_of_a_group() -> None:
    seeds = {
        request_seed(r, e, f"train/{p}", a) for r in range(2) for e in range(3) for p in range(300) for a in (0, 1)
    }
    assert len(seeds) == 2 * 3 * 300 * 2
    assert all(0 <= seed < 2**62 and seed % 65536 == 0 for seed in seeds)
    assert max(seeds) > 2**60


def test_long_rows_are_dropped_and_listed() -> None:
    prompts = source([row(0, 3), row(1, 11), row(2, 10), row(3, 500)])
    assert len(prompts) == 2
    assert [prompts[i].id for i in range(2)] == ["train/0", "train/2"]
    assert prompts.lengths == [3, 10]
    assert [name for name, _ in prompts.dropped] == ["train/1", "train/3"]
    assert "500 tokens, more than data.max_prompt_tokens = 10" in prompts.dropped[1][1]


def test_a_long_row_can_stop_the_run() -> None:
    with pytest.raises(DataError, match="12 tokens") as caught:
        source([row(0, 3), row(1, 12)], overlong="fail", name="data.eval")
    assert caught.value.where == "data.eval, row train/1"


def test_nothing_left_shows_the_lengths() -> None:
    with pytest.raises(DataError, match=r"3 rows of 20 to 120 tokens \(20-40: 2, .*104-124: 1\)"):
        source([row(0, 20), row(1, 21), row(2, 120)])
    with pytest.raises(DataError, match="has no rows"):
        source([])


def test_fewer_rows_than_a_step_needs_is_an_error_with_the_counts() -> None:
    prompts = source([row(0, 1), row(1, 1), row(2, 99)])
    prompts.require(2, "trainer.prompts_per_step")
    with pytest.raises(DataError) as caught:
        prompts.require(3, "trainer.prompts_per_step")
    assert "2 rows, trainer.prompts_per_step asks for 3" in str(caught.value)
    assert "1 dropped" in str(caught.value)


def test_equal_ids_are_refused() -> None:
    with pytest.raises(DataError, match="Two rows have the id 'train/0'"):
        source([row(0, 1), row(0, 2)])


def test_prompts_are_read_again_and_not_kept() -> None:
    reads: Counter[int] = Counter()

    class Rows(list[Prompt]):
        def __getitem__(self, index: Any) -> Any:
            reads[index] += 1
            return super().__getitem__(index)

    prompts = source(Rows([row(0, 1), row(1, 1)]))
    _ = prompts[1], prompts[1]
    assert reads[1] == 3  # measured once, and read twice


def test_the_system_prompt_goes_first_unless_the_row_has_its_own() -> None:
    own = Prompt("own", (Message("system", "Mine."), Message("user", "Why?")))
    prompts = source([row(0, 1), own], system_prompt="Be brief.")
    assert contents(prompts[0]) == [("system", "Be brief."), ("user", "word")]
    assert contents(prompts[1]) == [("system", "Mine."), ("user", "Why?")]
    assert prompts.lengths == [3, 2]


def test_the_template_fills_the_last_user_message_from_text_and_columns() -> None:
    turns = (Message("user", "one"), Message("assistant", "two"), Message("user", "<image>three"))
    prompt = Prompt("0", turns, images=(RawImage(b"", "x"),), columns={"unit": "cm", "note": "{{ 1 + 1 }} <b>"})
    template = "{{ prompt | upper | replace('<IMAGE>', '<image>') }} in {{ row.unit }} {{ row['note'] }}"
    prompts = source([prompt], prompt_template=template, max_prompt_tokens=20)
    assert contents(prompts[0]) == [
        ("user", "one"),
        ("assistant", "two"),
        ("user", "<image>THREE in cm {{ 1 + 1 }} <b>"),
    ]
    assert prompts[0].images == prompt.images


def test_a_template_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "boxed.jinja"
    path.write_text("{{ prompt }}\nAnswer in \\boxed{}.\n", encoding="utf-8")
    assert contents(source([row(0, 1)], prompt_template=str(path))[0]) == [("user", "word\nAnswer in \\boxed{}.")]
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        source([row(0, 1)], prompt_template=str(tmp_path / "other.j2"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ prompt", "not valid Jinja"),
        ("{{ prompt }} {{ row.unti }}", "unti"),
        ("{{ prompt.__class__.__mro__ }}", "unsafe"),
        ("{{ row.clear() }}{{ prompt }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
        ("just this", "turns 1 <image> into 0"),
        ("{{ prompt }}{{ prompt }}", "turns 1 <image> into 2"),
    ],
)
def test_a_template_that_does_not_fit_is_a_config_error(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source([row(0, 1, "<image>", unit="cm")], prompt_template=template)


def test_a_template_needs_a_user_message() -> None:
    with pytest.raises(DataError, match="no user message"):
        source([Prompt("0", (Message("assistant", "hi"),))], prompt_template="{{ prompt }}")
