"""Paths in a config's file: they count from the file's folder if something is there, else from the working folder.

Words of the command line and values from Python count from the working folder, and so does what a run creates
(``trainer.run_dir``) and the config that it writes into its folder.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path

_PLUGINS = ("data", "rewards", "algorithm", "environment", "trackers", "monitors")
_NAMES = re.compile(r"(.*_)?(path|paths|file|files|root)")
"""Keys whose values are paths, in the sections of plugins."""
_OF_CODE = re.compile(r"(?P<path>[^:]+\.py)(?::\w+)?")
_TEMPLATES = (".jinja", ".j2")


def is_of_a_run(file: Path) -> bool:
    """True for the config that a run has written, whose paths count from the folder in which it was started."""
    return file.name == "config.yaml" and (file.parent / "attempts.jsonl").exists()


def from_file(value: str, path: tuple[str | int, ...], folder: Path) -> str:
    """The text of a config's file at a dotted path, as a path from the working folder if it leads to something near the
    file.

    Args:
        folder: The file's.
    """
    folder = _from_here(folder)
    if folder == Path() or not path or not value:
        return value
    if path[0] in _PLUGINS and (code := _OF_CODE.fullmatch(value)):
        return _near(code["path"], folder) + value[len(code["path"]) :]
    return _near(value, folder) if _is_path(value, path) else value


def _from_here(folder: Path) -> Path:
    """The folder as a path from the working folder if it lies in there: one config is one, whatever names it."""
    here = Path.cwd()
    whole = folder.absolute()
    return whole.relative_to(here) if whole.is_relative_to(here) else folder


def _is_path(value: str, path: tuple[str | int, ...]) -> bool:
    if path in (("model", "path"), ("model", "chat_template")):
        return True
    if path[0] == "data" and value.endswith(_TEMPLATES):
        return True
    name = next((part for part in reversed(path) if isinstance(part, str)), "")
    return path[0] in _PLUGINS and _NAMES.fullmatch(name) is not None


def _near(value: str, folder: Path) -> str:
    """The path from the file's folder if something is there, else as it is."""
    if Path(value).is_absolute() or value.startswith("~"):
        return value
    place = folder / value
    return str(place) if place.exists() or glob.glob(str(place)) else value
