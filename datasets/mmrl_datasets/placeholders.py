"""Matches the places of images in the text with the images of the row.

If there are as many ``<image>`` as images, they match in order. If there is none, the images go first. ``<image 2>`` is
the second image, also as ``<image_2>`` or ``<|image_2|>``, and naming it twice shows it twice. Spellings of models,
such as ``<|image_pad|>``, are ``<image>`` where there are as many as images. In a row without images all of these are
text. All other cases are errors of the row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mmrl.errors import DataError
from mmrl.types import IMAGE_PLACEHOLDER, Message, RawImage
from mmrl_datasets.turns import Turn, refused_media

_PLACE = re.compile(r"<image>(?:</image>)?|<\|?(?i:image|img)[\s_-]{0,2}(\d{1,4})\|?>")
_PAD = r"<\|(?:image|IMAGE|image_pad|img|image_placeholder)\|>"
_MODELS = re.compile(
    rf"<\|(?:vision_start|image_start|begin_of_image)\|>(?:{_PAD})+<\|(?:vision_end|image_end|end_of_image)\|>|{_PAD}"
    r"|<img>(?:<IMG_CONTEXT>)+</img>|<IMG_CONTEXT>|<start_of_image>(?:(?:<image_soft_token>)*<end_of_image>)?"
    r"|<image_soft_token>|(?:<Img>)?<ImageHere>(?:</Img>)?|<image_placeholder>|<image_pad>|\[IMG\]"
    r"|(?P<tag><(?:Image|IMAGE|Img|IMG)>|<(?:img|image) ?/>|<img>(?:</img>)?)"
)
"""Spellings of a place that models and their programs use; a ``tag`` may also be spoken of, or be HTML."""
_LOOKALIKES = re.compile(
    r"!\[[^\]\n]{0,80}\]\([^)\s]{1,400}\)|[\[{]{1,2}(?:image|img|picture)[\s_-]?\d{0,3}[\]}]{1,2}"
    r"|<(?!img\s)[|\w]{0,24}(?:image|img|picture|photo|figure|(?<![a-z])(?:pic|fig|im_patch))[^<>\n]{0,80}>",
    re.IGNORECASE,
)
"""Texts that look like the place of an image, and may be something else."""
_HTML = re.compile(r"</?(?!think|answer|image|img)[a-z][a-z0-9]{0,9}[ />]")
_REFUSED = re.compile(r"<(video|audio)(?:\s{0,2}\d{1,4})?>")
MAX_IMAGES = 1024
"""Most images in one prompt: a text could name the same large one any number of times."""

Unused = Literal["fail", "drop"]


@dataclass(slots=True)
class _Place:
    """The place of an image; ``image`` is None until it is known."""

    number: int | None = None
    image: RawImage | None = None


def respelled(turns: Sequence[Turn], num_images: int) -> tuple[Sequence[Turn], list[str]]:
    """The turns with ``<image>`` for spellings of models, if there are as many as images and no ``<image>`` beside.

    Also returns the spellings that are left and read as text.
    """
    asked = [place for place, turn in enumerate(turns) if turn.role != "assistant"]
    texts = [piece for place in asked for piece in turns[place].pieces if isinstance(piece, str)]
    if not any(mark in text for text in texts for mark in "<[{"):
        return turns, []
    found = [match for text in texts for match in _MODELS.finditer(text)]
    sure = [match for match in found if not _is_spoken_of(match)]
    if sure and len(sure) == num_images and not any(map(_PLACE.search, texts)):
        changed = [_respell(turn) if place in asked else turn for place, turn in enumerate(turns)]
        return changed, []
    left = [match[0] for match in found if num_images or match["tag"] is None]
    left += [
        match[0]
        for text in texts
        for match in _LOOKALIKES.finditer(text)
        if num_images and not _PLACE.match(match[0]) and not _MODELS.match(match[0])
    ]
    return turns, list(dict.fromkeys(left))


def _respell(turn: Turn) -> Turn:
    def own(match: re.Match[str]) -> str:
        return match[0] if _is_spoken_of(match) else IMAGE_PLACEHOLDER

    return replace(turn, pieces=tuple(_MODELS.sub(own, p) if isinstance(p, str) else p for p in turn.pieces))


def _is_spoken_of(match: re.Match[str]) -> bool:
    """True for a tag that is quoted, or stands in HTML."""
    quotes = match.string[max(0, match.start() - 1) : match.start()] + match.string[match.end() : match.end() + 1]
    return match["tag"] is not None and (bool(set(quotes) & set("`'\"")) or _HTML.search(match.string) is not None)


def place_images(
    turns: Sequence[Turn],
    inline: Sequence[RawImage],
    images: Sequence[RawImage | None],
    where: str,
    unused: Unused = "fail",
) -> tuple[tuple[Message, ...], tuple[RawImage, ...]]:
    """The messages with one ``<image>`` per image, and the images in that order.

    Args:
        turns: The turns of the conversation.
        inline: The images within the turns, in order.
        images: The images of the row's columns; None where a numbered column is null.
        where: Row and column.
        unused: Treatment of images that a text which names others by number does not name.

    Raises:
        DataError: Placeholders and images do not fit together.
    """
    split = [(turn.role, _split(turn, iter(inline), where)) for turn in turns]
    places = [piece for _, pieces in split for piece in pieces if isinstance(piece, _Place)]
    open_places = [place for place in places if place.image is None]
    given = [image for image in images if image is not None]
    if not given and not inline:
        return tuple(Message(turn.role, turn.text) for turn in turns), ()
    if not open_places and given:
        open_places = [_Place() for _ in given]
        first = next((pieces for role, pieces in split if role == "user"), split[0][1])
        first[:0] = open_places
    if any(place.number is not None for place in open_places):
        _number(open_places, images, where, unused)
    elif len(open_places) != len(given):
        raise DataError(
            f"The row has {len(open_places)} {IMAGE_PLACEHOLDER} and {len(given)} images",
            where=where,
            possible=f"one {IMAGE_PLACEHOLDER} per image, or none",
        )
    else:
        for place, image in zip(open_places, given, strict=True):
            place.image = image
    shown = [p.image for _, pieces in split for p in pieces if isinstance(p, _Place) and p.image is not None]
    if len(shown) > MAX_IMAGES:
        raise DataError(f"The row shows {len(shown)} images", where=where, possible=f"up to {MAX_IMAGES}")
    messages = tuple(
        Message(role, "".join(piece if isinstance(piece, str) else IMAGE_PLACEHOLDER for piece in pieces))
        for role, pieces in split
    )
    return messages, tuple(shown)


def _split(turn: Turn, inline: object, where: str) -> list[str | _Place]:
    """A turn's texts and the places of its images, in order."""
    pieces: list[str | _Place] = []
    for piece in turn.pieces:
        if not isinstance(piece, str):
            pieces.append(_Place(image=next(inline)))  # type: ignore[call-overload]
            continue
        if refused := _REFUSED.search(piece):
            raise refused_media(f"the placeholder {refused[0]}", where)
        end = 0
        for match in _PLACE.finditer(piece):
            number = None if match[1] is None else int(match[1])
            pieces += [piece[end : match.start()], _Place(number)]
            end = match.end()
        pieces.append(piece[end:])
    return pieces


def _number(places: Sequence[_Place], images: Sequence[RawImage | None], where: str, unused: Unused) -> None:
    """Give numbered places their images."""
    if any(place.number is None for place in places):
        raise DataError(
            f"The text has both {IMAGE_PLACEHOLDER} and numbered ones such as <image 1>",
            where=where,
            possible="one kind of placeholder",
        )
    present = {number for number, image in enumerate(images, 1) if image is not None}
    named = {place.number or 0 for place in places}
    if named - present:
        raise DataError(
            f"The text names <image {min(named - present)}>, which the row does not have",
            where=where,
            possible=", ".join(f"<image {number}>" for number in sorted(present)) or "no placeholder",
        )
    if present - named and unused == "fail":
        raise DataError(
            f"The text names <image {min(named)}> but not <image {min(present - named)}>, which the row has",
            where=where,
            remedy="name every image in the text, or set unused_images: drop",
        )
    for place in places:
        place.image = images[(place.number or 0) - 1]
