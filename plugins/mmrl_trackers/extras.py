"""Trackers whose packages are not installed with mmrl."""

from __future__ import annotations

from importlib.util import find_spec

from mmrl.errors import PluginError


def require(module: str, extra: str) -> None:
    """See that a tracker's package is there, without importing it.

    Raises:
        PluginError: It is not; says how to install it.
    """
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:  # what the module is part of is not there
        found = False
    if not found:
        raise PluginError(
            f"the tracker {extra} needs a package that is not installed: {module}",
            where="trackers",
            remedy=f'pip install "mmrl[{extra}]"',
        )
