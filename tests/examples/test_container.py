"""The Dockerfile: linted, built from the locks, and its steps carried out in a root of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.examples.clean_root import BASE, DOCKERFILE, REPOSITORY, CleanRoot, build, steps

TEXT = DOCKERFILE.read_text()
TARGETS = pytest.mark.parametrize(("target", "device"), [("cpu", "cpu"), ("cuda", "gpu")])


def arguments(keyword: str, target: str) -> list[str]:
    return [argument for each, argument in steps(TEXT, target) if each == keyword]


@pytest.fixture(scope="module")
def hadolint() -> str:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which("hadolint", path=places)
    return found or pytest.skip("hadolint is not installed: the extra dev has it")


def test_hadolint_finds_no_fault(hadolint: str) -> None:
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    faulty = TEXT.replace("python:3.11.15-slim-bookworm", "python:latest")
    assert subprocess.run([hadolint, "-"], input=faulty, capture_output=True, text=True).returncode == 1


@TARGETS
def test_a_target_installs_its_lock_and_nothing_else(target: str, device: str) -> None:
    runs = arguments("RUN", target)
    assert [run for run in runs if f"MMRL_DEVICE={device} bash examples/setup/install.sh" in run]
    assert not [run for run in runs if re.search(r"\bpip\b|curl|wget", run)]
    assert "ADD" not in {keyword for keyword, _ in steps(TEXT, target)}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm AS base", arguments("FROM", target)[0])


@TARGETS
def test_a_target_runs_mmrl_as_a_user_who_is_not_root(target: str, device: str) -> None:
    assert arguments("USER", target) == ["1000"] and json.loads(arguments("ENTRYPOINT", target)[0]) == ["mmrl"]
    assert arguments("WORKDIR", target)[-1] == "/work"


@TARGETS
def test_one_volume_keeps_all_that_is_compiled_at_a_start(target: str, device: str) -> None:
    """vLLM's, FlashInfer's and the hub's caches are in ``~/.cache`` by default, Triton's and Inductor's are not."""
    cache = "/home/mmrl/.cache"
    (environment,) = [each for each in arguments("ENV", target) if "MMRL_VENV" in each]
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert re.search(rf"{name}={cache}/\w+", environment)
    assert any(re.search(rf"install --directory --owner mmrl .*{cache}", run) for run in arguments("RUN", target))
    for text in (TEXT, (REPOSITORY / "examples/README.md").read_text()):
        assert f"--volume mmrl-cache:{cache} " in text


@TARGETS
def test_a_target_has_all_that_an_installation_reads(target: str, device: str) -> None:
    copied = {source for argument in arguments("COPY", target) for source in argument.split()[:-1]}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    folders = {*project["tool"]["hatch"]["build"]["dev-mode-dirs"]} - {"."}
    assert copied >= {"mmrl", "examples", project["project"]["readme"], *project["project"]["license-files"], *folders}
    allowed = [line[1:] for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()]
    assert all((REPOSITORY / source).exists() and source.partition("/")[0] in allowed for source in copied)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_cpus_steps_run_in_a_clean_root_where_both_engines_agree(tmp_path: Path) -> None:
    if os.getuid() or not all(shutil.which(tool) for tool in (BASE[0], "unshare", "chroot")):
        pytest.skip("a root of its own needs debootstrap, and the rights of root")
    root = CleanRoot(tmp_path / "root", {name: value for name, value in os.environ.items() if name[:4] == "PIP_"})
    entry = build(root, "cpu", TEXT)
    root.run(*entry, "doctor", "--cpu")
