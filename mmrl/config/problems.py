"""Pydantic's errors about a config in our words, with hints for those who know the keys of other trainers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mmrl.config.evaluations import FORMS
from mmrl.config.forms import OptionsClass, installed, kind_at, typed
from mmrl.config.keys import is_section
from mmrl.config.plugin_specs import UNNAMED, EnvironmentSpec, PluginSpec
from mmrl.config.sections import Config
from mmrl.config.synonyms import spelled, synonym
from mmrl.config.yaml_tree import Located, to_flow
from mmrl.errors import ConfigError, MMRLError, plural

_Path = tuple[str | int, ...]


def options_errors(
    error: ValidationError,
    model: type[BaseModel],
    key: str,
    tree: Located | None = None,
    spec: type[PluginSpec] = PluginSpec,
    options_class: OptionsClass | None = None,
) -> list[MMRLError]:
    """One ConfigError per problem that pydantic found with ``model``, whose values are written under ``key``.

    Args:
        spec: Has the framework's own keys, which stand beside a plugin's options.
        options_class: Finds the options of installed plugins, for examples.
    """
    path, place = tuple(key.split(".")) if key else (), tree or Located({}, "")
    beside = [name for name in spec.model_fields if name != "name"]
    found = error.errors(include_url=False)
    return [_problem(details, model, path, place, beside, options_class) for details in found]


def suggestion(word: str, known: Iterable[str], *, nearness: float = 0.6) -> str:
    """A question with the nearest known word; empty if none is near."""
    near = nearest(word, known, nearness)
    return f"did you mean {near}?" if near else ""


def nearest(word: str, known: Iterable[str], nearness: float = 0.6) -> str:
    """The known word that another one may be a slip of; empty if there is none.

    A word of several parts is no slip of one of its parts: ``scale_rewards`` is not ``rewards``.
    """
    near = difflib.get_close_matches(word, known, n=3, cutoff=nearness)
    return next((each for each in near if each not in word.split("_") or each == word), "")


def leaves_of(value: Any, path: _Path = ()) -> Iterator[_Path]:
    """Paths of everything that is written on one line."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
        for index, item in enumerate(value):
            yield from leaves_of(item, (*path, index))
    else:
        yield path


def _problem(
    details: Any,
    model: type[BaseModel],
    prefix: _Path,
    tree: Located,
    beside: Sequence[str] = (),
    options_class: OptionsClass | None = None,
) -> ConfigError:
    """One of pydantic's errors in our words; ``beside`` are keys that are known besides those of ``model``."""
    loc, context, value = _without_forms(details["loc"]), details.get("ctx", {}), details["input"]
    path = (*prefix, *loc)
    while details["type"] != "missing" and tree.value and path != prefix and not tree.holds(path):
        path = path[:-1]  # pydantic ends some paths with the name of a type
    key, where = ".".join(map(str, path)), tree.nearest(path).origin
    if details["type"] == "missing":
        remedy = _in_place_of(key, tree) or (_SEVERAL if key == "data.eval.name" else "")
        return ConfigError(f"{key} is required", where=where, remedy=remedy)
    if details["type"] == "extra_forbidden":
        known = [*_keys(model, loc[:-1]), *(beside if len(loc) == 1 else ())]
        leaves = [path] if not isinstance(value, Mapping) else [(*path, *leaf) for leaf in leaves_of(value)]
        if len(leaves) == 1 and len(leaves[0]) > len(path):
            key, value = ".".join(map(str, leaves[0])), tree.nearest(leaves[0]).plain()
        hint = (
            _hint(key, value, known, prefix, where, options_class) if len(leaves) == 1 else _in_our_words(leaves, tree)
        )
        return ConfigError(f"unknown key {key}", where=where, possible=", ".join(known), remedy=hint)
    if details["type"] == "literal_error":
        choices = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        what = f"{key} cannot be {_shown(value)}"
        return ConfigError(what, where=where, possible=", ".join(choices), remedy=suggestion(str(value), choices))
    if details["type"] == UNNAMED:
        return _unnamed(key, where, **context)
    if details["type"] == "value_error":
        return ConfigError(f"{key} {context['error']}", where=where)
    if details["type"] == "too_short":
        least, found = plural(context["min_length"], "value"), context["actual_length"]
        return ConfigError(f"{key} should have {least} at least, and has {found or 'none'}", where=where)
    wording = _WORDING.get(details["type"], details["msg"].removeprefix("Input "))
    if details["type"] in ("model_type", "model_attributes_type"):
        wording = f"should be a mapping such as {_example(model, loc)}"
    if key in _NO_LISTS and isinstance(value, list):
        remedy = _NO_LISTS[key]
    else:
        remedy = typed(key, value, where, options_class) if details["type"] in _NEEDS_FORM and value is not None else ""
    if not remedy and details["type"] in ("tuple_type", "list_type") and isinstance(value, str):
        remedy = f"write [{to_flow(value)}]"
    kind = kind_at(key) if remedy else None
    possible = ", ".join(installed(kind)) if kind and value not in installed(kind) else ""
    return ConfigError(f"{key} {wording}, not {_shown(value)}", where=where, possible=possible, remedy=remedy)


def _without_forms(loc: _Path) -> _Path:
    """The path of an error without the names of the forms that a value may have."""
    return tuple(part for part in loc if part not in FORMS)


def _unnamed(
    key: str, where: str, options: Sequence[str], named: Sequence[str], installed: Sequence[str]
) -> ConfigError:
    """An environment without a name, of whose options none, or several, are called like one."""
    several = f"{', '.join(named)} are all environments" if named else f"{', '.join(options)}: no such environment"
    known = [*installed, *EnvironmentSpec.model_fields]
    hints = list(dict.fromkeys(filter(None, (suggestion(option, known) for option in options if option not in named))))
    remedy = " ".join([*hints, f"write its name: {key}: {{name: {(named or ['...'])[0]}, ...}}"])
    return ConfigError(f"{key} has no name; {several}", where=where, possible=", ".join(installed), remedy=remedy)


def _hint(
    key: str,
    value: Any,
    known: Sequence[str],
    prefix: _Path,
    where: str = "",
    options_class: OptionsClass | None = None,
) -> str:
    """The key that an unknown one may mean: one beside it, or anywhere; the word of another trainer comes first."""
    word, here = key.rpartition(".")[2], ".".join(map(str, prefix))
    found, note = _ours(key, value, here), _note(key)
    ours = found.removeprefix(f"{here}.")
    if here and not _is_known(ours, known):
        if near := suggestion(word, known):
            return near
        ours = found
    if not here and not ours and not note:
        ours = nearest(word, known)
    hint = f"did you mean {ours}?" if ours else suggestion(word, known)
    form = typed(ours, value, where, options_class) if ours and not here and isinstance(value, str) else ""
    if not hint and not note:
        hint = ("" if here else _elsewhere(word)) or _named_algorithm(value)
    hint = f"{hint} ({note})" if hint and note else hint or note
    return f"{hint} {form}" if form else hint


def _is_known(option: str, known: Sequence[str]) -> bool:
    first = option.partition(".")[0].partition(":")[0]
    return first == "name" or first in known


def _ours(key: str, value: Any = None, plugin: str = "") -> str:
    """mmrl's key for one of others, for an algorithm with its value; empty if there is none.

    Args:
        plugin: The dotted key of the plugin that the key is an option of.
    """
    found = synonym(key)
    if found is None or not found.key:
        return ""
    ours = found.key
    section = ".".join(key.split(".")[:2])
    if ours.startswith("data.train.") and (section == "data.eval" or section.startswith("data.mix")):
        own = (plugin or section) if section == "data.eval" else ".".join(key.split(".")[:3])
        ours = ours.replace("data.train", own)
    named = _named_algorithm(value) if ours == "algorithm.name" else ""
    return f"algorithm.name: {spelled(value)}" if named else ours


def _note(key: str) -> str:
    found = synonym(key)
    return "" if found is None else found.note


def _named_algorithm(value: Any) -> str:
    """A question whether an installed algorithm is meant that is called like the value."""
    if not isinstance(value, str):
        return ""
    name = spelled(value)
    return f"did you mean algorithm.name: {name}?" if name in installed("algorithm") else ""


def _in_our_words(leaves: Sequence[_Path], tree: Located) -> str:
    """For a section of another trainer: which of its keys mmrl has."""
    shown = list[str]()
    for leaf in leaves:
        key = ".".join(map(str, leaf))
        if found := _ours(key, tree.nearest(leaf).plain()) or _by_last_word().get(str(leaf[-1])):
            shown.append(f"{key} is {found}")
    if not shown:
        return ""
    more = f"; and {len(shown) - _SHOWN_WORDS} more" if len(shown) > _SHOWN_WORDS else ""
    return f"{'; '.join(shown[:_SHOWN_WORDS])}{more}"


def _in_place_of(key: str, tree: Located) -> str:
    """For a required key: what to write it in place of, if its section has a word of others for it."""
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
_NEEDS_FORM = frozenset({"model_type", "model_attributes_type", "tuple_type", "list_type"})
"""Errors about a plain value where a mapping or a list belongs."""
_SEVERAL = "for several datasets, give each a name: data.eval: {ONE: {name: ...}, OTHER: {name: ...}}"
_NO_LISTS: Mapping[str, str] = {
    "data.train": "name one dataset here, and those to mix with it in data.mix: [{name: ...}, ...]",
    "data.eval": _SEVERAL,
}
"""The form to write in place of a list of datasets."""
_WORDING: Mapping[str, str] = {
    "dict_type": "should be a mapping such as {KEY: VALUE}",
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
    """An example of the values under ``loc`` of ``model``: keys that it requires, or some with their defaults."""
    inner = _class_at(model, loc)
    if inner is None:
        return "{name: ...}"
    if required := [field.alias or name for name, field in inner.model_fields.items() if field.is_required()]:
        return f"{{{', '.join(f'{key}: ...' for key in required)}}}"
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


def _by_last_word() -> dict[str, str]:
    """The dotted key of some section for each last word of one."""
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
    near = nearest(word, dotted, 0.75)
    return f"did you mean {dotted[near]}?" if near else ""
