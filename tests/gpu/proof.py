"""What one GPU does with mmrl's own code, in nine minutes: kernels, engines, memory, speed, a short training run.

    python -m tests.gpu.proof OUT [--sections NAME,...] [--device cpu|cuda] [--small] [--seconds N]

Run it in the repository's root; nothing needs to be installed but the packages that the page beside this file names.
OUT gets ``proof.jsonl`` (a row a line, as it is found), ``proof.md`` (the same as a table) and ``log`` (what sections
print). The exit code is 6 if a row is bad, else 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.gpu.row import Row, append, counted, markdown, read

ROOT = Path(__file__).parents[2]
ENGINE = ("torch", "transformers", "deepspeed", "pydantic", "yaml", "safetensors", "psutil", "PIL")
LEARNS = (*ENGINE, "pyarrow")
BAD = 6


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the proof.

    Attributes:
        seconds: On a GPU; another section's unused ones may be taken too.
        needs: Modules without which it is skipped.
        module: By default that of its name.
        devices: GPUs without which it is skipped.
    """

    name: str
    seconds: int
    needs: tuple[str, ...] = ENGINE
    module: str = ""
    devices: int = 1


SECTIONS = (
    Section("machine", 15, ("torch",)),
    Section("kernels", 30, ("torch", "transformers", "pydantic")),
    Section("agreement", 90),
    Section("learner", 105, LEARNS),
    Section("tower", 35),
    Section("sampling", 20, ("torch",)),
    Section("optimizer", 35, LEARNS),
    Section("offload", 35, LEARNS),
    Section("checkpoint", 45, LEARNS),
    Section("training", 70, (*LEARNS, "sklearn")),
    Section("endings", 60, LEARNS),
    Section("ranks", 120, LEARNS, devices=2),
    Section("split", 90, LEARNS, devices=2),
    Section("vllm", 600, (*ENGINE, "vllm")),
    Section("sleep", 330, (*LEARNS, "vllm", "peft")),
    Section("vllm-runs", 240, (*LEARNS, "vllm"), "tests.gpu.endings"),
)


class Proof:
    """The sections one after the other, and the files that they leave.

    Args:
        seconds: For all of them; by default their own.
        devices: GPUs that a process here gets; on a CPU ranks share it.
        kind: ``cpu`` or ``cuda``.
    """

    def __init__(
        self, out: Path, sections: Sequence[Section], kind: str, size: str, seconds: float | None, devices: int = 1
    ) -> None:
        self._out, self._kind, self._size = out, kind, size
        lacking = {section.name: _lacking(section, kind, devices) for section in sections}
        self._left = [section for section in sections if not lacking[section.name]]
        own = sum(section.seconds for section in self._left)
        self._end = time.monotonic() + (seconds or own)
        self._scale = min(1.0, (seconds or own) / max(own, 1))
        out.mkdir(parents=True, exist_ok=True)
        self._file, self._shown = out / "proof.jsonl", 0
        self._file.write_text("")
        (out / "log").write_text("")
        for section in sections:
            if why := lacking[section.name]:
                append(self._file, Row(section.name, "all of it", "skipped", "", why))

    def run(self) -> list[Row]:
        """Every section; returns the rows."""
        self._show()
        with tempfile.TemporaryDirectory(prefix="mmrl-proof-") as folder:
            environment = _environment(self._kind, Path(folder))
            while self._left:
                self._run(self._left.pop(0), environment)
        return read(self._file)

    def _run(self, section: Section, environment: dict[str, str]) -> None:
        from mmrl.commands.doctor.finding import ending
        from mmrl.commands.doctor.selftest import run

        deadline = self._deadline(section)
        module = section.module or f"tests.gpu.{section.name}"
        words = [sys.executable, "-m", "tests.gpu.section", module, section.name, self._kind, self._size]
        log = self._out / "log"
        with log.open("a") as file:
            print(f"\n== {section.name}, at most {deadline:.0f} s", file=file)
        begin, start = time.monotonic(), log.stat().st_size
        how = run([*words, str(self._file)], environment, log, deadline, self._show)
        if how:
            said = [line.strip() for line in log.read_bytes()[start:].decode(errors="replace").splitlines()]
            last = ending(" / ".join(line for line in said[-6:] if line), 600) or "none"
            why = f"the process {how}; its last words: {last}"
            append(self._file, Row(section.name, "process", "bad", f"after {time.monotonic() - begin:.0f} s", why))
        self._show()

    def _deadline(self, section: Section) -> float:
        """Seconds that a section may take: its own, and what others before it have left."""
        promised = self._scale * sum(other.seconds for other in self._left)
        return max(self._end - time.monotonic() - promised, 1.0)

    def _show(self) -> None:
        """Print new rows, and write the table."""
        rows = read(self._file)
        for row in rows[self._shown :]:
            why = f"  [{row.why}]" if row.why else ""
            print(f"{row.status:<8}{row.area:<12}{row.name}: {row.value}{why}", flush=True)
        self._shown = len(rows)
        table = self._out / "proof.md.new"
        table.write_text(f"{counted(rows)}\n\n{markdown(rows)}\n")
        table.replace(self._out / "proof.md")


def _lacking(section: Section, kind: str, devices: int) -> str:
    """Why a section cannot run here; empty if it can."""
    if absent := _absent(section.needs):
        return f"not installed: {', '.join(absent)}"
    return (
        f"{section.devices} GPUs are needed; here is {devices}" if kind == "cuda" and devices < section.devices else ""
    )


def _absent(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


def _environment(kind: str, folder: Path) -> dict[str, str]:
    """Returns a section's variables: they lead to this repository's code, and to its plugins if it is not installed."""
    from mmrl.commands.doctor.selftest import trial_variables
    from mmrl.system.version import DISTRIBUTION

    paths = [ROOT, ROOT / "plugins", ROOT / "datasets"]
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        info = folder / f"{DISTRIBUTION.replace('-', '_')}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0\n")
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in names.items())
            for group, names in project["entry-points"].items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        paths.append(folder)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])])
    return {**trial_variables(os.environ, kind), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def _detect() -> tuple[str, int]:
    """The kind of device that a process here gets, and how many."""
    from mmrl.commands.doctor.probe import probe

    found = probe()
    return found.kind, len(found.gpus)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.proof", description=(__doc__ or "").partition("\n")[0])
    names = {section.name: section for section in SECTIONS}
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for proof.jsonl, proof.md and log")
    parser.add_argument("--sections", default="", help=f"some of {','.join(names)}; by default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default what torch offers")
    parser.add_argument("--small", action="store_true", help="sizes that only try the code, for a CPU")
    told = ", ".join(f"{section.name} {section.seconds}" for section in SECTIONS)
    parser.add_argument("--seconds", type=float, help=f"for all of it; by default the sections' own: {told}")
    args = parser.parse_args(arguments)
    if unknown := set(filter(None, args.sections.split(","))) - set(names):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [names[name] for name in names if not args.sections or name in args.sections.split(",")]
    if lacking := _absent(["numpy", "tqdm"]):
        parser.error(f"not installed: {', '.join(lacking)}; tests/gpu/README.md says what is needed")
    size = "small" if args.small else "whole"
    kind, devices = ("cpu", 0) if args.device == "cpu" else _detect()
    rows = Proof(args.out, chosen, args.device or kind, size, args.seconds, devices).run()
    print(f"{counted(rows)}: {args.out / 'proof.md'}")
    return BAD if any(row.status == "bad" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
