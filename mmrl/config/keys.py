"""Facts of the config's keys by their dotted names: defaults, and which of them may change when a run goes on."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel

from mmrl.config.base import MayChange, Section
from mmrl.config.plugin_specs import PluginSpec
from mmrl.config.sections import Config


def may_change(key: str, section: type[BaseModel] | None = None) -> bool:
    """True if a run may go on though the value at this dotted key has changed."""
    name, _, rest = key.partition(".")
    field = (section or Config).model_fields.get(name)
    if field is None:
        return False
    for mark in field.metadata:
        if isinstance(mark, MayChange):
            return not mark.keys or rest in mark.keys
    parts = [field.annotation, *get_args(field.annotation)]
    inner = next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)
    if inner is None:
        return False
    return may_change(rest.partition(".")[2] if rest[:1].isdecimal() else rest, inner)  # a list's index is left out


def default_of(key: str) -> Any:
    """The default of a key ``section.name`` if it is a text or a number; None for any other key."""
    section, _, name = key.partition(".")
    field = Config.model_fields.get(section)
    inner = field.annotation if field is not None and is_section(field.annotation) else None
    found = inner.model_fields.get(name) if isinstance(inner, type) and issubclass(inner, Section) else None
    return found.default if found is not None and isinstance(found.default, str | int | float) else None


def is_section(annotation: Any) -> bool:
    """True if a field of ``Config`` is a section, as opposed to a plugin or a list of them."""
    return isinstance(annotation, type) and issubclass(annotation, Section) and not issubclass(annotation, PluginSpec)
