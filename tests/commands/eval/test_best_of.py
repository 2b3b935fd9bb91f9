"""Best of n in `mmrl eval`: its curves against all subsets of the recorded completions, who may choose, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.commands.cli import main
from mmrl.commands.eval import evaluation
from mmrl.config.plugin_specs import RewardSpec
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.testing import read_rollouts
from tests.faults.runs import REWARDS, Runs

SCORING = [{"name": "exact", "weight": 2.0}, {"name": f"{REWARDS}:early"}]
CHOOSER = f"{REWARDS}:letters"


@pytest.fixture(scope="module")
def scorers() -> Iterator[dict[int, Scorer]]:
    """Workers of the config's rewards, and of these with the one that chooses."""
    more = [*SCORING, {"name": CHOOSER, "weight": 0.0}]
    with (
        Scorer([RewardSpec.model_validate(each) for each in SCORING], 1) as own,
        Scorer([RewardSpec.model_validate(each) for each in more], 1) as all_of_them,
    ):
        yield {2: own, 3: all_of_them}


@pytest.fixture
def evaluate(
    fake_runs: Runs, scorers: dict[int, Scorer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., int]:
    monkeypatch.setattr(evaluation, "Scorer", lambda rewards: nullcontext(scorers[len(rewards)]))
    rows = [{"prompt": f"letter {n}?", "answer": ["abc"[n % 3], *"defgh"]} for n in range(6)]
    fake_runs.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model", str(fake_runs.model), f"rewards={json.dumps(SCORING)}", "--max-new-tokens", "2"]
    data = ["data.eval.name=table", f"data.eval.path={fake_runs.rows}", "--output", str(tmp_path / "out"), "--json"]
    return lambda *words: main(["eval", *given, *data, *map(str, words)])


def brute_force(folder: Path, by: Callable[[Any], float], value: Callable[[Any], float], most: int) -> list[float]:
    """The mean over the prompts and over all subsets of n completions, for each n."""
    groups: dict[str, list[Any]] = {}
    for each in read_rollouts(folder):
        groups.setdefault(each.rollout.prompt.id, []).append(each)
    found = []
    for n in range(1, most + 1):
        means = []
        for members in groups.values():
            best = [max(by(each) for each in subset) for subset in combinations(members, n)]
            chosen = zip(combinations(members, n), best, strict=True)
            means.append(np.mean([np.mean([value(x) for x in subset if by(x) == top]) for subset, top in chosen]))
        found.append(float(np.mean(means)))
    return found


@pytest.mark.parametrize(
    ("words", "name", "by"),
    [
        ((), "reward", lambda each: 2 * each.rewards["exact"] + each.rewards["early"]),
        (("--by", "reward"), "reward", lambda each: 2 * each.rewards["exact"] + each.rewards["early"]),
        (("--by", "early"), "early", lambda each: each.rewards["early"]),
        (("--by", CHOOSER), "letters", lambda each: each.rewards["letters"]),
        (("--by", f"{{name: '{CHOOSER}', label: letters}}"), "letters", lambda each: each.rewards["letters"]),
    ],
)
def test_the_curves_are_those_of_all_subsets(evaluate, tmp_path, capsys, words, name, by):
    assert evaluate("--samples", 5, "--best-of", 4, *words) == 0
    found = json.loads(capsys.readouterr().out)
    curves = found["best_of"]
    assert curves["by"] == name and curves["prompts"] == 6
    right = lambda each: float(each.rewards["exact"] >= 1)  # noqa: E731
    reward = lambda each: 2 * each.rewards["exact"] + each.rewards["early"]  # noqa: E731
    for key, value in {"accuracy": right, "reward": reward}.items():
        expected = brute_force(tmp_path / "out", by, value, 4)
        assert [each["value"] for each in curves[key]] == pytest.approx(expected)
    assert curves["accuracy"][0]["value"] == pytest.approx(found["metrics"]["eval/accuracy"]["value"])
    assert curves["reward"][0]["value"] == pytest.approx(found["metrics"]["eval/reward_mean"]["value"])
    assert curves["accuracy"][3]["low"] is None or curves["accuracy"][3]["low"] < curves["accuracy"][3]["value"]


def test_a_table_has_the_curve_and_as_many_completions_are_sampled(fake_runs, scorers, evaluate, capsys, monkeypatch):
    words = ["--model", str(fake_runs.model), f"rewards={json.dumps(SCORING)}", "--max-new-tokens", "1"]
    words += ["data.eval.name=table", f"data.eval.path={fake_runs.rows}", "--best-of", "3"]
    assert main(["eval", *words]) == 0
    out = capsys.readouterr().out
    assert "3 completions each, at temperature 1" in out
    lines = [line for line in out.splitlines() if line.startswith(("best of n", "n = "))]
    assert lines[0].startswith("best of n by reward, 6 prompts") and [line[:5] for line in lines[1:]] == [
        "n = 1",
        "n = 2",
        "n = 3",
    ]


@pytest.mark.parametrize(
    ("words", "what", "possible"),
    [
        (("--best-of", 1), "--best-of is 1", "2 or more"),
        (("--best-of", 0), "--best-of is 0", "1 to 4096"),
        (("--best-of", 6, "--samples", 5), "--best-of is 6", "2 to 5, the completions of each prompt"),
        (("--best-of", 3, "--temperature", 0), "3 greedy completions of a prompt are all the same", ""),
        (("--by", "early"), "--by chooses the best of several completions", ""),
        (("--best-of", 2, "--by", "earl"), "'earl' is no component, and no installed reward", "reward, exact, early"),
        (("--best-of", 2, "--by", "exact/part"), "no reward has answered a component 'exact/part'", "reward, exact"),
        (("--best-of", 2, "--by", "{name: format, patern: x}"), "patern", "pattern"),
        (("--best-of", 2, "--by", "{}"), "name", ""),
    ],
)
def test_what_cannot_choose_is_said(evaluate, capsys, words, what, possible):
    assert evaluate(*words) == 2
    error = capsys.readouterr().err
    assert what in error and possible in error and "Traceback" not in error
