"""Reports on the two engines of a rank, for an audit: the images that reach their towers, and the weights they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ImageReport:
    """The images of one prompt, as the vision towers of sampler and learner were given them.

    Attributes:
        prompt_id: The prompt's.
        pixel_gap: Largest difference between the pixels of both; infinite if their numbers differ.
        same_pixels: True if both were given the same values, by their hash.
        grids_differ: Images whose frames, rows or columns of patches differ; 0 where a model has no grids.
        image_tokens: Image tokens in the prompt.
        sampler_features: Rows of features that the sampler's tower made.
        learner_features: Rows of features that the learner's tower made.
    """

    prompt_id: str
    pixel_gap: float
    same_pixels: bool
    grids_differ: int
    image_tokens: int
    sampler_features: int
    learner_features: int


@dataclass(frozen=True, slots=True)
class WeightReport:
    """The learner's weights, looked up in the sampler by the hashes of their rows.

    Attributes:
        total: Weights of the learner, each name counted: a tied head too; an adapter is part of the weight it changes.
        missing: Names of those that the sampler does not hold.
        versions: The number of the newest weights, of learner and sampler.
    """

    total: int
    missing: tuple[str, ...]
    versions: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Inspection:
    """Reports of one rank, or of the worst of several.

    Attributes:
        images: One for each prompt with images.
    """

    images: tuple[ImageReport, ...]
    weights: WeightReport


def worst(ranks: Sequence[Inspection], sights: Sequence[Sequence[ImageReport]] = ()) -> Inspection:
    """One inspection with the worst that any rank has reported.

    Args:
        sights: Reports of the images, if they do not come from the ranks that have compared weights.
    """
    seen = sights or [rank.images for rank in ranks]
    images = tuple(_worst_image(each) for each in zip(*seen, strict=True))
    weights = [rank.weights for rank in ranks]
    missing = dict.fromkeys(name for each in weights for name in each.missing)
    apart = max(weights, key=lambda each: abs(each.versions[0] - each.versions[1]))
    return Inspection(images, replace(apart, missing=tuple(missing)))


def _worst_image(reports: Sequence[ImageReport]) -> ImageReport:
    """The report with the largest gap of pixels, and the worst counts of any."""
    most = max(reports, key=lambda each: each.pixel_gap)
    apart = max(reports, key=lambda each: _features_off(each))
    return replace(
        most,
        same_pixels=all(each.same_pixels for each in reports),
        grids_differ=max(each.grids_differ for each in reports),
        sampler_features=apart.sampler_features,
        learner_features=apart.learner_features,
    )


def _features_off(report: ImageReport) -> int:
    made = report.sampler_features, report.learner_features
    return max(abs(rows - report.image_tokens) for rows in made)
