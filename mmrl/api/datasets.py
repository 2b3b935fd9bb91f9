"""Datasets of a program as entries of a config: rows become a parquet file that a loader reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.api.capture import reference
from mmrl.api.rows import write_rows
from mmrl.errors import ConfigError
from mmrl.interfaces import DatasetLoader
from mmrl.plugin_host.registry import loaders_of_rows, options_class

Rows = Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | Callable[[], Iterable[Mapping[str, Any]]]
"""Rows, one after another, or a function that yields them; or columns of equal length. A table of pandas, polars or
datasets has rows too."""
DatasetLike = Rows | str | Path | type[DatasetLoader]
"""Rows; the place of a file, a folder or a dataset of a hub; or a class that loads prompts."""
_SHOWN = 5


def entry(given: Any, argument: str, written: Mapping[str, Any], folder: Path, split: str) -> dict[str, Any]:
    """The config's entry of a dataset that was given.

    Options of the config's loader stay, such as columns, if it takes a path; else a loader of rows takes its place.

    Args:
        argument: Its name, for errors.
        written: The config's entry in its place; empty if it has nothing there.
        folder: The folder for rows.
        split: The split that rows are, if the config names none.

    Raises:
        ConfigError: Nothing reads rows; or it is none of these.
        DataError: See ``write_rows``.
        PluginError: The config's loader is not installed, or cannot be imported.
    """
    if isinstance(given, type):
        return {"name": reference("dataset", given, folder)}
    name = written.get("name")
    keeps = name is not None and "path" in options_class("dataset", name).model_fields
    found = {} if keeps else {"name": _loader(argument)}
    if isinstance(given, str | Path):
        return {**found, "path": str(given)}
    split = (written.get("split") if keeps else None) or split
    return {**found, "path": str(write_rows(rows_of(given, argument), folder, split, argument))}


def named_entries(given: Mapping[str, Any], argument: str, folder: Path, split: str) -> dict[str, Any]:
    """As ``entry``, of several datasets by their names, which take the place of what the config has."""
    return {name: entry(each, f"{argument}[{name!r}]", {}, folder, split) for name, each in given.items()}


def named_sets(given: Any) -> Mapping[str, Any]:
    """The datasets by their names, if these are several; empty if it is one."""
    if not isinstance(given, Mapping) or not given:
        return {}
    return given if all(map(_is_dataset, given.values())) else {}


def _is_dataset(value: Any) -> bool:
    """True for a dataset; false for a column of one."""
    if isinstance(value, type | str | Path) or hasattr(value, "column_names") or hasattr(value, "iterrows"):
        return isinstance(value, type | Path) or not isinstance(value, str)
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def rows_of(given: Any, argument: str) -> Iterable[Any]:
    """The rows of a dataset in any of its forms.

    Raises:
        ConfigError: It is none, or several.
    """
    if hasattr(given, "iterrows"):  # of pandas; a missing value is NaN there
        return [_without_missing(row) for row in given.to_dict("records")]
    if hasattr(given, "iter_rows"):  # of polars
        rows: Iterable[Any] = given.iter_rows(named=True)
        return rows
    if isinstance(given, Mapping):
        sets = named_sets(given)
        return rows_of(next(iter(sets.values())), argument) if len(sets) == 1 else _rows_of_columns(given, argument)
    if isinstance(given, Iterable):
        return given
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):  # of torch
        return (given[number] for number in range(len(given)))
    if callable(given):  # a generator's function
        return rows_of(given(), argument)
    raise ConfigError(
        f"{argument} is a {type(given).__name__}, and no rows",
        where=argument,
        possible='rows such as {"problem": "<image>What is it?", "images": [image], "answer": "a cat"}, a table of '
        "pandas or datasets, the path of a file, or a class that loads prompts",
    )


def _rows_of_columns(columns: Mapping[str, Any], argument: str) -> Iterable[Any]:
    if sets := named_sets(columns):
        names = ", ".join(map(repr, [*sets][:_SHOWN]))
        remedy = f"give one of them, as in {argument}=splits[{next(iter(sets))!r}]"
        if argument == "dataset":
            remedy += "; eval_dataset takes several, each with a curve of its own"
        raise ConfigError(f"{argument} has several datasets: {names}", where=argument, remedy=remedy)
    listed = {name: each for name, each in columns.items() if hasattr(each, "__len__") and not isinstance(each, str)}
    lengths = {name: len(column) for name, column in listed.items()}
    if len(lengths) < len(columns) or len(set(lengths.values())) > 1 or not columns:
        told = ", ".join(f"{name} has {length} values" for name, length in lengths.items())
        raise ConfigError(
            f"{argument} is a mapping, and not one of columns of equal length{': ' if told else ''}{told}",
            where=argument,
            possible='rows such as [{"problem": "2 + 2?", "answer": "4"}], or columns such as {"problem": [...], '
            '"answer": [...]}',
        )
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _without_missing(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """The row with None for each missing value of pandas."""
    return {name: None if isinstance(value, float) and value != value else value for name, value in row.items()}


def _loader(argument: str) -> str:
    """The installed loader that reads rows.

    Raises:
        ConfigError: There is none, or more than one.
    """
    if len(names := loaders_of_rows()) == 1:
        return names[0]
    key = "data.train.name" if argument == "dataset" else "data.eval.name"
    raise ConfigError(
        "several installed loaders read rows" if names else "no installed loader reads rows",
        where=key,
        possible=", ".join(names),
        remedy=f'name one that reads parquet files from its option path, as in overrides={{"{key}": ...}}; '
        "`mmrl plugins` lists those of kind dataset",
    )
