"""Answers to compare: chosen and rejected ones, answers with scores, and one with a verdict."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl.testing import check_dataset
from mmrl.types import Message, Prompt
from mmrl_datasets.table import Table


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40)).save(buffer, "PNG")
    return buffer.getvalue()


def table(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Table:
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Table(Table.Config(path=str(folder / "t.jsonl"), **options))


def load(folder: Path, *rows: dict[str, Any], **options: Any) -> list[Prompt]:
    found = table(folder, list(rows), **options)
    check_dataset(found)
    return list(found.load())


def refused(folder: Path, row: dict[str, Any], **options: Any) -> DataError:
    loaded = table(folder, [row] if options else [PAIR, row], **options)
    with pytest.raises(DataError) as caught:
        loaded.load()[0 if options else 1]
    return caught.value


def said(prompt: Prompt) -> list[tuple[str, float | None]]:
    return [(each.text, each.score) for each in prompt.candidates]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


ASKED = (Message("user", "What is it?"),)
GOOD, BAD = "A cat.", "A dog."
PAIR = {"prompt": "What is it?", "chosen": GOOD, "rejected": BAD}
TALK = [user("Hi."), assistant("Hello."), user("What is it?")]
FORMS: dict[str, dict[str, Any]] = {
    "texts": PAIR,
    "messages": {**PAIR, "chosen": [assistant(GOOD)], "rejected": [assistant(BAD)]},
    "one message": {**PAIR, "chosen": {"from": "gpt", "value": GOOD}, "rejected": {"from": "gpt", "value": BAD}},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "What is it?"}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "typed parts": {
        "prompt": [user([{"type": "text", "text": "What is it?"}])],
        "chosen": [assistant([{"type": "text", "text": GOOD}])],
        "rejected": [assistant([{"type": "text", "text": BAD}])],
    },
    "whole conversations": {
        "chosen": [user("What is it?"), assistant(GOOD)],
        "rejected": [user("What is it?"), assistant(BAD)],
    },
    "whole conversations beside their prompt": {
        "prompt": "What is it?",
        "chosen": [user("What is it?"), assistant(GOOD)],
        "rejected": [user("What is it?"), assistant(BAD)],
    },
    "an end and another text": {"messages": [user("What is it?"), assistant(GOOD)], "rejected_response": BAD},
    "an end and another conversation": {
        "messages": [user("What is it?"), assistant(GOOD)],
        "rejected_messages": [user("What is it?"), assistant(BAD)],
    },
    "graded": {"prompt": "What is it?", "candidates": [GOOD, BAD], "scores": [1, 0]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_pairs_in_every_layout_are_the_same_two_candidates(form: str, tmp_path: Path) -> None:
    [prompt] = load(tmp_path, FORMS[form])
    assert prompt.messages == ASKED
    assert said(prompt) == [(GOOD, 1.0), (BAD, 0.0)]


@pytest.mark.parametrize("form", FORMS)
def test_pairs_are_read_from_parquet_too(form: str, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{**FORMS[form], "images": [picture()]}]), tmp_path / "t.parquet")
    [prompt] = Table(Table.Config(path=str(tmp_path / "t.parquet"))).load()
    assert prompt.messages == (Message("user", "<image>What is it?"),) and len(prompt.images) == 1
    assert said(prompt) == [(GOOD, 1.0), (BAD, 0.0)]


def test_the_common_turns_of_whole_conversations_are_the_prompt_and_the_chosen_end_the_demonstration(
    tmp_path: Path,
) -> None:
    [prompt] = load(tmp_path, {"chosen": [*TALK, assistant(GOOD)], "rejected": [*TALK, assistant(BAD)]})
    assert [each.content for each in prompt.messages] == ["Hi.", "Hello.", "What is it?"]
    assert said(prompt) == [(GOOD, 1.0), (BAD, 0.0)] and prompt.demonstration == GOOD
    [prompt] = load(tmp_path, {"chosen": [*TALK, assistant(GOOD)], "rejected": BAD}, prompt="chosen")
    assert said(prompt) == [(GOOD, 1.0), (BAD, 0.0)]


def test_csv_has_conversations_and_lists_as_json(tmp_path: Path) -> None:
    rows = [
        {"chosen": json.dumps([*TALK, assistant(GOOD)]), "rejected": json.dumps([*TALK, assistant(BAD)])},
        {"question": "What is it?", "candidates": json.dumps([GOOD, BAD]), "scores": "[3, 1]"},
    ]
    for number, row in enumerate(rows):
        with open(tmp_path / f"{number}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow(row)
    read = [Table(Table.Config(path=str(tmp_path / f"{number}.csv"))).load()[0] for number in range(2)]
    assert [said(prompt) for prompt in read] == [[(GOOD, 1.0), (BAD, 0.0)], [(GOOD, 3.0), (BAD, 1.0)]]
    assert [prompt.messages[-1].content for prompt in read] == ["What is it?"] * 2


def test_several_answers_margins_and_scores(tmp_path: Path) -> None:
    [prompt] = load(tmp_path, {**PAIR, "rejected": [BAD, "A cow."]})
    assert said(prompt) == [(GOOD, 1.0), (BAD, 0.0), ("A cow.", 0.0)]
    [prompt] = load(tmp_path, {**PAIR, "margin": 2.5})
    assert said(prompt) == [(GOOD, 2.5), (BAD, 0.0)]
    row = {"q": "What is it?", "all": [{"text": GOOD, "grade": "4.5"}, {"text": BAD, "grade": None}]}
    [prompt] = load(tmp_path, row, prompt="q", candidates="all.text", scores="all.grade")
    assert said(prompt) == [(GOOD, 4.5), (BAD, None)]


JUDGED: dict[str, dict[str, Any]] = {
    "a completion": {"prompt": "What is it?", "completion": GOOD},
    "messages": {"prompt": [user("What is it?")], "completion": [assistant(GOOD)]},
    "an end": {"messages": [user("What is it?"), assistant(GOOD)]},
}


@pytest.mark.parametrize("form", JUDGED)
def test_one_answer_and_a_verdict_are_one_candidate(form: str, tmp_path: Path) -> None:
    prompts = load(tmp_path, {**JUDGED[form], "label": True}, {**JUDGED[form], "label": False})
    assert [(prompt.messages, said(prompt)) for prompt in prompts] == [(ASKED, [(GOOD, 1.0)]), (ASKED, [(GOOD, 0.0)])]
    prompts = load(tmp_path, {**JUDGED[form], "good": 1}, {**JUDGED[form], "good": "0"}, desirable="good")
    assert [said(prompt) for prompt in prompts] == [[(GOOD, 1.0)], [(GOOD, 0.0)]]


def test_tables_without_answers_to_compare_are_read_as_before(tmp_path: Path) -> None:
    kinds: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"question": "Is it?", "label": True}, {}),
        ({"question": "Is it?", "solution": "It is.", "label": True}, {}),
        ({"question": "Is it?", "label": 1, "completion": "It is."}, {}),
        ({"question": "Which?", "answer": "1", "candidates": ["a", "b"]}, {}),
        ({"question": "Which?", "answer": "1", "chosen": "a"}, {}),
        ({"question": "Which?", "answer": "1", "rejected": False}, {}),
        ({"question": "Which?", "answer": "1", "rejected": "b"}, {"rejected": ""}),
        ({**PAIR, "answer": "1"}, {"chosen": ""}),
        ({**PAIR, "answer": "1"}, {"demonstration": "chosen"}),
    ]
    for row, options in kinds:
        [prompt] = load(tmp_path, row, **options)
        assert prompt.candidates == (), row
    assert prompt.demonstration == GOOD


def test_bad_rows_name_row_and_column(tmp_path: Path) -> None:
    def told(row: dict[str, Any], message: str, column: str, **options: Any) -> None:
        error = refused(tmp_path, row, **options)
        assert message in str(error), error
        assert f"row {0 if options else 1}" in error.where and column in error.where, error.where

    told({**PAIR, "chosen": None}, "The answer is null", "column 'chosen'")
    told({**PAIR, "rejected": " "}, "The answer is empty", "column 'rejected'")
    told({**PAIR, "rejected": []}, "the list is empty", "column 'rejected'")
    told({**PAIR, "rejected": 3}, "The answer is of type int", "column 'rejected'")
    told({**PAIR, "rejected": [user("What is it?")]}, "The last turn is the user's", "column 'rejected'")
    differ = {"chosen": [*TALK, assistant(GOOD)], "rejected": [TALK[0], assistant("Ho."), TALK[2], assistant(BAD)]}
    told({**PAIR, **differ}, "differ from message 1 on", "column 'rejected'")
    told({**PAIR, "chosen": [user("Who?"), assistant(GOOD)]}, "The prompt differs", "column 'prompt'")
    system = [{"role": "system", "content": "Be brief."}, user("What is it?")]
    told({**PAIR, "prompt": system, "chosen": [TALK[2], assistant(GOOD)]}, "The prompt differs", "column 'prompt'")
    told({**PAIR, "prompt": [TALK[2], assistant(GOOD)]}, "ends with an answer", "column 'prompt'")
    told({**PAIR, "video": "a.mp4"}, "The row has video", "column 'video'")
    for row in ({"rejected_images": ["a.png"]}, {"chosen": [assistant([{"type": "image", "image": "a.png"}])]}):
        error = refused(tmp_path, {**PAIR, "images": [], **row})
        assert "images of its own" in str(error) and "one set of images" in str(error)
        assert "row 1, column" in error.where and next(iter(row)) in error.where
    for margin, what in ((None, "null"), (-1, "the better one")):
        told({**PAIR, "margin": margin}, what, "column 'margin'", margin="margin")
    told({**PAIR, "margin": "much"}, "no finite number: 'much'", "column 'margin'", margin="margin")
    graded = {"prompt": "What is it?", "candidates": [GOOD, BAD], "scores": [1, 0]}
    for change, what in (
        ({"candidates": [GOOD], "scores": [1]}, "one answer, and nothing to compare"),
        ({"scores": [1]}, "2 answers and 1 scores"),
        ({"scores": [1, "NaN"]}, "no finite number: 'NaN'"),
        ({"scores": 1}, "holds int, and no list"),
    ):
        told({**graded, **change}, what, "s'", candidates="candidates", scores="scores")
    judged = {"prompt": "What is it?", "completion": GOOD, "label": "maybe"}
    told(judged, "The verdict on the answer is 'maybe'", "column 'label'", desirable="label")
    judged = {"messages": [user("What is it?")], "label": True}
    told(judged, "The last turn is the user's, and no answer", "column 'messages'", desirable="label")


def test_an_answer_may_spell_the_place_of_an_image_only_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    row = {**PAIR, "chosen": "It is <image>."}
    [prompt] = load(tmp_path, {**row, "images": []})
    assert prompt.candidates[0].text == "It is <image>."
    with pytest.raises(DataError, match="images of its own"):
        table(tmp_path, [{**row, "images": ["a.png"]}]).load()[0]


def test_tables_that_lack_a_column_or_have_two_ways_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "What is it?", "rejected": BAD}
    for rows, options, message, remedy in (
        (row, {}, "no column is known as chosen", 'one with data.train.chosen; or write data.train.rejected: ""'),
        (row | {"better": "c"}, {}, "no column is known as chosen", "such as data.train.chosen: better"),
        ({"prompt": "?", "chosen": GOOD}, {}, "is known as rejected or as an answer", "data.train.answer"),
        (PAIR | {"rejected": None}, {"candidates": "chosen"}, "no column is known as scores", "data.train.scores"),
        ({**PAIR, "candidates": ["a", "b"], "scores": [1, 2]}, {}, "several ways", 'data.train.candidates: ""'),
        ({**PAIR, "rejected_response": "c"}, {}, "Several columns could be the rejected", "data.train.rejected"),
        (PAIR, {"chosen": "better"}, "no column 'better' for its chosen", "such as data.train.chosen: chosen"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            table(tmp_path, [rows], **options).load()
        assert remedy in (caught.value.remedy or "")


def test_the_options_that_nobody_wrote_leave_a_tables_fingerprint_as_it_was(tmp_path: Path) -> None:
    marks = []
    for options in ({}, {"chosen": "chosen"}):
        found = table(tmp_path, [PAIR], **options)
        found.load()
        marks.append(found.fingerprint())
    assert "rejected" not in marks[0] and "'chosen': 'chosen'" in marks[1]
