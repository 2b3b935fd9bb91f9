"""Prompt templates: Jinja in a sandbox. A dataset's texts are values there, never templates.

The sandbox keeps Python's inside out of reach; loops, products and written texts are bounded here too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrl.errors import ConfigError, DataError
from mmrl.types import IMAGE_PLACEHOLDER

MAX_LINES = 1_000_000
"""Lines of a compiled template, and of Jinja's own functions, that filling it once may run: a third of a second."""
MAX_CHARACTERS = 2**22
"""Longest text that a template may write or multiply, and bits of its largest number."""
_SUFFIXES = (".jinja", ".j2")


class PromptTemplate:
    """A template for the text of a user turn; it sees ``prompt`` (that text) and ``row`` (the columns).

    Args:
        template: Jinja text, or a path to a ``.jinja`` or ``.j2`` file.
        name: The config's key, for messages.

    Attributes:
        text: The template itself.

    Raises:
        ConfigError: It cannot be read, or is not valid Jinja.
    """

    def __init__(self, template: str, name: str) -> None:
        self._name = where = name
        if template.endswith(_SUFFIXES):
            where, path = f"{name}: {template}", Path(template)
            try:
                template = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"The prompt template cannot be read: {getattr(error, 'strerror', None) or error}",
                    where=where,
                    possible="a .jinja or .j2 file, or the template itself",
                ) from error
        self.text = template
        try:
            self._template = _Sandbox(undefined=StrictUndefined).from_string(template)
        except (TemplateError, OverflowError, RecursionError) as error:
            raise ConfigError(f"The prompt template is not valid Jinja: {error}", where=where) from error

    def fill(self, text: str, row: Mapping[str, Any], where: str, *, has_images: bool = True) -> str:
        """The text of the turn, with as many images as before.

        Args:
            has_images: False if the row has none, so that placeholders are text.

        Raises:
            DataError: The template fails on this row, or loses or adds an image, also by a column that it prints.
        """
        try:
            filled = self._write(text, row)
        except Exception as error:  # templates run arbitrary expressions: any exception is the template's
            raise DataError(
                f"{self._name} fails: {error}",
                where=where,
                possible=f"prompt, row with the columns {', '.join(row) or '(none)'}",
                remedy=f"correct {self._name}, or the row",
            ) from error
        found, expected = filled.count(IMAGE_PLACEHOLDER), text.count(IMAGE_PLACEHOLDER)
        if found != expected and has_images:
            raise DataError(
                f"{self._name} turns {expected} {IMAGE_PLACEHOLDER} into {found}",
                where=where,
                possible="{{ prompt }} once, which carries the images, and columns without any",
                remedy=f"correct {self._name}, or the row",
            )
        return filled

    def _write(self, text: str, row: Mapping[str, Any]) -> str:
        parts, room = list[str](), MAX_CHARACTERS
        with bounded():
            for part in self._template.generate(prompt=text, row=row):
                parts.append(part)
                room -= len(part)
                if room < 0:
                    raise OverflowError(f"it writes more than {MAX_CHARACTERS} characters")
        return "".join(parts)


@contextmanager
def bounded() -> Iterator[None]:
    """Ends a template that is filled in the block and runs for ever: OverflowError after ``MAX_LINES``."""
    left = MAX_LINES

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OverflowError(f"it takes more than {MAX_LINES} steps")
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        own = frame.f_code.co_filename == "<template>" or frame.f_globals.get("__name__", "").startswith("jinja2.")
        return count if own else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products and powers before they are computed."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MAX_CHARACTERS:
            raise OverflowError(f"{operator} gives more than {MAX_CHARACTERS} characters or bits")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Characters, elements or bits of a product or power of whole numbers, at most; 0 for other operands."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(many, "__len__"):
            return len(many) * times
    return 0
