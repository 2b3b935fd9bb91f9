"""Loading a config: files and overrides in, one frozen ``Config`` out, or every error at once.

The sections are in ``config.sections``, the reading of YAML in ``config.yaml_tree``. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mmrl.config.sections import (
    NONE,
    RENAMED,
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
    RewardStyle,
    SamplerConfig,
    TrainerConfig,
    contradictions,
    is_component,
    is_section,
)
from mmrl.config.synonyms import spelled, synonym
from mmrl.config.yaml_tree import Located, join_errors, merge, nested, read_tree, to_flow, to_lines
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
    "RewardStyle",
    "SamplerConfig",
    "TrainerConfig",
    "from_mapping",
    "is_component",
    "load_config",
    "options_errors",
    "suggestion",
    "to_yaml",
]

OptionsClass = Callable[[Kind, PluginSpec], type[BaseModel]]
"""(kind, entry) -> the class that validates the plugin's options; raises PluginError."""

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
            tree = merge(Located.of(missing, "not used"), tree)
    return _resolve(tree, problems, options_class)


def from_mapping(mapping: Mapping[str, Any], *, options_class: OptionsClass | None = None) -> Config:
    """The config of plain Python values, checked as ``load_config`` does."""
    return _resolve(Located.of(mapping, ""), [], options_class).config


def to_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The config with its defaults as YAML that loads again; ``origins`` become comments."""
    values = config.model_dump(mode="json")
    if config.trainer.epochs is not None:
        del values["trainer"]["steps"]  # it follows from the data
    lines = to_lines(values, lambda key: (origins or {}).get(key, ""))
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
        spec: For a plugin's options, the class with the framework's own keys beside them.
    """
    path, place = tuple(key.split(".")) if key else (), tree or Located({}, "")
    beside = [name for name in spec.model_fields if name != "name"]
    return [_problem(details, model, path, place, beside) for details in error.errors(include_url=False)]


def suggestion(word: str, known: Iterable[str], *, nearness: float = 0.6) -> str:
    """A question with the nearest known word; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=nearness)
    return f"did you mean {near[0]}?" if near else ""


def _resolve(tree: Located, problems: list[MMRLError], options_class: OptionsClass | None) -> LoadedConfig:
    tree, warnings, found = _renamed(tree)
    tree, twice = _one_length(tree)
    problems = [*problems, *found, *twice]
    config, found, wrong = _validate(tree)
    blanks = list(_placeholders(tree))
    problems = [*problems, *found, *([_to_be_replaced(blanks)] if blanks else [])]
    wrong |= {key.rpartition(".")[0] for key, _ in blanks if key.endswith(".name")}
    if options_class:
        config, found = _complete(config, tree, options_class, wrong)
        problems += found
    problems += _contradictions(config, tree, wrong)
    if problems:
        raise join_errors(problems)
    origins = {".".join(map(str, path)): _origin(tree, path) for path in _leaves(config.model_dump(mode="json"))}
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


def _validate(tree: Located) -> tuple[Config, list[MMRLError], set[str]]:
    """The config, its errors, and the keys concerned; there the config holds defaults or placeholders instead."""
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
    for keys, what, remedy in contradictions(config):
        if not any(_touches(wrong, key) for key in keys):
            places = [_origin(tree, tuple(key.split("."))) for key in keys]
            where = ", ".join(dict.fromkeys(place for place in places if place != "default"))
            problems.append(ConfigError(what, where=where, remedy=remedy))
    return problems


def _touches(wrong: set[str], key: str) -> bool:
    """True if an error was found at ``key`` or in a section that holds it."""
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
        return ConfigError(f"{key} is required", where=where, remedy=_in_place_of(key, tree))
    if details["type"] == "extra_forbidden":
        known = [*_keys(model, loc[:-1]), *(beside if len(loc) == 1 else ())]
        leaves = [path] if not isinstance(value, Mapping) else [(*path, *leaf) for leaf in _leaves(value)]
        if len(leaves) == 1 and len(leaves[0]) > len(path):
            key, value = ".".join(map(str, leaves[0])), tree.nearest(leaves[0]).plain()
        hint = _hint(key, value, known, prefix) if len(leaves) == 1 else _in_our_words(leaves, tree)
        return ConfigError(f"unknown key {key}", where=where, possible=", ".join(known), remedy=hint)
    if details["type"] == "literal_error":
        choices = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        what = f"{key} cannot be {_shown(value)}"
        return ConfigError(what, where=where, possible=", ".join(choices), remedy=suggestion(str(value), choices))
    if details["type"] == "value_error":
        return ConfigError(f"{key} {context['error']}", where=where)
    wording = _WORDING.get(details["type"], details["msg"].removeprefix("Input "))
    if details["type"] in ("model_type", "model_attributes_type"):
        wording = f"should be a mapping such as {_example(model, loc)}"
    remedy = _ONE_DATASET if key == "data.train" and isinstance(value, list) else ""
    return ConfigError(f"{key} {wording}, not {_shown(value)}", where=where, remedy=remedy)


def _hint(key: str, value: Any, known: Sequence[str], prefix: _Path) -> str:
    """A hint for an unknown key: the word of another trainer first, then a key beside it, or anywhere."""
    word, here = key.rpartition(".")[2], ".".join(map(str, prefix))
    found, note = _ours(key, value), _note(key)
    ours = found.removeprefix(f"{here}.")
    if here and not _is_known(ours, known):
        if near := suggestion(word, known):
            return near
        ours = found
    hint = f"did you mean {ours}?" if ours else suggestion(word, known)
    if not hint and not note:
        hint = ("" if here else _elsewhere(word)) or _named_algorithm(value)
    return f"{hint} ({note})" if hint and note else hint or note


def _is_known(option: str, known: Sequence[str]) -> bool:
    first = option.partition(".")[0].partition(":")[0]
    return first == "name" or first in known


def _ours(key: str, value: Any = None) -> str:
    """mmrl's key for another trainer's, with the value for an algorithm; empty if there is none."""
    found = synonym(key)
    if found is None or not found.key:
        return ""
    ours = found.key
    section = ".".join(key.split(".")[:2])
    if ours.startswith("data.train.") and (section == "data.eval" or section.startswith("data.mix")):
        ours = ours.replace("data.train", section if section == "data.eval" else ".".join(key.split(".")[:3]))
    named = _named_algorithm(value) if ours == "algorithm.name" else ""
    return f"algorithm.name: {spelled(value)}" if named else ours


def _note(key: str) -> str:
    found = synonym(key)
    return "" if found is None else found.note


def _named_algorithm(value: Any) -> str:
    """A question that names an installed algorithm with a name like the value."""
    if not isinstance(value, str):
        return ""
    installed = {entry.name for entry in entry_points(group="mmrl.algorithms")}
    return f"did you mean algorithm.name: {spelled(value)}?" if spelled(value) in installed else ""


def _in_our_words(leaves: Sequence[_Path], tree: Located) -> str:
    """A hint for a section of another trainer: the keys of it that mmrl has."""
    shown = list[str]()
    for leaf in leaves:
        key = ".".join(map(str, leaf))
        if found := _ours(key, tree.nearest(leaf).plain()) or _elsewhere_exactly(str(leaf[-1])):
            shown.append(f"{key} is {found}")
    if not shown:
        return ""
    more = f"; and {len(shown) - _SHOWN_WORDS} more" if len(shown) > _SHOWN_WORDS else ""
    return f"{'; '.join(shown[:_SHOWN_WORDS])}{more}"


def _in_place_of(key: str, tree: Located) -> str:
    """A hint for a required key: its section has another trainer's word for it."""
    *parents, last = key.split(".")
    section = tree.nearest(parents).value if tree.holds(parents) else None
    siblings: Mapping[str, Located] = section if isinstance(section, dict) else {}
    ours = {word: _ours(".".join([*parents, word])) for word in siblings}
    for word in ours:
        if ours[word] == key:
            others = "".join(f"; {other} is {found}" for other, found in ours.items() if found and other != word)
            return f"write {last}: {_shown_plain(siblings[word].plain())} in place of {word}{others}"
    return ""


def _shown_plain(value: Any) -> str:
    return spelled(value) if _named_algorithm(value) else to_flow(value) if isinstance(value, str | int) else "..."


_SHOWN_WORDS = 12
"""Keys of another trainer's section that are translated in a message."""
_SHOWN_KEYS = 3
"""Keys of a section that an example of it shows."""
_ONE_DATASET = "name one dataset here, and those to mix with it in data.mix: [{name: ...}, ...]"
_WORDING: Mapping[str, str] = {
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


def _example(model: type[BaseModel], loc: _Path) -> str:
    """An example of the values under ``loc`` of ``model``: some keys with their defaults, or a plugin's name."""
    inner = _class_at(model, loc)
    if inner is None or ("name" in inner.model_fields and inner.model_fields["name"].is_required()):
        return "{name: ...}"
    defaults = {
        field.alias or name: field.get_default(call_default_factory=True, validated_data={})
        for name, field in inner.model_fields.items()
    }
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    shown = {key: value for key, value in plain.items() if value and isinstance(value, str | int | float | list)}
    return to_flow(dict(islice(shown.items(), _SHOWN_KEYS)))


def _keys(model: type[BaseModel], loc: _Path) -> list[str]:
    """The keys that the class under ``loc`` of ``model`` knows; empty if there is no single such class."""
    inner = _class_at(model, loc)
    return [] if inner is None else [field.alias or name for name, field in inner.model_fields.items()]


def _class_at(model: type[BaseModel], loc: _Path) -> type[BaseModel] | None:
    """The class under ``loc`` of ``model``; None if there is no single one."""
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        candidates = [field.annotation, *get_args(field.annotation)] if field else []
        nested = [each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)]
        if len(nested) != 1:
            return None
        model = nested[0]
    return model


def _elsewhere_exactly(word: str) -> str:
    """The dotted key of some section that ends in this word; empty if there is none."""
    return _by_last_word().get(word, "")


def _by_last_word() -> dict[str, str]:
    return {
        name: f"{section}.{name}"
        for section, field in Config.model_fields.items()
        if is_section(field.annotation)
        for name in _keys(Config, (section,))
        if name not in {"name", "path"}
    }


def _elsewhere(word: str) -> str:
    """A hint if ``word`` is, or nearly is, a key of some section."""
    dotted = _by_last_word()
    near = difflib.get_close_matches(word, dotted, n=1, cutoff=0.75)
    return f"did you mean {dotted[near[0]]}?" if near else ""


def _leaves(value: Any, path: _Path = ()) -> Iterator[_Path]:
    """Paths of all values that are written on one line."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path


def _origin(tree: Located, path: _Path) -> str:
    """The origin of the value under ``path``, or of the value that holds it; ``default`` if it was not written."""
    for part in path:
        inner = tree.child(part)
        if inner is None:
            return "default" if isinstance(tree.value, dict | list) or tree.value is None else tree.origin
        tree = inner
    return tree.origin
