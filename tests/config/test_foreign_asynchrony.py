"""Asynchronous time in configs of other trainers: translated or refused, and in no case dropped."""

from pathlib import Path
from typing import Any

import pytest

from mmrl.commands.cli import main
from mmrl.config.synonyms import synonym
from mmrl.config.translation import Translation, translate
from mmrl.errors import ConfigError


def of(key: str, value: Any) -> Translation:
    theirs: Any = value
    for part in reversed(key.split(".")):
        theirs = {part: theirs}
    return translate(theirs, dataset="files", algorithms=(), trackers={}, near=Path())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.fully_async.max_staleness_steps", 2),  # SkyRL
        ("max_async_level", 1),  # prime-rl
        ("rollout.max_head_offpolicyness", 4),  # AReaL
        ("grpo.async_grpo.max_trajectory_age_steps", 1),  # NeMo-RL
        ("async_generation_ratio", 1.0),  # ROLL
    ],
)
def test_a_lag_in_steps_is_trainer_staleness(key: str, value: float) -> None:
    found = of(key, value)
    assert found.values == {"trainer": {"staleness": int(value)}}
    assert found.left_out == []


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("async_training.staleness_threshold", 0.5, "trainer.staleness"),  # verl: a share of the samples
        ("async_training.trigger_parameter_sync_step", 4, "trainer.staleness"),
        ("async_training.partial_rollout", True, "sampler.partial"),
        ("actor_rollout_ref.hybrid_engine", False, "cluster.sampler_ranks and cluster.learner_ranks"),
        ("async_train", True, "trainer.staleness"),  # OpenRLHF: a flag
        ("async_queue_size", 2, "trainer.staleness"),
        ("partial_rollout", True, "sampler.partial"),
        ("over_sampling_batch_size", 256, "sampler.partial.in_flight"),  # slime: prompts, not a multiple
        ("max_async_level", 8, "trainer.staleness"),
        ("max_staleness", 2.5, "trainer.staleness"),
        ("grpo.async_grpo.enabled", True, "trainer.staleness"),
        ("grpo.async_grpo.in_flight_weight_updates", True, "sampler.partial"),
        ("policy.generation.colocated.enabled", False, "cluster.sampler_ranks and cluster.learner_ranks"),
        ("max_inflight_tasks", 64, "sampler.partial.in_flight"),  # TRL
    ],
)
def test_what_has_no_equal_is_refused_by_name(key: str, value: object, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(key, value)
    assert f"{key}: {value} ({ours})" in str(caught.value)
    assert "trainer.staleness: 0 to 4" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("async_training.partial_rollout", False),
        ("async_training.staleness_threshold", 0),
        ("max_staleness", 0),
        ("async_training.trigger_parameter_sync_step", 1),
        ("async_train", False),
        ("actor_rollout_ref.hybrid_engine", True),
        ("colocate_all_models", True),
    ],
)
def test_synchronous_values_are_mmrls_own_and_refuse_nothing(key: str, value: object) -> None:
    assert of(key, value).values == {}


def test_two_lags_that_differ_are_refused_and_equal_ones_are_one() -> None:
    theirs = {"max_staleness": 1, "max_async_level": 2}
    with pytest.raises(ConfigError, match=r"max_staleness: 1 .*; max_async_level: 2"):
        translate(theirs, dataset="files", algorithms=(), trackers={}, near=Path())
    theirs["max_async_level"] = 1
    found = translate(theirs, dataset="files", algorithms=(), trackers={}, near=Path())
    assert found.values == {"trainer": {"staleness": 1}}


def test_no_config_is_written_from_one_that_asks_for_what_there_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, out = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    theirs.write_text("async_training: {staleness_threshold: 0.1, partial_rollout: true}\n")
    assert main(["init", "config", str(out), "--from", str(theirs)]) == 2
    told = capsys.readouterr().err
    assert "async_training.staleness_threshold: 0.1" in told and "async_training.partial_rollout: True" in told
    assert not out.exists()


def test_keys_of_rank_placement_lead_to_both_sides() -> None:
    for word in ("rollout_num_gpus", "actor_rollout_ref.rollout.n_gpus_per_node", "num_infer_gpus", "vllm_mode"):
        found = synonym(word)
        assert found is not None and found.key == "cluster.sampler_ranks", word
    found = synonym("trainer.n_gpus_per_node")
    assert found is not None and found.key == "cluster.ranks"
