"""Checkpoints of a policy and a critic: they go on to the bit, on other ranks too, and refuse what is another's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmrl.engine.spec import EngineSpec
from mmrl.errors import ConfigError
from mmrl_algorithms.grpo import GRPO
from tests.engine.critic_runs import ROLES, run, sections_of, take, ways
from tests.engine.critics import OPTIONS, valued

FULL = pytest.mark.full


@pytest.mark.parametrize("way", ways())
def test_a_resumed_learner_goes_on_to_the_bit(way, start, vision, tmp_path):
    whole = take(start, vision, way, "cpcp")
    take(start, vision, way, "cp", save=tmp_path)
    again = take(start, vision, way, "cp", checkpoint=tmp_path, first=1)
    for role in ROLES.values():
        again.equals(whole, role, first=1)
    np.testing.assert_array_equal(again.values, whole.values)
    if "lora" in way:
        config = json.loads((tmp_path / "critic/model/adapter_config.json").read_text())
        assert config["modules_to_save"] == ["score"] and config["task_type"] == "SEQ_CLS"
        saved = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("model", "critic/model")]
        assert saved[1].keys() - saved[0].keys() == {"base_model.model.score.weight"}
        name = next(name for name in saved[0] if name.endswith("lora_B.weight"))
        assert not torch.equal(saved[0][name], saved[1][name]), "the adapters are their own"


@pytest.mark.full
@pytest.mark.parametrize("way", ["full", "lora"])
def test_one_rank_goes_on_as_two(way, start, start_ranks, vision, tmp_path):
    """At another ZeRO stage, at which a critic with adapters has a copy of its base; and as one again."""
    whole = take(start, vision, way, "cpcpcp")
    take(start, vision, way, "cp", save=tmp_path / "one")
    sections = sections_of(way, learner={"zero_stage": 3})
    config = vision.config(**sections, algorithm=OPTIONS, cluster={"name": "ray", "ranks": 2})
    checkpoint = tmp_path / "one"
    spec = EngineSpec(config, vision.folder, vision.media, valued(), 2, with_sampler=False, checkpoint=checkpoint)
    engine = start_ranks(spec)
    try:
        middle = run(engine, vision, "cp", first=1, save=tmp_path / "two")
    finally:
        engine.close()
    last = take(start, vision, way, "cp", checkpoint=tmp_path / "two", first=2)
    for role in ROLES.values():
        for found, place in ((middle, 1), (last, 2)):
            for name, value in found.metrics[role][0].items():
                assert value == pytest.approx(whole.metrics[role][place][name], rel=1e-4, abs=1e-5), name
    np.testing.assert_allclose(last.values, whole.values, atol=1e-3)


def test_a_checkpoint_without_a_critic_is_refused_by_name(start, vision, tmp_path):
    with start(algorithm=GRPO(GRPO.Config())).learning() as learner:
        learner.save(tmp_path)
    with pytest.raises(ConfigError, match="the checkpoint has no critic") as caught:
        start(algorithm=valued(), checkpoint=tmp_path, critic={})
    assert "critic/model" in caught.value.where


def test_a_critic_begins_by_predicting_nothing_or_as_its_seed_draws_it(start, vision):
    zero, drawn, same, other = (
        take(start, vision, "full", "", critic={"head": head}, trainer={"seed": seed})
        for head, seed in (("zero", 1), ("normal", 1), ("normal", 1), ("normal", 2))
    )
    assert not zero.values.any() and 0.1 < np.sqrt(np.square(drawn.values).mean()) < 3
    np.testing.assert_array_equal(drawn.values, same.values)
    assert not np.array_equal(drawn.values, other.values)
