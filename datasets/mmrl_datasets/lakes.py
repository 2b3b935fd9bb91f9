"""Frozen lakes to cross, for gymnasium's FrozenLake-v1: maps, and walks along a shortest path as pictures.

    python -m mmrl_datasets.lakes OUT

A row's column ``world`` is what the environment is made with (``kwargs_column: world``): a map of ``size`` x ``size``
fields, from the upper left to the lower right corner, with holes that leave a way. No map is in two splits. The rows of
``warmup`` are conversations: each turn shows the lake and is answered with the next move. Of several shortest paths it
is the first by the order of the moves, since a choice that cannot be foreseen hides what the map has to do with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import DataError
from mmrl_datasets.command import run
from mmrl_datasets.layout import Example, first, png, write_splits
from mmrl_datasets.pages import conversation

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Change of row and column, in the order of the environment's actions."""
QUESTION = "Walk to the flag."
Field = tuple[int, int]


def write_lakes(
    folder: Path,
    *,
    train: int = 1000,
    test: int = 200,
    warmup: int = 2000,
    size: int = 4,
    holes: float = 0.25,
    image_side: int = 56,
    seed: int = 0,
) -> None:
    """Write ``train.parquet``, ``test.parquet`` and, if asked for, ``warmup.parquet``.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows.
        test: Held-out rows, with maps that the other splits do not have.
        warmup: Rows with a shortest path to imitate, with other maps than ``train``.
        size: Fields in a row, and rows.
        holes: Probability of a hole on each field but start and goal.
        image_side: Side of a walk's pictures in pixels, the environment's ``image_side``.
        seed: Decides which maps are held out, and every draw.

    Raises:
        DataError: An option is out of range, there are not enough different maps, or ``folder`` holds other rows.
    """
    if min(train, test, warmup) < 0 or not 2 <= size <= 8 or not 0 <= holes < 0.6 or image_side < 8:
        raise DataError(
            "The lakes cannot be drawn with these options",
            possible="train, test and warmup of 0 or more, size 2 to 8, holes of 0 or more and less"
            " than 0.6, image_side of 8 or more",
        )
    counts = {"test": test, "warmup": warmup, "train": train}
    seen = set[str]()
    rows = dict[str, list[Example]]()
    for index, (split, count) in enumerate(counts.items()):
        rng = np.random.default_rng([seed, index])
        rows[split] = [_draw(size, holes, rng, seen) for _ in range(count)]
    rows["warmup"] = [_walked(row, image_side) for row in rows["warmup"]]
    write_splits(folder, rows)


def _draw(size: int, holes: float, rng: np.random.Generator, seen: set[str]) -> Example:
    """A lake that was not seen before and has a way."""

    def lake() -> list[str]:
        fields = np.where(rng.random((size, size)) < holes, "H", "F")
        fields.flat[0], fields.flat[-1] = "S", "G"
        return ["".join(row) for row in fields]

    world = first(lake, lambda found: "/".join(found) not in seen and bool(shortest_path(found)))
    seen.add("/".join(world))
    path = shortest_path(world)
    columns = {"world": json.dumps({"desc": world}), "path": " ".join(path)}
    return Example(QUESTION, (), str(len(path)), path[0], columns)


def shortest_path(world: Sequence[str]) -> list[str]:
    """The fewest moves from start to goal around the holes, the first by the order of ``MOVES`` at each field where
    several are as short; empty if there is no way."""
    fields = {(row, column): mark for row, line in enumerate(world) for column, mark in enumerate(line)}
    start, goal = (next(field for field, mark in fields.items() if mark == wanted) for wanted in "SG")
    left = _distances(fields, goal)
    path, here = list[str](), start
    while here != goal and here in left:
        ways = ((move, there) for move, there in _moves(here) if left.get(there, len(fields)) < left[here])
        move, here = next(ways)
        path.append(move)
    return path


def _distances(fields: dict[Field, str], goal: Field) -> dict[Field, int]:
    """Moves to the goal from each field that has a way."""
    found, queue = {goal: 0}, deque([goal])
    while queue:
        here = queue.popleft()
        for _, there in _moves(here):
            if there not in found and fields.get(there, "H") != "H":
                found[there] = found[here] + 1
                queue.append(there)
    return found


def _moves(field: Field) -> Iterator[tuple[str, Field]]:
    for name, (down, right) in MOVES.items():
        yield name, (field[0] + down, field[1] + right)


def _walked(row: Example, side: int) -> Example:
    """The row as a conversation along its path; the picture at the end of the walk is in no turn."""
    path = str(row.columns["path"]).split()
    turns = [("user", f"{QUESTION}\n<image>"), ("assistant", path[0])]
    for move in path[1:]:
        turns += [("user", "<image>"), ("assistant", move)]
    images = tuple(_pictures(json.loads(str(row.columns["world"])), path[:-1], side))
    return Example(conversation(turns), images, row.answer, path[-1], row.columns)


def _pictures(world: dict[str, Any], path: Sequence[str], side: int) -> Iterator[bytes]:
    """The lake at the start, and after each move."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import gymnasium
    from PIL import Image

    game = gymnasium.make("FrozenLake-v1", **world, is_slippery=False, render_mode="rgb_array")
    try:
        game.reset(seed=0)
        for move in (None, *path):
            if move is not None:
                game.step(list(MOVES).index(move))
            yield png(Image.fromarray(np.asarray(game.render())).resize((side, side), Image.Resampling.BOX))
    finally:
        game.close()


main = partial(run, write_lakes)

if __name__ == "__main__":
    sys.exit(main())
