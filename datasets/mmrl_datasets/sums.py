"""Sums of two small numbers, asked for in words: "What is 17 plus 8?".

    python -m mmrl_datasets.sums OUT

The larger number, of at most two digits, comes first, and the other has one. So no row asks for the sum of another with
its numbers exchanged. Solutions are written as ``17 + 8 = 25``.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np

from mmrl.errors import DataError
from mmrl_datasets.command import run
from mmrl_datasets.layout import Example, write_splits

_SUMS = [(larger, smaller) for larger in range(2, 30) for smaller in range(2, min(larger, 9) + 1)]


def write_sums(folder: Path, *, train: int = 132, test: int = 64, seed: int = 0) -> None:
    """Write ``train.parquet`` and ``test.parquet``, which share no sum.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows.
        test: Held-out rows.
        seed: Decides which sums are held out, and the order.

    Raises:
        DataError: An option is out of range, or ``folder`` holds other rows.
    """
    if min(train, test) < 0 or train + test > len(_SUMS):
        possible = f"train and test of 0 or more, together at most {len(_SUMS)}"
        raise DataError("The sums cannot be drawn with these options", possible=possible)
    rows = [_example(*_SUMS[index]) for index in np.random.default_rng(seed).permutation(len(_SUMS))]
    write_splits(folder, {"train": rows[test:][:train], "test": rows[:test]})


def _example(larger: int, smaller: int) -> Example:
    answer = str(larger + smaller)
    return Example(f"What is {larger} plus {smaller}?", (), answer, f"{larger} + {smaller} = {answer}")


main = partial(run, write_sums)

if __name__ == "__main__":
    sys.exit(main())
