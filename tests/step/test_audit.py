"""The audit of a run's start: sound engines pass, and each fault has the row that finds it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mmrl.data.images import ImageGrid, MediaStore
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.text.encoding import Encoder
from mmrl.engine_api import SamplingRequest
from mmrl.errors import NumericsError
from mmrl.step.audit import probed as probing
from mmrl.step.audit.probe_prompts import IMAGE, MOVED, OTHER, fitting
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.start_audit import LIMITS, audit, cheap_rows
from mmrl.types import EncodedPrompt, FloatArray, RolloutGroup, Sample
from tests.proofs import families

HF = {"name": "hf", "temperature": 1.0}
SHORT = {"train": {"name": "table"}, "max_prompt_tokens": 8}


@dataclass
class Faulty:
    """An engine around a sound one.

    Attributes:
        shown: The prompt that the sampler is shown in place of one.
        leaks: Added to the learner's packed log-probs of every completion but the first.
        has_room: False if the device has none for a wider type.
    """

    engine: Any
    shown: Callable[[EncodedPrompt], EncodedPrompt] = lambda prompt: prompt
    leaks: float = 0.0
    has_room: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @contextmanager
    def sampling(self) -> Iterator[Faulty]:
        with self.engine.sampling() as self.sampler:
            yield self

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        shown = [replace(request, prompt=self.shown(request.prompt)) for request in requests]
        for index, group in self.sampler.generate(shown):
            prompt = requests[index].prompt
            yield index, RolloutGroup(prompt, tuple(replace(each, prompt=prompt) for each in group.rollouts))

    @contextmanager
    def learning(self) -> Iterator[Faulty]:
        with self.engine.learning() as learner:
            self.policy = learner.network("policy")
            yield self

    def network(self, role: str) -> Faulty:
        return self

    def score(self, samples: Sequence[Sample], *, way: Any = "packed") -> list[FloatArray]:
        if way == "wide" and not self.has_room:
            return []
        first, *others = self.policy.score(samples, way=way)
        return [first, *(each + self.leaks * (way == "packed") for each in others)]


def rows(engine: Any, bench: Any, **sections: Any) -> list[ProbeRow]:
    return list(cheap_rows(engine, bench.encoder, bench.config(**{"sampler": HF, **sections})))


def bad(found: Sequence[ProbeRow]) -> set[str]:
    return {row.probe for row in found if row.verdict == "bad"}


@pytest.fixture(scope="module")
def seeing(start: Callable[..., Any]) -> Any:
    return start(with_sampler=True, sampler=HF)


@pytest.fixture(scope="module")
def blind_folder(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose merger gives zeros."""
    folder = tmp_path_factory.mktemp("blind") / "model"
    shutil.copytree(models("qwen2_5_vl"), folder)
    weights = load_file(folder / "model.safetensors")
    merger = [name for name in weights if "merger" in name]
    assert merger
    save_file(weights | {name: torch.zeros_like(weights[name]) for name in merger}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    return folder


def test_a_sound_engine_passes_and_sees_with_room_and_without(seeing, vision):
    found = rows(seeing, vision)
    assert not bad(found) and max(row.ratio for row in found) < 0.1
    by_name = {row.probe: row for row in found}
    assert by_name["sight, another image"].number > by_name["sight, the mark moved"].number > 1e-3
    assert by_name["sight of the sampler, the mark moved"].number < 1e-5
    assert {"learner = plain transformers, one image twice", "sampler = learner, an image late"} <= by_name.keys()
    without = rows(Faulty(seeing, has_room=False), vision)
    assert not bad(without) and {row.probe for row in without} >= {"packed = one by one, no image", f"sight, {MOVED}"}


def test_a_blind_folder_is_found_with_room_for_a_wider_type_and_without(blind_folder, start, vision):
    blind = replace(vision, folder=ModelFolder.open(str(blind_folder)))
    for dtype in ("float32", "bfloat16"):
        engine = start(bench=blind, with_sampler=True, sampler=HF, model={"dtype": dtype})
        for each in (engine, Faulty(engine, has_room=False)):
            assert bad(rows(each, blind)) == {f"sight, {OTHER}", f"sight, {MOVED}"}


def test_a_sampler_that_is_shown_another_image_is_found(seeing, vision):
    prompts = {each.name: each.encoded for each in fitting(vision.encoder, max_tokens=256, max_images=2)}
    swapped = {prompts[OTHER].images[0]: prompts[IMAGE].images, prompts[MOVED].images[0]: prompts[IMAGE].images}

    def shown(prompt: EncodedPrompt) -> EncodedPrompt:
        images = swapped.get(prompt.images[0], prompt.images) if len(prompt.images) == 1 else prompt.images
        return replace(prompt, images=images)

    found = bad(rows(Faulty(seeing, shown), vision))
    assert found == {f"{probe}, {name}" for probe in ("sampler = learner", "sight of the sampler")
                     for name in (OTHER, MOVED)}  # fmt: skip


def test_a_learner_with_one_position_for_all_patches_is_found(seeing, vision):
    def flat(module: Any, args: Any, options: Any) -> Any:
        hidden, positions = (*args, *options.values())
        return (hidden, positions[:1].expand_as(positions)), {}

    (rotary,) = [
        module
        for name, module in seeing._learner.policy.model.named_modules()
        if name.endswith("rotary_emb") and "visual" not in name
    ]
    handle = rotary.register_forward_pre_hook(flat, with_kwargs=True)
    try:
        found = bad(rows(seeing, vision))
    finally:
        handle.remove()
    names = (IMAGE, OTHER, MOVED, "an image late", "two images", "one image twice")
    assert found == {f"{what}, {name}" for what in ("learner = plain transformers", "sampler = learner")
                     for name in names}  # fmt: skip


def test_what_leaks_between_packed_samples_is_found_and_told_from_a_wrong_learner(seeing, vision):
    found = [row for row in rows(Faulty(seeing, leaks=1e-3), vision) if row.verdict == "bad"]
    learner = [row for row in found if row.probe.startswith("learner =")]
    assert len(learner) >= 2 and all("other samples in the row change it" in row.found for row in learner)
    assert not bad(rows(seeing, vision))


def test_the_probes_take_what_a_run_can(seeing, vision, bench):
    def names(most: int, images: int, setting: Any = vision) -> list[str]:
        return [each.name for each in fitting(setting.encoder, max_tokens=most, max_images=images)]

    assert names(256, 0) == ["no image", "a long text"] == names(256, 2, bench("qwen2"))
    assert names(35, 1) == ["no image", IMAGE, OTHER, MOVED]
    assert "two images" in names(256, 2) and "two images" not in names(256, 1)
    assert names(8, 2) == [] and rows(seeing, vision, data=SHORT) == []
    told = audit(seeing, vision.encoder, vision.config(sampler=HF, data=SHORT), print)
    assert told == "the audit: nothing is probed, as no probe fits " + LIMITS
    told = audit(seeing, vision.encoder, vision.config(sampler=HF, data={**SHORT, "max_prompt_tokens": 24}), print)
    assert "probes of numbers are well" in told and f"sight is not probed, as no image fits {LIMITS}" in told
    tokens = sum(each.sample.num_tokens for each in probing.probed(seeing, vision.encoder, vision.config()).samples)
    assert tokens < 640


def test_limits_of_pixels_that_allow_no_odd_size_leave_square_images(vision, tmp_path):
    encoder = Encoder(vision.folder, MediaStore(tmp_path, ImageGrid(28, 3136, 3136)))
    names = [each.name for each in fitting(encoder, max_tokens=256, max_images=2)]
    assert {IMAGE, OTHER, MOVED, "two images"} <= set(names)


def test_a_run_that_samples_nothing_has_the_learners_rows(start, vision):
    found = rows(start(), vision)
    assert not bad(found) and {row.probe.split(",")[0] for row in found} == {
        "learner = plain transformers", "sight", "sight of the learner", "tokens of prompts", "ends of turns",
    }  # fmt: skip


def test_numbers_that_are_not_finite_are_bad():
    assert ProbeRow.at_most("p", float("nan"), 1.0, "", "").verdict == "bad"
    assert ProbeRow.more_than("p", float("nan"), 1.0, "", "").verdict == "bad"
    assert ProbeRow.more_than("p", 0.0, 0.0, "", "").verdict == "bad"
    assert ProbeRow.at_most("p", 0.0, 0.0, "", "").ratio == 0


@pytest.mark.parametrize("on_mismatch", ["stop", "warn"])
def test_bad_rows_are_events_and_stop_as_the_config_says(on_mismatch, seeing, vision):
    config = vision.config(sampler=HF, trainer={"steps": 1, "on_mismatch": on_mismatch})
    events: list[dict[str, Any]] = []
    leaking: Any = Faulty(seeing, leaks=np.nan)
    if on_mismatch == "warn":
        assert "are bad" in audit(leaking, vision.encoder, config, lambda kind, **fields: events.append(fields))
    else:
        with pytest.raises(NumericsError, match=r"before the first step: .*and 1\d more") as raised:
            audit(leaking, vision.encoder, config, lambda kind, **fields: events.append(fields))
        assert "trainer.on_mismatch: warn" in str(raised.value)
    assert len(events) > 10 and all(each["verdict"] == "stop" for each in events)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", families())
def test_no_sound_family_has_a_bad_row(family, dtype, start, bench):
    setting = bench(family)
    engine = start(bench=setting, with_sampler=True, sampler=HF, model={"dtype": dtype})
    found = rows(engine, setting)
    assert not bad(found) and max(row.ratio for row in found) < 0.5


REWARD = "def even(rollouts):\n    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]\n"


@pytest.fixture
def trained(
    warm_mmrl: Callable[..., Any], picture: Callable[..., Any], tmp_path: Path
) -> Callable[..., tuple[Any, list[Any]]]:
    """Trains a step of a model on rows with an image; returns the process and the run's events."""

    def train(model: Path, **sections: Any) -> tuple[Any, list[Any]]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "image.png").write_bytes(picture(56, 56).data)
        row = {"problem": "<image>What is this?", "answer": "1", "images": ["image.png"]}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "problem": "<image>?"}))
        (tmp_path / "reward.py").write_text(REWARD)
        config = {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": {"name": "table", "path": "rows.jsonl"}, "max_prompt_tokens": 128},
            "rewards": [{"name": "reward.py:even"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"name": "hf", "group_size": 2, "max_new_tokens": 4},
            "learner": {"lr": 1e-3, "zero_stage": 0},
            "trainer": {"steps": 1, "prompts_per_step": 2, "run_dir": "run"},
            "trackers": [],
        }
        config = {key: {**value, **sections.get(key, {})} if isinstance(value, dict) else value
                  for key, value in (config | {k: {} for k in sections.keys() - config.keys()}).items()}  # fmt: skip
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        process = warm_mmrl("train", "config.yaml", folder=tmp_path)
        events = tmp_path / "run" / "events.jsonl"
        return process, [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []

    return train


def test_a_blind_folder_stops_before_anything_is_sampled_for_a_step(blind_folder, trained, tmp_path):
    process, events = trained(blind_folder)
    assert process.returncode == 6, process.stderr
    assert "the folder's weights are blind" in process.stderr and "rows without images" in process.stderr
    assert {each["probe"] for each in events if each["kind"] == "mismatch"} == {f"sight, {OTHER}", f"sight, {MOVED}"}
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not list((tmp_path / "run").glob("checkpoints/step*"))


@pytest.mark.full
def test_two_ranks_at_zero_3_pass_and_find_a_blind_folder(models, blind_folder, trained):
    ranks = {"cluster": {"name": "ray", "ranks": 2}, "learner": {"zero_stage": 3}}
    process, _ = trained(blind_folder, **ranks)
    assert process.returncode == 6, process.stderr
    process, events = trained(models("qwen2_5_vl"), **ranks)
    assert process.returncode == 0, process.stderr
    assert re.search(r"the audit: \d+ probes of numbers and sight are well", process.stdout)
    assert not [each for each in events if each["kind"] == "mismatch"]
