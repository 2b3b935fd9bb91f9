"""The prompt's own images to look at again, at full resolution: parts of them, turned, or with a point marked.

    environment: {name: zoom, tools: [crop], coordinates: relative, min_side: 224, max_turns: 4}
    environment: {name: zoom, action: "<zoom>(.*?)</zoom>", grid: 4}

A model reads its prompt's images in few pixels (``data.max_pixels``). What a tool answers is cut from the image as the
dataset has it, enlarged until its shorter side has ``min_side`` pixels, and never larger than ``max_pixels``.

| tool | arguments | answer |
|---|---|---|
| crop | x0, y0, x1, y1 | that part |
| cell | number | a cell of the ``grid``, numbered from 1, row by row; it takes crop's place if ``grid`` is set |
| rotate | degrees | the whole image, turned clockwise |
| mark | x, y | the whole image with a circle around the point |

Each takes the number of the image too, from 1; left out, it is the first. Coordinates begin at the top left. They are
thousandths of the image's width and height (``relative``), or its own pixels (``pixels``), as many as the dataset's
file has; the first observation then tells how many these are.

With ``action`` no tool is called: the policy writes numbers into a text that the pattern finds, separated by spaces or
commas, in the order of the table, for the first of ``tools``; or a tool's name before them. ``<zoom>3</zoom>`` is thus
enough for a cell, and ``<zoom>3 2</zoom>`` is the same of the second image.

Nothing that a policy writes is an error of the environment: it is answered with what is possible. A turn without a call
ends the episode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from mmrl.interfaces import Arguments, Environment, PluginConfig, Tool, ToolError
from mmrl.types import Call, Observation, Prompt, Turn
from mmrl_environments.actions import ActionPattern, last_action, text_of
from mmrl_environments.pictures import MAX_ASPECT_RATIO, fitted, full_size

if TYPE_CHECKING:
    from PIL import Image as PILImage

ToolName = Literal["crop", "cell", "rotate", "mark"]
_PARAMETERS = {
    "crop": ("x0", "y0", "x1", "y1", "image"),
    "cell": ("number", "image"),
    "rotate": ("degrees", "image"),
    "mark": ("x", "y", "image"),
}
_EXAMPLES = {"crop": "0 0 50 50", "cell": "1", "rotate": "90", "mark": "1 1"}
_NUMBER = r"[-+]?\d{1,12}(?:\.\d{0,12})?"
_WRITTEN = re.compile(rf"(?P<tool>[a-z]+)?[\s(:]*(?P<numbers>{_NUMBER}(?:[\s,;]+{_NUMBER}){{0,8}})\)?", re.I | re.A)
_LONGEST = 200
"""Characters of an action's text."""
_THOUSAND = 1000.0
_RED = (255, 0, 0)


class Zoom(Environment):
    """Looks at the prompt's images again."""

    class Config(PluginConfig):
        tools: Annotated[tuple[ToolName, ...], Field(min_length=1)] | None = None
        """Tools that the policy may call; null is crop, rotate and mark, with a grid cell alone."""
        coordinates: Literal["relative", "pixels"] = "relative"
        """relative: thousandths of width and height. pixels: the image's own."""
        grid: Annotated[int, Field(ge=1, le=100)] | None = None
        """Cells in a row, and rows; for the tool cell."""
        action: ActionPattern | None = None
        """Regular expression whose group is an action, instead of tool calls."""
        min_side: Annotated[int, Field(ge=1, le=4096)] = 224
        """Shorter side of a result in pixels, at least, as far as max_pixels allows."""
        max_pixels: Annotated[int, Field(ge=1, le=16_000_000)] = 1_003_520
        """Most pixels of a result."""

        @model_validator(mode="after")
        def _grid_and_cell_go_together(self) -> Zoom.Config:
            if self.grid is None and "cell" in self.names:
                raise ValueError("the tool cell needs grid, the number of cells in a row, such as grid: 4")
            if self.grid is not None and "cell" not in self.names:
                raise ValueError("grid is for the tool cell, which tools leaves out; add cell there, or leave out grid")
            return self

        @property
        def names(self) -> tuple[ToolName, ...]:
            """The tools, defaults filled in."""
            return self.tools or (("crop", "rotate", "mark") if self.grid is None else ("cell",))

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._images: Sequence[PILImage.Image | None] = ()

    def example(self) -> str:
        if self.config.action is None:
            return ""
        return text_of(self.config.action, _EXAMPLES[self.config.names[0]])

    def tools(self) -> Sequence[Tool]:
        if self.config.action is not None:
            return []
        return [getattr(self, name) for name in self.config.names]

    def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        self._prompt = prompt
        self._images = [None] * len(prompt.images)
        if self.config.coordinates == "relative" or not prompt.images:
            return None
        sizes = (self._image(number).size for number in range(1, len(self._images) + 1))
        lines = [f"Image {number}: {width}x{height} pixels." for number, (width, height) in enumerate(sizes, 1)]
        return Observation("\n".join(lines), role="user")

    async def step(self, turn: Turn) -> Observation:
        if self.config.action is None:
            return await self.run_calls(turn)
        written = last_action(self.config.action, turn.text)
        if written is None:
            return Observation(done=True)
        try:
            call = self._read(written)
            method = getattr(self, call.name)
            result: Observation = method(**Arguments.of(method).fit(call.arguments or {}))
        except ToolError as error:
            return Observation(str(error), role="user")
        return Observation(result.content, role="user", info=result.info)

    def _read(self, written: str) -> Call:
        """The call that an action's text stands for."""
        match, forms = _WRITTEN.fullmatch(written[:_LONGEST]), " or ".join(map(self._form, self.config.names))
        if match is None:
            raise ToolError(f"This is no action. Write {forms}.")
        name = (match["tool"] or self.config.names[0]).lower()
        numbers = [float(number) for number in re.split(r"[\s,;]+", match["numbers"])]
        if name not in self.config.names:
            raise ToolError(f"There is no tool {name[:40]!r}. Write {forms}.")
        needed = _PARAMETERS[name]
        if not len(needed) - 1 <= len(numbers) <= len(needed):
            raise ToolError(f"{name} has {len(needed) - 1} numbers, and may have the image's. Write {forms}.")
        return Call(name, dict(zip(needed, numbers, strict=False)))

    def _form(self, name: str) -> str:
        return " ".join([name if name != self.config.names[0] else "", *_PARAMETERS[name][:-1]]).strip()

    def crop(self, x0: float, y0: float, x1: float, y1: float, image: int = 1) -> Observation:
        """Look at a part of an image, enlarged.

        Args:
            x0: Left edge.
            y0: Upper edge.
            x1: Right edge.
            y1: Lower edge.
            image: Number of the image, from 1.
        """
        picture = self._image(image)
        left, top = self._point(picture, x0, y0)
        right, bottom = self._point(picture, x1, y1)
        if not (left < right and top < bottom):
            raise ToolError("crop: x0 must be less than x1, and y0 less than y1.")
        return self._part(picture, (left, top, right, bottom), image)

    def cell(self, number: int, image: int = 1) -> Observation:
        """Look at a cell of an image, enlarged.

        Args:
            number: Number of the cell, from 1, row by row.
            image: Number of the image, from 1.
        """
        cells = self.config.grid or 1
        picture = self._image(image)
        if not 1 <= number <= cells**2:
            raise ToolError(f"cell: number is from 1 to {cells**2}.")
        row, column = divmod(number - 1, cells)
        width, height = picture.width / cells, picture.height / cells
        box = (column * width, row * height, (column + 1) * width, (row + 1) * height)
        return self._part(picture, box, image)

    def rotate(self, degrees: float, image: int = 1) -> Observation:
        """Look at a whole image, turned clockwise.

        Args:
            degrees: From -360 to 360.
            image: Number of the image, from 1.
        """
        from PIL.Image import Resampling

        if not -360 <= degrees <= 360:  # false for NaN too
            raise ToolError("rotate: degrees is from -360 to 360.")
        picture = self._small(self._image(image))
        turned = picture.rotate(-degrees, Resampling.BICUBIC, expand=True, fillcolor="white")
        return Observation([self._small(turned)], info={"degrees": degrees, "image": image})

    def mark(self, x: float, y: float, image: int = 1) -> Observation:
        """Look at a whole image with a red circle around a point.

        Args:
            x: From the left.
            y: From the top.
            image: Number of the image, from 1.
        """
        from PIL import ImageDraw

        picture = self._image(image)
        left, top = self._point(picture, x, y)
        shown = self._small(picture).copy()
        scale = shown.width / picture.width
        centre, radius = (left * scale, top * scale), max(4.0, min(shown.size) / 20)
        edges = [centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius]
        ImageDraw.Draw(shown).ellipse(edges, outline=_RED, width=max(1, round(radius / 5)))
        return Observation([shown], info={"point": [left, top], "image": image})

    def _image(self, number: int) -> PILImage.Image:
        """The prompt's image of that number, decoded when it is first asked for."""
        if not 1 <= number <= len(self._images):
            count = len(self._images)
            raise ToolError(f"image: from 1 to {count}." if count else "image: there is no image in the question.")
        place = number - 1
        if (picture := self._images[place]) is None:
            picture = full_size(self._prompt.images[place])
            self._images = [picture if at == place else each for at, each in enumerate(self._images)]
        return picture

    def _point(self, picture: PILImage.Image, x: float, y: float) -> tuple[float, float]:
        """A point of the image in its own pixels."""
        pixels = self.config.coordinates == "pixels"
        limits = picture.size if pixels else (_THOUSAND, _THOUSAND)
        for name, value, limit in zip("xy", (x, y), limits, strict=True):
            if not 0 <= value <= limit:  # false for NaN too
                raise ToolError(f"{name} is from 0 to {limit:g}.")
        return x / limits[0] * picture.width, y / limits[1] * picture.height

    def _part(self, picture: PILImage.Image, edges: tuple[float, float, float, float], number: int) -> Observation:
        left, top = math.floor(edges[0]), math.floor(edges[1])
        box = left, top, min(picture.width, math.ceil(edges[2])), min(picture.height, math.ceil(edges[3]))
        width, height = box[2] - left, box[3] - top
        if width < 1 or height < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ToolError(f"This part is too narrow: it has {width}x{height} pixels. Take a wider one.")
        return Observation([self._small(picture.crop(box))], info={"box": list(box), "image": number})

    def _small(self, picture: PILImage.Image) -> PILImage.Image:
        return fitted(picture, self.config.min_side, self.config.max_pixels)
