"""Secrets never reach a file or a message: one filter for every sink."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

REDACTED = "[redacted]"
_NUMBERS = frozenset({bool, float, int, type(None)})
_TEXTS = frozenset({str})
_MIN_CHARACTERS = 8
_NAME = re.compile("TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
_OPTION = re.compile(
    r"(.*[_-])?(api_?key|access_?key|secret|secret_?key|password|passwd)|((api|access|auth|hub|hf)[_-])?token",
    re.IGNORECASE,
)
"""Stricter than for variables: values of ``stop_token`` or ``answer_key`` are in every rollout."""
_KNOWN_FORMS = [
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bsk-(?=[\w-]*\d)[\w-]{16,}",
    r"(?<=\b[Bb]earer )[^\s'\")]{8,}",
    r"(?<=://)[^/?#\s'\"]+(?=@)",  # user and password; a password may hold an @ of its own
]


def names_a_secret(variable: str) -> bool:
    """True if an environment variable of this name is taken to hold a secret."""
    return _NAME.search(variable) is not None


_of_configs: set[str] = set()


def remember_secrets(config: Any) -> None:
    """Have every ``Redactor`` made from now on replace the values of a config's keys such as ``api_key``.

    Args:
        config: Mappings and lists, as in YAML.
    """
    if isinstance(config, Mapping):
        _of_configs.update(
            value
            for key, value in config.items()
            if isinstance(value, str) and len(value) >= _MIN_CHARACTERS and _OPTION.fullmatch(str(key))
        )
    for item in config.values() if isinstance(config, Mapping) else config if isinstance(config, list | tuple) else ():
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
        return self._pattern.sub(REDACTED, text)

    def parts(self, parts: Sequence[str]) -> list[str]:
        """The parts of a text; a secret that goes through several of them is replaced in the first one."""
        found, text = list(parts), "".join(parts)
        for secret in reversed(list(self._pattern.finditer(text))):
            end = 0
            for place, part in enumerate(parts):
                begin, end = end, end + len(part)
                if begin < secret.end() and secret.start() < end:
                    is_first = begin <= secret.start()
                    found[place] = REDACTED if is_first else ""
        return found

    def plain(self, value: Any) -> Any:
        """The value as JSON can hold it: numpy unpacked, NaN and infinity as None, secrets out of every text."""
        match value:
            case str():
                return self(value)
            case None | bool() | int():
                return value
            case float():
                return value if math.isfinite(value) else None
            case np.ndarray() if value.dtype.kind in "biu":
                return value.tolist()
            case np.ndarray() | np.generic():
                return self.plain(value.tolist())
            case Mapping():
                return {self(str(key)): self.plain(item) for key, item in value.items()}
            case list() if _NUMBERS.issuperset(map(type, value)) and all(map(math.isfinite, filter(None, value))):
                return value  # token ids and log-probs: most of what a run writes
            case list() if _TEXTS.issuperset(map(type, value)) and not self._pattern.search("\n".join(value)):
                return value
            case list() | tuple() | set() | frozenset():
                return [self.plain(item) for item in value]
            case _:
                return self(str(value))
