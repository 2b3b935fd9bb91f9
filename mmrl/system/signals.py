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
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(BaseException):
    """A signal asks the run to end. No Exception, so that nobody takes it for a fault of theirs.

    Attributes:
        exit_code: 130 after Ctrl-C, else 10.
    """

    def __init__(self, number: int) -> None:
        self.exit_code = 130 if number == signal.SIGINT else 10
        super().__init__(f"stopped by {signal.Signals(number).name}")


class Interruption:
    """What signals do to this process.

    At first they raise ``Stopped`` where they arrive. Within ``deferred`` they are noted, for ``check`` to raise;
    within ``immediate`` inside of that they raise again.

    As a context it takes the signals over, and gives them back at the end.

    Attributes:
        stopped: What the first signal asks for; None before.
    """

    def __init__(self) -> None:
        self.stopped: Stopped | None = None
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
        """Nothing in this block is interrupted."""
        with self._mode(True):
            yield

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Whatever is done in this block may be left half done.

        Raises:
            Stopped: At once if a signal came before.
        """
        with self._mode(False):
            self.check()
            yield

    def only_note(self) -> None:
        """Only note signals from now on: the run is done, and raising would break what is taken down."""
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

    def _handle(self, number: int, frame: Any) -> None:
        if self.stopped is not None:
            try:
                print(f"mmrl: {signal.Signals(number).name} again: ended at once", file=sys.stderr, flush=True)
            finally:
                end_process(Stopped(number).exit_code)
        self.stopped = Stopped(number)
        self._tell(number)
        if _held and not self._is_deferred:
            _late.append(self.stopped)
        elif not self._is_deferred:
            raise self.stopped

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # such as a signal within another print
            name = signal.Signals(number).name
            print(f"mmrl: {name}: the run ends where nothing is lost; a second signal ends it at once", file=sys.stderr)


_held: list[None] = []
_late: list[Stopped] = []


@contextmanager
def defer_signals() -> Iterator[None]:
    """What must be done whole or not at all: ``Stopped`` is raised at the end of the block; can be nested.

    Only the main thread is ever interrupted. Blocking signals would not do: Python's handlers run there whichever
    thread of the process, Ray's for one, the system has given the signal to.
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
    """Put back the handlers that a block replaces, below what Python knows of them too; in the main thread only.

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
    """To be called first thing in a process; what it returns, with the exit code once that is known.

    The interpreter would take seconds to take torch and vLLM down: the process ends after its last exit function. A
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
    """End this process and all that it has started, whatever they are doing."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(code)
