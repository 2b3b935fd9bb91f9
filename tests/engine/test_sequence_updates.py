"""Ranks that hold rows together find the log-probs and the gradient of one rank that holds whole rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mmrl.engine.network.family import FAMILIES
from tests.cluster.process_ranks import run_together
from tests.engine.sequence_updates import Case, Found, learn
from tests.proofs import families
from tests.warm_workers import Template

FULL = pytest.mark.full
SHORT = ("qwen2", "qwen2_5_vl")
"""Families of the short tier."""


@pytest.fixture(scope="module")
def taken(
    tmp_path_factory: pytest.TempPathFactory, warm_engines: Template, models: Callable[..., Path]
) -> Callable[..., Any]:
    """What each of some ranks finds in the steps of a family: samples, and episodes with images if it reads any."""

    @cache
    def take(family: str, ranks: int = 1, size: int = 1, stage: int = 0) -> list[list[Found]]:
        kinds = (False, True) if FAMILIES[family].vision else (False,)
        sections = {"learner": {"zero_stage": stage}}
        cases = [Case(models(family), played, size, sections) for played in kinds]
        return run_together(ranks, warm_engines, learn, cases, tmp_path_factory.mktemp("taken"))

    return take


def check(found: list[Found], alone: Found, size: int) -> None:
    """Compare all ranks with one that holds whole rows."""
    for rank, each in enumerate(found):
        first = found[rank // size * size]
        assert each.logprobs == first.logprobs, "ranks of a row answer alike"
        for number, values in each.logprobs.items():
            assert values == pytest.approx(alone.logprobs[number], abs=1e-5)
    assert {number for each in found for number in each.logprobs} == alone.logprobs.keys()
    gradient, expected = found[0].gradient, alone.gradient
    assert gradient.keys() == expected.keys()
    norms = {name: float(values.norm()) for name, values in expected.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    errors = {name: float((gradient[name] - values).norm()) for name, values in expected.items()}
    assert whole > 0 and sum(error**2 for error in errors.values()) ** 0.5 < 1e-5 * whole
    # Sums over tokens that nearly cancel, such as of decays, have few digits of their own.
    assert not {name for name, error in errors.items() if error > max(1e-4 * norms[name], 1e-6 * whole)}
    losses = {name for name in alone.metrics if name.startswith(("loss/", "policy/"))}
    assert {name: found[0].metrics[name] for name in losses} == pytest.approx(
        {name: alone.metrics[name] for name in losses}, rel=1e-5, abs=1e-7
    )


def of_families() -> list[Any]:
    """All of them: two in the short tier, a representative of each kind in the full one."""
    marked = families("sequence", sweep=pytest.mark.slow)
    return [
        pytest.param(*each.values, marks=FULL) if not each.marks and each.values[0] not in SHORT else each
        for each in marked
    ]


@pytest.mark.proves("sequence")
@pytest.mark.parametrize("family", of_families())
def test_two_ranks_that_hold_rows_together_find_the_gradient_of_one(family, taken):
    """At ZeRO 3; prompts are shared, groups ragged, and cuts go through images."""
    found, alone = taken(family, 2, 2, 3), taken(family)
    for of_ranks, of_one in zip(zip(*found, strict=True), alone[0], strict=True):
        check(list(of_ranks), of_one, 2)
    if FAMILIES[family].vision:
        assert any(each.cut_images for each in found[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "size", "stage"),
    [
        ("qwen2_5_vl", 4, 0),
        ("qwen3_moe", 2, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma4", 4, 2), ("qwen3_5", 2, 1))),
    ],
)
def test_four_ranks_find_the_gradient_of_one(family, size, stage, taken):
    """With more ranks than heads of keys; or over two groups of two ranks, which have different rows."""
    found, alone = taken(family, 4, size, stage), taken(family)
    for of_ranks, of_one in zip(zip(*found, strict=True), alone[0], strict=True):
        check(list(of_ranks), of_one, size)
