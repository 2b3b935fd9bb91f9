"""Processes that are measured in turns: each takes a few steps while the others are stopped, with all their threads.

The first of these steps is not timed: it says little of a run that has the machine for itself. Caches are cold, and
what the process has freed before is the system's again, or its host's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

WARM_UP = 2
"""Steps that are not timed: the first one starts the process and loads the model."""
BLOCK = 4
"""Steps that a process takes in a row."""
HERE = Path(__file__).parent


_C = ctypes.CDLL(None)
_PDEATHSIG = 1


def _end_with_parent() -> None:
    """A stopped process would outlive a parent that is killed."""
    _C.prctl(_PDEATHSIG, signal.SIGKILL)


@dataclass
class Contestant:
    """One process and what is known of its steps.

    Attributes:
        steps: Of each timed step, what the process reported and ``seconds``: from the end of the step before to the
            end of this one.
        memory: Of the last step: the update's resident bytes ``before`` and at its ``peak``.
        last: What it reported at its very end, if anything.
    """

    name: str
    script: str
    job: dict[str, Any]
    log: Path
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, int] | None = None
    last: dict[str, Any] | None = None

    def start(self) -> None:
        """Begin, and wait until told to go on."""
        (lines, told), (heard, go) = os.pipe(), os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", **self.environment}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [self.python, str(HERE / self.script), json.dumps({**self.job, "report": [heard, told]})],
                pass_fds=[heard, told],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        os.close(told)
        os.close(heard)
        self._lines, self._go = os.fdopen(lines), os.fdopen(go, "wb", 0)
        self._signal(signal.SIGSTOP)

    def turn(self) -> dict[str, Any]:
        """Run until the next line; returns it with the seconds that it took.

        Raises:
            RuntimeError: The process ended before that.
        """
        start = time.perf_counter()
        self._signal(signal.SIGCONT)
        line = self._next_line()
        seconds = time.perf_counter() - start
        self._signal(signal.SIGSTOP)  # it waits by itself, and so do its other threads now
        self._go.write(b".")
        return {**json.loads(line), "seconds": seconds}

    def finish(self) -> None:
        """Let it end by itself."""
        self._signal(signal.SIGCONT)
        self._process.wait()
        self._lines.close()
        self._go.close()

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _next_line(self) -> str:
        while True:
            if select.select([self._lines], [], [], 1.0)[0] and (line := self._lines.readline()):
                return line
            if self._process.poll() is not None:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"{self.name} ended with code {self._process.returncode}; {self.log}:\n{tail}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


Kind = Literal["warm-up", "timed", "memory"]


def blocks(timed: int) -> list[list[Kind]]:
    """The steps of a process by its turns: the warm-up, the timed steps, and one for memory at the end."""
    found: list[list[Kind]] = [["warm-up"] * WARM_UP]
    found += [["warm-up", *["timed"] * min(BLOCK - 1, timed - done)] for done in range(0, timed, BLOCK - 1)]
    found[-1].append("memory")
    return found


def steps_of(timed: int) -> int:
    """How many steps that are."""
    return sum(map(len, blocks(timed)))


def take_turns(contestants: Sequence[Contestant], timed: int, *, last_words: bool = False) -> None:
    """Let each take its steps, in turns whose order alternates.

    Args:
        last_words: Whether each has a line more to tell after its last step.
    """
    started: list[Contestant] = []
    try:
        for contestant in contestants:
            contestant.start()
            started.append(contestant)
        for number, block in enumerate(blocks(timed)):
            for contestant in contestants if number % 2 == 0 else contestants[::-1]:
                for kind in block:
                    found = contestant.turn()
                    if kind == "memory":
                        contestant.memory = found["memory"]
                    elif kind == "timed":
                        contestant.steps.append(found)
                    line = f"  {kind:<8} {contestant.name:<24} {found['seconds']:8.2f} s"
                    print(f"{line}, of the processor {found['processor_s']:8.2f} s", file=sys.stderr)
        for contestant in contestants:
            if last_words:
                contestant.last = contestant.turn()
            contestant.finish()
    finally:
        for contestant in started:
            contestant.kill()


def ask(contestant: Contestant) -> dict[str, Any]:
    """Start it, take its one line, let it end."""
    contestant.start()
    try:
        found = contestant.turn()
        contestant.finish()
    finally:
        contestant.kill()
    return found


def call(contestant: Contestant) -> None:
    """Run it to its end.

    Raises:
        RuntimeError: It failed.
    """
    contestant.start()
    try:
        contestant.finish()
    finally:
        contestant.kill()
    if code := contestant._process.returncode:
        tail = "\n".join(contestant.log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{contestant.name} ended with code {code}; {contestant.log}:\n{tail}")


def summary(contestant: Contestant) -> dict[str, Any]:
    """Medians over the timed steps, and their spread.

    - ``seconds``, ``least``, ``most``: of a step.
    - ``processor_s``: median seconds of processor time, all threads together, which other work disturbs less.
    - ``phases``: median seconds of each phase.
    - ``tokens``, ``tokens_per_s``: completion tokens of a step, and all of them over all seconds.
    - ``memory_bytes``: peak of an update above what is resident before it.
    """
    steps = contestant.steps
    seconds = [step["seconds"] for step in steps]
    tokens = [step["tokens"] for step in steps]
    phases = {name: statistics.median(step["phases"].get(name, 0.0) for step in steps) for name in _phases(steps)}
    memory = contestant.memory
    return {
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "phases": phases,
        "tokens": statistics.mean(tokens),
        "tokens_per_s": sum(tokens) / sum(seconds),
        "memory_bytes": None if memory is None else memory["peak"] - memory["before"],
        "processor_s": statistics.median(step["processor_s"] for step in steps),
        "steps": seconds,
    }


def _phases(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for step in steps for name in step["phases"]})


def machine() -> str:
    """The hardware and what ran on it, in words."""
    from importlib.metadata import version

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed"))
    return f"{os.cpu_count()} cores ({cpu}), {memory:.0f} GiB, no GPU; {versions}"


def arguments(
    doc: str,
    name: str,
    what: str,
    *,
    timed: int,
    counted: tuple[str, str] = ("--timed", "timed steps of each side"),
    quick: str = "two timed steps of a tiny model: tries the script only",
) -> argparse.ArgumentParser:
    """The parser of a script that measures ``what``, named by arguments ``name``.

    Args:
        timed: By default, of the steps whose option and help are ``counted``.
        quick: The help of --quick.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(name, nargs="*", help=what)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(counted[0], type=int, default=timed, help=counted[1])
    parser.add_argument("--set", action="append", default=[], help="a further setting of mmrl's, section.key=value")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "mmrl-benchmarks")
    out = Path(f"{Path(sys.argv[0]).stem}.json")
    parser.add_argument("--out", type=Path, default=out, help="raw results; what is there already is kept")
    parser.add_argument("--draw", type=Path, help="only draw what such a file holds")
    return parser
