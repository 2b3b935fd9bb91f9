"""Arguments that commands share: config files with overrides, ``--json``, steps; and what they name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.commands.printing import warn
from mmrl.errors import ConfigError

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


def chosen_steps(words: Sequence[str], known: Sequence[int], where: str) -> list[int]:
    """The known steps that words such as ``7`` or ``3-5`` name, in order.

    Raises:
        ConfigError: They are not there.
    """
    chosen = set[int]()
    for word in words:
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        first = int(bounds[1]) if bounds else -1
        last = int(bounds[2] or first) if bounds else -1
        found = {step for step in known if first <= step <= last}
        if not found:
            what = f"there is no record of step {word}" if bounds else f"--step cannot be {word!r}"
            raise ConfigError(what, where=where, possible=f"{_ranges(known)}, or A-B" if known else "")
        chosen |= found
    return sorted(chosen)


def _ranges(steps: Sequence[int]) -> str:
    """Steps, such as ``1-4, 7``."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in found)
