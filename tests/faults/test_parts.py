"""Runs whose rollouts are sampled in parts: what they learn, killed or not, and what reads them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.comparison import check_ledger, compare
from tests.faults.kill_sweep import SLOW_TOOLS
from tests.faults.runs import REWARDS, Runs, at, outcome, rollouts, stop

SPLIT = {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}
PARTS = {"engine_steps": 16, "in_flight": 2}
LONG = {"group_size": 2, "max_new_tokens": 90, "partial": PARTS}
"""Completions of 16 letters on average, and of 90 at most: of six groups some go on for steps."""
SECTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl": {"coef": 0.05}}, "learner": {"lr": 1e-2, "minibatches": 2}},
    "dapo": {
        "algorithm": {"name": "dapo", "dynamic_sampling": {"max_rounds": 2, "on_starvation": "skip"}},
        "rewards": [{"name": f"{REWARDS}:early"}],
    },
    "episodes": {
        **SLOW_TOOLS,
        "algorithm": {"name": "grpo"},
        "environment": {**SLOW_TOOLS["environment"], "max_turn_tokens": 30, "longest_s": 0.05},
    },
}

FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("dapo", "episodes")]


def config(runs: Runs, name: str, kind: str, *, steps: int = 8, **sections: Any) -> Path:
    own = {**SECTIONS[kind], **sections}
    trainer = {"steps": steps, "prompts_per_step": 3, "save_every": 1, "run_dir": str(runs.folder / name)}
    own |= {"sampler": LONG, "trainer": {**trainer, **sections.get("trainer", {})}}
    return runs.config(name, **own)


def states(run: Path) -> list[dict[str, Any]]:
    paths = sorted(run.glob("checkpoints/step-*"))
    return [json.loads((path / "state" / "run.json").read_text())["trainer"] for path in paths]


def test_a_run_learns_each_prompt_once_and_checkpoints_have_what_goes_on(fake_runs: Runs) -> None:
    assert fake_runs.train(config(fake_runs, "run", "grpo", trainer={"keep_checkpoints": 20})) == 0
    run = fake_runs.folder / "run"
    learned = [(each["epoch"], each["prompt_id"]) for step in range(1, 9) for each in rollouts(run, step)]
    assert len(learned) == 8 * 3 * 2 and set(Counter(learned).values()) == {2}
    last = states(run)[-1]
    left = {
        (each["epoch"], each["prompt_id"]) for name in ("carried_groups", "unfinished_groups") for each in last[name]
    }
    assert len(left) == 3 and not left & set(learned)
    # As many as were drawn, in the order of the data.
    assert len(set(learned) | left) == last["consumed_prompts"] == 8 * 3 + 3
    found = [each for step in range(1, 9) for each in rollouts(run, step)]
    parts = [each["segments"] for each in found if each.get("segments")]
    assert sum(len(each) > 1 for each in parts) > 5
    for each in parts:
        versions = [part["weight_version"] for part in each]
        assert versions == list(range(versions[0], versions[-1] + 2, 2)) or len(versions) == 1


@pytest.mark.parametrize("name", ["grpo", *FULL])
def test_two_runs_with_other_clocks_write_the_same_files(
    fake_runs: Runs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sections = {"rewards": [{"name": f"{REWARDS}:drowsy_{'early' if name == 'dapo' else 'letters'}"}]}
    for run in ("one", "two"):
        assert fake_runs.train(config(fake_runs, run, name, **sections)) == 0
        assert not check_ledger(fake_runs.folder / run)
    assert outcome(fake_runs.folder / "one") == outcome(fake_runs.folder / "two")
    assert not compare(fake_runs.folder / "one", fake_runs.folder / "two")
    kept = states(fake_runs.folder / "one")
    assert any(state["unfinished_groups"] for state in kept)
    if name == "episodes":
        left = [record for state in kept for record in state["unfinished_groups"] if record.get("episode")]
        assert any(record["episode"][-1]["content"] is None for record in left)  # an answer is out


POINTS = ("fake.step", 30), ("fake.cut", 2), ("fake.update", 2), ("checkpoint.filled", 1), ("checkpoint.renamed", 2)
"""Moments of kills: in sampling, at its stop, in learning, and around a checkpoint."""


@pytest.mark.parametrize(
    ("name", "lag"),
    [
        ("grpo", 0),
        pytest.param("dapo", 2, marks=pytest.mark.full),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("grpo", 2), ("dapo", 0), ("episodes", 0), ("episodes", 2))
        ),
    ],
)
def test_a_run_that_is_killed_anywhere_equals_one_that_was_left_alone(fake_runs: Runs, name: str, lag: int) -> None:
    sections = {"trainer": {"staleness": lag, "save_every": 2}, "cluster": SPLIT if lag else {}}
    assert fake_runs.train(config(fake_runs, "whole", name, **sections)) == 0
    broken = config(fake_runs, "broken", name, **sections)
    for point, count in POINTS:
        fake_runs.killed(broken, point, count)
    assert fake_runs.train(broken) == 0
    assert not compare(fake_runs.folder / "broken", fake_runs.folder / "whole")
    assert not check_ledger(fake_runs.folder / "broken")


@pytest.mark.parametrize(("point", "count"), [("fake.step", 50), ("fake.cut", 3), ("fake.update", 4)])
def test_a_signal_at_any_moment_saves_a_step_with_all_that_is_in_flight(
    fake_runs: Runs, point: str, count: int
) -> None:
    assert fake_runs.train(config(fake_runs, "whole", "grpo", trainer={"save_every": 5})) == 0
    broken = config(fake_runs, "broken", "grpo", trainer={"save_every": 5})
    with at(point, count, stop):
        assert fake_runs.train(broken) == 10
    last = states(fake_runs.folder / "broken")[-1]
    assert last["unfinished_groups"]
    assert fake_runs.train(broken) == 0
    assert not compare(fake_runs.folder / "broken", fake_runs.folder / "whole", same_checkpoints=False)


@pytest.mark.parametrize("name", ["grpo", *FULL])
def test_a_replay_finds_no_difference(fake_runs: Runs, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert fake_runs.train(config(fake_runs, "run", name, steps=6)) == 0
    capsys.readouterr()
    assert fake_runs.replay(fake_runs.folder / "run") == 0
    told = capsys.readouterr().out
    assert "no difference" in told, told
