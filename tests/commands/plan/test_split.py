"""``mmrl plan`` of ranks of which some sample and the others learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from mmrl.commands.plan.calibration import Measured, Seconds, estimate
from mmrl.commands.plan.split import Division, divided, waiting
from mmrl.commands.plan.workload import Workload
from mmrl.config.cluster import ClusterConfig
from mmrl.config.load import from_mapping
from mmrl.errors import ConfigError
from mmrl.ops.cost import Work
from mmrl.ops.sequence import RowPart

Plan = Callable[..., tuple[int, dict[str, Any], str]]
GB = 10**9


def split(sampler: int, learner: int, lag: int = 1, together: int = 1) -> Any:
    return from_mapping(
        {
            "model": {"path": "m"},
            "data": {"train": {"name": "x"}},
            "algorithm": {"name": "a"},
            "rewards": [{"name": "r"}],
            "sampler": {"tensor_parallel_size": together},
            "cluster": {"name": "ray", "sampler_ranks": sampler, "learner_ranks": learner},
            "trainer": {"staleness": lag},
        }
    )


def test_each_side_is_planned_without_the_other(plan: Plan, models: Callable[[str], Path]) -> None:
    """In turns vLLM's share is beside the learner's states; apart it is not, and no vLLM sleeps beside the learner."""
    cluster = {"name": "ray", "sampler_ranks": 2, "learner_ranks": 1}
    _, turns, _ = plan("--memory", "8", "--gpus", "1")
    code, apart, err = plan("--memory", "8", cluster=cluster, trainer={"staleness": 2})
    assert code == 0, err
    assert "sample" in turns["memory"]["phases"] and "sample" not in apart["memory"]["phases"]
    assert apart["memory"]["phases"]["update"]["runtime"] < turns["memory"]["phases"]["update"]["runtime"]
    alone = apart["sampling"]
    assert alone["share"] == 4 * GB
    assert alone["cache"] == apart["sampler"]["cache"] and alone["sequences"] >= 1
    with safe_open(models("qwen2_5_vl") / "model.safetensors", "np") as file:
        numbers = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    assert apart["host"]["snapshots"] == 3 * 2 * numbers, "versions of the newest step and of two before, in bfloat16"
    assert "snapshots" not in turns.get("host", {})


def test_a_gpu_that_no_learner_needs_may_be_the_samplers(
    config: Callable[..., Path], models: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from mmrl.commands.cli import main

    path = config(models("qwen2"), cluster={"name": "ray", "sampler_ranks": 1, "learner_ranks": 1})
    assert main(["plan", str(path), "--memory", "16"]) == 0
    said = capsys.readouterr().out
    assert "no learner is there: sampler.gpu_memory_utilization may be 0.9" in said
    assert "keeps 1 version of the weights for those that sample" in said
    assert main(["plan", str(path), "--memory", "16", "sampler.gpu_memory_utilization=0.01"]) == 5
    assert "set sampler.gpu_memory_utilization=0." in capsys.readouterr().err
    assert main(["plan", str(path), "--memory", "1.5"]) == 5
    said = capsys.readouterr().err
    assert "a rank that samples needs" in said and "raise sampler.tensor_parallel_size" in said
    assert "raise cluster.learner_ranks" in said, "both sides are told"


@pytest.mark.parametrize(
    ("sides", "gpus", "together", "expected"),
    [
        ((3, 1), 8, 1, (6, 2)),
        ((1, 1), 3, 1, (2, 1)),
        ((4, 4), 8, 4, (4, 4)),
        ((6, 2), 12, 2, (8, 4)),
        ((1, 7), 8, 2, (2, 6)),
    ],
)  # fmt: skip
def test_other_numbers_of_gpus_are_divided_as_the_config_is(
    sides: tuple[int, int], gpus: int, together: int, expected: tuple[int, int]
) -> None:
    cluster = ClusterConfig(name="ray", sampler_ranks=sides[0], learner_ranks=sides[1])
    found = divided(cluster, gpus, together)
    assert (found["sampler_ranks"], found["learner_ranks"]) == expected


def test_too_few_gpus_for_two_sides_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 GPUs cannot be divided: 2 of them sample together"):
        divided(ClusterConfig(name="ray", sampler_ranks=2, learner_ranks=2), 2, 2)


def test_a_step_lasts_as_long_as_its_slower_side_and_the_other_one_waits() -> None:
    """Sampling takes 30 s of one rank, learning 10 s of one: of four ranks three should sample."""
    config = split(2, 2)
    measured = Seconds(sync=0.0, generate=15.0, logprob=1.0, update=4.0)
    data, lines = waiting(measured, config)
    assert (data["gather_s"], data["learn_s"], data["step_s"]) == (15.0, 5.0, 15.0)
    assert (data["idle_sampler"], data["idle_learner"]) == pytest.approx((0.0, 2 / 3))
    assert data["best"] == {"sampler_ranks": 3, "learner_ranks": 1, "gather_s": 10.0, "learn_s": 10.0, "step_s": 10.0}
    assert data["in_turns_s"] == 7.5 + 2.5
    assert lines[1] == "cluster.sampler_ranks=3 cluster.learner_ranks=1: about 10 s"
    data, lines = waiting(Seconds(0.0, 10.0, 0.0, 10.0), split(3, 1))
    assert data["step_s"] == 10.0 and len(lines) == 2, "there is nothing better"
    assert Division.of(measured, split(2, 2, lag=0), 2, 2).step_s == 20.0, "without a lag the sides work in turns"
    pairs = [each["sampler_ranks"] for each in [waiting(measured, split(4, 4, together=4))[0]["best"]]]
    assert pairs == [4], "four ranks share a copy"


def test_measured_seconds_are_those_of_each_sides_ranks() -> None:
    found = Measured(8, 10.0, 0.5, 6.0, 2.0, 1.0, 0.0, 1.0)
    work = Workload([[RowPart.of(Work(), 1)]], 1)
    seconds = estimate(split(4, 2), (), work, found)
    per_step = split(4, 2).trainer.prompts_per_step / 8
    assert seconds.generate == 6.0 * per_step / 4 and seconds.logprob == 2.0 * per_step / 2


@pytest.mark.full
def test_a_measured_plan_says_which_side_waits(
    config: Callable[..., Path], models: Callable[[str], Path], mmrl: Callable[..., Any]
) -> None:
    cluster = {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}
    sampler = {"name": "hf", "group_size": 4, "max_new_tokens": 10}
    process = mmrl("plan", config(models("qwen2"), sampler=sampler, cluster=cluster, trainer={"staleness": 1}),
                   "--measure", "--json")  # fmt: skip
    assert process.returncode == 0, process.stderr
    time = json.loads(process.stdout)["time"]
    own = time["split"]
    assert time["step_s"] == own["step_s"] == max(own["gather_s"], own["learn_s"])
    assert own["gather_s"] == pytest.approx(time["sync_s"] + time["generate_s"])
    assert 0.0 in (own["idle_sampler"], own["idle_learner"])
    assert own["in_turns_s"] > 0
