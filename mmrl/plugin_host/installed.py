"""Plugins of the installed packages, as their entry points tell."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import get_args

from mmrl.config.plugin_specs import Kind

GIVEN = "(given)"


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin and its origin.

    Attributes:
        distribution: The installed package; ``file`` for a plugin that is named by its file or module.
        version: The distribution's version; else the start of the file's sha256.
        target: ``module:Class``, or the file's path and the name in it.
    """

    kind: Kind
    name: str
    distribution: str
    version: str
    target: str

    @property
    def is_installed(self) -> bool:
        """True unless it is named by its file or module, or is a class that was given."""
        return self.distribution != "file" and self.version != GIVEN

    def __str__(self) -> str:
        return f"{self.kind} plugin {self.name!r} of {self.distribution} {self.version}"


def installed(kind: Kind) -> Sequence[tuple[PluginInfo, EntryPoint]]:
    """Every plugin of a kind that an installed package registers; imports none."""
    folders = [os.path.abspath(folder) for folder in sys.path]  # a folder's time changes with each (un)installation
    return _scan(tuple((folder, os.stat(folder).st_mtime_ns) for folder in folders if os.path.exists(folder)))[kind]


@lru_cache(maxsize=1)  # a scan opens a file of every installed package: a run has some twenty plugins
def _scan(folders: tuple[tuple[str, int], ...]) -> Mapping[Kind, Sequence[tuple[PluginInfo, EntryPoint]]]:
    """Every plugin that is installed in the folders of ``sys.path``, given with their times of change."""
    registered = entry_points()
    found: dict[Kind, list[tuple[PluginInfo, EntryPoint]]] = {kind: [] for kind in get_args(Kind)}
    for kind, pairs in found.items():
        for entry in registered.select(group=f"mmrl.{kind}s"):
            distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("?", "?")
            pairs.append((PluginInfo(kind, entry.name, distribution, version, entry.value), entry))
    return found
