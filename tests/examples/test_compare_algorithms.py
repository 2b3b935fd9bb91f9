"""The comparison's own parts: what it reads from runs, its table, its picture, and what it does not run again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"
CURVES = {"alpha": {0: 0.5, 10: 0.62, 20: 0.58}, "a<b": {0: 0.5, 20: 0.877}}


def line(compare: ModuleType, step: int, **values: Any) -> dict[str, Any]:
    metrics = dict.fromkeys([*compare.ALWAYS, *compare.METRICS["grpo"]], 1.0)
    return {"step": step, **(metrics if step else {}), **{key.replace("__", "/"): v for key, v in values.items()}}


def test_a_run_is_read_step_by_step(compare):
    lines = [line(compare, 0, eval__accuracy=0.5)]
    lines += [line(compare, step, perf__step_s=seconds) for step, seconds in ((1, 30.0), (2, 2.0), (3, 3.0), (4, 7.0))]
    lines[-1]["eval/accuracy"] = 0.75
    result = compare.result_of("grpo", 4, lines)
    assert result.accuracy == {0: 0.5, 4: 0.75}
    assert result.seconds_per_step == 3.0  # the first step starts everything
    assert result.problems == []


def test_seconds_are_those_of_training_and_evaluation_after_the_first_one(compare):
    lines = [line(compare, 0, eval__accuracy=0.5, perf__eval_s=9.0), line(compare, 1, perf__step_s=3.0)]
    lines += [line(compare, 2, perf__step_s=2.0, perf__eval_s=4.0, eval__accuracy=0.6, perf__memory_bytes_max=7e9)]
    result = compare.result_of("grpo", 2, lines)
    assert result.seconds == {0: 0.0, 2: 9.0} and result.memory_bytes == 7e9


def test_steps_in_which_a_critic_alone_learns_have_no_metrics_of_the_policy(compare):
    lines = [line(compare, 0, eval__accuracy=0.5), line(compare, 1), line(compare, 2), line(compare, 3)]
    for each in lines[1:]:
        each |= dict.fromkeys(compare.CRITIC, 1.0)
    del lines[1]["policy/entropy"]
    assert compare.result_of("ppo", 2, lines, alone=1).problems == []
    assert compare.result_of("ppo", 2, lines).problems == ["missing: policy/entropy"]
    assert compare.pretrained("examples/digits_grpo.yaml") == 0 < compare.pretrained("examples/digits_ppo.yaml")


def test_distillation_has_the_end_of_grpo_as_its_teacher_and_no_rewards(compare, commands, tmp_path):
    (tmp_path / "grpo/checkpoints/step-000004/model").mkdir(parents=True)
    compare.teacher(tmp_path, 4, ["x=1"])
    assert commands[0][0] == "grpo" and "trainer.steps=4" in commands[0]
    lines = [line(compare, 0, eval__accuracy=0.5), line(compare, 1)]
    lines[1] = {key: value for key, value in lines[1].items() if not key.startswith(("reward/", "group/"))}
    assert compare.result_of("opd", 1, lines).problems == []


def test_numbers_that_are_not_finite_or_not_there_are_problems(compare):
    lines = [line(compare, 0, eval__accuracy=0.5), line(compare, 1), line(compare, 2)]
    lines[1]["policy/entropy"] = None
    lines[2]["loss/policy"] = float("inf")
    del lines[2]["policy/clip_fraction_low"], lines[1]["lr"]
    problems = compare.result_of("grpo", 2, lines).problems
    assert problems == ["not finite: loss/policy, policy/entropy", "missing: lr, policy/clip_fraction_low"]


@pytest.mark.parametrize(
    ("steps", "end", "problems"), [(60, 0.61, []), (60, 0.58, ["only +8.0 points in 60 steps"]), (6, 0.4, [])]
)
def test_a_long_run_that_learns_too_little_is_a_problem(compare, steps, end, problems):
    lines = [line(compare, 0, eval__accuracy=0.5), line(compare, steps, eval__accuracy=end)]
    assert compare.result_of("grpo", steps, lines).problems == problems


def test_the_table_has_a_column_for_each_evaluation(compare):
    results = [
        compare.Result("alpha", 20, CURVES["alpha"], 1.234, 40, [], {0: 0.0, 10: 9.6, 20: 30.4}, 1.25e9),
        compare.Result("beta", 20, {0: 0.5, 20: 0.4}, 2.0, 41, ["missing: lr"]),
        compare.Result("gamma", 20, {}, 0.0, 0, ["exit code 2: a | b"]),
    ]
    assert compare.table(results) == (
        "| algorithm | 0 | 10 | 20 | gain | s/step | s | GB | metrics |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| `alpha` | 50.0 | 62.0 | 58.0 | +8.0 | 1.23 | 30 | 1.25 | 40, all finite |\n"
        "| `beta` | 50.0 |  | 40.0 | -10.0 | 2.00 | 0 | 0.00 | missing: lr |\n"
        "| `gamma` |  |  |  | failed | 0.00 | 0 | 0.00 | exit code 2: a / b |"
    )


def test_the_pictures_points_lie_where_its_axes_say(compare):
    svg = ElementTree.fromstring(compare.line_chart(CURVES, "A & B"))
    at = {text.text: (float(text.get("x")), float(text.get("y"))) for text in svg.iter(f"{SVG}text")}
    lines = {line.find(f"{SVG}title").text: line for line in svg.iter(f"{SVG}polyline")}
    assert lines.keys() == CURVES.keys() and "A & B" in at and "training steps" in at
    half, whole = at["50 %"][1], at["90 %"][1]
    for name, curve in CURVES.items():
        points = [tuple(map(float, point.split(","))) for point in lines[name].get("points").split()]
        assert len(points) == len(curve)
        for (x, y), (step, share) in zip(points, curve.items(), strict=True):
            assert x == pytest.approx(at[str(step)][0], abs=0.1)
            assert y + 4 == pytest.approx(half + (whole - half) * (share - 0.5) / 0.4, abs=0.2)
    assert at["a<b 87.7 %"][1] < at["alpha 58.0 %"][1]  # the best is first in the legend
    assert len({line.get("stroke") for line in lines.values()}) == 2
    box = list(map(float, svg.get("viewBox").split()))
    assert all(0 < x < box[2] and 0 < y < box[3] for x, y in at.values())


def test_a_picture_of_one_value_and_one_step_can_be_drawn(compare):
    svg = compare.line_chart({"alpha": {0: 0.5}, "failed": {}}, "one")
    assert len(list(ElementTree.fromstring(svg).iter(f"{SVG}polyline"))) == 1


def test_an_axis_of_many_places_has_round_marks(compare):
    assert compare.ticks([0, 10, 20]) == [0, 10, 20]
    assert compare.ticks([7.3 * place for place in range(30)]) == [0, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200]


@pytest.fixture
def commands(compare, monkeypatch) -> list[list[str]]:
    """Collects the commands, which are not run."""
    found: list[list[str]] = []
    monkeypatch.setattr(compare, "call", lambda output, name, *words: found.append([name, *words]))
    return found


def a_run(folder: Path, command: list[str], last: int) -> None:
    folder.mkdir()
    (folder / "environment.json").write_text(json.dumps({"command": ["mmrl", *command]}))
    (folder / "config.yaml").write_text("trainer: {steps: 3}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(last + 1)))


@pytest.mark.parametrize(("last", "runs"), [(3, 0), (2, 1)])
def test_only_what_is_not_finished_is_run_again(last, runs, compare, commands, tmp_path):
    command = ["train", "a.yaml", "x=1", f"trainer.run_dir={tmp_path / 'alpha'}"]
    a_run(tmp_path / "alpha", command, last)
    compare.train(tmp_path, "alpha", ["a.yaml", "x=1"])
    assert commands == [["alpha", "-m", "mmrl", *command]] * runs
    assert (tmp_path / "alpha").exists() == (runs == 0)


def test_the_run_of_another_command_is_left_for_mmrl_to_refuse(compare, commands, tmp_path):
    a_run(tmp_path / "alpha", ["train", "a.yaml", "x=2", f"trainer.run_dir={tmp_path / 'alpha'}"], 3)
    compare.train(tmp_path, "alpha", ["a.yaml", "x=1"])
    assert len(commands) == 1 and (tmp_path / "alpha" / "metrics.jsonl").exists()


def test_a_failed_run_is_a_result_with_the_last_words(compare, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "train", lambda *_: compare.call(tmp_path, "alpha", "-c", "exit('no room')"))
    result = compare.compete(tmp_path, "alpha", 3, [])
    assert re.fullmatch(r"exit code 1, see .*alpha\.log: .*no room", result.problems[0])
    assert result.accuracy == {} and "failed" in compare.table([result])
