"""Prompts as turns: plain text, chat messages with text or parts, or ShareGPT conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.errors import DataError
from mmrl.types import DOCUMENT, IMAGE_PLACEHOLDER
from mmrl_datasets.glances import is_filled
from mmrl_datasets.images import KEYS, image_cells

ROLES: Mapping[str, str] = {
    "system": "system", "developer": "system", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "tool": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip
"""Names of speakers in datasets."""
CONVERSATIONS = ("messages", "conversations")
OPENING, CLOSING = "<think>", "</think>"
"""The tags between which most models, and their chat templates, write thoughts."""
_MEDIA = ("video", "audio")
_TEXTS, _IMAGES = ("text", "input_text", "output_text"), ("image", "image_url", "input_image")
"""Types of a message's parts."""
_JSON: Mapping[str, Any] = {"ensure_ascii": False, "default": str, "skipkeys": True}
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thinking_content", "thought", "thoughts")
"""Keys of a message, and types of a part, that hold the thoughts before the assistant's answer."""
_MESSAGE_IMAGES = ("images", "image")
_CALLS = ("tool_calls", "function_call")
_NO_CONTENT = ("id", "tool_call_id", "type", "index", "refusal", "audio", "annotations")
"""Keys that say nothing to a policy."""
_READ = frozenset((*_ROLE_KEYS, *_CONTENT_KEYS, *_MESSAGE_IMAGES, *_CALLS, *_NO_CONTENT))


@dataclass(frozen=True, slots=True)
class InlineImage:
    """An image that stands in the prompt itself instead of a column."""

    cell: Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: texts, in which placeholders may stand, and images in between.

    Attributes:
        thoughts: The assistant's thoughts, between tags, that the pieces begin with; empty if there are none.
        unread: Keys of the message that hold something and are not read.
    """

    role: str
    pieces: tuple[str | InlineImage, ...]
    thoughts: str = ""
    unread: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The turn's texts, joined."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def answer(self) -> str:
        """The text without the thoughts that stood beside it."""
        return self.text.removeprefix(self.thoughts)


def read_turns(value: Any, column: str, where: str) -> tuple[Turn, ...]:
    """The turns of a prompt's cell; text is one user turn.

    Raises:
        DataError: The cell is neither text nor messages, or holds what cannot be used; names row and column.
    """
    where = f"{where}, column {column!r}"
    if isinstance(value, str):
        messages = _parsed(value, column, where)
        return (Turn("user", (value,)),) if messages is None else _turns(messages, where)
    if isinstance(value, list):
        return _turns(value, where)
    raise DataError(
        f"Column {column!r} is null" if value is None else f"Column {column!r} holds {type(value).__name__}, not text",
        where=where,
        possible="text, or a list of messages with role and content, or from and value",
    )


def read_document(value: Any, column: str, where: str) -> Turn:
    """A document's cell as one turn: text, or texts and images in a list, where null is the place of an image.

    Raises:
        DataError: The cell is neither, or holds what cannot be used; names row and column.
    """
    where = f"{where}, column {column!r}"
    if isinstance(value, str):
        return Turn(DOCUMENT, (value,))
    if isinstance(value, list) and value:
        return Turn(DOCUMENT, tuple(IMAGE_PLACEHOLDER if part is None else _piece(part, where) for part in value))
    what = "is null" if value is None else f"holds {'an empty list' if value == [] else type(value).__name__}, not text"
    raise DataError(f"Column {column!r} {what}", where=where, possible="text, or a list of texts and images")


def _parsed(text: str, column: str, where: str) -> list[Any] | None:
    """Messages that are written as JSON, as csv tables have them; None for text."""
    must_be = column in CONVERSATIONS
    if not (must_be or text.lstrip()[:1] == "["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if must_be:
            raise DataError(f"The text is no JSON list of messages: {error}", where=where) from error
        return None
    is_messages = isinstance(value, list) and bool(value) and all(_key(each, _ROLE_KEYS) for each in value)
    if must_be and not is_messages:
        raise DataError("The JSON is no list of messages", where=where)
    return value if is_messages else None


def _turns(messages: list[Any], where: str) -> tuple[Turn, ...]:
    if not messages:
        raise DataError("The list of messages is empty", where=where)
    return tuple(_turn(message, f"{where}, message {index}") for index, message in enumerate(messages))


def _turn(message: Any, where: str) -> Turn:
    role, content = _key(message, _ROLE_KEYS), _key(message, _CONTENT_KEYS)
    if role is None or content is None:
        raise DataError("This is no message", where=where, possible='{"role", "content"} or {"from", "value"}')
    said, held = message[role], message[content]
    if not isinstance(said, str) or said.lower() not in ROLES:
        raise DataError(f"The role {_shown(said)} is not known", where=where, possible=", ".join(ROLES))
    calls = next((found for key in _CALLS if isinstance(found := message.get(key), list | Mapping) and found), None)
    if calls is not None:
        before = [held] if isinstance(held, str) and held else held if isinstance(held, list) else []
        held = [*before, *(["\n"] if before else []), _calls(calls, where)]
    if isinstance(held, str):
        held = [written_call(held) if said.lower() == "function_call" else held]
    if not isinstance(held, list):
        what = f"The message holds {'null' if held is None else type(held).__name__}"
        raise DataError(what, where=where, possible="text, or parts")
    return _made(ROLES[said.lower()], message, held, where)


def _made(role: str, message: Mapping[str, Any], parts: Sequence[Any], where: str) -> Turn:
    """The turn of these parts, with the thoughts and the images that stand beside them."""
    beside = [text for key in _THOUGHTS for text in _texts(message.get(key))] if role == "assistant" else []
    within = [_thought(part) for part in parts] if role == "assistant" else []
    pieces = [_piece(part, where) for part in parts if not (role == "assistant" and _thought(part))]
    pieces = _with_images(pieces, [cell for key in _MESSAGE_IMAGES for cell in image_cells(message.get(key))], where)
    said = [text.strip("\n") for text in (*beside, *within) if text.strip()]
    thoughts = ""
    opening = pieces[0] if pieces and isinstance(pieces[0], str) else ""
    if said and not opening.lstrip().startswith(OPENING):
        thoughts = f"{OPENING}\n{_joined(said)}\n{CLOSING}\n\n"
        pieces = [thoughts, opening.lstrip("\n"), *pieces[1:]] if opening else [thoughts, *pieces]
    read = {*_READ, *_THOUGHTS} if role == "assistant" else _READ
    lost = {key for key in _CALLS if isinstance(message.get(key), str)}
    lost |= {key for key in _THOUGHTS if not _texts(message.get(key))}
    unread = tuple(str(key) for key, value in message.items() if key not in read - lost and is_filled(value))
    return Turn(role, tuple(pieces), thoughts, unread)


def _joined(texts: Sequence[str]) -> str:
    """The texts, each once: some programs write thoughts under two keys."""
    return "\n".join(dict.fromkeys(texts))


def _texts(value: Any) -> list[str]:
    """A text, or the texts of a list of texts and parts; empty if one of them has none."""
    parts = value if isinstance(value, list) else [value]
    texts = [part if isinstance(part, str) else _text_of(part) for part in parts]
    return texts if all(texts) else []


def _thought(part: Any) -> str:
    """The text of a part that holds thoughts; empty for any other."""
    return _text_of(part) if isinstance(part, Mapping) and part.get("type") in _THOUGHTS else ""


def _text_of(part: Any) -> str:
    held = part if isinstance(part, Mapping) else {}
    return next((text for key in ("text", "content", *_THOUGHTS) if isinstance(text := held.get(key), str)), "")


def _with_images(pieces: list[str | InlineImage], cells: Sequence[Any], where: str) -> list[str | InlineImage]:
    """The pieces with a message's own images at its placeholders, or before its text if it has none."""
    if not cells:
        return pieces
    texts = [piece.split(IMAGE_PLACEHOLDER) if isinstance(piece, str) else [piece] for piece in pieces]
    count = sum(len(each) - 1 for each in texts)
    if count not in (0, len(cells)):
        what = f"The message has {count} {IMAGE_PLACEHOLDER} and {len(cells)} images of its own"
        raise DataError(what, where=where, possible=f"one {IMAGE_PLACEHOLDER} per image, or none")
    images = iter([InlineImage(cell) for cell in cells])
    placed = [*images, *pieces] if not count else []
    for each in texts if count else ():
        placed += [each[0], *(piece for text in each[1:] for piece in (next(images), text))]
    return [piece for piece in placed if piece != ""]


def _calls(calls: Any, where: str) -> str:
    """The calls of a message in OpenAI's form, as text; tables give every call all arguments, most of them null."""
    found = list[str]()
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            possible = '{"function": {"name": ..., "arguments": ...}}'
            raise DataError("A tool call of the message has no name", where=where, possible=possible)
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps({key: value for key, value in arguments.items() if value is not None}, **_JSON)
        name = json.dumps(function["name"], **_JSON)
        found.append(written_call(f'{{"name": {name}, "arguments": {arguments or "{}"}}}'))
    return "\n".join(found)


def written_call(call: str) -> str:
    """A call's JSON between the tags with which most models write calls."""
    return f"<tool_call>\n{call}\n</tool_call>"


def _piece(part: Any, where: str) -> str | InlineImage:
    """A part of a message. Tables give every part all keys, most of them null."""
    if isinstance(part, str):
        return part
    held = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = held.get("type", next((name for name in ("text", "image", "image_url", *_MEDIA) if name in held), None))
    if not isinstance(kind, str):
        kind = _shown(kind)
    if kind in _TEXTS and isinstance(held.get("text"), str):
        return str(held["text"])
    if kind in _IMAGES:
        return _inline(held)
    if any(medium in kind for medium in _MEDIA):
        raise refused_media(kind, where)
    raise DataError(
        f"A part of the message is of no known type: {kind:.50}",
        where=where,
        possible='{"type": "text", "text": ...} or {"type": "image"}',
    )


def _inline(part: Mapping[str, Any]) -> str | InlineImage:
    return InlineImage(part) if part.keys() & set(KEYS) else IMAGE_PLACEHOLDER


def refused_media(what: str, where: str) -> DataError:
    """Why video and audio are not read."""
    return DataError(
        f"The row has {what}, and only text and images can be used",
        where=where,
        possible="text and images",
        remedy="replace a video by some of its frames as images: the positions that sampler and learner give to tokens "
        "after a video differ. Remove or rename the column if it holds something else",
    )


def _shown(value: Any) -> str:
    return repr(value[:50]) if isinstance(value, str) else type(value).__name__


def _key(message: Any, names: tuple[str, ...]) -> str | None:
    """Which of these a message has; tables with both kinds fill one with null."""
    if not isinstance(message, Mapping):
        return None
    present = [name for name in names if name in message]
    return next((name for name in present if message[name] is not None), present[0] if present else None)


def question_of(turns: Sequence[Any]) -> int | None:
    """The place of the last user turn, if the assistant is to speak after these turns or messages; else None.

    Only answers of tools, and what asked for them, may follow it.
    """
    roles = [turn.role for turn in turns]
    if not roles or roles[-1] not in ("user", "tool") or "user" not in roles:
        return None
    return len(roles) - 1 - roles[::-1].index("user")
