"""Where code that a model wrote runs: the interface, and the one that ships.

A sandbox of one's own is a class ``Sandbox(**options)`` in an installed package, named ``package.module:Class``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        passed: Whether it ended by itself, with exit status 0, within time.
        output: What it printed, as far as the sandbox keeps it.
        timed_out: Whether it was still running at the deadline.
    """

    passed: bool
    output: str
    timed_out: bool = False


class Sandbox(Protocol):
    """Runs a Python program and says how it ended; must not raise for anything that the program does."""

    def run(self, program: str, stdin: str, time_limit_s: float) -> Outcome: ...


class LocalSandbox:
    """A child process with resource limits. It is NOT a security boundary.

    The program runs as the user, in a temporary folder that is removed, with no environment but PATH and LANG, with
    limits on processor time, memory and the size of files, and is killed with its children at the deadline. It can
    still read what the user can read and reach whatever network the user can reach. Use it only for models and data
    that are trusted, or inside a container or virtual machine that is the boundary.

    Args:
        memory_bytes: Address space that the program may take.
        output_bytes: Largest file, its output included.
    """

    def __init__(self, memory_bytes: int = 2**30, output_bytes: int = 2**20) -> None:
        self._memory_bytes, self._output_bytes = memory_bytes, output_bytes

    def run(self, program: str, stdin: str, time_limit_s: float) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="mmrl-sandbox-") as folder, tempfile.TemporaryFile() as output:
            script, given = Path(folder, "program.py"), Path(folder, "stdin")
            script.write_text(program, encoding="utf-8", errors="replace")
            given.write_text(stdin, encoding="utf-8", errors="replace")
            limits = [str(int(time_limit_s) + 1), str(self._memory_bytes), str(self._output_bytes)]
            with given.open("rb") as source:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _LIMITED, *limits, script.name],
                    stdin=source,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            status = _status(process, time_limit_s)
            output.seek(0)
            printed = output.read(self._output_bytes).decode("utf-8", "replace")
            return Outcome(status == 0, printed, status is None)


_LIMITED = """
import ctypes, os, resource, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the worker, which may be killed
seconds, memory, size = map(int, sys.argv[1:4])
for limit, value in (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
os.execv(sys.executable, [sys.executable, "-I", sys.argv[4]])
"""


def _status(process: subprocess.Popen[bytes], time_limit_s: float) -> int | None:
    """How the process ended; None if it had to be killed at the deadline."""
    try:
        return process.wait(time_limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the whole session: children that the program left behind too
        process.wait()


def open_sandbox(name: str, options: Mapping[str, Any]) -> Sandbox:
    """The sandbox of that name, made with its options.

    Raises:
        ConfigError: There is none, or the options do not fit.
    """
    import importlib

    module, _, attribute = name.partition(":")
    try:
        made = LocalSandbox if name == "local" else getattr(importlib.import_module(module), attribute)
        sandbox: Sandbox = made(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"The sandbox {name!r} cannot be made: {error}",
            possible="local, or package.module:Class of an installed package",
        ) from error
    if not callable(getattr(sandbox, "run", None)):
        raise ConfigError(f"The sandbox {name!r} has no method run(program, stdin, time_limit_s)")
    return sandbox
