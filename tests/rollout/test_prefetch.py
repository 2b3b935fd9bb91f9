"""The prompts that a run draws: the same ones whether they were prepared before or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from mmrl.data.prompts import DatasetRows, PromptSource
from mmrl.errors import DataError
from mmrl.rollout.prefetch import PromptPrefetcher
from mmrl.types import Message, Prompt


class Lengths:
    """The part of an encoder that a source needs."""

    def num_tokens(self, prompt: Prompt) -> int:
        return 1


def source(num_rows: int, **options: float) -> PromptSource:
    rows = [Prompt(f"train/{index}", (Message("user", "?"),), answer="") for index in range(num_rows)]
    return PromptSource([DatasetRows("kit", rows)], Lengths(), max_prompt_tokens=10, **options)


def supply(prompts: PromptSource, make: Callable[[Prompt], str]) -> PromptPrefetcher[str]:
    return PromptPrefetcher(prompts, prompts.order(seed=0), make)


@pytest.mark.parametrize("ahead", [0, 3, 200])
def test_a_row_that_turns_out_bad_is_replaced_when_it_is_drawn(ahead: int) -> None:
    prompts, events = source(200), []
    prompts.listen(lambda *event: events.append(event))
    expected = [f"train/{index}" for _, index in prompts.order(seed=0).take(0, 400)]
    broken = {expected[1], expected[5]}

    def decode(prompt: Prompt) -> str:
        if prompt.id in broken:
            raise DataError("The image cannot be decoded: truncated", where=f"{prompt.id}, images[0]")
        return prompt.id

    drawing = supply(prompts, decode)

    def draw(count: int) -> list[tuple[int, str]]:
        before = len(events)
        drawing.prepare(ahead)
        drawing.wait()
        assert len(events) == before  # nobody has drawn it
        return drawing.draw(count)

    assert draw(4) == [(0, expected[i]) for i in (0, 2, 3, 4)]
    assert drawing.position == 5  # the row that was replaced is consumed
    assert events == [(expected[1], f"The image cannot be decoded: truncated ({expected[1]}, images[0])")]
    assert [name for _, name in draw(195)] == expected[6:200] + expected[200:201]
    second = [name for epoch, name in draw(198) if epoch == 1]
    assert set(second).isdisjoint(broken) and len(events) == 2  # one event each, however often it comes
    assert prompts.num_usable == 198
    broken = {expected[9]}
    with pytest.raises(DataError, match="3 of 200 rows cannot be used"):
        draw(200)


def test_rows_that_all_turn_out_bad_are_an_error_and_no_endless_search() -> None:
    def refuse(prompt: Prompt) -> str:
        raise DataError("truncated")

    drawing = supply(source(2, max_bad_rows=1.0), refuse)
    drawing.prepare(2)
    with pytest.raises(DataError, match="each one turned out to be of no use"):
        drawing.draw(2)


def test_what_is_prepared_is_made_once_and_elsewhere() -> None:
    makers: dict[str, list[threading.Thread]] = {}

    def make(prompt: Prompt) -> str:
        makers.setdefault(prompt.id, []).append(threading.current_thread())
        return prompt.id

    drawing = supply(source(50), make)
    drawing.prepare(6)
    names = [name for _, name in drawing.draw(8)]
    here = [makers[name] == [threading.main_thread()] for name in names]
    assert here == [False] * 6 + [True] * 2
    assert all(len(threads) == 1 for threads in makers.values())


def test_rows_that_cannot_be_used_are_replaced_before_they_are_drawn() -> None:
    prompts = source(50, max_bad_rows=0.1)
    first = [index for _, index in prompts.order(seed=0).take(0, 7)]
    makers: dict[str, threading.Thread] = {}

    def make(prompt: Prompt) -> str:
        if prompt.id == f"train/{first[1]}":
            raise DataError("truncated")
        return makers.setdefault(prompt.id, threading.current_thread()) and prompt.id

    drawing = supply(prompts, make)
    drawing.prepare(6)
    assert [name for _, name in drawing.draw(6)] == [f"train/{first[i]}" for i in (0, 2, 3, 4, 5, 6)]
    assert threading.main_thread() not in makers.values() and len(makers) == 6


def test_a_row_that_comes_twice_in_one_draw_is_drawn_twice() -> None:
    drawing = supply(source(3), lambda prompt: prompt.id)
    expected = supply(source(3), lambda prompt: prompt.id).draw(8)
    drawing.prepare(8)
    assert drawing.draw(8) == expected and drawing.position == 8


def test_nothing_is_made_after_it_is_stopped_and_the_order_is_untouched() -> None:
    begun, made = threading.Event(), list[str]()

    def slow(prompt: Prompt) -> str:
        begun.set()
        time.sleep(0.05)
        made.append(prompt.id)
        return prompt.id

    drawing = supply(source(50), slow)
    drawing.prepare(50)
    assert begun.wait(30)
    drawing.stop()
    count = len(made)
    assert count < 50 and not [t for t in threading.enumerate() if t.name == "mmrl-prompts"]
    time.sleep(0.15)
    assert len(made) == count and drawing.position == 0
    assert drawing.draw(2) == supply(source(50), lambda prompt: prompt.id).draw(2)


def test_it_goes_on_from_a_position() -> None:
    whole = supply(source(10), lambda prompt: prompt.id).draw(9)
    drawing = supply(source(10), lambda prompt: prompt.id)
    drawing.prepare(9)
    drawing.go_to(4)
    assert drawing.draw(5) == whole[4:]


@pytest.mark.parametrize("drawn", [3, 700, 1500])
def test_the_rows_of_groups_that_were_drawn_are_found_in_the_epoch_that_drew_them(drawn: int) -> None:
    drawing, prompts = supply(source(300), lambda prompt: prompt.id), source(300)
    keys = [(epoch, name) for epoch, name in drawing.draw(drawn)]
    wanted = {keys[0], keys[drawn // 2], keys[-1]}
    again = supply(prompts, lambda prompt: prompt.id)
    again.go_to(drawing.position)
    found = again.find(wanted)
    assert {key: row.id for key, row in found.items()} == {key: key[1] for key in wanted}
    # Those that come later, or were drawn in no such epoch, are not there.
    ((epoch, later),) = drawing.draw(1)
    assert again.find({(epoch, later), (99, keys[0][1]), keys[0]}).keys() == {keys[0]}
    assert again.position == drawn and again.draw(1) == [(epoch, later)]
