"""What the viewer and `mmrl rollouts` tell of a critic: values, returns and their difference by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmrl.commands.cli import main
from mmrl.rollout.records import read_lines, recorded_files
from mmrl.rollout.records.pairs import Likelihood
from mmrl.types import CreditedGroup, PreUpdateStatistics
from mmrl.viewer.pages import Pages
from tests.viewer.browser import Viewer
from tests.viewer.made_run import make_run


def with_critic(group: CreditedGroup) -> CreditedGroup:
    """The group with values that rise by 0.25 a token from 0.125 on, returns of 1, and values of one update."""
    lengths = [len(each.token_ids) for each in group.scored.rollouts]
    values = [np.float32(0.125) + np.arange(count, dtype=np.float32) / 4 for count in lengths]
    nothing = np.zeros(0, np.float32)
    return replace(
        group,
        values=values,
        returns=[np.ones(count) for count in lengths],
        critic_updates=[[PreUpdateStatistics(nothing, nothing, vpreds=each)] for each in values],
        final_values=np.array([0.5] * len(lengths), np.float32),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path]:
    explained = {"critic/explained_variance": 0.25, "critic/loss": 0.5}
    return (make_run(tmp_path_factory.mktemp("critic") / "run", credited=with_critic, metrics=explained),)


@pytest.fixture
def run(runs: tuple[Path]) -> Path:
    return runs[0]


def test_tokens_have_values_returns_and_their_difference(run: Path) -> None:
    found = Pages([run]).document("run/0/step/2/group/0")
    tokens = found["members"][0]["tokens"]
    assert tokens["value"] == pytest.approx([0.125, 0.375, 0.625, 0.875, 1.125]) and tokens["return"] == [1.0] * 5
    assert tokens["value_error"] == pytest.approx([0.875, 0.625, 0.375, 0.125, -0.125])
    episode = Pages([run]).document("run/0/step/2/group/3")["members"][0]["tokens"]
    assert [each is None for each in episode["value"]] == [not each for each in episode["mask"]]
    assert "value_error" not in found["members"][4]["tokens"], "a greedy completion is in no loss"


def test_a_critics_last_value_is_no_score_of_a_reward_model(run: Path) -> None:
    record = next(read_lines(recorded_files(run)[0]))
    assert record["final_value"] == 0.5 and Likelihood.of(record).value is None
    pages = Pages([run])
    group, step = (pages.document(f"run/0/step/2{more}") for more in ("/group/0", ""))
    assert group["pair"]["measure"] == "log_ratio" and "value" not in group["members"][0].get("likelihood", {})
    assert "pair" not in step["groups"][0]


def test_mmrl_rollouts_tells_where_values_begin_end_and_change_most(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["rollouts", str(run), "--step", "2", "--where", "prompt_id=shapes/0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = (
        "    value 0.125 before token 1, 1.125 before token 5, whose return is 1; changes most: token 2 +0.25, token 3"
    )
    assert lines[3].startswith(line)
    record = next(read_lines(recorded_files(run)[0]))
    changed = {**record, "value": [0.5, 0.75, 9.0, 0.25], "return": [1.0, 2.0, 0.0, 3.0]}
    changed |= {"mask": [True, True, False, True], "reference_logprobs": []}
    monkeypatch.setattr("mmrl.rollout.records.read_lines", lambda file: [changed])
    assert main(["rollouts", str(run), "--step", "2"]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert line.startswith("    value 0.5 before token 1, 0.25 before token 4, whose return is 3; changes most: ")
    assert line.endswith(": token 4 -0.5, token 2 +0.25")


def test_a_page_colours_tokens_by_value_and_return_on_one_scale(viewer: Viewer) -> None:
    ends = []
    for name in ("value", "return"):
        viewer.open(f"run/0/step/2/group/0?member=0&view=tokens&color={name}")
        ends.append(viewer.text(".legend"))
    assert ends[0] == ends[1] and ends[0].startswith("0.1")
    viewer.open("run/0/step/2/group/0?member=0&view=tokens&color=value_error")
    viewer.script("document.querySelector('.token[data-at]').focus()")
    details = viewer.text(".token-details")
    assert "value of the critic0.125" in details and "return that the critic learns1" in details
    assert "return less value0.875" in details
    viewer.open("run/0/curves?q=critic")
    assert viewer.texts(".card h3") == ["critic/explained_variance", "critic/loss"]
