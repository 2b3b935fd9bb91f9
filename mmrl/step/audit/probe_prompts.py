"""Prompts with drawn images, made for what breaks: where images stand, their shapes, and which is which."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mmrl.engine_api import PromptEncoder
from mmrl.errors import DataError
from mmrl.types import EncodedPrompt, Message, Prompt, RawImage

Size = tuple[int, int]
Place = Literal["top left", "bottom right"]
Colour = tuple[int, int, int]

WIDE, TALL, SQUARE = (93, 61), (45, 122), (67, 67)
"""Sizes of images in pixels. None is a multiple of a patch; a run's limits and its model's grid resize them."""
WHITE, RED, BLUE, YELLOW = (255, 255, 255), (200, 20, 20), (25, 40, 190), (240, 210, 40)
LONG = "In a box there are four red balls, two green ones and a small blue one, which lies under the others. "
PROMPT_TOKENS = 480
"""Tokens of all prompts beyond the first four, which are always asked."""
IMAGE, OTHER, MOVED = "one image", "another image", "the mark moved"
"""Prompts of one text, whose images have one size."""


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """A prompt to probe with.

    Attributes:
        members: Completions that are sampled from it.
        finds: Faults that show in its log-probs.
    """

    name: str
    encoded: EncodedPrompt
    members: int
    finds: str

    @property
    def has_images(self) -> bool:
        return bool(self.encoded.images)


def drawn(size: Size, background: Colour, mark: Colour, place: Place = "top left") -> RawImage:
    """An image of one colour with a mark in a corner, a third as wide and as high."""
    from PIL import Image

    image, (width, height) = Image.new("RGB", size, background), size
    edge = (width // 3, height // 3)
    image.paste(mark, (0, 0, *edge) if place == "top left" else (width - edge[0], height - edge[1], width, height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return RawImage(file.getvalue(), f"probe {width}x{height}, the mark {place}")


def images(wide: Size = WIDE, tall: Size = TALL) -> Mapping[str, RawImage]:
    """The images of the probes, by name."""
    return {
        "a": drawn(wide, WHITE, RED),
        "b": drawn(wide, BLUE, YELLOW),
        "moved": drawn(wide, WHITE, RED, "bottom right"),
        "tall": drawn(tall, YELLOW, BLUE),
        "square": drawn(SQUARE, RED, WHITE, "bottom right"),
    }


_QUESTION = "<image>Where is the mark?"
_PROBES: Sequence[tuple[str, str, Sequence[str], int, str]] = (
    ("no image", "What is 3 plus 4?", (), 2, "wrong weights, a wrong template, a wrong mask or temperature"),
    (IMAGE, _QUESTION, ("a",), 1, "images that are dropped, their positions and their grid"),
    (OTHER, _QUESTION, ("b",), 1, "an image in place of another, caches of images"),
    (MOVED, _QUESTION, ("moved",), 1, "rows and columns of an image that are mixed up"),
    ("a long text", f"{LONG}How many balls are blue?", (), 1, "positions of long texts, masks of windows"),
    ("an image late", f"{LONG}<image> Is it one of them?", ("tall",), 1, "where images begin, where text goes on"),
    ("two images", "<image> or <image>: which is higher?", ("square", "tall"), 1, "images in a wrong order, grids"),
    ("one image twice", "<image> and <image>: are they equal?", ("a", "a"), 1, "caches of images, positions of images"),
)
"""Name, text, images, completions and what it finds; the most important first."""


def fitting(encoder: PromptEncoder, *, max_tokens: int, max_images: int) -> list[ProbePrompt]:
    """The prompts that a run can take, in the model's tokens.

    A run whose limits of pixels allow no odd size gets square images alone.

    Args:
        max_tokens: Most tokens of a prompt.
        max_images: Most images of a prompt; 0 for a run without.
    """
    found = _fitting(encoder, images() if max_images else {}, max_tokens=max_tokens, max_images=max_images)
    if max_images and not any(each.has_images for each in found):
        found = _fitting(encoder, images(SQUARE, SQUARE), max_tokens=max_tokens, max_images=max_images)
    return found


def _fitting(
    encoder: PromptEncoder, pictures: Mapping[str, RawImage], *, max_tokens: int, max_images: int
) -> list[ProbePrompt]:
    found, left = list[ProbePrompt](), PROMPT_TOKENS
    for place, (name, text, names, members, finds) in enumerate(_PROBES):
        if len(names) > max_images:
            continue
        prompt = Prompt(
            f"probe: {name}",
            (Message("user", text),),
            tuple(pictures[each] for each in names),
            demonstration="It is in the corner.",
        )
        try:
            length = encoder.num_tokens(prompt)
            if length > max_tokens or (length > left and place > 3):
                continue
            encoded = encoder.encode(prompt)
        except DataError:  # a template that cannot carry it
            continue
        left -= length if place > 3 else 0
        found.append(ProbePrompt(name, encoded, members, finds))
    return found
