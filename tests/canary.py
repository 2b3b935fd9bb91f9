"""A pickle that shows whether anybody reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Canary:
    """Leaves a mark when its pickle is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)
