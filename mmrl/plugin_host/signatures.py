"""Facts in a function's signature: the way to call it, its options, and if it takes messages."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, create_model

from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import PluginError
from mmrl.interfaces import PluginConfig


class _FromSignature(PluginConfig):
    # Nothing documents its fields. To look for that, pydantic would search all of sys.modules for each frame below.
    model_config = ConfigDict(use_attribute_docstrings=False)


def declares_messages(signature: inspect.Signature) -> bool | None:
    """True if a function says that completions are messages, False if texts; None if it says neither, or both."""
    parameter = signature.parameters.get("completions") or signature.parameters.get("prompts")
    if parameter is None:
        return None
    told = {_are_messages(element) for each in _members(parameter.annotation) for element in _elements(each)}
    return told.pop() if len(told) == 1 else None


def _are_messages(element: Any) -> bool | None:
    """True if completions of this type are messages, False if they are texts; None if it does not tell.

    A list of anything is one of messages, since nothing else that is given is a list.
    """
    if element is str:
        return False
    if _is_a(element, Mapping):
        return True
    if not _is_a(element, Sequence):
        return None
    return True if all(each is Any or _is_a(each, Mapping) for each in _elements(element)) else None


def _members(annotation: Any) -> Iterator[Any]:
    """The types that a value may have by an annotation, None left out."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from _members(each)
    elif origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif annotation is not NoneType:
        yield annotation


def _elements(annotation: Any) -> Iterator[Any]:
    """The types of a list's elements."""
    return _members(next(iter(get_args(annotation)), Any))


def _is_a(annotation: Any, base: type) -> bool:
    cls = get_origin(annotation) or annotation
    return isinstance(cls, type) and issubclass(cls, base)


def named(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return (each for each in signature.parameters.values() if each.kind in kinds)


def takes_all(signature: inspect.Signature) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())


def taken(signature: inspect.Signature, known: Iterable[str]) -> set[str]:
    """The keywords that a function takes, of those that its style knows."""
    return {*known} if takes_all(signature) else {*known} & {each.name for each in named(signature)}


def check_takes_one(signature: inspect.Signature, what: str, remedy: str) -> str:
    """The name of the first parameter, which is given by position."""
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise PluginError(f"function{signature} cannot be called with one argument, {what}", remedy=remedy)
    return first.name


def globals_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The names of the module that a function is written in."""
    inner: Any = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    found: Mapping[str, Any] = getattr(inner, "__globals__", {})
    return found


def options_class(parameters: Iterable[inspect.Parameter], *, lenient: bool = True) -> type[PluginConfig]:
    """An options class with a field for each parameter.

    Args:
        lenient: True leaves parameters that no config can set at their defaults, and ignores annotations that have no
            meaning here or contradict the default.
    """
    fields: dict[str, Any] = {}
    for each in parameters:
        annotation = Any if each.annotation is each.empty else each.annotation
        if lenient:
            if each.default is not each.empty and not _can_be_set(each):
                continue
            annotation = annotation if _fits(annotation, each) else Any
        fields[each.name] = (annotation, ... if each.default is each.empty else each.default)
    return create_model("Config", __base__=_FromSignature, **fields)


def _can_be_set(parameter: inspect.Parameter) -> bool:
    try:
        json.dumps(parameter.default)
    except (TypeError, ValueError):
        return False
    return parameter.name not in RewardSpec.model_fields and not parameter.name.startswith("_")


def _fits(annotation: Any, parameter: inspect.Parameter) -> bool:
    try:
        adapter = TypeAdapter(annotation)
        adapter.json_schema()
        if parameter.default is not parameter.empty:
            adapter.validate_python(parameter.default)
    except Exception:
        return False
    return True
