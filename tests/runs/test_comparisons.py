"""Runs on the dataset's comparisons with the fake engine: rows that are left out, what contradicts, and replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.commands.cli import main
from tests.faults.comparison import metrics
from tests.faults.runs import Runs, events, outcome

PAIRS = [{"id": f"p{n}", "prompt": "one plus " * (n + 1), "chosen": f"it is {n}", "rejected": "no"} for n in range(8)]
USELESS = [
    {"id": "e0", "prompt": "one", "chosen": "yes", "rejected": "yes"},
    {"id": "e1", "prompt": "one", "chosen": "no", "rejected": "no"},
    {"id": "t0", "prompt": "one", "chosen": "yes", "rejected": "no", "margin": 0.0},
    {"id": "l0", "prompt": "one", "chosen": "yes " * 60, "rejected": "no"},
]
JUDGED = [
    {"id": f"k{n}", "prompt": "one plus " * (n + 1), "completion": f"it is {n}", "label": n % 3 > 0} for n in range(8)
]


def written(runs: Runs, rows: list[dict[str, Any]], **columns: Any) -> dict[str, Any]:
    path = runs.folder / "compared.jsonl"
    path.write_text("".join(json.dumps({**columns, **row}) + "\n" for row in rows))
    return {"name": "table", "path": str(path)}


def config(runs: Runs, rows: list[dict[str, Any]], name: str = "run", **sections: Any) -> Path:
    data = {"train": written(runs, rows), **sections.pop("data", {})}
    usual = {"algorithm": {"name": "dpo"}, "rewards": [], "sampler": {"max_new_tokens": 24}}
    return runs.config(name, data=data, **{**usual, **sections})


def left_out(run: Path) -> list[tuple[float, ...]]:
    """Equal pairs, ties and too long rows of each step."""
    lines = [line for step, line in sorted(metrics(run).items()) if step]
    return [tuple(line[f"data/{name}"] for name in ("equal_pairs", "ties", "overlong")) for line in lines]


def with_margins(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"margin": 1.0, **row} for row in rows]


def test_rows_that_are_left_out_are_counted_in_every_step(fake_runs: Runs) -> None:
    assert fake_runs.train(config(fake_runs, with_margins(PAIRS + USELESS))) == 0
    assert left_out(fake_runs.folder / "run") == [(2, 1, 1)] * 4
    assert len(events(fake_runs.folder / "run", "dropped")) == 4
    assert fake_runs.replay(fake_runs.folder / "run") == 0


def test_a_run_that_measures_rows_as_it_reaches_them_counts_those_it_has_reached_also_after_a_kill(
    fake_runs: Runs,
) -> None:
    ahead = {"data": {"scan_rows": 4, "max_images": 1}, "trainer": {"steps": 5}}
    rows = with_margins(PAIRS + USELESS)
    assert fake_runs.train(config(fake_runs, rows, "plain", **ahead)) == 0
    counts = left_out(fake_runs.folder / "plain")
    assert counts == sorted(counts) and counts[0] != counts[-1] and sum(counts[-1]) >= 4
    fake_runs.killed(config(fake_runs, rows, **ahead), "fake.update", 4)
    assert fake_runs.train(config(fake_runs, rows, **ahead)) == 0
    assert outcome(fake_runs.folder / "run") == outcome(fake_runs.folder / "plain")


def test_a_run_on_verdicts_is_replayed_without_a_difference(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record has the log-probs of prompts with other rows' completions."""
    kto = config(fake_runs, JUDGED, algorithm={"name": "kto"}, data={"eval": written(fake_runs, JUDGED)})
    assert fake_runs.train(kto) == 0
    run = fake_runs.folder / "run"
    line = metrics(run)[4]
    assert line["preference/z0"] > 0
    assert line["preference/margin"] == pytest.approx(
        line["preference/reward_chosen"] - line["preference/reward_rejected"]
    )
    capsys.readouterr()
    assert fake_runs.replay(run) == 0
    assert "not on record" not in (out := capsys.readouterr().out) and "no record of" not in out
    assert main(["replay", str(run), "algorithm.beta=0.3"]) == 0
    out = capsys.readouterr().out
    assert "loss/total" in out and "preference/margin" in out


@pytest.mark.parametrize(
    ("rows", "sections", "message"),
    [
        ([{**row, "label": True} for row in JUDGED], {"algorithm": {"name": "kto"}}, "every completion is desirable"),
        (
            [{**row, "label": False} for row in JUDGED],
            {"algorithm": {"name": "kto"}},
            "every completion is undesirable",
        ),
        (JUDGED, {"algorithm": {"name": "kto"}, "learner": {"minibatches": 2}}, "2 updates per batch"),
        (PAIRS, {"rewards": [{"name": "exact"}]}, "nothing is sampled that rewards could score"),
        (PAIRS, {"sampler": {"temperature": 0.7}}, "comparisons are learned at temperature 1"),
        (
            [{"prompt": "one", "answer": "two", "label": n > 1} for n in range(4)],
            {"algorithm": {"name": "kto"}},
            "data.train.desirable: label and data.train.demonstration: answer",
        ),
    ],
)
def test_what_contradicts_is_refused_by_name(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str], rows: Any, sections: Any, message: str
) -> None:
    path = config(fake_runs, rows, **sections)
    assert fake_runs.train(path) in (2, 3) and message in capsys.readouterr().err
    assert main(["check", str(path)]) in (2, 3) and message in capsys.readouterr().err


def test_rows_without_an_answer_that_no_reward_scores_are_told_before_anything_is_sampled(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = {"algorithm": {"name": "dpo", "data": "sampled"}, "rewards": [{"name": "exact"}], "trainer": {"steps": 1}}
    assert fake_runs.train(config(fake_runs, PAIRS, **sampled)) == 0
    out = capsys.readouterr().out
    started = out.partition("\nstep")[0]
    assert "none of them scores made-up answers to " in started and "which has no reference answer" in started
    answered = [{**row, "answer": "2"} for row in PAIRS]
    assert fake_runs.train(config(fake_runs, answered, "answered", **sampled)) == 0
    assert "made-up answers" not in capsys.readouterr().out


COUNTING = """
from mmrl.interfaces import Finding, Monitor

class Counting(Monitor):
    def measure(self, record):
        return {"given": len(record.given), "sampled": len(record.groups), "scores": sum(
            float(group.scored.rewards.sum()) for group in record.given)}

    def look(self, step):
        given = step.measured("given")
        return [] if given is None else [Finding(given / 3, "there are rows", "none", {"given": given})]
"""


def test_monitors_see_what_a_step_took_from_its_rows_also_of_a_record_and_after_a_kill(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fake_runs.folder / "counting.py"
    path.write_text(COUNTING)
    monitors = [{"name": f"{path}:Counting"}, {"name": "length_bias"}]
    plain, run = fake_runs.folder / "plain", fake_runs.folder / "run"
    assert fake_runs.train(config(fake_runs, PAIRS, "plain", monitors=monitors)) == 0
    line = metrics(plain)[2]
    assert [line[f"monitor/Counting/{name}"] for name in ("given", "sampled", "scores")] == [3, 0, 3]
    assert line["monitor/length_bias/pairs_longer"] + line["monitor/length_bias/pairs_shorter"] > 0
    told = [(event["step"], event["monitor"], event["message"]) for event in events(plain, "alarm")]
    assert [each[:2] for each in told] == [(3, "Counting")]
    capsys.readouterr()
    assert main(["monitor", str(plain), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["alarms"]
    assert [(each["step"], each["monitor"], each["message"]) for each in found] == told
    fake_runs.killed(config(fake_runs, PAIRS, monitors=monitors), "checkpoint.renamed", 3)
    assert fake_runs.train(config(fake_runs, PAIRS, monitors=monitors)) == 0
    assert outcome(run) == outcome(plain)
