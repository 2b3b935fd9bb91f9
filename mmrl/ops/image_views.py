"""Changes of images for views: masked patches, noise, an occluded part, nothing but grey. uint8 (H, W, 3) each."""

from __future__ import annotations

from functools import cache

import numpy as np

from mmrl.types import FloatArray, ImageArray

DIFFUSION_STEPS = 1000
"""Steps of the noise schedule of ``diffused``."""
MID_GREY = 128


def masked_patches(image: ImageArray, rng: np.random.Generator, *, ratio: float, patch: int) -> ImageArray:
    """The image with black squares of ``patch`` pixels, each with probability ``ratio``, on a grid from its corner."""
    height, width = image.shape[:2]
    rows, columns = -(-height // patch), -(-width // patch)
    is_black = rng.random((rows, columns)) < ratio
    is_black = is_black.repeat(patch, 0).repeat(patch, 1)[:height, :width]
    return np.where(is_black[..., None], np.uint8(0), image)


def diffused(image: ImageArray, rng: np.random.Generator, step: int) -> ImageArray:
    """The image after ``step`` steps, from 0, of a diffusion's forward process (arXiv:2006.11239).

    ``sqrt(a) x + sqrt(1 - a) e`` on colours between 0 and 1, clipped, with normal noise ``e`` and ``a`` the product of
    ``1 - b`` over steps 0 to ``step``; ``b`` goes from 2.2e-5 to 5e-3 by a sigmoid from -6 to 6, as in
    arXiv:2504.13055.
    """
    kept = _kept()[min(max(step, 0), DIFFUSION_STEPS - 1)]
    colours = image.astype(np.float32) / np.float32(255)
    noise = rng.standard_normal(image.shape, np.float32)
    mixed = np.float32(np.sqrt(kept)) * colours + np.float32(np.sqrt(1 - kept)) * noise
    found: ImageArray = np.round(mixed.clip(0, 1) * 255).astype(np.uint8)
    return found


@cache
def _kept() -> FloatArray:
    """(1000,) the share ``a`` of the image's variance that each step leaves."""
    betas = 1 / (1 + np.exp(-np.linspace(-6, 6, DIFFUSION_STEPS))) * (0.5e-2 - 1e-5) + 1e-5
    return np.cumprod(1 - betas)


def occluded(image: ImageArray, rng: np.random.Generator, *, share: float) -> ImageArray:
    """The image with a black rectangle of ``share`` of its height and of its width, anywhere within it."""
    height, width = (round(share * size) for size in image.shape[:2])
    top, left = (int(rng.integers(0, size - own + 1)) for size, own in zip(image.shape, (height, width), strict=False))
    found = image.copy()
    found[top : top + height, left : left + width] = 0
    return found


def blank(image: ImageArray) -> ImageArray:
    """A mid-grey image of the same size, as evaluations with blank images show it."""
    return np.full_like(image, MID_GREY)
