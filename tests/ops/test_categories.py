"""Accuracies by category: hand calculations, and names that metrics can have."""

from __future__ import annotations

import numpy as np
import pytest

from mmrl.ops.categories import categories_text, category_metrics, metric_names

NAN = float("nan")


def of(*right: list[float], categories: list[str]) -> dict[str, float]:
    return category_metrics([np.array(each) for each in right], categories)


def test_each_category_weighs_the_same_in_the_macro_average() -> None:
    """Ties are one half; a rejected answer has no value of its own."""
    found = of([1.0, NAN], [NAN, 0.5], [0.0, NAN], [1.0, NAN], categories=["vqa", "vqa", "vqa", "math"])
    assert found == {
        "accuracy/math": 1.0,
        "accuracy/vqa": 0.5,
        "macro_accuracy": 0.75,
        "uncategorised_fraction": 0.0,
    }


def test_a_categorys_accuracy_is_the_mean_over_its_completions() -> None:
    found = of([1.0, 1.0, 0.0], [0.0], [1.0], categories=["a", "a", "b"])
    assert (found["accuracy/a"], found["macro_accuracy"]) == (0.5, 0.75)


def test_rows_without_a_category_are_counted_and_in_none() -> None:
    found = of([1.0], [0.0], [0.0], [0.0], categories=["", "a", "", ""])
    assert found == {"accuracy/a": 0.0, "macro_accuracy": 0.0, "uncategorised_fraction": 0.75}
    assert of([1.0], [0.0], categories=["", ""]) == {}


def test_a_category_that_nothing_scores_is_left_out_of_the_mean() -> None:
    found = of([NAN], [1.0], categories=["a", "b"])
    assert found == {"accuracy/b": 1.0, "macro_accuracy": 1.0, "uncategorised_fraction": 0.0}
    assert of([NAN], categories=["a"]) == {"uncategorised_fraction": 0.0}


@pytest.mark.parametrize(
    ("categories", "names"),
    [
        (["safety/bias", "VQA (short)", "Größe"], ["safety_bias", "VQA_short", "Größe"]),
        (["a b", "a/b", "a_b"], ["a_b", "a_b_2", "a_b_3"]),
        (["a b", "a/b", "a_b_2"], ["a_b", "a_b_2", "a_b_2_2"]),
        (["?!", "x" * 100, "x" * 101], ["category", "x" * 48, "x" * 48 + "_2"]),
    ],
)
def test_names_are_safe_and_each_categorys_own(categories: list[str], names: list[str]) -> None:
    found = metric_names([*categories, ""])
    assert found == {category: f"accuracy/{name}" for category, name in zip(categories, names, strict=True)}
    assert list(metric_names(reversed(categories)).values()) == [found[each] for each in sorted(categories)]


def test_counts_are_told_in_order() -> None:
    assert categories_text({"b": 2, "": 1, "a": 30}) == "a (30), b (2), none (1)"
