"""Runs of real size in a browser: one of 10,000 rollouts. Its seconds are in ``tests/benchmarks/viewer.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.benchmarks.viewer import Shape, make
from tests.viewer.browser import Viewer, served

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

SHAPE = Shape(steps=2, groups=640, size=8, tokens=40)
"""As many tokens in a step as two row groups of its file have."""


@pytest.mark.full
def test_a_run_of_ten_thousand_rollouts_is_looked_through(
    driver: Chrome, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = make(tmp_path_factory.mktemp("large") / "run", SHAPE)
    assert SHAPE.rollouts > 10_000
    with served(run) as server:
        viewer = Viewer.opened(driver, server.url)
        assert viewer.page == "run/0/curves" and "section/metric_59" in viewer.text()
        viewer.open("run/0/step/1")
        assert viewer.text(".count-line p").startswith("640 groups")
        rows = viewer.count("#main tbody tr")
        assert 20 <= rows < 640, "a part of the table at a time"
        viewer.open("run/0/step/1?by=rollout&sort=-reward")
        assert viewer.text(".count-line p").startswith("5,120")
        viewer.open("run/0/step/2?q=question 637:")
        assert viewer.texts("#main tbody th[scope=row]") == ["637"]
        for group in (0, 639, 320):
            viewer.open(f"run/0/step/2/group/{group}?member=7&view=tokens")
            assert viewer.text("h1") == f"Group {group}" and f"question {group}:" in viewer.text()
            assert viewer.count(".problem") == 0
        viewer.open("run/0/prompt?id=rows/5")
        assert viewer.count(".problem") == 0
        assert viewer.complaints() == [] and viewer.strangers() == []
