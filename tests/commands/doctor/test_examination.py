"""All checks together: none is left out because another failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.commands.doctor import examination
from mmrl.commands.doctor.examination import examine
from mmrl.commands.doctor.finding import Finding
from mmrl.commands.doctor.probe import GPU, Probe
from mmrl.config.load import from_mapping
from mmrl.config.sections import Config
from mmrl.engine.driver import Driver
from mmrl.errors import ResourceError

PROBE = Probe("", torch="2.13.0+cpu", threads=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "probe", lambda: PROBE)
    monkeypatch.setattr(examination.Driver, "here", Driver)


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
    assert (row.area, row.status) == ("engine", "bad") and "mmrl doctor --cpu" in row.remedy
    assert row.found == "torch sees no GPU: 2.13.0+cpu is a build for CPUs"


def test_what_torch_says_against_the_gpu_is_shown_even_without_nvidia_smi(monkeypatch):
    seen = replace(PROBE, cuda="13.0", cuda_error="The NVIDIA driver on your system is too old")
    monkeypatch.setattr(examination, "probe", lambda: seen)
    rows = examine(self_test_on="cuda")
    assert rows[-1].found == f"torch sees no GPU: {seen.cuda_error}"
    (kind,) = [row.found for row in rows if row.check == "kind"]
    assert seen.cuda_error in kind


@pytest.mark.parametrize(("bf16", "precisions"), [(True, ("float32", "bfloat16")), (False, ("float32",))])
def test_bfloat16_is_left_out_where_a_gpu_lacks_it(bf16, precisions, monkeypatch):
    gpus = (GPU("H200", 2, 1, (9, 0), bf16=True), GPU("V100", 2, 1, (7, 0), bf16=bf16))
    monkeypatch.setattr(examination, "probe", lambda: replace(PROBE, kind="cuda", gpus=gpus))
    row = Finding("engine", "tested", "ok", "")
    monkeypatch.setattr(examination, "self_test", lambda _, which: [replace(row, found=str(which))])
    assert examine(self_test_on="cuda")[-1].found == str(precisions)


def test_a_machine_that_cannot_be_asked_is_a_row_and_the_rest_is_looked_at(monkeypatch):
    def fail() -> None:
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(examination, "probe", fail)
    monkeypatch.setattr(examination.Driver, "here", fail)
    monkeypatch.setattr(examination.Installed, "here", fail)
    rows = examine()
    failed = [row.check for row in rows if "cannot allocate memory" in row.found]
    assert failed == ["torch", "packages", "driver"] and rows[-1].area == "settings"


def test_the_self_tests_rows_come_last(monkeypatch):
    row = Finding("numbers", "fp32 attention", "ok", "fine")
    monkeypatch.setattr(examination, "self_test", lambda kind: [replace(row, found=f"fine on {kind}")])
    assert examine(self_test_on="cpu")[-1].found == "fine on cpu"


def test_a_config_is_audited_if_asked_and_what_breaks_the_audit_is_a_row(config, monkeypatch):
    row = Finding("numbers", "pixels", "bad", "off", number=0.5, bound=1e-5)
    monkeypatch.setattr(examination, "audit", lambda audited: [replace(row, found=audited.model.path)])
    assert examine(config, audits=True)[-1].found == "m"
    assert examine(config)[-1].area != "numbers" and examine(audits=True)[-1].area != "numbers"

    def fail(audited: Config) -> list[Finding]:
        raise OSError("no room for a process")

    monkeypatch.setattr(examination, "audit", fail)
    assert "no room for a process" in examine(config, audits=True)[-1].found


def test_what_is_shown_holds_no_secret_and_no_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "sesame-sesame")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/alice/sesame-sesame.xml")
    text = "".join(row.found + row.remedy for row in examine())
    assert "alice" not in text and "sesame" not in text
    assert "NCCL_TOPO_FILE=~/[redacted].xml" in text


@pytest.mark.full
def test_the_command_prints_json_with_its_exit_code(tmp_path):
    environ = {**os.environ, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "mmrl", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    answer = json.loads(done.stdout)
    assert done.returncode == answer["exit_code"] != 1, done.stderr
    assert {"torch", "packages", "plugins", "kind", "memory", "shared memory"} <= {
        row["check"] for row in answer["findings"]
    }
