"""The words of a sweep: ``key=VALUE,VALUE`` is an axis, ``key=VALUE`` an override, and each combination is a point.

A value is YAML, as an override's is. A comma within brackets or quotes is part of a value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

from yaml import YAMLError

from mmrl.config.yaml_tree import Located, join_errors, override_parts, to_flow, value_of
from mmrl.errors import ConfigError, MMRLError

SEED, RUN_DIR = "trainer.seed", "trainer.run_dir"
_SAME = {
    RUN_DIR: "the sweep gives each point a folder of its own; --folder names theirs",
    "trainer.best_metric": "points are ranked by one metric",
    "trainer.best_is": "points are ranked by one metric",
    "trainer.eval_metric": "points are ranked by one metric",
}
"""Keys that may not differ between points, and the reason."""
_OPENING, _CLOSING = "[{", "]}"
_MOST_SEED = 2**32 - 1
MOST_POINTS = 10_000


class Part(NamedTuple):
    """One word: a key with the texts of its values; an axis has several."""

    key: str
    texts: Sequence[str]
    values: Sequence[Any]

    @property
    def is_axis(self) -> bool:
        return len(self.texts) > 1


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a sweep.

    Attributes:
        parts: The words, in order.
        seeds: Those of ``--seeds`` or of the axis ``trainer.seed``; empty if neither is given.
    """

    parts: Sequence[Part]
    seeds: Sequence[int]

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The values of each axis."""
        return {part.key: list(part.values) for part in self.parts if part.is_axis}

    @property
    def overrides(self) -> list[str]:
        """The words that all points share."""
        return [f"{part.key}={part.texts[0]}" for part in self.parts if not part.is_axis]

    def combinations(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The words with which ``mmrl train`` would run each combination, in the order in which they were given, and
        the axes' values in it; the last axis changes first."""
        for places in product(*(range(len(part.texts)) for part in self.parts)):
            chosen = list(zip(self.parts, places, strict=True))
            words = [f"{part.key}={part.texts[place]}" for part, place in chosen]
            yield words, {part.key: part.values[place] for part, place in chosen if part.is_axis}


def read_words(words: Sequence[str], seeds: str | None = None) -> Words:
    """The axes, the overrides and the seeds of a command line.

    Args:
        seeds: Such as ``0,1,2`` or ``0-4``.

    Raises:
        ConfigError: All errors at once: of a word, a key or a value that is repeated, a key that may not differ; or
            nothing differs between points.
    """
    parts, found, errors = list[Part](), list[int](), list[MMRLError]()
    for key, text, origin in override_parts(words):
        try:
            parts.append(_part(key, text, origin))
        except ConfigError as error:
            errors.append(error)
    try:
        parts, found = _seeds(parts, seeds)
    except ConfigError as error:
        errors.append(error)
    errors += _repeated(parts)
    if errors:
        raise join_errors(errors)
    if not found and not any(part.is_axis for part in parts):
        remedy = "give a key several values, or --seeds; `mmrl train` runs a single config"
        raise ConfigError(
            "nothing differs between points", where="mmrl sweep", possible="key=VALUE,VALUE", remedy=remedy
        )
    if (count := prod(len(part.texts) for part in parts) * max(len(found), 1)) > MOST_POINTS:
        raise ConfigError(f"the sweep would have {count} points", where="its axes", possible=f"1 to {MOST_POINTS}")
    return Words(parts, found)


def words_of(values: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """The words of values from Python: a list, tuple, range or array is an axis, all else a single value; words are
    left as they are.

    Raises:
        ConfigError: A value is no plain one, or a list has no values.
    """
    if not isinstance(values, Mapping):
        return [str(word) for word in ([values] if isinstance(values, str) else values)]
    words = []
    for key, value in values.items():
        value = _unpacked(value)
        several = list(value) if isinstance(value, list | tuple | range) else [value]
        if not several:
            raise ConfigError(f"{key} has no values", where="values", remedy="give some, or leave the key out")
        try:
            words.append(f"{key}={','.join(map(_text, several))}")
        except YAMLError as error:
            remedy = "give numbers, texts, lists and mappings"
            raise ConfigError(f"{key} has a value that no config can hold", where="values", remedy=remedy) from error
    return words


def _unpacked(value: Any) -> Any:
    """The value with numpy's arrays and numbers as Python's."""
    if isinstance(value, Mapping):
        return {key: _unpacked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_unpacked(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _text(value: Any) -> str:
    """A plain value as a text that is one value of an axis."""
    text = to_flow(Located.of(value, "").plain())
    return text if len(list(_split(text))) == 1 else "'" + text.replace("'", "''") + "'"


def _part(key: str, text: str, origin: str) -> Part:
    """A word, taken apart.

    Raises:
        ConfigError: A value is empty, is not YAML or comes twice, or the key may not have several.
    """
    texts = [part.strip() for part in _split(text)]
    if len(texts) == 1:
        return Part(key, [text], [value_of(text, origin)])
    if reason := _SAME.get(key):
        remedy = f"give it one value, {key}=VALUE"
        raise ConfigError(f"{key} may not differ between points: {reason}", where=origin, remedy=remedy)
    if within := [each for each in (SEED, *_SAME) if each.startswith(f"{key}.")]:
        what = f"{key} as a whole may not differ between points: it holds {', '.join(within)}"
        raise ConfigError(
            what, where=origin, remedy=f"give the keys in it that differ, such as {key}.steps=VALUE,VALUE"
        )
    if not all(texts):
        what = f"a value of {key} is empty"
        raise ConfigError(what, where=origin, possible="VALUE,VALUE", remedy="write null, or '' for an empty text")
    values = [value_of(each, origin) for each in texts]
    for number, value in enumerate(values):
        if any(_is_same(value, earlier) for earlier in values[:number]):
            raise ConfigError(f"{key} has the value {to_flow(value)} twice", where=origin, remedy="keep one of them")
    return Part(key, texts, values)


def _split(text: str) -> Iterator[str]:
    """The parts between commas that are in no brackets and in no quotes."""
    depth, quote, begin, before, skips = 0, "", 0, "", False
    for place, letter in enumerate(text):
        if skips:
            skips = False
        elif quote:
            skips = letter == "\\" and quote == '"'
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (not before or before in ",:'\"" or before in _OPENING):
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == "," and not depth:
            yield text[begin:place]
            begin = place + 1
        before = before if letter.isspace() else letter
    yield text[begin:]


def _is_same(one: Any, other: Any) -> bool:
    """True for values that a config takes for the same; true is not 1."""
    if type(one) in (int, float) and type(other) in (int, float):
        return bool(one == other)
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _seeds(parts: Sequence[Part], words: str | None) -> tuple[list[Part], list[int]]:
    """The parts without ``trainer.seed``, and the seeds.

    Raises:
        ConfigError: One is no seed or comes twice, or they are given in two ways.
    """
    own = [part for part in parts if part.key == SEED]
    others = [part for part in parts if part.key != SEED]
    where = f"{SEED}={','.join(own[-1].texts)}" if words is None and own else f"--seeds {words}"
    if words is not None and own:
        raise ConfigError(f"--seeds and {SEED} are both given", where=where, remedy="keep one of them")
    texts = words.split(",") if words is not None else own[-1].texts if own else ()
    found = [seed for text in texts for seed in _range(text.strip(), where)]
    if twice := sorted({seed for seed in found if found.count(seed) > 1}):
        raise ConfigError(f"the seed {twice[0]} is given twice", where=where, remedy="keep one of them")
    return others, found


def _range(text: str, where: str) -> list[int]:
    first, dash, last = text.partition("-")
    if first.isdecimal() and (last.isdecimal() or not dash):
        begin, end = int(first), int(last or first)
        if begin <= end <= _MOST_SEED and end - begin < MOST_POINTS:
            return list(range(begin, end + 1))
    possible = f"whole numbers from 0 to {_MOST_SEED}, such as 0,1,2 or 0-4, and up to {MOST_POINTS} of them"
    raise ConfigError(f"{text!r} is no seed", where=where, possible=possible)


def _repeated(parts: Sequence[Part]) -> Iterator[ConfigError]:
    """Errors for keys that are given twice, one of the times as an axis."""
    for key in dict.fromkeys(part.key for part in parts):
        given = [part for part in parts if part.key == key]
        if len(given) > 1 and any(part.is_axis for part in given):
            where = ", ".join(f"{key}={','.join(part.texts)}" for part in given)
            yield ConfigError(f"{key} is given twice", where=where, remedy="give all of its values at once")
