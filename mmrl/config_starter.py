"""A first config to edit, written from the sections' own help and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from mmrl.config_files import to_flow
from mmrl.config_sections import Config, Section, is_section


def starter(values: Mapping[str, Any]) -> str:
    """YAML with ``values`` (by section), and every other key as a comment that shows its default."""
    lines = ["# What is commented out shows the defaults. `mmrl check` says whether the config can run."]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        if is_section(section):
            lines += ["", f"# {inspect.getdoc(section)}", f"{name}:", *_keys(section, values.get(name, {}))]
        else:
            lines += ["", *_key(name, field, values)]
    return "\n".join(lines) + "\n"


def _keys(section: type[Section], values: Mapping[str, Any]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield from ("  " + line for line in _key(name, field, values))


def _key(name: str, field: FieldInfo, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {field.description}"
    if name in values:
        yield f"{name}: {to_flow(values[name])}"
    else:
        default = field.get_default(call_default_factory=True, validated_data={})
        yield f"# {name}: {to_flow(list(default) if isinstance(default, tuple) else default)}"
