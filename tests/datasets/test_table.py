from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import ValidationError

import datasets
from mmrl.errors import DataError
from mmrl.types import Message, Prompt
from mmrl_datasets.table import Table


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def picture(shade: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def struct(shade: int = 0) -> dict[str, Any]:
    return {"bytes": picture(shade), "path": None}


ROWS: list[dict[str, Any]] = [
    {"problem": "<image>Find x.", "images": [struct(1)], "answer": "2 \\sqrt { 221 }", "level": 3},
    {"problem": "1 + 1?", "images": [], "answer": "2", "level": 1},
    {"problem": "No pictures here.", "images": None, "answer": "none", "level": 2},
    {"problem": "<image> or <image>?", "images": [struct(3), struct(4)], "answer": "both", "level": 5},
    {"problem": "Compare.", "images": [struct(5), struct(6)], "answer": "equal", "level": 4},
]


def parquet(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path: Path | str, **options: Any) -> Sequence[Prompt]:
    return Table(Table.Config(path=str(path), **options)).load()


def check_rows(prompts: Sequence[Prompt], split: str = "train") -> None:
    assert [p.id for p in prompts] == [f"{split}/{i}" for i in range(5)]
    assert [p.messages[0].content for p in prompts] == [
        "<image>Find x.",
        "1 + 1?",
        "No pictures here.",
        "<image> or <image>?",
        "<image><image>Compare.",
    ]
    assert [[image.data for image in p.images] for p in prompts] == [
        [picture(1)],
        [],
        [],
        [picture(3), picture(4)],
        [picture(5), picture(6)],
    ]
    assert [p.answer for p in prompts] == [row["answer"] for row in ROWS]
    assert prompts[0].columns == {"problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }", "level": 3}
    assert all(p.demonstration is None for p in prompts)


def test_a_parquet_file_in_the_geometry3k_layout(tmp_path: Path) -> None:
    prompts = load(parquet(tmp_path / "train.parquet"))
    check_rows(prompts)
    assert prompts[3].images[1].label.endswith("train.parquet, split train, row 3, images[1]")
    assert prompts[-1].id == "train/4"
    assert [p.id for p in prompts[1:3]] == ["train/1", "train/2"]
    with pytest.raises(IndexError):
        prompts[5]


def test_hugging_face_image_features_are_read_without_decoding(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "problem": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
            "level": datasets.Value("int64"),
        }
    )
    data = datasets.Dataset.from_list(ROWS, features=features)
    data.to_parquet(tmp_path / "train.parquet")
    check_rows(load(tmp_path / "train.parquet"))
    data.save_to_disk(tmp_path / "saved")
    check_rows(load(tmp_path / "saved"))
    datasets.DatasetDict(train=data.select([0]), validation=data).save_to_disk(tmp_path / "splits")
    check_rows(load(tmp_path / "splits", split="validation"), "validation")


def test_a_folder_gives_the_split_that_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "test-00000-of-00002.parquet", ROWS[:2])
    parquet(tmp_path / "test-00001-of-00002.parquet", ROWS[2:])
    jsonl(tmp_path / "train.jsonl", [{"problem": "a", "answer": "b"}])
    (tmp_path / "README.md").write_text("about")
    check_rows(load(tmp_path, split="test"), "test")
    assert load(tmp_path, split="train")[0].answer == "b"
    with pytest.raises(DataError, match="several splits") as caught:
        load(tmp_path)
    assert caught.value.possible == "test, train"
    with pytest.raises(DataError, match="no split 'eval'"):
        load(tmp_path, split="eval")


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_json_rows_name_image_files_below_their_folder(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "a.png").write_bytes(picture(9))
    rows = [
        {"problem": "<image>?", "images": ["img/a.png"], "answer": "1"},
        {"problem": "text", "images": [], "answer": "2"},
    ]
    path = tmp_path / f"rows.{suffix}"
    path.write_text(json.dumps(rows)) if suffix == "json" else jsonl(path, rows)
    prompts = load(path)
    assert prompts[0].images[0].data == picture(9)
    assert prompts[1].images == ()
    assert prompts[0].id == "rows/0"


@pytest.mark.parametrize(
    "value",
    [
        *("../secret.png", "/etc/passwd", "link.png", "http://x.org/a.png", "file:///etc/passwd", "data:,x", "gone"),
        *("", "a\0b", "n" * 5000),
    ],
)
def test_image_paths_stay_below_the_folder(tmp_path: Path, value: str) -> None:
    (tmp_path / "secret.png").write_bytes(picture())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    prompts = load(jsonl(tmp_path / "data" / "t.jsonl", [{"problem": "?", "images": [value], "answer": "1"}]))
    with pytest.raises(
        DataError, match=r"does not lie in|no image file|cannot be read|is an address|no image in"
    ) as caught:
        prompts[0]
    assert caught.value.where.endswith("row 0, images[0]")


def test_a_single_image_cell_and_raw_bytes_are_accepted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"q": "?", "picture": picture(2), "answer": 7},
        {"q": "no", "picture": None, "answer": 8},
    ]
    prompts = load(parquet(tmp_path / "t.parquet", rows), prompt="q", images="picture")
    assert [len(p.images) for p in prompts] == [1, 0]
    assert prompts[0].images[0].data == picture(2)
    assert prompts[0].messages[0].content == "<image>?"
    assert [p.answer for p in prompts] == [7, 8]
    assert "picture" not in prompts[0].columns


def test_solution_is_demonstration_and_answer_unless_there_is_another(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"problem": "2?", "solution": "\\boxed{2}", "worked": "so 2"}])
    assert (load(path)[0].demonstration, load(path)[0].answer) == ("\\boxed{2}", "\\boxed{2}")
    assert load(path, demonstration="worked")[0].demonstration == "so 2"
    assert load(path, answer="")[0].answer is None
    both = jsonl(tmp_path / "u.jsonl", [{"problem": "2?", "solution": "so 2", "answer": "2"}])
    assert (load(both)[0].demonstration, load(both)[0].answer) == ("so 2", "2")
    with pytest.raises(DataError, match="no column 'answer' for its answer"):
        load(path, answer="answer")


def test_a_null_demonstration_is_an_error_only_where_the_column_was_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"problem": "2?", "answer": "2", "solution": None}])
    assert load(path)[0].demonstration is None
    with pytest.raises(DataError, match="'solution' is null"):
        load(path, demonstration="solution")[0]


def test_missing_columns_are_listed_with_the_option_to_write(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"riddle": "2?", "answer": "2"}])
    with pytest.raises(DataError, match="None of the columns is known as a prompt") as caught:
        load(path)
    assert caught.value.possible == "riddle, answer"
    assert "data.train.prompt: riddle" in caught.value.remedy
    assert load(path, prompt="riddle")[0].messages == (Message("user", "2?"),)
    with pytest.raises(DataError, match="no column 'pics' for its images"):
        load(path, prompt="riddle", images="pics")
    with pytest.raises(DataError, match="known as an answer") as caught:
        load(jsonl(tmp_path / "u.jsonl", [{"problem": "2?"}]))
    assert '""' in caught.value.remedy
    assert load(tmp_path / "u.jsonl", answer="")[0].answer is None


def test_images_under_another_name_are_not_overlooked(tmp_path: Path) -> None:
    features = datasets.Features(
        {name: datasets.Image() if name == "figure" else datasets.Value("string") for name in ("problem", "figure")}
    )
    data = datasets.Dataset.from_dict({"problem": ["?"], "figure": [struct()]}, features=features)
    data.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="images in figure would not be used") as caught:
        load(tmp_path / "t.parquet", answer="")
    assert "data.train.images: figure" in caught.value.remedy
    assert len(load(tmp_path / "t.parquet", answer="", images="figure")[0].images) == 1
    assert load(tmp_path / "t.parquet", answer="", images="")[0].images == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "<image><image>", "images": [struct()], "answer": "1"}, "2 <image> and 1 images"),
        ({"problem": "<image>", "images": [], "answer": "1"}, "1 <image> and 0 images"),
        ({"problem": None, "images": [], "answer": "1"}, "'problem' is null"),
        ({"problem": "?", "images": [], "answer": None}, "'answer' is null"),
        ({"problem": "?", "images": [None], "answer": "1"}, "image cell holds null"),
        ({"problem": "?", "images": [{"bytes": None, "path": None}], "answer": "1"}, "image cell holds null"),
    ],
)
def test_a_bad_row_is_named_when_it_is_read(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [ROWS[0], row]
    prompts = load(parquet(tmp_path / "t.parquet", rows))
    assert prompts[0].answer == ROWS[0]["answer"]
    with pytest.raises(DataError, match=message) as caught:
        prompts[1]
    assert "row 1" in caught.value.where


def test_a_prompt_that_is_not_text_is_named(tmp_path: Path) -> None:
    rows = [{"problem": [{"role": "user"}], "answer": "1"}, {"problem": 7, "answer": "1"}]
    prompts = load(jsonl(tmp_path / "t.jsonl", rows))
    with pytest.raises(DataError, match="no message") as caught:
        prompts[0]
    assert caught.value.where.endswith("row 0, column 'problem', message 0")
    with pytest.raises(DataError, match="'problem' holds int"):
        prompts[1]


def test_json_values_stay_what_they_are_written_as(tmp_path: Path) -> None:
    answers = [1, "x", ["3", 4], 1.5, "007", "2020-01-01", "null", {"unit": "cm"}]
    rows = [{"problem": "?", "answer": a} for a in answers]
    prompts = load(jsonl(tmp_path / "t.jsonl", rows))
    assert [p.answer for p in prompts] == answers
    assert [type(p.answer) for p in prompts[:2]] == [int, str]
    assert prompts[2].columns["answer"] == ["3", 4]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"problem": "a", "answer": "1"}])
    assert load(path)[0].answer == "1"
    assert load(jsonl(path, [{"problem": "a", "answer": "2"}]))[0].answer == "2"


def test_limit_reads_the_first_rows(tmp_path: Path) -> None:
    path = parquet(tmp_path / "train.parquet")
    assert [p.id for p in load(path, limit=2)] == ["train/0", "train/1"]
    assert len(load(path, limit=99)) == 5
    with pytest.raises(ValidationError):
        Table.Config(path="x", limit=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.parquet", b"PAR1 is not enough", "cannot be read: Parquet magic"),
        ("t.jsonl", b'{"problem": "a"\n{{{', "not JSON: .*delimiter"),
        ("t.json", b"[1, 2]", "not an object"),
        ("t.jsonl", b"[" * 99999, "not JSON"),
        ("t.jsonl", b"{}", "known as a prompt"),
        ("t.tsv", b"problem\tanswer", "no table here"),
        ("t.csv", b"", "no rows"),
        ("t.csv", b'problem,answer\n"1,2', "not CSV: unexpected end"),
        ("t.csv", b"problem,answer\n\xff\xff,2", "not CSV: .*utf-8"),
        ("t.csv", b"problem,problem\n1,2", "the name of another"),
        ("t.arrow", b"ARROW1 is not enough", "cannot be read"),
        ("t.jsonl", b"", "no rows"),
    ],
)
def test_unreadable_files_are_data_errors(
    tmp_path: Path, name: str, content: bytes, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path / name)
    assert str(tmp_path) in caught.value.where
    assert capfd.readouterr().err == ""


def test_reading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    len(load(parquet(tmp_path / "train.parquet")))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_missing_local_path_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no such file or folder"):
        load("data/train.parquet")


@pytest.mark.parametrize("option", ["subset", "revision"])
def test_what_only_hub_datasets_have_is_refused_for_local_data(option: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{option} belongs to hub"):
        load(parquet(tmp_path / "t.parquet"), **{option: "main"})
