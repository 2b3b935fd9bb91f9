"""A Python process that answers requests, for code that may raise, hang or crash; both ends of the line to it.

It is a fresh interpreter, never a fork: the parent holds the threads of torch and vLLM. It has a session of its own, so
Ctrl-C does not reach it and a kill takes its children too. Requests are pickles of our own, replies are lines of JSON:
the parent unpickles nothing that a plugin made. Prints go nowhere: a plugin cannot reach the stream for replies. The
use of an old name of mmrl is told in the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from mmrl.errors import OldNameWarning
from mmrl.system.redaction import names_a_secret

if TYPE_CHECKING:
    import psutil

Reply = dict[str, Any]

MAX_REPLY_BYTES = 2**28
"""Longest reply; a process that writes more without an end is killed."""

_STOP_TIMEOUT_S = 1.0
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[2:]; import importlib as i; i.import_module(sys.argv[1]).serve()"


def python(module: str) -> list[str]:
    """The command that calls a module's ``serve``, in a fresh interpreter with this one's ``sys.path``."""
    return [sys.executable, "-c", _BOOTSTRAP, module, *(entry or os.getcwd() for entry in sys.path)]


def public_variables() -> dict[str, str]:
    """Environment variables for plugins: no secrets, and one order of sets and hashes in every run."""
    public = {name: value for name, value in os.environ.items() if not names_a_secret(name)}
    return {"PYTHONHASHSEED": "0", **public}


class WorkerProcess:
    """The process, seen from the parent.

    Make it in the thread that asks it: Linux ends the process with the thread that made it.

    Args:
        module: Module of a function ``serve``, which is all that the process runs.
        variables: Its environment variables.
    """

    def __init__(self, module: str, variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            python(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            start_new_session=True,
            bufsize=0,
        )
        streams = self._process.stdin, self._process.stdout, self._process.stderr
        self._requests, self._replies, self._stderr = (cast(IO[bytes], stream) for stream in streams)
        os.set_blocking(self._requests.fileno(), False)
        self._received = bytearray()
        self._killing = threading.Lock()

    @property
    def has_ended(self) -> bool:
        """True if it has ended. It is not reaped, so that its id, which is also its children's group, is not reused."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ask(self, request: bytes, timeout_s: float) -> Reply | None:
        """The one reply to a request; None if none came in time, and the process was killed.

        Raises:
            WorkerProcessEnded: It ended by itself.
        """
        self.send(request, timeout_s)
        return self.receive(timeout_s)

    def send(self, request: bytes, timeout_s: float) -> None:
        """Write a request, as far as the process reads it within that time. The next reply tells the outcome."""
        rest, deadline = memoryview(request), time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while rest and _is_ready(self._requests, select.POLLOUT, deadline):
                rest = rest[os.write(self._requests.fileno(), rest) :]

    def receive(self, timeout_s: float) -> Reply | None:
        """The next reply; None if none came in time, and the process was killed.

        Raises:
            WorkerProcessEnded: It ended by itself, or was killed for a reply that is none.
        """
        deadline = time.monotonic() + timeout_s
        searched = 0
        while self._received.find(b"\n", searched) < 0:
            searched = len(self._received)
            if not _is_ready(self._replies, select.POLLIN, deadline):
                self.kill()
                return None
            part = os.read(self._replies.fileno(), 2**16)
            if not part:
                self.kill()
                raise WorkerProcessEnded(self._how_it_ended(), (self._stderr.read() or b"").decode(errors="replace"))
            self._received += part
            if len(self._received) > MAX_REPLY_BYTES:
                self._received = bytearray(b"\n")
        line, _, self._received = self._received.partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            self.kill()
            raise WorkerProcessEnded("something else wrote to its stream for replies", "")
        for message, file, number in reply.pop("old_names", ()):
            warnings.warn_explicit(str(message), OldNameWarning, str(file), int(number))
        return reply

    def stop(self) -> None:
        """Let the process end by itself; kill it if it does not within a second, and its children in any case."""
        descendants = self._descendants()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()
        _end(descendants)
        self._replies.close()
        self._stderr.close()

    def kill(self) -> None:
        """End the process now, and its children even if it has ended by itself; callable from any thread.

        Those that have left its session end too, unless it has ended by itself. Only this method reaps it.
        """
        with self._killing:
            if self._process.returncode is None:
                descendants = self._descendants()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                _end(descendants)
                self._process.wait()

    def _descendants(self) -> list[psutil.Process]:
        """Its children and theirs, whatever their session; none once it has ended."""
        import psutil

        with contextlib.suppress(psutil.Error):
            found: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
            return found
        return []

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if code >= 0:
            return f"exit code {code}"
        known = -code in set(signal.Signals)  # real-time signals have no names
        return f"signal {signal.Signals(-code).name if known else -code}"


def _end(processes: Iterable[psutil.Process]) -> None:
    import psutil  # here, as the processes themselves need none of it

    for each in processes:
        with contextlib.suppress(psutil.Error):
            each.kill()


def _is_ready(stream: IO[bytes], event: int, deadline: float) -> bool:
    """True if, before the deadline, the stream can be read or written, or is closed at its other end."""
    poll = select.poll()
    poll.register(stream, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


class WorkerProcessEnded(Exception):
    """A process that ended instead of answering.

    Attributes:
        how: Its exit code or signal.
        stderr: Its output there before it took requests.
    """

    def __init__(self, how: str, stderr: str) -> None:
        super().__init__(how)
        self.how, self.stderr = how, stderr


class Line:
    """The parent, seen from the process: requests to read, in order, and replies to send.

    From here on stdin, stdout and stderr of this process are empty, Ctrl-C is left to the parent, and this process ends
    with the parent even if it is busy. A fork of this process ends where it would reply.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        _die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._requests, self._replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        with open(os.devnull, "r+b") as nowhere:
            for stream in (0, 1, 2):
                os.dup2(nowhere.fileno(), stream)
        self._old_names: list[tuple[str, str, int]] = []
        warnings.showwarning = self._note  # the hook that Python's documentation names for this

    def __iter__(self) -> Iterator[Any]:
        with contextlib.suppress(EOFError):
            while True:
                yield pickle.load(self._requests)

    def send(self, reply: Reply) -> None:
        if os.getpid() != self._pid:
            os._exit(1)
        told, self._old_names = self._old_names, []
        self._replies.write(json.dumps(reply | ({"old_names": told} if told else {})).encode() + b"\n")
        self._replies.flush()

    def _note(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Keep a warning of an old name for the next reply; nobody would read others."""
        if issubclass(category, OldNameWarning):
            self._old_names.append((str(message), filename, lineno))


def _die_with_parent() -> None:
    """End this process when the parent is gone.

    An idle one sees its stdin end. A busy one is ended by a thread, or by the kernel (Linux) where C code holds the
    interpreter lock.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        set_parent_death_signal = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
