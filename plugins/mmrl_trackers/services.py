"""Shared by trackers: the id of a run at a service, packages that are not installed with mmrl, and rollouts to show."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mmrl.errors import PluginError
from mmrl.interfaces import ShownRollout, Tracker

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PICTURES, PICTURE_SIDE = 8, 512
"""Pictures of a rollout that are shown, and their longer side in pixels at most."""


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


def text_of(rollout: ShownRollout) -> str:
    """The reward, the reference answer, and the conversation."""
    lines = [f"reward {rollout.reward:g}, answer {rollout.answer or 'unknown'}"]
    return "\n".join(lines + [f"[{each.role}] {each.content}" for each in rollout.messages])


def pictures_of(rollout: ShownRollout) -> list[Image]:
    """The first pictures, made smaller where they are large."""
    from PIL import Image

    found = []
    for ref in rollout.images[:MOST_PICTURES]:
        with Image.open(ref.path) as file:
            found.append(file.convert("RGB"))
        found[-1].thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    return found
