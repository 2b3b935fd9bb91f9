"""The plugins that a config uses, and the code among them that no package has installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.config.plugin_specs import Kind, PluginSpec
from mmrl.config.sections import Config
from mmrl.plugin_host.installed import PluginInfo
from mmrl.plugin_host.registry import is_file, locate


def used_plugins(config: Config) -> list[PluginInfo]:
    """The plugins that ``config`` names, and the files that their options name, each once."""
    named = [(kind, name) for _, kind, spec in config.plugins() for name in (spec.name, *_named_files(spec.options))]
    return list(dict.fromkeys(locate(kind, name) for kind, name in named))


def own_code(kind: Kind, spec: PluginSpec) -> dict[str, str]:
    """The beginning of the sha256 of each file or module that an entry names, by its path or module: that of its plugin
    unless a package has installed it, and those of its options (``path/to/file.py:name``)."""
    infos = [locate(kind, name) for name in (spec.name, *_named_files(spec.options))]
    return {info.name.rpartition(":")[0]: info.version for info in infos if not info.is_installed}


def _named_files(value: Any) -> Iterator[str]:
    """Every text ``path/to/file.py:name`` in some options whose file exists; the plugin tells of one that does not."""
    if isinstance(value, str):
        if is_file(value) and Path(value.rpartition(":")[0]).is_file():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _named_files(part)
