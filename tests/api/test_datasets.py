"""Datasets that a program gives: every form of rows reads as the same prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.api.datasets import named_entries, named_sets
from mmrl.api.given import loaded_with
from mmrl.config.plugin_specs import DatasetSpec
from mmrl.errors import ConfigError, DataError
from mmrl.plugin_host.registry import create, loaders_of_rows

ROWS = [{"problem": "2 + 2?", "answer": "4", "weight": 0.5}, {"problem": "Why?", "answer": "so", "weight": None}]
COLUMNS = {"problem": ["2 + 2?", "Why?"], "answer": ["4", "so"], "weight": [0.5, None]}
READ = [("2 + 2?", "4", 0.5), ("Why?", "so", None)]


def loaded(tmp_path: Path, data: Any = None, **given: Any) -> Any:
    config: dict[str, Any] = {"model": {"path": "m"}, "algorithm": {"name": "grpo"}, "rewards": [{"name": "exact"}]}
    config |= {"trainer": {"run_dir": str(tmp_path / "run")}} | ({"data": data} if data else {})
    return loaded_with(config, {}, **given).config.data


def prompts(spec: DatasetSpec) -> list[tuple[str, Any, Any]]:
    return [(each.messages[-1].content, each.answer, each.columns["weight"]) for each in create("dataset", spec).load()]


def generated() -> Iterator[dict[str, Any]]:
    yield from ROWS


class Indexed:
    """As torch's datasets are."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return ROWS[range(len(ROWS))[number]]


@pytest.mark.parametrize(
    "form", ["rows", "columns", "generator", "function", "pandas", "datasets", "stream", "only split", "of torch"]
)
def test_rows_in_every_form_need_no_loaders_name(form: str, tmp_path: Path) -> None:
    import pandas as pd

    import datasets

    table = datasets.Dataset.from_dict(COLUMNS)
    given = {
        "rows": ROWS,
        "columns": COLUMNS,
        "generator": generated(),
        "function": generated,
        "pandas": pd.DataFrame(COLUMNS, index=[7, 3]),
        "datasets": table,
        "stream": table.to_iterable_dataset(),
        "only split": datasets.DatasetDict({"train": table}),
        "of torch": Indexed(),
    }[form]
    data = loaded(tmp_path, dataset=given, eval_dataset=ROWS[:1])
    assert data.train.name == data.eval.name == "table"
    assert prompts(data.train) == READ and prompts(data.eval) == READ[:1]
    assert data.eval.options["path"].endswith("/test.parquet")


def test_options_of_the_configs_loader_stay_and_a_loader_without_a_path_is_replaced(tmp_path: Path) -> None:
    rows = [{"q": "Which?", "problem": "not this", "a": "4", "weight": 1}]
    train = {"name": "table", "path": "elsewhere", "split": "fit", "prompt": "q", "answer": "a"}
    data = loaded(tmp_path, {"train": train, "eval": {"name": "table", "path": "other"}}, dataset=rows)
    assert prompts(data.train) == [("Which?", "4", 1)] and data.eval.options["path"] == "other"
    (tmp_path / "own.py").write_text(
        "from mmrl import DatasetLoader\nclass Own(DatasetLoader):\n    def load(self):\n        return []\n"
    )
    own = {"train": {"name": f"{tmp_path}/own.py:Own"}}
    assert prompts(loaded(tmp_path, own, dataset=ROWS).train) == READ


def test_the_place_of_a_dataset_is_one(tmp_path: Path) -> None:
    data = loaded(tmp_path, dataset="rows.jsonl", eval_dataset=tmp_path / "other")
    assert (data.train.options["path"], data.eval.options["path"]) == ("rows.jsonl", str(tmp_path / "other"))


def test_one_installed_loader_reads_rows_and_recipes_do_not() -> None:
    assert loaders_of_rows() == ["table"]


def test_several_datasets_have_names_and_columns_are_one(tmp_path: Path) -> None:
    sets = {"easy": ROWS, "hard": COLUMNS | {"problem": ["a", "b"]}}
    assert named_sets({"easy": ROWS, "hard": ROWS[:1]}).keys() == {"easy", "hard"}
    assert not named_sets(COLUMNS) and not named_sets(ROWS) and not named_sets(sets)
    found = named_entries({"easy": ROWS, "hard": ROWS[1:]}, "eval_dataset", tmp_path, "test")
    assert [prompts(DatasetSpec(**each)) for each in found.values()] == [READ, READ[1:]]


def test_named_evaluation_sets_take_the_place_of_the_configs(tmp_path: Path) -> None:
    written = {"train": {"name": "table", "path": "x"}, "eval": {"name": "table", "path": "y", "split": "z"}}
    data = loaded(tmp_path, written, eval_dataset={"easy": ROWS, "hard": ROWS[1:]})
    assert {name: prompts(spec) for name, spec in data.evaluated.items()} == {"easy": READ, "hard": READ[1:]}
    assert data.train.options["path"] == "x"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "dataset is a int, and no rows"),
        ({"problem": "2 + 2?", "answer": "4"}, "not one of columns of equal length"),
        ({"problem": ["a", "b"], "answer": ["1"]}, "problem has 2 values, answer has 1 values"),
        ({"train": ROWS, "test": ROWS}, r"several datasets: 'train', 'test'(.|\n)*dataset=splits\['train'\]"),
        ([], "dataset has no rows"),
        (["a"], "a row is a str, and no mapping"),
    ],
)
def test_what_is_no_dataset_is_refused_and_leaves_nothing(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        loaded(tmp_path, dataset=given)
    with pytest.raises(DataError, match="eval_dataset, row 0, problem"):
        loaded(tmp_path, dataset=ROWS, eval_dataset=[{"problem": Path("nowhere")}])
    assert not (tmp_path / "run").exists()
