"""Small files of a run, which may be hostile: regular ones of a bounded size, from which no link leads out of the run.

Nothing here waits for a pipe, or reads a device.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mmrl.errors import DataError

MAX_JSON = 2**24
"""Bytes of a JSON file, and of a line."""
MAX_IMAGE = 2**26
"""Bytes of an image's file."""
_MAX_DEPTH = 64
"""Lists and mappings within each other."""


def open_contained(folder: Path, file: Path, most: int | None = None) -> BinaryIO:
    """A regular file that lies in the folder, links followed.

    Args:
        most: The bytes that it may have.

    Raises:
        FileNotFoundError: There is nothing.
        DataError: It is something else, lies elsewhere, is larger, or cannot be read.
    """
    try:
        found = file.resolve(strict=True)
        if not found.is_relative_to(folder.resolve()):
            raise DataError(f"{file.name} is a link that leads out of the run's folder, and is not read")
        opened = os.open(found, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise DataError(f"{file.name} cannot be read: {getattr(error, 'strerror', None) or 'no file'}") from error
    status = os.fstat(opened)
    is_large = most is not None and status.st_size > most
    if is_large or not stat.S_ISREG(status.st_mode):
        os.close(opened)
        raise DataError(f"{file.name} is {f'larger than {most} bytes' if is_large else 'no regular file'}")
    return os.fdopen(opened, "rb")


def read_contained(folder: Path, file: Path, most: int) -> bytes:
    """The bytes of a file that ``open_contained`` opens."""
    with open_contained(folder, file, most) as opened:
        return opened.read(most)


def parsed(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is none, or holds more lists and mappings within each other than anybody could look at.
    """
    try:
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH and _is_deeper(found, _MAX_DEPTH):
        raise ValueError("it is nested too deeply")
    return found


def read_object(folder: Path, file: Path) -> tuple[dict[str, Any], str]:
    """The object in a JSON file, and a sentence if it cannot be read; empty if there is no file."""
    try:
        found = parsed(read_contained(folder, file, MAX_JSON))
    except FileNotFoundError:
        return {}, ""
    except DataError as error:
        return {}, str(error)
    except (OSError, ValueError, MemoryError) as error:
        return {}, f"{file.name} cannot be read: {error}"
    return (found, "") if isinstance(found, dict) else ({}, f"{file.name} holds no object")


def read_records(
    folder: Path, file: Path, fits: Callable[[dict[str, Any]], bool] = bool
) -> tuple[list[dict[str, Any]], str]:
    """The lines of a file that are objects as wanted, and a sentence about the others; empty if there is no file.

    A line that a disk has damaged, or that somebody else than mmrl has written, hides no other.
    """
    try:
        with open_contained(folder, file) as opened:
            return _records_of(opened, file.name, fits)
    except FileNotFoundError:
        return [], ""
    except DataError as error:
        return [], str(error)


def _records_of(
    opened: BinaryIO, name: str, fits: Callable[[dict[str, Any]], bool]
) -> tuple[list[dict[str, Any]], str]:
    found, damaged = list[dict[str, Any]](), list[int]()
    for number, line in enumerate(_lines_of(opened), start=1):
        record = _record(line)
        if record is not None and fits(record):
            found.append(record)
        else:
            damaged.append(number)
    if not damaged:
        return found, ""
    if len(damaged) == 1:
        return found, f"line {damaged[0]} of {name} cannot be read and is left out"
    return found, f"{len(damaged)} lines of {name} cannot be read and are left out; the first one is {damaged[0]}"


def _lines_of(opened: BinaryIO) -> Iterator[bytes]:
    """The lines, without half a line at the end; one that is too long is empty."""
    is_whole = True
    for line in iter(partial(opened.readline, MAX_JSON), b""):
        if line.endswith(b"\n"):
            yield line if is_whole else b""
        is_whole = line.endswith(b"\n")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = parsed(line)
    except (ValueError, MemoryError):
        return None
    return found if isinstance(found, dict) else None


def _is_deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value
    lists = (each for each in inner if isinstance(each, dict | list))
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in lists)
