"""Runs whose episodes branch: their records, what they learn, their replay, cuts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.commands.cli import main
from mmrl.commands.replay.branches import branch_part
from mmrl.plugin_host import registry
from mmrl.rollout.records import read_rollouts, read_step, recorded_steps
from tests.faults.comparison import compare, metrics
from tests.faults.kill_sweep import SLOW_TOOLS
from tests.faults.runs import Runs

ALGORITHMS = Path(__file__).with_name("trees.py")
TREES = f"{ALGORITHMS}:Trees"


def config(runs: Runs, name: str, **sections: Mapping[str, Any]) -> Path:
    usual: dict[str, dict[str, Any]] = {
        "environment": {**SLOW_TOOLS["environment"], "longest_s": 0.0, "max_turns": 4, "workers": 1},
        "algorithm": {"name": TREES},
        "sampler": {"group_size": 4, "max_new_tokens": 20},
        "trainer": {"steps": 3, "prompts_per_step": 3, "save_every": 1, "run_dir": str(runs.folder / name)},
    }
    merged = {key: {**usual.get(key, {}), **sections.get(key, {})} for key in {**usual, **sections}}
    return runs.config(name, **merged)


@pytest.mark.full
def test_a_run_learns_from_its_trees_and_replay_finds_them_again(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {
        "train": {"name": "table", "path": str(fake_runs.rows)},
        "eval": {"name": "table", "path": str(fake_runs.rows)},
    }
    assert fake_runs.train(config(fake_runs, "run", data=data)) == 0
    run = fake_runs.folder / "run"
    turns, shared, length = set[int](), 0, 0
    for file in recorded_steps(run).values():
        record = read_step(file)
        rewards = np.concatenate([group.credited.scored.rewards for group in record.groups])
        for group in record.groups:
            branches = [rollout.branch for rollout in group.rollouts]
            assert branches[:2] == [None, None] and all(
                each and each.member < 2 + i for i, each in enumerate(branches[2:])
            )
            turns |= {each.turn for each in branches if each}
            own = [_own(group.rollouts, member) for member in range(4)]
            for member, (rollout, advantages) in enumerate(zip(group.rollouts, group.credited.advantages, strict=True)):
                sharing = [
                    [group.credited.scored.rewards[other] for other in range(4) if name in own[other]]
                    for name in own[member]
                ]
                expected = [np.mean(found) - rewards.mean() for found in sharing]
                np.testing.assert_allclose(advantages[rollout.mask], np.array(expected)[rollout.mask], atol=1e-9)
            shared += sum(rollout.num_shared for rollout in group.rollouts)
            length += sum(len(rollout.token_ids) for rollout in group.rollouts)
    found = metrics(run)
    assert len(turns) > 2 and shared > 20
    fractions = [found[step]["episode/shared_fraction"] for step in (1, 2, 3)]
    assert min(fractions) < shared / length < max(fractions)
    assert not any(each.rollout.branch for each in read_rollouts(run / "evaluations"))
    capsys.readouterr()
    assert main(["replay", str(run), "--json", "--step", "1-3"]) == 0
    report = json.loads(capsys.readouterr().out)
    parts = [each["parts"] for each in report["steps"]]
    assert [each["branches"]["compared"] for each in parts] == [6, 6, 6]
    assert all(each["environment"]["compared"] > 20 for each in parts)
    other = registry.given("algorithm", TREES, {"latest": True})
    differences = branch_part(read_step(recorded_steps(run)[1]), other).differences
    assert differences and all("before its turn" in each.was and each.was != each.now for each in differences)


def _own(rollouts: Any, member: int) -> list[tuple[int, int]]:
    """Each token's name: the member that has sampled it, and its place."""
    rollout = rollouts[member]
    before = [] if rollout.branch is None else _own(rollouts, rollout.branch.member)[: rollout.num_shared]
    return [*before, *((member, place) for place in range(len(before), len(rollout.token_ids)))]


SPLIT = {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}


@pytest.mark.full
def test_a_run_that_is_cut_anywhere_equals_one_that_was_left_alone(fake_runs: Runs) -> None:
    """With a lag, a checkpoint holds groups that no step has learned from. Clocks change nothing."""
    lag = {"staleness": 1, "save_every": 2}
    assert fake_runs.train(config(fake_runs, "whole", trainer=lag, cluster=SPLIT)) == 0
    broken = config(fake_runs, "broken", trainer=lag, cluster=SPLIT, environment={"longest_s": 0.02})
    for point, count in (("fake.sample", 14), ("fake.update", 3)):  # among the branches of a step; after a checkpoint
        fake_runs.killed(broken, point, count)
    assert fake_runs.train(broken) == 0
    assert not compare(fake_runs.folder / "broken", fake_runs.folder / "whole")


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"environment": None}, "and a completion has no turns"),
        (
            {"sampler": {"group_size": 2}},
            "2 in each group, so that of 2 none would begin by itself\n  where:    sampler.group_size: 2\n"
            "  possible: 3 or more",
        ),
        (
            {"sampler": {"partial": {"engine_steps": 16}, "name": "vllm"}},
            "in parts, a step ends while some are under way",
        ),
        ({"algorithm": {"name": f"{ALGORITHMS}:Undecided"}}, "asks for branches and does not say where they begin"),
        (
            {"algorithm": {"name": f"{ALGORITHMS}:Remembering"}, "trainer": {"staleness": 1}, "cluster": SPLIT},
            "chooses where episodes branch and has a state",
        ),
        ({"environment": {"name": "forgetful.py:Forgetful"}}, "says that an episode cannot be played again"),
    ],
)
def test_what_cannot_branch_is_refused_by_name(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str], sections: dict[str, Any], told: str
) -> None:
    if "forgetful.py" in str(sections):
        code = "from tests.faults.slow_tools import SlowTools\nclass Forgetful(SlowTools):\n    repeatable = False\n"
        (fake_runs.folder / "forgetful.py").write_text(code)
        sections = {"environment": {"name": f"{fake_runs.folder}/forgetful.py:Forgetful"}}
    file = config(fake_runs, "run", **{key: value or {} for key, value in sections.items()})
    if sections.get("environment", ...) is None:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"environment": None}))
    assert fake_runs.train(file) in (2, 4)
    assert told in capsys.readouterr().err
    assert not (fake_runs.folder / "run" / "rollouts").exists()
