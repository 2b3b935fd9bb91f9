"""Lengths, images and duplicates of a dataset's rows. Headers are read, no pixels."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.data.images import ImageSizes, read_header
from mmrl.data.lengths import histogram
from mmrl.data.prompts import Progress, PromptSource
from mmrl.system.report import counted
from mmrl.system.table import table
from mmrl.types import Prompt

_BINS = 8
_BAR = 40
_TELL_EVERY = 100


@dataclass(frozen=True, slots=True)
class Profile:
    """The rows that a run keeps.

    Attributes:
        lengths: Tokens of each prompt, image tokens included.
        image_tokens: Image tokens of each prompt.
        sizes: Images of each (width, height) of their files, turned upright.
        modes: Images of each Pillow mode.
        formats: Images of each file format.
        transparent: Images that have transparency, which is shown on white.
        resized: Images that are not on the model's grid.
        images_max: Most images of one prompt.
        largest_image: Tokens of the largest image.
        sources: Each row's source.
        fingerprints: Each row's fingerprint, as 64-bit numbers.
        pairs: Each row's fingerprint with its best and its worst candidate; 0 of a row without two.
        swapped: Likewise with these two the other way round.
    """

    lengths: Sequence[int]
    image_tokens: Sequence[int]
    sizes: Counter[tuple[int, int]]
    modes: Mapping[str, int]
    formats: Mapping[str, int]
    transparent: int
    resized: int
    images_max: int
    largest_image: int
    sources: Sequence[str]
    fingerprints: Sequence[int]
    pairs: Sequence[int]
    swapped: Sequence[int]

    def data(self) -> dict[str, Any]:
        """For a program."""
        lengths = np.asarray(self.lengths)
        return {
            "tokens_min": int(lengths.min()),
            "tokens_mean": round(float(lengths.mean()), 1),
            "tokens_median": float(np.median(lengths)),
            "tokens_p95": float(np.quantile(lengths, 0.95)),
            "tokens_max": int(lengths.max()),
            "tokens_histogram": [[low, high, count] for low, high, count in histogram(self.lengths, _BINS)],
            "image_tokens_fraction": round(sum(self.image_tokens) / int(lengths.sum()), 4),
            "images": self.sizes.total(),
            "images_max": self.images_max,
            "image_modes": dict(self.modes),
            "image_formats": dict(self.formats),
            "images_transparent": self.transparent,
            "images_resized": self.resized,
            "image_width": _range([width for width, _ in self.sizes], [*self.sizes.values()]),
            "image_height": _range([height for _, height in self.sizes], [*self.sizes.values()]),
            "sources": dict(Counter(self.sources)),
        }

    def lines(self) -> list[str]:
        """For a person."""
        data = self.data()
        share = f", {data['image_tokens_fraction']:.0%} of them for images" if self.sizes else ""
        lines = [
            f"tokens     mean {data['tokens_mean']:g}, median {data['tokens_median']:g}, 95 % up to "
            f"{data['tokens_p95']:g}, most {data['tokens_max']}{share}"
        ]
        bins = histogram(self.lengths, _BINS)
        largest = max(count for _, _, count in bins)
        shown = [(f"{low}-{high}", str(n), "#" * round(_BAR * n / largest)) for low, high, n in bins if n]
        lines += [f"  {line}" for line in table(shown, ">><")]
        if not self.sizes:
            return [*lines, "images     none"]
        (w_min, w_mid, w_max), (h_min, h_mid, h_max) = data["image_width"], data["image_height"]
        lines.append(
            f"images     {data['images']}, up to {self.images_max} in a prompt; {counted(self.formats)}; "
            f"modes {counted(self.modes)}"
        )
        extent = f"{w_min}x{h_min} to {w_max}x{h_max} pixels, median {w_mid}x{h_mid}"
        extent = f"{w_min}x{h_min} pixels" if (w_min, h_min) == (w_max, h_max) else extent
        lines.append(f"           {extent}; {self.resized} resized to the model's grid")
        if self.transparent:
            lines.append(f"           {self.transparent} with transparency: the model sees them on white")
        return lines


def profile(
    source: PromptSource,
    grid: ImageSizes,
    image_tokens_of: Callable[[int, int], int],
    progress: Progress = lambda phase, done, total: None,
) -> Profile:
    """Look at every row that is kept; decodes no image. Keeps some tens of bytes of each.

    Args:
        image_tokens_of: Image tokens of an image of a width and height of the grid.
    """
    modes, formats = Counter[str](), Counter[str]()
    sources, names = list[str](), dict[str, str]()
    sizes, image_tokens, fingerprints = Counter[tuple[int, int]](), array("q"), array("Q")
    pairs, swapped = array("Q"), array("Q")
    transparent = resized = images_max = largest = 0
    for index in range(len(source)):
        if index % _TELL_EVERY == 0:
            progress(f"images of {source.name}", index, len(source))
        prompt = source[index]
        tokens = 0
        for raw in prompt.images:
            header = read_header(raw)
            width, height = grid.size(header.width, header.height, where=raw.label)
            tokens += (own := image_tokens_of(width, height))
            largest = max(largest, own)
            sizes[header.width, header.height] += 1
            modes[header.mode] += 1
            formats[header.format] += 1
            transparent += header.transparent
            resized += (width, height) != (header.width, header.height)
        image_tokens.append(tokens)
        images_max = max(images_max, len(prompt.images))
        sources.append(names.setdefault(prompt.source, prompt.source))
        fingerprints.append(fingerprint(prompt))
        best, worst = _best_and_worst(prompt)
        pairs.append(_with_answers(fingerprints[-1], best, worst))
        swapped.append(_with_answers(fingerprints[-1], worst, best))
    images = sizes, modes, formats, transparent, resized, images_max, largest
    return Profile(source.lengths, image_tokens, *images, sources, fingerprints, pairs, swapped)


def fingerprint(prompt: Prompt) -> int:
    """A 64-bit hash, equal for prompts that show and ask the same."""
    digest = hashlib.blake2b(digest_size=8)
    for part in [text for message in prompt.messages for text in (message.role, message.content)]:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    for raw in prompt.images:
        digest.update(hashlib.blake2b(raw.data, digest_size=16).digest())
    return int.from_bytes(digest.digest(), "big")


def _best_and_worst(prompt: Prompt) -> tuple[str, str]:
    """The texts of the candidates that are compared, the first of ties; empty for a row without two."""
    scores = [each.score or 0.0 for each in prompt.candidates]
    if len(scores) < 2:
        return "", ""
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    return prompt.candidates[best].text, prompt.candidates[worst].text


def _with_answers(prompt: int, first: str, second: str) -> int:
    """A 64-bit hash of a prompt's fingerprint and two answers in their order; 0 without any."""
    if not first and not second:
        return 0
    digest = hashlib.blake2b(prompt.to_bytes(8, "big"), digest_size=8)
    for text in (first, second):
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(), "big")


def _range(values: Sequence[int], counts: Sequence[int]) -> tuple[int, int, int]:
    """Least, median and most of values that occur so often; zeros if there are none."""
    return (min(values), int(np.median(np.repeat(values, counts))), max(values)) if values else (0, 0, 0)
