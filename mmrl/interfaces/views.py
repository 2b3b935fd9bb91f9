"""Views: second forms of a prompt's images, which an algorithm compares with the first or samples from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.errors import PluginError, contract_error, plugin_errors
from mmrl.types import ImageArray

Change = Callable[[ImageArray, np.random.Generator, float], ImageArray]
"""A new image from an image as the model sees it, the generator of the prompt's seed, and the strength. It leaves the
given one as it is."""


def full(step: int, steps: int) -> float:
    """The strength 1 in every step."""
    return 1.0


@dataclass(frozen=True, slots=True)
class View:
    """A second form of the images of each prompt that has any; ``mmrl.ops.image_views`` has some changes.

    The generator's seed follows from the run's, the epoch, the prompt's id, the view's name and the image's place, so
    that all completions of a prompt share a view, and a run that goes on has the same ones.

    Attributes:
        name: A word; ``PackedTokens.views`` and metrics have it.
        change: Makes the view of one image.
        scored: The log-probs and entropies of each completion under the policy given the view are a token column of
            every optimizer step. The image keeps its size then: tokens are compared one by one.
        gradient: The scored log-probs and entropies have a gradient; entropies only with ``Needs.entropy_gradient``.
        sampled: Share of each group that is sampled from the view. It is trained on as completions of the prompt
            itself.
        strength: The strength that ``change`` is given in a step, from 1, of so many steps.
    """

    name: str
    change: Change
    scored: bool = False
    gradient: bool = True
    sampled: float = 0.0
    strength: Callable[[int, int], float] = full

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"a view's name is a word of small letters, digits and _, not {self.name!r}")
        if not 0 <= self.sampled < 1:
            raise ValueError(f"the share that is sampled from view {self.name!r} is at least 0 and less than 1")
        if not (self.scored or self.sampled):
            raise ValueError(f"view {self.name!r} is used for nothing: set scored=True, or sampled to a share")

    def members(self, group_size: int) -> int:
        """Rollouts of a group that are sampled from it."""
        return math.floor(self.sampled * group_size + 0.5)


def members_of_views(views: Sequence[View], group_size: int) -> dict[str, int]:
    """Rollouts of a group by the view that they are sampled from; the rest is sampled from the prompt itself.

    Raises:
        ValueError: A view has none of so few, or the prompt itself has none left.
    """
    found = {view.name: view.members(group_size) for view in views if view.sampled}
    for name, count in found.items():
        if not count:
            raise ValueError(f"of {group_size} rollouts of a prompt none would be sampled from view {name!r}")
    if sum(found.values()) >= group_size:
        raise ValueError(f"of {group_size} rollouts of a prompt none would be sampled from its own images")
    return found


def changed(plugin: object, view: View, image: ImageArray, rng: np.random.Generator, strength: float) -> ImageArray:
    """The view of an image.

    Raises:
        PluginError: ``change`` raises, or answers no image; or one of another size though the view is scored.
    """
    where = f"views[{view.name!r}]"
    with plugin_errors(plugin, where):
        found = view.change(image, rng, strength)
    if not (isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3):
        told = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
        raise contract_error(plugin, where, f"answered {told}", "return a uint8 array (H, W, 3)")
    if view.scored and found.shape != image.shape:
        raise _resized(plugin, view, image.shape, found.shape)
    return found


def _resized(plugin: object, view: View, before: Sequence[int], after: Sequence[int]) -> PluginError:
    sizes = [f"{shape[1]} x {shape[0]}" for shape in (before, after)]
    what = f"made an image of {sizes[1]} pixels from one of {sizes[0]}, which has other image tokens"
    remedy = (
        "tokens are compared one by one: let the view keep the size, as mmrl.ops.image_views.occluded does and a crop "
        "does not, or set scored=False"
    )
    return contract_error(plugin, f"views[{view.name!r}]", what, remedy)


def strength_of(plugin: object, view: View, step: int, steps: int) -> float:
    """The view's strength in a step.

    Raises:
        PluginError: ``strength`` raises, or answers no finite number.
    """
    where = f"views[{view.name!r}].strength"
    with plugin_errors(plugin, where):
        found = view.strength(step, steps)
    if not (isinstance(found, int | float | np.number) and math.isfinite(found)):
        raise contract_error(plugin, where, f"answered {found!r} in step {step} of {steps}", "return a finite number")
    return float(found)


PROBES = ((56, 84), (28, 28))
"""(H, W) of images that a view is tried on before anything starts."""


def try_views(plugin: object, views: Sequence[View], steps: int) -> None:
    """Try each view on made-up images, in the first and the last step.

    Raises:
        PluginError: It fails, changes the image that it is given, gives another answer to the same seed, or changes the
            size though it is scored; or two views have one name.
    """
    names = [view.name for view in views]
    if len(set(names)) < len(names):
        raise contract_error(
            plugin, "needs", f"names a view twice: {', '.join(names)}", "give views names of their own"
        )
    for view in views:
        for step in {1, max(steps, 1)}:
            strength = strength_of(plugin, view, step, max(steps, 1))
            for shape in PROBES:
                _try(plugin, view, np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8), strength)


def _try(plugin: object, view: View, image: ImageArray, strength: float) -> None:
    before = image.copy()
    first, again = (changed(plugin, view, image, np.random.default_rng(1), strength) for _ in range(2))
    where = f"views[{view.name!r}]"
    if not np.array_equal(image, before):
        raise contract_error(plugin, where, "wrote into the image that it was given", "change a copy")
    if not np.array_equal(first, again):
        remedy = "draw from the generator that it is given, and from no other"
        raise contract_error(plugin, where, "answered the same seed in two ways", remedy)
