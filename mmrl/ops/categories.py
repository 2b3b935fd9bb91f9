"""Accuracies by category: the parts of an evaluation that a column of its rows tells apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mmrl.types import FloatArray

MOST = 64
"""Categories that an evaluation may have."""
MACRO, UNCATEGORISED = "macro_accuracy", "uncategorised_fraction"
_LONGEST = 48
"""Characters of a category in the name of a metric."""
_UNSAFE = re.compile(r"[^\w.-]+")


def metric_names(categories: Iterable[str]) -> dict[str, str]:
    """``accuracy/<category>`` for each category, in their order; none for that of rows without one, which is empty.

    Signs that names of metrics cannot have become ``_``, and long names are cut. Where two become the same, those that
    are later in the alphabet end in ``_2``, ``_3`` and so on.
    """
    found, taken = dict[str, str](), set[str]()
    for category in sorted({*categories} - {""}):
        word = _UNSAFE.sub("_", category)[:_LONGEST].strip("_") or "category"
        number, name = 1, word
        while name in taken:
            number += 1
            name = f"{word}_{number}"
        taken.add(name)
        found[category] = f"accuracy/{name}"
    return found


def category_metrics(right: Sequence[FloatArray], categories: Sequence[str]) -> dict[str, float]:
    """Accuracies by category; empty if no prompt has one.

    - ``accuracy/<category>``: mean over the completions of a category's prompts; left out where none is known.
    - ``macro_accuracy``: mean over categories of these.
    - ``uncategorised_fraction``: prompts without a category, of all.

    Args:
        right: For each prompt the accuracies of its completions, NaN where one is not known.
        categories: Each prompt's; empty for none.
    """
    if not (names := metric_names(categories)):
        return {}
    found = dict[str, float]()
    for category, name in names.items():
        own = np.concatenate([each for each, its in zip(right, categories, strict=True) if its == category])
        if not np.isnan(own).all():
            found[name] = float(np.nanmean(own))
    macro = {MACRO: float(np.mean([*found.values()]))} if found else {}
    return {**found, **macro, UNCATEGORISED: categories.count("") / len(categories)}


def categories_text(categories: Mapping[str, int]) -> str:
    """Categories with their prompts as a text such as ``algebra (40), geometry (12), none (3)``."""
    named = [f"{category} ({count})" for category, count in sorted(categories.items()) if category]
    return ", ".join([*named, *([f"none ({categories['']})"] if categories.get("") else [])])
