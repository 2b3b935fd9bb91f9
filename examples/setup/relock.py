"""Write cpu.lock anew: all that pyproject's dependencies, with the extras cpu and dev, resolve to here.

    python3.11 examples/setup/relock.py [--upgrade]

Versions that are locked already stay as they are unless ``--upgrade``. Nothing is installed. Three kinds of packages
are left out, because nothing here imports them and beside a CPU torch they do not load: torchaudio, torchcodec, and
the CUDA libraries of a torch that is linked to CUDA.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

LOCK = Path(__file__).with_name("cpu.lock")
PYPROJECT = LOCK.parents[2] / "pyproject.toml"
EXTRAS = ("cpu", "dev")
LEFT_OUT = re.compile(r"torchaudio|torchcodec|cuda-.*|nvidia-(?!ml-py).*")


def requirements() -> list[str]:
    """Everything that pyproject asks for on a machine without a GPU, its build system included."""
    tables = tomllib.loads(PYPROJECT.read_text())
    project = tables["project"]
    extras = [requirement for extra in EXTRAS for requirement in project["optional-dependencies"][extra]]
    return [*tables["build-system"]["requires"], *project["dependencies"], *extras]


def resolve(constraints: Path | None) -> Any:
    """pip's report of what it would install into an empty environment."""
    options = ["--dry-run", "--ignore-installed", "--quiet", "--quiet", "--report", "-"]
    options += ["--constraint", str(constraints)] if constraints else []
    command = [sys.executable, "-m", "pip", "install", *options, *requirements()]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def pins(report: Any) -> list[str]:
    """Sorted ``name==version`` lines, local versions (``+cpu``) stripped."""
    found = [package["metadata"] for package in report["install"]]
    names = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"].split("+")[0] for each in found}
    return [f"{name}=={version}" for name, version in sorted(names.items()) if not LEFT_OUT.fullmatch(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = parser.parse_args().upgrade
    report = resolve(constraints=None if upgrade or not LOCK.exists() else LOCK)
    LOCK.write_text("".join(f"{pin}\n" for pin in pins(report)))


if __name__ == "__main__":
    main()
