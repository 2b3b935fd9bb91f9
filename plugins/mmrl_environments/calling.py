"""Calls of functions with arguments that a model wrote."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mmrl.interfaces import Arguments, ToolError


def guarded(function: Callable[..., Any], *, answer_errors: bool) -> Callable[..., Any]:
    """The function, with ``ToolError`` for arguments that do not fit its type hints.

    Args:
        answer_errors: Its own exceptions become ``ToolError`` too.
    """
    arguments, wrong = Arguments(function), Exception if answer_errors else ()
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waiting(**given: Any) -> Any:
            fitting = arguments.fit(given)
            try:
                return await function(**fitting)
            except wrong as error:
                raise _as_answer(error) from error

        return waiting

    @functools.wraps(function)
    def calling(**given: Any) -> Any:
        fitting = arguments.fit(given)
        try:
            return function(**fitting)
        except wrong as error:
            raise _as_answer(error) from error

    return calling


def _as_answer(error: Exception) -> ToolError:
    """The exception as the policy reads it."""
    return error if isinstance(error, ToolError) else ToolError(str(error) or type(error).__name__)
