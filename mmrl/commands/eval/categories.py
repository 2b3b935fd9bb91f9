"""The accuracy of an evaluation by category, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mmrl.ops.categories import category_metrics, metric_names
from mmrl.ops.estimation import Estimate, score_estimate
from mmrl.types import FloatArray

Categories = Mapping[str, tuple[int, Estimate | None]]
"""The prompts of each category and its accuracy, None where nothing scores them; those without one are ``""``."""


def category_estimates(right: Sequence[FloatArray], categories: Sequence[str]) -> dict[str, Estimate]:
    """``category_metrics`` with the names that a run logs; accuracies of categories have intervals.

    Args:
        right: For each prompt the accuracies of its completions, NaN where one is not known.
        categories: Each prompt's; empty for none.
    """
    found = {f"eval/{name}": Estimate(value) for name, value in category_metrics(right, categories).items()}
    own = {
        f"eval/{name}": _accuracy(right, categories, category) for category, name in metric_names(categories).items()
    }
    return found | {name: estimate for name, estimate in own.items() if estimate is not None}


def by_category(right: Sequence[FloatArray], categories: Sequence[str]) -> Categories:
    """Each category's prompts and accuracy; empty if no prompt has one, or nothing tells right from wrong."""
    if not any(categories) or all(np.isnan(values).all() for values in right):
        return {}
    return {each: (categories.count(each), _accuracy(right, categories, each)) for each in sorted({*categories})}


def _accuracy(right: Sequence[FloatArray], categories: Sequence[str], category: str) -> Estimate | None:
    own = [values for values, its in zip(right, categories, strict=True) if its == category]
    values = np.concatenate(own)
    known, prompts = ~np.isnan(values), np.repeat(np.arange(len(own)), [len(each) for each in own])
    return score_estimate(values[known], prompts[known]) if known.any() else None
