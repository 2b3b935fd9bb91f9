"""Runs whose sampler is behind by some steps: the schedule decides what is learned, and clocks do not."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import RankLostError, ResourceError
from mmrl.rollout.records import read_lines
from tests.faults import split_engine
from tests.faults.comparison import check_ledger, compare, ledger, metrics
from tests.faults.kill_sweep import SLOW_TOOLS
from tests.faults.runs import REWARDS, Runs, at, events, fake, outcome, records, rollouts, stop

SPLIT = {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}
DAPO = {
    "algorithm": {"name": "dapo", "dynamic_sampling": {"max_rounds": 2, "on_starvation": "skip"}},
    "rewards": [{"name": f"{REWARDS}:early"}],
    "sampler": {"group_size": 2, "max_new_tokens": 8},
}


def full(*values: Any) -> Any:
    """A case of the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)


def slow(*values: Any) -> Any:
    """A case of the slow tier: the others have each of its values."""
    return pytest.param(*values, marks=pytest.mark.slow)


def config(runs: Runs, name: str, lag: int, **sections: Any) -> Path:
    trainer = {"steps": 7, "prompts_per_step": 3, "save_every": 1, "staleness": lag, "run_dir": str(runs.folder / name)}
    trainer |= sections.get("trainer", {})
    return runs.config(name, **{"cluster": SPLIT, **sections, "trainer": trainer})


def versions(run: Path, step: int) -> set[int]:
    return {record["weight_version"] for record in rollouts(run, step)}


@pytest.mark.parametrize("lag", [0, slow(1), 2, full(4)])
def test_each_batch_is_sampled_with_the_version_of_the_schedule(fake_runs: Runs, lag: int) -> None:
    learner = {"lr": 1e-2, "minibatches": 2}
    assert fake_runs.train(config(fake_runs, "run", lag, learner=learner)) == 0
    run = fake_runs.folder / "run"
    found = metrics(run)
    for step in range(1, 8):
        assert versions(run, step) == {2 * max(0, step - 1 - lag)}
        behind = 2 * (step - 1) - 2 * max(0, step - 1 - lag)
        assert (found[step]["staleness/mean"], found[step]["staleness/max"]) == (behind, behind)
    for line in records(run / "metrics.jsonl")[1:]:
        assert 0 <= line["perf/idle_sampler_fraction"] <= 1 and 0 <= line["perf/idle_learner_fraction"] <= 1


def drowsy(monkeypatch: pytest.MonkeyPatch, longest_s: float) -> None:
    """Let sampler, learner and rewards sleep in each call, in each run another time."""
    monkeypatch.setenv(split_engine.SLEEPS, str(longest_s))


SOURCES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl": {"coef": 0.05}}, "learner": {"lr": 1e-2, "minibatches": 2}},
    "dapo": DAPO,
    "episodes": {**SLOW_TOOLS, "algorithm": {"name": "grpo"}, "trainer": {"steps": 4}},
}


@pytest.mark.parametrize(
    ("lag", "name"),
    [(1, "grpo"), full(4, "dapo"), full(2, "episodes"), slow(4, "grpo"), slow(1, "episodes"), slow(2, "dapo")],
)
def test_two_runs_with_other_clocks_write_the_same_files(
    fake_runs: Runs, monkeypatch: pytest.MonkeyPatch, lag: int, name: str
) -> None:
    sections = {**SOURCES[name], "rewards": [{"name": f"{REWARDS}:drowsy_{'early' if name == 'dapo' else 'letters'}"}]}
    if name == "episodes":
        sections["environment"] = {
            **SLOW_TOOLS["environment"],
            "longest_s": 0.1,
            "weights": {"environment": 0, "reached": 0},
        }
    for run, longest_s in (("one", 0.02), ("two", 0.002), ("three", 0.0)):
        drowsy(monkeypatch, longest_s)
        assert fake_runs.train(config(fake_runs, run, lag, **sections)) == 0
        assert not check_ledger(fake_runs.folder / run)
    one, two, three = (outcome(fake_runs.folder / run) for run in ("one", "two", "three"))
    assert one == two == three
    assert not compare(fake_runs.folder / "one", fake_runs.folder / "two")


@pytest.mark.parametrize(("lag", "name"), [(1, "grpo"), slow(3, "dapo"), slow(1, "dapo"), slow(3, "grpo")])
def test_a_run_that_is_cut_anywhere_equals_one_that_was_left_alone(fake_runs: Runs, lag: int, name: str) -> None:
    """Killed while a batch is sampled, published, learned from and saved; the checkpoint's batches are learned from."""
    sections = {**SOURCES[name], "trainer": {"save_every": 2, "steps": 6}}
    assert fake_runs.train(config(fake_runs, "whole", lag, **sections)) == 0
    broken = config(fake_runs, "broken", lag, **sections)
    points = ("fake.sample", 8), ("fake.publish", 4), ("fake.update", 2), ("checkpoint.filled", 1), ("fake.sample", 3)
    for point, count in points:
        fake_runs.killed(broken, point, count)
    assert fake_runs.train(broken) == 0
    assert not compare(fake_runs.folder / "broken", fake_runs.folder / "whole")
    assert not check_ledger(fake_runs.folder / "broken")


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("fake.sample", 11),
        ("fake.update", 3),
        slow("fake.sample", 2),
        slow("fake.publish", 3),
        full("checkpoint.filled", 2),
    ],
)
def test_a_signal_at_any_moment_saves_a_whole_step_with_its_batches(fake_runs: Runs, point: str, count: int) -> None:
    sections = {"trainer": {"save_every": 4, "steps": 6}}
    assert fake_runs.train(config(fake_runs, "whole", 2, **sections)) == 0
    broken = config(fake_runs, "broken", 2, **sections)
    with at(point, count, stop):
        assert fake_runs.train(broken) == 10
    newest = max((fake_runs.folder / "broken" / "checkpoints").glob("step-*"))
    step = int(newest.name.removeprefix("step-"))
    batches = [int(path.stem.removeprefix("batch-")) for path in sorted(newest.glob("state/batch-*.jsonl"))]
    assert batches == list(range(step + 1, min(step + 2, 6) + 1)) if step else batches in ([], [1, 2])
    assert fake_runs.train(broken) == 0
    assert not compare(fake_runs.folder / "broken", fake_runs.folder / "whole", same_checkpoints=False)


@pytest.mark.parametrize(("lag", "count"), [(2, 8), full(0, 2), slow(2, 2), slow(0, 8)])
def test_lost_ranks_that_sample_start_again_and_their_batch_is_sampled_again(
    fake_runs: Runs, lag: int, count: int
) -> None:
    sections = {**DAPO, "data": evaluated(fake_runs), "trainer": {"eval_every": 2}}
    assert fake_runs.train(config(fake_runs, "whole", lag, **sections)) == 0
    lossy = config(fake_runs, "lossy", lag, **sections)
    with at("fake.sample", count, split_engine.lose), at("fake.sample", count + 9, split_engine.lose):
        assert fake_runs.train(lossy) == 0
    told = events(fake_runs.folder / "lossy", "restart")
    assert [each["restarts_left"] for each in told] == [2, 1]
    assert not compare(fake_runs.folder / "lossy", fake_runs.folder / "whole")
    assert len(records(fake_runs.folder / "lossy" / "attempts.jsonl")) == len(
        records(fake_runs.folder / "whole" / "attempts.jsonl")
    )


def test_ranks_that_are_lost_too_often_end_the_run(fake_runs: Runs) -> None:
    lossy = config(fake_runs, "lossy", 1, trainer={"max_restarts": 1})
    with at("fake.sample", 2, split_engine.lose), at("fake.sample", 9, split_engine.lose):
        assert fake_runs.train(lossy) == 5


def evaluated(runs: Runs) -> dict[str, Any]:
    """A section ``data`` with an evaluation on the training rows."""
    return {name: {"name": "table", "path": str(runs.rows)} for name in ("train", "eval")}


@pytest.mark.parametrize("lag", [1, full(3)])
def test_evaluations_and_checkpoints_find_the_sampler_at_rest(fake_runs: Runs, lag: int) -> None:
    """The engine refuses two that sample. An evaluation has the weights of its step, which no batch has."""
    sections = {"data": evaluated(fake_runs), "trainer": {"eval_every": 1, "save_every": 2}}
    assert fake_runs.train(config(fake_runs, "run", lag, **sections)) == 0
    run = fake_runs.folder / "run"
    for step in range(8):
        lines = read_lines(run / "evaluations" / f"step-{step:06d}.parquet")
        assert {line["weight_version"] for line in lines} == {step}
    assert all(versions(run, step) == {max(0, step - 1 - lag)} for step in range(1, 8))


def test_an_error_while_a_batch_is_sampled_ends_the_run_at_its_step(fake_runs: Runs) -> None:
    """Steps before it are learned; a checkpoint that would hold the batch is not written."""
    sections: dict[str, Any] = {"trainer": {"save_every": 1, "steps": 6}}
    broken = config(fake_runs, "broken", 1, **sections)

    def fail() -> None:
        raise ResourceError("the sampler breaks")

    with at("fake.sample", 8, fail):  # in batch 3
        assert fake_runs.train(broken) == 5
    run = fake_runs.folder / "broken"
    assert max(metrics(run)) == 2
    assert sorted(each.name for each in (run / "checkpoints").glob("step-*")) == ["step-000000", "step-000001"]
    assert fake_runs.train(broken) == 0
    assert fake_runs.train(config(fake_runs, "whole", 1, **sections)) == 0
    assert not compare(run, fake_runs.folder / "whole")


def test_no_prompt_is_lost_or_repeated_and_a_slow_one_is_trained_on(
    fake_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt takes a hundred times as long as the others, in each epoch."""
    before = split_engine.TableSampler._group

    def slow(self: Any, request: Any) -> Any:
        time.sleep(0.2 if request.prompt.id == "rows/3" else 0.002)
        return before(self, request)

    monkeypatch.setattr(split_engine.TableSampler, "_group", slow)
    assert fake_runs.train(config(fake_runs, "run", 2, trainer={"steps": 8, "save_every": 3})) == 0
    steps = [rollouts(fake_runs.folder / "run", step) for step in range(1, 9)]
    found = [(each["epoch"], each["prompt_id"]) for step in steps for each in step]
    drawn = list(dict.fromkeys(found))
    assert len(found) == 4 * len(drawn) and len(drawn) == 24  # groups of four, and each prompt once in an epoch
    assert sorted(drawn) == sorted((epoch, f"rows/{row}") for epoch in range(3) for row in range(8))
    assert {(epoch, "rows/3") for epoch in range(3)} <= set(drawn)


def test_a_run_with_another_lag_is_refused_and_one_that_is_given_more_steps_begins_there_anew(fake_runs: Runs) -> None:
    assert fake_runs.train(config(fake_runs, "run", 2, trainer={"steps": 3})) == 0
    assert fake_runs.train(config(fake_runs, "run", 1, trainer={"steps": 8})) == 2
    assert fake_runs.train(config(fake_runs, "run", 2, trainer={"steps": 8})) == 0
    run = fake_runs.folder / "run"
    assert [versions(run, step) for step in range(1, 9)] == [{0}, {0}, {0}, {3}, {3}, {3}, {4}, {5}]


def test_a_fork_takes_the_batches_of_its_checkpoint_along(fake_runs: Runs) -> None:
    first, fork = config(fake_runs, "first", 2), config(fake_runs, "fork", 2)
    assert fake_runs.train(first) == 0
    assert fake_runs.train(fork, "--resume", fake_runs.folder / "first" / "checkpoints" / "step-000005") == 0
    fork, first = fake_runs.folder / "fork", fake_runs.folder / "first"
    assert metrics(fork) == metrics(first) and ledger(fork) == ledger(first)
    assert [rollouts(fork, step) for step in (6, 7)] == [rollouts(first, step) for step in (6, 7)]


@pytest.mark.full
def test_a_run_that_ends_by_its_metric_has_the_batches_that_come_next(fake_runs: Runs) -> None:
    sections = {"save_every": 9, "stop_when": "lr > 0", "steps": 6}
    assert fake_runs.train(config(fake_runs, "run", 2, trainer=sections)) == 0
    state = fake_runs.folder / "run" / "checkpoints" / "step-000001" / "state"
    assert sorted(path.name for path in state.glob("batch-*")) == ["batch-000002.jsonl", "batch-000003.jsonl"]


@pytest.mark.parametrize(("lag", "expected"), [(1, [1, 2, 4, 5]), full(0, [1, 2, 5, 6]), full(4, [1, 2, 3, 3])])
def test_a_fork_with_another_lag_learns_from_the_batches_that_are_there(
    fake_runs: Runs, lag: int, expected: list[int]
) -> None:
    assert fake_runs.train(config(fake_runs, "first", 2, trainer={"keep_checkpoints": 9})) == 0
    words = ["--resume", fake_runs.folder / "first" / "checkpoints" / "step-000003"]
    words += ["--allow-change", "trainer.staleness"]
    assert fake_runs.train(config(fake_runs, "fork", lag), *words) == 0
    assert [versions(fake_runs.folder / "fork", step) for step in range(4, 8)] == [{each} for each in expected]


def test_batches_of_older_weights_are_no_mismatch_in_a_run_that_goes_on_without_a_lag(fake_runs: Runs) -> None:
    """Where ranks take turns, and with ranks of their own. What is sampled from then on is compared."""
    first = config(fake_runs, "first", 2, trainer={"keep_checkpoints": 9}, learner={"lr": 1e-2})
    assert fake_runs.train(first) == 0
    words = ["--resume", fake_runs.folder / "first" / "checkpoints" / "step-000003"]
    words += ["--allow-change", "trainer.staleness"]
    for name, cluster in (("together", {"name": "local"}), ("apart", SPLIT)):
        assert fake_runs.train(config(fake_runs, name, 0, cluster=cluster, learner={"lr": 1e-2}), *words) == 0
        found, run = metrics(fake_runs.folder / name), fake_runs.folder / name
        assert [versions(run, step) for step in (4, 5, 6, 7)] == [{1}, {2}, {5}, {6}] and not events(run, "mismatch")
        assert [found[step].get("staleness/max") for step in (4, 5)] == [2, 2]
        compared = ["mismatch/logprob_abs_mean" in found[step] for step in (4, 5, 6, 7)]
        assert compared == [False, False, True, True]


@pytest.mark.full
def test_a_fork_takes_the_images_of_its_batches_along(models: Any, picture: Any, tmp_path: Path) -> None:
    """Those of prompts; the folder of the run that it begins from is not needed any more."""
    rows = []
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(picture(56, 56, number).data)
        rows.append({"id": f"r{number}", "prompt": "<image>which?", "images": [f"{number}.png"], "answer": "1"})
    with fake(tmp_path, models("qwen2_5_vl")) as runs:
        runs.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert runs.train(config(runs, "first", 2, trainer={"keep_checkpoints": 9})) == 0
        newest = runs.folder / "first" / "checkpoints" / "step-000004"
        lines = [line for path in newest.glob("state/batch-*") for line in path.read_text().splitlines()[1:]]
        hashes = {image["hash"] for line in lines for image in json.loads(line)["images"]}
        assert len(hashes) > 3
        assert runs.train(config(runs, "fork", 2), "--resume", newest) == 0
        assert hashes <= {path.stem for path in (runs.folder / "fork" / "media").iterdir()}
        assert [rollouts(runs.folder / "fork", step) for step in (5, 6, 7)] == [
            rollouts(runs.folder / "first", step) for step in (5, 6, 7)
        ]


@pytest.mark.parametrize("lag", [slow(1), full(3)])
def test_rows_that_are_read_as_they_are_reached_count_as_in_a_run_that_was_left_alone(
    fake_runs: Runs, lag: int
) -> None:
    """Some cannot be used; the thread reaches them before the step that a checkpoint is of."""
    lines = fake_runs.rows.read_text().splitlines()
    long = json.dumps({"id": "long", "prompt": "one plus " * 400, "answer": "0"})
    fake_runs.rows.write_text(
        "\n".join([*lines[:3], long, *lines[3:6], long.replace("long", "two"), *lines[6:]]) + "\n"
    )
    data = {"train": {"name": "table", "path": str(fake_runs.rows)}, "scan_rows": 1, "max_bad_rows": 0.9}
    sections = {"data": {**data, "max_prompt_tokens": 200}, "trainer": {"save_every": 2, "steps": 8}}
    assert fake_runs.train(config(fake_runs, "whole", lag, **sections)) == 0
    broken = config(fake_runs, "broken", lag, **sections)
    for point, count in (("fake.sample", 14), ("fake.update", 3), ("fake.sample", 5)):
        fake_runs.killed(broken, point, count)
    with at("fake.update", 2, stop):
        assert fake_runs.train(broken) == 10
    assert fake_runs.train(broken) == 0
    assert not compare(fake_runs.folder / "broken", fake_runs.folder / "whole", same_checkpoints=False)


def test_a_run_that_is_shorter_than_its_lag_samples_no_batch_too_many(fake_runs: Runs) -> None:
    assert fake_runs.train(config(fake_runs, "run", 4, trainer={"steps": 2})) == 0
    state = json.loads((fake_runs.folder / "run" / "checkpoints" / "step-000002" / "state" / "run.json").read_text())
    assert state["trainer"]["consumed_prompts"] == 6
    assert versions(fake_runs.folder / "run", 2) == {0}


@pytest.mark.full
def test_a_batch_that_starves_ends_the_run_at_its_step_and_its_groups_are_recorded(fake_runs: Runs) -> None:
    path = fake_runs.folder / "flat.py"
    path.write_text("def flat(rollouts):\n    return [0.0] * len(rollouts)\n")
    algorithm = {"name": "dapo", "dynamic_sampling": {"max_rounds": 1, "on_starvation": "stop"}}
    sections = {**DAPO, "algorithm": algorithm, "rewards": [{"name": f"{path}:flat"}]}
    assert fake_runs.train(config(fake_runs, "run", 2, **sections)) == 6
    assert len(rollouts(fake_runs.folder / "run", 1)) == 12


@pytest.mark.parametrize(("lag", "name"), [(1, "grpo"), full(3, "dapo")])
def test_a_run_whose_learner_is_lost_goes_on_from_the_batches_of_its_checkpoint(
    fake_runs: Runs, lag: int, name: str
) -> None:
    """In the same process: the thread of the attempt before has ended, with what it used."""

    def lose() -> None:
        raise RankLostError("rank 0 of those that learn was lost")

    sections = {**SOURCES[name], "trainer": {"save_every": 2}}
    assert fake_runs.train(config(fake_runs, "whole", lag, **sections)) == 0
    lossy = config(fake_runs, "lossy", lag, **sections)
    with at("fake.update", 4, lose), at("fake.publish", 7, lose):
        assert fake_runs.train(lossy) == 0
    run = fake_runs.folder / "lossy"
    assert [each["restarts_left"] for each in events(run, "restart")] == [2, 1]
    assert not compare(run, fake_runs.folder / "whole") and not check_ledger(run)
    assert not [each for each in threading.enumerate() if each.name in ("mmrl-sampling", "mmrl-prompts")]
