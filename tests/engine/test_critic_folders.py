"""Critics that begin from a folder of their own: a reward model's brings its head; what does not fit is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.cluster.local import start_engine
from mmrl.config.critic import CriticConfig
from mmrl.engine.network.reward_model import VALUE_WEIGHT
from mmrl.engine.network.teacher import open_critic
from mmrl.engine.spec import EngineSpec
from mmrl.errors import ConfigError
from mmrl.score_head import VALUE_HEADS
from tests.engine.critic_runs import run, sections_of
from tests.engine.critics import PlainCritic, samples_of, valued
from tests.engine.teachers import write_teacher
from tests.reward_models import write_reward_model

PIXELS = (3136, 50176)


def opened(setting: Any, path: Path) -> Any:
    return open_critic(CriticConfig(path=str(path)), setting.folder, PIXELS)


@pytest.fixture
def begin(vision: Any) -> Callable[..., Any]:
    """The outcome of a learner whose critic begins from a folder; options are those of ``run``, and sections."""

    def take(path: Path, way: str = "full", checkpoint: Path | None = None, **options: Any) -> Any:
        sections = sections_of(way, **options.pop("sections", {}))
        sections["critic"]["path"] = str(path)
        facts = {"with_sampler": False, "checkpoint": checkpoint, "critic": opened(vision, path)}
        spec = EngineSpec(vision.config(**sections), vision.folder, vision.media, valued(), 2, **facts)
        return run(start_engine(spec), vision, "", **options)

    return take


@torch.no_grad()
def check(values: np.ndarray, critic: PlainCritic, setting: Any) -> None:
    expected = [critic(sample, setting.media)[:-1] for sample in samples_of(setting)]
    np.testing.assert_allclose(values, torch.cat(expected), atol=1e-4)
    assert np.std(values) > 0.01


@pytest.fixture(scope="module")
def reward(vision: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model's folder, with another body than the policy's; no test changes it."""
    folder = tmp_path_factory.mktemp("reward")
    return write_reward_model(write_teacher(folder / "body", Path(vision.folder.path)), folder / "reward", seed=4)


@pytest.mark.parametrize("way", ["full", pytest.param("lora", marks=pytest.mark.full)])
def test_a_reward_models_folder_brings_its_head(way, begin, reward, vision, plain, tmp_path):
    found = begin(reward, way, save=tmp_path)
    score = load_file(reward / "model.safetensors")["score.weight"]
    check(found.values, PlainCritic(plain(reward.parent / "body"), score), vision)
    again = begin(reward, way, checkpoint=tmp_path)
    np.testing.assert_array_equal(again.values, found.values)


def test_a_score_beside_a_policy_is_read_and_one_of_another_width_refused(begin, vision, tmp_path, plain):
    folder = shutil.copytree(vision.folder.path, tmp_path / "values")
    width = vision.folder.config.get_text_config().hidden_size
    score = torch.randn(1, width, generator=torch.Generator().manual_seed(2))
    save_file({VALUE_WEIGHT: score, "v_head.summary.bias": torch.ones(1)}, folder / VALUE_HEADS[0])
    found = begin(folder)
    check(found.values, PlainCritic(plain(vision.folder.path), score), vision)
    save_file({VALUE_WEIGHT: score[:, :-2].contiguous()}, folder / VALUE_HEADS[0])
    with pytest.raises(ConfigError, match=f"the score has 1x{width - 2} weights, and the model 1 x {width}") as caught:
        opened(vision, folder)
    assert caught.value.where.startswith("critic.path: ")


@pytest.mark.parametrize(
    ("same_tower", "freeze", "shared"),
    [(True, ["vision", "projector"], True), (False, ["vision", "projector"], False), (True, [], False)],
)
def test_features_are_shared_with_a_critic_of_an_equal_frozen_tower_alone(
    same_tower, freeze, shared, begin, vision, plain, tmp_path
):
    folder = write_teacher(tmp_path / "other", Path(vision.folder.path), tower=same_tower)
    sections = {"model": {"freeze": ["vision", "projector"]}, "critic": {"freeze": freeze}}

    def look(learner: Any) -> None:
        policy, critic = (learner.network(role)._batches.features for role in ("policy", "critic"))
        assert (policy is critic) == shared and bool(policy.known) == shared

    found = begin(folder, sections=sections, also=look)
    expected = PlainCritic(plain(folder), found.weights["critic"]["score.weight"])
    check(found.values, expected, vision)


@pytest.fixture
def critic(vision: Any, tmp_path: Path) -> Path:
    """A copy of the policy's folder, which a test may damage."""
    return shutil.copytree(vision.folder.path, tmp_path / "critic")


def change(folder: Path, **config: Any) -> None:
    found = json.loads((folder / "config.json").read_text())
    for key, value in config.items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(found))


def refusal(setting: Any, path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        opened(setting, path)
    assert caught.value.where.startswith("critic.path") and caught.value.remedy
    return caught.value


def test_a_critic_that_reads_ids_or_images_in_another_way_is_refused(vision, critic, models):
    """The checks are those of teachers, of which ``test_teachers.py`` has each."""
    change(critic, text_config={"vocab_size": 40})
    assert "token id 40 is " in (error := refusal(vision, critic)).what and error.what.endswith(
        "no token to the critic"
    )
    change(critic, text_config={"vocab_size": vision.folder.vocabulary.size}, vision_config={"patch_size": 28})
    assert refusal(vision, critic).what == "an image of 56x56 pixels is 4 tokens to the policy, and 1 to the critic"
    error = refusal(vision, models("qwen3_vl"))
    assert "the critic is of type qwen3_vl, and the policy of type qwen2_5_vl" in error.what
    assert "text model" not in error.possible
    assert "the critic reads text alone (qwen2), and the policy reads images" in refusal(vision, models("qwen2")).what


def test_a_critic_without_weights_or_as_an_adapter_is_refused(vision, critic):
    (critic / "model.safetensors").unlink()
    assert "has a config.json and no *.safetensors" in refusal(vision, critic).what
    (critic / "config.json").rename(critic / "adapter_config.json")
    assert "holds an adapter, and no whole model" in refusal(vision, critic).what


@pytest.mark.parametrize(
    ("weights", "config", "match"),
    [
        ({"score.weight": torch.zeros(1, 64)}, {}, r"have a head of shape \[1, 64\]: score.weight is \(1, 128\)"),
        ({}, {}, r"files lack its head: score.weight is \(1, 128\)"),
        ({"score.weight": torch.zeros(2, 128)}, {"num_labels": 2}, "tells 2 labels apart"),
    ],
)
def test_a_critic_whose_head_does_not_fit_is_refused_before_an_engine_starts(
    weights, config, match, reward, vision, tmp_path
):
    folder = shutil.copytree(reward, tmp_path / "wrong")
    saved = load_file(folder / "model.safetensors")
    del saved["score.weight"]
    save_file({**saved, **weights}, folder / "model.safetensors", metadata={"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | config))
    assert re.search(match, refusal(vision, folder).what)
