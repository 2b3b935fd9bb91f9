"""Drawn windows to point at and to operate, for policies that act on graphical interfaces.

    python -m mmrl_datasets.screens OUT

| task | question | what is right |
|---|---|---|
| point | Click B. | one click into the element of this name: the answer is its box, for the reward ``point_in_box`` |
| tick | Tick B. | a click into the check box, and one on OK |
| type | Type 7 into B. | a click into the field, the text, and a click on OK |
| choose | Choose D in B. | a click on the list, which opens, perhaps scrolling, a click on the option, and one on OK |

``points`` and ``test_points`` ask for one click and show their window as an image. ``train`` and ``test`` have the
other tasks: a window and its goal in the column ``screen``, which the environment ``screens`` shows. ``warmup`` has all
four, as conversations with a screenshot after each action.

Windows are drawn at random from the seed: which elements, where in a grid of cells, and what the check boxes and fields
that are not asked about have at the start. No two rows have the same first picture. What a random model of less than a
million parameters cannot learn in minutes is made easy: a cell is as large as an image token of Qwen2.5-VL, each name
has a colour of its own beside its letter, the background tells places apart, and a click is written with the name of
what it is meant for: ``click(B,13,41)``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from mmrl.errors import DataError
from mmrl_datasets.command import run
from mmrl_datasets.layout import Belongs, Example, draw_splits, png, write_splits
from mmrl_datasets.pages import conversation
from mmrl_environments.screens import Task
from mmrl_environments.windows import ON, Element, Kind, Layout, Window, centre_of

COLOURS = {
    "A": "#e02020", "B": "#20b020", "D": "#f0e020", "K": "#3050f0", "T": "#20d8e8", "X": "#e030d0",
}  # fmt: skip
"""Names of elements and options, and their colours."""
OK = "OK"
TASKS: dict[str, Kind] = {"tick": "check_box", "type": "field", "choose": "list"}
"""Tasks of several actions, and the kind of element that each is about."""
KINDS: tuple[Kind, ...] = ("button", "check_box", "field", "list")
CELL = 28
"""Side of a cell in pixels: an image token of Qwen2.5-VL."""
_BOX = (1, 4, 25, 23)
"""An element in its cell."""


def write_screens(
    folder: Path,
    *,
    train: int = 1000,
    points: int = 1000,
    test: int = 200,
    warmup: int = 2000,
    cells: int = 2,
    elements: int = 3,
    seed: int = 0,
) -> None:
    """Write ``train``, ``test``, ``points``, ``test_points`` and, if asked for, ``warmup``, as parquet files.

    Args:
        folder: Folder of the files; it holds nothing else under these names.
        train: Training rows of several actions.
        points: Training rows of one click.
        test: Held-out rows, and as many of one click.
        warmup: Rows for a supervised warm-up, in other windows than the rest.
        cells: Cells in a row of the grid, and rows.
        elements: Elements in a window, the button OK included where there is one.
        seed: Decides every draw.

    Raises:
        DataError: An option is out of range, or ``folder`` holds other rows.
    """
    if not (2 <= cells <= 8 and 2 <= elements <= min(cells**2, len(COLOURS) - 1)):
        what = "The screens cannot be drawn with these options"
        raise DataError(what, possible=f"cells 2 to 8, elements 2 to {min(cells**2, len(COLOURS) - 1)}")
    splits = dict[str, list[Example]]()
    for number, ((draw, train_split, test_split), count) in enumerate(zip(_PARTS, (points, train), strict=True)):
        drawn = draw_splits(
            train=count, test=test, warmup=warmup // 2, seed=2 * seed + number, draw=partial(draw, cells, elements)
        )
        splits |= {train_split: drawn["train"], test_split: drawn["test"]}
        splits["warmup"] = [*splits.get("warmup", []), *drawn["warmup"]]
    splits["warmup"] = [_played(row) for row in splits["warmup"]]
    for name in ("train", "test"):
        splits[name] = [replace(row, images=()) for row in splits[name]]
    write_splits(folder, splits)


def _asked(cells: int, elements: int, rng: np.random.Generator, belongs: Belongs) -> Example:
    """A row of one click."""
    names = rng.permutation([*COLOURS])[:elements]
    layout = _layout([(KINDS[rng.integers(len(KINDS))], str(name)) for name in names], cells, rng)
    asked = layout.elements[0]
    columns = {"screen": layout.model_dump_json(), "task": "point"}
    question, answer = f"Click {asked.name}.\n<image>", json.dumps([*asked.box])
    return Example(question, (png(Window(layout).draw()),), answer, click(asked.centre, asked.name), columns)


def _given(cells: int, elements: int, rng: np.random.Generator, belongs: Belongs) -> Example:
    """A row of several actions, with the first picture and the first action."""
    name = [*TASKS][rng.integers(len(TASKS))]
    names = [str(each) for each in rng.permutation([*COLOURS])]
    others = [[*TASKS.values()][rng.integers(len(TASKS))] for _ in range(elements - 2)]
    kinds: list[Kind] = [TASKS[name], "button", *others]
    layout = _layout(list(zip(kinds, [names[0], OK, *names[1:]], strict=False)), cells, rng)
    asked = layout.elements[0]
    if name == "tick":
        question, value = f"Tick {asked.name}.", ON
    elif name == "type":
        value = str(rng.integers(10))
        question = f"Type {value} into {asked.name}."
    else:
        value = asked.options[rng.integers(len(asked.options))]
        question = f"Choose {value} in {asked.name}."
    screen = {**layout.model_dump(mode="json"), "goal": {"press": OK, "values": {asked.name: value}}}
    ((picture, action), *_) = demonstrated(Task.model_validate(screen))
    return Example(question, (picture,), OK, action, {"screen": json.dumps(screen), "task": name})


def _layout(given: Sequence[tuple[Kind, str]], cells: int, rng: np.random.Generator) -> Layout:
    """Elements of these kinds and names in different cells, lists with two options."""
    placed = list[Element]()
    free = [name for name in COLOURS if name not in {name for _, name in given}]
    for (kind, name), cell in zip(given, rng.permutation(cells**2), strict=False):
        row, column = divmod(int(cell), cells)
        x0, y0, x1, y1 = _BOX
        box = column * CELL + x0, row * CELL + y0, column * CELL + x1, row * CELL + y1
        options = tuple(str(each) for each in rng.permutation(free)[:2]) if kind == "list" else ()
        value = _value(kind, rng) if placed else ""  # of what is not asked about
        placed.append(Element(kind=kind, name=name, box=box, options=options, value=value))
    size = cells * CELL, cells * CELL
    return Layout(size=size, elements=tuple(placed), colours=COLOURS, backdrop="gradient")


def _value(kind: Kind, rng: np.random.Generator) -> str:
    """The value at the start: half of the check boxes are ticked, and half of the fields have a digit."""
    possible = {"check_box": ON, "field": str(rng.integers(10))}
    return possible.get(kind, "") if rng.random() < 0.5 else ""


def click(at: tuple[int, int], name: str) -> str:
    """A click as the policy writes it."""
    return f"click({name},{at[0]},{at[1]})"


def demonstrated(task: Task) -> list[tuple[bytes, str]]:
    """The fewest actions that reach the goal, each behind the picture of the window that it acts upon."""
    window, found = Window(task), list[tuple[bytes, str]]()
    elements = {each.name: each for each in task.elements}

    def act(written: str, do: Callable[[], None]) -> None:
        found.append((png(window.draw()), written))
        do()

    def press(at: tuple[int, int], name: str) -> None:
        act(click(at, name), lambda: window.click(*at))

    for name, value in task.goal.values.items():
        press(elements[name].centre, name)
        if elements[name].kind == "field":
            act(f"type({value})", partial(window.type, value))
        elif elements[name].kind == "list":
            while value not in dict(window.rows()):
                act("scroll(down)", partial(window.scroll, down=True))
            press(centre_of(dict(window.rows())[value]), value)
    press(elements[task.goal.press].centre, task.goal.press)
    return found


def _played(row: Example) -> Example:
    """The row as a conversation: each turn shows the window and is answered with the next action."""
    if row.columns["task"] == "point":
        return row
    pictures, acts = zip(*demonstrated(Task.model_validate_json(cast("str", row.columns["screen"]))), strict=True)
    turns = [("user", f"{row.problem}\n<image>"), ("assistant", acts[0])]
    for act in acts[1:]:
        turns += [("user", "<image>"), ("assistant", act)]
    return replace(row, problem=conversation(turns), images=pictures, solution=acts[-1])


_PARTS = ((_asked, "points", "test_points"), (_given, "train", "test"))
"""Functions that draw a row, and the splits that their rows are in beside the warm-up."""

main = partial(run, write_screens)

if __name__ == "__main__":
    sys.exit(main())
