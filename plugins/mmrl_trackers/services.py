"""Shared by trackers of services: the id of a run, and packages that are not installed with mmrl."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mmrl.errors import PluginError
from mmrl.interfaces import Tracker


class NumberedTracker(Tracker):
    """A tracker whose service gives a run an id, by which a resumed run finds its place again."""

    _id: str | None = None

    def state(self) -> Mapping[str, Any]:
        """The run's id, as soon as it has one."""
        return {} if self._id is None else {"id": self._id}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]


def require(module: str, extra: str) -> None:
    """Check that a tracker's package is installed, without importing it.

    Raises:
        PluginError: It is not; the message says how to install it.
    """
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:  # what the module is part of is not there
        found = False
    if not found:
        raise PluginError(
            f"the tracker {extra} needs a package that is not installed: {module}",
            where="trackers",
            remedy=f'pip install "mmrl-train[{extra}]"',
        )
