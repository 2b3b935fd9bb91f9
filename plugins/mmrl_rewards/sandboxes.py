"""Sandboxes for code that a model wrote: the interface, and the one that ships.

Your own sandbox is a class ``Sandbox(**options)`` in an installed package, named ``package.module:Class``.
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

from pydantic import Field, model_validator

from mmrl.errors import ConfigError
from mmrl.interfaces import PluginConfig


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a program.

    Attributes:
        passed: True if it ended by itself, with exit status 0, in time.
        output: Its output, as far as the sandbox keeps it.
        timed_out: True if it was still running at the deadline.
    """

    passed: bool
    output: str
    timed_out: bool = False


class Sandbox(Protocol):
    """Runs a Python program and returns its outcome; it must not raise for anything that the program does."""

    def run(self, program: str, stdin: str, time_limit_s: float) -> Outcome: ...


class LocalSandbox:
    """A child process with resource limits. It is NOT a security boundary.

    The program runs as the user, in a temporary folder that is removed, with no environment of the user's, with
    limits on processor time, memory and the size of files, and is killed at the deadline. All its descendants are
    killed when it ends, those in sessions of their own too, unless it kills its supervisor first. It can still read all
    files that the user can read, and reach every network that the user can reach. Use it only for models and data that
    are trusted, or inside a container or virtual machine that is the boundary.

    Args:
        memory_bytes: Address space that the program may take.
        output_bytes: Largest file, its output included.
    """

    def __init__(self, memory_bytes: int = 2**30, output_bytes: int = 2**20) -> None:
        self._memory_bytes, self._output_bytes = memory_bytes, output_bytes

    def run(self, program: str, stdin: str, time_limit_s: float) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="mmrl-sandbox-") as folder, tempfile.TemporaryFile() as output:
            script = Path(folder, "program.py")
            script.write_text(program, encoding="utf-8", errors="replace")
            limits = [str(time_limit_s), str(self._memory_bytes), str(self._output_bytes)]
            with tempfile.TemporaryFile() as source:  # without a name, so that a program that is tested cannot open it
                source.write(stdin.encode("utf-8", "replace"))
                source.seek(0)
                process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _SUPERVISOR, *limits, script.name],
                    stdin=source,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env=_ENVIRONMENT,
                    start_new_session=True,
                )
            status = _status(process, time_limit_s)
            output.seek(0)
            printed = output.read(self._output_bytes).decode("utf-8", "replace")
            return Outcome(status == 0, printed, status is None)


_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Variables of the program: all it has. Sets have one order in every run."""

SUPERVISING = """
import ctypes, os, signal, sys, time
prctl = ctypes.CDLL(None).prctl
prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: ends with the worker, which may be killed
prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: descendants whose parent has ended become children of this process

def end_descendants():
    while True:
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(entry), signal.SIGKILL)
            except OSError:
                pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break

"""
"""The beginning of a program that supervises another one, on Linux."""

_SUPERVISOR = (
    SUPERVISING
    + """
import resource
seconds, memory, size = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
waited = {signal.SIGCHLD, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
program = os.fork()
if not program:
    prctl(1, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
    for limit, value in (
        (resource.RLIMIT_CPU, int(seconds) + 1), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    os.execv(sys.executable, [sys.executable, "-s", "-P", sys.argv[4]])  # not -I, which ignores PYTHONHASHSEED
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the program has it, and nobody else needs it
deadline, ended = time.monotonic() + seconds, None
while ended is None and (left := deadline - time.monotonic()) > 0:
    got = signal.sigtimedwait(waited, left)
    if got and got.si_signo == signal.SIGTERM:
        break
    while ended is None and (found := os.waitpid(-1, os.WNOHANG))[0]:
        ended = found[1] if found[0] == program else None
end_descendants()
os._exit(124 if ended is None else int(ended != 0))
"""
)
_TIMED_OUT = 124


def _status(process: subprocess.Popen[bytes], time_limit_s: float) -> int | None:
    """The program's exit status; None if it was killed at the deadline."""
    try:
        status = process.wait(time_limit_s + GRACE_S)
        return None if status == _TIMED_OUT else status
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its session, should the supervisor have failed
        process.wait()


GRACE_S = 5.0
"""Seconds beyond a time limit for the supervisor to start, and to kill the processes that are left."""


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


class SandboxOptions(PluginConfig):
    """Options of a plugin that runs code of a model."""

    sandbox: str = "local"
    """Sandbox of the programs: local, or package.module:Class."""
    sandbox_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the sandbox; of local: memory_bytes and output_bytes."""
    i_know_local_is_no_security_boundary: bool = False
    """Must be true for the sandbox local."""

    @model_validator(mode="after")
    def _confirmed(self) -> SandboxOptions:
        if self.sandbox == "local" and not self.i_know_local_is_no_security_boundary:
            raise ValueError(
                "the sandbox local is no security boundary: programs of the model would run as you do; set "
                "i_know_local_is_no_security_boundary: true, or name a sandbox of your own"
            )
        return self

    def open_sandbox(self) -> Sandbox:
        """The sandbox; raises as ``open_sandbox`` does."""
        return open_sandbox(self.sandbox, self.sandbox_options)
