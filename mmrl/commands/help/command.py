"""``mmrl help``."""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module

from mmrl.commands.arguments import add_json
from mmrl.commands.catalogue import COMMANDS, EXIT_CODES
from mmrl.commands.help.passage import Passage
from mmrl.commands.help.ranking import Hit, Index
from mmrl.commands.printing import answer
from mmrl.errors import ConfigError, MMRLError

LIMIT = 5
LINES = 6
"""Most lines that are shown of a passage."""
WIDTHS = 40, 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    text = "a question, a key, a command or an exit code; without words: the list of commands"
    parser.add_argument("words", nargs="*", metavar="WORDS", help=text)
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="N", help=f"most passages ({LIMIT})")


def run(arguments: argparse.Namespace) -> int:
    words = " ".join(arguments.words).strip()
    if not words:
        from mmrl.commands.cli import main

        return main(["--help"])
    hits = search(words, max(arguments.limit, 1))
    data = [{"title": h.passage.title, "place": h.passage.place, "blocks": h.blocks, "score": h.score} for h in hits]
    answer(data, _lines(hits), as_json=arguments.json, styled=_styled)
    return 0


def search(words: str, limit: int = LIMIT) -> list[Hit]:
    """The passages that answer some words best.

    Raises:
        ConfigError: No passage has any of them, or they name an exit code that no command of mmrl has.
    """
    if (code := re.fullmatch(r"(?:exit ?)?code (-?\d{1,6})", words.strip().lower())) and int(code[1]) not in EXIT_CODES:
        raise ConfigError(
            f"mmrl has no exit code {code[1]}",
            where="mmrl help",
            possible=", ".join(f"{number} {text}" for number, text in EXIT_CODES.items()),
            remedy="from 128 on it is 128 + a signal's number: 137 is a kill, such as Linux's when memory runs out",
        )
    index = Index(list(passages()))
    if hits := index.search(words, limit):
        return hits
    near = ", ".join(index.near(words))
    raise ConfigError(
        f"no page, key or command has {words!r}",
        where="mmrl help",
        possible=f"words that look alike: {near}" if near else "",
        remedy="try other words, or `mmrl --help` for the commands",
    )


def passages() -> Iterator[Passage]:
    """All that can be found."""
    from mmrl.commands.help import keys, pages

    yield from _commands()
    yield from _exit_codes()
    yield from keys.passages()
    yield from pages.passages()


def _commands() -> Iterator[Passage]:
    """Each command with what its options do."""
    for name, (module, text) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"mmrl {name}", add_help=False, epilog="")
        import_module(f"mmrl.commands.{module}").add_arguments(parser)
        blocks = [f"{text}.", *_options(parser.format_help())]
        names, options = (name, f"mmrl {name}"), tuple(re.findall(r"^--([a-z-]+)", "\n".join(blocks), re.MULTILINE))
        yield Passage(f"mmrl {name}", f"a command; `mmrl {name} --help`", tuple(blocks), names, options, "command")


def _options(text: str) -> Iterator[str]:
    """The entries of a parser's help: an option or argument, and what it does."""
    for part in re.split(r"\n  (?=\S)", text.partition("\n\n")[2])[1:]:
        yield " ".join(part.partition("\n\n")[0].split())


def _exit_codes() -> Iterator[Passage]:
    """Each exit code with the errors that have it."""
    for code, text in EXIT_CODES.items():
        kinds = [kind for kind in _kinds(MMRLError) if kind.exit_code == code]
        blocks = [f"{text}.", *(f"{kind.__name__}: {inspect.getdoc(kind)}".split("\n\n")[0] for kind in kinds)]
        names = (
            f"exit code {code}",
            f"exit {code}",
            f"code {code}",
            f"exitcode {code}",
            f"error {code}",
            f"error code {code}",
        )
        yield Passage(f"exit code {code}: {text}", "`mmrl --help`", tuple(blocks), names, (), "code")


def _kinds(kind: type[MMRLError]) -> Iterator[type[MMRLError]]:
    for each in kind.__subclasses__():
        if each.__module__ == MMRLError.__module__:
            yield each
            yield from _kinds(each)


def _lines(hits: Sequence[Hit]) -> Iterator[str]:
    """Titles, places and texts, as wide as the terminal; titles alone are not indented."""
    width = min(max(shutil.get_terminal_size((100, 0)).columns, WIDTHS[0]), WIDTHS[1])
    for number, hit in enumerate(hits):
        if number:
            yield ""
        yield from textwrap.wrap(hit.passage.title, width)
        yield f"  {hit.passage.place}"
        yield from _shown(hit.blocks, width)


def _styled(line: str) -> str:
    """The line, bold if it is a title's."""
    return f"\x1b[1m{line}\x1b[0m" if line and not line.startswith(" ") else line


def _shown(blocks: Sequence[str], width: int) -> Iterator[str]:
    """The first lines of the blocks that answer best; code keeps its lines."""
    lines: list[str] = []
    for block in blocks:
        if len(lines) >= LINES:
            break
        is_code = block.startswith("    ")
        lines += block.splitlines() if is_code else textwrap.wrap(block, width - 4, break_long_words=False)
    for line in lines[:LINES]:
        yield f"    {line}" if not line.startswith("    ") else line
    if len(lines) > LINES:
        yield "    ..."
