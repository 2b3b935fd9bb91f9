"""Rewards are tried before engines start, and only what no answer excuses ends the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import PluginError
from mmrl.interfaces import Needs
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.reward_scale import weight_warnings
from mmrl.runs.reward_trial import RewardTrial
from mmrl.testing.rollouts import make_rollouts
from tests.faults.runs import Runs, records

REWARDS = """
import time

def column(rollouts):
    return [rollout.columns["gone"] for rollout in rollouts]

def one_too_few(rollouts):
    return [0.0]

def text(rollouts):
    return ["1" for _ in rollouts]

def infinite(rollouts):
    return [float("inf") for _ in rollouts]

def unscorable(rollouts):
    return [None for _ in rollouts]

def low(rollouts):
    return [-1.0 for _ in rollouts]

def percent(rollouts):
    return [25.0 * (str(rollout.answer) in rollout.text) - 1 for rollout in rollouts]

def slow(rollouts):
    time.sleep(3)
    raise LookupError("late")

def right(rollouts):
    return [float(str(rollout.answer) in rollout.text) for rollout in rollouts]
"""


def setup(
    config: list[RewardSpec], environment: object = None, is_scanned: bool = True, needs: Needs | None = None
) -> Any:
    prompt = make_rollouts(["x"], answer="7")[0].prompt
    methods = {"attempt": lambda self, *_: prompt, "__len__": lambda self: 3}
    rows = type("Rows", (), {"is_scanned": is_scanned, "sources": {"rows": 1}, **methods})()
    encoder, source = SimpleNamespace(encode=None), SimpleNamespace(samples=True)
    sections = SimpleNamespace(rewards=config, environment=environment)
    algorithm = SimpleNamespace(needs=lambda: needs or Needs())
    facts = {"training": rows, "evaluation": None, "encoder": encoder, "algorithm": algorithm}
    return SimpleNamespace(config=sections, step_source=source, **facts)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


def tried(file: Path, name: str, patience_s: float = 60, **options: Any) -> RewardTrial:
    spec = RewardSpec(name=f"{file}:{name}", **options)
    with Scorer([spec], 1) as scorer:
        trial = RewardTrial(scorer, setup([spec]))
        trial.check(patience_s)
        return trial


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("column", "KeyError: 'gone'"),
        ("one_too_few", "1 score"),
        ("text", "'1'"),
        ("infinite", "inf"),
        ("unscorable", None),
        ("low", None),
    ],
)
def test_a_reward_that_is_broken_whatever_the_answer_is_an_error(file: Path, name: str, what: str | None) -> None:
    if what is None:
        tried(file, name)
        return
    with pytest.raises(PluginError) as caught:
        tried(file, name)
    assert what in str(caught.value) and "tried on made-up answers to the first row" in caught.value.where


def test_a_slow_reward_is_not_waited_for_and_asked_again(file: Path) -> None:
    spec = RewardSpec(name=f"{file}:slow")
    with Scorer([spec], 1) as scorer:
        trial, began = RewardTrial(scorer, setup([spec])), time.monotonic()
        trial.check(0.1)
        assert time.monotonic() - began < 2.9
        with pytest.raises(PluginError, match="LookupError: late"):
            trial.check(60)


def test_nothing_is_tried_where_it_could_not_tell() -> None:
    spec, scorer = RewardSpec(name="never"), cast(Any, None)
    for made in (setup([]), setup([spec], environment="game"), setup([spec], is_scanned=False)):
        RewardTrial(scorer, made).check(0)


@pytest.mark.parametrize(
    ("weight", "values", "said"),
    [
        (1.0, True, "a made-up answer to What is 3 + 4? earns 24"),
        (0.4, True, None),  # 9.6
        (1.0, False, None),
        (12.0, True, "their weights add up to 12"),
    ],
)
def test_rewards_on_a_scale_above_10_are_told_to_a_run_with_a_critic(
    file: Path, weight: float, values: bool, said: str | None
) -> None:
    spec = RewardSpec(name=f"{file}:percent", weight=weight)
    made = setup([spec], needs=Needs(values=values))
    with Scorer([spec], 1) as scorer:
        trial = RewardTrial(scorer, made)
        trial.check(60)
    warnings = [*weight_warnings(made), *trial.warnings]
    assert len(warnings) == (said is not None)
    for warning in warnings:
        assert warning.startswith(f"rewards: {said}, and a critic begins near 0") and "divide the weights by" in warning


def test_a_run_ends_before_its_engines_start_if_a_reward_is_broken(
    fake_runs: Runs, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake_runs.train(fake_runs.config(rewards=[{"name": f"{file}:column"}])) == 4
    told = capsys.readouterr()
    assert "KeyError: 'gone'" in told.err and "ready after" not in told.out
    assert records(fake_runs.folder / "run" / "events.jsonl")[-1]["kind"] == "error"
