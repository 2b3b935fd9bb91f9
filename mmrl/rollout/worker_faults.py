"""Exceptions of plugins as replies of their worker process: what was raised, and where."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from mmrl.system.worker_process import Reply


def raised(error: BaseException) -> Reply:
    """A plugin's exception as ``what`` it raised, its ``place``, and its traceback in ``details``."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "what": f"raised {type(error).__name__}: {excerpt(error, str)}",
        "place": f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "",
        "details": "".join(traceback.format_exception(error)),
    }


def excerpt(value: object, text: Callable[[object], str] = repr, limit: int = 200) -> str:
    """The beginning of a value, for a message."""
    try:
        shown = text(value)
    except Exception:
        shown = "(that cannot be shown)"
    return shown if len(shown) <= limit else shown[:limit] + "..."
