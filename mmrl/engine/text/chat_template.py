"""A model's chat template: messages in, text and ids out. Texts of messages never become special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.data.templates import bounded
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.vocabulary import special_tokens
from mmrl.errors import DataError
from mmrl.types import IMAGE_PLACEHOLDER, Message

_INVISIBLE = "\u200b"
"""A zero-width space. Within a special token's text it leaves the text readable, and makes it no token."""

Filled = Mapping[str, Any]
"""A message as templates read it."""


class ChatTemplate:
    """The chat template of a model folder, with its tokenizer.

    Args:
        tools: JSON schemas of tools that the template writes into each conversation.

    Attributes:
        special_ids: Ids of all special tokens.
    """

    def __init__(self, folder: ModelFolder, tools: Sequence[Any] = ()) -> None:
        self._folder, self._tools = folder, list(tools)
        special = special_tokens(folder.tokenizer)
        self.special_ids = frozenset(special.values())
        # Longest first: a token may begin with another.
        names = sorted(special, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @property
    def folder(self) -> ModelFolder:
        """The model's folder."""
        return self._folder

    @property
    def source(self) -> str:
        """The template itself; all of them if it has several by name."""
        return str(getattr(self._folder.processor, "chat_template", None) or self._folder.tokenizer.chat_template)

    def fill(self, messages: Sequence[Filled]) -> str:
        """The conversation with the head of the policy's next turn; the template's exceptions are its own."""
        renderer = self._folder.processor or self._folder.tokenizer
        shown = {"tools": self._tools} if self._tools else {}
        return str(renderer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **shown))

    def try_out(self) -> None:
        """Raise DataError if the template runs for ever on one of a few conversations; rows are not watched."""
        text = f"{IMAGE_PLACEHOLDER * self._folder.family.vision}What is 2 + 2?"
        for roles in ("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool"):
            try:
                with bounded():
                    self.fill([self.read(Message(role, text)) for role in roles])
            except OverflowError as error:
                raise DataError(
                    f"the model's chat template fails: {error}",
                    where=self._folder.path,
                    remedy="mend chat_template.jinja there, or choose another model",
                ) from error
            except Exception:  # a row with these roles will be told
                pass

    def read(self, message: Message) -> Filled:
        """A dataset's message, each ``<image>`` an image of a vision-language model."""
        if not self._folder.family.vision:
            return self.message(message.role, (message.content,))
        parts = re.split(f"({re.escape(IMAGE_PLACEHOLDER)})", message.content)
        return self.message(message.role, [None if part == IMAGE_PLACEHOLDER else part for part in parts if part])

    def message(self, role: str, content: Sequence[object], *, as_text: bool = False) -> Filled:
        """A message of texts and images. Neighbouring texts are one: together they could spell a special token.

        Args:
            content: Text where it is a string, else an image.
            as_text: True to give texts as one string, also for a vision-language model.
        """
        role, content = self.spelled(role), _with_joined_texts(content)
        if as_text or not self._folder.family.vision:
            return {"role": role, "content": self.spelled("".join(part for part in content if isinstance(part, str)))}
        parts = [
            {"type": "text", "text": self.spelled(part)} if isinstance(part, str) else {"type": "image"}
            for part in content
        ]
        return {"role": role, "content": parts}

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
        return list(self._folder.tokenizer(text, add_special_tokens=False)["input_ids"])

    def names(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens."""
        return list(self._folder.tokenizer.convert_ids_to_tokens(list(ids)))


def _with_joined_texts(content: Sequence[object]) -> list[object]:
    """The content with one text for each run of texts."""
    found = list[object]()
    for part in content:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found
