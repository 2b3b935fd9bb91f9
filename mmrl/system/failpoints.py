"""Named points at which a test can break a run. Only tests set ``inject``."""

from __future__ import annotations

from collections.abc import Callable

inject: Callable[[str], None] | None = None
"""Called with the name of each point that is reached."""


def reach(name: str) -> None:
    """Call ``inject`` at a moment at which a kill, a full disk or a hang has consequences of its own."""
    if inject is not None:
        inject(name)
