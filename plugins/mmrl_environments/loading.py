"""Functions and classes that a config names: ``path/to/file.py:name``, or ``package.module:name``."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from mmrl.errors import ConfigError, MMRLError

_NAME = re.compile(r"(?:import:)?(?P<place>.+):(?P<name>[A-Za-z_]\w*)")
_PARAMETER = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:")


def load(target: str, noun: str) -> Any:
    """The object of that name.

    Args:
        noun: The kind of thing it should be, ``function`` or ``class``, for messages.

    Raises:
        ConfigError: There is no such file, module or name, or its code fails.
    """
    match = _NAME.fullmatch(target)
    if match is None:
        raise ConfigError(
            f"{target!r} names no {noun}",
            possible="path/to/file.py:name, or package.module:name",
        )
    place, name = match["place"], match["name"]
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except MMRLError:
        raise
    except (Exception, SystemExit) as error:
        remedy = "repair the file" if place.endswith(".py") else "install the package, or name a file: path/to/file.py:"
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{place} cannot be imported: {cause}", where=target, remedy=remedy) from error
    found = getattr(module, name, None)
    if found is None:
        wanted = inspect.isclass if noun == "class" else inspect.isroutine
        names = [key for key, value in vars(module).items() if wanted(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{place} has no {noun} {name}", where=target, possible=", ".join(names), remedy=remedy)
    return found


def _file(path: Path) -> ModuleType:
    try:
        version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        remedy = "give a path relative to the working folder"
        what = f"the file {path} cannot be read: {error.strerror}"
        raise ConfigError(what, where=str(path.absolute()), remedy=remedy) from error
    name = f"mmrl_environment_file_{version}"
    if name in sys.modules:  # several functions of one file share its state
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_tool(function: Callable[..., Any], target: str, *, is_method: bool = False) -> None:
    """Raises ConfigError unless a schema can be made of the function: it has type hints and describes its arguments.

    Args:
        target: Its name, for the message.
        is_method: Its first parameter is ``self``, which no call gives.
    """
    remedy = "such as: def search(query: str) -> str, with a docstring that has a line `query: ...` under `Args:`"
    parameters = list(inspect.signature(function).parameters.values())[is_method:]
    for each in parameters:
        if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL, each.VAR_KEYWORD):
            what = f"the tool {target} has the parameter {str(each)!r}, which a call by names cannot give"
            raise ConfigError(what, where=target, remedy="give it parameters with names")
    bare = [each.name for each in parameters if each.annotation is each.empty]
    if bare:
        what = f"the tool {target} has no type hints for {', '.join(bare)}"
        raise ConfigError(what, where=target, remedy=remedy)
    docstring = inspect.getdoc(function) or ""
    if not docstring.strip():
        raise ConfigError(f"the tool {target} has no docstring", where=target, remedy=remedy)
    missing = sorted({each.name for each in parameters} - _described(docstring))
    if missing:
        what = f"the docstring of the tool {target} does not describe {', '.join(missing)}"
        raise ConfigError(what, where=target, remedy=remedy)
    try:
        get_type_hints(function)
    except Exception as error:
        what = f"the type hints of the tool {target} cannot be read: {error}"
        raise ConfigError(what, where=target, remedy="import the names that they use") from error


def _described(docstring: str) -> set[str]:
    """Names of the parameters under ``Args:``."""
    _, _, rest = docstring.partition("Args:")
    section = re.split(r"^\s*(?:Returns|Raises|Yields):", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return {match[1] for line in section.splitlines() if (match := _PARAMETER.match(line))}
