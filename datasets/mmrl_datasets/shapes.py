"""Drawn scenes of coloured circles, squares, triangles and more, with a question that counts some of them.

    python -m mmrl_datasets.shapes OUT [--varied 1] [--single 1]

Scenes have several sizes, shapes never overlap, and about one answer in five is 0. No picture occurs in two splits.
Varied scenes are in the manner of CLEVR: more kinds of things, large and small, and questions that name any of size,
colour and shape. A single thing is drawn twice as large, and the question is what it is. The column ``scene`` (JSON)
lists what is drawn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from math import cos, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmrl.errors import DataError
from mmrl_datasets.command import run
from mmrl_datasets.layout import Belongs, Example, draw_splits, judged, png, write_splits

if TYPE_CHECKING:
    from PIL import ImageDraw as PILImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 150, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 190, 20),
    "purple": (150, 60, 180),
    "grey": (140, 140, 140),
}
SHAPES = ("circle", "square", "triangle", "star", "ring")
RADII = {"small": (5, 7), "large": (10, 13)}
"""Bounds (the upper one exclusive) of the radius in pixels of a thing in a varied scene."""
PLAIN_RADII = (8, 13)
MAX_COUNT = 4
CELL = 28
"""Pixels of the square that holds one shape; scenes are grids of such squares."""
SCENES = ((3, 3), (4, 3), (3, 4), (4, 4), (5, 3))
"""(columns, rows) of the scenes."""
_SMOOTHING = 4


class Thing(NamedTuple):
    """A thing in a scene; its size is empty if scenes do not tell sizes apart."""

    size: str
    colour: str
    shape: str

    def is_a(self, wanted: Thing) -> bool:
        """True if it fits the wanted thing, of which an empty part fits all."""
        return all(part in ("", own) for own, part in zip(self, wanted, strict=True))

    def __str__(self) -> str:
        """``large red circle``, ``blue thing``."""
        return " ".join(word for word in (self.size, self.colour, self.shape or "thing") if word)


PLAIN_KINDS = tuple(Thing("", colour, shape) for colour in list(COLOURS)[:4] for shape in SHAPES[:3])
"""The things in scenes that are not varied."""
VARIED_KINDS = tuple(Thing(size, colour, shape) for size in RADII for colour in COLOURS for shape in SHAPES)
ANSWERS = tuple(tuple(map(str, answers)) for answers in (range(MAX_COUNT + 1), PLAIN_KINDS, VARIED_KINDS))
"""All answers to a question that counts, and to what a thing is, in plain and in varied scenes."""


def write_shapes(
    folder: Path,
    *,
    train: int = 2000,
    test: int = 300,
    warmup: int = 0,
    verdicts: int = 0,
    varied: float = 0.0,
    single: float = 0.0,
    seed: int = 0,
) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if asked for, ``warmup.parquet`` and ``verdicts.parquet``.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows.
        test: Held-out rows.
        warmup: Rows for a supervised warm-up, in neither of the other two.
        verdicts: Rows with each answer that there could be, of which the right one has the score 1, in
            ``verdicts.parquet``; in none of the others.
        varied: Fraction of rows with varied scenes and questions.
        single: Fraction of rows that show one thing and ask what it is.
        seed: Decides every draw; the test rows do not depend on the number of others.

    Raises:
        DataError: A negative count, a fraction beyond 0 to 1, or ``folder`` holds other rows.
    """
    if not (0 <= varied <= 1 and 0 <= single <= 1):
        raise DataError("The shapes cannot be drawn with these options", possible="varied and single between 0 and 1")
    draw = partial(_example, varied, single)
    rows = draw_splits(train=train, test=test, warmup=warmup, seed=seed, draw=draw, verdicts=verdicts)
    rng = np.random.default_rng([seed, len(rows)])
    rows["verdicts"] = [judged(row, _answers(row.answer), rng) for row in rows["verdicts"]]
    write_splits(folder, rows)


def _answers(answer: str) -> tuple[str, ...]:
    """All answers to the question that has this one."""
    return next(answers for answers in ANSWERS if answer in answers)


def _example(varied: float, single: float, rng: np.random.Generator, belongs: Belongs) -> Example:
    kinds, asked = (VARIED_KINDS, _some_of) if rng.random() < varied else (PLAIN_KINDS, _all_of)
    if single and rng.random() < single:
        kind = kinds[rng.integers(len(kinds))]
        picture = draw_scene([kind._replace(size=kind.size or "large")], rng, ((1, 1),), 2 * CELL * _SMOOTHING, unit=1)
        return Example("<image>What is this?", (picture,), str(kind), columns={"scene": json.dumps([kind])})
    wanted = asked(kinds[rng.integers(len(kinds))], rng)
    count, num_others = int(rng.integers(MAX_COUNT + 1)), int(rng.integers(1, MAX_COUNT + 1))
    scene = scatter(wanted, count, num_others, kinds, rng)
    question = f"<image>How many {wanted}s are there?"
    return Example(question, (draw_scene(scene, rng),), str(count), columns={"scene": json.dumps(scene)})


def _all_of(kind: Thing, rng: np.random.Generator) -> Thing:
    return kind


def _some_of(kind: Thing, rng: np.random.Generator) -> Thing:
    """Any of size, colour and shape, at least one."""
    kept = rng.permutation(3)[: rng.integers(1, 4)]
    return Thing(*(value if place in kept else "" for place, value in enumerate(kind)))


def scatter(
    wanted: Thing, count: int, num_others: int, kinds: Sequence[Thing], rng: np.random.Generator
) -> list[Thing]:
    """As many things that are ``wanted``, and as many that are not."""
    scene = []
    for number, fits in ((count, True), (num_others, False)):
        pool = [kind for kind in kinds if kind.is_a(wanted) == fits]
        scene += [pool[rng.integers(len(pool))] for _ in range(number)]
    return scene


def draw_scene(
    things: Sequence[Thing],
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, int]] = SCENES,
    cell_size: int = CELL,
    unit: int = _SMOOTHING,
) -> bytes:
    """A PNG of one of these sizes with each thing in a cell of its own, drawn large and reduced.

    Cells have ``cell_size`` units, and a unit is so many pixels of the large drawing.
    """
    from PIL import Image, ImageDraw

    columns, rows = sizes[int(rng.integers(len(sizes)))]
    canvas = Image.new("RGB", (columns * cell_size * unit, rows * cell_size * unit), "white")
    pen = ImageDraw.Draw(canvas)
    for thing, cell in zip(things, rng.permutation(columns * rows), strict=False):
        low, high = RADII.get(thing.size, PLAIN_RADII)
        radius = int(rng.integers(low * cell_size // CELL, high * cell_size // CELL))
        row, column = divmod(int(cell), columns)
        x, y = (cell_size * place + int(rng.integers(radius + 1, cell_size - radius)) for place in (column, row))
        _draw_thing(pen, thing, x * unit, y * unit, radius * unit)
    return png(canvas.reduce(_SMOOTHING))


def _draw_thing(pen: PILImageDraw.ImageDraw, thing: Thing, x: int, y: int, radius: int) -> None:
    colour = COLOURS[thing.colour]
    box = (x - radius, y - radius, x + radius, y + radius)
    if thing.shape == "circle":
        pen.ellipse(box, fill=colour)
    elif thing.shape == "ring":
        pen.ellipse(box, outline=colour, width=radius // 3)
    elif thing.shape == "square":
        pen.rectangle(box, fill=colour)
    elif thing.shape == "triangle":
        pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=colour)
    else:
        reaches = [radius if point % 2 == 0 else 0.42 * radius for point in range(10)]
        pen.polygon([(x + r * sin(pi * k / 5), y - r * cos(pi * k / 5)) for k, r in enumerate(reaches)], fill=colour)


main = partial(run, write_shapes)

if __name__ == "__main__":
    sys.exit(main())
