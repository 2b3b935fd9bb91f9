"""Two ranks at ZeRO 3 find the gradient that one rank finds without ZeRO, for a family of each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mmrl.engine.network.family import FAMILIES
from tests.cluster.process_ranks import run_together
from tests.engine.sharded_ranks import learn
from tests.proofs import REPRESENTATIVES
from tests.warm_workers import Template

CHOSEN = REPRESENTATIVES  # ``cluster/test_family_ranks.py`` has all, before a release


@pytest.fixture(scope="module")
def updates(
    tmp_path_factory: pytest.TempPathFactory, models: Callable[..., Path], warm_engines: Template
) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of ``sharded_ranks.py``, and what a single rank and the first of two tell of every family."""
    folder, chosen = tmp_path_factory.mktemp("sharded"), [models(family) for family in CHOSEN]
    return folder, [run_together(ranks, warm_engines, learn, folder, chosen)[0] for ranks in (1, 2)]


@pytest.mark.full
@pytest.mark.proves("zero_3")
@pytest.mark.parametrize("family", CHOSEN)
def test_two_ranks_at_zero_3_find_the_gradient_of_one(family, updates):
    check(family, FAMILIES[family].mixture, updates)


@pytest.mark.full
@pytest.mark.proves("zero_3")
@pytest.mark.parametrize("family", [family for family in CHOSEN if FAMILIES[family].vision])
def test_two_ranks_of_which_one_has_no_image_find_the_gradient_of_episodes(family, updates):
    """The other one has images of prompts and of observations, and more rows."""
    check(f"{family}-episodes", False, updates)


def check(step: str, mixture: bool, updates: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (alone, together) = updates
    one, two = (load_file(folder / f"{step}-{ranks}.safetensors") for ranks in (1, 2))
    norm = sum(float(gradient.square().sum()) for gradient in one.values()) ** 0.5
    assert one.keys() == two.keys() and norm > 0
    assert sum(float((one[name] - two[name]).square().sum()) for name in one) ** 0.5 < 1e-5 * norm
    assert not mixture or together[step]["loss/router_aux"] > 0
    assert together[step]["perf/microbatches"] > alone[step]["perf/microbatches"] == 1
    losses = {name for name in alone[step] if name.startswith("loss/")}
    assert {name: together[step][name] for name in losses} == pytest.approx(
        {name: alone[step][name] for name in losses}, rel=1e-5, abs=1e-7
    )
