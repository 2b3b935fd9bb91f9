"""A model's chat template: messages in, text and ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmrl.data.chat_messages import CLOSING, OPENING, ChatMessages, Filled
from mmrl.engine.network.folder import ModelFolder


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Marks around a thought of the policy.

    Attributes:
        opening: Begins a thought.
        closing: Ends it.
        gap: Stands between the closing and the answer.
    """

    opening: str
    closing: str
    gap: str

    def around(self, thought: str, answer: str, *, opened: bool = False) -> str:
        """A turn with a thought; without its opening if that is ``opened`` already."""
        return ("" if opened else f"{self.opening}\n") + f"{thought}\n{self.closing}{self.gap}{answer}"


TAGS = ThoughtMarks(OPENING, CLOSING, "\n\n")
CHANNEL = ThoughtMarks("<|channel>thought", "<channel|>", "")
"""Marks of Gemma 4, which are special tokens."""


class ChatTemplate(ChatMessages):
    """The chat template of a model folder, with its tokenizer.

    Args:
        tools: JSON schemas of tools that the template writes into each conversation.
    """

    def __init__(self, folder: ModelFolder, tools: Sequence[Any] = ()) -> None:
        super().__init__(folder.tokenizer, in_parts=folder.family.vision)
        self._folder, self._tools = folder, list(tools)

    @property
    def folder(self) -> ModelFolder:
        """The model's folder."""
        return self._folder

    @property
    def source(self) -> str:
        """The template itself; all of them if it has several by name."""
        return self._folder.template_source

    @property
    def where(self) -> str:
        """The template's file or model, for messages."""
        return self._folder.template.where or f"chat template of {self._folder.name}"

    @cached_property
    def thoughts(self) -> ThoughtMarks:
        """The marks of thoughts that the template reads."""
        return CHANNEL if CHANNEL.closing in self.source else TAGS

    def fill(self, messages: Sequence[Filled]) -> str:
        """The conversation with the head of the policy's next turn; the template's exceptions are its own."""
        return self._filled(messages, opens=True)

    def fill_whole(self, messages: Sequence[Filled]) -> str:
        """The conversation alone, which ends as the template closes it; the template's exceptions are its own."""
        return self._filled(messages, opens=False)

    def _filled(self, messages: Sequence[Filled], *, opens: bool) -> str:
        shown = {"tools": self._tools} if self._tools else {}
        return self._folder.fill_template(messages, add_generation_prompt=opens, **shown)
