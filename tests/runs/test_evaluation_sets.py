"""Runs that are evaluated on several sets: their curves, records and best checkpoint, and a kill between two sets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mmrl.commands.cli import main
from mmrl.errors import DataError
from mmrl.rollout.records import evaluation_names, recorded_evaluations
from mmrl.runs.reader import Run, load_run
from tests.faults.runs import REWARDS, Runs, outcome, records, steps

BEST = "eval/late/letters_mean"


@pytest.fixture
def sets(fake_runs: Runs) -> Runs:
    """The runs, with the rows of a second set beside their own."""
    rows = [{"id": f"r{n}", "prompt": "two minus " * (n + 1), "answer": str(n)} for n in range(5)]
    (fake_runs.folder / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return fake_runs


def config(runs: Runs, name: str = "run", **trainer: object) -> Path:
    """A run with a set of eight prompts and one of five, each of which is answered three times."""
    early = {"name": "table", "path": str(runs.rows)}
    late = {"name": "table", "path": str(runs.folder / "late.jsonl"), "samples": 3, "temperature": 0.5}
    data = {"eval": {"early": early, "late": {**late, "max_new_tokens": 4}}}
    return runs.config(name, data=data, trainer={"eval_every": 2, **trainer})


def test_each_set_has_its_curves_its_records_and_its_way_to_sample(
    sets: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sets.train(config(sets, best_metric=BEST)) == 0
    run = load_run(sets.folder / "run")
    for name, metric in {"early": "eval/early/accuracy", "late": BEST}.items():
        assert [*run.metrics.curve(metric)] == [0, 2, 4], name
    assert not [
        name for name in run.metrics if name.startswith("eval/") and name.split("/")[1] not in ("early", "late")
    ]
    assert run.evaluation_names == ["early", "late"] and run.evaluation_steps == [0, 2, 4]
    early, late = ([*run.evaluations(2, name)] for name in ("early", "late"))
    assert len(early) == 8 and len(late) == 5 * 3
    assert max(len(each.rollout.token_ids) for each in late) == 4 < max(len(each.rollout.token_ids) for each in early)
    for name, found in {"early": early, "late": late}.items():
        scores = [each.rewards["letters"] for each in found]
        mean = sum(scores) / len(scores)  # type: ignore[arg-type]
        assert run.metrics.curve(f"eval/{name}/letters_mean")[2] == pytest.approx(mean)
    out = capsys.readouterr().out
    assert "3 evaluations of 23 completions (8 of early, 15 of late)" in out
    assert re.search(
        r"step 2/4  reward [\d.]+  (eval early [\d.]+  )?acc early [\d.]+  (eval late [\d.]+  )?acc late", out
    )
    assert "outcome" in out and f"{BEST}: " in out and "eval/early/" in out.split("outcome")[1]
    assert "--on NAME" in out


def test_a_reader_names_one_of_several_sets(sets: Runs) -> None:
    assert sets.train(config(sets)) == 0
    run = load_run(sets.folder / "run")
    for wanted, what in ((None, "there are several evaluation sets"), ("lat", "there is no evaluation set 'lat'")):
        with pytest.raises(DataError, match=what) as caught:
            run.evaluations(2, wanted)
        assert caught.value.possible == "early, late"
    with pytest.raises(DataError, match="there is no evaluation of late with blank images after step 2"):
        run.evaluations(2, "late", blank=True)
    with pytest.raises(DataError, match="there is no evaluation of late after step 3") as caught:
        run.evaluations(3, "late")
    assert caught.value.possible == "0, 2, 4"
    unnamed = Run(sets.folder / "nothing")
    with pytest.raises(DataError, match=r"(?s)no evaluation set 'late'.*without a name.*leave the name out"):
        unnamed.evaluations(2, "late")
    for place in ("evaluations", "evaluations/late"):  # a run that began without names
        (unnamed.path / place).mkdir(parents=True)
        (unnamed.path / place / "step-000002.parquet").touch()
    with pytest.raises(DataError, match="'', late"):
        unnamed.evaluations(2)


@pytest.mark.parametrize(
    ("point", "count"), [("evaluations.renamed", 3), ("evaluations.begin", 4), ("fake.generate", 6)]
)
def test_a_run_that_is_killed_between_two_sets_goes_on_as_if_it_was_not(sets: Runs, point: str, count: int) -> None:
    """The points lie after the first set of step 2, before the record of its second, and while that is sampled."""
    trainer = {"best_metric": BEST, "keep_checkpoints": 1}
    killed, run = config(sets, **trainer), sets.folder / "run"
    sets.killed(killed, point, count)
    assert "eval/early/accuracy" not in records(run / "metrics.jsonl")[-1]
    assert sets.train(killed) == 0
    assert sets.train(config(sets, "plain", **trainer)) == 0
    plain = sets.folder / "plain"
    assert outcome(run) == outcome(plain) and steps(run) == steps(plain)
    curves = [{s: v[BEST] for s, v in load_run(each).metrics.steps.items() if BEST in v} for each in (run, plain)]
    assert curves[0] == curves[1] and len(curves[0]) == 3
    for name in ("early", "late"):
        files = [{s: f.read_bytes() for s, f in recorded_evaluations(each, name).items()} for each in (run, plain)]
        assert files[0] == files[1] and [*files[0]] == [0, 2, 4]


@pytest.mark.full
def test_the_best_checkpoint_of_the_second_set_is_kept(sets: Runs) -> None:
    assert sets.train(config(sets, best_metric=BEST, best_is="min", keep_checkpoints=1)) == 0
    curve = load_run(sets.folder / "run").metrics.curve(BEST)
    worst = min(curve, key=lambda step: (curve[step], step))
    assert worst != 4 and steps(sets.folder / "run") == ["best", f"step-{worst:06d}", "step-000004"]


@pytest.mark.full
def test_a_run_ends_by_one_of_its_sets(sets: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert sets.train(config(sets, stop_when="eval/late/unscored_fraction <= 0")) == 0
    assert "eval/late/unscored_fraction is 0" in capsys.readouterr().out
    assert max(load_run(sets.folder / "run").metrics.steps) == 0


def test_a_set_that_has_changed_is_told_of_and_stops_nothing(sets: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert sets.train(config(sets)) == 0
    late = sets.folder / "late.jsonl"
    late.write_text(late.read_text().replace("two", "three"))
    capsys.readouterr()
    assert sets.train(config(sets, steps=6), "data.eval.new={name: table, path: " + str(sets.rows) + "}") == 0
    out = capsys.readouterr().out
    assert re.search(r"changed: data\.eval\.late: \w+ -> \w+", out) and "changed: data.eval.early: " not in out
    assert "changed: data.eval.new.name: null -> table" in out
    assert evaluation_names(sets.folder / "run") == ["early", "late", "new"]
    assert [*recorded_evaluations(sets.folder / "run", "new")] == [6]


@pytest.mark.full
def test_steps_that_are_undone_take_the_evaluations_of_all_sets_with_them(sets: Runs) -> None:
    begun, run = config(sets, save_every=0), sets.folder / "run"
    sets.killed(begun, "fake.update", 3)
    assert [*recorded_evaluations(run, "late")] == [0, 2]
    sets.killed(begun, "fake.update", 1)
    undone = run / "undone" / "attempt-000001" / "evaluations"
    assert [*recorded_evaluations(run, "late")] == [0]
    assert {each.relative_to(undone).as_posix() for each in undone.rglob("*.parquet")} == {
        "early/step-000002.parquet",
        "late/step-000002.parquet",
    }


@pytest.mark.full
def test_trackers_show_rollouts_and_histograms_of_each_set(sets: Runs) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert sets.train(config(sets, tracked_rollouts=2), "trackers=[{name: tensorboard}]") == 0
    written = EventAccumulator(str(sets.folder / "run" / "tensorboard"))
    written.Reload()
    tags = written.Tags()
    assert {"histogram/eval/early/reward", "histogram/eval/late/length"} <= set(tags["histograms"])
    assert set(tags["tensors"]) == {f"rollout_{number}/text_summary" for number in (1, 2, 3, 4)}


@pytest.mark.full
def test_a_set_has_its_own_judge(sets: Runs) -> None:
    rewards = f"rewards=[{{name: '{REWARDS}:letters'}}, {{name: '{REWARDS}:early'}}]"
    assert sets.train(config(sets, steps=1), rewards, "data.eval.late.metric=early") == 0
    last = records(sets.folder / "run" / "metrics.jsonl")[-1]
    scores = [each.rewards["early"] for each in load_run(sets.folder / "run").evaluations(1, "late")]
    assert last["eval/late/accuracy"] == pytest.approx(sum(score >= 1 for score in scores) / 15)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "data.eval has 2 sets, and one is evaluated at a time"),
        (("--on", "lat"), "data.eval has no set 'lat'"),
        (("--on", "late", "data.eval={name: table, path: x}"), "data.eval is one dataset, without a name"),
    ],
)
def test_an_evaluation_is_of_one_set(
    sets: Runs, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], what: str
) -> None:
    assert main(["eval", str(config(sets)), *words]) == 2
    error = capsys.readouterr().err
    assert what in error and ("early, late" in error or "leave out --on" in error)


@pytest.mark.full
def test_an_evaluation_of_a_set_samples_it_as_the_run_does(sets: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    begun, same = config(sets, steps=1), "data.eval.late.temperature=1.0"  # the fake policy has one temperature
    assert sets.train(begun, same) == 0
    capsys.readouterr()
    assert main(["eval", str(begun), same, "--on", "late", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["on"] == "late" and found["settings"]["max_new_tokens"] == 4
    assert found["settings"]["samples"] == 3 and found["settings"]["temperature"] == 1.0
    first = records(sets.folder / "run" / "metrics.jsonl")[0]  # of the policy that was not yet trained
    assert found["metrics"]["eval/letters_mean"]["value"] == pytest.approx(first["eval/late/letters_mean"])


def test_the_viewer_and_a_report_show_each_set(sets: Runs) -> None:
    from mmrl.viewer.pages import Pages
    from mmrl.viewer.report import make_report

    assert sets.train(config(sets, steps=2), "data.eval.late.metric=late") == 2  # no reward of that name
    assert sets.train(config(sets, steps=2)) == 0
    folder = sets.folder / "run"
    pages = Pages([folder])
    info = pages.document("run/0")
    assert info["evaluations"] == info["blanks"] == []
    assert info["named"] == {
        "evaluation.early": [0, 2], "blank.early": [], "evaluation.late": [0, 2], "blank.late": []
    }  # fmt: skip
    late = pages.document("run/0/evaluations/late")
    assert late["steps"] == [0, 2] and len(late["prompts"]) == 5
    scores = [each.rewards["letters"] for each in load_run(folder).evaluations(2, "late")]
    means = [sum(scores[at : at + 3]) / 3 for at in range(0, 15, 3)]  # type: ignore[arg-type]
    assert [each["results"]["2"] for each in late["prompts"]] == pytest.approx(means)
    table = pages.document("run/0/evaluation.late/2")
    assert len(table["groups"]) == 5 and len(pages.document("run/0/evaluation.early/2")["groups"]) == 8
    occurrences = pages.document("run/0/prompt", {"id": table["groups"][0]["prompt_id"]})
    assert [each["step"] for each in occurrences if each["kind"] == "evaluation.late"] == [0, 2]
    report = make_report([folder], max_mb=5)
    assert {"run/0/evaluations/late", "run/0/evaluation.late/2", "run/0/evaluation.early/2"} <= report.documents.keys()
