"""``mmrl replay`` plays recorded turns again: the same environment, a changed one, one that is gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.commands.cli import main
from mmrl.rollout.records import read_rollouts
from tests.faults.runs import Runs, fake, records

ENVIRONMENT = Path(__file__).parents[2] / "faults" / "slow_tools.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Iterator[Runs]:
    with fake(tmp_path_factory.mktemp("environments"), models("qwen2")) as found:
        yield found


@pytest.fixture(scope="module")
def played(runs: Runs) -> Path:
    """A run of one step, whose environment is a file that tests may change."""
    (runs.folder / "tools.py").write_text(ENVIRONMENT.read_text())
    environment = {
        "name": f"{runs.folder / 'tools.py'}:SlowTools",
        "longest_s": 0.0,
        "max_turns": 3,
        "max_turn_tokens": 4,
        "max_observation_tokens": 120,
        "workers": 2,
    }
    config = runs.config(
        "played",
        environment=environment,
        sampler={"group_size": 4, "max_new_tokens": 12},
        algorithm={"name": "remax"},  # greedy episodes are played again too
        trainer={"steps": 1, "prompts_per_step": 2, "run_dir": str(runs.folder / "played")},
    )
    assert runs.train(config) == 0
    return runs.folder / "played"


@pytest.fixture
def environment(runs: Runs) -> Iterator[Path]:
    """The file, which is as it was after the test."""
    path = runs.folder / "tools.py"
    yield path
    path.write_text(ENVIRONMENT.read_text())


def replay(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", str(run), *words, "--json"])
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    return code, step


def test_the_same_environment_answers_the_recorded_turns_alike(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, step = replay(played, capsys)
    assert code == 0, step
    turns = [len(each.rollout.episode) for each in read_rollouts(played)]
    assert step["parts"]["environment"] == {"unit": "turns", "compared": sum(turns), "note": "", "differences": []}
    assert max(turns) > 1 and len(turns) == 2 * 5
    assert {name for name, part in step["parts"].items() if part["compared"]} >= {"rewards", "metrics", "log-probs"}


def test_a_changed_observation_is_named_with_its_prompt_member_and_turn(
    played: Path, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.write_text(ENVIRONMENT.read_text().replace('"early" if', '"left" if'))
    code, step = replay(played, capsys)
    found = step["parts"]["environment"]["differences"]
    changed = {
        (each.rollout.prompt.id, -1 if each.greedy else each.rollout.index, f"observation of turn {number}")
        for each in read_rollouts(played)
        for number, turn in enumerate(each.rollout.episode)
        if turn.content and "early" in turn.content[0]
    }
    assert code == 6 and changed
    about = [each for each in found if each["what"].startswith("observation")]
    assert {(each["prompt"], -1 if each["greedy"] else each["member"], each["what"]) for each in about} == changed
    assert all("early" in each["was"] and "left" in each["now"] for each in about)
    assert not any(part["differences"] for name, part in step["parts"].items() if name != "environment")
    assert main(["replay", str(played)]) == 6
    assert "was" in capsys.readouterr().out


@pytest.mark.full
def test_other_rewards_seeds_and_ends_are_differences_too(
    played: Path, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENVIRONMENT.read_text().replace("sum(0.1 for", "sum(0.2 for").replace("puzzles, number", "riddles, number")
    environment.write_text(text.replace('{"reached": self._reached}', '{"reached": 0.5}'))
    _, step = replay(played, capsys)
    found = {each["what"].split(" of turn")[0] for each in step["parts"]["environment"]["differences"]}
    assert found >= {"first observation", "reward", "component reached", "component environment"}
    first = next(each for each in step["parts"]["environment"]["differences"] if each["what"] == "first observation")
    assert "puzzles" in first["was"] and "riddles" in first["now"]


@pytest.mark.full
def test_an_environment_that_fails_now_and_one_that_is_gone_are_told(
    played: Path, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.write_text(
        ENVIRONMENT.read_text().replace("seen = await", "raise KeyError('gone')\n        seen = await")
    )
    _, step = replay(played, capsys)
    assert "not played again" in step["parts"]["environment"]["note"]
    environment.unlink()
    code, step = replay(played, capsys)
    assert code == 0 and step["parts"]["environment"]["compared"] == 0
    assert "not played again" in step["parts"]["environment"]["note"]
    code, step = replay(played, capsys, "--no-environment")
    assert code == 0 and "environment" not in step["parts"]


@pytest.mark.full
def test_other_weights_of_components_are_a_what_if(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = '{"environment": 0, "reached": 0}'
    code, step = replay(played, capsys, f"environment.weights={weights}")
    metrics = step["what_if"]["metrics"]
    assert code == 0 and metrics["reward/mean"]["would_be"] == pytest.approx(metrics["reward/letters_mean"]["was"])
    assert metrics["reward/mean"]["was"] != metrics["reward/mean"]["would_be"]
    (line,) = [each for each in records(played / "metrics.jsonl") if "reward/environment_mean" in each]
    assert line["reward/environment_mean"] == metrics["reward/environment_mean"]["would_be"]
