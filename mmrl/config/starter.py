"""A first config to edit, written from the sections' and the plugins' own help and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mmrl.config.base import Section
from mmrl.config.keys import is_section
from mmrl.config.plugin_specs import PluginSpec
from mmrl.config.sections import Config
from mmrl.config.yaml_tree import to_flow

_HEADING = "# Lines that are commented out show the defaults. `mmrl check` says whether the config can run."


def starter(
    values: Mapping[str, Any],
    options: Mapping[str, type[BaseModel]] | None = None,
    notes: Mapping[str, str] | None = None,
    heading: Sequence[str] = (),
) -> str:
    """YAML with ``values`` (by section), and every other key as a comment that shows its default.

    Args:
        options: By the dotted key of a plugin, such as ``data.train`` or ``rewards.0``: the class of its options, which
            are shown too. One that is required and has no value becomes a placeholder, such as ``<path>``.
        notes: Remarks beside the plugins' names, by the same keys.
        heading: Further lines for the top of the file.
    """
    writer = _Writer(options or {}, notes or {})
    lines = [_HEADING, *(f"# {line}".rstrip() for line in heading)]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        if is_section(section):
            lines += ["", f"# {inspect.getdoc(section)}", f"{name}:", *writer.section(name, values.get(name, {}))]
        elif name not in values and field.default is None:
            lines += ["", *_help(field), *_commented(name, field)]
        else:
            lines += ["", *writer.key(name, name, field, values)]
    return "\n".join(lines) + "\n"


class _Writer:
    def __init__(self, options: Mapping[str, type[BaseModel]], notes: Mapping[str, str]) -> None:
        self._options, self._notes = options, notes

    def section(self, name: str, values: Mapping[str, Any]) -> Iterator[str]:
        section: Any = Config.model_fields[name].annotation
        for key, field in section.model_fields.items():
            yield from _indented(self.key(f"{name}.{key}", key, field, values))

    def key(self, dotted: str, name: str, field: FieldInfo, values: Mapping[str, Any]) -> Iterator[str]:
        """The lines of one key, with its help."""
        yield from _help(field)
        spec = next((each for each in _classes(field.annotation) if issubclass(each, PluginSpec)), None)
        if name not in values:
            yield f"# {name}: {to_flow(_default(field))}"
        elif spec is None:
            yield f"{name}: {to_flow(values[name])}"
        elif isinstance(values[name], Mapping):
            yield f"{name}:"
            yield from _indented(self._plugin(dotted, spec, values[name]))
        else:
            yield f"{name}:"
            for index, entry in enumerate(values[name]):
                first, *rest = self._plugin(f"{dotted}.{index}", spec, entry)
                yield f"  - {first}"
                yield from _indented(_indented(rest))

    def _plugin(self, dotted: str, spec: type[PluginSpec], entry: Mapping[str, Any]) -> Iterator[str]:
        """The lines of one plugin: the options that are set, and then every other one, if its class is known."""
        note = self._notes.get(dotted)
        model = self._options.get(dotted)
        fields = {} if model is None else {each.alias or key: each for key, each in model.model_fields.items()}
        missing = [key for key, field in fields.items() if field.is_required() and key not in entry]
        for key, value in {**entry, **{key: f"<{key}>" for key in missing}}.items():
            yield f"{key}: {to_flow(value)}" + (f"  # {note}" if note and key == "name" else "")
        if note or model is not None:
            for key, field in {**fields, **spec.model_fields}.items():
                if key not in entry and not field.is_required():
                    yield from _help(field)
                    yield f"# {key}: {to_flow(_default(field))}"


def _commented(name: str, field: FieldInfo) -> Iterator[str]:
    """A plugin that a config may leave out, as a comment with all its keys."""
    yield f"# {name}:"
    for spec in _classes(field.annotation):
        for key, inner in spec.model_fields.items():
            yield from (f"# {line}" for line in _indented([*_help(inner)]))
            yield f"#   {key}: {f'<{name}>' if inner.is_required() else to_flow(_default(inner))}"


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    yield from ("  " + line for line in lines)


def _help(field: FieldInfo) -> Iterator[str]:
    if field.description:
        yield f"# {' '.join(field.description.split())}"


def _classes(annotation: Any) -> Iterator[type[Section]]:
    """The sections that an annotation speaks of, itself one or within a list or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _classes(inner)


def _default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return default.model_dump(mode="json", by_alias=True)
    if isinstance(default, tuple):
        return [each.model_dump(exclude_defaults=True) if isinstance(each, BaseModel) else each for each in default]
    return default
