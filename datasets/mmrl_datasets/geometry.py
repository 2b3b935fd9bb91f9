"""Drawn geometry problems with labelled figures and worked solutions, in the layout of Geometry3K.

    python -m mmrl_datasets.geometry OUT --kinds hypotenuse,leg --level 1

The values are in the figure and nowhere else (``right_corner`` tells the lengths, and its figure shows the right
angle); a text row gives them in words. No test row has the values of a training row. Columns ``kind``, ``level`` and
``values`` (JSON) describe the drawing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mmrl.errors import DataError
from mmrl_datasets.command import run
from mmrl_datasets.layout import Belongs, Example, draw_splits, first, write_splits
from mmrl_datasets.problems import EASY, HARD, KINDS, Problem, Values

RATIOS = ((1, 1), (4, 3), (3, 4), (5, 4), (3, 2))
"""Width to height of the pictures; at level 1 only the first, unless there are several in a row."""
LABELS = {EASY: 5.5, HARD: 9}
"""Longer side of a picture in heights of a label, by level."""
_ORDINALS = ("first", "second", "third")


def write_geometry(
    folder: Path,
    *,
    train: int = 2000,
    test: int = 300,
    warmup: int = 0,
    fresh: int = 0,
    kinds: tuple[str, ...] = tuple(KINDS),
    level: int = HARD,
    told: int = 0,
    text_only: float = 0.0,
    multi: float = 0.0,
    image_size: int = 168,
    seed: int = 0,
) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if asked for, ``warmup.parquet``.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows.
        test: Held-out rows, with values that the other splits do not have.
        warmup: Rows for a supervised warm-up, with the values of ``train`` in other pictures.
        fresh: Rows for an easier evaluation, of the same kind: new pictures of known values.
        kinds: Kinds of problems, of ``problems.KINDS``, equally often.
        level: 1 for small values and figures alike, 2 for larger values and figures turned; see ``problems``.
        told: Number of values that the question tells instead of the figure, if a figure has more than one length or
            angle; one is always drawn.
        text_only: Fraction of rows without a picture.
        multi: Fraction of rows with three pictures of different sizes, one of which the question is about.
        image_size: Longer side of the pictures in pixels; the further ones of a row are smaller and larger.
        seed: Decides which values are held out, and every draw.

    Raises:
        DataError: An option is out of range, there are not enough different problems, or ``folder`` holds other rows.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise DataError(f"There are no problems of kind {', '.join(unknown) or '(none)'}", possible=", ".join(KINDS))
    if (
        level not in (EASY, HARD)
        or min(told, text_only, multi) < 0
        or text_only + multi > 1
        or not 56 <= image_size <= 2048
    ):
        raise DataError(
            "The problems cannot be drawn with these options",
            possible="level 1 or 2, told of 0 or more, text_only and multi of 0 or more and of 1 or less together,"
            " image_size 56 to 2048",
        )
    draw = partial(_draw, kinds, level, told, (text_only, multi), image_size)
    write_splits(
        folder,
        draw_splits(train=train, test=test, warmup=warmup, fresh=fresh, seed=seed, draw=draw, pictures_repeat=told > 0),
    )


def _draw(
    kinds: Sequence[str],
    level: int,
    told: int,
    shares: tuple[float, float],
    image_size: int,
    rng: np.random.Generator,
    belongs: Belongs,
) -> Example:
    name = kinds[int(rng.integers(len(kinds)))]
    lot = rng.random()
    num_images = 0 if lot < shares[0] else 3 if lot < sum(shares) else 1
    drawn = [_values(name, level, rng, belongs) for _ in range(max(num_images, 1))]
    problems = [KINDS[name].pose(values, level) for values in drawn]
    if num_images:
        problems = [problem.told(told) for problem in problems]
    asked = int(rng.integers(len(problems)))
    images = tuple(
        _render(problem, level, size, rng)
        for problem, size in zip(problems, _sizes(num_images, level, image_size, rng), strict=False)
    )
    problem = problems[asked]
    return Example(
        _text(problem, num_images, asked),
        images,
        problem.answer,
        problem.solution,
        {"kind": name, "level": level, "values": json.dumps(drawn[asked])},
    )


def _values(name: str, level: int, rng: np.random.Generator, belongs: Belongs) -> Values:
    def fits(values: Values) -> bool:
        # Not the corner: if one were held out, the lengths alone would tell the other.
        return belongs(f"{name} {json.dumps({key: value for key, value in values.items() if key != 'corner'})}")

    return first(lambda: KINDS[name].sample(rng, level), fits)


def _text(problem: Problem, num_images: int, asked: int) -> str:
    if num_images == 0:
        return f"{problem.givens} {problem.question}"
    where = f"This is about the {_ORDINALS[asked]} picture. " if num_images > 1 else ""
    return "<image>" * num_images + where + problem.question


def _sizes(num_images: int, level: int, longer: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(width, height) in pixels of each picture of a row."""
    if num_images == 1 and level == EASY:
        ratios, factors = [RATIOS[0]], [1.0]
    else:
        ratios = [RATIOS[index] for index in rng.permutation(len(RATIOS))[:num_images]]
        factors = [1.0, 0.8, 1.25][:num_images]
    return [
        (round(longer * factor * width / max(width, height)), round(longer * factor * height / max(width, height)))
        for (width, height), factor in zip(ratios, factors, strict=True)
    ]


def _render(problem: Problem, level: int, size: tuple[int, int], rng: np.random.Generator) -> bytes:
    width, height = size
    font_size = max(11, round(max(size) / LABELS[level]))
    reach = max(size) / (100 if level == EASY else 40)
    shift = complex(*rng.uniform(-reach, reach, 2))
    turn, mirror = 1 + 0j, False
    if level == HARD and problem.turns:
        turn, mirror = np.exp(1j * rng.uniform(0, 2 * np.pi)).item(), bool(rng.integers(2))
    return problem.figure.draw(width, height, font_size, turn=turn, mirror=mirror, shift=shift)


main = partial(run, write_geometry)

if __name__ == "__main__":
    sys.exit(main())
