from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import ValidationError

from mmrl.data.bad_rows import BadRows
from mmrl.errors import ConfigError, DataError, ResourceError
from mmrl.testing import check_dataset
from mmrl.types import Message, Prompt
from mmrl_datasets import parquet as parquet_files
from mmrl_datasets.table import Table


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

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
    import datasets

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
        *("../secret.png", "/etc/passwd", "http://x.org/a.png", "file:///etc/passwd", "data:,x", "gone"),
        *("", "a\0b", "n" * 5000, "x/../../secret.png", "link/../../secret.png", "link/../../data/../secret.png"),
        *("file://../secret.png", "file://%2e%2e/secret.png", "link/../secret.png"),
    ],
)
def test_image_paths_stay_below_the_folder(tmp_path: Path, value: str) -> None:
    (tmp_path / "secret.png").write_bytes(picture())
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere" / "pictures").mkdir(parents=True)
    (tmp_path / "elsewhere" / "secret.png").write_bytes(picture())
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere" / "pictures")
    prompts = load(jsonl(tmp_path / "data" / "t.jsonl", [{"problem": "?", "images": [value], "answer": "1"}]))
    with pytest.raises(
        DataError, match=r"does not lie in|no image file|cannot be read|is an address|no image in"
    ) as caught:
        prompts[0]
    assert "row 0, images[0]" in caught.value.where


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
    import datasets

    features = datasets.Features(
        {name: datasets.Image() if name == "figure" else datasets.Value("string") for name in ("problem", "figure")}
    )
    data = datasets.Dataset.from_dict({"problem": ["?"], "figure": [struct()]}, features=features)
    data.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"Pictures would not be used: .*'figure'") as caught:
        load(tmp_path / "t.parquet", answer="")
    assert "data.train.images: figure" in caught.value.remedy and 'data.train.images: ""' in caught.value.remedy
    assert len(load(tmp_path / "t.parquet", answer="", images="figure")[0].images) == 1
    assert load(tmp_path / "t.parquet", answer="", images="")[0].images == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "<image><image>", "images": [struct()], "answer": "1"}, "2 <image> and 1 images"),
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


def test_csv_cells_stay_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(9))
    uri = "data:image/png;base64," + "A" * 200_000  # more than csv takes by itself
    path = tmp_path / "train.csv"
    path.write_bytes(
        b"\xef\xbb\xbfquestion,image,answer,day\r\n"
        b'"<image>Find x,\nthen ""y"".",a.png,007,2020-01-01\r\n'
        b"1 + 1?,,2.0,\r\n\r\n" + f'?,"{uri}",null,x\r\n'.encode() + b"too,few\r\n"
    )
    prompts = load(path)
    assert len(prompts) == 4
    for _ in range(2):  # in any order, and again
        assert prompts[1].messages == (Message("user", "1 + 1?"),)
        assert (prompts[1].answer, prompts[1].columns["day"]) == ("2.0", None)
        assert prompts[0].messages == (Message("user", '<image>Find x,\nthen "y".'),)
        assert (prompts[0].answer, prompts[0].columns["day"]) == ("007", "2020-01-01")
        assert prompts[0].images[0].data == picture(9)
    assert prompts[2].answer == "null"
    with pytest.raises(DataError, match="2 cells and the header 4") as caught:
        prompts[3]
    assert caught.value.where.endswith("train.csv, line 7")


def test_nan_in_a_csv_is_null(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer,image\nwhat?,nan,\nwhat now?,nana,NaN\n")
    rows = load(path=str(tmp_path / "rows.csv"))
    with pytest.raises(DataError, match="Column 'answer' is null"):
        rows[0]
    assert rows[1].answer == "nana" and rows[1].images == ()


def test_conversations_in_a_csv_cell_are_json(tmp_path: Path) -> None:
    chat = json.dumps([{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}])
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([["messages"], [chat]])
    assert (load(path)[0].messages, load(path)[0].demonstration) == ((Message("user", "2?"),), "two")


def test_arrow_files_are_read_one_by_one_and_as_a_folder(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    for name, part in (("train-00000-of-00002", table.slice(0, 2)), ("train-00001-of-00002", table.slice(2))):
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    check_rows(load(tmp_path))
    with pa.OSFile(str(tmp_path / "feather.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    check_rows(load(tmp_path / "feather.arrow"), "feather")


def test_a_clone_of_a_hub_dataset_has_its_tables_in_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text("about")
    check_rows(load(tmp_path, split="train"))


def test_a_split_has_files_of_one_kind(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet")
    jsonl(tmp_path / "train.jsonl", ROWS[1:2])
    with pytest.raises(DataError, match="files of several kinds") as caught:
        load(tmp_path)
    assert caught.value.possible == "train.jsonl, train.parquet"


def test_large_row_groups_are_split_once_and_small_ones_are_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(parquet_files, "CACHE_BYTES", 100_000)
    rows = [{"problem": f"{i}?", "image": struct(i % 256), "answer": i} for i in range(3000)]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500)
    in_place = load(path)
    order = np.random.default_rng(0).permutation(3000)[:200].tolist()
    seen = [(in_place[i].messages[0].content, in_place[i].answer, in_place[i].images[0].data) for i in order]
    assert seen == [(f"<image>{i}?", i, picture(i % 256)) for i in order]
    assert not (tmp_path / "home").exists()

    pq.write_table(pa.Table.from_pylist(rows), path)  # one group
    prompts = load(path)
    assert [prompts[i].answer for i in order] == order
    assert prompts[2999].images[0].data == picture(2999 % 256)
    [copy] = (tmp_path / "home" / "mmrl" / "row_groups").iterdir()
    assert pq.read_metadata(copy).num_row_groups > 1
    written = copy.stat().st_mtime_ns
    load(path)
    assert copy.stat().st_mtime_ns == written
    pq.write_table(pa.Table.from_pylist(rows[1:]), path)  # another file: another copy
    assert load(path)[0].answer == 1


def test_no_room_for_smaller_row_groups_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "home").write_text("a file")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    path = parquet(tmp_path / "t.parquet", [{"problem": "?", "answer": i} for i in range(3000)])
    prompts = load(path)
    assert [prompts[i].answer for i in range(3000)] == list(range(3000))  # in order, no copy is needed
    with pytest.raises(ResourceError, match="smaller row groups cannot be written") as caught:
        _ = prompts[0]
    assert "HF_HOME" in caught.value.remedy


def test_rows_of_large_row_groups_are_reached_without_a_copy_where_copies_would_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(parquet_files, "MAX_GROUP_ROWS", 300)
    monkeypatch.setattr(parquet_files, "COPY_BYTES", 1000)
    path = tmp_path / "train.parquet"
    rows = [{"problem": f"{i}?", "image": struct(i % 256), "answer": i} for i in range(1000)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=400)  # two large groups and a small one
    prompts = load(path)
    order = [399, 400, 0, 799, 800, 999, *np.random.default_rng(0).permutation(1000)[:60].tolist()]
    assert [(prompts[i].answer, prompts[i].images[0].data) for i in order] == [(i, picture(i % 256)) for i in order]
    assert not (tmp_path / "home").exists()


def test_images_that_nobody_uses_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = pq.ParquetFile.read_row_group
    asked: list[Any] = []

    def spy(self: Any, *args: Any, columns: Any, **options: Any) -> Any:
        asked.append(columns)
        return read(self, *args, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    path = parquet(tmp_path / "t.parquet", [{"problem": "?", "images": [struct()], "answer": "1", "note": "n"}])
    assert load(path)[0].images[0].data == picture()
    [prompt] = load(path, images="")[:]
    assert prompt.images == () and prompt.columns == {"problem": "?", "answer": "1", "note": "n"}
    glances = [["note"], ["answer"]]
    assert asked == [*glances, None, *glances, ["problem", "answer", "note"]]


def test_a_fingerprint_is_that_of_files_and_options_and_not_of_their_place(tmp_path: Path) -> None:
    def fingerprint(path: Path, **options: Any) -> str:
        table = Table(Table.Config(path=str(path), **options))
        table.load()
        return table.fingerprint()

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        parquet(tmp_path / name / "t.parquet")
        jsonl(tmp_path / name / "t.jsonl", [{"problem": "?", "answer": "1"}])
    one, two = tmp_path / "one", tmp_path / "two"
    assert fingerprint(one / "t.parquet") == fingerprint(two / "t.parquet")
    assert fingerprint(one / "t.jsonl") == fingerprint(two / "t.jsonl") != fingerprint(one / "t.parquet")
    assert fingerprint(one / "t.parquet", limit=3) != fingerprint(one / "t.parquet")
    changed = [row | {"answer": "nine"} if row["answer"] == "none" else row for row in ROWS]
    parquet(two / "t.parquet", changed)  # as long as before; the footer has the last answer of the alphabet
    assert fingerprint(one / "t.parquet") != fingerprint(two / "t.parquet")
    jsonl(two / "t.jsonl", [{"problem": "?", "answer": "12"}])
    assert fingerprint(one / "t.jsonl") != fingerprint(two / "t.jsonl")


def test_a_file_that_is_damaged_inside_names_itself(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", [{"problem": f"{i}?", "answer": str(i)} for i in range(500)])
    data = bytearray(path.read_bytes())
    data[4:300] = bytes(296)
    path.write_bytes(data)
    with pytest.raises(DataError, match="parquet file cannot be read") as caught:
        load(path)[0]
    assert caught.value.where == str(path)


def test_describe_says_what_was_chosen(tmp_path: Path) -> None:
    row = {
        "prompt": "?",
        "images": [struct()],
        "reward_model": {"ground_truth": "1"},
        "data_source": "a",
        "solution": "so",
    }
    path = parquet(tmp_path / "train.parquet", [row, row])
    table = Table(Table.Config(path=str(path), limit=1, answer="reward_model.ground_truth"))
    assert table.describe() == {}
    [prompt] = table.load()
    assert (prompt.answer, prompt.source, prompt.demonstration) == ("1", "a", "so")
    assert table.describe() == {
        "path": str(path),
        "split": "train",
        "rows": "1 of 2",
        "prompt": "prompt",
        "images": "images",
        "answer": "reward_model.ground_truth",
        "demonstration": "solution",
        "source": "data_source",
    }


def test_json_features_of_datasets_are_objects_again(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Json(), "label": datasets.List(datasets.Json())}
    )
    rows = [
        {"problem": "?", "answer": {"unit": "cm"}, "label": [1, "x"]},
        {"problem": "?", "answer": "7 cm", "label": []},
    ]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "t.parquet")
    prompts = load(tmp_path / "t.parquet", answer="answer")
    assert [(p.answer, p.columns["label"]) for p in prompts] == [({"unit": "cm"}, [1, "x"]), ("7 cm", [])]


@pytest.mark.parametrize(("folder", "cause"), [("pictures/", "no image file"), ("/elsewhere/", "does not lie in")])
def test_a_wrong_image_root_is_one_cause_whatever_the_files_are_called(folder: str, cause: str, tmp_path: Path) -> None:
    rows = [{"problem": "?", "image": f"{folder}{name}.png", "answer": "1"} for name in ("cat", "dog")]
    prompts, bad = load(jsonl(tmp_path / "t.jsonl", rows)), BadRows("data.train", 2, "drop", 0.01)
    for index in range(2):
        with pytest.raises(DataError) as caught:
            prompts[index]
        bad.add(str(index), caught.value)
    with pytest.raises(DataError, match=f"all 2 rows cannot be used, for one cause: .*{cause}") as caught:
        bad.check()
    assert caught.value.where.count("row 0") == 1 and f"'{folder}dog.png'" in caught.value.where
    assert "data.image_root" in caught.value.remedy


def test_image_root_is_where_paths_start_from(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(picture(4))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "b.png").write_bytes(picture(5))
    rows = [{"problem": "?", "image": name, "answer": "1"} for name in ("a.png", "b.png", "../rows/b.png")]
    prompts = load(jsonl(tmp_path / "rows" / "t.jsonl", rows), image_root=str(tmp_path / "pictures"))
    assert prompts[0].images[0].data == picture(4)
    with pytest.raises(DataError, match=r"no image file of that name\n.*row 1, image.*'b.png'") as caught:
        prompts[1]
    assert "data.image_root" in caught.value.remedy
    with pytest.raises(DataError, match="does not lie in"):
        prompts[2]
    with pytest.raises(DataError, match="image_root is no folder"):
        load(tmp_path / "rows" / "t.jsonl", image_root=str(tmp_path / "gone"))


def test_a_template_that_is_not_valid_is_the_configs_fault_and_one_that_fails_the_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"problem": "2?", "answer": "2"}])
    assert load(path, prompt_template="{{ prompt }} Box it.")[0].messages[0].content == "2? Box it."
    with pytest.raises(ConfigError, match="not valid Jinja"):
        load(path, prompt_template="{{ prompt")
    with pytest.raises(DataError, match="prompt_template fails") as caught:
        load(path, prompt_template="{{ row.level }}")[0]
    assert caught.value.where.endswith("row 0") and "columns problem, answer" in caught.value.possible


def test_the_table_keeps_the_rules_of_loaders(tmp_path: Path) -> None:
    for path in (parquet(tmp_path / "train.parquet"), jsonl(tmp_path / "t.jsonl", [{"problem": "a", "answer": "b"}])):
        check_dataset(Table, options={"path": str(path)})
