"""Episodes that go on from others of their group, as the viewer shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.types import Branch, CreditedGroup
from mmrl.viewer.pages import Pages
from tests.viewer.browser import Viewer
from tests.viewer.made_run import make_run


def branched(group: CreditedGroup) -> CreditedGroup:
    """The group whose second episode goes on from the first one's state before its second turn."""
    first, second, *others = group.scored.rollouts
    if not first.episode:
        return group
    rollouts = (first, replace(second, branch=Branch(0, 1)), *others)
    return replace(group, scored=replace(group.scored, group=replace(group.scored.group, rollouts=rollouts)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path]:
    return (make_run(tmp_path_factory.mktemp("branches") / "run", credited=branched),)


def test_an_episode_tells_the_one_that_it_goes_on_from(runs: tuple[Path]) -> None:
    members = Pages(runs).document("run/0/step/2/group/3")["members"]
    assert members[1]["branch"] == {"member": 0, "turn": 1}
    assert "branch" not in members[0] and "branch" not in members[2]


def test_shared_turns_are_marked(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/3?member=1")
    assert "from completion 0, before its turn 2" in viewer.text(".member.chosen .member-head")
    assert "goes onfrom completion 0, before its turn 2" in viewer.text(".episode-view dl")
    assert ["shared" in each for each in viewer.texts(".turn-head")] == [True, False]
    viewer.open("run/0/step/2/group/3?member=0")
    assert not any("shared" in each for each in viewer.texts(".turn-head"))
