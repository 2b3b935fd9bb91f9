"""Symbolic links in the place of data: followed, because whoever laid out the folder made them."""

from __future__ import annotations

import os
from pathlib import Path


def broken_link(path: Path) -> str:
    """A sentence on the first link of a path that leads nowhere, such as ``img is a link to /disk/img, which is not
    there``; empty if there is none."""
    for part in [*reversed(path.parents), path]:
        if part.is_symlink() and not part.exists():
            return f"{part} is a link to {os.readlink(part)}, which is not there"
    return ""


def folders_of(path: Path) -> tuple[Path, ...]:
    """The folders of a data file: that of its name, and where the name is a link, that of the file itself."""
    return tuple(dict.fromkeys([path.parent, path.resolve().parent]) if path.is_symlink() else [path.parent])
