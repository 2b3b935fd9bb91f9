"""Drawn windows with buttons, fields, check boxes and lists, and what clicks, typed texts and scrolling do to them.

A window is described by JSON, in pixels from its upper left corner:

    {"size": [84, 84], "elements": [
        {"kind": "list", "name": "City", "box": [4, 4, 60, 20], "options": ["Bonn", "Kiel", "Ulm"]},
        {"kind": "button", "name": "OK", "box": [4, 60, 36, 78]}]}

An element's box has its left and upper edge, and its right and lower edge, which are the last pixels that belong to it.
Boxes do not overlap. Rows of an open list may lie over other elements, and take their clicks. ``colours`` paints
elements and options by their names, ``{"OK": "#3cb44b"}``, and ``backdrop: gradient`` the space between them: red grows
to the right and green downwards, so that a model without a sense of places sees where it looks.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from PIL import Image as PILImage
    from PIL import ImageFont

Box = tuple[int, int, int, int]
"""x0, y0, x1, y1, the last two included."""
Kind = Literal["button", "field", "check_box", "list"]
Text = Annotated[str, Field(min_length=1, max_length=60)]
Side = Annotated[int, Field(ge=8, le=4096)]
ON = "on"
"""Value of a check box that is ticked; else it is empty."""
LONGEST = 200
"""Characters that a field takes."""
_SHEET, _PAPER, _FACE, _INK, _EDGE, _BLUE = "#ececec", "#ffffff", "#cecece", "#0a0a0a", "#5a5a5a", "#285adc"
_ROWS = 4
"""Rows of an open list that are shown at once, at most; scrolling shows others."""


class Element(BaseModel):
    """An element of a window; ``value`` is what a field, a list or a check box has at the start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    name: Text
    box: Box
    options: Annotated[tuple[Text, ...], Field(max_length=100)] = ()
    value: Annotated[str, Field(max_length=LONGEST)] = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Element:
        x0, y0, x1, y1 = self.box
        if not (x0 + 4 <= x1 and y0 + 4 <= y1):
            raise ValueError(
                f"the box of {self.name!r} is {[*self.box]}: x0 < x1 and y0 < y1, 5 pixels a side at least"
            )
        if (self.kind == "list") != bool(self.options):
            raise ValueError(f"{self.name!r} is a {self.kind} with {len(self.options)} options; lists alone have some")
        allowed = {"button": ("",), "check_box": ("", ON), "list": ("", *self.options)}
        if self.value not in allowed.get(self.kind, (self.value,)):
            raise ValueError(f"{self.name!r} cannot have the value {self.value!r}: possible is {allowed[self.kind]}")
        return self

    @property
    def centre(self) -> tuple[int, int]:
        return centre_of(self.box)


class Layout(BaseModel):
    """A window as it is at the start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: tuple[Side, Side]
    elements: Annotated[tuple[Element, ...], Field(min_length=1, max_length=200)]
    colours: dict[Text, Annotated[str, Field(pattern=r"^#[0-9a-fA-F]{6}$")]] = Field(default_factory=dict)
    backdrop: Literal["plain", "gradient"] = "plain"

    @model_validator(mode="after")
    def _has_room(self) -> Layout:
        names = [each.name for each in self.elements]
        if len(set(names)) < len(names):
            raise ValueError(f"elements have different names, not {names}")
        for place, each in enumerate(self.elements):
            x0, y0, x1, y1 = each.box
            if not (x0 >= 0 and y0 >= 0 and x1 < self.size[0] and y1 < self.size[1]):
                raise ValueError(f"{each.name!r} at {[*each.box]} is not within the window of {self.size}")
            if each.kind == "list" and max(self.size[1] - 1 - y1, y0) < y1 - y0 + 1:
                raise ValueError(f"{each.name!r} at {[*each.box]} has no room for a row, neither below nor above it")
            for other in self.elements[:place]:
                if overlap(each.box, other.box):
                    raise ValueError(f"{each.name!r} and {other.name!r} overlap")
        return self


class Window:
    """A window with its state.

    Attributes:
        values: Texts by name: what each field, check box and list has.
        pressed: The button that was clicked last; empty before the first one.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.values = {each.name: each.value for each in layout.elements if each.kind != "button"}
        self.pressed = ""
        self._elements = {each.name: each for each in layout.elements}
        self._focused, self._selected = "", False
        self._opened, self._first = "", 0

    def click(self, x: float, y: float) -> None:
        """Click at a point in pixels: press, tick, focus, open, choose; beside everything, close and lose the focus."""
        for option, box in self.rows():
            if within(box, x, y):
                self.values[self._opened], self._opened = option, ""
                return
        was_open, self._opened, self._focused = self._opened, "", ""
        element = next((each for each in self.layout.elements if within(each.box, x, y)), None)
        if element is None:
            return
        if element.kind == "button":
            self.pressed = element.name
        elif element.kind == "check_box":
            self.values[element.name] = "" if self.values[element.name] else ON
        elif element.kind == "field":
            self._focused, self._selected = element.name, True
        elif element.name != was_open:
            self._opened, self._first = element.name, 0

    def type(self, text: str) -> None:
        """Write into the field that has the focus: in place of its text right after the click, else behind it."""
        if self._focused:
            before = "" if self._selected else self.values[self._focused]
            self.values[self._focused], self._selected = (before + text)[:LONGEST], False

    def scroll(self, down: bool) -> None:
        """Show the next rows of the open list, or those before."""
        if self._opened:
            shown, options = len(self.rows()), self._elements[self._opened].options
            self._first = max(0, min(self._first + (shown if down else -shown), len(options) - shown))

    def rows(self) -> list[tuple[str, Box]]:
        """The options of the open list that are shown, each with its box: below it, or above it for lack of room."""
        if not self._opened:
            return []
        element = self._elements[self._opened]
        x0, y0, x1, y1 = element.box
        height = y1 - y0 + 1
        below, above = (self.layout.size[1] - 1 - y1) // height, y0 // height
        count = min(_ROWS, len(element.options), max(below, above))
        top = y1 + 1 if below >= count else y0 - count * height
        boxes = ((x0, top + row * height, x1, top + (row + 1) * height - 1) for row in range(count))
        return list(zip(element.options[self._first : self._first + count], boxes, strict=True))

    def draw(self) -> PILImage.Image:
        """The window as a picture of its size."""
        from PIL import ImageDraw

        picture = _backdrop(self.layout.size, self.layout.backdrop).copy()
        pen = ImageDraw.Draw(picture)
        for element in self.layout.elements:
            self._draw(pen, element)
        for option, box in self.rows():
            pen.rectangle(box, self._face(option, _PAPER), _BLUE)
            _write(pen, box, option)
        return picture

    def _face(self, name: str, plain: str | None) -> str | None:
        return self.layout.colours.get(name, plain)

    def _draw(self, pen: Any, element: Element) -> None:
        x0, y0, x1, y1 = box = element.box
        label = x0 + min(y1 - y0, (x1 - x0) // 2)  # where a field's or a check box's second part begins
        value = self.values.get(element.name, "")
        edge, width = (_BLUE, 2) if element.name in (self._focused, self._opened) else (_EDGE, 1)
        if element.kind == "button":
            pen.rounded_rectangle(box, (y1 - y0) // 4, self._face(element.name, _FACE), edge)
            _write(pen, box, element.name, "mm")
        elif element.kind == "check_box":
            pen.rectangle(box, self._face(element.name, None))
            side = (label - x0) * 3 // 4
            top = y0 + (y1 - y0 - side) // 2
            pen.rectangle((x0, top, x0 + side, top + side), _PAPER, edge)
            if value:
                pen.rectangle((x0 + 3, top + 3, x0 + side - 3, top + side - 3), _BLUE)
            _write(pen, (label, y0, x1, y1), element.name)
        elif element.kind == "field":
            pen.rectangle(box, self._face(element.name, None))
            _write(pen, (x0, y0, label, y1), element.name)
            pen.rectangle((label, y0, x1, y1), _PAPER, edge, width)
            _write(pen, (label, y0, x1, y1), value)
        else:
            pen.rectangle(box, self._face(value or element.name, _PAPER), edge, width)
            _write(pen, box, value or element.name)
            side = y1 - y0
            low, high = y0 + side * 2 // 5, y0 + side * 7 // 10
            pen.polygon([(x1 - side * 3 // 4, low), (x1 - side // 4, low), (x1 - side // 2, high)], _INK)


def centre_of(box: Box) -> tuple[int, int]:
    """The pixel in the middle."""
    return (box[0] + box[2]) // 2, (box[1] + box[3]) // 2


def within(box: Box, x: float, y: float) -> bool:
    """True for a point in the box, its pixels at the edges included."""
    return box[0] <= x < box[2] + 1 and box[1] <= y < box[3] + 1


def overlap(one: Box, other: Box) -> bool:
    """True if two boxes have a pixel in common."""
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]


@lru_cache(16)
def _backdrop(size: tuple[int, int], kind: str) -> PILImage.Image:
    """The empty window; a gradient's red is the column, and its green the row."""
    from PIL import Image

    if kind == "plain":
        return Image.new("RGB", size, _SHEET)
    down = Image.linear_gradient("L")
    across = down.transpose(Image.Transpose.TRANSPOSE)
    return Image.merge("RGB", [*(each.resize(size) for each in (across, down)), Image.new("L", size, 128)])


def _write(pen: Any, box: Box, text: str, anchor: str = "lm") -> None:
    """Write a text into a box, at its left edge or in its middle; what is too long ends with the box."""
    x0, y0, x1, y1 = box
    letters = _font(max(6, (y1 - y0) * 3 // 4))
    while len(text) > 1 and letters.getlength(text) > x1 - x0 - 2:
        text = text[:-1]
    at = (x0 + 2, (y0 + y1 + 1) / 2) if anchor == "lm" else ((x0 + x1 + 1) / 2, (y0 + y1 + 1) / 2)
    pen.text(at, text, _INK, letters, anchor)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font: the same on every machine."""
    from PIL import ImageFont

    return ImageFont.load_default(size)
