"""The names of evaluation sets: where they stand in ``data.eval``, in dotted keys and in metrics. Imports little."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SECTIONS = ("eval", "eval_blank")
"""The first words of metrics of evaluations: with the prompts' own images, and with blank ones."""
NAMED = "(named)"
"""Stands in paths between ``data.eval`` and the name of one of several sets."""
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""The form of a name, which is a folder's too."""


def has_names(values: Mapping[str, Any]) -> bool:
    """True for a mapping of names to datasets, or to null for one that is taken back; False for one dataset.

    One dataset has a ``name``. Named ones have not, and their values are mappings.
    """
    given = [value for value in values.values() if value is not None]
    return "name" not in values and any(isinstance(value, Mapping) for value in given)


def key_of(name: str) -> str:
    """The dotted key of a set in the config: ``data.eval`` or ``data.eval.NAME``."""
    return f"data.eval.{name}" if name else "data.eval"


def metric_of(name: str, what: str, section: str = "eval") -> str:
    """The name of a metric of a set: ``eval/accuracy`` or ``eval/NAME/accuracy``."""
    return f"{section}/{name}/{what}" if name else f"{section}/{what}"


def sets_of(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The datasets of a ``data.eval`` in plain values by their names; the name of one that has none is empty."""
    if not value:
        return {}
    return value if has_names(value) else {"": value}
