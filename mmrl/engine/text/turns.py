"""The tokens between two turns of the policy, as a chat template writes them: the turn suffix.

    head of a turn | the policy's text | end of turn | separator, header, observation, its end, head of the next turn

The template is filled with a conversation of which the policy's text is a mark, and all that follows the mark is the
suffix. It begins with a token that ends a turn, so the tokens of the suffix do not depend on the text before it. What
the policy reads is what the template makes of the whole conversation; ``turn_proof`` shows that for each template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from mmrl.data.chat_messages import MARK, QUESTION, Filled
from mmrl.engine.text.chat_template import ChatTemplate
from mmrl.engine.text.turn_proof import Carrier, Deviation, deviation_of
from mmrl.errors import ConfigError, DataError
from mmrl.types import Content

ObservationRole = Literal["auto", "tool", "user"]


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The part of an environment's config that is about messages.

    Attributes:
        observation_role: Role of the messages with observations; auto is the environment's own, or the other one
            where the template cannot carry it.
        keep_thoughts: True to accept a template that removes thoughts (``<think>``) from earlier turns; the policy
            then goes on to read its own.
    """

    observation_role: ObservationRole = "auto"
    keep_thoughts: bool = False


class TurnSuffix:
    """Renders and tokenises what stands between two turns.

    Attributes:
        end: The id with which the template ends a turn of the assistant.
        ends: Ids after which a turn needs no end: ``end``, and those others that end a completion and that the
            template itself writes.
    """

    def __init__(self, template: ChatTemplate, rules: TurnRules) -> None:
        self._template, self._rules = template, rules
        folder = template.folder
        self._where = template.where
        eos = folder.vocabulary.eos
        written = self._first_id()
        if written not in eos:
            raise ConfigError(
                "the model's chat template ends a turn of the assistant with no token that ends a completion",
                where=self._where,
                possible=f"one of {', '.join(template.names(eos))} right after its text",
                remedy="add the template's own token to eos_token_id in generation_config.json, or choose another one",
            )
        self.end = written
        texts = zip(eos, template.names(eos), strict=True)
        self.ends = frozenset({written} | {index for index, text in texts if text in template.source})
        self.carrier = cache(self._carrier)

    def text(self, messages: Sequence[Filled]) -> str:
        """The suffix with these messages between two turns, from the end of the first to the head of the second.

        Raises:
            DataError: The template fails.
        """
        before = [self._template.message("user", (QUESTION,)), self._template.message("assistant", (MARK,))]
        try:
            filled = self._template.fill([*before, *messages])
        except Exception as error:  # the template is the model's: any exception is its own
            raise DataError(f"the model's chat template fails: {error}", where=self._where) from error
        _, mark, rest = filled.partition(MARK)
        if not mark:
            raise DataError("the model's chat template drops the assistant's text", where=self._where)
        return rest

    def ids(self, messages: Sequence[Filled], where: str, *, ended: bool, without: str = "") -> list[int]:
        """Tokens of the suffix, one for each image.

        Args:
            where: The messages' place, for errors.
            ended: True if the turn has its end already.
            without: An end of the suffix that is left out.

        Raises:
            DataError: The template fails, or does not write one of the texts; or a text cannot be read.
        """
        text = self.text(messages)
        for part in (part for message in messages for part in _texts(message)):
            if part.strip() not in text:
                raise DataError(f"the model's chat template drops or rewrites the text {part[:40]!r}", where=where)
        text = text.removesuffix(without)
        return self._template.tokenize(text, where)[ended:]

    def headers(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The first lines of messages without special tokens, and the special tokens around them."""
        lines, marks = set[str](), set[str]()
        for role in ("system", "user", "tool"):
            try:
                header, mark, rest = self.text([self._template.message(role, (MARK,))]).partition(MARK)
            except DataError:
                continue
            for part in (header, rest) if mark else ():
                plain, specials = self._template.without_special(part)
                lines |= set(plain.split("\n")[:2])
                marks |= set(specials)
        return tuple(filter(str.strip, lines)), tuple(marks)

    def observation(self, content: Content, role: str) -> tuple[str, Filled]:
        """The role in which an observation is read, and its message.

        Raises:
            ConfigError: The template cannot carry such an observation.
        """
        carrier = self.carrier(role, any(not isinstance(part, str) for part in content))
        return carrier.role, carrier.message(self._template, content)

    def _carrier(self, role: str, images: bool) -> Carrier:
        """The way in which observations reach the policy, the first that is proven.

        Raises:
            ConfigError: There is none.
        """
        asked = self._rules.observation_role
        roles = [asked] if asked != "auto" else [role, *({"tool", "user"} - {role})]
        forms = (False, True) if self._template.folder.family.vision and not images else (False,)
        found = dict[str, Deviation]()
        for each in roles:
            for as_text in forms:
                carrier = Carrier(each, as_text)
                deviation = deviation_of(self._template, self.text, carrier, images=images)
                if deviation is None:
                    return carrier
                if deviation.thoughts and self._rules.keep_thoughts:
                    return replace(carrier, deviation=deviation.what)
                found.setdefault(each, deviation)
        raise self._refusal(found, images)

    def _refusal(self, found: dict[str, Deviation], images: bool) -> ConfigError:
        thoughts = [role for role, deviation in found.items() if deviation.thoughts]
        if thoughts:
            keeps = "preserve_thinking" in self._template.folder.template_options
            remedy = "set data.template_options: {preserve_thinking: true}, so that it keeps them; or " if keeps else ""
            remedy += "set environment.keep_thoughts to true: the policy then reads its own earlier thoughts, in "
            remedy += "training and evaluation, and whoever serves the model needs a template that keeps them"
        elif images:
            remedy = "set environment.max_images to 0 if the environment answers with text only, or choose a model "
            remedy += "whose template takes images there"
        else:
            remedy = "set environment.observation_role to auto or user, or choose another model"
        return ConfigError(
            f"the model's chat template cannot carry an observation with {'images' if images else 'text'}",
            where=self._where,
            possible="\n".join(f"as {role}: no, {deviation.what}" for role, deviation in found.items()),
            remedy=remedy,
        )

    def _first_id(self) -> int | None:
        """The first token after a text of the assistant."""
        message = self._template.message("user", (QUESTION,))
        try:
            ids = self._template.tokenize(self.text([message]), self._where)
        except DataError as error:
            raise ConfigError(
                error.what, where=self._where, remedy="choose a model that takes several turns"
            ) from error
        return ids[0] if ids else None


def _texts(message: Filled) -> list[str]:
    """The texts of a message."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
