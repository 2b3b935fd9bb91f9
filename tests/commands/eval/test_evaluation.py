"""`mmrl eval` with the fake engine: its numbers from its completions, and a broken one goes on as if unbroken."""

from __future__ import annotations

import json
import signal
import time
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
from tests.faults import fake_engine
from tests.faults.runs import REWARDS, Killed, Runs, records

SCORING = [{"name": "exact", "weight": 2.0}, {"name": f"{REWARDS}:early"}]


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer([RewardSpec.model_validate(spec) for spec in SCORING], 1) as scorer:
        yield scorer


@pytest.fixture
def evaluate(fake_runs: Runs, scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command without a config on eight rows whose answers are letters, as the fake policy writes them."""
    monkeypatch.setattr(evaluation, "Scorer", lambda rewards: nullcontext(scorer))
    rows = [
        {"prompt": f"letter {n}?", "answer": ["abc"[n % 3], *"defgh"], "source": "odd" if n % 2 else "even"}
        for n in range(8)
    ]
    fake_runs.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data.eval.name=table", f"data.eval.path={fake_runs.rows}", "data.eval.source=source"]

    def run(*words: object) -> int:
        given = ["--model", str(fake_runs.model), f"rewards={json.dumps(SCORING)}", *data, *map(str, words)]
        return main(["eval", *given])

    return run


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.json*")}


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts of which a completion was sampled, as they come; ``act`` on one may end the process."""
    seen: list[str] = []
    before = fake_engine.FakeEngine._rollout

    def rollout(self: Any, request: Any, member: int, table: Any) -> Any:
        seen.append(request.prompt.id)
        return before(self, request, member, table)

    monkeypatch.setattr(fake_engine.FakeEngine, "_rollout", rollout)
    return seen


def interrupt(monkeypatch: pytest.MonkeyPatch, prompt: str, act: Callable[[], Any]) -> None:
    before = fake_engine.FakeEngine._rollout

    def rollout(self: Any, request: Any, member: int, table: Any) -> Any:
        if request.prompt.id == prompt and member == 1:
            time.sleep(1)  # what was sampled before is scored meanwhile
            act()
        return before(self, request, member, table)

    monkeypatch.setattr(fake_engine.FakeEngine, "_rollout", rollout)


def kill() -> None:
    raise Killed


SAMPLED = ("--samples", 5, "--max-new-tokens", 1)


def test_every_number_follows_from_the_completions(evaluate, tmp_path, capsys):
    assert evaluate(*SAMPLED, "--temperature", 1.5, "--output", tmp_path / "out", "--json") == 0
    found = answer(capsys)
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found
    rollouts = list(read_rollouts(tmp_path / "out"))
    values = np.array([each.rewards["exact"] for each in rollouts]).reshape(8, 5)
    assert [each.rollout.prompt.id for each in rollouts] == [f"rows/{n}" for n in range(8) for _ in range(5)]
    assert values.tolist() == [
        [float(each.rollout.text in each.rollout.answer) for each in rollouts[start : start + 5]]
        for start in range(0, 40, 5)
    ]
    metrics = found["metrics"]
    mean = values.mean()
    for name, each in {"eval/exact_mean": values, "eval/accuracy": (values >= 1).astype(float)}.items():
        error = each.mean(1).std(ddof=1) / np.sqrt(8)
        expected = {"value": each.mean(), "low": each.mean() - 1.959964 * error, "high": each.mean() + 1.959964 * error}
        assert 0 < each.mean() < 1 and metrics[name] == pytest.approx(expected, abs=1e-6)
    early = np.array([each.rewards["early"] for each in rollouts])
    assert metrics["eval/reward_mean"]["value"] == pytest.approx((2 * values.ravel() + early).mean())
    for k in (1, 2, 4, 5):
        subsets = [[max(subset) for subset in combinations(row, k)] for row in values]
        assert metrics[f"eval/exact_pass@{k}"]["value"] == pytest.approx(np.mean(subsets))
        assert f"eval/early_majority@{k}" not in metrics  # a function reads no answers
    assert metrics["eval/exact_majority@1"]["value"] == pytest.approx(mean)
    assert metrics["eval/exact_majority@5"]["value"] == pytest.approx(np.mean(list(map(plurality, group(rollouts)))))
    assert found["counts"] == {"prompts": 8, "completions": 40, "unscored": 0, "with_images": 0, "dropped": 0}
    assert found["sources"]["odd"]["prompts"] == 4
    assert found["sources"]["odd"]["metrics"]["eval/accuracy"]["value"] == pytest.approx(values[1::2].mean())
    assert found["settings"]["temperature"] == 1.5 and found["checkpoint"] is None and found["blank_images"] is None


def group(rollouts: Any) -> Iterator[Any]:
    for start in range(0, len(rollouts), 5):
        yield rollouts[start : start + 5]


def plurality(members: Any) -> float:
    """The chance that one of the answers with the most votes is right; an empty completion has no answer."""
    texts = [each.rollout.text for each in members if each.rollout.text]
    most = [text for text in dict.fromkeys(texts) if texts.count(text) == max(map(texts.count, texts))]
    return float(np.mean([text in members[0].rollout.answer for text in most]))


def test_one_completion_is_greedy_and_a_table_is_shown(evaluate, capsys):
    assert evaluate("--limit", 3, "--max-new-tokens", 1) == 0
    out = capsys.readouterr().out
    assert "3 prompts, 1 completion each, greedy, seed 0" in out and "pass@k" not in out
    lines = [line.split() for line in out.splitlines()]
    assert ["source", "prompts", "exact*", "early", "sum", "truncated", "length"] in lines
    assert [line[:2] for line in lines if line[:1] in (["even"], ["odd"], ["all"])] == [
        ["even", "2"],
        ["odd", "1"],
        ["all", "3"],
    ]


@pytest.mark.full
@pytest.mark.parametrize("half", ["", '{"group": 7, "prompt_id"'])
def test_one_that_was_killed_goes_on_as_if_unbroken(evaluate, generated, tmp_path, monkeypatch, capsys, half):
    words = (*SAMPLED, "--json", "--output")
    assert evaluate(*words, tmp_path / "whole") == 0
    whole, total = answer(capsys), len(generated)
    with monkeypatch.context() as patch:
        interrupt(patch, "rows/5", kill)
        with pytest.raises(Killed):
            evaluate(*words, tmp_path / "broken")
    samples = tmp_path / "broken" / "samples.jsonl"
    kept = {record["prompt_id"] for record in records(samples)}
    assert {"rows/0", "rows/1"} <= kept <= {f"rows/{n}" for n in range(5)} and not (
        tmp_path / "broken" / "results.json"
    ).exists()
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:-2]) + half)  # the last group is no longer whole, and its end is half a line
    generated.clear()
    assert evaluate(*words, tmp_path / "broken") == 0
    assert set(generated) == {f"rows/{n}" for n in range(8)} - (kept - {json.loads(lines[-1])["prompt_id"]})
    assert len(generated) < total and answer(capsys) == whole
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 10), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_keeps_what_is_scored(evaluate, tmp_path, monkeypatch, capsys, number, code):
    with monkeypatch.context() as patch:
        interrupt(patch, "rows/5", lambda: signal.raise_signal(number))
        assert evaluate(*SAMPLED, "--output", tmp_path / "out") == code
    assert "the same command goes on" in capsys.readouterr().err
    assert len(records(tmp_path / "out" / "samples.jsonl")) >= 5


def test_one_that_is_done_is_told_again_without_an_engine(evaluate, tmp_path, monkeypatch, capsys):
    words = (*SAMPLED, "--json", "--output", tmp_path / "out")
    assert evaluate(*words) == 0
    first, before = answer(capsys), files(tmp_path / "out")
    monkeypatch.setattr("mmrl.cluster.launch.start_engine", lambda *_, **__: pytest.fail("nothing is left to sample"))
    assert evaluate(*words) == 0
    assert answer(capsys) == first and files(tmp_path / "out") == before


def test_a_folder_holds_one_evaluation(evaluate, fake_runs, tmp_path, capsys):
    assert evaluate(*SAMPLED, "--output", tmp_path / "out") == 0
    for words, name in (
        (("--samples", 4, "--max-new-tokens", 1), "samples: 5 -> 4"),
        ((*SAMPLED, "trainer.seed=7"), "seed: 0 -> 7"),
        ((*SAMPLED, "rewards.0.case_sensitive=true"), "rewards"),
    ):
        assert evaluate(*words, "--output", tmp_path / "out") == 2
        assert name in capsys.readouterr().err
    fake_runs.rows.write_text(fake_runs.rows.read_text().replace("letter 3", "letter 4"))
    assert evaluate(*SAMPLED, "--output", tmp_path / "out") == 2
    assert "prompts" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    assert evaluate(*SAMPLED, "--output", tmp_path / "other") == 2
    assert "holds something else" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--samples", 2, "--temperature", 0), "2 greedy completions of a prompt are all the same"),
        (("--temperature", -1), "--temperature is -1.0"),
        (("--limit", 0), "--limit is 0"),
        (("--samples", 5000), "1 to 4096"),
        (("--blank-images",), "no prompt has an image"),
        (("data.eval=null",), "there is nothing to evaluate on"),
    ],
)
def test_what_cannot_be_done_is_said(evaluate, capsys, words, message):
    assert evaluate(*words) == 2
    assert message in capsys.readouterr().err


def test_without_model_and_config_the_model_is_missed(capsys):
    assert main(["eval", "data.eval.name=table"]) == 2
    err = capsys.readouterr().err
    assert "model.path is required" in err and "algorithm" not in err and "data.train" not in err


def test_a_run_that_was_started_elsewhere_says_which_key_and_where(fake_runs, tmp_path, monkeypatch, capsys):
    data = {"train": {"name": "table", "path": str(fake_runs.rows)}, "eval": {"name": "table", "path": "rows.jsonl"}}
    monkeypatch.chdir(fake_runs.folder)
    assert fake_runs.train(fake_runs.config(data=data, trainer={"steps": 1})) == 0
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    capsys.readouterr()
    assert main(["eval", "--model", str(fake_runs.folder / "run")]) == 2
    error = capsys.readouterr().err
    assert "data.eval.path: rows.jsonl" in error and f"cd {fake_runs.folder}" in error and "Traceback" not in error
