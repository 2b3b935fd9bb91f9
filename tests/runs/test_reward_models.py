"""Runs that train a reward model with the fake engine: what they write and show, a kill, replay, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.commands.cli import main
from mmrl.rollout.records import read_lines, recorded_evaluations
from mmrl.runs.reader import Run
from mmrl.types import PreUpdateStatistics, TrainingRow
from mmrl.types.update import UpdateResult
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.groups import group_document
from mmrl.viewer.steps import evaluations_document, step_document
from tests.faults.comparison import metrics
from tests.faults.fake_engine import FakeEngine
from tests.faults.runs import Runs, fake, outcome, rollouts
from tests.runs.test_comparisons import config, written

GRADED = [
    {
        "id": f"g{n}",
        "prompt": "one plus " * (n + 1),
        "candidates": [f"it is {n}", f"maybe {n}", "no"][: 2 + n % 2],
        "scores": [2.0, 1.0, 0.0][: 2 + n % 2],
        "kind": ["easy", "hard"][n % 3 == 0],
    }
    for n in range(8)
]
REWARD: dict[str, Any] = {"algorithm": {"name": "bradley_terry"}}


def reward_config(runs: Runs, name: str = "run", rows: Any = GRADED, **sections: Any) -> Path:
    data = {"eval": {**written(runs, rows), "category": "kind"}}
    trainer = {"eval_every": 2, **sections.pop("trainer", {})}
    return config(runs, rows, name, **{**REWARD, "data": data, "trainer": trainer, **sections})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Iterator[Path]:
    """A run of four steps with evaluations, for tests that only read it."""
    with fake(tmp_path_factory.mktemp("reward"), models("qwen2")) as runs:
        assert runs.train(reward_config(runs)) == 0
        yield runs.folder / "run"


def test_it_learns_an_order_and_logs_no_number_of_a_policy(finished: Path) -> None:
    lines = metrics(finished)
    assert lines[4]["eval/loss"] < lines[0]["eval/loss"]
    for name in ("accuracy", "margin", "score_chosen", "score_rejected", "length_chosen", "length_rejected"):
        assert f"preference/{name}" in lines[4] and f"eval/{name}" in lines[4]
    assert lines[4]["eval/margin"] == pytest.approx(lines[4]["eval/score_chosen"] - lines[4]["eval/score_rejected"])
    own = [lines[4][f"eval/accuracy/{name}"] for name in ("easy", "hard")]
    assert lines[4]["eval/macro_accuracy"] == pytest.approx(np.mean(own))
    wrong = ("entropy", "logprob", "mismatch", "reward/", "group/")
    assert not [name for line in lines.values() for name in line if any(word in name for word in wrong)]


def test_a_record_has_the_models_score_of_each_candidate(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The metrics of a step are means of what is on record, over each prompt's pairs and then over prompts."""
    for step in (1, 4):
        margins, groups = [], groupby(rollouts(finished, step), key=lambda record: record["group"])
        for _, members in groups:
            found = [(record["rewards"]["score"], record["final_value"]) for record in members]
            pairs = [a - b for one, a in found for other, b in found if one > other]
            margins.append(np.mean(pairs))
        assert metrics(finished)[step]["preference/margin"] == pytest.approx(np.mean(margins), rel=1e-5)
    for record in rollouts(finished, 4):
        assert record["update_final_values"] == [pytest.approx(record["final_value"], abs=1e-7)]
        assert record["learner_logprobs"] == [] and record["reference_logprobs"] == []
    assert main(["rollouts", str(finished), "--step", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("model's score") == len(rollouts(finished, 4)) and "log-prob" not in out
    assert out.count(", margin ") == 3
    evaluated = list(read_lines(recorded_evaluations(finished)[4]))
    assert len(evaluated) == 20 and all(isinstance(record["final_value"], float) for record in evaluated)


def test_the_checkpoint_has_a_reward_model_alone(finished: Path) -> None:
    checkpoint = Run(finished).checkpoints[-1]
    assert checkpoint.role == "reward" and checkpoint.has_optimizer
    assert checkpoint.model == checkpoint.path / "reward" / "model" and checkpoint.model.is_dir()
    assert not (checkpoint.path / "model").exists()
    assert {path.name for path in checkpoint.path.iterdir()} == {"manifest.json", "reward", "state"}
    checkpoint.verify()


def test_it_is_replayed_without_a_difference_and_with_another_loss(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(finished)]) == 0
    assert "log-probs   0" in (out := capsys.readouterr().out) and "note:" not in out
    assert main(["replay", str(finished), "algorithm.margin=true"]) == 0
    assert "loss/total" in capsys.readouterr().out


def test_the_page_shows_which_answer_the_model_prefers(finished: Path) -> None:
    run = ViewedRun(finished)
    document = step_document(run, "step", 4)
    values = document["rows"]["value"]
    assert "log_ratio" not in document["rows"] and len(values) == len(rollouts(finished, 4))
    for group in document["groups"]:
        own = [value for value, of in zip(values, document["rows"]["group"], strict=True) if of == group["group"]]
        pair = group["pair"]
        assert pair["measure"] == "value"
        assert pair["margin"] == pytest.approx(own[pair["chosen"]] - own[pair["rejected"]])
        shown = group_document(run, "step", 4, group["group"])
        assert [member["likelihood"] for member in shown["members"]] == [{"value": value} for value in own]
        assert shown["pair"]["compared"] and shown["pair"]["margin"] == pair["margin"]
    evaluated = evaluations_document(run)
    assert evaluated["compared"] and {prompt["results"]["4"] for prompt in evaluated["prompts"]} <= {0, 0.5, 1}


def test_a_run_that_was_killed_goes_on_as_the_unbroken_one(fake_runs: Runs) -> None:
    several = {"learner": {"minibatches": 2, "epochs": 2}}
    assert fake_runs.train(reward_config(fake_runs, "plain", **several)) == 0
    for point, count in (("fake.update", 7), ("save.state", 3)):
        fake_runs.killed(reward_config(fake_runs, point, **several), point, count)
        assert fake_runs.train(fake_runs.folder / f"{point}.yaml") == 0
        assert outcome(fake_runs.folder / point) == outcome(fake_runs.folder / "plain")
    assert fake_runs.replay(fake_runs.folder / "plain") == 0
    (record, *_) = rollouts(fake_runs.folder / "plain", 4)
    assert len(record["update_final_values"]) == 2  # one for each epoch
    assert record["update_final_values"][0] != record["update_final_values"][1]


def test_a_step_whose_update_came_to_nothing_is_recorded_and_replayed(fake_runs: Runs) -> None:
    path, update, calls = reward_config(fake_runs), FakeEngine.update, list[int]()

    def faulty(engine: FakeEngine, rows: Sequence[TrainingRow]) -> UpdateResult:
        calls.append(len(rows))
        if len(calls) == 2:
            statistics = [PreUpdateStatistics(np.zeros(0, np.float32), np.zeros(0, np.float32)) for _ in rows]
            return UpdateResult.of({}, statistics, fault="a loss that is not finite")
        return update(engine, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "update", faulty)
        assert fake_runs.train(path) == 0
    run = fake_runs.folder / "run"
    assert metrics(run)[2]["policy/skipped_updates"] == 1
    assert all(record["update_final_values"] == [None] and "final_value" not in record for record in rollouts(run, 2))
    assert main(["replay", str(run), "--step", "2"]) == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rewards": [{"name": "exact"}]}, "trains a reward model, which scores answers and writes none"),
    ({"sampler": {"temperature": 0.7}}, "trains a reward model, which scores answers and writes none"),
    ({"reference": {"reset_every": 2}}, "asks for no reference's log-probs"),
    ({"learner": {"routing": "replayed"}}, "are not sampled"),
    ({"algorithm": {"name": "bradley_terry", "centre": -1}}, "centre should be greater than or equal to 0"),
    ({"algorithm": {"name": "bradley_terry", "data": "sampled"}}, "unknown key algorithm.data"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_contradicts_is_refused_by_name(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str], sections: dict[str, Any], message: str
) -> None:
    path = reward_config(fake_runs, **sections)
    assert fake_runs.train(path) in (2, 3) and message in capsys.readouterr().err
    assert main(["check", str(path)]) in (2, 3) and message in capsys.readouterr().err


def test_check_and_the_opening_speak_of_scores(fake_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    path = reward_config(fake_runs, trainer={"steps": 1})
    assert main(["check", str(path)]) == 0
    assert fake_runs.train(path) == 0
    out = capsys.readouterr().out
    assert out.count("learned    comparisons are scored after the last token of the whole conversation") == 2
    assert "comparisons with the model's scores" in out and "step 1/1  pref " in out
    assert f"model      {fake_runs.folder / 'run' / 'checkpoints' / 'step-000001' / 'reward' / 'model'}" in out
    for word in ("log-prob", "temperature", "reference", "samples (", "entropy"):
        assert word not in out
