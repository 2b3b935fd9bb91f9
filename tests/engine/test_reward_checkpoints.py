"""Reward models as files: checkpoints that go on to the bit, adapters with their head, exports, and wrong folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrl.commands.export.usage import usage
from mmrl.engine.aids.exporting import export_adapter, export_model
from mmrl.engine.footprint import PlannedModel
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.reward_model import RewardLoading, is_reward_model
from mmrl.engine.network.sizes import part_sizes, weight_bytes
from mmrl.engine.spec import EngineSpec
from mmrl.errors import ConfigError
from mmrl.ops.cost import Work, causal_pairs
from mmrl.ops.sequence import RowPart
from mmrl.rollout.batch import rollouts_of
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl_algorithms.dpo import DPO
from tests.engine.test_reward_updates import bradley_terry, groups_of, read

FULL = pytest.mark.full
LORA = {"lora": {"rank": 4, "alpha": 8, "targets": ["language"]}}
WAYS = {
    "full": {},
    "ZeRO 0": {"learner": {"zero_stage": 0}},
    "frozen tower": {"model": {"freeze": ["vision", "projector"]}},
    "lora": {"model": LORA},
    "lora, bf16, ZeRO 3": {"model": {**LORA, "dtype": "bfloat16"}, "learner": {"zero_stage": 3}},
    "bf16, ZeRO 2": {"model": {"dtype": "bfloat16"}, "learner": {"zero_stage": 2}},
    "again": {"model": {"gradient_checkpointing": True, "freeze": ["language"]}, "learner": {"zero_stage": 3}},
}
SHORT = ("full", "lora, bf16, ZeRO 3")


def ways(short: tuple[str, ...] = SHORT) -> list[Any]:
    return [pytest.param(name, marks=() if name in short else FULL) for name in WAYS]


@pytest.fixture
def step(start: Any, vision: Any) -> Any:
    """Starts a learner, has it take updates, and tells the losses and its scores."""

    def take(way: str, updates: slice, checkpoint: Path | None = None, save: Path | None = None) -> Any:
        sections = WAYS[way] | {"trainer": {"steps": 4, "seed": 5}}
        engine = start(algorithm=bradley_terry(), checkpoint=checkpoint, **sections)
        steps = groups_of(vision)
        with engine.learning() as learner:
            found = [finished(learn(groups, bradley_terry(), learner, LearnSettings())) for groups in steps[updates]]
            scores = learner.network("reward").final_values(rollouts_of(steps[0]))
            if save is not None:
                learner.save(save)
        statistics = [[each[0].final_value for each in group.updates] for result in found for group in result.groups]
        return [each.metrics for each in found], scores, statistics

    return take


@pytest.mark.parametrize("way", ways())
def test_a_resumed_learner_goes_on_to_the_bit(way, step, tmp_path):
    metrics, scores, statistics = step(way, slice(0, 4))
    _, _, first = step(way, slice(0, 2), save=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"reward"}
    others, again, second = step(way, slice(2, 4), checkpoint=tmp_path)
    for one, other in zip(metrics[2:], others, strict=True):
        assert {k: v for k, v in one.items() if "perf/" not in k} == {
            k: v for k, v in other.items() if "perf/" not in k
        }
    np.testing.assert_array_equal(scores, again)
    assert first + second == statistics and all(each is not None for group in statistics for each in group)
    assert not np.array_equal(scores, step(way, slice(0, 0))[1])


def test_scores_do_not_depend_on_the_rows_that_they_are_computed_in(start, vision):
    samples = rollouts_of([group for groups in groups_of(vision) for group in groups])
    found = []
    for tokens in (10, 4096):
        engine = start(algorithm=bradley_terry(), learner={"tokens_per_microbatch": tokens})
        with engine.learning() as learner:
            found.append(learner.network("reward").final_values(samples))
            np.testing.assert_array_equal(learner.network("reward").final_values(samples[:0]), [])
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.parametrize("way", ways(()))
def test_an_exported_model_has_the_scores_of_the_learner(way, step, vision, tmp_path, capsys):
    _, scores, _ = step(way, slice(0, 2), save=tmp_path)
    source, target = tmp_path / "reward/model", tmp_path / "exported"
    assert is_reward_model(source)
    target.mkdir()
    done = export_model(source, tmp_path / "reward/state", target, tmp_path / "media", dtype=None)
    model = read(target)
    assert done.samples == done.tokens == 4 and model.score.weight.shape == (
        1,
        model.config.get_text_config().hidden_size,
    )
    assert not [name for name in load_file(target / "model.safetensors") if "lm_head" in name]
    policy = load_policy(
        ModelFolder.open(str(target)),
        "cpu",
        done.dtype,
        freeze=(),
        temperature=1.0,
        loading=RewardLoading(begins=False),
    )
    torch.testing.assert_close(policy.score.data, model.score.weight.data.to(policy.score.dtype))
    engine_like = _scores(policy, vision)
    np.testing.assert_allclose(engine_like, scores, atol=1e-5 if "bf16" not in way else 0.02)
    if "lora" in way:
        merged = tmp_path / "adapter"
        merged.mkdir()
        export_adapter(source, merged, tmp_path / "media")
        config = json.loads((merged / "adapter_config.json").read_text())
        assert config["modules_to_save"] == ["score"] and config["task_type"] == "SEQ_CLS"
        assert "base_model.model.score.weight" in load_file(merged / "adapter_model.safetensors")
    if way == "lora":
        printed = [_shown_by_card(folder, tmp_path / "picture.png", capsys) for folder in (target, merged)]
        assert printed[0] == pytest.approx(printed[1], abs=1e-5) and abs(printed[0]) > 1e-3


def _shown_by_card(folder: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """The score that the lines of a folder's card print."""
    Image.new("RGB", (56, 56), (200, 30, 30)).save(picture)
    is_adapter = (folder / "adapter_config.json").exists()
    code = usage(str(folder), is_adapter=is_adapter, reads_images=True, scores=True)
    capsys.readouterr()
    exec(code.replace("picture.png", str(picture)), {})
    return float(capsys.readouterr().out)


@torch.no_grad()
def _scores(policy: Any, setting: Any) -> np.ndarray:
    from mmrl.engine.learner.collation import Collator
    from mmrl.engine.network.vision import ImageInputs

    images = ImageInputs(setting.folder, setting.media)
    collate = Collator(setting.folder, policy.model.base_model, images, "cpu", policy.model.dtype, keeps_last=True)
    return policy(collate(rollouts_of(groups_of(setting)[0]))).numpy()


@pytest.fixture(scope="module")
def written(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new reward model's folder; no test changes it."""
    folder = tmp_path_factory.mktemp("written")
    with start(algorithm=bradley_terry()).learning() as learner:
        learner.save(folder)
    return folder / "reward/model"


def changed(written: Path, folder: Path, change: Any = None, **config: Any) -> Path:
    """A copy with other weights or another config."""
    shutil.copytree(written, folder)
    if change is not None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | config))
    return folder


def without_a_norm(weights: dict[str, torch.Tensor]) -> None:
    del weights[next(name for name in weights if name.endswith("input_layernorm.weight"))]


@pytest.mark.parametrize(
    ("change", "config", "match"),
    [
        (lambda weights: weights.pop("score.weight"), {}, r"files lack its head: score.weight is \(1, 128\)"),
        (lambda weights: weights.update({"score.weight": torch.zeros(1, 64)}), {}, r"have a head of shape \[1, 64\]"),
        (lambda weights: weights.update({"score.weight": torch.zeros(2, 128)}), {}, r"have a head of shape \[2, 128\]"),
        (None, {"num_labels": 2}, "tells 2 labels apart"),
        (without_a_norm, {}, r"lack 1 of its weights: .*input_layernorm.weight"),
    ],
)
def test_a_folder_that_is_no_whole_reward_model_is_refused(change, config, match, written, start, vision, tmp_path):
    folder = changed(written, tmp_path / "wrong", change, **config)
    with pytest.raises(ConfigError, match=match) as caught:
        load_policy(
            ModelFolder.open(str(folder)), "cpu", "float32", freeze=(), temperature=1.0, loading=RewardLoading()
        )
    assert str(folder) in caught.value.where and caught.value.remedy


def test_a_policys_folder_is_no_reward_model_and_begins_one_with_its_own_body(vision, written, plain):
    frozen = EngineSpec(
        vision.config(), vision.folder, vision.media, bradley_terry(), 2, with_sampler=False, trains=False
    )
    assert frozen.trained_role == "reward"
    for whole in (True, False):  # the first rank of a run reads the weights, the others none
        with pytest.raises(ConfigError, match=r"a policy without a score head: .* 1 weight, score\.weight") as caught:
            load_policy(
                vision.folder,
                "cpu",
                "float32",
                freeze=(),
                temperature=1.0,
                with_weights=whole,
                loading=RewardLoading(begins=False),
            )
        assert "train a reward model from this folder" in caught.value.remedy
    body = plain(vision.folder.path).model.model.state_dict()
    made = read(written)
    assert all(torch.equal(value, body[name]) for name, value in made.model.state_dict().items())
    again = load_policy(
        ModelFolder.open(str(written)), "cpu", "float32", freeze=(), temperature=1.0, loading=RewardLoading(seed=9)
    )
    torch.testing.assert_close(again.score.data, made.score.weight.data, rtol=0, atol=0)


def test_a_learner_without_updates_has_the_scores_of_a_reward_models_folder(written, start, vision):
    from mmrl.cluster.local import start_engine

    folder = ModelFolder.open(str(written))
    samples = rollouts_of(groups_of(vision)[0])
    with start(algorithm=bradley_terry()).learning() as learner:
        expected = learner.network("reward").final_values(samples)
    config = vision.config(model={"path": str(written)})
    spec = EngineSpec(config, folder, vision.media, bradley_terry(), 2, with_sampler=False, trains=False)
    with start_engine(spec).learning() as learner:
        np.testing.assert_allclose(learner.network("reward").final_values(samples), expected, atol=1e-6)
        with pytest.raises(ConfigError, match="no network of this run has the role 'policy'"):
            learner.network("policy")


def test_a_new_score_is_trained_whatever_is_frozen(vision):
    """From the first step on, at a size at which the body learns with it; the same seed draws the same."""
    freeze = ("vision", "projector", "language")
    options: dict[str, Any] = {"freeze": freeze, "temperature": 1.0}
    one, same, other = (
        load_policy(vision.folder, "cpu", "float32", **options, loading=RewardLoading(seed)) for seed in (1, 1, 2)
    )
    assert [name for name, p in one.model.named_parameters() if p.requires_grad] == ["score.weight"]
    assert torch.equal(one.score, same.score) and not torch.equal(one.score, other.score)
    assert float(one.score.std() * one.score.shape[1] ** 0.5) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2", "llama"])
def test_a_plan_counts_a_score_in_place_of_the_head(family, bench):
    folder = bench(family).folder
    policy = load_policy(folder, "cpu", "float32", freeze=(), temperature=1.0, loading=RewardLoading())
    sizes = part_sizes(folder, ("language",), scores=True)
    assert sum(a + b for a, b in sizes.values()) == sum(p.numel() for p in policy.model.parameters())
    assert sizes["language"][0] == policy.score.numel()
    assert sum(weight_bytes(folder, 4, quantize=False, scores=True)) == 4 * sum(a + b for a, b in sizes.values())
    model = PlannedModel(bench(family).config(), folder, sizes, bradley_terry(), "cuda")
    row = RowPart.of(Work(tokens=100, pairs=causal_pairs(100), predicted=50), 1)
    plain = PlannedModel(bench(family).config(), folder, part_sizes(folder), DPO(DPO.Config()), "cuda")
    assert model.activations(row, checkpointing=False) < plain.activations(row, checkpointing=False)
