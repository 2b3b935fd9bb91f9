"""Calls of functions with arguments that a model wrote."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from mmrl.interfaces import ToolError


class Arguments:
    """Makes a model's arguments those of a function, by its names and type hints; ``"3"`` becomes 3 for an ``int``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        from pydantic import TypeAdapter

        self._name = getattr(function, "__name__", "tool")
        self._signature = inspect.signature(function)
        self._adapters = dict[str, TypeAdapter[Any]]()
        for name, hint in get_type_hints(function).items():
            try:
                self._adapters[name] = TypeAdapter(hint)
            except Exception:  # a type that pydantic does not know tells something to the policy alone
                continue

    def fit(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, converted.

        Raises:
            ToolError: They do not fit; the message says which.
        """
        from pydantic import ValidationError

        try:
            self._signature.bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{self._name}: {str(error)[:200]}.") from error
        converted = dict(arguments)
        for name in self._adapters.keys() & arguments.keys():
            try:
                converted[name] = self._adapters[name].validate_python(arguments[name])
            except ValidationError as error:
                raise ToolError(f"{self._name}: {name}: {error.errors(include_url=False)[0]['msg']}.") from error
        return converted


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
