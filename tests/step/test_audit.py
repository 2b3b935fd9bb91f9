"""The audit of a run's start: sound engines pass, and each fault has the row that finds it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mmrl.data.images import ImageGrid, MediaStore
from mmrl.engine.aids.tiny_model import write_model
from mmrl.engine.network import layout, linear_attention
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.text.encoding import Encoder
from mmrl.engine_api import SamplingRequest
from mmrl.errors import DataError
from mmrl.step.audit import probed as probing
from mmrl.step.audit import start_audit
from mmrl.step.audit.agreement import agreement_rows
from mmrl.step.audit.probe_prompts import IMAGE, MOVED, OTHER, fitting
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import Probed
from mmrl.step.audit.sight import sight_rows
from mmrl.step.audit.start_audit import audit, cheap_rows
from mmrl.types import EncodedPrompt, FloatArray, ImageRef, RawImage, RolloutGroup, Sample
from tests.faults.runs import events, records
from tests.proofs import families

HF = {"name": "hf", "temperature": 1.0}


@dataclass
class Faulty:
    """An engine around a sound one.

    Attributes:
        shown: The prompt that the sampler is shown in place of one.
        has_room: False if the device has none for a wider type.
        samples: False for an engine of a run that samples nothing.
        log: Calls of the sampler.
    """

    engine: Any
    shown: Callable[[EncodedPrompt], EncodedPrompt] = lambda prompt: prompt
    has_room: bool = True
    samples: bool = True
    log: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def describe(self) -> Any:
        return {**self.engine.describe(), **({} if self.samples else {"sampler": None})}

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[Faulty]:
        with self.engine.sampling() as self.sampler:
            yield self

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        self.log.append("generate")
        shown = [replace(request, prompt=self.shown(request.prompt)) for request in requests]
        for index, group in self.sampler.generate(shown):
            prompt = requests[index].prompt
            yield index, RolloutGroup(prompt, tuple(replace(each, prompt=prompt) for each in group.rollouts))

    def forget_prompts(self) -> None:
        self.log.append("forget prompts")

    @contextmanager
    def learning(self) -> Iterator[Faulty]:
        with self.engine.learning() as learner:
            self.networks, self.policy = learner.networks, learner.network("policy")
            yield self

    def network(self, role: str) -> Faulty:
        return self

    def score(self, samples: Sequence[Sample], *, way: Any = "packed") -> list[FloatArray]:
        return self.policy.score(samples, way=way) if self.has_room or way != "wide" else []


@dataclass
class Told:
    """An engine whose learner has these log-probs, one by one."""

    logprobs: Sequence[FloatArray]

    @contextmanager
    def learning(self) -> Iterator[Told]:
        yield self

    def network(self, role: str) -> Told:
        return self

    def score(self, samples: Sequence[Sample], *, way: Any) -> Sequence[FloatArray]:
        assert way == "single"
        return self.logprobs


def rows(engine: Any, bench: Any, **sections: Any) -> list[ProbeRow]:
    return list(cheap_rows(engine, bench.encoder, bench.config(**{"sampler": HF, **sections})))


def rows_of(found: Probed) -> list[ProbeRow]:
    return [*agreement_rows(found), *sight_rows(found)]


def bad(found: Sequence[ProbeRow]) -> set[str]:
    return {row.probe for row in found if row.verdict == "bad"}


@pytest.fixture(scope="module")
def seeing(start: Callable[..., Any]) -> Any:
    return start(with_sampler=True, sampler=HF)


@pytest.fixture(scope="module")
def sound(seeing: Any, vision: Any) -> Probed:
    """Returns the answers of a sound engine to the probes."""
    found = probing.probed(seeing, vision.encoder, vision.config(sampler=HF))
    assert found is not None
    return found


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


def test_a_sound_engine_passes_and_sees(sound):
    found = rows_of(sound)
    assert not bad(found) and max(row.ratio for row in found) < 0.1
    by_name = {row.probe: row for row in found}
    assert by_name["sight, another image"].number > by_name["sight, the mark moved"].number > 1e-3
    assert by_name["sight of the sampler, the mark moved"].number < 1e-5
    assert {"learner = plain transformers, one image twice", "sampler = learner, an image late"} <= by_name.keys()
    assert sum(each.sample.num_tokens for each in sound.samples) < 640 and not sound.left_out


def test_a_device_without_room_for_a_wider_type_has_the_learner_one_by_one(seeing, vision):
    found = rows(Faulty(seeing, has_room=False), vision)
    assert not bad(found) and {row.probe for row in found} >= {"packed = one by one, no image", f"sight, {MOVED}"}


@pytest.mark.parametrize(
    ("dtype", "has_room"),
    [
        ("float32", True),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("float32", False), ("bfloat16", True), ("bfloat16", False))
        ),
    ],
)
def test_a_blind_folder_is_found_with_room_for_a_wider_type_and_without(dtype, has_room, blind_folder, start, vision):
    blind = replace(vision, folder=ModelFolder.open(str(blind_folder)))
    engine = Faulty(start(bench=blind, with_sampler=True, sampler=HF, model={"dtype": dtype}), has_room=has_room)
    assert bad(rows(engine, blind)) == {f"sight, {OTHER}", f"sight, {MOVED}"}


def test_a_sampler_that_is_shown_another_image_is_found(seeing, vision):
    prompts = {each.name: each.encoded for each in fitting(vision.encoder, max_tokens=256, max_images=2).prompts}
    swapped = {prompts[OTHER].images[0]: prompts[IMAGE].images, prompts[MOVED].images[0]: prompts[IMAGE].images}

    def shown(prompt: EncodedPrompt) -> EncodedPrompt:
        images = swapped.get(prompt.images[0], prompt.images) if len(prompt.images) == 1 else prompt.images
        return replace(prompt, images=images)

    engine = Faulty(seeing, shown)
    found = bad(rows(engine, vision))
    # Else a run's first prompts would find states of a common beginning in the caches, and be rounded otherwise.
    assert engine.log.count("forget prompts") == 1 and engine.log[-1] == "forget prompts"
    assert found == {f"{probe}, {name}" for probe in ("sampler = learner", "sight of the sampler")
                     for name in (OTHER, MOVED)}  # fmt: skip


def test_a_learner_with_one_position_for_all_patches_is_found(seeing, sound):
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
        packed = probing.score(seeing, [each.sample for each in sound.samples], "packed")
        found = bad(rows_of(replace(sound, packed=packed)))
    finally:
        handle.remove()
    names = (IMAGE, OTHER, MOVED, "an image late", "two images", "one image twice")
    assert found == {f"{what}, {name}" for what in ("learner = plain transformers", "sampler = learner")
                     for name in names}  # fmt: skip


def test_what_changes_packed_rows_alone_is_told_from_a_wrong_learner(sound):
    def off(by: float, engine: Any, why: str) -> int:
        """Rows of the learner where all but the first prompt's completions are off."""
        packed = [each + by * (i not in sound.of("no image")) for i, each in enumerate(sound.packed)]
        found = [row for row in rows_of(replace(sound, packed=packed, engine=engine)) if row.verdict == "bad"]
        learner = [row for row in found if row.probe.startswith("learner =")]
        assert all(why in row.found for row in learner)
        return len(learner)

    assert off(2e-5, sound.engine, "other samples in the row change it") == 7
    assert off(1e-3, Told([each + 1e-3 for each in sound.alone]), "it is not the packing")


def test_a_network_that_is_sure_of_one_prompt_and_noisy_on_others_is_sound(sound):
    sure = sound.of("no image")
    noisy = [each if i in sure else each + 3e-5 * (-1.0) ** np.arange(len(each)) for i, each in enumerate(sound.packed)]
    assert not bad(rows_of(replace(sound, alone=noisy, engine=Told(sound.packed))))


@pytest.mark.full
@pytest.mark.parametrize("what", ["state", "inputs"])
def test_a_linear_layer_of_which_something_leaks_from_prompt_to_prompt_is_found(what, start, bench, monkeypatch):
    setting = bench("qwen3_5")
    engine = start(bench=setting, with_sampler=True, sampler=HF)
    assert not bad(rows(engine, setting))
    rule, block, states = linear_attention.packed_delta_rule, linear_attention._block, list[torch.Tensor]()

    def of_a_row(*args: Any) -> torch.Tensor:
        states.clear()
        return rule(*args)

    def from_the_last_state(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *others, own, begin = args
        if begin is None and states:
            begin = states[-1][-1:].expand(own.shape[0], *states[-1].shape[1:])
        out, end = block(*others, own, begin)
        states.append(end)
        return out, end

    def before(span: Any, back: int) -> Any:
        return np.arange(span.start, span.start + span.length) - back

    if what == "state":
        monkeypatch.setattr(linear_attention, "_block", from_the_last_state)
        monkeypatch.setattr(linear_attention, "packed_delta_rule", of_a_row)
    else:
        monkeypatch.setattr(layout, "_before", before)
    found = [row for row in rows(engine, setting) if row.verdict == "bad"]
    assert len(found) >= 4 and all("other samples in the row change it" in row.found for row in found)


def test_prompts_that_a_run_cannot_take_are_told_with_the_reason(seeing, vision, bench):
    def fit(most: int, images: int, setting: Any = vision, **more: Any) -> tuple[list[str], dict[str, str]]:
        found = fitting(setting.encoder, max_tokens=most, max_images=images, **more)
        return [each.name for each in found.prompts], dict(found.left_out)

    assert fit(256, 0) == (["no image", "a long text"], {}) == fit(256, 0, bench("qwen2"))
    names, left_out = fit(35, 1)
    assert names == ["no image", IMAGE, OTHER, MOVED] and left_out.keys() == {"a long text", "an image late"}
    assert set(left_out.values()) == {"longer than data.max_prompt_tokens, which is 35"}
    assert "two images" in fit(256, 2)[0] and "two images" not in {*fit(256, 1)[0], *fit(256, 1)[1]}
    names, left_out = fit(256, 2, total_tokens=0)
    assert names == ["no image", IMAGE, OTHER, MOVED] and len(left_out) == 4 and "a start spends" in str(left_out)


def test_an_image_that_a_run_refuses_is_told(vision, monkeypatch):
    add = vision.media.add

    def refuse(raw: RawImage) -> ImageRef:
        if "45x122" in raw.label:
            raise DataError("the image is too narrow", where=raw.label)
        return add(raw)

    monkeypatch.setattr(vision.media, "add", refuse)
    monkeypatch.setattr(vision.media, "measure", refuse)
    found = fitting(vision.encoder, max_tokens=256, max_images=2)
    assert found.left_out == dict.fromkeys(["an image late", "two images"], "the image is too narrow")
    assert {"no image", IMAGE, "one image twice"} <= {each.name for each in found.prompts}


@pytest.mark.parametrize(("most", "is_probed"), [(35, True), (8, False)])
def test_a_run_says_what_it_was_not_probed_with(most, is_probed, seeing, vision):
    events: list[tuple[str, str]] = []
    config = vision.config(sampler=HF, data={"train": {"name": "table"}, "max_prompt_tokens": most})
    told = audit(seeing, vision.encoder, config, lambda kind, message, **_: events.append((kind, message)))
    why = f"(longer than data.max_prompt_tokens, which is {most})"
    if is_probed:
        assert "are well, " in told and not events
        assert f"; 4 prompts left out: a long text, an image late, two images, one image twice {why}; " in told
    else:
        ((kind, message),) = events
        assert told == "" and kind == "warning" and message.startswith("the run is not audited")
        assert "8 prompts left out: no image, one image" in message and message.endswith(why)


def test_limits_of_pixels_that_allow_no_odd_size_leave_square_images(vision, tmp_path):
    encoder = Encoder(vision.folder, MediaStore(tmp_path, ImageGrid(28, 3136, 3136)))
    found = fitting(encoder, max_tokens=256, max_images=2)
    assert {IMAGE, OTHER, MOVED, "two images"} <= {each.name for each in found.prompts} and not found.left_out


def test_a_run_that_samples_nothing_has_the_learners_rows(seeing, vision):
    found = rows(Faulty(seeing, samples=False), vision)
    assert not bad(found) and {row.probe.split(",")[0] for row in found} == {
        "learner = plain transformers", "sight", "sight of the learner", "tokens of prompts", "ends of turns",
    }  # fmt: skip


def test_numbers_that_are_not_finite_are_bad():
    assert ProbeRow.at_most("p", float("nan"), 1.0, "", "").verdict == "bad"
    assert ProbeRow.more_than("p", float("nan"), 1.0, "", "").verdict == "bad"
    assert ProbeRow.more_than("p", 0.0, 0.0, "", "").verdict == "bad"
    assert ProbeRow.at_most("p", 0.0, 0.0, "", "").ratio == 0


@pytest.mark.parametrize("on_mismatch", ["stop", "warn"])
def test_bad_rows_are_events_and_stop_as_the_config_says(on_mismatch, fake_runs, monkeypatch, capsys):
    wrong = [ProbeRow.at_most(f"probe {n}", 1.0, 0.5, f"{n} is off", "a fault") for n in range(6)]
    monkeypatch.setattr(start_audit, "cheap_rows", lambda *_: [*wrong, ProbeRow.at_most("right", 0.0, 1.0, "", "")])
    code = fake_runs.train(fake_runs.config(trainer={"steps": 1, "on_mismatch": on_mismatch}))
    run, printed = fake_runs.folder / "run", "".join(capsys.readouterr())
    found = events(run, "mismatch")
    assert [each["probe"] for each in found] == [row.probe for row in wrong]
    assert {each["verdict"] for each in found} == {on_mismatch}
    if on_mismatch == "warn":
        assert code == 0 and "the audit: 6 of 7 probes are bad" in printed
    else:
        assert code == 6 and not records(run / "metrics.jsonl") and not (run / "checkpoints").exists()
        assert "before the first step: probe 0: 0 is off" in printed and "and 2 more" in printed
        assert "trainer.on_mismatch: warn" in printed


@pytest.mark.full
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("family", families())
def test_no_sound_family_has_a_bad_row(family, dtype, start, bench):
    setting = bench(family)
    engine = start(bench=setting, with_sampler=True, sampler=HF, model={"dtype": dtype})
    found = rows(engine, setting)
    assert not bad(found) and max(row.ratio for row in found if row.verdict != "warn") < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "gain"), [(1, 1.0), (2, 4.0), (3, 4.0), (4, 8.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_of_a_sound_family_have_no_bad_row(family, dtype, seed, gain, start, bench, tmp_path):
    setting = replace(bench(family), folder=ModelFolder.open(str(write_model(tmp_path, family, seed=seed, gain=gain))))
    found = rows(start(bench=setting, with_sampler=True, sampler=HF, model={"dtype": dtype}), setting)
    assert not bad(found), [row for row in found if row.verdict == "bad"]


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


@pytest.mark.full
def test_a_blind_folder_stops_before_anything_is_sampled_for_a_step(blind_folder, trained, tmp_path):
    process, events = trained(blind_folder)
    assert process.returncode == 6, process.stderr
    assert "the folder's weights are blind" in process.stderr and "rows without images" in process.stderr
    assert {each["probe"] for each in events if each["kind"] == "mismatch"} == {f"sight, {OTHER}", f"sight, {MOVED}"}
    run = tmp_path / "run"
    assert not (run / "metrics.jsonl").exists() and not list(run.glob("checkpoints/step*"))
    assert len(list(run.glob("media/*"))) == 1  # that of the rows


@pytest.mark.full
def test_two_ranks_at_zero_3_pass_and_find_a_blind_folder(models, blind_folder, trained, tmp_path):
    ranks = {"cluster": {"name": "ray", "ranks": 2}, "learner": {"zero_stage": 3}}
    process, _ = trained(blind_folder, **ranks)
    assert process.returncode == 6, process.stderr
    process, events = trained(models("qwen2_5_vl"), **ranks)
    assert process.returncode == 0, process.stderr
    assert re.search(r"the audit: \d+ probes of numbers and sight are well", process.stdout)
    assert not [each for each in events if each["kind"] == "mismatch"]
    assert len(list((tmp_path / "run" / "media").iterdir())) == 1  # that of the rows
