"""``mmrl view`` as a user starts it: the address, its end by Ctrl-C, and what is refused before a server starts."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.commands.cli import main
from mmrl.viewer import browser
from tests.viewer.made_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_it_prints_its_address_and_ends_with_a_signal(name: str, run: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "mmrl", "view", str(run), "--no-browser"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43,})", address)
            assert found
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
            connection.request("GET", "/data/runs", headers={"Cookie": f"mmrl-view-{found[1]}={found[2]}"})
            assert b'"name":"run"' in connection.getresponse().read()  # the connection is kept open
            process.send_signal(signal.Signals[name])
            _, complaints = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == (0 if name == "SIGINT" else -signal.SIGTERM) and complaints == ""


def test_what_cannot_be_shown_is_refused_before_a_server_starts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["view", str(run), "--port", str(port)]) == 5
    said = capsys.readouterr()
    assert said.out == "" and f"cannot have port {port}: Address already in use" in said.err and "leave out" in said.err
    assert main(["view", str(tmp_path)]) == 2
    assert "there is no run" in capsys.readouterr().err
    for number in ("80", "70000", "-1"):
        assert main(["view", str(run), "--port", number]) == 2
        assert "1024 to 65535" in capsys.readouterr().err


def test_the_browsers_command_line_has_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", asked.append)
    monkeypatch.setattr(browser, "_has_screen", lambda: True)
    url = "http://127.0.0.1:8000/?token=secret-token"
    with browser.opened(url):
        for _ in range(200):
            if asked:
                break
            signal.sigtimedwait([], 0.05)
        (address,) = asked
        file = Path(address.removeprefix("file://"))
        assert "secret-token" not in address and url in file.read_text()
        assert file.parent.stat().st_mode & 0o077 == 0
    assert not file.exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "w"}, True),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "a"}, False),
    ],
)
def test_a_browser_is_opened_where_there_is_a_screen(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", asked.append)
    with browser.opened("http://127.0.0.1:1/"):
        signal.sigtimedwait([], 0.3)
    assert bool(asked) is expected
    with browser.opened(None):
        pass
