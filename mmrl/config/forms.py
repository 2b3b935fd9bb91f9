"""The form of a section, a plugin or a list for a plain word that was written in its place, as it is to be typed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from mmrl.config.data import DataConfig
from mmrl.config.keys import is_section
from mmrl.config.plugin_specs import DatasetSpec, Kind, PluginSpec
from mmrl.config.sections import Config
from mmrl.config.yaml_tree import to_flow

OptionsClass = Callable[[Kind, PluginSpec], type[BaseModel]]
"""(kind, entry) -> the class that validates the plugin's options; raises PluginError."""

_LISTS: Mapping[str, Kind] = {
    "rewards": "reward", "trackers": "tracker", "monitors": "monitor", "data.mix": "dataset",
}  # fmt: skip
_KINDS: Mapping[str, Kind] = {
    "algorithm": "algorithm", "environment": "environment", "data.train": "dataset", "data.eval": "dataset", **_LISTS,
}  # fmt: skip
_IN_ITS_PLACE = "write {} in its place"


def installed(kind: Kind) -> list[str]:
    """The names of the installed plugins of a kind, without importing them."""
    return sorted({entry.name for entry in entry_points(group=f"mmrl.{kind}s")})


def kind_at(key: str) -> Kind | None:
    """The kind of the plugin, or of the list of plugins, at a dotted key; None for other keys."""
    slot = key.rpartition(".")[0] if key.rpartition(".")[2].isdecimal() else key
    return _KINDS.get(slot)


def reader_of_files(options_class: OptionsClass | None) -> str:
    """The installed dataset that reads files which the config has to name, by columns; ``...`` if it is not known."""
    if options_class is None:
        return "..."
    for name in installed("dataset"):
        try:
            options = options_class("dataset", DatasetSpec(name=name)).model_fields
        except Exception:  # told where it is used
            continue
        if "prompt" in options and "path" in options and options["path"].is_required():
            return name
    return "..."


def typed(key: str, value: Any, origin: str, options_class: OptionsClass | None) -> str:
    """The text to write for a plain value that stands where a dotted key wants more, such as ``write
    'cluster={ranks: 2}'``; empty if nothing is known.

    Args:
        origin: The place where the value was written: a file's line is answered with YAML, an override with a word
            for the shell.
    """
    found = _form(key, value, options_class)
    if found is None:
        return ""
    place, form = found
    if place.rpartition(".")[2].isdecimal():
        return _IN_ITS_PLACE.format(to_flow(form))
    if origin.startswith("override "):
        return f"write {shlex.quote(f'{place}={to_flow(form)}')}"
    *parents, last = place.removeprefix(f"{key}.").split(".") if place != key else place.split(".")[-1:]
    inner = to_flow({last: form})[1:-1]
    for parent in reversed(parents):
        inner = f"{parent}: {{{inner}}}"
    last_key = key.rpartition(".")[2]
    return f"write {inner}" if place == key else f"write {last_key}: {{{inner}}}"


def _form(key: str, value: Any, options_class: OptionsClass | None) -> tuple[str, Any] | None:
    """The key to write, which may lie below the given one, and its value."""
    kind = kind_at(key)
    if kind is not None:
        entry = _entry(kind, value, options_class)
        return key, [entry] if key in _LISTS else entry
    section, _, name = key.partition(".")
    field = Config.model_fields.get(section)
    if field is None or not is_section(field.annotation):
        return None
    if name:
        is_list = isinstance(value, str) and _is_list(field.annotation, name)
        return (key, [value]) if is_list else None
    if field.annotation is DataConfig:
        return ("data.train", _entry("dataset", value, options_class)) if isinstance(value, str) else None
    return _key_of_section(section, field.annotation, value)


def _entry(kind: Kind, value: Any, options_class: OptionsClass | None) -> dict[str, Any]:
    """A plugin's entry for a word: its name, or the path of a dataset's file."""
    if not isinstance(value, str):
        return {"name": (installed(kind) or ["..."])[0]}
    is_path = PurePath(value).suffix != "" or "/" in value
    if kind == "dataset" and value not in installed(kind) and (is_path and ".py:" not in value):
        return {"name": reader_of_files(options_class), "path": value}
    return {"name": value}


def _is_list(section: Any, name: str) -> bool:
    field = section.model_fields.get(name)
    return field is not None and any(
        get_origin(each) is tuple for each in (field.annotation, *get_args(field.annotation))
    )


def _key_of_section(section: str, model: Any, value: Any) -> tuple[str, Any] | None:
    """The key of a section that a word or a number is meant for, if one can have it."""
    for name, field in model.model_fields.items():
        options = [field.annotation, *get_args(field.annotation)]
        words = [word for each in options if get_origin(each) is Literal for word in get_args(each)]
        if isinstance(value, str) and (value in words or name == "path"):
            return f"{section}.{name}", value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (float in options or (int in options and isinstance(value, int))):
            return f"{section}.{name}", value
    return None
