"""A job in a thread, whose error is raised where it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one job at a time in a thread, beside the thread that starts them.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job once the one before has ended; raises its error, and then begins none."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the job has ended, if there is one; raises its error, once."""
        if self._thread is None:
            return
        self._thread.join()  # a signal may raise here: then it can be waited for again
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # told to the thread that waits
            self._error = error
