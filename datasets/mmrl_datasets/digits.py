"""Real handwritten digits as questions: name one digit, or add the two that stand side by side.

    python -m mmrl_datasets.digits OUT

The 1,797 digits of scikit-learn (8x8, 17 grey levels) are drawn up smoothly, dark on white. A fifth of them is held
out: no test image shows a digit that a training image shows. Warm-up rows come from the training digits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmrl.errors import DataError, ResourceError
from mmrl_datasets.command import run
from mmrl_datasets.layout import HELD_OUT_FRACTION, Example, judged, png, write_splits

if TYPE_CHECKING:
    from PIL.Image import Image

_SPLITS = ("train", "test", "warmup")
_ANSWERS = tuple("0123456789")
_CAPTIONED = 3
"""Digits of a document at most."""


def write_digits(
    folder: Path,
    *,
    train: int = 1400,
    test: int = 300,
    warmup: int = 0,
    pairs: float = 0.0,
    captions: int = 0,
    verdicts: int = 0,
    seed: int = 0,
    image_size: int = 56,
    quarter_turns: int = 0,
) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if asked for, ``warmup.parquet``, captions and verdicts.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows.
        test: Held-out rows.
        warmup: Rows for a supervised warm-up, drawn from the training digits again, so that they overlap ``train``.
        pairs: Fraction of rows that show two digits and ask for their sum.
        captions: Documents of one to three digits, each before its value, in ``captions.parquet``; an eighth as many of
            held-out digits are in ``held_out_captions.parquet``.
        verdicts: Rows of one digit with all ten answers, of which the right one has the score 1, in
            ``verdicts.parquet``.
        seed: Decides which digits are held out, and every draw.
        image_size: Side of a digit in pixels.
        quarter_turns: Times that each digit is turned to the left by a quarter of a circle.

    Raises:
        DataError: An option is out of range, more single digits are asked for than there are, or ``folder`` holds
            other rows.
    """
    if min(train, test, warmup, captions, verdicts) < 0 or not 0 <= pairs <= 1 or image_size < 8:
        raise DataError(
            "The digits cannot be drawn with these options",
            possible="counts of 0 or more, pairs between 0 and 1, image_size of 8 or more",
        )
    held_out, others = held_out_digits(seed)
    pools = {"train": others, "test": held_out, "warmup": others}
    counts = {"train": train, "test": test, "warmup": warmup}
    draw = partial(_picture, size=image_size, quarter_turns=quarter_turns)
    examples = {
        split: _draw(split, counts[split], pools[split], pairs, np.random.default_rng([seed, index]), draw)
        for index, split in enumerate(_SPLITS)
    }
    documents = {"captions": (others, captions), "held_out_captions": (held_out, -(-captions // 8))}
    for index, (split, (pool, count)) in enumerate(documents.items(), len(_SPLITS)):
        examples[split] = _captioned(pool, count, np.random.default_rng([seed, index]), draw)
    rng = np.random.default_rng([seed, len(examples)])
    examples["verdicts"] = [judged(row, _ANSWERS, rng) for row in _draw("verdicts", verdicts, others, 0.0, rng, draw)]
    write_splits(folder, examples)


def held_out_digits(seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of the digits that only ``test`` shows, and of all others."""
    num_digits = len(_digits()[1])
    order = np.random.default_rng(seed).permutation(num_digits)
    held_out = round(HELD_OUT_FRACTION * num_digits)
    return order[:held_out], order[held_out:]


def read_digits(size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(1797, size, size) grey levels, dark on white, drawn up smoothly, and (1797,) values."""
    from PIL import Image

    grey, values = _digits()
    drawn = [Image.fromarray(digit).resize((size, size), Image.Resampling.BICUBIC) for digit in grey]
    return np.stack([np.asarray(digit) for digit in drawn]), values


def _draw(
    split: str,
    count: int,
    pool: npt.NDArray[np.int64],
    pairs: float,
    rng: np.random.Generator,
    draw: Callable[[tuple[int, ...]], Image],
) -> list[Example]:
    num_pairs = round(pairs * count)
    if count - num_pairs > len(pool):
        raise DataError(
            f"{count - num_pairs} rows of one digit are more than the {len(pool)} digits of split {split!r}",
            remedy=f"ask for {len(pool)} or fewer, or for more pairs",
        )
    singles = [(int(digit),) for digit in rng.permutation(pool)[: count - num_pairs]]
    doubles = [tuple(int(digit) for digit in rng.choice(pool, 2, replace=False)) for _ in range(num_pairs)]
    rows = [*singles, *doubles]
    return [_example(rows[index], draw(rows[index])) for index in rng.permutation(count)]


def _picture(digits: tuple[int, ...], *, size: int, quarter_turns: int) -> Image:
    """The digits side by side."""
    from PIL import Image

    grey, _ = _digits()
    picture = Image.new("RGB", (size * len(digits), size))
    for place, digit in enumerate(digits):
        drawn = Image.fromarray(np.rot90(grey[digit], quarter_turns)).resize((size, size), Image.Resampling.BICUBIC)
        picture.paste(drawn.convert("RGB"), (place * size, 0))
    return picture


def _example(digits: tuple[int, ...], picture: Image) -> Example:
    _, values = _digits()
    question = "What digit is this?" if len(digits) == 1 else "What is the sum of the two digits?"
    return Example(f"<image>{question}", (png(picture),), str(sum(int(values[digit]) for digit in digits)))


def _captioned(
    pool: npt.NDArray[np.int64], count: int, rng: np.random.Generator, draw: Callable[[tuple[int, ...]], Image]
) -> list[Example]:
    """Documents of pictures, each before its value."""
    _, values = _digits()
    chosen = [rng.choice(pool, 1 + place % _CAPTIONED) for place in range(count)]
    return [
        Example(
            " ".join(f"<image> {values[digit]}" for digit in digits),
            tuple(png(draw((int(digit),))) for digit in digits),
            " ".join(str(values[digit]) for digit in digits),
        )
        for digits in chosen
    ]


@cache
def _digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(1797, 8, 8) grey levels, dark on white, and (1797,) values.

    Raises:
        ResourceError: scikit-learn, which has them, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        what = "the digits are scikit-learn's, which is not installed"
        remedy = "pip install 'mmrl-train[digits]'"
        raise ResourceError(what, where="mmrl_datasets.digits", remedy=remedy) from error
    digits = load_digits()
    return (255 - digits.images * (255 / 16)).round().astype(np.uint8), digits.target


main = partial(run, write_digits)

if __name__ == "__main__":
    sys.exit(main())
