"""A folder's files: listed, hashed side by side, and forced to the disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file below a folder by its name from there, links to folders too.

    Raises:
        OSError: A folder cannot be listed; ``Path.rglob`` would leave its files out.
    """

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        for path in (Path(parent, name) for name in [*folders, *names]):
            if path.name in names or path.is_symlink():
                yield str(PurePosixPath(path.relative_to(folder))), path


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def of_each(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """The function's answers, in order; several calls run at a time, as reading and hashing hold no lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def force(folder: Path) -> None:
    """Force a folder, with all files and folders in it, to the disk."""
    of_each(sync, [path for _, path in files_below(folder)])
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
