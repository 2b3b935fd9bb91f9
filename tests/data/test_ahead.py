"""Rows that are measured when a run reaches them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mmrl.data.ahead import AHEAD, PromptsAhead
from mmrl.data.prompts import DatasetRows, PromptSource
from mmrl.errors import DataError
from mmrl.rollout.prefetch import PromptPrefetcher
from mmrl.types import Message, Prompt, RawImage

BAD, LONG, MANY = 7, 11, 13
"""Rows that are multiples of the first cannot be read, of the second are too long, of the third have two images."""


class Rows(list[Prompt]):
    def __getitem__(self, index: Any) -> Any:
        if index % BAD == 0:
            raise DataError("Column 'answer' is null", where=f"row {index}")
        return super().__getitem__(index)


class Words:
    """An encoder whose tokens are words."""

    def num_tokens(self, prompt: Prompt) -> int:
        return sum(len(message.content.split()) for message in prompt.messages)


def row(index: int) -> Prompt:
    text = "word " * (99 if index % LONG == 0 else 3)
    images = (RawImage(b"", "x"),) * (2 if index % MANY == 0 else 0)
    return Prompt(f"train/{index}", (Message("user", text),), images=images)


def source(num_rows: int = 60, kind: type[PromptSource] = PromptsAhead, **options: Any) -> PromptSource:
    parts = [DatasetRows("kit", Rows(row(index) for index in range(num_rows)), None, options.pop("fingerprint", "v1"))]
    options = {"max_prompt_tokens": 10, "max_bad_rows": 0.5, "max_images": 1} | options
    return kind(parts, Words(), **options)  # type: ignore[arg-type]


def drawing(prompts: PromptSource) -> PromptPrefetcher[str]:
    return PromptPrefetcher(prompts, prompts.order(seed=0), lambda prompt: prompt.id)


def usable(index: int) -> bool:
    return all(index % each for each in (BAD, LONG, MANY))


def test_some_rows_are_looked_at_for_images_that_are_spelled_and_not_there() -> None:
    rows = [Prompt(f"r/{index}", (Message("user", "<image>?" if index % 2 else "?"),)) for index in range(200)]
    options = {"max_prompt_tokens": 10, "max_images": 1}
    found = PromptsAhead([DatasetRows("kit", rows)], Words(), reads_images=True, **options)  # type: ignore[arg-type]
    (warning,) = found.warnings
    assert "of 64 rows that were looked at spell <image>" in warning and found.warnings == [warning]
    assert source(reads_images=True).warnings == source().warnings == []


@pytest.mark.parametrize("ahead", [0, 5, 9])
def test_each_step_has_its_prompts_and_rows_that_cannot_be_used_are_passed_over(ahead: int) -> None:
    prompts, told = source(), list[tuple[str, str]]()
    prompts.listen(lambda *event: told.append(event))
    order = prompts.order(seed=0).take(0, 240)
    assert sorted(index for epoch, index in order if epoch == 1) == list(range(60)), "all rows are in the order"
    expected = [(epoch, f"train/{index}") for epoch, index in order if usable(index)]
    prefetcher, drawn = drawing(prompts), list[tuple[int, str]]()
    for _ in range(20):
        prefetcher.prepare(ahead)
        step = prefetcher.draw(5)
        assert len(step) == 5
        drawn += step
    assert drawn == expected[:100]
    reached = {index for _, index in order[: prefetcher.position]}
    assert len(told) == len({name for name, _ in told}) == len([each for each in reached if not usable(each)])
    reasons = dict(told)
    assert reasons["14"] == "Column 'answer' is null (row 14)"
    assert reasons["train/11"] == "99 tokens, more than data.max_prompt_tokens = 10"
    assert reasons["train/13"] == "The row has 2 images, more than data.max_images = 1"


def test_rows_that_were_all_read_keep_to_the_same_limits() -> None:
    prompts = source(kind=PromptSource)
    assert [prompts[index].id for index in range(len(prompts))] == [f"train/{i}" for i in range(60) if usable(i)]
    assert prompts.state() is None


@pytest.mark.parametrize("at", [0, 23, 71])
def test_it_goes_on_with_the_same_prompts_and_counts(at: int) -> None:
    whole = source()
    first = drawing(whole)
    while first.position < at:
        first.draw(1)
    state, position = json.loads(json.dumps(whole.state())), first.position
    other = source()
    other.restore(state)
    second = drawing(other)
    second.go_to(position)
    assert first.draw(50) == second.draw(50)
    assert whole.state() == other.state() and whole.state()[1]["reached"] == first.position  # type: ignore[index]
    other.restore(())
    assert other.state() == source().state()


def failure(prompts: PromptSource, state: Any = ()) -> str:
    prompts.restore(state)
    prefetcher = drawing(prompts)
    try:
        for _ in range(100):
            prefetcher.draw(50)
    except DataError as error:
        return str(error)
    return "no failure"


def test_bad_rows_end_a_run_by_their_share_of_the_rows_that_were_reached() -> None:
    rows = 3000  # one in seven is bad, and some have too many images
    for share, most in ((0.0, 1), (0.001, 2), (0.01, 11)):  # counted as shares of the first thousand
        prompts = source(rows, max_bad_rows=share)
        assert f"{most} of " in failure(prompts), share
        assert prompts.causes.total() - len(prompts.overlong_lengths) == most
    prompts = source(rows, max_bad_rows=0.1)
    assert "101 of " in failure(prompts)
    assert "Column 'answer' is null" in failure(prompts)
    known = [{"usable": 5000}, {"source": "kit", "reached": 9999, "causes": {"Bad image …": 999}}]
    text = failure(source(rows, max_bad_rows=0.1), known)
    assert "999 x Bad image …" in text and " of 10" in text, "also of those before it went on"
    with pytest.raises(DataError, match=r"row 0|row 7|is null"):
        drawing(source(on_bad_row="fail")).draw(60)


def test_rows_of_which_none_can_be_used_are_an_error_and_no_endless_search() -> None:
    prompts = source(5000, max_prompt_tokens=2, max_bad_rows=1.0)
    with pytest.raises(DataError, match=r"None of the first 1000 rows can be used: .*longer than data.max_prompt_toke"):
        drawing(prompts).draw(1)


def test_a_dataset_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="the dataset has no rows") as caught:
        PromptsAhead([DatasetRows("a", [row(1)]), DatasetRows("b", [])], Words(), max_prompt_tokens=10)  # type: ignore[arg-type]
    assert caught.value.where == "data.train, dataset b"


def test_its_fingerprint_is_that_of_its_files_and_limits() -> None:
    same = source().fingerprint
    assert same.startswith(AHEAD) and source().fingerprint == same
    changes: list[dict[str, Any]] = [
        {"fingerprint": "v2"}, {"max_prompt_tokens": 9}, {"max_images": 2}, {"system_prompt": "Be brief."},
        {"num_rows": 61},
    ]  # fmt: skip
    assert len({same, *(source(**change).fingerprint for change in changes)}) == 1 + len(changes)
    assert source(kind=PromptSource).fingerprint not in (same, same.removeprefix(AHEAD))


def test_without_a_loaders_fingerprint_some_rows_are_compared() -> None:
    def fingerprint(change: Callable[[Prompt], Prompt], at: int) -> str:
        rows = [row(index) for index in range(500)]
        rows[at] = change(rows[at])
        return PromptsAhead([DatasetRows("kit", rows)], Words(), max_prompt_tokens=10).fingerprint  # type: ignore[arg-type]

    same = fingerprint(lambda each: each, 0)
    assert fingerprint(lambda each: each, 5) == same
    assert fingerprint(lambda each: row(0), 499) != same


def test_ids_have_the_number_of_their_row() -> None:
    rows = [Prompt("same", (Message("user", "word"),)) for _ in range(3)]
    parts = [DatasetRows("a", rows), DatasetRows("b", [row(0), row(1)])]
    prompts = PromptsAhead(parts, Words(), max_prompt_tokens=10)  # type: ignore[arg-type]
    assert [prompts[i].id for i in range(5)] == ["a/same/0", "a/same/1", "a/same/2", "b/train/0", "b/train/1"]
