"""Figures in the plane, and their drawing. Points are complex numbers, the imaginary part up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from mmrl_datasets.layout import png

if TYPE_CHECKING:
    from PIL import ImageFont

NAMES = 0.8
"""Height of names relative to values."""
SMOOTHING = 4
"""Factor by which pictures are drawn larger before they are reduced, so that edges are smooth."""
INK, _FAINT, _FILL = (20, 20, 20), (205, 205, 205), (70, 110, 200)


@dataclass(slots=True)
class Label:
    """Text beside a point; ``towards`` is the direction from the point, 0 on it. ``value`` names a value it gives."""

    at: complex
    text: str
    towards: complex = 0j
    value: str = ""


@dataclass(slots=True)
class Figure:
    """A drawing in any unit: lines through points, faint ones, areas, circles (centre, radius), dots, labels."""

    paths: list[Sequence[complex]] = field(default_factory=list)
    faint: list[Sequence[complex]] = field(default_factory=list)
    areas: list[Sequence[complex]] = field(default_factory=list)
    circles: list[tuple[complex, float]] = field(default_factory=list)
    dots: list[complex] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def polygon(self, **corners: complex) -> None:
        """A closed path whose corners bear their names."""
        points = list(corners.values())
        self.paths.append([*points, points[0]])
        self.name(sum(points) / len(points), **corners)

    def name(self, centre: complex, **points: complex) -> None:
        """Names beside points, on the side that looks away from ``centre``."""
        self.labels += [Label(point, name, point - centre) for name, point in points.items()]

    def side(self, p: complex, q: complex, text: object, apart: complex, value: str = "") -> None:
        """Text beside the middle of a line, not on the side where ``apart`` lies."""
        middle, normal = (p + q) / 2, (q - p) * 1j
        towards = normal if ((apart - middle) * normal.conjugate()).real < 0 else -normal
        self.labels.append(Label(middle, str(text), towards, value))

    def angle(self, corner: complex, p: complex, q: complex, text: object, size: float, value: str = "") -> None:
        """An arc between the directions to p and q, of the radius ``size``, and text behind it."""
        first = (p - corner) / abs(p - corner)
        turn = (q - corner) / abs(q - corner) / first
        self.paths.append([corner + size * first * turn ** (step / 12) for step in range(13)])
        bisector = first * turn**0.5
        self.labels.append(Label(corner + size * bisector, str(text), bisector, value))

    def right_angle(self, corner: complex, p: complex, q: complex, size: float) -> None:
        """The little square of a right angle."""
        u, v = ((point - corner) / abs(point - corner) * size for point in (p, q))
        self.paths.append([corner + u, corner + u + v, corner + v])

    def draw(
        self, width: int, height: int, font_size: int, *, turn: complex = 1, mirror: bool = False, shift: complex = 0
    ) -> bytes:
        """A PNG with the figure as large as fits.

        Args:
            width, height: Size of the picture in pixels.
            font_size: Size of the labels in pixels; they always stand upright.
            turn: A factor of length 1.
            mirror: True to swap left and right before the turn.
            shift: Shift in pixels, after all else.
        """
        from PIL import Image, ImageDraw

        def place(z: complex) -> complex:
            return (-z.conjugate() if mirror else z) * turn

        extent = [place(z) for z in self._points()] + [
            place(centre) + radius * side for centre, radius in self.circles for side in (1, -1, 1j, -1j)
        ]
        left, right = min(z.real for z in extent), max(z.real for z in extent)
        low, high = min(z.imag for z in extent), max(z.imag for z in extent)
        margin = 1.15 * font_size
        scale = min((width - 2 * margin) / max(right - left, 1e-6), (height - 2 * margin) / max(high - low, 1e-6))
        centre = complex(left + right, low + high) / 2

        def pixel(z: complex) -> tuple[float, float]:
            moved = (place(z) - centre) * scale + shift
            return (width / 2 + moved.real) * SMOOTHING, (height / 2 - moved.imag) * SMOOTHING

        canvas = Image.new("RGB", (width * SMOOTHING, height * SMOOTHING), "white")
        pen = ImageDraw.Draw(canvas)
        for area in self.areas:
            pen.polygon([pixel(z) for z in area], fill=_FILL)
        for paths, ink in ((self.faint, _FAINT), (self.paths, INK)):
            for path in paths:
                pen.line([pixel(z) for z in path], fill=ink, width=SMOOTHING + 1, joint="curve")
        for middle, radius in self.circles:
            pen.ellipse(_box(pixel(middle), radius * scale * SMOOTHING), outline=INK, width=SMOOTHING + 1)
        for dot in self.dots:
            pen.ellipse(_box(pixel(dot), 2.2 * SMOOTHING), fill=INK)
        for label in self.labels:
            x, y = pixel(label.at)
            if label.towards:
                away = place(label.towards) / abs(label.towards) * font_size * SMOOTHING
                x, y = x + away.real * (0.55 + 0.2 * len(label.text)), y - away.imag * 0.85
            size = font_size if label.value else round(font_size * NAMES)
            write(pen, (x, y), label.text, size * SMOOTHING)
        return png(canvas.reduce(SMOOTHING))

    def _points(self) -> Iterable[complex]:
        for path in (*self.paths, *self.faint, self.dots):
            yield from path


def write(pen: Any, at: tuple[float, float], text: str, size: int) -> None:
    """Write text around a point, moved so that the picture has all of it."""
    letters = font(size)
    x0, y0, x1, y1 = pen.textbbox(at, text, letters, "mm")
    width, height = pen.im.size
    x = at[0] + max(0, 1 - x0) - max(0, x1 + 1 - width)
    y = at[1] + max(0, 1 - y0) - max(0, y1 + 1 - height)
    pen.text((x, y), text, INK, letters, "mm")


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font: the same on every machine."""
    from PIL import ImageFont

    found = ImageFont.load_default(size)
    assert isinstance(found, ImageFont.FreeTypeFont)
    return found


def _box(centre: tuple[float, float], radius: float) -> tuple[float, float, float, float]:
    x, y = centre
    return x - radius, y - radius, x + radius, y + radius
