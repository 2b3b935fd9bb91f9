"""The content of a chat turn with images, as OpenAI's API has it: texts and data URLs in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mmrl.types import IMAGE_PLACEHOLDER, ImageRef
from mmrl_rewards.service import base64_of


def data_url(image: ImageRef) -> str:
    """The image's PNG file as an address."""
    return f"data:image/png;base64,{base64_of(image)}"


def parts_of(text: str, images: Iterator[ImageRef], address: Callable[[ImageRef], str] = data_url) -> Any:
    """The text, or its parts where it has placeholders, each of which takes the next image.

    Args:
        address: The address that stands for an image.
    """
    if IMAGE_PLACEHOLDER not in text:
        return text
    before, *others = text.split(IMAGE_PLACEHOLDER)
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    for after in others:
        parts.append({"type": "image_url", "image_url": {"url": address(next(images))}})
        parts += [{"type": "text", "text": after}] if after else []
    return parts
