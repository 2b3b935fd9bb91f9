"""Observations on their way from an environment's process: checked and bounded there, read here.

Images are encoded files, whatever the environment gave; nothing is decoded here before its header was read. No address
and no path in a block is ever opened: a model may have written it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.data.decode import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, read_header, upright
from mmrl.errors import DataError
from mmrl.rollout.nesting import bounded
from mmrl.rollout.worker_faults import excerpt
from mmrl.system.worker_process import Reply
from mmrl.types import Observation, RawImage

MAX_TEXT = 2**20
"""Characters of all texts of an observation."""
MAX_IMAGES = 64
"""Images of an observation."""
MAX_INFO = 2**16
"""Characters of ``Observation.info`` as JSON."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTENT = "a text, an image (PIL, uint8 array, bytes, RawImage, block), or a list of both"


@dataclass(frozen=True, slots=True)
class ReceivedObservation:
    """An observation, as it came from the environment's process.

    Attributes:
        content: Texts, and image files.
    """

    content: tuple[str | bytes, ...] = ()
    reward: float = 0.0
    done: bool = False
    role: str = "tool"
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, reply: Reply) -> ReceivedObservation:
        """Read a reply; raises KeyError, TypeError or ValueError if it is none of this kind."""
        content = [
            base64.b64decode(part["image"]) if "image" in part else str(part["text"]) for part in reply["content"]
        ]
        return cls(tuple(content), float(reply["reward"]), bool(reply["done"]), str(reply["role"]), dict(reply["info"]))

    @property
    def hash(self) -> str:
        """A hash of all that the policy can notice."""
        digest = hashlib.sha256(repr((self.reward, self.done, self.role)).encode())
        for part in self.content:
            data = part if isinstance(part, bytes) else part.encode()
            digest.update(f"{type(part).__name__} {len(data)} ".encode() + data)
        return digest.hexdigest()


class BadAnswer(Exception):
    """An environment broke its contract: the expected value, and the given one."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected, self.got = expected, got


def plain(observation: object) -> Reply:
    """An observation as JSON can hold it.

    Raises:
        BadAnswer: It is none, or too large.
    """
    if not isinstance(observation, Observation):
        raise BadAnswer("an Observation", f"{type(observation).__name__} {excerpt(observation)}")
    parts = list(_parts(observation.content))
    if (count := sum("image" in part for part in parts)) > MAX_IMAGES:
        raise BadAnswer(f"at most {MAX_IMAGES} images", f"{count}")
    if (length := sum(len(part.get("text", "")) for part in parts)) > MAX_TEXT:
        raise BadAnswer(f"at most {MAX_TEXT} characters of text", f"{length}")
    if (size := sum(len(part.get("image", "")) for part in parts)) > MAX_IMAGE_BYTES:
        raise BadAnswer(f"at most {MAX_IMAGE_BYTES} bytes of images in base64", f"{size}")
    if not isinstance(observation.done, bool | np.bool_):
        raise BadAnswer("True or False for done", f"{type(observation.done).__name__} {excerpt(observation.done)}")
    if observation.role not in ("tool", "user"):
        raise BadAnswer("role tool or user", excerpt(observation.role))
    return {
        "content": parts,
        "reward": number(observation.reward, "reward"),
        "done": bool(observation.done),
        "role": observation.role,
        "info": _info(observation.info),
    }


def number(value: object, name: str) -> float:
    """A finite number, as Python or numpy hold it; raises BadAnswer for anything else."""
    value = value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value
    try:
        if isinstance(value, numbers.Real) and math.isfinite(found := float(value)):
            return found
    except OverflowError:  # an int, or a fraction, beyond every float
        pass
    raise BadAnswer(f"a finite number for {name}", f"{type(value).__name__} {excerpt(value)}")


def _parts(content: object) -> Iterator[dict[str, str]]:
    """Content as texts and encoded images; neighbouring texts stay apart."""
    match content:
        case None:
            return
        case str():
            if content:
                yield {"text": _SURROGATES.sub("\ufffd", content[: MAX_TEXT + 1])}
        case Mapping():
            yield from _block(content)
        case Sequence() if not isinstance(content, bytes | bytearray | memoryview):
            for part in content:
                if isinstance(part, list | tuple):
                    raise BadAnswer(_CONTENT, f"a list within a list: {excerpt(part)}")
                yield from _parts(part)
        case _:
            yield {"image": base64.b64encode(_encoded(content)).decode()}


def _block(block: Mapping[Any, Any]) -> Iterator[dict[str, str]]:
    """A typed block, as chat APIs have them; images by value, or as a ``data:`` address."""
    match block.get("type"):
        case "text" if isinstance(block.get("text"), str):
            yield from _parts(block["text"])
        case "image" | "image_url" as kind:
            image = next((block[key] for key in (kind, "image", "url", "data") if block.get(key) is not None), None)
            image = image.get("url") if isinstance(image, Mapping) else image
            image = _from_text(image, is_bare="data" in block) if isinstance(image, str) else image
            yield {"image": base64.b64encode(_encoded(image)).decode()}
        case _:
            raise BadAnswer('a block such as {"type": "text", "text": ...} or {"type": "image", ...}', excerpt(block))


def _from_text(text: str, *, is_bare: bool) -> bytes:
    """The image in a ``data:`` address, or in plain base64."""
    found = re.match(r"data:image/[\w.+-]+;base64,", text[:100])
    if found is None and not is_bare:
        raise BadAnswer("an image by value, or a data:image/...;base64, address", excerpt(text))
    try:
        return base64.b64decode(text[found.end() if found else 0 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadAnswer("an image in base64", f"{error}: {excerpt(text, limit=60)}") from error


def _encoded(image: object) -> bytes:
    """An image as an encoded file."""
    if isinstance(image, RawImage):
        image = image.data
    if isinstance(image, bytes | bytearray | memoryview):
        return _checked(bytes(image))
    if hasattr(image, "convert") and hasattr(image, "size"):
        return _png(image)
    if hasattr(image, "__array__"):
        return _png_of_array(np.asarray(image))
    raise BadAnswer(_CONTENT, f"{type(image).__name__} {excerpt(image)}")


def _checked(data: bytes) -> bytes:
    """The file, whose header tells of an image that may be decoded."""
    try:
        read_header(RawImage(data, "the image"))
    except DataError as error:
        raise BadAnswer(error.possible or "an image that can be read", f"bytes: {error.what}") from error
    return data


def _png_of_array(pixels: np.ndarray[Any, Any]) -> bytes:
    from PIL import Image

    expected = "a uint8 array (H, W), (H, W, 3) or (H, W, 4)"
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    fits = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if pixels.dtype != np.uint8 or not fits or not pixels.size:
        raise BadAnswer(expected, f"an array {pixels.shape} of {pixels.dtype}")
    if pixels.shape[0] * pixels.shape[1] > MAX_IMAGE_PIXELS:
        raise BadAnswer(f"at most {MAX_IMAGE_PIXELS} pixels", f"an array {pixels.shape}")
    return _png(Image.fromarray(np.ascontiguousarray(pixels)))


def _png(image: Any) -> bytes:
    """A PIL image, upright, as a PNG file."""
    width, height = image.size
    if not width or not height or width * height > MAX_IMAGE_PIXELS:
        raise BadAnswer(f"1 to {MAX_IMAGE_PIXELS} pixels", f"an image of {width}x{height}")
    if image.mode in ("I", "F"):
        raise BadAnswer("8 or 16 bits per channel", f"an image of mode {image.mode}")
    image = upright(image)
    if not image.mode.startswith("I;16"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    image.info = {}
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _info(info: object) -> dict[str, Any]:
    expected = f"info that JSON can hold in {MAX_INFO} characters"
    if not isinstance(info, Mapping):
        raise BadAnswer(expected, f"{type(info).__name__} {excerpt(info)}")
    try:
        text = json.dumps(dict(info), ensure_ascii=False, allow_nan=False, default=_plain_number)
        found: dict[str, Any] | None = bounded(json.loads(_SURROGATES.sub("\ufffd", text)))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadAnswer(expected, f"{error}: {excerpt(info)}") from error
    if len(text) > MAX_INFO:
        raise BadAnswer(expected, f"{len(text)} characters")
    return found or {}  # too deep for the line to the parent, and for records


def _plain_number(value: object) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")
