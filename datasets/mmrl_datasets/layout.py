"""Writes the Geometry3K layout: ``problem``, ``images`` (list of bytes and path), ``answer``, ``solution``.

A generator may add columns, such as what it has drawn; all of its rows have the same ones.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mmrl.errors import DataError, ResourceError

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL import Image as PILImage


HELD_OUT_FRACTION = 0.2
"""Share of the digits, scenes or problems that are only in ``test``."""
_MAX_TRIES = 2000

T = TypeVar("T")
Belongs = Callable[[str], bool]
"""True if a problem, identified by its kind and values, may be in the split at hand."""


@dataclass(frozen=True, slots=True)
class Example:
    """A question about some images, a short answer, and a completion to imitate: by default the answer in a box."""

    problem: str
    images: tuple[bytes, ...]
    answer: str
    solution: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def draw_splits(
    *,
    train: int,
    test: int,
    warmup: int,
    seed: int,
    draw: Callable[[np.random.Generator, Belongs], Example],
    pictures_repeat: bool = False,
    **further: int,
) -> dict[str, list[Example]]:
    """Rows for each split. No two rows have a picture in common, or the text if they have no picture.

    With ``pictures_repeat``, no two rows have both pictures and text in common.

    The test rows depend only on ``seed`` and their number. ``draw`` must use only problems that belong: then
    no test row shows a problem of another split. ``warmup``, ``train`` and ``further`` splits share theirs, in other
    pictures.

    Raises:
        DataError: A negative number, or more rows than there are different ones.
    """
    counts = {"test": test, "warmup": warmup, "train": train, **further}
    if min(counts.values()) < 0:
        raise DataError("The rows cannot be drawn with these options", possible=f"{', '.join(counts)} of 0 or more")
    shown, seen = (_whole if pictures_repeat else _pictures), set[object]()
    splits: dict[str, list[Example]] = {split: [] for split in counts}
    for index, (split, count) in enumerate(counts.items()):
        drawing = partial(draw, np.random.default_rng([seed, index]), partial(_belongs, seed, split == "test"))
        for _ in range(count):
            example = first(drawing, lambda drawn: seen.isdisjoint(shown(drawn)))
            seen.update(shown(example))
            splits[split].append(example)
    return splits


def first(draw: Callable[[], T], fits: Callable[[T], bool]) -> T:
    """The first draw that fits.

    Raises:
        DataError: No draw has fitted for a long time.
    """
    for _ in range(_MAX_TRIES):
        if fits(drawn := draw()):
            return drawn
    raise DataError(
        "There are fewer different rows than asked for with these options",
        remedy="ask for fewer rows, or for more kinds, levels or sizes",
    )


def _pictures(example: Example) -> set[object]:
    return set(example.images or (example.problem,))


def _whole(example: Example) -> set[object]:
    return {(example.problem, example.images)}


def _belongs(seed: int, held_out: bool, problem: str) -> bool:
    digest = hashlib.sha256(f"{seed}/{problem}".encode()).digest()
    return held_out == (int.from_bytes(digest[:4], "big") < HELD_OUT_FRACTION * 2**32)


def boxed(answer: str) -> str:
    """The answer in a box, as completions give it."""
    return f"\\boxed{{{answer}}}"


def judged(row: Example, answers: Sequence[str], rng: np.random.Generator) -> Example:
    """The row with each of these answers, in any order, and its score: 1 for the right one."""
    shuffled = [answers[place] for place in rng.permutation(len(answers))]
    scores = [float(answer == row.answer) for answer in shuffled]
    return replace(row, columns={**row.columns, "candidates": [*map(boxed, shuffled)], "scores": scores})


def png(image: PILImage.Image) -> bytes:
    """The image as a PNG file; equal images give equal bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_splits(folder: Path, splits: Mapping[str, Sequence[Example]]) -> None:
    """Write ``<split>.parquet`` for each split that has rows. Writing the same rows again changes nothing.

    Raises:
        DataError: The folder holds other rows under these names.
        ResourceError: The folder cannot be written.
    """
    tables = {folder / f"{split}.parquet": _table(split, rows) for split, rows in splits.items() if rows}
    for path, table in tables.items():
        if path.exists() and not _holds(path, table):
            raise DataError(
                "This file holds other rows than those to be written",
                where=str(path),
                remedy="choose another folder or delete the file",
            )
    for path, table in tables.items():
        if not path.exists():
            _write(path, table)


def _table(split: str, rows: Sequence[Example]) -> pa.Table:
    import pyarrow as pa

    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table(
        {
            "problem": pa.array([row.problem for row in rows], pa.string()),
            "images": pa.array([_cells(f"{split}-{index}", row) for index, row in enumerate(rows)], pa.list_(image)),
            "answer": pa.array([row.answer for row in rows], pa.string()),
            "solution": pa.array([row.solution or boxed(row.answer) for row in rows], pa.string()),
        }
    )
    for name in rows[0].columns:
        table = table.append_column(name, pa.array([row.columns[name] for row in rows]))
    return table


def _cells(name: str, row: Example) -> list[dict[str, Any]]:
    names = [name] if len(row.images) == 1 else [f"{name}-{place}" for place in range(len(row.images))]
    return [{"bytes": image, "path": f"{name}.png"} for name, image in zip(names, row.images, strict=True)]


def _holds(path: Path, table: pa.Table) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return bool(pq.read_table(path).equals(table))
    except (pa.ArrowException, OSError):
        return False


def _write(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, temporary)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ResourceError(f"The dataset cannot be written: {error}", where=str(path)) from error
