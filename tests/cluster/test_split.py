"""Runs whose sampler has ranks of its own: the same files as of ranks that take turns, also if a sampler is killed."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from mmrl.types import RawImage
from tests.cluster.process_ranks import KILL_AT
from tests.faults.comparison import compare

pytestmark = pytest.mark.full

REWARD = """\
import json
import os
import signal
from pathlib import Path

HERE = Path(__file__).parent

def even(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]

def deadly(rollouts):
    record, metrics = (HERE / "under-ray" / name for name in ("environment.json", "metrics.jsonl"))
    if metrics.exists() and '"step": 1' in metrics.read_text() and not (HERE / "marker").exists():
        (HERE / "marker").touch()
        ranks = json.loads(record.read_text())["engine"]["ranks"]
        os.kill(next(rank["pid"] for rank in ranks if rank["side"] == "sampler"), signal.SIGKILL)
    return even(rollouts)
"""
ONE = ("cluster.name=ray", "cluster.ranks=1")
APART = ("cluster.name=ray", "cluster.sampler_ranks=1", "cluster.learner_ranks=1")


@pytest.fixture(scope="module")
def folder(
    models: Callable[[str], Path], picture: Callable[..., RawImage], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A config of rows with no, one and two images, and one of text alone."""
    folder = tmp_path_factory.mktemp("split")
    for index, size in enumerate([(56, 56), (90, 60), (60, 120)]):
        (folder / f"{index}.png").write_bytes(picture(*size).data)
    names = [[f"{(row + i) % 3}.png" for i in range(row % 3)] for row in range(6)]
    rows = [{"prompt": "<image>" * len(each) + f"{row}+1?", "images": each} for row, each in enumerate(names)]
    (folder / "seen.jsonl").write_text("".join(json.dumps(row | {"answer": "7"}) + "\n" for row in rows))
    sums = [{"prompt": f"{row}+1?", "answer": str(row + 1)} for row in range(6)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "reward.py").write_text(REWARD)
    seen = {"name": "table", "path": "seen.jsonl"}
    images: dict[str, Any] = {
        "model": {"path": str(models("qwen2_5_vl")), "dtype": "float32"},
        "data": {"train": seen, "eval": seen, "max_prompt_tokens": 160},
        "rewards": [{"name": "reward.py:even", "workers": 1}],
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "sampler": {"group_size": 3, "max_new_tokens": 8, "engine": {"kv_cache_memory_bytes": 2**26}},
        "learner": {"lr": 1e-2, "tokens_per_microbatch": 300, "zero_stage": 0, "minibatches": 2},
        "trainer": {"steps": 3, "prompts_per_step": 4, "eval_every": 2, "save_every": 1},
    }
    text = images | {
        "model": {"path": str(models("qwen2")), "dtype": "float32"},
        "data": {"train": {"name": "table", "path": "sums.jsonl"}, "max_prompt_tokens": 64},
        "sampler": {"name": "hf", "group_size": 3, "max_new_tokens": 8},
        "trainer": {"steps": 3, "prompts_per_step": 4, "save_every": 1},
    }
    for name, config in {"images": images, "text": text}.items():
        (folder / f"{name}.yaml").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path, warm_mmrl: Callable[..., Any]) -> Callable[..., Path]:
    """A run of a config on ranks that are forks; each is carried out once."""

    @functools.cache
    def train(config: str, *settings: str, kill_at: str = "") -> Path:
        name = "run-" + hashlib.sha256(repr((config, settings, kill_at)).encode()).hexdigest()[:8]
        if kill_at:
            (folder / KILL_AT).write_text(kill_at)
        done = warm_mmrl("train", f"{config}.yaml", f"trainer.run_dir={name}", *settings, folder=folder)
        (folder / KILL_AT).unlink(missing_ok=True)
        assert done.returncode == 0, done.stderr
        return folder / name

    return train


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a history, without what tells of time and place."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    others = ("perf/", "staleness/", "time", "attempt")
    return [{key: value for key, value in line.items() if not key.startswith(others)} for line in found]


def assert_same(one: Path, other: Path) -> None:
    """Metrics, ledger, rollouts, evaluations and weights, bit for bit."""
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert lines(one / name) == lines(other / name), name
    for kind in ("rollouts", "evaluations"):
        files = [{path.name: path.read_bytes() for path in (run / kind).glob("*")} for run in (one, other)]
        assert files[0] == files[1] and (files[0] or kind == "evaluations")
    kept = [sorted(path.name for path in (run / "checkpoints").glob("step-*")) for run in (one, other)]
    assert kept[0] == kept[1] and len(kept[0]) > 1
    for step in kept[0]:
        place = Path("checkpoints", step, "model", "model.safetensors")
        found, expected = load_file(one / place), load_file(other / place)
        assert found.keys() == expected.keys()
        assert all((found[key] == expected[key]).all() for key in found)


def restarts(run: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "restart"]


def exit_codes(run: Path) -> list[int]:
    """Those of all attempts."""
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    return [attempt["exit_code"] for attempt in attempts if "exit_code" in attempt]


TWO = ("cluster.name=ray", "cluster.ranks=2", "sampler.tensor_parallel_size=2", "learner.zero_stage=3")
TWO_APART = ("cluster.name=ray", "cluster.sampler_ranks=2", "cluster.learner_ranks=2", *TWO[2:])
LAYOUTS = {
    "text": ("text", APART, ONE),
    "images": ("images", APART, ONE),
    "two that share each": ("images", TWO_APART, TWO),
    "three samplers": ("text", ("cluster.name=ray", "cluster.sampler_ranks=3", "cluster.learner_ranks=1"), ONE),
}
"""A config, the settings of ranks apart, and those of ranks that take turns and sample the same: the ``hf`` sampler has
requests one by one, so there the number of samplers does not matter."""


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[pytest.mark.slow] * each.startswith("two")) for each in LAYOUTS]
)
def test_ranks_apart_write_what_ranks_that_take_turns_write(layout: str, trained: Callable[..., Path]) -> None:
    config, apart, together = LAYOUTS[layout]
    assert_same(trained(config, *apart), trained(config, *together))


BEHIND = (*APART, "trainer.staleness=1", "trainer.steps=4", "trainer.on_mismatch=warn")
KILLS = {
    "beside a learner that goes on": ("rank.advance 14", "text", BEHIND),
    "while it samples": ("rank.advance 9", "images", APART),
    "in the middle of a sync": ("weights.receive 3", "text", APART),
    "one of two that share weights": ("rank.advance 9", "images", TWO_APART),
}
"""A point of the code and the time at which a rank that samples is killed there, a config, and the ranks."""


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(
            each, marks=[pytest.mark.slow] * (each in ("in the middle of a sync", "one of two that share weights"))
        )
        for each in KILLS
    ],
)
def test_a_sampler_that_is_killed_starts_again_alone_and_the_files_are_the_same(
    kill: str, trained: Callable[..., Path], tmp_path: Path
) -> None:
    place, config, apart = KILLS[kill]
    broken = trained(config, *apart, "trainer.max_restarts=1", kill_at=f"{place} {tmp_path / 'marker'}")
    assert (tmp_path / "marker").exists()
    assert_same(broken, trained(config, *apart))
    (restart,) = restarts(broken)
    assert "sampler rank " in restart["message"] and " is gone: " in restart["message"]
    assert exit_codes(broken) == [0]  # of the run's only attempt


def test_a_learner_that_dies_in_the_middle_of_a_sync_takes_the_run_back_to_its_checkpoint(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    broken = trained("text", *APART, "trainer.max_restarts=1", kill_at=f"weights.send 3 {tmp_path / 'marker'}")
    assert not compare(broken, trained("text", *APART), same_checkpoints=False)
    (restart,) = restarts(broken)
    assert "learner rank 0 is gone: " in restart["message"]
    assert exit_codes(broken) == [5, 0]


def test_the_record_says_which_rank_is_on_which_side(trained: Callable[..., Path]) -> None:
    engine = json.loads((trained("images", *APART) / "environment.json").read_text())["engine"]
    assert [rank["side"] for rank in engine["ranks"]] == ["sampler", "learner"]
    assert len({rank["pid"] for rank in engine["ranks"]}) == 2
    assert (engine["sampler"], engine["learner"]) == ("VLLMSampler", "DeepSpeedLearner")


@pytest.mark.slow  # test_lost_ranks.py loses a rank under Ray
def test_under_ray_too_a_sampler_is_replaced_alone(trained: Callable[..., Path], folder: Path, household: Any) -> None:
    """A reward kills it in the second step, while it samples."""
    settings = (*APART, "trainer.max_restarts=1", "sampler.max_new_tokens=60")
    reward = "rewards=[{name: reward.py:deadly, workers: 1, label: even}]"
    done = household.run("train", "text.yaml", "trainer.run_dir=under-ray", *settings, reward, folder=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "marker").exists()
    assert_same(folder / "under-ray", trained("text", *settings))
    (restart,) = restarts(folder / "under-ray")
    assert "sampler rank 0 is gone: " in restart["message"]
    assert exit_codes(folder / "under-ray") == [0]
    assert household.members_after(10) == {}
