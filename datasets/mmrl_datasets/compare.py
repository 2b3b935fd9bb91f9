"""Two or three scenes of ``shapes`` in one row, with a question that compares them.

    python -m mmrl_datasets.compare OUT

Half of the questions offer choices (which scene has most?), in the column ``choices`` and in the text; the others ask
for a difference or a sum, and have none. No picture occurs in two splits, nor twice in one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mmrl_datasets.command import run
from mmrl_datasets.layout import Belongs, Example, boxed, draw_splits, first, write_splits
from mmrl_datasets.shapes import MAX_COUNT, PLAIN_KINDS, draw_scene, scatter

ORDINALS = ("first", "second", "third")


def write_compare(folder: Path, *, train: int = 2000, test: int = 300, warmup: int = 0, seed: int = 0) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if asked for, ``warmup.parquet``.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows.
        test: Held-out rows.
        warmup: Rows for a supervised warm-up, in neither of the other two.
        seed: Decides every draw; the test rows do not depend on the number of others.

    Raises:
        DataError: A negative count, or ``folder`` holds other rows.
    """
    write_splits(folder, draw_splits(train=train, test=test, warmup=warmup, seed=seed, draw=_draw))


def _draw(rng: np.random.Generator, belongs: Belongs) -> Example:
    wanted = PLAIN_KINDS[rng.integers(len(PLAIN_KINDS))]
    num_scenes = int(rng.integers(2, 4))
    is_choice = bool(rng.integers(2))
    counts = first(
        lambda: rng.integers(MAX_COUNT + 2, size=num_scenes).tolist(),
        lambda counts: not is_choice or counts.count(max(counts)) == 1,
    )
    scenes = [scatter(wanted, count, int(rng.integers(1, 4)), PLAIN_KINDS, rng) for count in counts]
    images = tuple(draw_scene(scene, rng) for scene in scenes)
    question, steps, answer, choices = _ask(f"{wanted}s", counts, is_choice)
    return Example(
        "<image>" * num_scenes + question,
        images,
        answer,
        f"{steps} {boxed(answer)}",
        {"choices": choices, "scenes": json.dumps(scenes)},
    )


def _ask(name: str, counts: Sequence[int], is_choice: bool) -> tuple[str, str, str, list[str] | None]:
    """Question, worked solution, answer and choices."""
    seen = " ".join(f"The {place} has {count}." for place, count in zip(ORDINALS, counts, strict=False))
    if is_choice:
        choices = [f"the {place} picture" for place in ORDINALS[: len(counts)]]
        letters = "ABC"[: len(counts)]
        offered = " ".join(f"{letter}) {choice}" for letter, choice in zip(letters, choices, strict=True))
        letter = letters[counts.index(max(counts))]
        return f"Which picture has the most {name}? {offered}", f"{seen} The most is {max(counts)}.", letter, choices
    if len(counts) == 2:
        more, less = max(counts), min(counts)
        question = f"By how many does the number of {name} differ between the two pictures?"
        return question, f"{seen} {more} - {less} = {more - less}.", str(more - less), None
    total = f"{' + '.join(map(str, counts))} = {sum(counts)}."
    return f"How many {name} are there in all three pictures together?", f"{seen} {total}", str(sum(counts)), None


main = partial(run, write_compare)

if __name__ == "__main__":
    sys.exit(main())
