"""Messages as chat templates read them. Texts of messages never become special tokens."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mmrl.errors import DataError
from mmrl.types import IMAGE_PLACEHOLDER, Message

MARK = "Uq7Vx2Kz"
"""Stands for a turn of the policy."""
QUESTION = "What do you see?"
OPENING, CLOSING = "<think>", "</think>"
"""The marks of thoughts that most templates write and read."""
_INVISIBLE = "\u200b"
"""A zero-width space. Within a special token's text it leaves the text readable, and makes it no token."""
_THOUGHT = re.compile(rf"\s*{OPENING}(.*?){CLOSING}\s*", re.DOTALL)

Filled = Mapping[str, Any]
"""A message as templates read it."""


class ChatMessages(ABC):
    """The messages of a model's chat template.

    Args:
        in_parts: True if the template reads a message's content as a list of texts and images.

    Attributes:
        special_ids: Ids of all special tokens.
    """

    def __init__(self, tokenizer: Any, *, in_parts: bool) -> None:
        self._tokenizer, self._in_parts = tokenizer, in_parts
        special = special_tokens(tokenizer)
        self.special_ids = frozenset(special.values())
        # Longest first: a token may begin with another.
        names = sorted(special, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @property
    @abstractmethod
    def source(self) -> str:
        """The template itself; all of them if it has several by name."""

    @abstractmethod
    def fill(self, messages: Sequence[Filled]) -> str:
        """A conversation as the template writes it; the template's exceptions are its own."""

    def read(self, message: Message, *, has_images: bool = True) -> Filled:
        """A dataset's message, each ``<image>`` an image of a vision-language model.

        Args:
            has_images: False if its row has none: ``<image>`` is then a text like others.
        """
        thought, text = self._parted(message.content) if message.role == "assistant" else (None, message.content)
        parts: list[object] = [text] if text or not self._in_parts else []
        if self._in_parts and has_images:
            split = re.split(f"({re.escape(IMAGE_PLACEHOLDER)})", text)
            parts = [None if part == IMAGE_PLACEHOLDER else part for part in split if part]
        filled = self.message(message.role, parts)
        return filled if thought is None else {**filled, "reasoning_content": self.spelled(thought)}

    def message(self, role: str, content: Sequence[object], *, as_text: bool = False) -> Filled:
        """A message of texts and images. Neighbouring texts are one: together they could spell a special token.

        Args:
            content: Text where it is a string, else an image.
            as_text: True to give texts as one string, also for a vision-language model.
        """
        role, content = self.spelled(role), _with_joined_texts(content)
        if as_text or not self._in_parts:
            return {"role": role, "content": self.spelled("".join(part for part in content if isinstance(part, str)))}
        parts = [
            {"type": "text", "text": self.spelled(part)} if isinstance(part, str) else {"type": "image"}
            for part in content
        ]
        return {"role": role, "content": parts}

    def said(self, text: str) -> Filled:
        """A turn of the policy as it is, so that it may hold marks of thoughts that are special tokens."""
        thought, text = self._parted(text)
        message = {"role": "assistant", "content": [{"type": "text", "text": text}] if self._in_parts else text}
        return message if thought is None else {**message, "reasoning_content": thought}

    def _parted(self, text: str) -> tuple[str | None, str]:
        """A turn's thought and its answer; None and the whole text if the template wants them together."""
        if not self._wants_thoughts_apart or (found := _THOUGHT.match(text)) is None:
            return None, text
        return found[1], text[found.end() :]

    @cached_property
    def _wants_thoughts_apart(self) -> bool:
        """True if the template reads a turn's thought from ``reasoning_content`` alone.

        It then writes a thought of its own, an empty one, before the one that stands in the content.
        """
        if "reasoning_content" not in self.source:
            return False
        text = f"{OPENING}\n{MARK}\n{CLOSING}\n\nSo."
        turn = {"role": "assistant", "content": [{"type": "text", "text": text}] if self._in_parts else text}
        try:
            filled = self.fill([self.message("user", (QUESTION,)), turn])
        except Exception:  # the template is the model's: any exception is its own
            return False
        before, mark, _ = filled.partition(MARK)
        return bool(mark) and before.rpartition(QUESTION)[2].count(OPENING) > 1

    def spelled(self, text: str) -> str:
        """The text with an invisible character in each part that the tokenizer would read as a special token."""
        return self._special_text.sub(lambda match: f"{match[0][:1]}{_INVISIBLE}{match[0][1:]}", text)

    def without_special(self, text: str) -> tuple[str, list[str]]:
        """The text without special tokens, and these."""
        return self._special_text.sub("", text), self._special_text.findall(text)

    def tokenize(self, text: str, where: str) -> list[int]:
        """Ids of a rendered text, one for each image.

        Raises:
            DataError: The text holds half of a character.
        """
        if lone := re.search("[\ud800-\udfff]", text):
            raise DataError(
                f"the text holds U+{ord(lone[0]):04X}, half of a character",
                where=where,
                possible="text that can be written as UTF-8",
                remedy="mend the row: write the character itself, or the escapes of both its halves",
            )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def names(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens."""
        return list(self._tokenizer.convert_ids_to_tokens(list(ids)))


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Ids of the tokens that have a meaning of their own, by their text.

    These are the tokens that the tokenizer calls special, and all that look like ``<|...|>``, with either bar, such as
    the marks of turns of DeepSeek-R1. Plain tags such as ``<think>`` are ordinary text.
    """
    added = {str(token): (index, token.special) for index, token in tokenizer.added_tokens_decoder.items()}
    special = {text: index for text, (index, named) in added.items() if named or re.fullmatch(r"<[|｜].*[|｜]>", text)}
    names = [name for name in tokenizer.all_special_tokens if name]
    return special | dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))


def _with_joined_texts(content: Sequence[object]) -> list[object]:
    """The content with one text for each run of texts."""
    found = list[object]()
    for part in content:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found
