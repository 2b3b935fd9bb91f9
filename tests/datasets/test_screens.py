"""Drawn windows: what is right, what is held out, and demonstrations that are episodes of the environment."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from mmrl.errors import DataError
from mmrl.rollout.rewards.worker import call
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import ImageRef, Prompt, Turn
from mmrl_datasets.screens import write_screens
from mmrl_datasets.table import Table
from mmrl_environments.screens import Screens
from mmrl_rewards.point_in_box import PointInBox

EXAMPLES = Path(__file__).parents[2] / "examples"
SPLITS = ("points", "test_points", "train", "test", "warmup")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screens")
    write_screens(folder, train=30, points=30, test=20, warmup=60, seed=1)
    return folder


def prompts(folder: Path, split: str) -> list[Prompt]:
    return list(Table(Table.Config(path=str(folder), split=split)).load())


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_the_demonstrated_click_is_right_and_one_on_another_element_is_not(folder: Path) -> None:
    reward = PointInBox(PointInBox.Config())
    for row in prompts(folder, "points"):
        others = json.loads(row.columns["screen"])["elements"][1:]
        elsewhere = [f"click({(x0 + x1) // 2},{(y0 + y1) // 2})" for x0, y0, x1, y1 in (each["box"] for each in others)]
        texts = [str(row.demonstration), *elsewhere]
        assert call(reward, make_rollouts(texts, answer=row.answer)) == [1, 0, 0]


def test_conversations_are_episodes_of_the_environment_that_reach_the_goal(folder: Path) -> None:
    """The same screenshots, to the pixel, and the full reward at the end."""
    environment = Screens(Screens.Config(action="^(.*)$"))
    rows = [row for row in prompts(folder, "warmup") if len(row.messages) > 1]
    assert {row.columns["task"] for row in rows} == {"tick", "type", "choose"}
    turns = set[int]()
    for row in rows:
        acts = [message.content for message in row.messages if message.role == "assistant"] + [str(row.demonstration)]
        shown, turns = environment.reset(row, 0), turns | {len(acts)}
        for act, image in zip(acts, row.images, strict=True):
            (picture,) = shown.content
            assert np.array_equal(np.asarray(picture), pixels(image.data))
            shown = asyncio.run(environment.step(Turn(act, (), 0, "stop", 100)))
        assert shown.done and shown.reward == 1
    assert turns == {2, 3, 4}


def test_rows_of_the_environment_have_no_image_and_begin_with_a_right_action(folder: Path) -> None:
    environment = Screens(Screens.Config(action="^(.*)$"))
    for row in prompts(folder, "train"):
        assert not row.images and not environment.reset(row, 0).done
        shown = asyncio.run(environment.step(Turn(str(row.demonstration), (), 0, "stop", 100)))
        assert not shown.done and not isinstance(shown.content, str)  # it has changed the window


def test_no_window_is_in_two_splits(folder: Path) -> None:
    layouts = [json.loads(row.columns["screen"]) for split in SPLITS for row in prompts(folder, split)]
    assert len({json.dumps(each["elements"]) for each in layouts}) == len(layouts) == 160


def test_rows_follow_from_the_seed(folder: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 1), ("other", 2)):
        write_screens(tmp_path / name, train=30, points=30, test=20, warmup=60, seed=seed)
    for split in SPLITS:
        written = (folder / f"{split}.parquet").read_bytes()
        assert (tmp_path / "same" / f"{split}.parquet").read_bytes() == written
        assert (tmp_path / "other" / f"{split}.parquet").read_bytes() != written


def test_screens_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    for options in ({"cells": 1}, {"elements": 5}, {"elements": 1}, {"train": -1}, {"points": -1}):
        with pytest.raises(DataError, match="cannot be drawn"):
            write_screens(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_the_example_reads_screenshots_instructions_and_boxes(tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "gui_grounding_qwen2_5_vl_3b_grpo.yaml").read_text())
    Image.new("RGB", (1920, 1080)).save(tmp_path / "0.png")
    row = {"screenshot": "0.png", "instruction": "Open the settings", "bbox": [480, 270, 960, 540]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = {key: value for key, value in config["data"]["train"].items() if key != "name"}
    (read,) = Table(Table.Config(**{**options, "path": str(tmp_path / "rows.jsonl")})).load()
    assert read.messages[0].content == "<image>Open the settings" and len(read.images) == 1
    (reward,) = config["rewards"]
    judge = PointInBox(PointInBox.Config(**{key: value for key, value in reward.items() if key != "name"}))
    seen = ImageRef("a" * 64, 644, 364, "a.png", (1920, 1080))
    texts = ['{"point_2d": [161, 91]}', '{"point_2d": [160, 91]}', '{"point_2d": [480, 270]}']
    assert call(judge, make_rollouts(texts, answer=read.answer, images=(seen,))) == [1, 0, 0]
