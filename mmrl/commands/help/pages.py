"""The pages that are installed with the package, cut at their headings.

A wheel has them in ``mmrl/pages``, in the folders that they have in the repository; a checkout has them in its root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import mmrl
from mmrl.commands.help.passage import Passage

PAGES = (
    "README.md",
    "mmrl/README.md",
    "mmrl/api/README.md",
    "mmrl/commands/README.md",
    "mmrl/engine/README.md",
    "mmrl/engine/FAMILIES.md",
    "mmrl/engine/adding_a_family.md",
    "mmrl/runs/README.md",
    "mmrl/viewer/README.md",
    "plugins/README.md",
    "plugins/ENVIRONMENTS.md",
    "plugins/WRITING.md",
    "datasets/README.md",
    "examples/README.md",
    "examples/cluster.md",
    "examples/episodes.md",
)
"""The pages for users; `pyproject.toml` puts the same ones into a wheel."""
INSTALLED = "pages"
_HEADING = re.compile(r"(#{1,6}) (.+)")
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")


def root() -> Path:
    """The folder that the pages' names start from."""
    package = Path(mmrl.__file__).parent
    return package / INSTALLED if (package / INSTALLED).is_dir() else package.parent


def passages() -> Iterator[Passage]:
    """The parts of every page that is there."""
    for name in PAGES:
        if (path := root() / name).is_file():
            yield from sections(path.read_text(encoding="utf-8"), path)


def sections(text: str, path: Path) -> Iterator[Passage]:
    """A passage for each heading of a page, with what stands below it and above the next one."""
    headings: list[tuple[int, str]] = []
    lines: list[str] = []
    start, is_code = 1, False

    def passage() -> Iterator[Passage]:
        if headings and (found := tuple(_blocks(lines))):
            yield Passage(" > ".join(title for _, title in headings), f"{path}:{start}", found)

    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.startswith("```")
        if not is_code and (heading := _HEADING.fullmatch(line)):
            yield from passage()
            level = len(heading[1])
            headings = [each for each in headings if each[0] < level] + [(level, _plain(heading[2]))]
            lines, start = [], number
        else:
            lines.append(line)
    yield from passage()


def _blocks(lines: list[str]) -> Iterator[str]:
    """Paragraphs, entries of lists, rows of tables, and code as it stands."""
    block: list[str] = []
    is_code, head = False, ""

    def whole() -> Iterator[str]:
        if block:
            yield _plain(" ".join(line.strip() for line in block))
            block.clear()

    for line in lines:
        if line.startswith("```"):
            if is_code and block:
                yield "\n".join(block)
                block.clear()
            else:
                yield from whole()
            is_code = not is_code
        elif is_code:
            block.append(f"    {line}")
        elif line.startswith("|"):
            yield from whole()
            if set(line) <= set("|-: "):
                continue
            cells = [_plain(cell) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            head, row = (head, cells) if head else (line, [])
            if row and any(row):
                yield ": ".join(filter(None, [row[0], "; ".join(filter(None, row[1:]))]))
        else:
            head = "" if not line.strip() else head
            if not line.strip() or re.match(r"\s*(?:[-*]|\d+\.) ", line):
                yield from whole()
            if line.strip():
                block.append(line)
    yield from whole()


def _plain(text: str) -> str:
    """Text without links, pictures and the marks of stress."""
    return _LINK.sub(r"\1", text).replace("**", "").replace("\\|", "|").strip()
