"""The scale that the numbers of a box are in, and rows that contradict it.

Datasets give boxes in pixels of their files. Qwen2.5-VL answers in pixels of the resized picture, Qwen3-VL and InternVL
from 0 to 1000, others from 0 to 1. Overlaps are the same in every scale, so the reference is converted to the answer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from mmrl.types import ImageRef

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 with x1 <= x2 and y1 <= y2."""


def _read(value: Any) -> Any:
    """A scale as the config writes it; numbers may be quoted."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6:
        return float(value)
    if value in ("file", "resized"):
        return value
    raise ValueError(f"is file, resized, or the number at which boxes end, such as 1000 or 1, and not {value!r:.40}")


Scale = Annotated[Literal["file", "resized"] | float, BeforeValidator(_read)]
"""Pixels of the file, upright; pixels of the resized picture; or the number at the right and lower edge, 1000 or 1."""
COMMON: tuple[Scale, ...] = ("file", "resized", 1000.0, 1.0)
_TOLERATED = 0.01
"""Share of a side by which a box may leave the picture, beside a pixel, as hand-drawn ones do."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class BoxedRow:
    """A row's reference boxes, on a picture.

    Attributes:
        id: The row's.
        answer: The reference answer as the row has it.
    """

    id: str
    answer: Any
    boxes: Sequence[Box]
    image: ImageRef

    @property
    def is_resized(self) -> bool:
        """True if the model sees the picture in another size than its file's."""
        return self.image.file_size not in (None, (self.image.width, self.image.height))

    def shown(self) -> str:
        """The row for a message."""
        size, file = f"{self.image.width}x{self.image.height}", self.image.file_size
        picture = f"{file[0]}x{file[1]} resized to {size}" if file is not None and self.is_resized else size
        return f"{self.id} ({f'{self.answer!r}':.{_SHOWN}} on a picture of {picture})"

    def fits(self, scale: Scale) -> bool:
        """True if the boxes are within the picture, and are no fractions in a scale of pixels or thousandths."""
        if (size := extent(scale, self.image)) is None:
            return True
        pixel = float(isinstance(scale, str))
        slack = [_TOLERATED * side + pixel for side in size]
        is_inside = all(
            -slack[axis] <= box[axis] and box[axis + 2] <= size[axis] + slack[axis]
            for box in self.boxes
            for axis in (0, 1)
        )
        is_fraction = all(0 <= number <= 1 for box in self.boxes for number in box)
        return is_inside and not (is_fraction and min(size) > 2)


def extent(scale: Scale, image: ImageRef) -> tuple[float, float] | None:
    """The coordinates of a picture's right and lower edge; None if its file's size is not known."""
    if scale == "file":
        return image.file_size
    return (image.width, image.height) if scale == "resized" else (float(scale), float(scale))


def factors(
    reference: Scale | None, answer: Scale | None, images: Sequence[ImageRef], place: int
) -> tuple[float, float] | None:
    """The factors that make a reference box's x and y an answer's; None if they depend on an image that is not there.

    Args:
        place: The image's, from 0.

    Raises:
        ValueError: The size of its file is not known.
    """
    if reference is None or answer is None or reference == answer:
        return 1.0, 1.0
    if not isinstance(reference, str) and not isinstance(answer, str):
        return answer / reference, answer / reference
    if place >= len(images):
        return None
    before, after = extent(reference, images[place]), extent(answer, images[place])
    if before is None or after is None:
        raise ValueError(
            "the record has no size of the image's file, as an older run wrote it; score it without reference_scale "
            "and answer_scale, or sample anew"
        )
    return after[0] / before[0], after[1] / before[1]


def warnings_about(rows: Sequence[BoxedRow], scale: Scale | None) -> Iterator[str]:
    """Warnings about reference boxes: no scale is said, and it matters; or they contradict it, or their picture.

    Args:
        scale: That of the references; None if it is not said.
    """
    if scale is None:
        if resized := [row for row in rows if row.is_resized]:
            yield (
                f"{len(resized)} of {len(rows)} rows have boxes on pictures that are resized, such as "
                f"{resized[0].shown()}, and no scale is said: coordinates are compared as they are, so a right answer "
                "in pixels of the resized picture does not match a reference answer in pixels of the file. Set "
                f"reference_scale and answer_scale (file, resized, 1000 or 1); the reference answers fit "
                f"{_fitting(rows)}"
            )
        elif beyond := [row for row in rows if not any(map(row.fits, COMMON))]:
            yield (
                f"{len(beyond)} of {len(rows)} rows have boxes that reach beyond their picture in every usual scale, "
                f"such as {beyond[0].shown()}: mend the rows, or set reference_scale and answer_scale"
            )
    elif strange := [row for row in rows if not row.fits(scale)]:
        yield (
            f"reference_scale is {_named(scale)}, and the boxes of {len(strange)} of {len(rows)} rows contradict it, "
            f"such as {strange[0].shown()}. Set it to the coordinates that they are in (they fit {_fitting(strange)}), "
            "or mend the rows"
        )


def _fitting(rows: Sequence[BoxedRow]) -> str:
    """The common scales that all rows' boxes may be in."""
    found = [_named(scale) for scale in COMMON if all(row.fits(scale) for row in rows)]
    return ", ".join(found) or "none of these"


def _named(scale: Scale) -> str:
    """A scale as the config writes it."""
    return scale if isinstance(scale, str) else f"{scale:g}"
