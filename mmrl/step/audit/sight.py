"""Rows on sight: with another image in its place, or its mark moved, the log-probs of the same tokens must move."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.ops.parity import WIDER
from mmrl.step.audit.probe_prompts import MOVED, OTHER
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import Probed, mean_abs, pair_places

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number."""
SEEN = 100.0
"""Least movement of a model that sees, as a multiple of the rounding of the type in which it is measured."""
FOLLOWS, NOISE = 0.5, 8.0
"""Largest difference between two movements, as a share of the movement, and as a multiple of the noise."""
FINDS = {OTHER: "images that never arrive", MOVED: "positions of patches that are read wrongly"}
"""Faults that another image, and a mark elsewhere, find."""
SIGHT = "sight, "
"""Head of the names of rows on the model itself."""
BLIND = "the folder's weights are blind (a merger or projector of zeros, a tower that was not loaded)"
CURE = "take a folder whose answers depend on the image in plain transformers, or rows without images"
"""The cure of a blind model."""


def sight_rows(probed: Probed) -> Iterator[ProbeRow]:
    """Rows of another image, and of the mark moved; none for a run without images."""
    for other, own, crossed in pair_places(probed.samples):
        yield from _movement_rows(probed, other, own, crossed, FINDS[other])


def _movement_rows(probed: Probed, name: str, own: int, crossed: int, finds: str) -> Iterator[ProbeRow]:
    """The model moves; the learner moves as it does; the sampler is at its own image and not at the other one.

    Args:
        own: Place of a completion after its own image.
        crossed: Place of the same completion after the image of the prompt ``IMAGE``.
    """
    by = probed.plain or "the learner, one by one"
    moved, noise = probed.alone[own] - probed.alone[crossed], probed.noise
    movement, least = mean_abs(moved), SEEN * noise * EPSILON[WIDER[probed.precision]] / EPSILON[probed.precision]
    least = least if probed.plain else noise
    found = f"log-probs of the same tokens move by {movement:.1e} nats in {by}"
    found += "" if movement > least else ", which is nothing: the model is blind"
    yield ProbeRow.more_than(f"{SIGHT}{name}", movement, least, found, f"{BLIND}; {finds}")
    if probed.plain:
        off = mean_abs(probed.packed[own] - probed.packed[crossed] - moved)
        bound = max(FOLLOWS * movement, NOISE * noise)
        found = f"the learner's movement is {off:.1e} nats from that of {by}, which is {movement:.1e}"
        yield ProbeRow.at_most(f"sight of the learner, {name}", off, bound, found, f"in the learner: {finds}")
    if probed.samples[own].is_sampled:
        # The sampler tells of its own tokens alone: they must fit the image that it was shown, and not the other one.
        near, far = (mean_abs(probed.told(own) - probed.packed[place]) for place in (own, crossed))
        bound = max(FOLLOWS * far, NOISE * noise)
        found = f"the sampler is {near:.1e} nats from the learner on its own image, and {far:.1e} on the other"
        yield ProbeRow.at_most(f"sight of the sampler, {name}", near, bound, found, f"in the sampler: {finds}")
