"""Fields of records that this version does not know: a later version wrote them, and records are read without them."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from pathlib import Path

from mmrl.system.console import visible

MAX_TOLD, MAX_NAME = 20, 60
"""Names of fields that a process tells of at most, and the characters of each: a damaged file may have any."""
_TOLD = set[str]()
"""Names that this process has told of."""


def tell_unknown(fields: Iterable[str], known: Container[str], file: Path) -> None:
    """Say on standard error, once in a process, which of these fields this version does not know."""
    unknown = (name[:MAX_NAME] for name in fields if name not in known)
    new = [name for name in dict.fromkeys(unknown) if name not in _TOLD][: MAX_TOLD - len(_TOLD)]
    if new:
        _TOLD.update(new)
        what = f"{file} has fields of a later version of mmrl, and is read without them: {', '.join(new)}"
        print(visible(f"mmrl: warning: {what}"), file=sys.stderr)
