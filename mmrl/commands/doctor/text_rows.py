"""Rows on tokens: turns, and special tokens that texts spell. They need no weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from mmrl.data.chat_messages import special_tokens
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.text.encoding import Encoder
from mmrl.errors import ConfigError, DataError
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.tokens import SEEN, TURNS, counted, differing
from mmrl.types import Content, ImageRef, Message, Prompt


def special_row(folder: ModelFolder, encoder: Encoder) -> ProbeRow:
    """Special tokens that a prompt's text spells, one prompt for each."""
    special = special_tokens(folder.tokenizer)
    own = _num_special(encoder, "x", special.values())
    read = [name for name in special if _num_special(encoder, f"a {name} b", special.values()) != own]
    names = f": {', '.join(read[:4])}" if read else ""
    return counted(
        "special tokens",
        len(read),
        f"of {len(special)} special tokens that a text spells are read as tokens{names}",
        "texts of a dataset, a tool or a page that open an image, end a turn or begin another role",
    )


def _num_special(encoder: Encoder, text: str, special: Iterable[int]) -> int:
    """Special tokens of a prompt with this text; -1 if it is refused, as one with an image token and no image is."""
    try:
        ids = encoder.encode(Prompt("special tokens", (Message("user", text),))).token_ids
    except DataError:
        return -1
    return int(np.isin(ids, list(special)).sum())


def turn_rows(encoder: Encoder, folder: ModelFolder, image: ImageRef | None, *, needed: bool) -> Iterator[ProbeRow]:
    """A turn, an observation and the head of the next turn, with text and with images.

    Args:
        image: One that observations show; None for a model of text.
        needed: True if the run has an environment; without one, turns that cannot be shown stop nothing.
    """
    kinds: list[tuple[str, Content]] = [("text", SEEN)]
    if image is not None and folder.family.vision:
        kinds.append(("images", (SEEN[0], image, SEEN[1], image)))
    for name, content in kinds:
        yield _turn_row(encoder, name, content, needed=needed)


def _turn_row(encoder: Encoder, name: str, content: Content, *, needed: bool) -> ProbeRow:
    probe = f"turns with {name}"
    try:
        role = encoder.ways_of_observations(images=name == "images")[name]
        if accepted := encoder.deviation(images=name == "images"):
            return counted(probe, 0, f"tokens differ but for what environment.keep_thoughts accepts: {accepted}", TURNS)
        appended, whole = encoder.exchange(content, "tool")
    except ConfigError as error:
        told = f"refused: {error.what}" + ("" if needed else "; this run has no environment, and one would be refused")
        return ProbeRow(probe, 1.0, 0.0, "bad" if needed else "ok", told, TURNS)
    moved = "" if role == "tool" else f"; the template carries them in a message of the {role} alone"
    return counted(
        probe,
        differing(appended, whole),
        f"of {len(whole)} tokens of a conversation differ from the template's own{moved}",
        TURNS,
    )
