"""Prompts with drawn images, made for what breaks: where images stand, their shapes, and which is which."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from mmrl.engine_api import PromptEncoder
from mmrl.errors import DataError
from mmrl.types import Candidate, EncodedPrompt, Message, Prompt, RawImage

Size = tuple[int, int]
Place = Literal["top left", "bottom right"]
Colour = tuple[int, int, int]

WIDE, TALL, SQUARE = (93, 61), (45, 122), (67, 67)
"""Sizes of images in pixels. None is a multiple of a patch; a run's limits and its model's grid resize them."""
WHITE, RED, BLUE, YELLOW = (255, 255, 255), (200, 20, 20), (25, 40, 190), (240, 210, 40)
LONG = "In a box there are four red balls, two green ones and a small blue one, which lies under the others. "
PROMPT_TOKENS = 480
"""Tokens that a start spends on the prompts beyond those that are always asked."""
ALWAYS = 4
"""Prompts, the first ones, that are asked if a run can take them, whatever they cost."""
IMAGE, OTHER, MOVED = "one image", "another image", "the mark moved"
"""Prompts of one text, whose images have one size."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """The prompts that a run can take.

    Attributes:
        prompts: In the model's tokens.
        left_out: Why others are not among them, by their names. Those with more images than a prompt of the run may
            have are not told of.
    """

    prompts: Sequence[ProbePrompt]
    left_out: Mapping[str, str]


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


def fitting(
    encoder: PromptEncoder, *, max_tokens: int, max_images: int, total_tokens: float = PROMPT_TOKENS
) -> Fitting:
    """The prompts that a run can take.

    A run whose limits of pixels allow no odd size gets square images alone.

    Args:
        max_tokens: Most tokens of a prompt.
        max_images: Most images of a prompt; 0 for a run without.
        total_tokens: Most tokens of all prompts beyond those that are always asked.
    """
    fit = partial(_fitting, encoder, max_tokens=max_tokens, max_images=max_images, total_tokens=total_tokens)
    found = fit(images() if max_images else {})
    if max_images and not any(each.has_images for each in found.prompts):
        found = fit(images(SQUARE, SQUARE))
    return found


def _fitting(
    encoder: PromptEncoder,
    pictures: Mapping[str, RawImage],
    *,
    max_tokens: int,
    max_images: int,
    total_tokens: float,
) -> Fitting:
    found, left_out = list[ProbePrompt](), dict[str, str]()
    for place, (name, text, names, members, finds) in enumerate(_PROBES):
        if len(names) > max_images:
            continue
        prompt = Prompt(
            f"probe: {name}",
            (Message("user", text),),
            tuple(pictures[each] for each in names),
            demonstration="It is in the corner.",
            candidates=(Candidate("It is in the corner.", 1.0), Candidate("There is no mark at all.", 0.0)),
        )
        try:
            length = encoder.num_tokens(prompt)
            if length > max_tokens:
                left_out[name] = f"longer than data.max_prompt_tokens, which is {max_tokens}"
            elif place >= ALWAYS and length > total_tokens:
                left_out[name] = "beyond the tokens that a start spends on probes"
            else:
                found.append(ProbePrompt(name, encoder.encode(prompt), members, finds))
                total_tokens -= length if place >= ALWAYS else 0
        except DataError as error:  # a template that cannot carry it, or an image that the run refuses
            left_out[name] = error.what
    return Fitting(found, left_out)
