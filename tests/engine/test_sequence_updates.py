"""Ranks that hold rows together find the log-probs and the gradient of one rank that holds whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mmrl.engine.network.family import FAMILIES
from tests.cluster.process_ranks import run_together
from tests.engine.sequence_updates import Case, Found, learn
from tests.proofs import families
from tests.warm_workers import Template

FULL, SLOW = pytest.mark.full, pytest.mark.slow
SHORT = ("qwen2", "qwen2_5_vl")
"""Families of the short tier."""
OTHER_WAYS: Mapping[str, Any] = {
    "short rows": {"kind": "short"},
    "adapters": {"sections": {"model": {"lora": {"rank": 4}}}},
    "no checkpoints": {"sections": {"model": {"gradient_checkpointing": False}}},
    "values": {"role": "critic"},
}
"""Cases of a text model."""


@pytest.fixture(scope="module")
def taken(
    tmp_path_factory: pytest.TempPathFactory, warm_engines: Template, models: Callable[..., Path]
) -> Callable[..., Any]:
    """What each of some ranks finds, case after case."""

    def take(family: str, cases: Sequence[Mapping[str, Any]], ranks: int, size: int, stage: int) -> list[list[Found]]:
        made = []
        for each in cases:
            sections = {**each.get("sections", {})}
            sections["learner"] = {"zero_stage": stage, **sections.get("learner", {})}
            made.append(Case(models(family), **{**each, "size": size, "sections": sections}))
        return run_together(ranks, warm_engines, learn, made, tmp_path_factory.mktemp("taken"))

    return take


@pytest.fixture(scope="module")
def of_samples(taken: Callable[..., Any]) -> Callable[..., list[list[Found]]]:
    """The same of samples, and of episodes with images if the family reads any."""

    @cache
    def take(family: str, ranks: int = 1, size: int = 1, stage: int = 0) -> list[list[Found]]:
        kinds = ("samples", "episodes") if FAMILIES[family].vision else ("samples",)
        return taken(family, [{"kind": kind} for kind in kinds], ranks, size, stage)

    return take


def check(found: Sequence[Found], alone: Found, size: int) -> None:
    """Compare all ranks with one that holds whole rows."""
    for rank, each in enumerate(found):
        first = found[rank // size * size]
        for name in ("scores", "single", "statistics"):
            own = getattr(each, name)
            assert own == getattr(first, name), "ranks of a row answer alike"
            for number, values in own.items():
                assert values == pytest.approx(getattr(alone, name)[number], abs=1e-5), (name, number)
        assert each.seen == alone.seen
    assert {number for each in found for number in each.scores} == alone.scores.keys()
    gradient, expected = found[0].gradient, alone.gradient
    assert gradient.keys() == expected.keys()
    norms = {name: float(values.norm()) for name, values in expected.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    errors = {name: float((gradient[name] - values).norm()) for name, values in expected.items()}
    assert whole > 0 and sum(error**2 for error in errors.values()) ** 0.5 < 1e-5 * whole
    # Sums over tokens that nearly cancel, such as of decays, have few digits of their own.
    assert not {name for name, error in errors.items() if error > max(1e-4 * norms[name], 1e-6 * whole)}
    of_rows = {name for name in alone.metrics if not name.startswith("perf/")}
    assert {name: found[0].metrics[name] for name in of_rows} == pytest.approx(
        {name: alone.metrics[name] for name in of_rows}, rel=1e-5, abs=1e-6
    )


def of_families() -> list[Any]:
    """All of them: two in the short tier, a representative of each kind in the full one."""
    marked = families("sequence", sweep=SLOW)
    return [
        pytest.param(*each.values, marks=FULL) if not each.marks and each.values[0] not in SHORT else each
        for each in marked
    ]


@pytest.mark.proves("sequence")
@pytest.mark.parametrize("family", of_families())
def test_two_ranks_that_hold_rows_together_find_the_gradient_of_one(family, of_samples):
    """At ZeRO 3; prompts are shared, groups ragged, and cuts go through images."""
    found, (alone,) = of_samples(family, 2, 2, 3), of_samples(family)
    for of_ranks, of_one in zip(zip(*found, strict=True), alone, strict=True):
        check(of_ranks, of_one, 2)
    if FAMILIES[family].vision:
        assert any(each.cut_images for each in found[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "size", "stage"),
    [
        ("qwen2_5_vl", 4, 0),
        ("qwen3_moe", 2, 3),
        *(pytest.param(*case, marks=SLOW) for case in (("gemma4", 4, 2), ("qwen3_5", 2, 1))),
    ],
)
def test_four_ranks_find_the_gradient_of_one(family, size, stage, of_samples):
    """With more ranks than heads of keys; or over two groups of two ranks, which have different rows."""
    found, (alone,) = of_samples(family, 4, size, stage), of_samples(family)
    for of_ranks, of_one in zip(zip(*found, strict=True), alone, strict=True):
        check(of_ranks, of_one, size)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), pytest.param(2, 3, marks=SLOW), pytest.param(4, 2, marks=SLOW)])
def test_rows_of_a_token_adapters_and_values_are_those_of_one_rank(ranks, stage, taken):
    cases = list(OTHER_WAYS.values())
    found, (alone,) = taken("qwen2", cases, ranks, ranks, stage), taken("qwen2", cases, 1, 1, 0)
    for of_ranks, of_one in zip(zip(*found, strict=True), alone, strict=True):
        check(of_ranks, of_one, ranks)


@pytest.mark.full
def test_a_frozen_tower_encodes_each_image_on_one_rank_and_values_see_images(taken):
    frozen = {"kind": "episodes", "sections": {"model": {"freeze": ["vision", "projector"]}}}
    cases = [frozen, {"kind": "episodes", "role": "critic"}]
    found, (alone,) = taken("internvl", cases, 2, 2, 3), taken("internvl", cases, 1, 1, 0)
    for of_ranks, of_one in zip(zip(*found, strict=True), alone, strict=True):
        check(of_ranks, of_one, 2)
    tiles = [each[0].patches for each in found]
    assert sum(tiles) == alone[0].patches and min(tiles) > 0


@pytest.mark.full
def test_experts_that_are_replayed_are_those_of_each_ranks_tokens(taken):
    cases = [{"sections": {"learner": {"routing": routing}}} for routing in ("replayed", "compared")]
    found, (alone,) = taken("qwen3_moe", cases, 2, 2, 0), taken("qwen3_moe", cases, 1, 1, 0)
    for of_ranks, of_one in zip(zip(*found, strict=True), alone, strict=True):
        check(of_ranks, of_one, 2)
        assert 0.5 < of_one.metrics["mismatch/rerouted_choices"] < of_one.metrics["mismatch/rerouted_tokens"] <= 1
    assert alone[0].metrics["loss/router_aux"] != alone[1].metrics["loss/router_aux"]


@pytest.mark.slow
@pytest.mark.parametrize("family", families("sequence"))
def test_values_of_every_family_are_those_of_one_rank(family, taken):
    cases = [{"kind": "episodes" if FAMILIES[family].vision else "samples", "role": "critic"}]
    found, (alone,) = taken(family, cases, 2, 2, 3), taken(family, cases, 1, 1, 0)
    check([each for (each,) in found], alone[0], 2)
