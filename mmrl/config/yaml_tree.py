"""Merges YAML files and command-line overrides into one tree that knows the origin of each value.

YAML here is the plain part of YAML 1.2: ``1e-6`` is a number, ``no`` is text, and anchors, aliases, tags, duplicate
keys, deep nesting and huge files are errors. Environment variables are not interpolated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import yaml

from mmrl.config.evaluation_names import NAMED, has_names
from mmrl.config.paths import from_file, is_of_a_run
from mmrl.errors import ConfigError, MMRLError

MAX_BYTES = 1 << 18
MAX_DEPTH = 16

EVALUATED = ("data", "eval")
"""The path of the dataset to evaluate on, or of several by names."""
_KEY = re.compile(r"[\w-]+(\.[\w-]+)*")
_TAG = "tag:yaml.org,2002:"
_SCALARS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]{1,30}", int),
    "float": (
        r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
    ),
}


@dataclass(frozen=True, slots=True)
class Located:
    """A value and its origin; mappings and lists hold further ``Located``.

    Attributes:
        is_whole: True if it was written as one value; False if dotted keys of overrides make it up.
        clears: True if it was written as ``{}``, which takes back what was written before, and what follows adds to.
    """

    value: Any
    origin: str
    is_whole: bool = False
    clears: bool = False

    @classmethod
    def of(cls, value: Any, origin: str) -> Located:
        """A tree in which everything has the same origin; mappings and lists are copied, a path is its text."""
        if isinstance(value, Mapping):
            return cls({key: cls.of(item, origin) for key, item in value.items()}, origin, clears=not value)
        if isinstance(value, list | tuple):
            return cls([cls.of(item, origin) for item in value], origin)
        return cls(str(value) if isinstance(value, PurePath) else value, origin)

    @classmethod
    def of_dotted(cls, values: Mapping[str, Any], origin: str) -> Located:
        """As ``of``, for a mapping whose own keys may lead into sections, such as ``trainer.steps``.

        Raises:
            ConfigError: A key is no text, or leads nowhere.
        """
        tree = cls({}, origin)
        for key, value in values.items():
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise ConfigError(f"no key can be {key!r}", where=origin, possible="section, section.key")
            inner = cls.of(value, origin)
            for part in reversed(key.split(".")):
                inner = cls({part: inner}, origin)
            tree = merge(tree, inner)
        return tree

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return [item.plain() for item in self.value] if isinstance(self.value, list) else self.value

    def child(self, key: str | int) -> Located | None:
        """The value of a mapping or list under ``key``; None if there is none."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and str(key).isdecimal() and int(key) < len(self.value):
            item: Located = self.value[int(key)]
            return item
        return None

    def holds(self, path: Sequence[str | int]) -> bool:
        """True if there is a value under ``path``."""
        inner = self.child(path[0]) if path else None
        return not path or (inner is not None and inner.holds(path[1:]))

    def nearest(self, path: Sequence[str | int]) -> Located:
        """The value under ``path``, or the last one on the way there."""
        inner = self.child(path[0]) if path else None
        return inner.nearest(path[1:]) if inner else self

    def without(self, path: Sequence[str | int]) -> Located:
        """A copy that does not hold the value under ``path``."""
        if not self.holds(path) or not isinstance(self.value, dict):
            return self
        first, *rest = path
        kept = {key: item for key, item in self.value.items() if rest or key != first}
        return replace(self, value={key: item.without(rest) if key == first else item for key, item in kept.items()})


def nested(path: Sequence[str], value: Located) -> Located:
    """A tree with only ``value``, under ``path``."""
    for part in reversed(path):
        value = Located({part: value}, value.origin)
    return value


def join_errors(errors: Sequence[MMRLError]) -> MMRLError:
    """One error with the texts of all: a PluginError if all are, else a ConfigError."""
    if len(errors) == 1:
        return errors[0]
    parts = [part for error in errors for part in error.parts or (error,)]
    kind = type(parts[0]) if len({type(part) for part in parts}) == 1 else ConfigError
    joined = kind(f"{len(parts)} errors in the config\n\n" + "\n\n".join(map(str, parts)))
    joined.parts = parts
    return joined


def read_tree(paths: Sequence[Path | Located], overrides: Sequence[str] = ()) -> tuple[Located, list[MMRLError]]:
    """Files (or values) and then overrides, merged left to right, with the errors in keys, which do not stop merging.

    Paths in a file count from its folder if something is there, else from the working folder, as those of overrides do.

    Raises:
        ConfigError: Files that cannot be read or parsed, and overrides that cannot be understood, all together.
    """
    fatal: list[MMRLError] = []
    doubtful: list[MMRLError] = []
    trees = []
    for path in paths:
        if isinstance(path, Located):
            trees.append(path)
            continue
        try:
            tree = _parse(_read(path), lambda line, path=path: f"{path}:{line}", doubtful)  # type: ignore[misc]
            trees.append(tree if is_of_a_run(path) else _with_paths(tree, path.parent))
        except ConfigError as error:
            fatal.append(error)
    try:
        trees.append(_read_overrides(overrides, doubtful))
    except ConfigError as error:
        fatal.append(error)
    if fatal:
        raise join_errors([*fatal, *doubtful])
    merged = Located({}, ", ".join(each.origin if isinstance(each, Located) else str(each) for each in paths))
    for tree in trees:
        merged = merge(merged, tree)
    return merged, doubtful


def merge(base: Located, over: Located, path: tuple[str, ...] = ()) -> Located:
    """``base`` with ``over`` on top: mappings merge, an index replaces a list's entry, all else is replaced.

    A plugin that is written with its name, or gets another one, replaces the earlier one with its options. ``{}`` takes
    back what was there; a section without a value leaves the earlier one. One dataset and several named ones
    (``data.eval``) replace each other.
    """
    if path and over.clears:
        return over
    if isinstance(base.value, list) and isinstance(over.value, dict) and over.value and _indices(over.value):
        return _merge_entries(base, over, path)
    if isinstance(base.value, dict) and over.value is None and len(path) == 1:
        return base
    if not isinstance(base.value, dict) or not isinstance(over.value, dict) or _is_replaced(base, over, path):
        return over
    merged = dict(base.value)
    inner = (*path, NAMED) if path == EVALUATED and _has_names(base) else path
    for key, item in over.value.items():
        merged[key] = merge(merged[key], item, (*inner, key)) if key in merged else item
    return Located(merged, base.origin, base.is_whole, base.clears)


def _with_paths(tree: Located, folder: Path, path: tuple[str | int, ...] = ()) -> Located:
    """A file's tree with its paths as they count from the working folder."""
    if isinstance(tree.value, dict):
        inner: Any = {key: _with_paths(item, folder, (*path, key)) for key, item in tree.value.items()}
    elif isinstance(tree.value, list):
        inner = [_with_paths(item, folder, (*path, place)) for place, item in enumerate(tree.value)]
    else:
        inner = from_file(tree.value, path, folder) if isinstance(tree.value, str) else tree.value
    return replace(tree, value=inner)


def _indices(mapping: Mapping[str, Any]) -> bool:
    return all(isinstance(key, str) and key.isdecimal() for key in mapping)


def _merge_entries(base: Located, over: Located, path: tuple[str, ...]) -> Located:
    entries = list(base.value)
    for key, item in over.value.items():
        if int(key) >= len(entries):
            place = ".".join(part for part in path if part != NAMED)
            raise ConfigError(
                f"{place} has no entry {key}",
                where=item.origin,
                possible=f"0 to {len(entries) - 1}" if entries else "none: the list is empty",
                remedy=f"write the whole list: {place}=[...]",
            )
        entries[int(key)] = merge(entries[int(key)], item, (*path, key))
    return Located(entries, base.origin)


def _is_replaced(base: Located, over: Located, path: tuple[str, ...]) -> bool:
    """True if a plugin replaces another one, whose options are then dropped."""
    if path == EVALUATED and _has_names(base) != _has_names(over):
        return over.child("name") is not None if _has_names(base) else _are_datasets(over)
    is_plugin = path in {("algorithm",), ("environment",), ("data", "train"), EVALUATED} or (
        (len(path) == 2 and path[0] in {"rewards", "trackers", "monitors"})
        or (len(path) == 3 and path[:2] == ("data", "mix"))
        or (len(path) == 4 and path[:3] == (*EVALUATED, NAMED))
    )
    old, new = base.child("name"), over.child("name")
    return is_plugin and new is not None and (over.is_whole or (old is not None and old.value != new.value))


def _has_names(tree: Located) -> bool:
    """True for several named datasets, False for one."""
    return has_names({key: item.value for key, item in tree.value.items()})


def _are_datasets(tree: Located) -> bool:
    """True if each value has a name, or takes back one of that name."""
    return all(item.value is None or item.child("name") is not None for item in tree.value.values())


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"the file is larger than {MAX_BYTES} bytes", where=str(path))
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the config: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise ConfigError(f"the config is not UTF-8 text: {error}", where=str(path)) from error


def _read_overrides(tokens: Sequence[str], errors: list[MMRLError]) -> Located:
    """All overrides as one tree, in which a later one wins."""
    tree = Located({}, "overrides")
    for key, text, origin in override_parts(tokens):
        tree = merge(tree, nested(key.split("."), _parse_value(text, origin, errors)))
    return tree


def value_of(text: str, origin: str) -> Any:
    """The plain value of an override's text.

    Raises:
        ConfigError: It is not YAML.
    """
    errors: list[MMRLError] = []
    value = _parse_value(text, origin, errors).plain()
    if errors:
        raise join_errors(errors)
    return value


def tree_of(text: str, origin: str) -> Located:
    """The tree of a config's text.

    Raises:
        ConfigError: It is not YAML, or no mapping of sections.
    """
    errors: list[MMRLError] = []
    tree = _parse(text, lambda line: f"{origin}:{line}", errors)
    if errors:
        raise join_errors(errors)
    return tree


def _parse_value(text: str, origin: str, errors: list[MMRLError]) -> Located:
    return _parse(text, lambda line: origin, errors, top=None)


def override_parts(tokens: Sequence[str]) -> Iterable[tuple[str, str, str]]:
    """Key, value text and origin of each override.

    Raises:
        ConfigError: A word is no override.
    """
    remaining = iter(tokens)
    for token in remaining:
        key, equals, text = token.removeprefix("--").partition("=")
        origin = f"override {token}"
        if not equals and token.startswith("--"):
            following = next(remaining, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{token} needs a value", where=origin, possible=f"{token} VALUE, {key}=VALUE")
            text, equals, origin = following, "=", f"{origin} {following}"
        if not equals or not _KEY.fullmatch(key):
            raise ConfigError("not an override", where=origin, possible="section.key=VALUE, --section.key VALUE")
        yield key, text, origin


def _parse(text: str, origin: Callable[[int], str], errors: list[MMRLError], top: type | None = dict) -> Located:
    """The tree of one YAML document, of type ``top`` if given; appends errors in its keys to ``errors``."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"not valid YAML: {what}", where=origin(mark.line + 1 if mark else 1)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {str(error).splitlines()[0]}", where=origin(1)) from error
    if node is None:
        return Located({} if top is dict else None, origin(1))
    tree = _convert(node, origin, origin(node.start_mark.line + 1), errors)
    if top and not isinstance(tree.value, top):
        raise ConfigError("a config is a mapping of sections", where=tree.origin, possible="model:, data:, ...")
    return tree


def _convert(node: yaml.Node, origin: Callable[[int], str], place: str, errors: list[MMRLError]) -> Located:
    if isinstance(node, yaml.MappingNode):
        return Located(_convert_mapping(node, origin, errors), place, is_whole=True, clears=not node.value)
    if isinstance(node, yaml.SequenceNode):
        return Located([_convert(item, origin, origin(item.start_mark.line + 1), errors) for item in node.value], place)
    _, construct = _SCALARS.get(node.tag.removeprefix(_TAG), ("", str))
    return Located(construct(node.value), place)


def _convert_mapping(
    node: yaml.MappingNode, origin: Callable[[int], str], errors: list[MMRLError]
) -> dict[str, Located]:
    mapping: dict[str, Located] = {}
    for key, item in node.value:
        place = origin(key.start_mark.line + 1)
        if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
            shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            errors.append(ConfigError(f"a key must be text, not {shown}", where=place, remedy="put it in quotes"))
        elif key.value in mapping:
            places = f"{mapping[key.value].origin} and {place}"
            errors.append(ConfigError(f"{key.value} is written twice", where=places, remedy="keep one of them"))
        else:
            mapping[key.value] = _convert(item, origin, place, errors)
    return mapping


class _Loader(yaml.SafeLoader):
    """Composes nodes; refuses features of YAML that help attackers and that no config needs."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own way)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None:
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are refused", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(None, None, f"the tag {event.tag} is refused", event.start_mark)
        if self.depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"deeper than {MAX_DEPTH} levels", event.start_mark)
        if re.search(r"[\ud800-\udfff]", getattr(event, "value", "")):
            raise yaml.composer.ComposerError(None, None, "a lone surrogate is no character", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that ``_Loader`` would otherwise read as another type."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own way)

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, (_pattern, _) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), None)


def to_flow(value: Any) -> str:
    """``value`` as YAML on one line."""
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, default_style=style, width=10**9, sort_keys=False,
        allow_unicode=True,
    )  # fmt: skip
    return text.removesuffix("...\n").strip()


Comment = Callable[[str], str]
"""The comment after the value under a dotted key; empty for none."""


def to_lines(value: Any, comment: Comment, path: str = "") -> list[str]:
    """``value`` as YAML lines; mappings in blocks, lists of mappings with a dash, all else on one line."""
    lines: list[str] = []
    for key, item in value.items():
        dotted = f"{path}.{key}" if path else key
        if isinstance(item, dict) and item:
            lines += [f"{to_flow(key)}:", *("  " + line for line in to_lines(item, comment, dotted))]
        elif isinstance(item, list) and item and all(isinstance(entry, dict) and entry for entry in item):
            lines.append(f"{to_flow(key)}:")
            for index, entry in enumerate(item):
                first, *rest = to_lines(entry, comment, f"{dotted}.{index}")
                lines += [f"  - {first}", *(f"    {line}" for line in rest)]
        else:
            note = comment(dotted)
            lines.append(f"{to_flow(key)}: {to_flow(item)}" + (f"  # {note}" if note else ""))
    return lines
