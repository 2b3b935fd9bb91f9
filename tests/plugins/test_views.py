"""The algorithms with views: their formulas by hand, the noise over a run's steps, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.config.load import from_mapping
from mmrl.config.plugin_specs import PluginSpec
from mmrl.errors import ConfigError, PluginError
from mmrl.plugin_host import registry
from mmrl.rollout.records import read_rollouts
from mmrl.runs.setup import RunSetup
from mmrl.testing import check_algorithm, replay
from mmrl_algorithms.noisy_rollout import NoisyRollout
from mmrl_algorithms.papo import PAPO

NAMES = {"papo": "import:mmrl_algorithms.papo:PAPO", "noisy": "import:mmrl_algorithms.noisy_rollout:NoisyRollout"}
RNG = np.random.default_rng(0)
OLD = -RNG.random((4, 5)) - 0.1
BATCH: dict[str, Any] = {
    "group_ids": [0, 0, 1, 1],
    "rewards": [1.0, 0.0, 0.0, 1.0],
    "response_mask": np.arange(5) < np.array([[5], [3], [4], [2]]),
    "old_log_probs": OLD,
    "log_probs": OLD + RNG.normal(0, 0.3, OLD.shape),
    "rollout_log_probs": OLD + RNG.normal(0, 0.3, OLD.shape),
    "entropy": RNG.random(OLD.shape),
    "has_images": [True, True, False, False],
}
SEEN = {"log_probs": OLD - 0.5 + RNG.normal(0, 0.3, OLD.shape), "entropy": RNG.random(OLD.shape)}


def create(name: str, **options: Any) -> Any:
    return registry.create("algorithm", PluginSpec.model_validate({"name": NAMES[name], **options}))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (PAPO, {}),
        (PAPO, {"variant": "dapo", "entropy": "full", "entropy_coef": 0.01}),
        (PAPO, {"view_gradient": False, "perception_clip": None, "kl": {"coef": 0.1}}),
        (NoisyRollout, {"decay": "linear"}),
        (NoisyRollout, {"correction": {"mode": "token-truncate"}, "kl": {"coef": 0.1}}),
    ],
)
def test_every_rule_of_algorithms_is_kept(cls, options):
    check_algorithm(cls, options=options)


@pytest.mark.parametrize("entropy", ["sampled", "full"])
def test_papo_adds_its_three_terms_to_grpo(entropy):
    """Loss and gradients by hand, against those of the two policies' log-probs."""
    options = {"perception_coef": 0.7, "entropy_own_coef": 0.3, "entropy_masked_coef": 0.2, "entropy": entropy}
    found = replay(create("papo", **options), {**BATCH, "views": {"masked": SEEN}})
    grpo = replay("grpo", BATCH)
    mask, seen = BATCH["response_mask"], np.array(BATCH["has_images"])[:, None] & BATCH["response_mask"]
    weight = 1 / (4 * mask.sum(1, keepdims=True))
    gap = SEEN["log_probs"] - BATCH["log_probs"]
    kl = np.exp(gap) - 1 - gap
    if entropy == "sampled":
        own, masked = -BATCH["log_probs"], -SEEN["log_probs"]
    else:
        own, masked = BATCH["entropy"], SEEN["entropy"]
    terms = weight * (0.3 * own * mask - 0.7 * kl * seen + 0.2 * masked * seen)
    assert found.loss == pytest.approx(grpo.loss + terms.sum(), rel=1e-12)
    is_sampled = entropy == "sampled"
    by_own = weight * (0.7 * (np.exp(gap) - 1) * seen - 0.3 * is_sampled * mask)
    np.testing.assert_allclose(found.grad_log_probs, grpo.grad_log_probs + by_own, atol=1e-12)
    by_seen = weight * (-0.7 * (np.exp(gap) - 1) - 0.2 * is_sampled) * seen
    np.testing.assert_allclose(found.grad_views["masked"]["log_probs"], by_seen, atol=1e-12)
    np.testing.assert_allclose(found.grad_entropy, (not is_sampled) * 0.3 * weight * mask, atol=1e-12)
    np.testing.assert_allclose(
        found.grad_views["masked"]["entropy"], (not is_sampled) * 0.2 * weight * seen, atol=1e-12
    )
    assert found.metrics["perception/kl"] == pytest.approx((kl * seen).sum() / mask.sum())


def test_papo_takes_the_masked_policy_as_given_where_it_is_told_to():
    batch = {**BATCH, "views": {"masked": SEEN}}
    both, given = (replay(create("papo", view_gradient=value), batch) for value in (True, False))
    assert both.loss == given.loss and not given.grad_views["masked"]["log_probs"].any()
    np.testing.assert_array_equal(both.grad_log_probs, given.grad_log_probs)


def test_papos_perception_has_a_bound_beyond_which_it_has_no_gradient():
    far = {**SEEN, "log_probs": BATCH["log_probs"] - 30.0}
    bounded, free = (
        replay(create("papo", perception_clip=clip, perception_coef=1.0), {**BATCH, "views": {"masked": far}})
        for clip in (10.0, None)
    )
    seen = np.array(BATCH["has_images"])[:, None] & BATCH["response_mask"]
    count = BATCH["response_mask"].sum()
    assert bounded.metrics["perception/kl"] == pytest.approx(10 * seen.sum() / count)
    assert free.metrics["perception/kl"] == pytest.approx((30 - 1) * seen.sum() / count)
    weight = 1 / (4 * BATCH["response_mask"].sum(1, keepdims=True))
    np.testing.assert_allclose(bounded.grad_views["masked"]["log_probs"], -0.03 * weight * seen)


def test_papo_has_daposs_defaults_and_what_is_given_stays():
    config = create("papo", variant="dapo", clip_high=0.3).config
    assert (config.clip_high, config.aggregation) == (0.3, "token-mean") and config.dynamic_sampling is not None
    plain = create("papo").config
    assert (plain.clip_high, plain.aggregation, plain.dynamic_sampling) == (0.2, "seq-mean-token-mean", None)
    batch = {**BATCH, "views": {"masked": SEEN}}
    off = {"perception_coef": 0.0, "entropy_own_coef": 0.0, "entropy_masked_coef": 0.0}
    found, dapo = replay(create("papo", variant="dapo", **off), batch), replay("dapo", BATCH)
    assert found.loss == dapo.loss
    np.testing.assert_array_equal(found.grad_log_probs, dapo.grad_log_probs)


def test_the_noise_follows_a_sigmoid_of_the_step():
    """At its middle it is half of what it was; by the formula of the paper before and after."""
    strength = create("noisy", noise_step=500, decay_coef=30).strength
    for step in (1, 20, 40, 41, 60):
        assert strength(step, 60) == pytest.approx(500 * (1 - 1 / (1 + np.exp(-30 * (step - 40) / 60))), abs=1e-9)
    assert strength(40, 60) == 250 and strength(1, 60) > 499.9 and strength(60, 60) < 0.03
    values = [strength(step, 60) for step in range(1, 61)]
    assert values == sorted(values, reverse=True)
    assert create("noisy", decay_mid_step=10).strength(10, 60) == 250
    assert create("noisy", decay="none").strength(60, 60) == 500
    linear = create("noisy", decay="linear").strength
    assert [linear(step, 4) for step in (1, 2, 4)] == [375, 250, 0]
    assert create("noisy", decay_coef=1e6).strength(60, 60) == pytest.approx(0) and strength(1, 1) < 1


def test_noisy_rollout_is_grpo_over_both_halves_and_corrects_only_what_the_sampler_saw():
    sampled_from = ["", "noised", "noised", ""]
    batch = {**BATCH, "sampled_from": sampled_from, "has_images": [True] * 4}
    np.testing.assert_array_equal(replay(create("noisy"), batch).grad_log_probs, replay("grpo", BATCH).grad_log_probs)
    correction = {"mode": "token-truncate"}
    found = replay(create("noisy", correction=correction), batch).grad_log_probs
    plain, corrected = (replay("grpo", BATCH, options=o).grad_log_probs for o in ({}, {"correction": correction}))
    clean = np.array([not name for name in sampled_from])
    np.testing.assert_array_equal(found[~clean], plain[~clean])
    np.testing.assert_array_equal(found[clean], corrected[clean])
    assert (corrected[~clean] != plain[~clean]).any()


def config_of(tmp_path: Path, model: Path, name: str, **sections: Any) -> dict[str, Any]:
    """A run of four rows: one without images, three with one or two."""
    rows = []
    for n in range(4):
        pixels = np.random.default_rng(n).integers(0, 256, (60, 84, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
        images = [f"{(n + i) % 4}.png" for i in range(n if n < 3 else 1)]
        rows.append({"id": f"r{n}", "prompt": "<image>" * len(images) + f"{n}+1?", "images": images, "answer": str(n)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scores.py").write_text(
        "def even(rollouts):\n    return [float(r.token_ids[0] % 2) for r in rollouts]\n"
    )
    base: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}, "max_prompt_tokens": 160},
        "rewards": [{"name": f"{tmp_path / 'scores.py'}:even"}],
        "algorithm": {"name": NAMES.get(name, name)},
        "sampler": {"name": "hf", "group_size": 4, "max_new_tokens": 6},
        "learner": {"lr": 1e-3, "zero_stage": 0, "minibatches": 2},
        "trainer": {"steps": 4, "prompts_per_step": 3, "save_every": 1, "run_dir": str(tmp_path / "run")},
    }
    for key, value in sections.items():
        base[key] = {**base.get(key, {}), **value}
    return base


VIEWS = """
from mmrl.interfaces import Needs, View
from mmrl_algorithms.grpo import GRPO


class Views(GRPO):
    what = {}

    def needs(self):
        return Needs(views=(View("other", type(self).change, **self.what),))

    def change(image, rng, strength):
        return image[:28, :28].copy()


class Crops(Views):
    what = {"scored": True}


class CropsToSample(Views):
    what = {"sampled": 0.5}


class Writes(Views):
    what = {"scored": True}

    def change(image, rng, strength):
        image[:] = 0
        return image


class Forgets(Views):
    what = {"scored": True}

    def change(image, rng, strength):
        return None


class Draws(Views):
    what = {"scored": True}

    def change(image, rng, strength):
        import numpy as np

        return np.random.default_rng().integers(0, 256, image.shape, np.uint8)
"""
REFUSED = [
    ("Crops", r"views\['other'\] made an image of 28 x 28 pixels from one of 84 x 56, which has other image tokens"),
    ("Writes", "wrote into the image that it was given"),
    ("Forgets", "answered NoneType"),
    ("Draws", "answered the same seed in two ways"),
]


@pytest.mark.parametrize(("name", "told"), REFUSED)
def test_a_view_that_breaks_a_rule_is_refused_before_an_engine_starts(name, told, tmp_path, models):
    (tmp_path / "views.py").write_text(VIEWS)
    spec = f"{tmp_path / 'views.py'}:{name}"
    with pytest.raises(PluginError, match=told) as caught:
        _ = RunSetup(from_mapping(config_of(tmp_path, models("qwen2_5_vl"), spec)), tmp_path / "media").algorithm
    assert caught.value.remedy
    with pytest.raises(PluginError, match=told):
        check_algorithm(registry.create("algorithm", PluginSpec.model_validate({"name": spec})))


def test_a_view_to_sample_from_may_crop(tmp_path, models):
    (tmp_path / "views.py").write_text(VIEWS)
    config = config_of(tmp_path, models("qwen2_5_vl"), f"{tmp_path / 'views.py'}:CropsToSample")
    assert RunSetup(from_mapping(config), tmp_path / "media").algorithm.needs().views


@pytest.mark.parametrize(
    ("name", "sections", "told"),
    [
        ("noisy", {"sampler": {"group_size": 2}, "algorithm": {"noisy_share": 0.1}}, "none would be sampled from view"),
        ("noisy", {"sampler": {"group_size": 4}, "algorithm": {"noisy_share": 0.95}}, "from its own images"),
        ("noisy", {"environment": {"name": "frozen_lake"}}, "episodes are played on the prompt's own images"),
    ],
)
def test_a_run_that_cannot_have_the_views_is_refused_with_what_to_set(name, sections, told, tmp_path, models):
    algorithm = {"algorithm": {"name": NAMES[name], **sections.pop("algorithm", {})}}
    config = from_mapping(config_of(tmp_path, models("qwen2_5_vl"), name, **sections, **algorithm))
    with pytest.raises(ConfigError, match=told) as caught:
        _ = RunSetup(config, tmp_path / "media").algorithm
    assert caught.value.where and caught.value.remedy


def test_a_model_that_reads_text_only_has_no_views(tmp_path, models):
    setup = RunSetup(from_mapping(config_of(tmp_path, models("qwen2"), "papo")), tmp_path / "media")
    with pytest.raises(ConfigError, match="needs views of images, and the model reads text only") as caught:
        _ = setup.prompts
    assert "vision-language model" in caught.value.remedy


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_goes_on_has_the_same_bits_and_its_record_is_replayed(name, tmp_path, models, warm_mmrl):
    config = config_of(tmp_path, models("qwen2_5_vl"), name)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config))
    assert (done := warm_mmrl("train", file)).returncode == 0, done.stderr
    whole, again = tmp_path / "run", tmp_path / "again"
    shutil.copytree(whole, again)
    for step in (3, 4):
        shutil.rmtree(again / f"checkpoints/step-{step:06d}")
    done = warm_mmrl("train", file, f"trainer.run_dir={again}")
    assert done.returncode == 0, done.stderr
    weights = [(run / "checkpoints/step-000004/model/model.safetensors").read_bytes() for run in (whole, again)]
    assert weights[0] == weights[1]
    records = [(run / "rollouts/step-000004.parquet").read_bytes() for run in (whole, again)]
    assert records[0] == records[1]
    replayed = warm_mmrl("replay", again)
    assert replayed.returncode == 0 and "loss" in replayed.stdout, replayed.stdout
    rollouts = [each.rollout for each in read_rollouts(whole)]
    view = {"papo": "masked", "noisy": "noised"}[name]
    for rollout in rollouts:
        assert set(rollout.prompt.views) == ({view} if rollout.images else set())
        for ref in [each for seen in rollout.prompt.views.values() for each in seen.images]:
            assert Path(ref.path).exists() and ref.hash not in {own.hash for own in rollout.images}
        if name == "noisy":
            assert rollout.view == ("noised" if rollout.images and rollout.index >= 2 else "")
    steps = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    values = [step for step in steps if "mismatch/logprob_abs_max" in step]
    assert len(values) == 4 and all(step["mismatch/logprob_abs_max"] < 1e-4 for step in values)
    if name == "papo":
        assert all(step["perception/kl"] > 0 and np.isfinite(step["loss/perception"]) for step in values)
    else:
        strengths = [step["views/noised_strength"] for step in values]
        assert strengths == sorted(strengths, reverse=True) and strengths[0] > strengths[-1]
