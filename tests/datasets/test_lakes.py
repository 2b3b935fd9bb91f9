"""Frozen lakes: maps that differ, shortest paths by gymnasium's own rules, and pictures that are the environment's."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl.types import Prompt, Turn
from mmrl_datasets.lakes import MOVES, shortest_path, write_lakes
from mmrl_datasets.table import Table

gymnasium = pytest.importorskip("gymnasium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lakes")
    write_lakes(folder, train=40, test=20, warmup=12, seed=1)
    return folder


def prompts(folder: Path, split: str) -> list[Prompt]:
    return list(Table(Table.Config(path=str(folder), split=split)).load())


def fewest_moves(world: list[str]) -> int:
    """Breadth first, by gymnasium's own table of transitions."""
    game = gymnasium.make("FrozenLake-v1", desc=world, is_slippery=False).unwrapped
    here = {int(np.argmax(game.initial_state_distrib))}
    for count in range(1, 20):
        outcomes = [game.P[state][action][0] for state in here for action in range(4)]
        if any(reward for _, _, reward, _ in outcomes):
            return count
        here = {there for _, there, _, over in outcomes if not over}
    raise AssertionError("no way")


def test_paths_are_shortest_and_maps_are_in_one_split_alone(folder: Path) -> None:
    worlds = list[str]()
    for split in ("train", "test", "warmup"):
        for prompt in prompts(folder, split):
            world, path = json.loads(prompt.columns["world"])["desc"], prompt.columns["path"].split()
            worlds.append("/".join(world))
            assert len(path) == int(prompt.answer) == fewest_moves(world) >= 6
            game = gymnasium.make("FrozenLake-v1", desc=world, is_slippery=False)
            game.reset(seed=0)
            outcomes = [game.step(list(MOVES).index(move)) for move in path]
            assert [outcome[1] for outcome in outcomes] == [0] * (len(path) - 1) + [1]
    assert len(set(worlds)) == 72


@pytest.mark.parametrize(
    ("world", "path"),
    [
        (["SFF", "FFF", "FFG"], "down down right right"),
        (["SFF", "FHF", "HFG"], "right right down down"),
        (["SHFFF", "FHFHF", "FFFHG"], "down down right right up up right right down down"),
        (["SH", "HG"], ""),
    ],
)
def test_of_several_shortest_paths_it_is_the_first_by_the_order_of_the_moves(world: list[str], path: str) -> None:
    assert shortest_path(world) == path.split()


def test_walks_are_episodes_of_the_environment(folder: Path) -> None:
    """The same turns, roles and pixels, from the first picture on."""
    from mmrl_environments.gymnasium import Gymnasium

    config: dict[str, Any] = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "kwargs_column": "world"}
    config |= {"render": True, "image_side": 56, "actions": tuple(MOVES), "action": "^(left|down|right|up)$"}
    for prompt in prompts(folder, "warmup"):
        lake = Gymnasium(Gymnasium.Config(**config))
        shown = lake.reset(prompt, 0)
        texts = [message.content for message in prompt.messages]
        assert texts[0] == "Walk to the flag.\n<image>"  # an observation of a reset is on a line of its own
        assert texts[1::2] == prompt.columns["path"].split()[:-1]
        for index, image in enumerate(prompt.images):
            assert (prompt.messages[2 * index].role, shown.role) == ("user", "user")
            assert np.array_equal(np.asarray(shown.content), np.asarray(Image.open(io.BytesIO(image.data))))
            move = prompt.columns["path"].split()[index]
            shown = asyncio.run(lake.step(Turn(move, (), index, "stop", 10)))
        assert shown.done and shown.reward == 1 and prompt.demonstration == prompt.columns["path"].split()[-1]
        lake.close()


def test_lakes_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holes of 0 or more"):
        write_lakes(tmp_path, holes=0.9)
    with pytest.raises(DataError, match="fewer different rows"):
        write_lakes(tmp_path, train=10_000, size=2)
