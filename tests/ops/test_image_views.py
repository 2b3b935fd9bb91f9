"""The changes of images that views are made of."""

from __future__ import annotations

import numpy as np
import pytest

from mmrl.ops.image_views import blank, diffused, masked_patches, occluded

GREY = np.full((84, 140, 3), 128, np.uint8)


def test_masked_patches_are_whole_squares_of_the_asked_share():
    image = np.random.default_rng(0).integers(1, 256, (14 * 40 + 5, 14 * 50, 3), np.uint8)
    found = masked_patches(image, np.random.default_rng(1), ratio=0.6, patch=14)
    is_black = (found == 0).all(2)
    assert np.array_equal(found[~is_black], image[~is_black])
    squares = [is_black[y : y + 14, x : x + 14] for y in range(0, image.shape[0], 14) for x in range(0, 700, 14)]
    assert {bool(square.all()) for square in squares} == {True, False}
    assert all(square.all() or not square.any() for square in squares)
    assert np.mean([square.all() for square in squares]) == pytest.approx(0.6, abs=0.03)
    whole = masked_patches(image, np.random.default_rng(1), ratio=1.0, patch=14)
    assert not whole.any()


def test_noise_is_that_of_the_forward_process():
    """Against the product of 1 - b, taken step by step."""
    betas = 1 / (1 + np.exp(-np.linspace(-6, 6, 1000))) * (0.5e-2 - 1e-5) + 1e-5
    kept = 1.0
    expected = {}
    for step, beta in enumerate(betas):
        kept *= 1 - beta
        expected[step] = kept
    for step in (0, 200, 400):
        found = diffused(GREY, np.random.default_rng(0), step) / 255
        inner = (found > 0) & (found < 1)
        assert inner.mean() > 0.6
        if step < 300:  # nothing is clipped that matters
            assert found.mean() == pytest.approx(np.sqrt(expected[step]) * 128 / 255, abs=0.01)
            assert found.std() == pytest.approx(np.sqrt(1 - expected[step]), rel=0.05, abs=0.002)
    strengths = [np.abs(diffused(GREY, np.random.default_rng(0), step) - 128.0).mean() for step in (0, 100, 300, 500)]
    assert strengths == sorted(strengths) and strengths[0] < 2 < 30 < strengths[-1]


def test_an_occluded_part_is_of_the_asked_share_and_within():
    places = set()
    for seed in range(8):
        is_black = (occluded(GREY, np.random.default_rng(seed), share=0.5) == 0).all(2)
        rows, columns = np.flatnonzero(is_black.any(1)), np.flatnonzero(is_black.any(0))
        assert len(rows) == 42 and len(columns) == 70 and is_black.sum() == 42 * 70
        places.add((rows[0], columns[0]))
    assert len(places) > 4


def test_changes_are_the_same_for_a_seed_and_leave_the_image_as_it_is():
    image = np.random.default_rng(3).integers(0, 256, (30, 50, 3), np.uint8)
    before = image.copy()
    for change in (
        lambda rng: masked_patches(image, rng, ratio=0.5, patch=8),
        lambda rng: diffused(image, rng, 500),
        lambda rng: occluded(image, rng, share=0.3),
        lambda rng: blank(image),
    ):
        one, again = (change(np.random.default_rng(5)) for _ in range(2))
        assert one.dtype == np.uint8 and one.shape == image.shape and np.array_equal(one, again)
        assert np.array_equal(image, before)
    assert {*blank(image).flat} == {128}
