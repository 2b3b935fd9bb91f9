"""A command in a process of its own: what it prints, how it ends, and what comes back."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.commands import child_command
from mmrl.commands.child_command import ChildCommand
from mmrl.errors import ConfigError, ResourceError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(child_command, "MODULE", "tests.faults.errands")


def stub(do: str, **request: Any) -> ChildCommand:
    return ChildCommand("stub", {"do": do, **request}, "RUN")


def when_there(file: Path, act: Callable[[], object]) -> Callable[[], None]:
    """Calls ``act`` once, when the process has begun to wait."""
    done: list[bool] = []

    def watch() -> None:
        if file.exists() and not done:
            done.append(True)
            act()

    return watch


def test_what_it_prints_is_printed_here_and_its_answer_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert stub("print").wait().answer == {"data": "print", "text": ""}
    assert capsys.readouterr() == ("out é\n", "err\n")


def test_it_is_read_by_a_caller_with_more_than_a_thousand_open_files(capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert stub("print").wait().answer == {"data": "print", "text": ""}
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert capsys.readouterr() == ("out é\n", "err\n")


def test_output_that_cannot_be_read_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: ChildCommand) -> bool:
        raise OSError("no output")

    monkeypatch.setattr(ChildCommand, "_has_ended", fail)
    with pytest.raises(OSError, match="no output"):
        stub("print").wait()


def test_its_error_is_raised_here_as_it_was() -> None:
    with pytest.raises(ConfigError) as caught:
        stub("fail").wait()
    assert str(caught.value) == str(ConfigError("it is wrong", where="here", possible="this", remedy="that"))


def test_a_bug_is_told_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: by nothing") as caught:
        stub("bug").wait()
    assert "in _stub" in caught.value.__notes__[0]


def test_a_process_that_could_not_tell_is_explained() -> None:
    with pytest.raises(ResourceError, match="ended by SIGKILL"):
        stub("kill").wait()
    with pytest.raises(ResourceError, match="exit code 5; it has printed why"):
        stub("exit").wait()


@pytest.mark.parametrize("exit_code", [0, 10])
def test_stopped_it_ends_where_nothing_is_lost_and_tells_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exit_code: int
) -> None:
    file = tmp_path / "file"
    waiting = stub("wait", file=str(file), after=0)
    outcome = waiting.wait(when_there(file, lambda: waiting.stop("by a test", exit_code)))
    assert outcome.stopped == "by a test" and waiting._process.returncode == exit_code
    assert file.read_text() == "saved, stopped by a test"
    told = capsys.readouterr().err
    assert "mmrl: stopped by a test: the run ends where nothing is lost" in told and "SIGTERM" not in told


def test_what_the_watch_raises_stops_it_and_is_raised(tmp_path: Path) -> None:
    def fail() -> None:
        raise LookupError("mine")

    file = tmp_path / "file"
    with pytest.raises(LookupError, match="mine"):
        stub("wait", file=str(file), after=0).wait(when_there(file, fail))
    assert file.read_text() == "saved, stopped by an error of its caller, LookupError: mine"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_the_first_ctrl_c_lets_it_save_and_the_second_ends_it_at_once(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    file = tmp_path / "file"
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT: RUN"):
        stub("wait", file=str(file), after=0).wait(when_there(file, interrupt))
    assert file.read_text() == "saved, stopped by SIGINT"

    again = tmp_path / "again"
    waiting = stub("wait", file=str(again), after=60)
    began = time.monotonic()

    def second() -> None:
        # While the first one is waited for.
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="ended at once"):
        waiting.wait(when_there(again, second))
    assert time.monotonic() - began < 30
    assert again.read_text().isdecimal()


def test_it_ends_as_after_a_signal_when_its_caller_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    code = f"""
from mmrl.commands import child_command
child_command.MODULE = "tests.faults.errands"
child_command.ChildCommand("stub", {{"do": "wait", "file": {str(file)!r}, "after": 0}}, "RUN").wait()
"""
    caller = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    caller.kill()
    caller.wait()
    while not file.read_text().startswith("saved") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert file.read_text() == "saved, stopped as the program that started it is gone"
