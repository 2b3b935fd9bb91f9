"""Documents of tables: where images stand in them, what goes with them, and which are bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.data.prompts import DatasetRows, PromptSource
from mmrl.errors import DataError
from mmrl.testing import check_dataset
from mmrl.types import DOCUMENT, Message
from mmrl_datasets.table import Table
from tests.datasets.test_messages import colours, read, table


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "A <image> and <image>."}, "A <image> and <image>."),
        ({"text": "no place"}, "<image><image>no place"),
        ({"text": "<image 1>, then <image 2>"}, "<image>, then <image>"),
        ({"text": ["A ", None, " and ", None]}, "A <image> and <image>"),  # as OBELICS, whose images have nulls too
        ({"text": ["A ", {"type": "image"}, {"type": "text", "text": " and "}, None]}, "A <image> and <image>"),
    ],
)
def test_a_document_is_one_message_with_its_images_in_their_places(row: Any, text: str, tmp_path: Path) -> None:
    row = {**row, "images": [None, "red.png", None, "blue.png"], "page": 7}
    prompt = read(tmp_path, row, document="text", images="images")
    assert prompt.messages == (Message(DOCUMENT, text),) and prompt.is_document
    assert colours(prompt) == ["red", "blue"] and prompt.columns == {"page": 7}
    assert prompt.answer is prompt.demonstration is None


def test_images_may_stand_in_the_document_itself(tmp_path: Path) -> None:
    text = ["A ", {"type": "image", "image": "blue.png"}, " sky"]
    prompt = read(tmp_path, {"text": text}, document="text")
    assert prompt.messages[0].content == "A <image> sky" and colours(prompt) == ["blue"] and prompt.columns == {}


def test_documents_of_text_alone_may_say_image(tmp_path: Path) -> None:
    prompt = read(tmp_path, {"text": "write <image> here", "kind": "manual"}, document="text", category="kind")
    assert prompt.messages[0].content == "write <image> here" and not prompt.images and prompt.category == "manual"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": None}, "Column 'text' is null"),
        ({"text": 7}, "Column 'text' holds int, not text"),
        ({"text": []}, "Column 'text' holds an empty list"),
        ({"text": ["a", 7]}, "of no known type"),
        ({"text": " <image>\n", "images": ["red.png"]}, "'text' is without a text"),
        ({"text": "<image><image> two", "images": ["red.png"]}, "2 <image> and 1 images"),
        ({"text": "a", "video": "a.mp4"}, "only text and images"),
    ],
)
def test_bad_documents_are_named(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, row, document="text", images="images" if "images" in row else "")
    assert "row 0" in caught.value.where


def test_columns_of_questions_have_no_place_beside_documents(tmp_path: Path) -> None:
    row = {"text": "a page", "question": "2?", "answer": "4", "chosen": "b", "rejected": "c"}
    found = table(tmp_path, row, document="text")
    assert found.load()[0].columns == {key: row[key] for key in ("question", "answer", "chosen", "rejected")}
    assert found.describe()["document"] == "text" and {"prompt", "answer"}.isdisjoint(found.describe())
    with pytest.raises(DataError, match="answer and chosen would have no place"):
        table(tmp_path, row, document="text", answer="answer", chosen="chosen").load()
    with pytest.raises(DataError, match="no column 'page' for its document"):
        table(tmp_path, row, document="page").load()
    with pytest.raises(DataError, match="None of the columns is known as a prompt") as caught:
        table(tmp_path, {"text": "a page"}).load()
    assert "data.train.document: COLUMN" in caught.value.remedy


def test_a_runs_template_and_system_prompt_are_for_questions_alone(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "a page"}) + "\n")
    rows = Table(Table.Config(path=str(tmp_path / "t.jsonl"), document="text")).load()

    class Encoder:
        def num_tokens(self, prompt: Any) -> int:
            return 5

    options: dict[str, Any] = {"system_prompt": "Be brief.", "prompt_template": "{{ prompt }}!", "max_prompt_tokens": 9}
    source = PromptSource([DatasetRows("docs", rows)], Encoder(), **options)  # type: ignore[arg-type]
    assert source[0].messages == (Message(DOCUMENT, "a page"),)


def test_documents_keep_the_rules_of_loaders(tmp_path: Path) -> None:
    rows = [{"text": f"Page {n}: <image>", "images": [{"bytes": None, "path": "red.png"}]} for n in range(3)]
    table(tmp_path)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    check_dataset(Table(Table.Config(path=str(tmp_path), split="train", document="text")))
