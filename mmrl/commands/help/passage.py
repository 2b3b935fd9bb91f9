"""The piece of text that a search finds and shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text with its place.

    Attributes:
        title: Its headings, the page's first; or the key, the command or the exit code that it describes.
        place: Where to read on: a file with a line, or a command.
        blocks: Its paragraphs, rows of tables and pieces of code, in order.
        names: Words that mean it and nothing else, such as ``learner.lr``; empty for a part of a page.
        aliases: Words that others have for it, such as ``num_generations``.
        kind: ``page``, ``command``, ``code``, ``key``, ``section`` of keys, ``plugin``, ``option`` of one, or ``word``
            of others.
    """

    title: str
    place: str
    blocks: tuple[str, ...]
    names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    kind: str = "page"
