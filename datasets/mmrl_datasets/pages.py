"""Pages of handwritten digits, and questions about one of their cells, for policies that can look closer.

    python -m mmrl_datasets.pages OUT

A page has 10 x 10 of the digits of scikit-learn, numbered from 1, row by row. A model that reads a page in 56 x 56
pixels sees each digit five pixels wide; the environment ``zoom`` shows a cell as large as the whole page. A fifth of
the digits is held out: a page of ``test`` has none that a page of another split has.

The splits ``warmup`` and ``direct`` have the same pages and questions. In ``direct`` each is answered at once, in
``warmup`` a share of them after a look at the cell: a conversation whose second image is that cell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmrl.errors import DataError
from mmrl_datasets.command import run
from mmrl_datasets.digits import held_out_digits, read_digits
from mmrl_datasets.layout import Example, png, write_splits

CELLS = 10
"""Cells in a row, and rows."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of digits with the cell that is asked for.

    Attributes:
        grey: (side, side) grey levels, dark on white.
        values: (CELLS, CELLS) digits.
        number: The cell, from 1, row by row.
    """

    grey: npt.NDArray[np.uint8]
    values: npt.NDArray[np.int64]
    number: int

    @property
    def answer(self) -> str:
        return str(self.values.flat[self.number - 1])

    def picture(self) -> bytes:
        """The page as a PNG file."""
        from PIL import Image

        return png(Image.fromarray(self.grey))

    def cell(self, side: int) -> bytes:
        """The cell that is asked for as a PNG file, as ``zoom`` with ``min_side: side`` shows it."""
        from PIL import Image

        size = len(self.grey) // CELLS
        row, column = divmod(self.number - 1, CELLS)
        part = Image.fromarray(self.grey).convert("RGB")
        part = part.crop((column * size, row * size, (column + 1) * size, (row + 1) * size))
        return png(part.resize((side, side), Image.Resampling.BICUBIC))


def write_pages(
    folder: Path,
    *,
    train: int = 600,
    test: int = 200,
    warmup: int = 800,
    looks: float = 0.5,
    cell_size: int = 28,
    seen_size: int = 56,
    seed: int = 0,
) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if asked for, ``warmup.parquet`` and ``direct.parquet``.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows.
        test: Held-out rows.
        warmup: Rows for a supervised warm-up, and as many without the tool in ``direct``.
        looks: Fraction of the warm-up's rows that look at the cell before they answer.
        cell_size: Side of a cell in pixels.
        seen_size: Side in pixels of a cell that is looked at, the environment's ``min_side``.
        seed: Decides which digits are held out, and every draw.

    Raises:
        DataError: An option is out of range, or ``folder`` holds other rows.
    """
    if min(train, test, warmup) < 0 or not 0 <= looks <= 1 or cell_size < 8 or seen_size < cell_size:
        raise DataError(
            "The pages cannot be drawn with these options",
            possible="train, test and warmup of 0 or more, looks between 0 and 1, cell_size of 8 or more,"
            " seen_size of cell_size or more",
        )
    held_out, others = held_out_digits(seed)
    pools = {"train": (train, others), "test": (test, held_out), "warmup": (warmup, others)}
    splits = {
        split: _draw(count, pool, np.random.default_rng([seed, index]), cell_size)
        for index, (split, (count, pool)) in enumerate(pools.items())
    }
    rows = {split: [_asked(page) for page in pages] for split, pages in splits.items()}
    shows = np.random.default_rng([seed, len(pools)]).random(warmup) < looks
    rows["direct"] = rows.pop("warmup")
    rows["warmup"] = [
        _with_look(row, page, seen_size) if show else row
        for row, page, show in zip(rows["direct"], splits["warmup"], shows, strict=True)
    ]
    write_splits(folder, rows)


def _draw(count: int, pool: npt.NDArray[np.int64], rng: np.random.Generator, size: int) -> list[Page]:
    grey, values = read_digits(size)
    pages = []
    for _ in range(count):
        chosen = rng.choice(pool, CELLS**2, replace=False)
        rows = grey[chosen].reshape(CELLS, CELLS, size, size)
        page = rows.swapaxes(1, 2).reshape(CELLS * size, CELLS * size)
        pages.append(Page(page, values[chosen].reshape(CELLS, CELLS), int(rng.integers(1, CELLS**2 + 1))))
    return pages


def _asked(page: Page) -> Example:
    question = f"<image>What digit is in cell {page.number}?"
    return Example(question, (page.picture(),), page.answer, page.answer, {"cell": page.number})


def _with_look(row: Example, page: Page, size: int) -> Example:
    turns = ("user", row.problem), ("assistant", f"zoom {page.number}"), ("user", "<image>"), ("assistant", row.answer)
    return replace(row, problem=conversation(turns), images=(*row.images, page.cell(size)))


def conversation(turns: Sequence[tuple[str, str]]) -> str:
    """Messages as a cell of a table, from roles and texts."""
    return json.dumps([{"role": role, "content": text} for role, text in turns])


main = partial(run, write_pages)

if __name__ == "__main__":
    sys.exit(main())
