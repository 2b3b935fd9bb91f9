"""All checks together: none is left out because another failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.config import Config, from_mapping
from mmrl.doctor import examination
from mmrl.doctor.examination import examine
from mmrl.doctor.finding import Finding
from mmrl.doctor.probe import Probe
from mmrl.errors import ResourceError

PROBE = Probe("", torch="2.13.0+cpu", threads=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "probe", lambda: PROBE)
    monkeypatch.setattr(examination, "_driver", lambda: "")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    values = {"model": {"path": "m"}, "data": {"train": {"name": "d"}}, "algorithm": {"name": "a"}}
    return from_mapping(values | {"trainer": {"run_dir": str(tmp_path / "some-run")}})


def test_every_area_is_looked_at_and_the_configs_own_folder(config):
    rows = examine(config)
    assert {"versions", "devices", "machine", "settings"} == {row.area for row in rows}
    (folder,) = [row for row in rows if row.check == "run folder"]
    assert "some-run" in folder.found


@pytest.mark.parametrize("error", [ValueError("no such file"), ResourceError("a strange machine")])
def test_a_check_that_fails_is_a_row_and_the_others_are_made(error, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(examination, "machine_findings", fail)
    rows = examine()
    (failed,) = [row for row in rows if row.check == "not checked"]
    assert (failed.area, failed.status) == ("machine", "bad") and str(error) in failed.found
    assert rows[-1].area == "settings"


def test_without_a_gpu_the_self_test_for_one_is_bad_and_says_what_else_there_is():
    row = examine(self_test_on="cuda")[-1]
    assert (row.area, row.status, row.found) == ("engine", "bad", "torch sees no GPU")
    assert "mmrl doctor --cpu" in row.remedy


def test_the_self_tests_rows_come_last(monkeypatch):
    row = Finding("numbers", "fp32 attention", "ok", "fine")
    monkeypatch.setattr(examination, "self_test", lambda kind: [replace(row, found=f"fine on {kind}")])
    assert examine(self_test_on="cpu")[-1].found == "fine on cpu"


def test_what_is_shown_holds_no_secret_and_no_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "sesame-sesame")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/alice/sesame-sesame.xml")
    text = "".join(row.found + row.remedy for row in examine())
    assert "alice" not in text and "sesame" not in text
    assert "NCCL_TOPO_FILE=~/[redacted].xml" in text


def test_the_command_prints_json_with_its_exit_code(tmp_path):
    environ = {**os.environ, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "mmrl", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    answer = json.loads(done.stdout)
    assert done.returncode == answer["exit_code"] == 0, done.stdout
    assert {row["status"] for row in answer["findings"]} <= {"ok", "warn"}
    assert {"torch", "packages", "plugins", "kind", "memory", "shared memory"} <= {
        row["check"] for row in answer["findings"]
    }
