"""Rows on what the engines hold and read: pixels, features, weights, and what an update moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmrl.ops.parity import LIMITS, Gap
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.tokens import counted
from mmrl.types import ImageReport, WeightReport

PIXELS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference between normalised pixels, by precision. One level of 255 is 1.4e-2; bfloat16 rounds by 8e-3."""
NAMES = 4
"""Names of weights that a row lists."""


def image_rows(images: Sequence[ImageReport], precision: str) -> Iterator[ProbeRow]:
    """Pixels, grids and features of the prompts that were shown to both towers; no rows without images."""
    if not images:
        return
    gap = max(each.pixel_gap for each in images)
    same = "the same bits" if all(each.same_pixels for each in images) else f"at most {gap:.1e} apart"
    yield ProbeRow.at_most(
        "pixels",
        gap,
        PIXELS[precision],
        f"the pixels of both towers are {same} in {len(images)} prompts",
        "an image resized, normalised, reordered or exchanged on one side; one that never reaches the sampler",
    )
    yield counted(
        "grids",
        sum(each.grids_differ for each in images),
        "images whose rows and columns of patches differ between the towers",
        "rows and columns exchanged, grids of another row, a grid that was dropped",
    )
    wrong = sum(
        abs(rows - each.image_tokens) for each in images for rows in (each.sampler_features, each.learner_features)
    )
    tokens = sum(each.image_tokens for each in images)
    yield counted(
        "image tokens",
        wrong,
        f"of {tokens} image tokens without a row of features of their own, or rows without a token",
        "image tokens cut from a prompt or from one of a pair, placeholders expanded twice, features of another image",
    )


def weight_row(report: WeightReport, when: str) -> ProbeRow:
    """The learner's weights in the sampler."""
    names = ", ".join(report.missing[:NAMES]) + (", ..." if len(report.missing) > NAMES else "")
    found = f"of {report.total} weights of the learner that the sampler does not hold" + (f": {names}" if names else "")
    return counted(
        f"weights, {when}",
        len(report.missing),
        found,
        "a weight that no sync sends, a tied head left behind, an adapter that is not merged, a sampler of an old step",
    )


def moved_row(moved: Gap, precision: str, what: str = "log-probs") -> ProbeRow:
    """The move of the log-probs, or of scores, in an update; less would hide a sampler that kept the old weights."""
    bound = LIMITS[precision].mean_stop
    return ProbeRow.more_than(
        "update moved",
        moved.abs_mean,
        bound,
        f"an optimizer step moved {what} by {moved.abs_mean:.2g}{' nats' * (what == 'log-probs')} on average",
        "gradients that are lost or zero, an optimizer without parameters, weights that are frozen",
    )
