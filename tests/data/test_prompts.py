from __future__ import annotations

import subprocess
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mmrl.data.bad_rows import BadRows
from mmrl.data.order import PromptOrder, WeightedOrder, request_seed
from mmrl.data.prompts import DatasetRows, PromptSource
from mmrl.data.prompts import contents as fingerprinted
from mmrl.errors import ConfigError, DataError, HubUnreachableError, UselessRow
from mmrl.interfaces import Needs
from mmrl.step.given import Given
from mmrl.types import Candidate, EncodedPrompt, Message, Prompt, RawImage, Sample

PINNED_ORDER = [7, 0, 2, 5, 4, 6, 3, 1, 4, 3, 6, 1, 5, 7, 2, 0]
PINNED_SEED = 112500882025349120


class WordCounter:
    """An encoder whose tokens are words."""

    def num_tokens(self, prompt: Prompt) -> int:
        return sum(len(message.content.split()) for message in prompt.messages)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        raise NotImplementedError

    def demonstrate(self, prompt: EncodedPrompt, *, all_turns: bool = False) -> Sample:
        raise NotImplementedError


def row(index: int, num_words: int, text: str = "word", **columns: Any) -> Prompt:
    return Prompt(f"train/{index}", (Message("user", " ".join([text] * num_words)),), columns=columns)


def source(rows: list[Prompt], **options: Any) -> PromptSource:
    return PromptSource([DatasetRows("kit", rows)], WordCounter(), **{"max_prompt_tokens": 10} | options)


class Faulty(list[Prompt]):
    """Rows of which some cannot be read."""

    def __init__(self, rows: Sequence[Prompt], faults: Mapping[int, str]) -> None:
        super().__init__(rows)
        self.faults = faults

    def __getitem__(self, index: Any) -> Any:
        if index in self.faults:
            raise DataError(
                self.faults[index], where=f"rows.jsonl, line {index + 1}", possible="text", remedy="mend it"
            )
        return super().__getitem__(index)


def rows_of(count: int, **faults: str) -> Faulty:
    """``count`` short rows; those named ``r<index>`` have that fault."""
    return Faulty([row(index, 1) for index in range(count)], {int(k[1:]): fault for k, fault in faults.items()})


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
    code = "from mmrl.data.order import request_seed; print(request_seed(0, 1, 'train/17', 2))"
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
    assert "1 dropped: longer than data.max_prompt_tokens" in str(caught.value)
    assert "3 rows of 1 to 99 tokens" in str(caught.value)


def test_equal_ids_are_refused() -> None:
    with pytest.raises(DataError, match="Two rows have the id 'train/0'"):
        source([row(0, 1), row(0, 2)])


def test_bad_rows_are_dropped_and_listed_apart_from_long_ones() -> None:
    rows = rows_of(
        300, r7="Column 'answer' is null", r20="An image of 1x50 pixels is bad", r21="An image of 1x51 pixels is bad"
    )
    rows[4] = row(4, 11)
    prompts = source(rows)
    assert len(prompts) == 296 and prompts.num_rows == 300
    assert prompts.dropped[0] == ("train/4", "11 tokens, more than data.max_prompt_tokens = 10")
    assert prompts.dropped[1] == ("7", "Column 'answer' is null (rows.jsonl, line 8)")
    assert [name for name, _ in prompts.dropped] == ["train/4", "7", "20", "21"]
    assert prompts.causes == {
        "longer than data.max_prompt_tokens": 1,
        "Column 'answer' is null": 1,
        "An image of …x… pixels is bad": 2,
    }
    assert prompts.overlong_lengths == [11]


def test_more_bad_rows_than_the_bound_are_an_error_that_counts_causes_and_names_rows() -> None:
    rows = rows_of(300, r7="Column 'answer' is null", r20="Bad image 4", r21="Bad image 5", r22="Bad image 4")
    assert len(source(rows, max_bad_rows=4 / 300)) == 296
    with pytest.raises(DataError) as caught:
        source(rows, name="data.eval")
    assert caught.value.what == (
        "4 of 300 rows cannot be used, more than data.max_bad_rows = 0.01: 3 x Bad image …, 1 x Column 'answer' is null"
    )
    assert caught.value.where == (
        "data.eval, row 7: rows.jsonl, line 8 (Column 'answer' is null); row 20: rows.jsonl, line 21 (Bad image …); "
        "row 21: rows.jsonl, line 22 (Bad image …); row 22: rows.jsonl, line 23 (Bad image …)"
    )
    assert caught.value.possible == ""
    assert caught.value.remedy.startswith("mend it (that is for the first cause); or raise data.max_bad_rows")


@pytest.mark.parametrize(
    ("row", "where", "shown"),
    [
        ("0", "d/x.csv, split x, row 0, image_path[0]", "d/x.csv, split x, row 0, image_path[0]"),
        ("x/1", "d/x.csv, split x, row 1, image_path[0]", "d/x.csv, split x, row 1, image_path[0]"),
        ("x/1", "x/1, images[0]", "row x/1, images[0]"),
        ("x/1", "x/1", "row x/1"),
        ("1", "rows, row 12", "row 1: rows, row 12"),
        ("1", "v1.csv", "row 1: v1.csv"),
        ("1", "", "row 1"),
    ],
)
def test_a_bad_row_is_named_once(row: str, where: str, shown: str) -> None:
    bad = BadRows("data.train", 2, "drop", 0.01)
    bad.add(row, DataError("Bad", where=where))
    with pytest.raises(DataError) as caught:
        bad.check()
    assert caught.value.where == f"data.train, {shown}"
    assert caught.value.remedy == "raise data.max_bad_rows, and they are left out"
    with pytest.raises(DataError) as caught:
        BadRows("data.train", 2, "fail", 0.01).add(row, DataError("Bad", where=where, remedy="mend it"))
    assert caught.value.where == f"data.train, {shown}"
    assert caught.value.remedy == "mend it; or set data.on_bad_row: drop"


def test_rows_that_are_all_bad_for_one_cause_are_an_error_that_says_so() -> None:
    with pytest.raises(DataError) as caught:
        source(rows_of(3, r0="Bad image 1", r1="Bad image 2", r2="Bad image 3"))
    assert caught.value.what == "all 3 rows cannot be used, for one cause: Bad image …"
    assert caught.value.remedy == "mend it"
    with pytest.raises(DataError, match=r"2 of 2 rows cannot be used, more than .*: 1 x Bad image …, 1 x Bad text"):
        source(rows_of(2, r0="Bad image 1", r1="Bad text"))


def test_long_rows_do_not_count_as_bad() -> None:
    assert len(source([row(0, 1), row(1, 99), row(2, 99)], max_bad_rows=0.0)) == 1


def test_a_bad_row_can_stop_the_run() -> None:
    with pytest.raises(DataError, match="Bad image 4") as caught:
        source(rows_of(300, r7="Bad image 4", r8="Bad image 5"), on_bad_row="fail")
    assert caught.value.where == "data.train, row 7: rows.jsonl, line 8"
    assert "data.on_bad_row: drop" in caught.value.remedy


def test_what_is_no_rows_fault_is_not_dropped() -> None:
    class Offline(list[Prompt]):
        def __getitem__(self, index: Any) -> Any:
            raise HubUnreachableError("no network")

    with pytest.raises(HubUnreachableError):
        source(Offline([row(0, 1)]), max_bad_rows=1.0)
    with pytest.raises(ConfigError):
        source([row(0, 1)], prompt_template="{{ row.unti ", max_bad_rows=1.0)


def test_a_row_that_turns_out_bad_counts_until_there_are_too_many() -> None:
    def refuse(prompt: Prompt) -> str:
        raise DataError("truncated")

    with pytest.raises(DataError, match="truncated") as caught:
        source([row(0, 1)], on_bad_row="fail").attempt(0, refuse)
    assert caught.value.where == "data.train, row train/0"


def mixture(*weights: float | None, sizes: Sequence[int] = (5, 11, 300)) -> PromptSource:
    """Three datasets; the rows of the last one say themselves where they are from."""
    parts = [
        DatasetRows(name, [row(i, 1) for i in range(size)], w)
        for name, size, w in zip("abc", sizes, weights, strict=True)
    ]
    parts[2] = replace(parts[2], rows=[replace(each, source="own") for each in parts[2].rows])
    return PromptSource(parts, WordCounter(), max_prompt_tokens=10)


def test_mixed_rows_are_told_apart_by_their_dataset() -> None:
    prompts = mixture(None, None, None)
    assert [prompts[i].id for i in (0, 4, 5, 16)] == ["a/train/0", "a/train/4", "b/train/0", "c/train/0"]
    assert [prompts[i].source for i in (0, 5, 16)] == ["a", "b", "own"]
    assert prompts.sources == {"a": 5, "b": 11, "own": 300}
    assert source([row(0, 1)])[0].id == "train/0" and source([row(0, 1)])[0].source == "kit"


def test_without_weights_all_rows_are_in_one_order() -> None:
    assert mixture(None, None, None).order(3).take(0, 700) == PromptOrder(316, 3).take(0, 700)


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (1.0, 1.0, 1.0), (5.0, 90.0, 0.7)])
def test_weighted_datasets_have_their_exact_shares_in_epochs_of_their_own(weights) -> None:
    prompts = mixture(*weights)
    taken = prompts.order(seed=2).take(0, 3000)
    names = ["abc"[bisect([5, 16], index)] for _, index in taken]
    counts = np.cumsum([[name == each for each in "abc"] for name in names], 0)
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - np.outer(np.arange(1, 3001), shares)).max() <= 0.75 + 1e-9
    for length in (7, 16, 100):
        windows = counts[length:] - counts[:-length]
        assert np.abs(windows - length * shares).max() <= 1.5
        assert np.abs(windows - length * shares).mean() < 0.5
    for name, size in zip("abc", (5, 11, 300), strict=True):
        drawn = [pair for pair, each in zip(taken, names, strict=True) if each == name]
        assert [epoch for epoch, _ in drawn] == [i // size for i in range(len(drawn))]
        for start in range(0, len(drawn) - size + 1, size):
            assert len(set(drawn[start : start + size])) == size


def test_two_weighted_datasets_never_miss_their_share_of_a_batch_by_more_than_one() -> None:
    parts = [DatasetRows(name, [row(i, 1) for i in range(9)], weight) for name, weight in (("a", 0.37), ("b", 0.63))]
    order = PromptSource(parts, WordCounter(), max_prompt_tokens=10).order(0)
    first = np.cumsum([index < 9 for _, index in order.take(0, 2000)])
    for length in (1, 3, 8, 64):
        assert np.abs(first[length:] - first[:-length] - 0.37 * length).max() <= 1


def test_a_weighted_order_can_be_resumed_anywhere() -> None:
    prompts = mixture(0.5, 0.3, 0.2)
    taken = prompts.order(seed=2).take(0, 500)
    for position in (0, 1, 77, 499):
        assert prompts.order(seed=2).at(position) == taken[position]
    running = prompts.order(seed=2)
    assert [running.at(position) for position in (499, 499, 3, 4)] == [taken[position] for position in (499, 499, 3, 4)]
    assert prompts.order(seed=3).take(0, 500) != taken


def test_any_weighted_order_is_a_matter_of_the_position_and_takes_no_row_twice_in_an_epoch() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 30, rng.integers(2, 7)).tolist()
        weights, names = (
            rng.choice([1.0, 1 / 3, 1000.0, 0.01], len(sizes)).tolist(),
            [str(i) for i in range(len(sizes))],
        )
        running = WeightedOrder(sizes, weights, names, 7)
        taken = running.take(0, 300)
        assert len(set(taken)) == 300
        for position in rng.integers(0, 300, 5).tolist():
            fresh = WeightedOrder(sizes, weights, names, 7)
            assert running.at(position) == fresh.at(position) == taken[position]
            assert fresh.take(position, 9)[: 300 - position] == taken[position : position + 9]


def test_a_prompt_that_comes_twice_in_a_batch_has_another_seed() -> None:
    prompts = mixture(10.0, 1.0, 1.0)
    batch = prompts.order(0).take(0, 24)
    ids = [prompts[index].id for _, index in batch]
    assert max(Counter(ids).values()) > 1
    assert len({request_seed(0, epoch, name, 0) for (epoch, _), name in zip(batch, ids, strict=True)}) == 24


def test_each_mixed_dataset_needs_rows_and_has_a_bound_of_its_own() -> None:
    good, bad = [row(i, 1) for i in range(500)], rows_of(50, r0="null", r9="null")
    with pytest.raises(DataError, match="2 of 50 rows cannot be used") as caught:
        PromptSource([DatasetRows("a", good), DatasetRows("b", bad)], WordCounter(), max_prompt_tokens=10)
    assert caught.value.where.startswith("data.train, dataset b, row 0: rows.jsonl, line 1")
    with pytest.raises(DataError, match="No row is left: 1 row of 99 to 99 tokens") as caught:
        PromptSource([DatasetRows("a", good), DatasetRows("b", [row(0, 99)])], WordCounter(), max_prompt_tokens=10)
    assert "dataset b" in caught.value.where


def test_a_dataset_without_a_row_of_use_says_why_and_not_that_prompts_are_too_long() -> None:
    """Causes of another dataset of the mixture are not told."""

    def check(prompt: Prompt) -> None:
        if prompt.messages[0].content != "word":
            raise UselessRow("no order" if prompt.messages[0].content == "tie" else "no rest", counted="data/ties")

    mixed = [DatasetRows("a", [row(0, 1), row(1, 1, "odd")]), DatasetRows("b", [row(i, 1, "tie") for i in range(3)])]
    with pytest.raises(DataError) as caught:
        PromptSource(mixed, WordCounter(), max_prompt_tokens=10, check=check)
    assert caught.value.what == "No row is left: 3 rows: no order"
    assert "max_prompt_tokens" not in f"{caught.value.where} {caught.value.remedy}"


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
        ("{{ prompt }} {{ row.unti }}", "unti"),
        ("{{ prompt.__class__.__mro__ }}", "unsafe"),
        ("{{ row.clear() }}{{ prompt }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
        ("just this", "turns … <image> into …"),
        ("{{ prompt }}{{ prompt }}", "turns … <image> into …"),
    ],
)
def test_a_template_that_fits_no_row_is_refused_with_its_key_and_what_it_may_use(template: str, message: str) -> None:
    image = (RawImage(b"x", "x"),)
    rows = [replace(row(index, 1, "<image>", unit="cm"), images=image) for index in range(9)]
    with pytest.raises(DataError, match=rf"all 9 rows cannot be used.*data\.prompt_template .*{message}") as caught:
        source(rows, prompt_template=template)
    assert caught.value.where == "data.train, row train/0; row train/1; row train/2; and 6 more"
    assert "prompt" in caught.value.possible and "correct data.prompt_template" in caught.value.remedy


def test_a_template_that_fails_on_one_row_costs_that_row() -> None:
    rows = [row(index, 1, unit="<image>" if index == 3 else "cm") for index in range(500)]
    rows[3] = replace(rows[3], images=(RawImage(b"x", "x"),))
    rows[7] = replace(rows[7], columns={})
    kept = source(rows, prompt_template="{{ prompt }} in {{ row.unit }}")
    assert len(kept) == 498 and contents(kept[0]) == [("user", "word in cm")]
    (third, first), (seventh, second) = kept.dropped
    assert (third, first) == ("train/3", "data.prompt_template turns 0 <image> into 1")
    assert seventh == "train/7" and second.startswith("data.prompt_template fails: 'dict object' has no attribute")
    with pytest.raises(ConfigError, match="not valid Jinja"):
        source(rows, prompt_template="{{ prompt")


def test_a_template_needs_a_user_message() -> None:
    with pytest.raises(DataError, match="no user message"):
        source([Prompt("0", (Message("assistant", "hi"),))], prompt_template="{{ prompt }}")


def test_rows_without_an_image_are_told_of_where_nearly_all_have_one() -> None:
    def pictured(count: int, *bare: int) -> list[Prompt]:
        image = (RawImage(b"x", "x"),)
        return [replace(row(index, 1), images=() if index in bare else image) for index in range(count)]

    assert source(pictured(40)).warnings == source(pictured(40, *range(40))).warnings == []
    assert source(pictured(40, 7)).warnings == ["data.train: 1 of 40 rows has no image, as the others have: train/7"]
    (warning,) = source(pictured(400, *range(12))).warnings
    assert "12 of 400 rows have no image" in warning and warning.endswith("train/9, and 2 more")
    assert source(pictured(40, *range(5))).warnings == []


def test_rows_that_spell_an_image_and_have_none_are_counted_once() -> None:
    texts = ["Write <image> twice.", "See <image 2>.", "See <|image_3|>.", "<IMG 1>?", "an image", "<images>", "<img>"]
    texts += ["plain"] * 8
    rows = [Prompt(f"r{index}", (Message("user", text),)) for index, text in enumerate(texts)]
    rows.append(replace(rows[0], id="shown", images=(RawImage(b"x", "x"),)))
    assert source(rows).warnings == [], "to a model of text they are text like others"
    (warning,) = source(rows, reads_images=True).warnings
    told = "4 of 16 rows spell <image> or the like and have no image, so it is read as text: r0, r1, r2, r3"
    assert warning == f"data.train: {told}"
    (warning,) = source(rows[:5], reads_images=True).warnings
    assert warning.endswith("; if there are pictures, name their column (images)")
    assert (
        "1 of 9 rows spells <image> or the like and has no image" in source(rows[3:12], reads_images=True).warnings[0]
    )


def test_a_template_may_write_a_placeholder_into_a_row_without_images() -> None:
    spells = row(0, 1, tag="<image>")
    found = source([spells], prompt_template="{{ prompt }} {{ row.tag }}")
    assert found[0].messages[-1].content == "word <image>"
    with pytest.raises(DataError, match="turns … <image> into …"):
        source([replace(spells, images=(RawImage(b"x", "x"),))], prompt_template="{{ prompt }} {{ row.tag }}")


def test_answers_to_compare_are_part_of_a_fingerprint_and_rows_without_them_keep_theirs() -> None:
    plain = replace(row(1, 1), answer="7", demonstration="7", choices=("7", "8"))
    assert fingerprinted(plain, 3) == "('train/1', '', [('user', 'word')], '7', '7', ('7', '8'), 3)"

    def of(*candidates: Candidate) -> str:
        return source([row(0, 1), replace(plain, candidates=candidates)]).fingerprint

    one, two = Candidate("7", 1.0), Candidate("8", 0.0)
    kinds = [(), (one, two), (two, one), (one, Candidate("9", 0.0)), (one, Candidate("8", 0.5)), (one, Candidate("8"))]
    assert len({of(*kind) for kind in kinds}) == len(kinds)
    assert of(one, two) == of(one, two)


def test_notes_of_a_loader_are_warnings_of_its_dataset() -> None:
    notes = ["column 'img' holds pictures"]
    parts = [DatasetRows("a", [row(1, 1)], notes=lambda: notes), DatasetRows("b", [row(2, 1)])]
    found = PromptSource(parts, WordCounter(), max_prompt_tokens=10)
    assert found.warnings == ["data.train, dataset a: column 'img' holds pictures"]


def imitated(prompt: Prompt) -> None:
    Given.check_row(prompt, cast(Any, None), Needs(), cast(Any, None))


def test_rows_with_nothing_to_imitate_are_bad_rows_of_a_run_that_imitates() -> None:
    shown = [replace(row(i, 1), demonstration="so") for i in range(200)]
    none, blank = replace(shown[0], id="none", demonstration=None), replace(shown[0], id="blank", demonstration=" ")
    found = source([*shown, none, blank], check=imitated)
    assert len(found) == 200 and [name for name, _ in found.dropped] == ["none", "blank"]
    assert len(source([*shown, none, blank])) == 202
    with pytest.raises(DataError, match="all 2 rows cannot be used, for one cause: The row has no demonstration"):
        source([none, replace(none, id="other")], check=imitated)
