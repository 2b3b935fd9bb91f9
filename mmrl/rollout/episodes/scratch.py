"""Folders of workers, which are removed with them; those of a process that was killed are removed by a later one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK = "mmrl-environment-", ".lock"


class Scratch:
    """A new folder, locked as long as this process lives or until it is removed.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self.path / f"{_LOCK}-new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        with suppress(OSError):  # without locks it is never taken for abandoned
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the folder with all that is in it; harmless if that was done."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned() -> None:
    """Remove folders that nobody holds."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another user's, or held
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
