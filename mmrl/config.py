"""Loading a config: files and overrides in, one frozen ``Config`` out, or every error at once.

The sections are in ``config_sections``, the reading of YAML in ``config_files``. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mmrl.config_files import Located, join_errors, merge, read_tree, to_lines
from mmrl.config_sections import (
    NONE,
    ClusterConfig,
    Config,
    DataConfig,
    DatasetSpec,
    Kind,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    PluginSpec,
    RewardSpec,
    SamplerConfig,
    TrainerConfig,
    contradictions,
    is_section,
)
from mmrl.errors import ConfigError, MMRLError, PluginError

__all__ = [
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DatasetSpec",
    "Kind",
    "LearnerConfig",
    "LoadedConfig",
    "LoraConfig",
    "ModelConfig",
    "PluginSpec",
    "RewardSpec",
    "SamplerConfig",
    "TrainerConfig",
    "from_mapping",
    "load_config",
    "options_errors",
    "suggestion",
    "to_yaml",
]

OptionsClass = Callable[[Kind, str], type[BaseModel]]
"""(kind, name) -> the class that validates the plugin's options; raises PluginError."""

_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config and, by dotted key, where each of its values was written: ``file:line``, override, or ``default``."""

    config: Config
    origins: Mapping[str, str]


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
        options_class: Given, the options of every plugin are checked too, and completed with their defaults.
        optional: Keys of plugins that need not be there, such as ``algorithm`` for what trains nothing.

    Raises:
        ConfigError: Everything that is wrong, at once.
        PluginError: Plugins cannot be used, and nothing else is wrong.
    """
    tree, problems = read_tree(paths, overrides)
    for key in optional:
        if not tree.holds(key.split(".")):
            missing: Any = {"name": NONE}
            for part in reversed(key.split(".")):
                missing = {part: missing}
            tree = merge(Located.of(missing, "not used"), tree)
    return _resolve(tree, problems, options_class)


def from_mapping(mapping: Mapping[str, Any], *, options_class: OptionsClass | None = None) -> Config:
    """The config of plain Python values, checked as ``load_config`` does."""
    return _resolve(Located.of(mapping, ""), [], options_class).config


def to_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The config with its defaults as YAML that loads again; ``origins`` become comments."""
    lines = to_lines(config.model_dump(mode="json"), lambda key: (origins or {}).get(key, ""))
    return "\n".join(lines) + "\n"


def options_errors(
    error: ValidationError,
    model: type[BaseModel],
    key: str,
    tree: Located | None = None,
    spec: type[PluginSpec] = PluginSpec,
) -> list[MMRLError]:
    """One ConfigError per problem that pydantic found with ``model``, whose values are written under ``key``.

    Args:
        spec: Of a plugin's options, has the framework's own keys, which stand beside them.
    """
    path, place = tuple(key.split(".")) if key else (), tree or Located({}, "")
    beside = [name for name in spec.model_fields if name != "name"]
    return [_problem(details, model, path, place, beside) for details in error.errors(include_url=False)]


def suggestion(word: str, known: Iterable[str], *, nearness: float = 0.6) -> str:
    """A question with the nearest known word; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=nearness)
    return f"did you mean {near[0]}?" if near else ""


def _resolve(tree: Located, problems: list[MMRLError], options_class: OptionsClass | None) -> LoadedConfig:
    config, found, wrong = _validate(tree)
    problems = problems + found
    if options_class:
        config, found = _complete(config, tree, options_class, wrong)
        problems += found
    problems += _contradictions(config, tree, wrong)
    if problems:
        raise join_errors(problems)
    origins = {".".join(map(str, path)): _origin(tree, path) for path in _leaves(config.model_dump(mode="json"))}
    return LoadedConfig(config, origins)


def _validate(tree: Located) -> tuple[Config, list[MMRLError], set[str]]:
    """The config, what is wrong, and the keys concerned; there the config holds defaults or placeholders instead."""
    raw = _with_sections(tree.plain())
    try:
        return Config.model_validate(raw), [], set()
    except ValidationError as error:
        problems = options_errors(error, Config, "", tree)
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
    """``raw`` with an empty mapping for each absent section, so that what it lacks is reported key by key."""
    sections: dict[str, Any] = {key: {} for key, field in Config.model_fields.items() if is_section(field.annotation)}
    return sections | {key: value for key, value in raw.items() if value is not None or key not in Config.model_fields}


def _owner(loc: _Path) -> str:
    """The section and key, or the top-level entry, that an error at ``loc`` belongs to."""
    field = Config.model_fields.get(str(loc[0]))
    return ".".join(map(str, loc[: 2 if field and is_section(field.annotation) else 1]))


def _complete(
    config: Config, tree: Located, options_class: OptionsClass, wrong: set[str]
) -> tuple[Config, list[MMRLError]]:
    """The config with every plugin's defaults filled in, and what is wrong with its options."""
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
    """One plugin's options with its defaults, and what is wrong with them."""
    place = tree.nearest((*key.split("."), "name")).origin
    try:
        model = options_class(kind, spec.name)
        validated = model.model_validate(spec.options)
        options = validated.model_dump(mode="json", by_alias=True)
        if model.model_validate(options).model_dump_json() != validated.model_dump_json():
            raise ValueError("what it writes is not what it reads")
        return options, []
    except ValidationError as error:
        return {}, options_errors(error, model, key, tree, type(spec))
    except PluginError as error:
        where = "\n            ".join(filter(None, [place, error.where]))
        return {}, [PluginError(error.what, where=where, possible=error.possible, remedy=error.remedy)]
    except Exception as error:
        what = f"{kind} plugin {spec.name!r}: its Config failed: {type(error).__name__}: {error}"
        return {}, [PluginError(what, where=place, remedy="report this to the plugin's authors")]


def _contradictions(config: Config, tree: Located, wrong: set[str]) -> list[MMRLError]:
    """What fits its own key but not the others."""
    problems: list[MMRLError] = []
    for keys, what, remedy in contradictions(config):
        if not any(_touches(wrong, key) for key in keys):
            places = [_origin(tree, tuple(key.split("."))) for key in keys]
            where = ", ".join(dict.fromkeys(place for place in places if place != "default"))
            problems.append(ConfigError(what, where=where, remedy=remedy))
    return problems


def _touches(wrong: set[str], key: str) -> bool:
    """Whether an error was found at ``key`` or in what holds it."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in wrong for length in range(1, len(parts) + 1))


def _problem(
    details: Any, model: type[BaseModel], prefix: _Path, tree: Located, beside: Sequence[str] = ()
) -> ConfigError:
    """One of pydantic's errors in our words; ``beside`` are keys that are known besides those of ``model``."""
    loc, context, value = details["loc"], details.get("ctx", {}), details["input"]
    path = (*prefix, *loc)
    while details["type"] != "missing" and tree.value and path != prefix and not tree.holds(path):
        path = path[:-1]  # pydantic ends some paths with the name of a type
    key, where = ".".join(map(str, path)), tree.nearest(path).origin
    if details["type"] == "missing":
        return ConfigError(f"{key} is required", where=where)
    if details["type"] == "extra_forbidden":
        known = [*_keys(model, loc[:-1]), *(beside if len(loc) == 1 else ())]
        hint = suggestion(str(loc[-1]), known) or (_elsewhere(str(loc[-1])) if model is Config else "")
        return ConfigError(f"unknown key {key}", where=where, possible=", ".join(known), remedy=hint)
    if details["type"] == "literal_error":
        choices = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        what = f"{key} cannot be {_shown(value)}"
        return ConfigError(what, where=where, possible=", ".join(choices), remedy=suggestion(str(value), choices))
    if details["type"] == "value_error":
        return ConfigError(f"{key} {context['error']}", where=where)
    wording = _WORDING.get(details["type"], details["msg"].removeprefix("Input "))
    remedy = _ONE_DATASET if key == "data.train" and isinstance(value, list) else ""
    return ConfigError(f"{key} {wording}, not {_shown(value)}", where=where, remedy=remedy)


_ONE_DATASET = "name one dataset here, and those to mix with it in data.mix: [{name: ...}, ...]"
_WORDING: Mapping[str, str] = {
    "model_type": "should be a mapping such as {name: ...}",
    "model_attributes_type": "should be a mapping such as {name: ...}",
    "dict_type": "should be a mapping",
    "tuple_type": "should be a list",
    "list_type": "should be a list",
    "string_type": "should be text",
    "string_too_short": "should not be empty",
    "bool_type": "should be true or false",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
}


def _shown(value: Any) -> str:
    if isinstance(value, str | int | float | None):
        return repr(value) if len(repr(value)) <= 60 else repr(value)[:60] + "..."
    return "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else "that"


def _keys(model: type[BaseModel], loc: _Path) -> list[str]:
    """The keys that the class under ``loc`` of ``model`` knows; empty if there is no single such class."""
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        candidates = [field.annotation, *get_args(field.annotation)] if field else []
        nested = [each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)]
        if len(nested) != 1:
            return []
        model = nested[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _elsewhere(word: str) -> str:
    """A hint if ``word`` is, or nearly is, a key of some section."""
    dotted = {
        name: f"{section}.{name}"
        for section, field in Config.model_fields.items()
        if is_section(field.annotation)
        for name in _keys(Config, (section,))
        if name not in {"name", "path"}
    }
    near = difflib.get_close_matches(word, dotted, n=1, cutoff=0.75)
    return f"did you mean {dotted[near[0]]}?" if near else ""


def _leaves(value: Any, path: _Path = ()) -> Iterator[_Path]:
    """Paths of everything that is written on one line."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path


def _origin(tree: Located, path: _Path) -> str:
    """Where the value under ``path`` was written, alone or in a whole; ``default`` if nowhere."""
    for part in path:
        inner = tree.child(part)
        if inner is None:
            return "default" if isinstance(tree.value, dict | list) or tree.value is None else tree.origin
        tree = inner
    return tree.origin
