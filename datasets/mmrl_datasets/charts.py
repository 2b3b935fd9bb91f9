"""Drawn bar, line and pie charts with a question about them.

    python -m mmrl_datasets.charts OUT

Bars and points bear no numbers: they are read off an axis with a grid at every value. A pie shows the share of each
part. Questions ask for a value, a difference, a total, or the name of the largest or smallest value. No test chart has
the values of a training chart. Columns ``kind``, ``asked`` and ``values`` (JSON) describe the drawing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from math import cos, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl_datasets.command import run
from mmrl_datasets.figure import INK, SMOOTHING, write
from mmrl_datasets.layout import Belongs, Example, boxed, draw_splits, first, png, write_splits

if TYPE_CHECKING:
    from PIL import Image as PILImage

SIZES = ((196, 140), (224, 168), (168, 168), (252, 168))
"""(width, height) of the pictures in pixels."""
NAMES = ("apples", "pears", "plums", "figs", "kiwis", "limes", "dates")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul")
COLOURS = ((66, 110, 180), (220, 130, 50), (90, 160, 90), (190, 80, 80), (140, 110, 180), (120, 120, 120))
MAX_VALUE = 10
_FONT, _MARGIN = 10, 20
_GRID = (215, 215, 215)


def write_charts(folder: Path, *, train: int = 2000, test: int = 300, warmup: int = 0, seed: int = 0) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if asked for, ``warmup.parquet``.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows.
        test: Held-out rows, with values that the other splits do not have.
        warmup: Rows for a supervised warm-up, of other pictures than ``train``.
        seed: Decides which values are held out, and every draw.

    Raises:
        DataError: A negative count, or ``folder`` holds other rows.
    """
    write_splits(folder, draw_splits(train=train, test=test, warmup=warmup, seed=seed, draw=_draw))


def _draw(rng: np.random.Generator, belongs: Belongs) -> Example:
    kind = ("bar", "line", "pie")[rng.integers(3)]
    values = first(lambda: _values(kind, rng), lambda values: belongs(f"{kind} {json.dumps(values)}"))
    asked = list(_QUESTIONS)[rng.integers(len(_QUESTIONS))]
    size = SIZES[rng.integers(len(SIZES))]
    question, steps, answer = _QUESTIONS[asked](values, rng)
    return Example(
        f"<image>{question}",
        (_render(kind, values, size),),
        answer,
        f"{steps} {boxed(answer)}",
        {"kind": kind, "asked": asked, "values": json.dumps(values)},
    )


def _values(kind: str, rng: np.random.Generator) -> dict[str, int]:
    """A different value for each name; those of a pie add up to 100."""
    count = int(rng.integers(3, 6))
    if kind == "pie":
        cuts = first(lambda: np.sort(rng.choice(np.arange(1, 20), count - 1, replace=False)) * 5, _parts_differ)
        amounts = _parts(cuts)
    else:
        amounts = rng.choice(np.arange(1, MAX_VALUE + 1), count, replace=False)
    names = MONTHS[:count] if kind == "line" else [NAMES[index] for index in rng.permutation(len(NAMES))[:count]]
    return dict(zip(names, amounts.tolist(), strict=True))


def _parts(cuts: Any) -> Any:
    return np.diff(np.concatenate([[0], cuts, [100]]))


def _parts_differ(cuts: Any) -> bool:
    return len(set(_parts(cuts).tolist())) == len(cuts) + 1 and bool(min(_parts(cuts)) >= 10)


_Answered = tuple[str, str, str]
"""Question, worked solution without its box, answer."""


def _pair(values: Mapping[str, int], rng: np.random.Generator) -> tuple[str, str]:
    """Two names, the larger value first."""
    names = list(values)
    x, y = (names[index] for index in rng.permutation(len(names))[:2])
    return (x, y) if values[x] > values[y] else (y, x)


def _ask_value(values: Mapping[str, int], rng: np.random.Generator) -> _Answered:
    name = list(values)[rng.integers(len(values))]
    return f"What is the value of {name}?", f"The chart shows {values[name]} for {name}.", str(values[name])


def _ask_difference(values: Mapping[str, int], rng: np.random.Generator) -> _Answered:
    x, y = _pair(values, rng)
    return f"By how much is {x} larger than {y}?", *_worked(values, x, "-", y, values[x] - values[y])


def _ask_sum(values: Mapping[str, int], rng: np.random.Generator) -> _Answered:
    x, y = _pair(values, rng)
    return f"How much are {x} and {y} together?", *_worked(values, x, "+", y, values[x] + values[y])


def _worked(values: Mapping[str, int], x: str, operation: str, y: str, result: int) -> tuple[str, str]:
    return f"{x}: {values[x]}, {y}: {values[y]}. {values[x]} {operation} {values[y]} = {result}.", str(result)


def _ask_extreme(word: str, choose: Callable[..., str]) -> Callable[..., _Answered]:
    def ask(values: Mapping[str, int], rng: np.random.Generator) -> _Answered:
        name = choose(values, key=lambda each: values[each])
        read = ", ".join(f"{each}: {value}" for each, value in values.items())
        return f"Which has the {word} value?", f"{read}. The {word} is {values[name]}.", name

    return ask


_QUESTIONS: dict[str, Callable[[Mapping[str, int], np.random.Generator], _Answered]] = {
    "value": _ask_value,
    "difference": _ask_difference,
    "sum": _ask_sum,
    "largest": _ask_extreme("largest", max),
    "smallest": _ask_extreme("smallest", min),
}


def _render(kind: str, values: Mapping[str, int], size: tuple[int, int]) -> bytes:
    from PIL import Image

    canvas = Image.new("RGB", (size[0] * SMOOTHING, size[1] * SMOOTHING), "white")
    if kind == "pie":
        _draw_pie(canvas, values)
    else:
        _draw_axes(canvas, values, as_bars=kind == "bar")
    return png(canvas.reduce(SMOOTHING))


def _draw_axes(canvas: PILImage.Image, values: Mapping[str, int], *, as_bars: bool) -> None:
    from PIL import ImageDraw

    pen, (width, height), margin = ImageDraw.Draw(canvas), canvas.size, _MARGIN * SMOOTHING
    step = (height - 2 * margin) / MAX_VALUE
    for value in range(MAX_VALUE + 1):
        y = height - margin - value * step
        pen.line([(margin, y), (width - margin / 2, y)], fill=_GRID if value else INK, width=SMOOTHING)
        if value % 2 == 0:
            write(pen, (margin / 2, y), str(value), _FONT * SMOOTHING)
    room = (width - 1.5 * margin) / len(values)
    tops = [
        (margin + (place + 0.5) * room, height - margin - value * step) for place, value in enumerate(values.values())
    ]
    for (x, y), name, colour in zip(tops, values, COLOURS, strict=False):
        if as_bars:
            pen.rectangle((x - room * 0.3, y, x + room * 0.3, height - margin), fill=colour)
        else:
            radius = 2.5 * SMOOTHING
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[0])
        write(pen, (x, height - margin / 2), name, _FONT * SMOOTHING)
    if not as_bars:
        pen.line(tops, fill=COLOURS[0], width=SMOOTHING * 3 // 2)


def _draw_pie(canvas: PILImage.Image, values: Mapping[str, int]) -> None:
    from PIL import ImageDraw

    pen, (width, height) = ImageDraw.Draw(canvas), canvas.size
    radius = 0.3 * min(width, height)
    box = (width / 2 - radius, height / 2 - radius, width / 2 + radius, height / 2 + radius)
    start = 0.0
    for (name, value), colour in zip(values.items(), COLOURS, strict=False):
        end = start + 3.6 * value
        pen.pieslice(box, start, end, fill=colour, outline="white", width=SMOOTHING)
        middle = (start + end) * pi / 360
        across, down = (1.35 * radius + 10 * SMOOTHING) * cos(middle), (1.3 * radius) * sin(middle)
        write(pen, (width / 2 + across, height / 2 + down), f"{name} {value}", _FONT * SMOOTHING)
        start = end


main = partial(run, write_charts)

if __name__ == "__main__":
    sys.exit(main())
