"""The places where definitions were written that now lie in a given file: errors name those, and not the file."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.errors import MMRLError, PluginError


@dataclass(frozen=True, slots=True)
class _Definition:
    """A function or class in a given file.

    Attributes:
        name: Its name.
        first: Its first line in there.
        last: Its last one.
        file: The file or cell that it was written in.
        line: Its first line in that.
    """

    name: str
    first: int
    last: int
    file: str
    line: int


@dataclass(slots=True)
class Origins:
    """The places of all definitions in the given files of one call."""

    _files: dict[str, list[_Definition]] = field(default_factory=dict)

    def add(self, path: Path, text: str, sources: Iterable[tuple[Any, str]]) -> None:
        """Note a given file.

        Args:
            text: The file's.
            sources: Functions and classes, with their sources as the file has them.
        """
        found = self._files[str(path)] = []
        for value, source in sources:
            source = source.strip("\n")
            place = _place(value, source)
            if place is not None and source in text:
                first = text[: text.index(source)].count("\n") + 1
                found.append(_Definition(value.__name__, first, first + source.count("\n"), *place))

    def told(self, text: str) -> str:
        """A text that names the places, and a function's name alone where it has a given file's beside it."""
        for path, definitions in self._files.items():
            name = re.escape(path)
            text = text.replace(f"'{path}:", "'")  # 'FILE:name', as a config names it
            text = re.sub(rf'File "{name}", line (\d+)', partial(_retold, definitions, 'File "{}", line {}'), text)
            text = re.sub(rf"{name}:(\w+)", partial(_retold, definitions, "{}, line {}"), text)
        return text

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Errors of the block have ``told`` texts."""
        try:
            yield
        except MMRLError as error:
            raise self.retold(error) from None

    def retold(self, error: MMRLError) -> MMRLError:
        """The error with ``told`` texts."""
        parts = {name: self.told(getattr(error, name)) for name in ("where", "possible", "remedy")}
        found = type(error)(self.told(error.what), **parts)
        if isinstance(error, PluginError) and isinstance(found, PluginError):
            found.details = self.told(error.details)
        return found


def _retold(definitions: list[_Definition], form: str, match: re.Match[str]) -> str:
    """The place of a given file's line, or of the definition of that name; the match itself if it is of none."""
    for each in definitions:
        if match[1] == each.name:
            return f"{each.name} of {form.format(each.file, each.line)}"
        if match[1].isdecimal() and each.first <= int(match[1]) <= each.last:
            return form.format(each.file, each.line + int(match[1]) - each.first)
    return match[0]


def _place(value: Any, source: str) -> tuple[str, int] | None:
    """The file or cell, and the line, of a definition with that source; None if they are not known."""
    inner = inspect.unwrap(value)
    if isinstance(inner, type):
        functions = [each for each in vars(inner).values() if inspect.isfunction(each)]
        names = [each.__code__.co_filename for each in functions if each.__module__ == inner.__module__]
    else:
        names = [inner.__code__.co_filename]
    for name in dict.fromkeys(names):
        text = "".join(linecache.getlines(name))
        if source in text:
            return _shown(name), text[: text.index(source)].count("\n") + 1
    return None


def _shown(name: str) -> str:
    """A file's name, from here; of a notebook's cell ``Cell In[3]``, as its errors have it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and (cell := shell.compile.format_code_name(name)):
        return " ".join(cell)
    return os.path.relpath(name) if Path(name).is_relative_to(Path.cwd()) else name
