"""The config's keys and the plugins' options with their own descriptions, read from the source and not imported.

A plugin may import torch, which takes seconds. The source has names, defaults and docstrings of fields as they are.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from mmrl.commands.help.passage import Passage
from mmrl.config.plugin_specs import Kind
from mmrl.config.synonyms import words
from mmrl.config.yaml_tree import to_flow
from mmrl.plugin_host.installed import installed

_SECTIONS = tuple(
    f"mmrl.config.{name}"
    for name in ("sections", "data", "evaluations", "reference", "critic", "cluster", "partial", "plugin_specs")
)
_SHARED = "mmrl.policy_gradient"
_WHERE: Mapping[str, str] = {
    "algorithm": "algorithm",
    "reward": "rewards[]",
    "dataset": "data.train",
    "environment": "environment",
    "tracker": "trackers[]",
    "monitor": "monitors[]",
}
"""The key of the config that holds a plugin of each kind."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a class: its annotation and default as Python, and its docstring."""

    name: str
    annotation: str
    default: str
    help: str


@dataclass(slots=True)
class _Class:
    bases: tuple[str, ...]
    help: str
    fields: list[_Field] = field(default_factory=list)


def passages() -> Iterator[Passage]:
    """Each key of the config, each option of a plugin, and each word of other frameworks that has no key here."""
    aliases: dict[str, list[str]] = {}
    for word, answer in words().items():
        aliases.setdefault(answer.key, []).append(word)
    known = dict(_config_keys())
    for key, each in known.items():
        below = [f"{inner.name}: {inner.help}" for name, inner in known.items() if name.rpartition(".")[0] == key]
        found = tuple(aliases.pop(key, ()))
        yield Passage(
            key,
            _place(each),
            tuple(filter(None, [each.help, *below])),
            _names(key),
            found,
            "section" if len(below) > 6 else "key",
        )
    shared = {(each.name, each.help) for key, each in known.items() if key.startswith("algorithm.")}
    for kind in get_args(Kind):
        yield from _plugins(kind, shared)
    for note in dict.fromkeys(words()[word].note for word in aliases.pop("", ())):
        found = tuple(word for word, answer in words().items() if not answer.key and answer.note == note)
        yield Passage(", ".join(found), "words of other frameworks", (f"No key of mmrl: {note}.",), found, (), "word")


def _place(each: _Field) -> str:
    try:
        return f"a key of the config; default {to_flow(ast.literal_eval(each.default))}"
    except (ValueError, SyntaxError):  # there is none, or it is made by a call
        return "a key of the config"


def _names(key: str) -> tuple[str, ...]:
    """A key whole, and by its last words; without the place of a name that its user chooses."""
    parts = key.replace("[]", "").replace(".NAME", "").split(".")
    return tuple(".".join(parts[start:]) for start in range(len(parts)))


def _config_keys() -> Iterator[tuple[str, _Field]]:
    """The dotted key of each field of the config, and of the options that algorithms share."""
    sources = [_source(module) for module in _SECTIONS]
    classes = {name: each for source in sources for name, each in _classes(source).items()}
    aliases = {name: text for source in sources for name, text in _aliases(source)}
    for each in classes.values():
        each.fields = [replace(f, annotation=_spelled(f.annotation, aliases)) for f in each.fields]
    yield from _walk("Config", "", classes)
    shared = {name: each for name, each in _classes(_source(_SHARED)).items() if each.fields}
    nested = {other for each in shared.values() for f in each.fields for other in shared if other in f.annotation}
    for name in shared:
        if name not in nested:
            yield from _walk(name, "algorithm.", shared)


def _walk(name: str, prefix: str, classes: Mapping[str, _Class]) -> Iterator[tuple[str, _Field]]:
    """A class's fields by their keys, and those of the sections that its fields hold."""
    for each in _fields(name, classes):
        inner = _inner(each.annotation, classes)
        own = classes[inner].help if inner and not each.help else each.help
        key = f"{prefix}{each.name}"
        yield key, replace(each, help=own)
        if inner:
            is_named = re.search(rf"dict\[str, {inner}\b", each.annotation)
            many = "[]" if "tuple" in each.annotation else ".NAME" if is_named else ""
            yield from _walk(inner, f"{key}{many}.", classes)


def _inner(annotation: str, classes: Mapping[str, _Class]) -> str:
    """The class of the section that a field holds, of a class and its subclass the latter; empty if it holds none."""
    tree = ast.walk(ast.parse(annotation, mode="eval"))
    found = [node.id for node in tree if isinstance(node, ast.Name) and node.id in classes]
    bases = {base for name in found for base in classes[name].bases}
    return next((name for name in found if name not in bases), "")


def _aliases(source: ast.Module | None) -> Iterator[tuple[str, str]]:
    """The names that a module gives to annotations, each with what it stands for."""
    for node in source.body if source else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, ast.unparse(node.value)


def _spelled(annotation: str, aliases: Mapping[str, str]) -> str:
    return re.sub(r"\w+", lambda word: aliases.get(word[0], word[0]), annotation)


def _fields(name: str, classes: Mapping[str, _Class]) -> list[_Field]:
    """A class's own fields and those of its bases; its own win."""
    found: dict[str, _Field] = {}
    for base in classes[name].bases:
        if base in classes:
            found |= {each.name: each for each in _fields(base, classes)}
    return list((found | {each.name: each for each in classes[name].fields}).values())


def _plugins(kind: Kind, shared: Collection[tuple[str, str]]) -> Iterator[Passage]:
    """A passage for each plugin of a kind, and for each option that its own module defines.

    Args:
        shared: Names and descriptions of options that all algorithms have, which are told once.
    """
    for info, entry in installed(kind):
        if (source := _source(entry.module)) is None:
            continue
        about = _first_sentence(ast.get_docstring(source) or "")
        options = [each for found in _classes(source).values() for each in found.fields]
        told = tuple(f"{each.name}: {each.help}" for each in options if each.help)
        names, place = (info.name, f"{kind} {info.name}"), f"a plugin; `mmrl schema --plugin {kind}:{info.name}`"
        yield Passage(f"{kind} {info.name}", place, (about, *told), names, (), "plugin")
        for each in options:
            if each.help and (each.name, each.help) not in shared:
                key = f"{_WHERE[kind]}.{each.name}"
                title, at = f"{key} of {info.name}", _place(each).replace("the config", info.name)
                keys = [key.replace("[]", ""), key.replace("data.train", "data.eval")]
                found = tuple(dict.fromkeys([f"{info.name}.{each.name}", *keys]))
                yield Passage(title, at, (each.help,), found, (each.name,), "option")


def _first_sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _source(module: str) -> ast.Module | None:
    """A module as a tree, which is not imported, nor are its packages; None if it is not there or is no Python."""
    path: Sequence[str] | None = None
    parts, origin = module.split("."), ""
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        found = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((each for each in found if each), None)
        if spec is None:
            return None
        path, origin = spec.submodule_search_locations, str(spec.origin)
    with suppress(OSError, SyntaxError, ValueError, TypeError):
        return ast.parse(Path(origin).read_text(encoding="utf-8"))
    return None


def _classes(source: ast.Module | None) -> dict[str, _Class]:
    """The classes of a module that hold fields with docstrings; a plugin's inner ``Config`` by that name."""
    found: dict[str, _Class] = {}
    for node in ast.walk(source) if source else ():
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base) for base in node.bases)
            if bases and any(_is_config(base) for base in bases):
                known = found.get(node.name, _Class((), "", []))  # the ``Config`` of another plugin of the module
                text = known.help or ast.get_docstring(node) or ""
                found[node.name] = _Class((*known.bases, *bases), text, [*known.fields, *_own_fields(node.body)])
    return found


def _is_config(base: str) -> bool:
    return base in ("Section", "BaseModel") or base.endswith(("Config", "Options", "Spec"))


def _own_fields(body: Sequence[ast.stmt]) -> Iterator[_Field]:
    for index, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        annotation = ast.unparse(node.annotation)
        if annotation.startswith("ClassVar"):
            continue
        follower = body[index + 1] if index + 1 < len(body) else None
        text = ""
        if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
            text = " ".join(str(follower.value.value).split())
        default = ast.unparse(node.value) if node.value is not None else ""
        yield _Field(node.target.id, annotation, default, text)
