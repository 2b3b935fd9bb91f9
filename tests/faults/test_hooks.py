"""Whole runs of algorithms that ask for hooks, with the fake engine: cut anywhere, replayed, and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.rollout.records import read_lines, recorded_steps
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.groups import group_document
from tests.faults.comparison import compare, metrics
from tests.faults.runs import Runs

HOOKS = Path(__file__).with_name("hooks.py")
SPLIT = {"cluster": {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}}
DENSE = {"algorithm": {"name": f"{HOOKS}:Dense"}, "rewards": [{"name": f"{HOOKS}:spans", "weight": 0.5}]}


def full(*values: Any) -> Any:
    """A case of the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)


def cut(runs: Runs, points: Any, **sections: Any) -> Path:
    """A run that was killed at each of these points, which is that of one that was left alone."""
    assert runs.train(runs.config("whole", **sections)) == 0
    broken = runs.config("broken", **sections)
    for point, count in points:
        runs.killed(broken, point, count)
    assert runs.train(broken) == 0
    assert not compare(runs.folder / "broken", runs.folder / "whole")
    return runs.folder / "broken"


def lines(run: Path, step: int) -> list[dict[str, Any]]:
    return list(read_lines(recorded_steps(run)[step]))


@pytest.mark.parametrize(
    ("sections", "points"),
    [
        ({}, [("fake.generate", 2), ("fake.update", 2)]),
        full({**SPLIT, "trainer": {"staleness": 2, "steps": 5}}, [("fake.sample", 6), ("checkpoint.filled", 1)]),
        full({"sampler": {"partial": {"engine_steps": 16}, "max_new_tokens": 40}}, [("fake.update", 2)]),
    ],
    ids=["plain", "behind", "in parts"],
)
def test_values_of_parts_of_texts_are_credited_recorded_replayed_and_shown(
    fake_runs: Runs, sections: dict[str, Any], points: Any
) -> None:
    run = cut(fake_runs, points, **DENSE, **sections)
    assert fake_runs.replay(run) == 0
    for step in (1, 3):
        found = lines(run, step)
        for record in found:
            # The fake engine's letters are not the tokenizer's, so that every part ends with the last token.
            values, text = record["token_rewards"], record["completion"]
            worth = 0.5 * (ord(text[0]) - 100.0 + 1) if text else 0.0
            assert values == [0.0] * (len(values) - 1) + [worth] and len(values) == len(record["token_ids"])
        trained = [record for record in found if record["trained"]]
        assert trained and all(np.allclose(r["advantage"], sum(r["token_rewards"])) for r in trained)
        assert metrics(run)[step]["dense/sum"] == pytest.approx(sum(sum(r["token_rewards"]) for r in trained))
    member = group_document(ViewedRun(run), "step", 1, 0)["members"][0]
    assert member["tokens"]["token_reward"][-1] == pytest.approx(lines(run, 1)[0]["token_rewards"][-1], rel=1e-5)
