"""``mmrl replay``: whole runs of the fake engine, their steps taken again, records spoilt and other rules tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from mmrl.cli import main
from tests.faults.runs import REWARDS, Runs, records

DYNAMIC = {"dynamic_sampling": {"max_rounds": 2}}
KL = {"kl": {"coef": 0.1, "target": 0.05, "horizon": 10.0}}
EARLY = [{"name": f"{REWARDS}:early"}]
TWICE = {"learner": {"lr": 1e-2, "minibatches": 2, "epochs": 2}}
ALGORITHMS = sorted({entry.name for entry in entry_points(group="mmrl.algorithms") if "sft" not in entry.name})


def rewrite(run: Path, step: int, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Spoil the record of a step."""
    file = run / "rollouts" / f"step-{step:06d}.jsonl"
    found = records(file)
    change(found)
    file.write_text("".join(json.dumps(record) + "\n" for record in found))


@pytest.fixture
def replayed(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Replays; returns the exit code and the report of the first step."""

    def replay(run: Path, *words: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main(["replay", str(run), *words, "--json"])
        return code, json.loads(capsys.readouterr().out)["steps"][0]

    return replay


def check(run: Path, capsys: pytest.CaptureFixture[str], steps: int = 4) -> list[dict[str, Any]]:
    """Reports of all steps, none of which may differ."""
    capsys.readouterr()
    code = main(["replay", str(run), "--step", f"1-{steps}", "--json"])
    reports: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["steps"]
    found = [(r["step"], name, part["differences"]) for r in reports for name, part in r["parts"].items()]
    assert [each for each in found if each[2]] == []
    assert code == 0 and [report["step"] for report in reports] == list(range(1, steps + 1))
    for report in reports:
        parts = report["parts"]
        assert parts["rewards"]["compared"] >= 12 == report["rollouts"] or report["rollouts"] > 12
        assert all(parts[name]["compared"] for name in ("advantages", "updates", "metrics", "loss", "log-probs"))
        assert report["notes"] == []
    return reports


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_replay_of_any_algorithm_finds_no_difference(name, fake_runs: Runs, capsys):
    assert fake_runs.train(fake_runs.config(algorithm={"name": name}, trainer={"steps": 2})) == 0
    check(fake_runs.folder / "run", capsys, 2)


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [
        ({"name": "grpo", **KL}, TWICE),
        ({"name": "grpo", "entropy_coef": 0.1, "mask_truncated": True, "correction": {"mode": "token-truncate"}}, {}),
        ({"name": "dapo", **DYNAMIC}, {"rewards": EARLY, **TWICE}),
        ({"name": "dapo", "dynamic_sampling": {"max_rounds": 1, "on_starvation": "skip"}}, {"rewards": EARLY}),
        ({"name": "reinforce_pp", "kl": KL["kl"]}, TWICE),
        ({"name": "remax"}, {"rewards": [{"name": f"{REWARDS}:letters"}, {"name": "overlong", "buffer": 4}], **TWICE}),
        ({"name": "gspo"}, {"learner": {"lr": 1e-1, "minibatches": 3}}),
    ],
    ids=lambda value: value.get("name", ""),
)
def test_a_replay_of_steered_refilled_and_repeated_updates_finds_no_difference(algorithm, sections, fake_runs, capsys):
    assert fake_runs.train(fake_runs.config(algorithm=algorithm, **sections)) == 0
    check(fake_runs.folder / "run", capsys)
