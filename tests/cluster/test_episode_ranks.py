"""Episodes on two ranks: with a sampler that they share, and with one each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Polled, SamplingRequest
from mmrl.rollout.records import read_rollouts
from tests.engine import episodes

pytestmark = pytest.mark.full
SAMPLERS = {
    "tensor parallel": {"tensor_parallel_size": 2, "engine": {"kv_cache_memory_bytes": 2**26}},
    "one each": {"name": "hf"},
}

ECHO = """
from mmrl import Environment, Observation

class Echo(Environment):
    def reset(self, prompt, seed):
        return None

    def step(self, turn):
        return Observation("go on", reward=len(turn.text) / 10, done=turn.index == 1, role="user")
"""


@pytest.fixture(params=SAMPLERS)
def group(request: Any, vision: Any, start_ranks: Callable[[EngineSpec], Any]) -> Iterator[Any]:
    cluster = {"name": "ray", "ranks": 2}
    config = vision.config(cluster=cluster, sampler=SAMPLERS[request.param])
    group = start_ranks(EngineSpec(config, vision.folder, vision.media, None, 2, with_sampler=True))
    yield group
    group.close()


def test_turns_are_exact_and_the_same_whenever_they_are_answered(
    group: Any, vision: Any, plain: Callable[..., Any], picture: Callable[..., Any]
):
    observations = [episodes.inserted(vision, "Look again."), episodes.inserted(vision, "So?", picture(90, 60))]
    beside = [SamplingRequest(vision.prompts[0], 3, episodes.TEMPERATURE, 24, 9)]
    found = []
    for timing in ("early", "late", "random"):
        with group.sampling() as sampler:
            found.append(episodes.play(sampler, [*vision.prompts[:2]] * 2, observations, beside, timing))
            assert sampler.poll() == Polled()
    for other in found[1:]:
        episodes.assert_same(other, found[0])
    episodes.assert_exact(found[0], plain(vision.folder.path), vision.media)
    assert {len(each.steps) for each in found[0].values()} == {1, episodes.TURNS}
    assert len(found[0][1].rollout.all_images) == 2


@pytest.mark.slow
def test_two_ranks_train_on_episodes_whose_turns_they_share(
    models: Callable[[str], Path], tmp_path: Path, household: Any
):
    """Each has an `hf` sampler and half of the prompts; one environment's process answers both."""
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"id": f"r{i}", "prompt": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(4))
    )
    config = {
        "model": {"path": str(models("qwen2")), "dtype": "float32"},
        "data": {"train": {"name": "table", "path": "rows.jsonl"}, "max_prompt_tokens": 64},
        "environment": {"name": "echo.py:Echo", "max_turn_tokens": 5, "max_observation_tokens": 60, "workers": 1},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
        "sampler": {"name": "hf", "group_size": 2, "max_new_tokens": 20},
        "learner": {"lr": 1e-3, "zero_stage": 0, "epochs": 2},
        "cluster": {"name": "ray", "ranks": 2},
        "trainer": {"steps": 2, "prompts_per_step": 4, "run_dir": "run"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    result = household.run("train", "config.yaml", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "episode/turns_mean" in step]
    assert [step["episode/turns_mean"] for step in steps] == [2.0, 2.0]
    assert all(step["mismatch/logprob_abs_max"] < 1e-4 and step["policy/grad_norm"] > 0 for step in steps)
    rollouts = [each.rollout for each in read_rollouts(tmp_path / "run")]
    assert len(rollouts) == 2 * 4 * 2
    assert all(not each.failure and [s.by_policy for s in each.segments] == [True, False, True] for each in rollouts)
    assert household.members_after(10) == {}
