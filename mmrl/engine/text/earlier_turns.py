"""Earlier turns of a conversation that is shown to the policy, whose thoughts a chat template may remove.

Such a turn is learned as the template writes it: its answer, after a head that opens no thought.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mmrl.data.chat_messages import MARK
from mmrl.engine.text.chat_template import ChatTemplate
from mmrl.engine.text.turn_proof import prefill
from mmrl.engine.text.turns import TurnSuffix
from mmrl.errors import DataError
from mmrl.types import Message

Render = Callable[[Sequence[Message]], str]
"""The text of a conversation whose turns of the assistant are written as they are."""


class EarlierTurns:
    """The earlier turns of one conversation.

    Args:
        text: The conversation up to the last turn's head, as the template writes it.
        end: The text of the token that ends a turn.
        where: The row, for errors.
    """

    def __init__(self, template: ChatTemplate, suffix: TurnSuffix, text: str, end: str, where: str) -> None:
        self._template, self._suffix, self._text, self._end, self._where = template, suffix, text, end, where

    def answers(self, messages: Sequence[Message], places: Sequence[int], render: Render) -> Mapping[int, str]:
        """The turns that lose their thoughts, by place, as the template writes them; a turn without a thought too.

        Raises:
            DataError: The template writes one of them otherwise, or nothing of it.
        """
        marks, found, at = self._template.thoughts, dict[int, str](), 0
        marked = list(messages)
        for place in places:
            marked[place] = replace(messages[place], content=marks.around(f"{MARK}{place}.", "So."))
        shown = render(marked) if places else ""
        for place in (place for place in places if f"{MARK}{place}." not in shown):
            found[place], at = self._written(messages[place].content, at)
        return found

    def _written(self, text: str, at: int) -> tuple[str, int]:
        """The answer of a turn, and the place of its end in the conversation."""
        closing = self._template.thoughts.closing
        answers = text.rpartition(closing)[2].lstrip(), (text.partition(closing)[2] or text).lstrip()
        if not answers[0]:
            raise DataError(
                "an earlier turn has nothing but a thought, which the chat template removes",
                where=self._where,
                remedy="mend or remove the row, or set algorithm.turns to last",
            )
        for form in (*answers, *(each.rstrip() for each in answers)):  # some templates trim
            piece = f"{self._header}{self._template.spelled(form)}{self._end}"
            if (begin := self._text.find(piece, at)) >= 0:
                return form, begin + len(piece)
        raise DataError(
            "the chat template removes the thoughts of earlier turns, and rewrites one of these turns beyond that",
            where=self._where,
            possible=f"a thought that ends with {closing} and an answer, or an answer alone",
            remedy="mend or remove the row, or set algorithm.turns to last",
        )

    @property
    def _header(self) -> str:
        """The head of a turn after the end of the message before it, without the opening of a thought."""
        after = self._suffix.text([self._template.message("user", ("?",))])
        return after.removesuffix(prefill(self._template)).rpartition(self._end)[2]
