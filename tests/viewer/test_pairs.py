"""Documents of comparisons: pairs, margins and which answer the policy prefers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.commands.cli import main
from mmrl.rollout import records
from mmrl.rollout.records import read_lines, recorded_files
from mmrl.viewer.pages import Pages
from tests.viewer.made_pairs import GROUPS, HELD_OUT, make_pairs
from tests.viewer.made_run import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Runs with a reference, without one, and of an earlier version, whose evaluations have no log-probs."""
    folder = tmp_path_factory.mktemp("pairs")
    return Pages(
        [
            make_pairs(folder / "with"),
            make_pairs(folder / "without", has_reference=False),
            make_pairs(folder / "old", old=True),
        ]
    )


def lengths(runs: Pages) -> list[list[int]]:
    return [
        [len(member["tokens"]["ids"]) for member in runs.document(f"run/0/step/2/group/{number}")["members"]]
        for number in range(len(GROUPS))
    ]


def test_a_table_has_the_log_ratio_of_each_candidate_and_each_pairs_margin(runs: Pages) -> None:
    table, counts = runs.document("run/0/step/2"), lengths(runs)
    slopes = [each.slope for group in GROUPS for each in group]
    tokens = [count for group in counts for count in group]
    expected = [None if slope is None else slope * count for slope, count in zip(slopes, tokens, strict=True)]
    assert table["rows"]["log_ratio"][: len(slopes)] == expected
    assert table["rows"]["score"] == [each.score for group in GROUPS for each in group] + [None] * 4
    assert table["rows"]["reward"] == [None] * len(slopes) + [0.5, 1.0, 0.0, 0.5]
    pairs = [group.get("pair") for group in table["groups"]]
    assert pairs[2] is None and pairs[4] is None, "one candidate, and completions that were sampled"
    first = {"chosen": 0, "rejected": 1, "measure": "log_ratio", "margin": 30.0, "preferred": 1.0}
    assert pairs[0] == first and counts[0] == [39, 42]
    assert (pairs[1]["chosen"], pairs[1]["rejected"], pairs[1]["preferred"]) == (1, 0, 0.0), "scores 0.2, 0.9, 0.5"
    assert pairs[3]["margin"] == 0.0 and pairs[3]["preferred"] == 0.5
    assert [group.get("given", False) for group in table["groups"]] == [True] * 4 + [False]


def test_a_group_has_what_each_of_its_candidates_is_worth(runs: Pages) -> None:
    group = runs.document("run/0/step/2/group/1")
    assert [member["score"] for member in group["members"]] == [0.2, 0.9, 0.5] and group["pair"]["compared"]
    assert group["members"][0]["likelihood"] == {
        "policy": -9.0,
        "reference": -6.0,
        "log_ratio": -3.0,
        "per_token": -1.5,
    }
    assert group["members"][2]["likelihood"].keys() == {"reference"}, "it was in no loss"
    assert group["members"][0]["tokens"]["log_ratio"] == [-0.5] * 6
    assert "log_ratio" not in group["members"][2]["tokens"]


def test_without_a_reference_a_margin_is_of_mean_log_probs(runs: Pages) -> None:
    pair = runs.document("run/1/step/2/group/0")["pair"]
    assert (pair["measure"], pair["margin"], pair["preferred"]) == ("per_token", 0.75, 1.0)
    assert runs.document("run/1/step/2")["groups"][0]["pair"]["margin"] == 0.75
    assert "log_ratio" not in runs.document("run/1/step/2/group/0")["members"][0]["tokens"]


def test_evaluations_tell_the_order_of_each_pair(runs: Pages) -> None:
    found = runs.document("run/0/evaluations")
    assert found["compared"] and len(found["prompts"]) == len(HELD_OUT)
    assert [each["results"] for each in found["prompts"]] == [
        {"0": 0.5, "1": 1.0, "2": 1.0},
        {"0": 0.5, "1": 0.0, "2": 0.0},
        {"0": None, "1": None, "2": None},
    ]
    assert found["prompts"][0]["blank"] == {"0": 0.5, "1": 0.5, "2": 0.5}
    old = runs.document("run/2/evaluations")
    assert old["compared"] and {each["results"]["2"] for each in old["prompts"]} == {None}


def test_a_prompt_has_its_margin_at_each_occurrence(runs: Pages) -> None:
    found = runs.document("run/0/prompt", {"id": "shapes/0"})
    margins = {(each["kind"], each["step"]): each["pair"]["margin"] for each in found}
    assert margins["step", 1] == 0.0 and margins["step", 2] == 30.0 and margins["evaluation", 2] == 60.0
    assert [member["score"] for member in found[0]["members"]] == [1.0, 0.0]


def test_best_and_worst_are_compared_where_they_alone_were_in_the_loss(runs: Pages, tmp_path: Path) -> None:
    pair = runs.document("run/0/step/2/group/4")["pair"]
    assert (pair["chosen"], pair["rejected"], pair["margin"], pair["compared"]) == (1, 2, -1.75, True)
    others = Pages([make_run(tmp_path / "run")])
    pairs = [others.document(f"run/0/step/2/group/{number}").get("pair") for number in range(5)]
    assert [pair and pair["compared"] for pair in pairs] == [False, False, None, False, None]
    assert "pair" not in others.document("run/0/step/2")["groups"][0]
    assert "log_ratio" not in others.document("run/0/step/2")["rows"] and "compared" not in others.document(
        "run/0/evaluations"
    )


def test_mmrl_rollouts_tells_how_far_a_completion_is_from_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    numbers = {"learner_logprobs": [-1.0, -2.0, 0.0, -0.5], "reference_logprobs": [-1.25, -0.5, -9.0, -0.375]}
    record = {**next(read_lines(recorded_files(run)[0])), **numbers, "mask": [True, True, False, True]}
    monkeypatch.setattr(records, "read_lines", lambda file: [record])
    assert main(["rollouts", str(run), "--step", "2"]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert line == "    log-ratio to the reference -1.375, farthest: token 2 -1.5, token 1 0.25, token 4 -0.125"


def test_mmrl_rollouts_tells_the_log_ratio_of_a_candidate_and_the_margin_of_a_pair(
    runs: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    with_reference, without = (runs.run(number).path for number in "01")
    assert main(["rollouts", str(with_reference), "--step", "2", "--where", "prompt_id=shapes/1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "    log-prob -9, log-ratio to the reference -3"
    assert lines[4].startswith("    log-prob -") and lines[4].endswith("over candidate 0")
    third = lines.index("step 2, epoch 0, shapes/1, candidate 2 of score 0.5: 16 tokens, stop")
    assert lines[third + 1] == "    a bus and a car", "it was in no loss"
    assert main(["rollouts", str(without), "--step", "2", "--where", "rewards.score=1"]) == 0
    assert "    log-prob -19.5, margin per token 0.75 over candidate 1" in capsys.readouterr().out.splitlines()
