"""A tool's arguments as a model wrote them, made those of the function."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary


class ToolError(Exception):
    """A mistake of the policy's call; the message is what it reads."""


class Arguments:
    """Makes a model's arguments those of a function, by its names and type hints; ``"3"`` becomes 3 for an ``int``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        from pydantic import TypeAdapter

        self._name = getattr(function, "__name__", "tool")
        self._signature = inspect.signature(function)
        self._adapters = dict[str, TypeAdapter[Any]]()
        for name, hint in get_type_hints(function, include_extras=True).items():
            try:
                self._adapters[name] = TypeAdapter(hint)
            except Exception:  # a type that pydantic does not know tells something to the policy alone
                continue

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Arguments:
        """The arguments of a function, made once for it; a method's are the same ones in all objects of its class."""
        lasting = getattr(function, "__func__", function)
        try:
            return _KNOWN[lasting]
        except (KeyError, TypeError):  # a callable object may have no hash
            found = cls(function)
        with contextlib.suppress(TypeError):
            _KNOWN[lasting] = found
        return found

    def fit(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, converted.

        Raises:
            ToolError: They do not fit; the message says which.
        """
        from pydantic import ValidationError

        try:
            self._signature.bind(**arguments)
        except TypeError as error:  # names of arguments are model output too
            raise ToolError(f"{self._name}: {str(error)[:200]}.") from error
        converted = dict(arguments)
        for name, value in arguments.items():
            if (adapter := self._adapters.get(name)) is None:
                continue
            try:
                converted[name] = adapter.validate_python(value)
            except ValidationError as error:
                raise ToolError(f"{self._name}: {name}: {error.errors(include_url=False)[0]['msg']}.") from error
        return converted


_KNOWN: WeakKeyDictionary[Callable[..., Any], Arguments] = WeakKeyDictionary()
