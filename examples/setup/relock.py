"""Write cpu.lock and gpu.lock anew: all that pyproject's dependencies, with the extras of each, resolve to here.

    .venv/bin/python examples/setup/relock.py [--extra cpu|gpu] [--upgrade]

Versions that are locked already stay as they are unless ``--upgrade``; what both locks hold, they hold in one version
(``KERNEL_COMPILERS`` excepted). Nothing is installed, and a recent pip downloads little.

On a CPU three kinds of packages are left out, because nothing here imports them and beside a CPU torch they do not
load: torchaudio, torchcodec, and the CUDA libraries of a torch that is linked to CUDA. The GPU's lock is resolved
against the package index alone: what pip's configuration adds may hold CPU builds, which ask for no CUDA library.
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
from pathlib import Path
from typing import Any

SETUP = Path(__file__).parent
PYPROJECT = SETUP.parents[1] / "pyproject.toml"
EXTRAS = {"cpu": ("cpu", "ray", "dev"), "gpu": ("gpu", "ray", "dev")}
LEFT_OUT = {"cpu": re.compile(r"torchaudio|torchcodec|cuda-.*|nvidia-(?!ml-py).*"), "gpu": re.compile(r"(?!)")}
KERNEL_COMPILERS = {"apache-tvm-ffi", "triton"}  # the CUDA builds of vLLM and torch pin them
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
    return dict(line.split("==") for line in lines)


def resolve(extra: str, pinned: str) -> Any:
    """pip's report of what it would install into an empty environment."""
    environment = dict(os.environ)
    if extra == "gpu":
        environment = {k: v for k, v in environment.items() if k not in LOCAL_SOURCES} | {"PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq", "--report", "-"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pinned)
        file.flush()
        command += ["--use-feature=fast-deps", "--constraint", file.name, *requirements(extra)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


def pins(report: Any, left_out: re.Pattern[str]) -> list[str]:
    """Sorted ``name==version`` lines, local versions (``+cpu``) stripped."""
    found = [package["metadata"] for package in report["install"]]
    names = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"].split("+")[0] for each in found}
    return [f"{name}=={version}" for name, version in sorted(names.items()) if not left_out.fullmatch(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extra", choices=EXTRAS, help="write this lock alone; default: both")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    options = parser.parse_args()
    for extra in [options.extra] if options.extra else EXTRAS:
        report = resolve(extra, constraints(extra, options.upgrade))
        lines = pins(report, LEFT_OUT[extra])
        (SETUP / f"{extra}.lock").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
