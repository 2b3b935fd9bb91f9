"""Lengths of prompts, for people."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmrl.errors import plural


def histogram(lengths: Sequence[int], num_bins: int) -> list[tuple[int, int, int]]:
    """(lowest, highest, count) of bins of equal width that cover one or more lengths."""
    low, high = min(lengths), max(lengths)
    width = (high - low) // num_bins + 1
    counts = np.bincount((np.asarray(lengths) - low) // width)
    return [(low + i * width, low + (i + 1) * width - 1, int(count)) for i, count in enumerate(counts)]


def distribution(lengths: Sequence[int]) -> str:
    """A sentence such as ``40 rows of 100 to 600 tokens (100-199: 25, 200-299: 3, ...)``."""
    if not lengths:
        return "the dataset has no rows"
    bins = ", ".join(f"{low}-{high}: {count}" for low, high, count in histogram(lengths, 5))
    return f"{plural(len(lengths), 'row')} of {min(lengths)} to {max(lengths)} tokens ({bins})"
