"""The checks of dataset loaders: each rule is broken once."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import replace

import pytest

from mmrl.errors import DataError, PluginError
from mmrl.interfaces import DatasetLoader, PluginConfig
from mmrl.testing import check_dataset
from mmrl.testing.datasets import MAX_ROWS
from mmrl.types import Candidate, Message, Prompt, RawImage


def loader(rows):
    """A loader class whose ``load`` answers what ``rows`` makes."""
    return type("Given", (DatasetLoader,), {"load": lambda self: rows()})


@pytest.fixture
def prompts(picture) -> list[Prompt]:
    text = Prompt("train/0", (Message("system", ""), Message("user", "What is 3 + 4?")), answer="7")
    image = Prompt("train/1", (Message("user", "<image> and <image>?"),), (picture(60, 90), picture(28, 28)))
    return [text, image]


def compared(prompt: Prompt, candidates) -> Prompt:
    return replace(prompt, candidates=candidates)


class Forever(list):
    def __getitem__(self, index):
        return super().__getitem__(0)


class Keyed(dict):
    """A dict from row numbers: the row after the last is a KeyError."""


@pytest.mark.parametrize(
    ("change", "rule", "detail"),
    [
        (lambda rows: [], "a dataset has rows", "len is 0"),
        (iter, "load gives a sequence", "list_iterator"),
        (lambda rows: Forever(rows), "the row after the last is an IndexError", "row 2 of 2 exists"),
        (lambda rows: Keyed(enumerate(rows)), "the row after the last is an IndexError", "KeyError"),
        (lambda rows: [rows[0], "What is 3 + 4?"], "rows are Prompts", "row 1"),
        (lambda rows: [rows[0], rows[0]], "ids are unique", "rows 0 and 1 are both 'train/0'"),
        (lambda rows: [replace(rows[0], id=uuid.uuid4().hex)], "ids are the same when loaded again", "the split and"),
        (lambda rows: [replace(rows[0], id=0)], "ids are texts", "row 0: 0"),
        (lambda rows: [replace(rows[0], messages=list(rows[0].messages))], "messages is a tuple of Message", "tuple("),
        (lambda rows: [replace(rows[0], messages=())], "there is a message with content", "()"),
        (lambda rows: [replace(rows[0], messages=(Message("user", " "),))], "there is a message with content", "' '"),
        (lambda rows: [replace(rows[0], messages=(Message("user", 7),))], "roles and contents are texts", "7"),
        (lambda rows: [replace(rows[1], images=rows[1].images[:1])], "each image has its <image>", "2 placeholders, 1"),
        (lambda rows: [replace(rows[1], images=list(rows[1].images))], "images is a tuple of RawImage", "row 0"),
        (lambda rows: [replace(rows[1], images=(RawImage("a.png", "a"),) * 2)], "images are bytes", "row 0"),
        (lambda rows: [replace(rows[0], columns=[("a", 1)])], "columns is a mapping", "row 0"),
        (lambda rows: [replace(rows[0], demonstration=7)], "demonstration is text or None", "row 0: 7"),
        (lambda rows: [compared(rows[0], [])], "candidates is a tuple of Candidate", "row 0"),
        (lambda rows: [compared(rows[0], ("7", "8"))], "candidates is a tuple of Candidate", "'7'"),
        (lambda rows: [compared(rows[0], (Candidate(" "),))], "candidates are texts that say something", "row 0"),
        (lambda rows: [compared(rows[0], (Candidate("7", float("nan")),))], "scores are finite numbers", "nan"),
        (lambda rows: [compared(rows[0], (Candidate("7", "1"),))], "scores are finite numbers", "'1'"),
        (lambda rows: [compared(rows[0], (Candidate("7", 1, rows[1].images),))], "no images of their own", "row 0"),
    ],
)
def test_a_broken_rule_is_named_with_what_shows_it_and_what_to_do(prompts, change, rule, detail) -> None:
    with pytest.raises(PluginError) as caught:
        check_dataset(loader(lambda: change(prompts)))
    text = str(caught.value)
    assert rule in text and detail in text
    assert "Given" in text


def test_a_dataset_that_grows_is_refused(prompts) -> None:
    sizes = itertools.count(1)
    with pytest.raises(PluginError, match="loading again gives as many rows"):
        check_dataset(loader(lambda: prompts[: next(sizes)]))


def test_an_image_without_a_readable_header_is_named(prompts) -> None:
    broken = replace(prompts[1], images=(prompts[1].images[0], RawImage(b"no image", "row 1, images[1]")))
    with pytest.raises(DataError, match=r"row 1, images\[1\]"):
        check_dataset(loader(lambda: [prompts[0], broken]))


def test_a_loader_that_raises_is_named_with_its_own_line() -> None:
    def rows():
        raise KeyError("problem")

    with pytest.raises(PluginError, match="load raised KeyError: 'problem'"):
        check_dataset(loader(rows))


def test_a_long_dataset_is_looked_at_from_end_to_end(prompts) -> None:
    class Long:
        seen: set[int] = set()  # noqa: RUF012

        def __len__(self):
            return 50 * MAX_ROWS

        def __getitem__(self, row):
            if row >= len(self):
                raise IndexError(row)
            self.seen.add(row)
            return replace(prompts[0], id=f"train/{row}")

    check_dataset(loader(Long))
    assert len(Long.seen) == MAX_ROWS
    assert {0, 50 * MAX_ROWS - 1} <= Long.seen


def test_a_loader_that_keeps_the_rules_passes_by_class_name_or_itself(prompts, tmp_path) -> None:
    class Options(DatasetLoader):
        class Config(PluginConfig):
            rows: int = 2

        def load(self):
            return tuple(prompts[: self.config.rows])

    check_dataset(Options)
    check_dataset(Options(Options.Config(rows=1)))
    given = (Candidate("7", 1.0), Candidate("8", 0), Candidate("9"))
    check_dataset(loader(lambda: [compared(prompt, given) for prompt in prompts]))
    (tmp_path / "sums.jsonl").write_text('{"problem": "3 + 4?", "answer": "7"}\n{"problem": "1?", "answer": "1"}\n')
    check_dataset("table", options={"path": str(tmp_path / "sums.jsonl")})


def test_a_fingerprint_is_a_text(prompts: list[Prompt]) -> None:
    kinds = {"load": lambda self: prompts, "fingerprint": lambda self: 7}
    with pytest.raises(PluginError, match="a fingerprint is a text"):
        check_dataset(type("Given", (DatasetLoader,), kinds))


def test_rows_as_they_were_sampled_are_of_their_type(prompts: list[Prompt]) -> None:
    kinds = {"load": lambda self: prompts, "sampled": lambda self: prompts[:1]}
    with pytest.raises(PluginError, match="rows as they were sampled are SampledRows"):
        check_dataset(type("Given", (DatasetLoader,), kinds))
