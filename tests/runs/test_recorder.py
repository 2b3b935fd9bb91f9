"""Rollouts that are written while the run goes on: they are on disk in time, and a write that fails ends the run."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path

import pytest

from mmrl.errors import DataError
from mmrl.rollout.records import read_step, recorded_evaluations, recorded_steps
from mmrl.runs.reader import load_run
from tests.faults.fake_engine import FakeEngine
from tests.faults.runs import Runs, at, events, outcome, records, rollouts, steps, stop


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_step_is_written_while_the_next_one_samples_and_before_the_one_after_is(fake_runs: Runs) -> None:
    config, run = fake_runs.config(trainer={"steps": 3, "save_every": 0}), fake_runs.folder / "run"
    sampled, waited, found = threading.Event(), list[bool](), list[list[int]]()
    with (
        at("rollouts.begin", 1, lambda: waited.append(sampled.wait(20))),
        at("fake.generate", 2, sampled.set),
        at("rollouts.begin", 2, lambda: found.append(list(recorded_steps(run)))),
    ):
        assert fake_runs.train(config) == 0
    assert waited == [True] and found == [[1]]
    assert [len(rollouts(run, step)) for step in (1, 2, 3)] == [12] * 3


def test_a_step_is_on_disk_before_its_checkpoint_is_begun(fake_runs: Runs) -> None:
    run, found = fake_runs.folder / "run", list[list[int]]()
    with (
        at("rollouts.begin", 2, lambda: threading.Event().wait(0.2)),
        at("checkpoint.begin", 3, lambda: found.append(list(recorded_steps(run)))),  # the first is that of step 0
    ):
        assert fake_runs.train(fake_runs.config()) == 0
    assert found == [[1, 2]]


@pytest.mark.parametrize("save_every", [1, 0])
def test_a_step_that_cannot_be_written_ends_the_run_which_can_go_on(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str], save_every: int
) -> None:
    """If no checkpoint waits for it, the next step does; it is not taken for a checkpoint that may fail."""
    config, run = fake_runs.config(trainer={"save_every": save_every}), fake_runs.folder / "run"
    with at("rollouts.filled", 2, full):
        assert fake_runs.train(config) == 5
    error = capsys.readouterr().err
    assert "step-000002.parquet" in error and "No space left on device" in error and "Traceback" not in error
    assert not events(run, "checkpoint_failed") and steps(run)[-1] == f"step-00000{save_every}"
    assert list(recorded_steps(run)) == [1] and not list((run / "rollouts").glob(".*"))
    assert fake_runs.train(config) == 0
    assert fake_runs.train(fake_runs.config("plain", trainer={"save_every": save_every})) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_the_last_step_and_one_whose_numbers_stop_the_run_are_on_disk(
    fake_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, count = FakeEngine.update, itertools.count(1)

    def broken(self: FakeEngine, rows: object) -> object:
        if next(count) == 2:
            raise RuntimeError("the update failed")
        return update(self, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeEngine, "update", broken)
    run = fake_runs.folder / "run"
    with at("rollouts.begin", 2, lambda: threading.Event().wait(0.2)):
        assert fake_runs.train(fake_runs.config()) == 1
    assert list(recorded_steps(run)) == [1, 2] and len(rollouts(run, 2)) == 12
    assert not any(record["trained"] for record in rollouts(run, 2))


def test_after_a_signal_the_step_before_is_on_disk(fake_runs: Runs) -> None:
    config, run = fake_runs.config(trainer={"save_every": 0}), fake_runs.folder / "run"
    with at("rollouts.begin", 1, lambda: threading.Event().wait(0.2)), at("fake.generate", 2, stop):
        assert fake_runs.train(config) == 10
    assert list(recorded_steps(run)) == [1] and steps(run)[-1] == "step-000001"


@pytest.mark.parametrize("point", ["rollouts.begin", "rollouts.filled", "rollouts.renamed"])
def test_a_run_that_is_killed_while_it_writes_goes_on_as_if_it_was_not(fake_runs: Runs, point: str) -> None:
    config = fake_runs.config(trainer={"save_every": 2})
    fake_runs.killed(config, point, 3)
    assert [record["step"] for record in records(fake_runs.folder / "run" / "metrics.jsonl")][:3] == [0, 1, 2]
    assert fake_runs.train(config) == 0
    assert fake_runs.train(fake_runs.config("plain", trainer={"save_every": 2})) == 0
    assert outcome(fake_runs.folder / "run") == outcome(fake_runs.folder / "plain")


def test_a_run_of_an_older_version_goes_on_in_columns(fake_runs: Runs) -> None:
    """Its steps stay lines of JSON, and one that is taken again is replaced."""
    config, run = fake_runs.config(trainer={"save_every": 2}), fake_runs.folder / "run"
    fake_runs.killed(config, "fake.update", 4)
    for step, file in recorded_steps(run).items():
        file.rename(run / "rollouts" / f"step-{step:06d}.jsonl")
    (Path(run) / "rollouts" / "step-000003.jsonl").touch()
    assert fake_runs.train(config) == 0
    found = {step: file.suffix for step, file in recorded_steps(run).items()}
    assert found == {1: ".jsonl", 2: ".jsonl", 3: ".parquet", 4: ".parquet"}


def evaluated(fake_runs: Runs, name: str = "run", **trainer: object) -> Path:
    """A config of a run with an evaluation before the first step and after the second and the last."""
    data = {"eval": {"name": "table", "path": str(fake_runs.rows)}}
    return fake_runs.config(name, data=data, trainer={"eval_every": 2, **trainer})


@pytest.mark.parametrize("count", [3, 0])
def test_trackers_show_the_same_prompts_of_each_evaluation(fake_runs: Runs, count: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = evaluated(fake_runs, eval_samples=2, tracked_rollouts=count)
    assert fake_runs.train(config, "trackers=[{name: tensorboard}]") == 0
    written = EventAccumulator(str(fake_runs.folder / "run" / "tensorboard"))
    written.Reload()
    tags = written.Tags()
    assert "eval/accuracy" in tags["scalars"]
    assert set(tags["tensors"]) == {f"rollout_{1 + n}/text_summary" for n in range(count)}
    assert [tag for tag in tags["histograms"] if "eval" in tag] == ["histogram/eval/reward", "histogram/eval/length"][
        :count
    ]
    for number in range(count):
        found = written.Tensors(f"rollout_{1 + number}/text_summary")
        assert [each.step for each in found] == [0, 2, 4]
        prompts = {each.tensor_proto.string_val[0].split(b"[assistant]")[0].split(b"[user]")[1] for each in found}
        assert len(prompts) == 1


def test_an_evaluation_is_recorded_as_a_step_is_and_before_its_metrics(fake_runs: Runs) -> None:
    run, lines = fake_runs.folder / "run", list[int]()
    with (
        at("evaluations.begin", 2, lambda: threading.Event().wait(0.2)),
        at("evaluations.renamed", 2, lambda: lines.append(len(records(run / "metrics.jsonl")))),
    ):
        assert fake_runs.train(evaluated(fake_runs, eval_samples=3)) == 0
    assert lines == [2]  # of steps 0 and 1
    found = load_run(run)
    assert found.evaluation_steps == [0, 2, 4] and list(recorded_evaluations(run, blank=True)) == []
    rollouts = list(found.evaluations(2))
    assert len(rollouts) == 3 * 8 and {each.rollout.index for each in rollouts} == {0, 1, 2}
    scores = [each.rewards["letters"] for each in rollouts]
    assert found.metrics.curve("eval/letters_mean")[2] == pytest.approx(sum(scores) / 24)  # type: ignore[arg-type]
    right = sum(score >= 1 for score in scores)  # type: ignore[operator]
    assert found.metrics.curve("eval/accuracy")[2] == pytest.approx(right / 24) and right not in (0, 24)
    groups = [group.credited for group in read_step(recorded_evaluations(run)[2]).groups]
    assert not any(group.trained for group in groups) and not any(len(x) for group in groups for x in group.logprobs)
    with pytest.raises(DataError, match="there is no evaluation after step 3") as caught:
        found.evaluations(3)
    assert caught.value.possible == "0, 2, 4"
    with pytest.raises(DataError, match="no evaluation with blank images after step 2"):
        found.evaluations(2, blank=True)


@pytest.mark.parametrize("point", ["evaluations.begin", "evaluations.filled", "evaluations.renamed"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_run_that_is_killed_while_it_records_an_evaluation_goes_on_as_if_it_was_not(
    fake_runs: Runs, point: str, count: int
) -> None:
    """It evaluates again what has no line in metrics.jsonl, and writes the same bytes."""
    config = evaluated(fake_runs)
    fake_runs.killed(config, point, count)
    assert fake_runs.train(config) == 0
    assert fake_runs.train(evaluated(fake_runs, "plain")) == 0
    assert list(recorded_evaluations(fake_runs.folder / "run")) == [0, 2, 4]
    assert outcome(fake_runs.folder / "run") == outcome(fake_runs.folder / "plain")


def test_an_evaluation_that_cannot_be_recorded_ends_the_run_which_can_go_on(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = evaluated(fake_runs), fake_runs.folder / "run"
    with at("evaluations.filled", 2, full):
        assert fake_runs.train(config) == 5
    assert "evaluations/step-000002.parquet" in capsys.readouterr().err
    assert list(recorded_evaluations(run)) == [0] and not list((run / "evaluations").glob(".*"))
    assert "eval/accuracy" not in records(run / "metrics.jsonl")[-1]
    assert fake_runs.train(config) == 0
    assert fake_runs.train(evaluated(fake_runs, "plain")) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")
