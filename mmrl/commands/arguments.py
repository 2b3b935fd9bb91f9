"""Arguments that commands share: config files with overrides, and ``--json``; and the config that they name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.commands.printing import warn

if TYPE_CHECKING:
    from mmrl.config.load import LoadedConfig

_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=.*|--[A-Za-z_][\w-]*(\.[\w-]+)+(=.*)?", re.DOTALL)
_OVERRIDES = """\
section.key=VALUE changes one value, which is YAML. A plugin that is written whole, with its name, replaces the earlier
one and all of its options: data.train={name: NAME, path: PATH}; without a name the mapping changes options."""


def add_config(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Take config files and overrides, in any order."""
    name = parser.prog.split()[-1]
    parser.usage = f"mmrl {name} [options] CONFIG... [section.key=VALUE | --section.key VALUE]..."
    files = "*" if optional else "+"
    parser.add_argument("config", nargs=files, type=Path, metavar="CONFIG", help="YAML files, later ones win")
    parser.epilog = _OVERRIDES
    parser.set_defaults(overrides=[], has_config=True)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Take ``--json``."""
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for argparse, and the overrides among them: ``a.b=v``, ``--a.b=v`` or ``--a.b v``."""
    others: list[str] = []
    overrides: list[str] = []
    remaining = iter(words)
    for word in remaining:
        is_override = _OVERRIDE.fullmatch(word)
        (overrides if is_override else others).append(word)
        if is_override and "=" not in word:
            overrides += [value for value in [next(remaining, None)] if value is not None]
    return others, overrides


def load(arguments: argparse.Namespace) -> LoadedConfig:
    """The config of ``add_config``; its warnings are printed.

    Raises:
        MMRLError: It cannot be read, or has errors.
    """
    from mmrl.config.load import load_config
    from mmrl.plugin_host.registry import options_class
    from mmrl.system.redaction import remember_secrets

    loaded = load_config(arguments.config, arguments.overrides, options_class=options_class)
    remember_secrets(loaded.config.model_dump(mode="json"))
    warn(loaded.warnings)
    return loaded
