"""One row of the proof, and the table that rows make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "bad", "skipped"]


@dataclass(frozen=True, slots=True)
class Row:
    """What was looked at, and what was found.

    Attributes:
        area: The section.
        value: Numbers with their units; empty where nothing was measured.
        why: Why it is bad or was skipped, or what a number is to be compared with.
    """

    area: str
    name: str
    status: Status
    value: str = ""
    why: str = ""


def append(path: Path, row: Row) -> None:
    """Add a row to a file of JSON lines; it is there when this returns."""
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(asdict(row)), file=file, flush=True)


def read(path: Path) -> list[Row]:
    """The rows of such a file, without a last line that is still being written."""
    whole = path.read_text("utf-8").rpartition("\n")[0]
    return [Row(**json.loads(line)) for line in whole.splitlines()]


def markdown(rows: Iterable[Row]) -> str:
    """A table for people."""
    lines = ["| | area | what | found | why |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row.status, row.area, row.name, row.value, row.why)
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def counted(rows: Sequence[Row]) -> str:
    """How many rows there are of each status."""
    count = {status: sum(row.status == status for row in rows) for status in ("ok", "bad", "skipped")}
    return ", ".join(f"{number} {status}" for status, number in count.items())
