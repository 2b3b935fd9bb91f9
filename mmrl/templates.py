"""Prompt templates: Jinja in a sandbox. What a dataset holds is a value there, never a template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrl.errors import ConfigError, DataError
from mmrl.types import IMAGE_PLACEHOLDER

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
            self._template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(template)
        except TemplateError as error:
            raise ConfigError(f"The prompt template is not valid Jinja: {error}", where=where) from error

    def fill(self, text: str, row: Mapping[str, Any], where: str) -> str:
        """The text of the turn, with as many images as before.

        Raises:
            DataError: The template fails on this row, or loses or adds an image, also by a column that it prints.
        """
        try:
            filled = self._template.render(prompt=text, row=row)
        except Exception as error:  # templates run arbitrary expressions: any exception is the template's
            raise DataError(
                f"{self._name} fails: {error}",
                where=where,
                possible=f"prompt, row with the columns {', '.join(row) or '(none)'}",
                remedy=f"correct {self._name}, or the row",
            ) from error
        found, expected = filled.count(IMAGE_PLACEHOLDER), text.count(IMAGE_PLACEHOLDER)
        if found != expected:
            raise DataError(
                f"{self._name} turns {expected} {IMAGE_PLACEHOLDER} into {found}",
                where=where,
                possible="{{ prompt }} once, which carries the images, and columns without any",
                remedy=f"correct {self._name}, or the row",
            )
        return filled
