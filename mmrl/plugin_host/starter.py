"""A first plugin package to edit: the files of ``plugin_template`` under another name."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from mmrl.errors import ConfigError
from mmrl.plugin_host.registry import list_plugins

_TEMPLATE = Path(__file__).with_name("template")
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def write_plugin(name: str, folder: Path) -> list[Path]:
    """Write the package ``name`` to a new folder; returns its files.

    Raises:
        ConfigError: The name cannot name a package, a module and a plugin, or is taken; the folder exists, or
            cannot be written.
    """
    module = module_name(name)
    _check_free(name, module)
    sources = sorted(path for path in _TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    written = []
    try:
        folder.mkdir(parents=True)
        for source in sources:
            place = str(source.relative_to(_TEMPLATE)).replace("new_plugin", module)
            path = folder / (".gitignore" if place == "gitignore" else place)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8")
            text = text.replace("new_plugin", module).replace("new-plugin", name.replace("_", "-"))
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except FileExistsError as error:
        raise ConfigError("the folder exists", where=str(folder), remedy="name another with --path") from error
    except OSError as error:
        raise ConfigError(f"cannot write the package: {error.strerror}", where=str(folder)) from error
    return written


def module_name(name: str) -> str:
    """The module's name for a package of that name; its plugins have the same name.

    Raises:
        ConfigError: It is no valid name.
    """
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise ConfigError(
            f"a package cannot be called {name!r}",
            where="mmrl init plugin NAME",
            possible="lower-case letters and digits, in words joined by - or _, such as my-rewards; no Python keyword",
        )
    return module


def _check_free(name: str, module: str) -> None:
    """Raises ConfigError if the name is taken."""
    taken = [str(info) for info in list_plugins() if info.name == module]
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:  # any folder is a package without an origin
        taken.append(f"Python module {module!r}")
    if taken:
        what = f"the name {name!r} is taken by {', '.join(taken)}"
        raise ConfigError(what, where="mmrl init plugin NAME", remedy="choose another name")
