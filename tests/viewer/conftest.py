"""Two runs made by hand, a server, and one browser for each module that looks at them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmrl.viewer.report import make_report
from tests.viewer.browser import Viewer, chromium, missing, served
from tests.viewer.made_run import make_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that differ in a key of their configs."""
    folder = tmp_path_factory.mktemp("runs")
    one, other = make_run(folder / "shapes"), make_run(folder / "shapes-again")
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.01"))
    return one, other


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    if sentence := missing():
        pytest.skip(sentence)
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def url(driver: Chrome, runs: tuple[Path, Path]) -> Iterator[str]:
    with served(*runs) as server:
        yield server.url


@pytest.fixture
def viewer(driver: Chrome, url: str) -> Iterator[Viewer]:
    """A page of both runs, which must neither complain nor ask anybody else."""
    found = Viewer.opened(driver, url)
    yield found
    found.width(1280)
    found.scheme("light")
    assert found.complaints() == []
    assert found.strangers() == []


@pytest.fixture(scope="module")
def report(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(make_report([runs[0]], [2]).html())
    return file


@pytest.fixture
def joined(driver: Chrome, report: Path) -> Iterator[Viewer]:
    """A report, whose script has all of the page's functions as globals."""
    found = Viewer.opened(driver, report.as_uri())
    yield found
    assert found.complaints() == []
