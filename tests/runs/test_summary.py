"""What a run says before its first step and after its last one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.config.cluster import ClusterConfig
from mmrl.config.load import from_mapping
from mmrl.runs.summary import _files, closing, shown_metrics, waited
from mmrl.step.gather import Comparisons, Given, Rollouts
from mmrl.system.report import Report
from tests.faults.runs import Runs, events, records, steps


def test_a_run_tells_its_folder_model_data_and_arithmetic_before_its_first_step(fake_runs: Runs, capsys):
    config = fake_runs.config(data={"max_prompt_tokens": 50}, trainer={"steps": 2})
    assert fake_runs.train(config) == 0
    run = fake_runs.folder / "run"
    kept = 8 - len(events(run, "dropped"))
    lines = capsys.readouterr().out.splitlines()
    before = lines[: next(i for i, line in enumerate(lines) if line.startswith("step 1/2"))]
    text = "\n".join(before)
    assert before[0] == f"run        {run} (new)"
    assert f"{fake_runs.model} (" in text and "parameters; all are trained" in text
    assert 0 < kept < 8 and f"train      {kept} of 8 rows kept; dropped: longer than data.max_prompt_tokens" in text
    assert "batches    3 prompts x 4 = 12 completions a step; 1 optimizer step of 12" in text
    assert "1 rank in this process, vllm samples, DeepSpeed learns" in text
    assert re.search(r"ready after \d+ s: fake, float32", text)


def test_a_title_that_is_longer_than_its_column_is_apart_from_its_line() -> None:
    report = Report()
    for title in ("eval.ten_1", "eval.charts"):
        report.show(title, ["6 of 6 rows kept", "more"])
    assert report.lines == [
        "eval.ten_1 6 of 6 rows kept",
        "           more",
        "eval.charts  6 of 6 rows kept",
        "           more",
    ]


def test_a_run_tells_how_it_went_and_what_is_next_after_its_last_step(fake_runs: Runs, capsys):
    run = fake_runs.folder / "a run"
    config = fake_runs.config(trainer={"steps": 3, "run_dir": str(run)})
    assert fake_runs.train(config) == 0
    rewards = {line["step"]: line["reward/mean"] for line in records(run / "metrics.jsonl") if line["step"]}
    text = capsys.readouterr().out.partition("\nstep 3/3")[2]
    assert f"{rewards[1]:.3g} at step 1, {rewards[3]:.3g} at step 3; most {max(rewards.values()):.3g} at step" in text
    assert f"policy     {run / 'checkpoints' / 'step-000003' / 'model'}" in text
    assert f"mmrl export '{run}' FOLDER" in text


def test_the_best_value_is_the_least_one_where_less_is_better(fake_runs: Runs, capsys):
    assert fake_runs.train(fake_runs.config(trainer={"steps": 3, "best_metric": "reward/mean", "best_is": "min"})) == 0
    lines = records(fake_runs.folder / "run" / "metrics.jsonl")
    rewards = {line["step"]: line["reward/mean"] for line in lines if line["step"]}
    best = min(rewards, key=rewards.__getitem__)
    assert f"; least {rewards[best]:.3g} at step {best}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "change", "words"),
    [
        ({}, "raise trainer.steps above 4", ["trainer.steps=5"]),
        ({"trainer": {"steps": None, "epochs": 1}}, "raise trainer.epochs", ["trainer.epochs=2"]),
        ({"trainer": {"stop_when": "lr > 0"}}, "change trainer.stop_when", ["trainer.stop_when=null"]),
        (
            {"trainer": {"steps": 1, "stop_when": "lr > 0"}},
            "change trainer.stop_when, raise trainer.steps above 1",
            ["trainer.stop_when=null", "trainer.steps=2"],
        ),
        (
            {"learner": {"schedule": "linear"}},
            "raise trainer.steps above 4, add --allow-change trainer.steps (learner.schedule: linear then ends at the "
            "new last step)",
            ["trainer.steps=5", "--allow-change", "trainer.steps"],
        ),
    ],
)
def test_a_run_says_what_to_change_to_go_on_and_that_change_makes_it_go_on(
    fake_runs: Runs, capsys, sections, change, words
):
    config, run = fake_runs.config(**sections), fake_runs.folder / "run"
    assert fake_runs.train(config) == 0
    assert f" {change}, and the same command goes on\n" in capsys.readouterr().out
    last = steps(run)[-1]
    assert fake_runs.train(config, *words) == 0
    assert steps(run)[-1] > last


def test_a_run_without_the_optimizers_state_promises_no_way_on(fake_runs: Runs, capsys):
    config = fake_runs.config(trainer={"steps": 2, "save_optimizer": "none"})
    for told in ("stops; the run cannot go on (trainer.save_optimizer is none)\n", "It cannot go on without its optim"):
        assert fake_runs.train(config) == 0
        out = capsys.readouterr().out
        assert told in out and "command goes on" not in out and "To go on" not in out


def test_a_finished_run_says_what_to_raise_and_which_changes_have_no_effect(fake_runs: Runs, capsys):
    config = fake_runs.config(trainer={"steps": 2})
    assert fake_runs.train(config) == 0
    capsys.readouterr()
    assert fake_runs.train(config, "learner.lr=0.5") == 0
    out = capsys.readouterr().out
    assert "is finished: it has 2 steps; nothing was done. To go on, raise trainer.steps above 2" in out
    assert "changed, without effect: learner.lr: 0.01 -> 0.5" in out


def test_a_run_that_goes_on_says_from_where(fake_runs: Runs, capsys):
    config = fake_runs.config()
    fake_runs.killed(config, "fake.generate", 3)
    capsys.readouterr()
    assert fake_runs.train(config) == 0
    assert f"run        {fake_runs.folder / 'run'} (goes on after step 2)" in capsys.readouterr().out
    out = fake_runs.folder / "other"
    source = fake_runs.folder / "run" / "checkpoints" / "step-000003"
    assert fake_runs.train(config, "--resume", source, f"trainer.run_dir={out}") == 0
    assert f"run        {out} (begins from {source})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "role", "learned"),
    [
        (Rollouts, "policy", "completions"),
        (Given, "policy", "demonstrations with their log-probs"),
        (Comparisons, "reward", "comparisons with the model's scores"),
    ],
)
def test_a_run_proposes_its_replay_and_names_what_it_has_recorded(source: Any, role: str, learned: str) -> None:
    base = {"model": {"path": "m"}, "data": {"train": {"name": "t"}}, "algorithm": {"name": "a"}}
    folder = Path("run/checkpoints/step-000001/model")
    policy: Any = SimpleNamespace(step=1, model=folder, role=role, has_optimizer=True)
    metrics = {1: {"step": 1, "loss/total": 2.5}}
    lines = closing(from_mapping(base), Path("run"), metrics, policy)
    assert "mmrl replay run" in "\n".join(lines)
    assert any(line.split(str(folder))[0].strip() == {"reward": "model"}.get(role, role) for line in lines)
    assert lines[0] == "done       1 step; run" and "loss/total: 2.5 at step 1" in lines[1]
    setup: Any = SimpleNamespace(step_source=source, trains_reward_model=role == "reward")
    evaluated = from_mapping(
        {**base, "data": {"train": {"name": "t"}, "eval": {"name": "t"}}, "rewards": [{"name": "r"}]}
    )
    assert f"rollouts/ the {learned}" in _files(from_mapping(base), setup)
    assert "evaluations/ the answers" in _files(evaluated, setup)
    assert _files(evaluated, setup).endswith("warnings and errors, if there are any, are in events.jsonl")


def test_the_outcome_of_a_graded_reward_is_its_mean() -> None:
    data = {"train": {"name": "t"}, "eval": {"name": "t"}}
    config = from_mapping(
        {"model": {"path": "m"}, "data": data, "algorithm": {"name": "a"}, "rewards": [{"name": "iou"}]}
    )
    policy: Any = SimpleNamespace(step=2, model=Path("p/model"), role="policy", has_optimizer=True)
    for mean, told in ((0.5, "eval/iou_mean: 0.5 at step 2"), (0.0, "eval/accuracy: 0 at step 2")):
        metrics = {2: {"eval/accuracy": 0.0, "eval/iou_mean": mean}}
        assert told in "\n".join(closing(config, Path("run"), metrics, policy))


def idle(sampler: float, learner: float, seconds: float = 10.0) -> dict[str, float]:
    sides = {"perf/idle_sampler_fraction": sampler, "perf/idle_learner_fraction": learner}
    return {**sides, "perf/step_s": seconds}


def test_a_run_tells_at_its_end_which_ranks_have_waited_and_for_whose_sake() -> None:
    """By time, not by steps; the first step is another."""
    cluster = ClusterConfig(name="ray", sampler_ranks=2, learner_ranks=2)
    steps = {1: idle(0.0, 1.0, 99.0), 2: idle(0.0, 0.5), 3: idle(0.2, 0.1, 30.0)}
    assert waited(steps, cluster, 1) == [
        "ranks that sample waited 15% of the time for weights, those that learn 20% for groups",
    ]
    (line,) = waited({2: idle(0.3, 0.0)}, cluster, 1)
    assert line.endswith("; fewer cluster.sampler_ranks and more cluster.learner_ranks would shorten a step")
    (line,) = waited({2: idle(0.0, 0.3)}, cluster, 1)
    assert line.endswith("; fewer cluster.learner_ranks and more cluster.sampler_ranks would shorten a step")
    aged = {1: {"staleness/mean": 0.0, "staleness/max": 0.0}, 2: {"staleness/mean": 1.5, "staleness/max": 3.0}}
    assert waited(aged, cluster, 1) == ["tokens were 1.5 optimizer steps old when they were learned, 3 at most"]
    assert waited({1: {"perf/step_s": 1.0}, 2: {"perf/step_s": 1.0}}, cluster, 1) == []
    (line,) = waited({2: idle(0.0, 0.3)}, ClusterConfig(name="ray", sampler_ranks=1, learner_ranks=1), 1)
    assert line.endswith("for groups; more cluster.sampler_ranks would shorten a step")
    (line,) = waited({2: {**idle(0.3, 0.7), "staleness/mean": 0.0, "staleness/max": 0.0}}, cluster, 0)
    assert line.endswith("for groups; they work in turns, and trainer.staleness: 1 would have them work at once")
    one = {2: {"staleness/mean": 0.999, "staleness/max": 1.0}}
    assert waited(one, cluster, 1) == ["tokens were 1 optimizer step old when they were learned, 1 at most"]


def test_only_runs_that_have_them_look_for_what_their_ranks_have_waited() -> None:
    plain = {"model": {"path": "m"}, "data": {"train": {"name": "x"}}, "algorithm": {"name": "a"}}
    plain |= {"rewards": [{"name": "r"}]}
    split = {"cluster": {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}}
    assert "perf/idle_sampler_fraction" not in shown_metrics(from_mapping(plain))
    assert "perf/idle_sampler_fraction" in shown_metrics(from_mapping(plain | split))
    assert "staleness/max" in shown_metrics(from_mapping(plain | {"sampler": {"partial": {"engine_steps": 16}}}))
