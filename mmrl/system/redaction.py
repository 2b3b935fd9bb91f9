"""Secrets never reach a file or a message: one filter for every sink."""

from __future__ import annotations

import math
import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

REDACTED = "[redacted]"
_NUMBERS = frozenset({bool, float, int, type(None)})
_TEXTS = frozenset({str})
_MIN_CHARACTERS = 8
_NAME = re.compile("TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
_SECRET_KEY = re.compile(
    r"(.*[_-])?(api_?key|access_?key|secret|secret_?key|password|passwd)|((api|access|auth|hub|hf)[_-])?token",
    re.IGNORECASE,
)
"""Stricter than for variables: values of ``stop_token`` or ``answer_key`` are in every rollout."""
VARIABLES = "env"
"""The key of a mapping of environment variables."""
_KNOWN_FORMS = [
    r"\bhf_[A-Za-z0-9]{16,}",
    r"(?<=\b[Bb]earer )[^\s'\")]{8,}",
    r"(?<=://)[^/?#\s'\"]+(?=@)",  # user and password; a password may hold an @ of its own
]
_KEY = re.compile(r"sk-(?<=\bsk-)[\w-]{16,}")
"""An ``sk-`` key if there is a digit in it, else words. The digit is looked for in what was found: a pattern that looks
ahead for it takes time as the square of a text's length."""
_DIGIT = re.compile(r"\d")
_MOST = int(sys.float_info.max)
_PATH = re.compile(
    r"""(?<![^\s"'=,:(\[{])(?:file://[^\s"'<>,;|]*|(?:~[\w.-]*|\.\.?)(?:/[^/\s"'<>,;|]+)+|(?:/[^/\s"'<>,;|]+){2,})/*"""
)
"""A path within a text: from the root with two parts or more, or from a user's, this or the upper folder. The parts of
an address follow other characters, and those of `</answer>` too."""


def names_a_secret(variable: str) -> bool:
    """True if an environment variable of this name is taken to hold a secret."""
    return _NAME.search(variable) is not None


def keeps_a_secret(key: str) -> bool:
    """True if a config's key of this name, such as ``api_key``, is taken to hold a secret."""
    return _SECRET_KEY.fullmatch(key) is not None


def leads_to_a_secret(keys: Sequence[str]) -> bool:
    """True if a value of a config at this path is taken for a secret, or lies within one.

    Below a key ``env`` the keys are names of environment variables.
    """
    return any(
        keeps_a_secret(key) or (above == VARIABLES and names_a_secret(key))
        for above, key in zip(["", *keys], keys, strict=False)
    )


def without_secrets(value: Any, above: str = "") -> Any:
    """Mappings and lists with ``[redacted]`` in place of all that keys such as ``api_key`` hold.

    Args:
        above: The key that holds the value.
    """
    if isinstance(value, Mapping):
        return {key: _of_key(above, str(key), item) for key, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def _of_key(above: str, key: str, value: Any) -> Any:
    is_secret = leads_to_a_secret([above, key]) and not (value is None or isinstance(value, bool) or value == "")
    return REDACTED if is_secret else without_secrets(value, key)


def without_paths(value: Any) -> Any:
    """Mappings and lists with the last part of each path in place of paths of this machine, for those who lack it.

    A text that begins with the root and two parts, or with ``~/``, is one path, blanks included; others have paths in
    them, as ``see /a/b`` does. A path below the working folder, such as ``data/train.jsonl``, names no machine's folder
    and stays.
    """
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith("~/") or (value.startswith("/") and value.strip("/").count("/") and "\n" not in value):
        return _last_part(value)
    return _PATH.sub(lambda found: _last_part(found[0]), value)


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


_of_configs: set[str] = set()


def remember_secrets(config: Any, above: str = "") -> None:
    """Have every ``Redactor`` made from now on replace the values of a config's keys such as ``api_key``.

    Args:
        config: Mappings and lists, as in YAML.
        above: The key that holds them.
    """
    if isinstance(config, Mapping):
        _of_configs.update(
            value
            for key, value in config.items()
            if isinstance(value, str) and len(value) >= _MIN_CHARACTERS and leads_to_a_secret([above, str(key)])
        )
        for key, item in config.items():
            remember_secrets(item, str(key))
    for item in config if isinstance(config, list | tuple) else ():
        remember_secrets(item)


class Redactor:
    """Replaces tokens and passwords of known forms, and the values of secret environment variables, in texts.

    It also replaces the secrets of the process's config (``remember_secrets``). Known forms are Hugging Face and
    ``sk-`` keys, words after ``Bearer``, and users in addresses. Values shorter than 8 characters are left alone: they
    are flags and numbers, and words of ordinary text.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        items = (os.environ if environ is None else environ).items()
        values = {value for name, value in items if names_a_secret(name) and len(value) >= _MIN_CHARACTERS}
        longest_first = sorted(values | _of_configs, key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, longest_first), *_KNOWN_FORMS]))

    def __call__(self, text: str) -> str:
        """The text with every secret replaced by ``[redacted]``."""
        shown, done = list[str](), 0
        for start, end in self._secrets(text):
            shown += text[done:start], REDACTED
            done = end
        return "".join([*shown, text[done:]]) if shown else text

    def parts(self, parts: Sequence[str]) -> list[str]:
        """The parts of a text; a secret that goes through several of them is replaced in the first one."""
        found, ends = list(parts), list(accumulate(map(len, parts)))
        for start, end in reversed(list(self._secrets("".join(parts)))):
            first, last = bisect_right(ends, start), bisect_left(ends, end)
            found[first : last + 1] = [REDACTED, *[""] * (last - first)]
        return found

    def _secrets(self, text: str) -> Iterator[tuple[int, int]]:
        """Where each secret begins and ends; of two that overlap the one that begins first, or the longer one."""
        place = 0
        key, other = _key_from(text, 0), self._pattern.search(text)
        while key or other:
            start, end = min((each.span() for each in (key, other) if each), key=lambda span: (span[0], -span[1]))
            yield start, end
            place = end
            if key and key.start() < place:
                key = _key_from(text, place)
            if other and other.start() < place:
                other = self._pattern.search(text, place)

    def plain(self, value: Any) -> Any:
        """The value as JSON can hold it: numpy unpacked, NaN and infinity as None, secrets out of every text.

        An integer that is larger than any float, which most readers take for infinity, is a text.
        """
        match value:
            case str():
                return self(value)
            case None | bool():
                return value
            case int():
                return value if abs(value) <= _MOST else hex(value)
            case float():
                return value if math.isfinite(value) else None
            case np.ndarray() if value.dtype.kind in "biu":
                return value.tolist()
            case np.ndarray() | np.generic():
                return self.plain(value.tolist())
            case Mapping():
                return {self(str(key)): self.plain(item) for key, item in value.items()}
            case list() if _NUMBERS.issuperset(map(type, value)) and _are_finite(filter(None, value)):
                return value  # token ids and log-probs: most of what a run writes
            case list() if _TEXTS.issuperset(map(type, value)) and not any(self._secrets("\n".join(value))):
                return value
            case list() | tuple() | set() | frozenset():
                return [self.plain(item) for item in value]
            case _:
                return self(str(value))


def _key_from(text: str, place: int) -> re.Match[str] | None:
    """The first ``sk-`` key from a place on."""
    return next((each for each in _KEY.finditer(text, place) if _DIGIT.search(text, *each.span())), None)


def _are_finite(values: Iterable[float]) -> bool:
    try:
        return all(map(math.isfinite, values))
    except OverflowError:  # an integer that is larger than any float
        return False
