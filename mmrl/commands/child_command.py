"""Runs a command of ``mmrl`` in a fresh process and returns its outcome to the caller; this is the caller's end.

Nothing of a run happens in the caller, since vLLM never leaves its process's group and a run handles its own signals.
The process has a session of its own, so Ctrl-C reaches it only through the caller; it ends as after SIGTERM when the
caller is gone. The caller prints its output, or has it go to a file, and raises its error again.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO, cast

from mmrl import errors
from mmrl.errors import MMRLError, PluginError, ResourceError, error_class, first_line
from mmrl.runs.files import writing
from mmrl.system.signals import Request
from mmrl.system.worker_process import python

MODULE = "mmrl.commands.child_tasks"
"""The process calls its ``serve``."""
_PATIENCE_S = 0.2
"""Seconds between looks for output."""
_DRAIN_S = 1.0
"""Seconds for the last output."""

Answer = dict[str, Any]
Watch = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Attributes:
        answer: ``data``, the ``--json`` output, and ``text``, the printed one; empty if there is none.
        stopped: Why it ended early; empty if it did not.
    """

    answer: Answer
    stopped: str

    def complete(self) -> Answer:
        """The answer.

        Raises:
            InterruptedError: It ended early, by somebody else's signal.
        """
        if self.stopped:
            raise InterruptedError(self.stopped)
        return self.answer


class Ended(NamedTuple):
    """The end of a command in plain values."""

    exit_code: int
    message: str
    """The error, or the reason why it ended early; empty if it did all."""


class ChildCommand:
    """The process, seen from the caller.

    Args:
        task: One of ``child_tasks.TASKS``, such as ``train``.
        request: The task's arguments, fit for JSON.
        where: Errors name it.
        log: A file to which its output is appended; by default the caller prints it.
        folder: Its working folder; by default the caller's.
        module: In place of MODULE.

    Raises:
        ResourceError: The log cannot be written.
    """

    def __init__(
        self,
        task: str,
        request: Mapping[str, Any],
        where: str,
        log: Path | None = None,
        *,
        folder: str = "",
        module: str = "",
    ) -> None:
        self._task, self._where = task, where
        self._folder = tempfile.TemporaryDirectory()
        self._outcome = Path(self._folder.name) / "outcome.json"
        self._reason, self._interrupts = "", 0
        with nullcontext(subprocess.PIPE) if log is None else _appended(log) as output:
            self._process = subprocess.Popen(
                python(module or MODULE),
                cwd=folder or None,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
                start_new_session=True,
            )
        self._caller = cast(IO[bytes], self._process.stdin)
        relays = ((self._process.stdout, lambda: sys.stdout), (self._process.stderr, lambda: sys.stderr))
        self._streams = {stream.fileno(): _Relay(stream, to) for stream, to in relays if stream is not None}
        with contextlib.suppress(BrokenPipeError):
            whole = {"task": task, "outcome": str(self._outcome), **request}
            self._caller.write(json.dumps(whole, default=str).encode() + b"\n")
            self._caller.flush()

    def stop(self, why: str, exit_code: int = 10) -> None:
        """Have it end where nothing is lost, and record why; only the first call counts.

        Args:
            why: Goes on after ``stopped``, such as ``by the callback enough after step 3``.
            exit_code: The command's.
        """
        if not self._reason:
            self._reason = why
            with contextlib.suppress(OSError):  # it is gone
                self._caller.write(json.dumps(Request(why, exit_code)).encode() + b"\n")
                self._caller.flush()

    def wait(self, watch: Watch = lambda: None) -> Outcome:
        """Print its output until it has ended, and return its outcome.

        Args:
            watch: Called again and again, and once when it has ended. Its error stops the command, and is raised.

        Raises:
            MMRLError: The command's error; ``ResourceError`` if the process was killed.
            KeyboardInterrupt: Ctrl-C came; the first one was handed on, and let it end where nothing is lost.
        """
        failure: BaseException | None = None
        try:
            is_over = False
            while not is_over:
                try:
                    is_over = self._has_ended()
                    if failure is None:
                        watch()
                except KeyboardInterrupt:
                    self.interrupt()
                    is_over = False
                except BaseException as error:
                    failure = failure or error
                    self.stop(f"by an error of its caller, {type(error).__name__}: {first_line(error)}")
                    is_over = self._process.poll() is not None
            if failure is not None:
                raise failure
            return self._result()
        finally:
            self._close()

    def wait_for_end(self) -> Ended:
        """Wait until it has ended, and tell how in place of raising its error."""
        try:
            outcome = self.wait()
        except KeyboardInterrupt as error:
            return Ended(130, str(error))
        except MMRLError as error:
            return Ended(error.exit_code, str(error))
        except Exception as error:
            return Ended(1, str(error))
        code, reason = self._process.returncode, outcome.stopped
        told = f"stopped {reason}" if reason and not reason.startswith("stopped") else reason
        return Ended(code if code >= 0 else 10, told)

    def interrupt(self) -> None:
        """Hand Ctrl-C on: the first lets it end where nothing is lost, a second ends it at once; from any thread."""
        self._interrupts += 1
        if self._interrupts > 2:
            self._kill()
        else:
            self._process.send_signal(signal.SIGINT)

    def _has_ended(self) -> bool:
        """Wait for new output for a moment, and print it; True if the process is gone."""
        has_ended = self._process.poll() is not None
        deadline = time.monotonic() + (_DRAIN_S if has_ended else _PATIENCE_S)
        while self._streams and time.monotonic() < deadline:
            patience_s = 0 if has_ended else max(0.0, deadline - time.monotonic())
            poll = select.poll()  # ``select.select`` takes no descriptor from 1,024 on
            for place in self._streams:
                poll.register(place, select.POLLIN)
            ready = poll.poll(1000 * patience_s)
            for place, _ in ready:
                if not self._streams[place].hand_on():
                    del self._streams[place]
            if not ready:
                break
        if not has_ended and not self._streams:
            time.sleep(_PATIENCE_S)
        return has_ended

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _close(self) -> None:
        self._kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        self._folder.cleanup()

    def _result(self) -> Outcome:
        try:
            told: Answer = json.loads(self._outcome.read_text(encoding="ascii"))
        except (OSError, ValueError):  # it was ended at once
            told = {}
        code = self._process.returncode
        if self._interrupts:
            raise KeyboardInterrupt(f"{told.get('message', 'ended at once')}: {self._where}")
        if "error" in told:
            raise _error(told["error"])
        if "bug" in told:
            bug = RuntimeError(f"mmrl failed, which is a bug: {told['message']}")
            bug.add_note(told["bug"])
            raise bug
        if "answer" in told:
            return Outcome(told["answer"], "")
        if "message" in told or (self._reason and code == -signal.SIGTERM):
            return Outcome({}, self._reason or told["message"])
        raise self._unexplained(code)

    def _unexplained(self, code: int) -> MMRLError:
        """The error of a process that told none: it was killed, or its watchdog ended it."""
        if code < 0:
            return ResourceError(
                f"the process of mmrl.{self._task} was ended by {signal.Signals(-code).name}",
                where=self._where,
                remedy="if memory ran out (`dmesg` tells), lower what takes it; the same call goes on where it was",
            )
        return error_class(code)(
            f"the process of mmrl.{self._task} ended with exit code {code}; it has printed why", where=self._where
        )


@contextlib.contextmanager
def _appended(log: Path) -> Iterator[IO[bytes]]:
    """The log, open for what is appended to it."""
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    with file:
        yield file


class _Relay:
    """A stream of the process, printed as it comes."""

    def __init__(self, stream: IO[bytes], to: Callable[[], TextIO]) -> None:
        self._stream, self._to = stream, to
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def hand_on(self) -> bool:
        """Print what is there; False at its end."""
        data = os.read(self._stream.fileno(), 2**16)
        text = self._decoder.decode(data, final=not data)
        with contextlib.suppress(OSError):  # nobody reads it
            self._to().write(text)
            self._to().flush()
        return bool(data)


def _error(fields: Mapping[str, Any]) -> MMRLError:
    """The error of the other process, of the nearest class in ``mmrl.errors``."""
    kind = next(getattr(errors, name) for name in fields["classes"] if hasattr(errors, name))
    parts = {name: fields[name] for name in ("where", "possible", "remedy")}
    error: MMRLError = kind(fields["what"], **parts)
    if isinstance(error, PluginError):
        error.details = fields["details"]
    return error
