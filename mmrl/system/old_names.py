"""Modules that plugins knew by another name in version 0.2.0: they still import, with a warning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from mmrl.errors import warn_of_old_name

MOVED = {"mmrl.media": "mmrl.data.images", "mmrl.hub": "mmrl.data.hub", "mmrl.templates": "mmrl.data.templates"}
"""Modules that the README of 0.2.0 showed to plugin authors, and their present names."""


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warn_of_old_name(old, MOVED[old])
        sys.modules[old] = import_module(MOVED[old])


def install() -> None:
    """Let old names be imported."""
    sys.meta_path.append(_Moved())
