"""Two ranks at ZeRO 3 find the gradient that one rank finds without ZeRO, for a family of each kind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mmrl.cluster.process import host_meeting
from mmrl.engine import device
from mmrl.engine.network.family import FAMILIES
from tests.proofs import REPRESENTATIVES

CHOSEN = REPRESENTATIVES  # ``cluster/test_family_ranks.py`` has all, before a release


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory, models: Callable[..., Path]) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of ``sharded_ranks.py``, and what a single rank and the first of two print of every family."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, [printed(folder, [models(family) for family in CHOSEN], ranks) for ranks in (1, 2)]


def printed(folder: Path, models: list[Path], count: int) -> dict[str, Any]:
    """The JSON that the first of so many ranks prints."""
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    meeting = host_meeting(bound)
    command = [sys.executable, str(Path(__file__).with_name("sharded_ranks.py")), str(folder), *map(str, models)]
    ranks = []
    for rank in range(count):
        place = device.rank_variables(
            "cpu", rank=rank, node_rank=rank, world_size=count, address="127.0.0.1", port=port
        )
        environment = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE))
    try:  # DeepSpeed may compile its helper first
        lines = [rank.communicate(timeout=600)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    del meeting  # ranks met there
    found: dict[str, Any] = json.loads(lines[0][-1])
    return found


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
