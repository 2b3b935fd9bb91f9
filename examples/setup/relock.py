"""Write cpu.lock and gpu.lock anew: all that pyproject's dependencies, with the extras of each, resolve to here.

    .venv/bin/python examples/setup/relock.py [--extra cpu|gpu] [--upgrade]

Versions that are locked already stay as they are unless ``--upgrade``; what both locks hold, they hold in one version
(``KERNEL_COMPILERS`` excepted). Nothing is installed, and a recent pip downloads little.

On a CPU four kinds of packages are left out, because nothing here imports them and beside a CPU torch they do not
load: torchaudio, torchcodec, triton (a gigabyte), and the CUDA libraries of a torch that is linked to CUDA. The GPU's
lock is resolved against the package index alone: what pip's configuration adds may hold CPU builds, which ask for no
CUDA library.

Each line has the hash of the file that the index has for this Python and machine, which is what the locks are for:
CPython 3.11 on Linux, x86-64. CPU builds of torch and torchvision are on an index of their own: ``cpu_builds.lock`` has
their hashes. It is written anew for those that pip's configuration leads to; the line of another stays while the
version does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETUP = Path(__file__).parent
PYPROJECT = SETUP.parents[1] / "pyproject.toml"
EXTRAS = {"cpu": ("cpu", "ray", "dev"), "gpu": ("gpu", "ray", "dev")}
LEFT_OUT = {"cpu": re.compile(r"torchaudio|torchcodec|triton|cuda-.*|nvidia-(?!ml-py).*"), "gpu": re.compile(r"(?!)")}
KERNEL_COMPILERS = {"apache-tvm-ffi"}  # the CUDA build of vLLM pins it
CPU_BUILDS = ("torch", "torchvision")
LOCAL_SOURCES = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")


def requirements(extra: str) -> list[str]:
    """Everything that pyproject asks for on a machine of this kind, its build system included."""
    tables = tomllib.loads(PYPROJECT.read_text())
    project = tables["project"]
    extras = [requirement for name in EXTRAS[extra] for requirement in project["optional-dependencies"][name]]
    return [*tables["build-system"]["requires"], *project["dependencies"], *extras]


def constraints(extra: str, upgrade: bool) -> str:
    """Lines ``name==version`` that stay; the GPU's lock follows the CPU's."""
    kept = {} if upgrade else locked(extra)
    if extra == "gpu":
        kept |= {name: version for name, version in locked("cpu").items() if name not in KERNEL_COMPILERS}
    return "".join(f"{name}=={version}\n" for name, version in kept.items())


def locked(extra: str) -> dict[str, str]:
    """The versions that the lock holds, by package."""
    lock = SETUP / f"{extra}.lock"
    lines = lock.read_text().splitlines() if lock.exists() else []
    return dict(line.partition(" ")[0].split("==") for line in lines)


def report(words: Sequence[str], lines: str, *, index_alone: bool, complains: bool = True) -> list[Any]:
    """The packages that pip would install into an empty environment.

    Args:
        words: pip's words; they end with an option that takes a file of ``lines``.
        complains: False to keep pip's errors off the console.
    """
    environment = dict(os.environ)
    if index_alone:
        environment = {k: v for k, v in environment.items() if k not in LOCAL_SOURCES} | {"PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq", "--report", "-"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(lines)
        file.flush()
        command += ["--use-feature=fast-deps", *words, file.name]
        stderr = None if complains else subprocess.DEVNULL
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=stderr, env=environment)
    packages: list[Any] = json.loads(done.stdout)["install"]
    return packages


def pins(packages: Sequence[Any], left_out: re.Pattern[str]) -> list[str]:
    """Sorted ``name==version`` lines, local versions (``+cpu``) stripped."""
    versions = {canonical(each): each["metadata"]["version"].split("+")[0] for each in packages}
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if not left_out.fullmatch(name)]


def with_hashes(lines: Sequence[str]) -> list[str]:
    """The lines, each with the hash of the index's own file."""
    packages = report(["--no-deps", "--requirement"], "\n".join(lines), index_alone=True)
    hashes = {canonical(each): each["download_info"]["archive_info"]["hashes"]["sha256"] for each in packages}
    return [f"{line} --hash=sha256:{hashes[line.partition('==')[0]]}" for line in lines]


def cpu_builds(versions: dict[str, str], before: Sequence[str]) -> list[str]:
    """Lines ``name==version+cpu`` with hashes: those of pip's own answer, else the lines of before."""
    lines = []
    for name in CPU_BUILDS:
        pin = f"{name}=={versions[name]}+cpu"
        try:
            [package] = report(["--no-deps", "--requirement"], pin, index_alone=False, complains=False)
        except subprocess.CalledProcessError:
            lines += [line for line in before if line.startswith(f"{pin} ")]
        else:
            lines.append(f"{pin} --hash=sha256:{package['download_info']['archive_info']['hashes']['sha256']}")
    return lines


def canonical(package: Any) -> str:
    """The name of a package in a report, as indexes compare it."""
    return re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extra", choices=EXTRAS, help="write this lock alone; default: both")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    options = parser.parse_args()
    for extra in [options.extra] if options.extra else EXTRAS:
        words = [*requirements(extra), "--constraint"]
        packages = report(words, constraints(extra, options.upgrade), index_alone=extra == "gpu")
        lines = with_hashes(pins(packages, LEFT_OUT[extra]))
        (SETUP / f"{extra}.lock").write_text("".join(f"{line}\n" for line in lines))
        if extra == "cpu":
            path = SETUP / "cpu_builds.lock"
            before = path.read_text().splitlines() if path.exists() else []
            path.write_text("".join(f"{line}\n" for line in cpu_builds(locked(extra), before)))


if __name__ == "__main__":
    main()
