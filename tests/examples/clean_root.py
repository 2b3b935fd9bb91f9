"""Carries out the steps of a Dockerfile's target in a root of their own, without a container engine. Needs root.

    python -m tests.examples.clean_root TARGET ROOT [COMMAND ...]

ROOT is an empty or missing folder, or one that this has filled. In place of the base image it gets a Debian with
Python, by debootstrap. COMMAND is run last, as the image would run it: these are the entry point's arguments.

Mounts are those of a namespace that ends with each step. The step sees the machine's network, and what pip's
configuration names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = REPOSITORY / "examples/setup/Dockerfile"
BASE = ("debootstrap", "--variant=minbase", "--include=python3,python3-venv,python3-dev,ca-certificates", "bookworm")
"""In place of the image ``python:3.11-slim-bookworm``."""
ENTER = """\
set -e
root=$1; shift
for place in /proc /sys /dev; do mount --rbind $place "$root$place"; done
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root$(dirname "$1")"; touch "$root$1"; fi
    mount --bind "$1" "$root$1"; shift
done
shift
exec "$@"
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Keyword and argument of each instruction, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        keyword, _, argument = line.strip().partition(" ")
        yield keyword.upper(), " ".join(argument.split())


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by name, its FROM first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for keyword, argument in instructions(text):
        if keyword == "FROM":
            current = found.setdefault(argument.split()[-1], [])
        current.append((keyword, argument))
    return found


def steps(text: str, target: str) -> list[tuple[str, str]]:
    """The instructions of a stage and of those that it is built from; the first is the FROM of an image."""
    own = stages(text)[target]
    parent = own[0][1].split()[0]
    return [*steps(text, parent), *own[1:]] if parent in stages(text) else own


def named_by_pip() -> list[str]:
    """Files and folders of this machine that pip and the network need."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = {"/etc/resolv.conf", "/etc/pip.conf", *re.findall(r"(?<![\w.-])/(?!/)[\w./-]+", told)}
    return sorted(path.removesuffix("/simple") for path in paths if Path(path).exists())


@dataclass
class CleanRoot:
    """A root and the state that the steps leave: environment, working directory, user.

    Attributes:
        arguments: Values of ARGs.
    """

    root: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"

    def make(self) -> None:
        """Fill the root with what the base image would have."""
        if not (self.root / "usr/bin/python3").exists():
            subprocess.run([*BASE, str(self.root)], check=True)
        python = self.root / "usr/local/bin/python"
        if not python.exists():
            python.symlink_to("/usr/bin/python3")
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

    def carry_out(self, keyword: str, argument: str) -> None:
        """One instruction."""
        match keyword:
            case "FROM":
                self.make()
            case "ARG":
                name, _, default = argument.partition("=")
                self.environment[name] = self.arguments.get(name, default)
            case "ENV":
                for pair in argument.split():
                    name, _, value = pair.partition("=")
                    self.environment[name] = Template(value).substitute(self.environment)
            case "WORKDIR":
                self.folder = argument
                (self.root / argument.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = argument
            case "COPY":
                *sources, place = argument.split()
                self.copy(sources, place)
            case "RUN":
                self.run("/bin/sh", "-c", argument)
            case "ENTRYPOINT" | "CMD":
                json.loads(argument)
            case _:
                raise ValueError(f"{keyword} is not among the instructions that are carried out here")

    def copy(self, sources: Sequence[str], place: str) -> None:
        folder = self.root / self.folder.lstrip("/") / place
        for source in map(REPOSITORY.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, folder)

    def run(self, *command: str) -> None:
        """Run a command inside, with its output on this console."""
        shown = {name: os.environ[name] for name in os.environ if re.match(r"PIP_|SSL_CERT|\w+_CA_BUNDLE", name)}
        environment = [f"{name}={value}" for name, value in (shown | self.environment).items() if value]
        home = "/root" if self.user == "0" else "/home/mmrl"
        inside = ["chroot", f"--userspec={self.user}:{self.user}", str(self.root), "/usr/bin/env", "-i"]
        inside += [f"--chdir={self.folder}", f"HOME={home}", *environment, *command]
        enter = ["unshare", "--mount", "/bin/sh", "-c", ENTER, "enter", str(self.root), *named_by_pip(), "--"]
        subprocess.run([*enter, *inside], check=True)


def build(root: CleanRoot, target: str, text: str) -> list[str]:
    """Carry out a target's steps; returns its entry point."""
    entry: list[str] = []
    for keyword, argument in steps(text, target):
        began = time.monotonic()
        print(f"{keyword} {argument}", flush=True)
        root.carry_out(keyword, argument)
        print(f"    {time.monotonic() - began:.0f} s", flush=True)
        if keyword == "ENTRYPOINT":
            entry = json.loads(argument)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("root", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    arguments = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    root = CleanRoot(options.root.absolute(), arguments)
    entry = build(root, options.target, DOCKERFILE.read_text())
    root.run(*entry, *options.command)
    size = subprocess.run(["du", "-sxm", str(root.root)], check=True, capture_output=True, text=True).stdout
    print(f"{size.split()[0]} MB")


if __name__ == "__main__":
    main()
