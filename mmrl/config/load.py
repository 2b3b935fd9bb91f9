"""Loading a config: files and overrides in, one frozen ``Config`` out, or every error at once.

The sections are in ``sections``, the reading of YAML in ``yaml_tree``, the wording of errors in ``problems``. Nothing
here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mmrl.config.forms import OptionsClass
from mmrl.config.keys import is_section
from mmrl.config.plugin_specs import NONE, Kind, PluginSpec
from mmrl.config.problems import leaves_of, options_errors
from mmrl.config.sections import (
    RENAMED,
    Config,
)
from mmrl.config.yaml_tree import Located, join_errors, merge, nested, read_tree, to_lines
from mmrl.errors import ConfigError, MMRLError, PluginError

_Path = tuple[str | int, ...]
_PLACEHOLDER = re.compile(r"<([^<>\n]+)>")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config and, by dotted key, where each of its values was written: ``file:line``, override, or ``default``.

    Attributes:
        warnings: Old names of keys that are in use.
    """

    config: Config
    origins: Mapping[str, str]
    warnings: Sequence[str] = ()


def load_config(
    paths: Sequence[Path | Located],
    overrides: Sequence[str] = (),
    *,
    options_class: OptionsClass | None = None,
    optional: Sequence[str] = (),
) -> LoadedConfig:
    """The config of YAML files and then overrides, the later ones winning.

    Args:
        paths: Files, or values; merged left to right: mappings merge, lists are replaced.
        overrides: Command-line words: ``a.b=v``, ``--a.b=v``, or ``--a.b`` followed by ``v``.
        options_class: If given, the options of every plugin are checked too, and completed with their defaults.
        optional: Keys of plugins that need not be there, such as ``algorithm`` for commands that train nothing.

    Raises:
        ConfigError: All errors at once.
        PluginError: Plugins cannot be used, and nothing else is wrong.
    """
    tree, problems = read_tree(paths, overrides)
    for key in optional:
        if not tree.holds(key.split(".")):
            missing: Any = {"name": NONE}
            for part in reversed(key.split(".")):
                missing = {part: missing}
            tree = merge(tree, Located.of(missing, "not used"))
    return _resolve(tree, problems, options_class)


def from_mapping(mapping: Mapping[str, Any], *, options_class: OptionsClass | None = None) -> Config:
    """The config of plain Python values, checked as ``load_config`` does."""
    return _resolve(Located.of(mapping, ""), [], options_class).config


def plain_values(config: Config) -> dict[str, Any]:
    """The config with its defaults as plain values that load again."""
    values = config.model_dump(mode="json")
    if config.trainer.epochs is not None:
        del values["trainer"]["steps"]  # it follows from the data
    return values


def to_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The config with its defaults as YAML that loads again; ``origins`` become comments."""
    lines = to_lines(plain_values(config), lambda key: (origins or {}).get(key, ""))
    return "\n".join(lines) + "\n"


def _resolve(tree: Located, problems: list[MMRLError], options_class: OptionsClass | None) -> LoadedConfig:
    tree, warnings, found = _renamed(tree)
    tree, twice = _one_length(_with_teachers(tree))
    problems = [*problems, *found, *twice]
    config, found, wrong = _validate(tree, options_class)
    blanks = list(_placeholders(tree))
    problems = [*problems, *found, *([_to_be_replaced(blanks)] if blanks else [])]
    wrong |= {key.rpartition(".")[0] for key, _ in blanks if key.endswith(".name")}
    if options_class:
        config, found = _complete(config, tree, options_class, wrong)
        problems += found
    problems += _contradictions(config, tree, wrong)
    if problems:
        raise join_errors(problems)
    origins = {".".join(map(str, path)): _origin(tree, path) for path in leaves_of(config.model_dump(mode="json"))}
    return LoadedConfig(config, origins, warnings)


def _renamed(tree: Located) -> tuple[Located, list[str], list[MMRLError]]:
    """The tree with the new names of keys in place of old ones, a warning for each, and an error where both are set."""
    warnings, problems = list[str](), list[MMRLError]()
    for old, new in RENAMED.items():
        was, now = old.split("."), new.split(".")
        if not tree.holds(was):
            continue
        value, tree = tree.nearest(was), tree.without(was)
        if tree.holds(now):
            where = f"{value.origin}, {tree.nearest(now).origin}"
            problems.append(ConfigError(f"{old} is now {new}, and both are set", where=where, remedy=f"remove {old}"))
        else:
            tree = merge(tree, nested(now, value))
            warnings.append(f"{old} is now called {new}, and the old name is for this version only ({value.origin})")
    return tree, warnings, problems


def _with_teachers(tree: Located) -> Located:
    """The tree with a list in place of the section ``reference`` as the section's teachers."""
    found = tree.child("reference")
    if found is None or not isinstance(found.value, list):
        return tree
    return merge(tree.without(["reference"]), nested(["reference", "teachers"], found))


def _one_length(tree: Located) -> tuple[Located, list[MMRLError]]:
    """The tree without a ``trainer.steps: null`` beside ``trainer.epochs``, and an error where both say a number."""
    steps, epochs = ("trainer", "steps"), ("trainer", "epochs")
    if not (tree.holds(steps) and tree.holds(epochs)) or tree.nearest(epochs).value is None:
        return tree, []
    found = tree.nearest(steps)
    if found.value is None:
        return tree.without(steps), []
    where = f"{found.origin}, {tree.nearest(epochs).origin}"
    remedy = "keep one of them; trainer.steps=null takes back the steps of a file"
    return tree, [ConfigError("trainer.steps and trainer.epochs are both set", where=where, remedy=remedy)]


def _validate(tree: Located, options_class: OptionsClass | None) -> tuple[Config, list[MMRLError], set[str]]:
    """The config, its errors, and the keys concerned; there the config holds defaults or placeholders instead."""
    raw = _with_sections(tree.plain())
    try:
        return Config.model_validate(raw), [], set()
    except ValidationError as error:
        problems = options_errors(error, Config, "", tree, options_class=options_class)
        wrong = {_owner(details["loc"]) for details in error.errors()}
    for key in wrong:
        section, _, field = key.partition(".")
        (raw[section] if field else raw).pop(field or section, None)
    raw = _with_sections(raw)
    raw["model"].setdefault("path", "?")
    raw["data"].setdefault("train", {"name": "?"})
    raw.setdefault("algorithm", {"name": "?"})
    return Config.model_validate(raw), problems, wrong


def _with_sections(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with an empty mapping for each absent section, so that its missing keys are reported one by one."""
    sections: dict[str, Any] = {key: {} for key, field in Config.model_fields.items() if is_section(field.annotation)}
    return sections | {key: value for key, value in raw.items() if value is not None or key not in Config.model_fields}


def _owner(loc: _Path) -> str:
    """The section and key, or the top-level entry, that an error at ``loc`` belongs to."""
    field = Config.model_fields.get(str(loc[0]))
    return ".".join(map(str, loc[: 2 if field and is_section(field.annotation) else 1]))


def _complete(
    config: Config, tree: Located, options_class: OptionsClass, wrong: set[str]
) -> tuple[Config, list[MMRLError]]:
    """The config with every plugin's defaults filled in, and the errors in its options."""
    raw, problems = config.model_dump(), list[MMRLError]()
    for key, kind, spec in config.plugins():
        if _touches(wrong, key):
            continue
        options, found = _complete_options(key, kind, spec, tree, options_class)
        problems += found
        target: Any = raw
        for part in key.split("."):
            target = target[int(part) if part.isdecimal() else part]
        target.update(options)
    return Config.model_validate(raw), problems


def _complete_options(
    key: str, kind: Kind, spec: PluginSpec, tree: Located, options_class: OptionsClass
) -> tuple[dict[str, Any], list[MMRLError]]:
    """One plugin's options with its defaults, and the errors in them."""
    place = tree.nearest((*key.split("."), "name")).origin
    try:
        model = options_class(kind, spec)
        validated = model.model_validate(spec.options)
        options = validated.model_dump(mode="json", by_alias=True)
        if model.model_validate(options).model_dump_json() != validated.model_dump_json():
            raise ValueError("the written config reads as another one")
        return options, []
    except ValidationError as error:
        return {}, options_errors(error, model, key, tree, type(spec))
    except PluginError as error:
        where = "\n            ".join(filter(None, [place, error.where]))
        return {}, [PluginError(error.what, where=where, possible=error.possible, remedy=error.remedy)]
    except Exception as error:
        what = f"{kind} plugin {spec.name!r}: its Config failed: {type(error).__name__}: {error}"
        return {}, [PluginError(what, where=place, remedy="report this to the plugin's authors")]


def _placeholders(tree: Located, path: _Path = ()) -> Iterator[tuple[str, Located]]:
    """Dotted key and value of every name, path and required option that still says ``<what is to be written>``."""
    if isinstance(tree.value, dict | list):
        items = tree.value.items() if isinstance(tree.value, dict) else enumerate(tree.value)
        for key, item in items:
            yield from _placeholders(item, (*path, key))
        return
    match = _PLACEHOLDER.fullmatch(tree.value) if isinstance(tree.value, str) else None
    if match and path[-1] in ("name", "path", match[1]):
        yield ".".join(map(str, path)), tree


def _to_be_replaced(blanks: Sequence[tuple[str, Located]]) -> ConfigError:
    shown = "".join(f"\n    {key}: {blank.value}" for key, blank in blanks)
    return ConfigError(
        f"the config has placeholders to replace:{shown}",
        where=", ".join(dict.fromkeys(blank.origin for _, blank in blanks)),
        remedy="replace each placeholder: `mmrl plugins` lists names of datasets, rewards, algorithms and trackers; "
        "model.path is a folder or a name on the hub",
    )


def _contradictions(config: Config, tree: Located, wrong: set[str]) -> list[MMRLError]:
    """Errors for values that fit their own key but not the others."""
    problems: list[MMRLError] = []
    for keys, what, remedy in config.contradictions():
        if not any(_touches(wrong, key) for key in keys):
            places = [_origin(tree, tuple(key.split("."))) for key in keys]
            where = ", ".join(dict.fromkeys(place for place in places if place != "default"))
            problems.append(ConfigError(what, where=where, remedy=remedy))
    return problems


def _touches(wrong: set[str], key: str) -> bool:
    """True if an error was found at ``key`` or in a section that holds it."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in wrong for length in range(1, len(parts) + 1))


def _origin(tree: Located, path: _Path) -> str:
    """The origin of the value under ``path``, or of the value that holds it; ``default`` if it was not written."""
    for part in path:
        inner = tree.child(part)
        if inner is None:
            return "default" if isinstance(tree.value, dict | list) or tree.value is None else tree.origin
        tree = inner
    return tree.origin
