"""Datasets of other trainers' configs: paths, with ``@`` before a split, one or several of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.config.evaluation_names import WORD


def places(files: str | list[Any] | None) -> list[str]:
    """The paths that a value names; none if it is not made of texts."""
    found: list[Any] = files if isinstance(files, list) else [files]
    return list(dict.fromkeys(found)) if all(isinstance(each, str) and each for each in found) else []


def dataset_at(name: str, place: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """The entry of the dataset at a place, ``PATH`` or ``PATH@SPLIT``."""
    path, _, split = place.partition("@")
    return {"name": name, "path": path, **({"split": split} if split else {}), **columns}


def by_name(found: Mapping[str, Any]) -> dict[str, Any]:
    """Datasets by names that their paths suggest, of which each is a word and another one."""
    named = dict[str, Any]()
    for place, each in found.items():
        word = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(place.partition("@")[0]).stem)[:48] or "set"
        word = (
            word if WORD.fullmatch(word) and word != "name" else f"set_{word}"
        )  # a mapping with a name is one dataset
        named[word if word not in named else f"{word}_{len(named) + 1}"] = each
    return named
