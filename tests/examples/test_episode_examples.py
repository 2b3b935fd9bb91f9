"""The examples with episodes: their demonstrations are episodes to the token, and their configs train on them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config.load import load_config
from mmrl.data.images import MediaStore
from mmrl.engine.aids.tiny_model import write_model
from mmrl.engine_api import SamplingRequest
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, Message, Prompt, Sample
from mmrl_datasets.lakes import write_lakes
from mmrl_datasets.pages import write_pages
from mmrl_datasets.screens import write_screens
from mmrl_datasets.table import Table
from tests.scripted_sampler import ScriptedSampler

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = {
    "frozen_lake": ["frozen_lake_grpo.yaml"],
    "screens": ["screens_grpo.yaml"],
    "zoom": ["zoom_grpo.yaml", "zoom_tool.yaml"],
}
WORDS = ("left", "down", "right", "up", "zoom", "click", "type", "scroll", "assistant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and few rows of each example's data."""
    folder = tmp_path_factory.mktemp("episodes")
    write_model(folder / "model", words=WORDS)
    write_lakes(folder / "frozen_lake", train=16, test=4, warmup=16)
    write_pages(folder / "zoom", train=16, test=4, warmup=16)
    write_screens(folder / "screens", train=16, points=16, test=4, warmup=32)
    return folder


def overrides(folder: Path, name: str) -> list[str]:
    small = [f"model.path={folder / 'model'}", f"data.train.path={folder / name}", "trainer.steps=2"]
    return [*small, "trainer.prompts_per_step=8", f"trainer.run_dir={folder / 'runs' / name}"]


class Played:
    """Plays a demonstration's turns in the environment that a config names."""

    def __init__(self, folder: Path, pool: EnvironmentPool, config: Any) -> None:
        from mmrl.engine.network.folder import ModelFolder
        from mmrl.engine.text.encoding import Encoder

        model, spec = ModelFolder.open(str(folder / "model")), config.environment
        media = MediaStore(folder / "media", model.image_sizes(config.data.min_pixels, config.data.max_pixels))
        self.encoder = Encoder(model, media, observation_role=spec.observation_role, keeps_images=True)
        self.decode = model.tokenizer.decode
        self.player = EpisodePlayer(spec, 64, (), pool, self.encoder, media)

    def demonstration(self, row: Prompt) -> Sample:
        return self.encoder.demonstrate(self.encoder.encode(row), all_turns=True)

    def episode(self, plain: Prompt, shown: Sample) -> Sample:
        """The episode of a row whose policy writes what was shown."""
        turns = [segment.token_ids.tolist() for segment in shown.segments if segment.by_policy]

        def write(request: SamplingRequest) -> list[int]:
            return list(turns[sum(segment.by_policy for segment in request.segments)])

        sampler = ScriptedSampler(write, lambda ids: str(self.decode(ids, skip_special_tokens=True)))
        encoded: EncodedPrompt = self.encoder.encode(plain)
        request = SamplingRequest(encoded, 1, 1.0, 64, 0)
        tally = self.player.tally()
        ((_, group),) = self.player.play(sampler, [request], [0], tally, Clock(), lambda *news, **fields: None)
        (rollout,) = group.rollouts
        assert rollout.failure == "" and rollout.finish_reason == "environment"
        return rollout


@pytest.mark.parametrize("name", CONFIGS)
def test_a_demonstration_is_the_episode_that_its_turns_make(name: str, folder: Path) -> None:
    """The same tokens, masks and images, from the first to the last turn."""
    config = load_config([EXAMPLES / file for file in CONFIGS[name]]).config
    assert config.environment is not None
    loaded = Table(Table.Config(path=str(folder / name), split="warmup")).load()
    rows = [row for row in loaded if row.columns.get("task") != "point"]  # which has no environment
    plain = [as_question(row) for row in rows]
    with EnvironmentPool(config.environment) as pool:
        played = Played(folder, pool, config)
        for row, question in zip(rows, plain, strict=True):
            shown = played.demonstration(row)
            episode = played.episode(question, shown)
            assert np.array_equal(episode.prompt.token_ids, shown.prompt.token_ids)
            assert np.array_equal(episode.token_ids, shown.token_ids)
            assert np.array_equal(episode.mask, shown.mask)
            assert [image.hash for image in episode.all_images] == [image.hash for image in shown.all_images]


def as_question(row: Prompt) -> Prompt:
    """The row as reinforcement learning has it: without turns, and without the pictures that the environment shows."""
    text = row.messages[0].content.removesuffix("\n<image>")
    images = row.images[: text.count("<image>")]
    return Prompt(row.id, (Message("user", text),), images, row.answer, row.columns)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_train_on_their_data(
    name: str, folder: Path, warm_mmrl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    small = [*overrides(folder, name), f"data.eval.path={folder / name}", "trainer.eval_every=2"]
    small += ["sampler.group_size=2", "sampler.engine.max_num_seqs=32"]
    process = warm_mmrl("train", *(EXAMPLES / file for file in CONFIGS[name]), *small)
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    start, *steps = lines
    assert 0 <= start["eval/accuracy"] <= 1
    for step in steps:
        assert step["mismatch/logprob_abs_max"] < 1e-4
        assert 1 <= step["episode/turns_mean"] <= 8
