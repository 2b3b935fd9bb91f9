"""Rows on sight: with another image in its place, or its mark moved, the log-probs of the same tokens must move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import IMAGE, MOVED, OTHER, Probed, mean_abs
from mmrl.types import FloatArray

EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
WIDER_EPSILON = {"float32": 2.0**-52, "bfloat16": 2.0**-23}
"""Distance from 1 to the next number, of a run's type and of the wider one."""
SEEN = 100.0
"""Least movement of a model that sees, as a multiple of the rounding of the type in which it is measured."""
FOLLOWS, NOISE = 0.5, 8.0
"""Largest difference between two movements, as a share of the movement, and as a multiple of the noise."""
BLIND = "the folder's weights are blind (a merger or projector of zeros, a tower that was not loaded)"


def sight_rows(probed: Probed) -> Iterator[ProbeRow]:
    """Rows of another image, and of the mark moved; none for a run without images."""
    for other, finds in ((OTHER, "images that never arrive"), (MOVED, "positions of patches that are read wrongly")):
        pairs = [
            (own, crossed)
            for prompt, source in ((IMAGE, other), (other, IMAGE))
            if (own := probed.place(source, source)) is not None
            and (crossed := probed.place(prompt, source)) is not None
        ]
        if pairs:
            yield from _movement_rows(probed, other, pairs, finds)


def _movement_rows(probed: Probed, name: str, pairs: list[tuple[int, int]], finds: str) -> Iterator[ProbeRow]:
    """The model moves; the learner moves as it does; the sampler is at its own image and not at the other one.

    Args:
        pairs: Places of a completion after its own image, and of the same one after the other image.
    """
    moved = _moved(probed.alone, pairs)
    movement, noise = mean_abs(moved), probed.noise
    if probed.plain:
        rounding = noise * WIDER_EPSILON[probed.precision] / EPSILON[probed.precision]
        by = probed.plain
    else:
        rounding, by = noise / SEEN, "the learner, one by one,"
    found = f"{name}: log-probs of the same tokens move by {movement:.1e} nats in {by}"
    if not movement > SEEN * rounding:
        found += f", which is nothing: {BLIND}"
    yield ProbeRow.more_than(f"sight, {name}", movement, SEEN * rounding, found, f"{BLIND}; {finds}")
    bound = max(FOLLOWS * movement, NOISE * noise)
    if probed.plain:
        off = mean_abs([a - b for a, b in zip(_moved(probed.packed, pairs), moved, strict=True)])
        found = f"{name}: the learner's movement is {off:.1e} nats from that of {by}, which is {movement:.1e}"
        yield ProbeRow.at_most(f"sight of the learner, {name}", off, bound, found, f"in the learner: {finds}")
    told = [(own, crossed) for own, crossed in pairs if probed.samples[own].is_sampled]
    if told:
        # The sampler tells of its own tokens alone: they must fit the image that it was shown, and not the other one.
        near, far = (mean_abs([probed.told(pair[0]) - probed.packed[pair[side]] for pair in told]) for side in (0, 1))
        bound = max(FOLLOWS * far, NOISE * noise)
        found = f"{name}: the sampler is {near:.1e} nats from the learner on its own image, and {far:.1e} on the other"
        yield ProbeRow.at_most(f"sight of the sampler, {name}", near, bound, found, f"in the sampler: {finds}")


def _moved(values: Sequence[FloatArray], pairs: list[tuple[int, int]]) -> list[FloatArray]:
    """The movement of each pair's tokens."""
    return [values[own].astype("float64") - values[crossed] for own, crossed in pairs]
