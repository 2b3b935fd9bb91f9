"""Files that outlive a kill: replaced in one move, or appended line by line; and the lock on a folder."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from mmrl.errors import DataError, ResourceError
from mmrl.system import failpoints

LOCK = ".lock"
_BLOCK_BYTES = 2**16
_WAITS_S = (0.02, 0.1)
"""A viewer that asks whether the run is live holds the lock for some microseconds."""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; none if it is not there."""
    try:
        with path.open(encoding="ascii") as lines:
            for line in lines:
                if line.endswith("\n"):  # else it is half a line, of a process that writes or was killed
                    if not isinstance(record := json.loads(line), dict):
                        raise ValueError(f"{line[:60].rstrip()} is no object")
                    yield record
    except (FileNotFoundError, NotADirectoryError):  # the run's folder may be a file
        return
    except ValueError as error:
        raise _no_record(path, error) from error


def is_locked(folder: Path) -> bool:
    """True if a process keeps others out of a folder, as ``locked`` has it; leaves no trace in there."""
    try:
        with open(folder / LOCK, opener=_without_waiting) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _without_waiting(path: str, flags: int) -> int:
    """Opens also a pipe at once."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_records_back(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file from the last one on; none if it is not there. No more of it is read than is asked for."""
    try:
        with path.open("rb") as file:
            for line in _lines_back(file):
                yield json.loads(line)
    except (FileNotFoundError, NotADirectoryError):
        return
    except ValueError as error:
        raise _no_record(path, error) from error


def check_records(path: Path) -> None:
    """Check that lines look like records, without reading their values: a hundred times as fast as to read them.

    Raises:
        DataError: One does not.
    """
    with suppress(FileNotFoundError), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n") and not (line.startswith(b'{"') and line.endswith(b"}\n")):
                raise _no_record(path, f"line {number}")


def _no_record(path: Path, what: object) -> DataError:
    return DataError(f"a line of the run's history is no JSON: {what}", where=str(path))


def _lines_back(file: BinaryIO) -> Iterator[bytes]:
    """Lines from the last one on, without half a line at the end."""
    start, rest = file.seek(0, os.SEEK_END), b""
    is_whole = False
    while start:
        reach = start
        start = max(start - _BLOCK_BYTES, 0)
        file.seek(start)
        rest, *lines = (file.read(reach - start) + rest).split(b"\n")
        for line in reversed(lines):
            if is_whole:
                yield line
            is_whole = True
    if is_whole:
        yield rest


def mend(file: BinaryIO) -> None:
    """Take away the half line at the end of a file whose writer was killed, or had no room."""
    whole = whole_size(file)
    if whole < file.seek(0, os.SEEK_END):
        file.truncate(whole)


def whole_size(file: BinaryIO) -> int:
    """Bytes of a file up to the end of its last whole line."""
    start, end = file.seek(0, os.SEEK_END), -1
    while start and end < 0:
        reach = start
        start = max(start - _BLOCK_BYTES, 0)
        file.seek(start)
        end = file.read(reach - start).rfind(b"\n")
    return start + end + 1


@contextmanager
def making(path: Path) -> Iterator[None]:
    """Turn an error of making a run's folder into a ResourceError."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"cannot make {path}: {error.strerror}", where="trainer.run_dir") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of writing into a ResourceError."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"the folder cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="make room, or make it writable; the same command goes on where it was",
        ) from error


def locked(path: Path, where: str = "trainer.run_dir") -> TextIO:
    """A lock on the folder, held until the file is closed or the process ends.

    Args:
        where: The key or option that names the folder.

    Raises:
        ResourceError: Another process holds it, or the file system has no locks.
    """
    with writing(path / LOCK):
        file = (path / LOCK).open("w")
    try:
        for wait_s in _WAITS_S:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            time.sleep(wait_s)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            what, remedy = f"another process is using {path}", f"choose another {where}"
        else:
            what = f"{path} cannot be locked: {error.strerror}"
            remedy = f"choose a {where} on a file system that has locks (flock), such as a local disk"
        raise ResourceError(what, where=where, remedy=remedy) from error
    return file


def replace_file(path: Path, text: str) -> None:
    """Write a whole file in one move: readers see the old one or the new one, also after a crash.

    Raises:
        ResourceError: The disk is full or cannot be written.
    """
    with replacing(path, "directory.replacing") as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path, point: str) -> Iterator[BinaryIO]:
    """A file that takes the place of another in one move, once it is filled and forced to the disk.

    Args:
        point: The failpoint before the move.

    Raises:
        ResourceError: The disk is full or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            failpoints.reach(point)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
