"""Signals: the first one ends the run where nothing is lost, a second one at once."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Request(NamedTuple):
    """A program's wish that the run end."""

    why: str
    """Goes on after ``stopped``, such as ``by the callback enough after step 3``."""
    exit_code: int


class Stopped(BaseException):
    """A signal, or the program that started the run, asks it to end. It is no Exception, so that no handler of errors
    catches it.

    Args:
        request: The program's, in place of the signal that brought it.

    Attributes:
        exit_code: The request's; of a signal 130 after Ctrl-C, else 10.
    """

    def __init__(self, number: int, request: Request | None = None) -> None:
        of_signal = Request(f"by {signal.Signals(number).name}", 130 if number == signal.SIGINT else 10)
        self.why, self.exit_code = request or of_signal
        super().__init__(f"stopped {self.why}")


class Interruption:
    """Handles the signals of this process.

    At first they raise ``Stopped`` where they arrive. Within ``deferred`` they are noted, and ``check`` raises them.
    Within ``immediate`` inside of that they raise again.

    As a context it takes the signals over, and gives them back at the end.

    Args:
        consequence: The outcome of the first signal, for its message.

    Attributes:
        stopped: The first signal's exception; None before.
    """

    def __init__(self, consequence: str = "the run ends") -> None:
        self.stopped: Stopped | None = None
        self._consequence = consequence
        self._request: Request | None = None
        self._is_deferred = False
        self._kept = ExitStack()
        self._is_active = False

    def __enter__(self) -> Self:
        self._kept.enter_context(handlers_kept())
        self._is_active = True
        self.renew()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_active = False
        self._kept.close()

    def renew(self) -> None:
        """Take the signals over again, from a library that has taken them meanwhile; only within the context."""
        if self._is_active and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Interrupt nothing in this block."""
        with self._mode(True):
            yield

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Let signals interrupt this block at any point.

        Raises:
            Stopped: At once if a signal came before.
        """
        with self._mode(False):
            self.check()
            yield

    def only_note(self) -> None:
        """Only note signals from now on: the run is done, and raising would break its teardown."""
        self._is_deferred = True

    def check(self) -> None:
        """Raises Stopped if a signal came."""
        if self.stopped is not None:
            raise self.stopped

    @contextmanager
    def _mode(self, is_deferred: bool) -> Iterator[None]:
        before, self._is_deferred = self._is_deferred, is_deferred
        try:
            yield
        finally:
            self._is_deferred = before

    def ask(self, request: Request) -> None:
        """Have this process stop as after SIGTERM, told and recorded as what it is; from any thread."""
        self._request = request
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: Any) -> None:
        if self.stopped is not None:
            try:
                print(f"mmrl: {signal.Signals(number).name} again: ended at once", file=sys.stderr, flush=True)
            finally:
                end_process(Stopped(number).exit_code)
        self.stopped = Stopped(number, self._request if number == signal.SIGTERM else None)
        self._tell(self.stopped)
        if _held and not self._is_deferred:
            _late.append(self.stopped)
        elif not self._is_deferred:
            raise self.stopped

    def _tell(self, stopped: Stopped) -> None:
        again = "; a second signal ends it at once" if stopped.exit_code in (10, 130) else ""
        with contextlib.suppress(OSError, RuntimeError):  # such as a signal within another print
            print(f"mmrl: {stopped}: {self._consequence} where nothing is lost{again}", file=sys.stderr)


_held: list[None] = []
_late: list[Stopped] = []


@contextmanager
def defer_signals() -> Iterator[None]:
    """Raise ``Stopped`` only at the end of the block, so that it is done as a whole; can be nested.

    Only the main thread is ever interrupted. Blocking signals would not help: Python's handlers run in the main thread,
    whichever thread of the process (Ray's, for one) the system has given the signal to.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _held.append(None)
    try:
        yield
    finally:
        _held.pop()
        if _late and not _held:
            raise _late.pop()


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Put back the handlers that a block replaces, the system's own included; in the main thread only.

    Ray 2.60 aborts the process on SIGTERM while it is connected, and resets the handler when it disconnects.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def prepare_exit() -> Callable[[int], None]:
    """Prepare a fast end of the process. Call this first, and call the function that it returns with the exit code.

    The interpreter would take seconds to take torch and vLLM down, so the process ends after its last exit function. A
    signal before that ends it at once, with the same code.
    """
    codes = list[int]()

    def finish(code: int) -> None:
        codes.append(code)
        for number in SIGNALS:
            signal.signal(number, lambda *_: os._exit(code))

    def leave() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if codes:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(codes[-1])

    atexit.register(leave)  # what is registered first is called last
    return finish


def end_process(code: int) -> None:
    """End this process and all processes that it has started, at once."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(code)
