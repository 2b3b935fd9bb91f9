"""Drawn scenes of coloured circles, squares and triangles, with a question that counts some of them.

    python -m mmrl_datasets.shapes OUT

Scenes have several sizes, shapes never overlap, and about one answer in five is 0. No picture occurs in two splits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import DataError, MMRLError
from mmrl_datasets.layout import Example, png, write_splits

if TYPE_CHECKING:
    from PIL import Image as PILImage
    from PIL import ImageDraw as PILImageDraw

COLOURS = {"red": (220, 40, 40), "green": (30, 150, 60), "blue": (40, 80, 220), "yellow": (240, 190, 20)}
SHAPES = ("circle", "square", "triangle")
MAX_COUNT = 4
CELL = 28
"""Pixels of the square that holds one shape; scenes are grids of such squares."""
SCENES = ((3, 3), (4, 3), (3, 4), (4, 4), (5, 3))
"""(columns, rows) of the scenes."""
_SMOOTHING = 4
_Thing = tuple[str, str]


def write_shapes(folder: Path, *, train: int = 2000, test: int = 300, warmup: int = 0, seed: int = 0) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if asked for, ``warmup.parquet``.

    Args:
        folder: Where to; holds nothing else under these names.
        train: Training rows.
        test: Held-out rows.
        warmup: Rows for a supervised warm-up, in neither of the other two.
        seed: Decides every draw; the test rows do not depend on the number of others.

    Raises:
        DataError: A negative count, or ``folder`` holds other rows.
    """
    counts = {"test": test, "warmup": warmup, "train": train}
    if min(counts.values()) < 0:
        raise DataError("The shapes cannot be drawn with these options", possible="counts of 0 or more")
    seen: set[bytes] = set()
    splits: dict[str, list[Example]] = {split: [] for split in counts}
    for index, (split, count) in enumerate(counts.items()):
        rng = np.random.default_rng([seed, index])
        while len(splits[split]) < count:
            example = _example(rng)
            if example.image not in seen:
                seen.add(example.image)
                splits[split].append(example)
    write_splits(folder, splits)


def _example(rng: np.random.Generator) -> Example:
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    rng.shuffle(kinds)
    (colour, shape), *others = kinds
    count, num_others = int(rng.integers(MAX_COUNT + 1)), int(rng.integers(1, MAX_COUNT + 1))
    things = [(colour, shape)] * count + [others[rng.integers(len(others))] for _ in range(num_others)]
    scene = _draw(things, SCENES[rng.integers(len(SCENES))], rng)
    return Example(f"<image>How many {colour} {shape}s are there?", png(scene), str(count))


def _draw(things: Sequence[_Thing], grid: tuple[int, int], rng: np.random.Generator) -> PILImage.Image:
    """Each thing in a cell of its own, drawn large and reduced so that edges are smooth."""
    from PIL import Image, ImageDraw

    columns, rows = grid
    canvas = Image.new("RGB", (columns * CELL * _SMOOTHING, rows * CELL * _SMOOTHING), "white")
    draw = ImageDraw.Draw(canvas)
    for thing, cell in zip(things, rng.permutation(columns * rows), strict=False):
        radius = int(rng.integers(8, 13))
        row, column = divmod(int(cell), columns)
        x, y = (CELL * place + int(rng.integers(radius + 1, CELL - radius)) for place in (column, row))
        _draw_thing(draw, thing, x * _SMOOTHING, y * _SMOOTHING, radius * _SMOOTHING)
    return canvas.reduce(_SMOOTHING)


def _draw_thing(draw: PILImageDraw.ImageDraw, thing: _Thing, x: int, y: int, radius: int) -> None:
    colour, shape = thing
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        draw.rectangle(box, fill=COLOURS[colour])
    else:
        draw.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=COLOURS[colour])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser("mmrl_datasets.shapes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--train", type=int, default=2000, metavar="N", help="training rows (%(default)s)")
    parser.add_argument("--test", type=int, default=300, metavar="N", help="held-out rows (%(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="rows for a supervised warm-up (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    try:
        write_shapes(**vars(parser.parse_args(arguments)))
    except MMRLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
