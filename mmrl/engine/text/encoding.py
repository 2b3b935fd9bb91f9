"""Prompts in the model's tokens: chat template, image placeholders expanded to as many tokens as patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from mmrl.data.chat_messages import QUESTION, Filled
from mmrl.data.images import MediaStore, blank_file, normalised_size
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.text import thoughts
from mmrl.engine.text.closed import closed_samples
from mmrl.engine.text.documents import DocumentText
from mmrl.engine.text.earlier_turns import EarlierTurns
from mmrl.engine.text.template_proof import prove
from mmrl.engine.text.tool_calls import CallReader
from mmrl.engine.text.tool_prompt import ToolPrompt, ToolPromptMode
from mmrl.engine.text.turn_proof import ASKED, conversation, prefill, said_after
from mmrl.engine.text.turns import ObservationRole, TurnRules, TurnSuffix
from mmrl.errors import ConfigError, DataError, plural
from mmrl.types import (
    IMAGE_PLACEHOLDER,
    Call,
    Content,
    EncodedPrompt,
    ImageArray,
    ImageRef,
    IntArray,
    Message,
    Prompt,
    Sample,
    Segment,
    earlier_turns,
)

OBSERVATION = "observation"
"""The place that errors about observations name."""


class Encoder:
    """Implements ``engine_api.PromptEncoder`` with a model folder's tokenizer and chat template.

    Special tokens come from the template alone. A message's text that spells one stays text.

    Args:
        tools: JSON schemas, of OpenAI's form, of the tools that the policy may call.
        observation_role: See ``EnvironmentSpec``, as for ``tool_prompt`` and ``keep_thoughts``.
        keeps_images: True to leave the dataset's images in ``EncodedPrompt.prompt``, for an environment.
    """

    def __init__(
        self,
        folder: ModelFolder,
        media: MediaStore,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        observation_role: ObservationRole = "auto",
        tool_prompt: ToolPromptMode = "auto",
        keep_thoughts: bool = False,
        keeps_images: bool = False,
    ) -> None:
        self._folder, self._media, self._keeps_images = folder, media, keeps_images
        self._tool_prompt = ToolPrompt(folder, tools, tool_prompt)
        self._template = self._tool_prompt.template
        prove(self._template)
        self._documents = DocumentText(self._template)
        self._rules = TurnRules(observation_role, keep_thoughts)
        self._tools = tuple(tools)

    def num_tokens(self, prompt: Prompt) -> int:
        sizes = [normalised_size(raw, self._media.grid) for raw in prompt.images]
        return len(self._expand(self._tokenize(self._render(prompt, bool(sizes)), prompt.id), sizes, prompt.id))

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        text = self._render(prompt, bool(prompt.images))
        ids = self._tokenize(text, prompt.id)
        refs = tuple(self._media.add(raw) for raw in prompt.images)
        token_ids = self._expand(ids, [(ref.width, ref.height) for ref in refs], prompt.id)
        row = prompt if self._keeps_images else replace(prompt, images=())
        return EncodedPrompt(prompt=row, text=text, token_ids=token_ids, images=refs)

    def reworded(self, prompt: EncodedPrompt, row: Prompt) -> EncodedPrompt:
        text = self._render(row, bool(prompt.images))
        sizes = [(ref.width, ref.height) for ref in prompt.images]
        return replace(
            prompt, prompt=row, text=text, token_ids=self._expand(self._tokenize(text, row.id), sizes, row.id)
        )

    def measure(self, prompt: Prompt) -> EncodedPrompt:
        """The row with the sizes of its images, without tokens and pixels.

        Raises:
            DataError: An image cannot be used.
        """
        refs = tuple(map(self._media.measure, prompt.images))
        row = replace(prompt, images=())
        return EncodedPrompt(prompt=row, text="", token_ids=np.zeros(0, np.int32), images=refs)

    def rendered(self, prompt: Prompt) -> EncodedPrompt:
        text, row = self._render(prompt, bool(prompt.images)), replace(prompt, images=())
        return EncodedPrompt(prompt=row, text=text, token_ids=np.zeros(0, np.int32), images=())

    def given(self, prompt: EncodedPrompt, *, closed: bool = False) -> tuple[Sample, ...]:
        texts = [candidate.text for candidate in prompt.prompt.candidates]
        shown = [self._shown(text, prompt.text, prompt.id, f"candidate {place}") for place, text in enumerate(texts)]
        if not closed:
            return tuple(Sample(prompt, (segment,)) for segment in shown)
        head, image = self._tokenize(prompt.text, prompt.id), self._folder.image_token_id
        row = prompt.prompt
        conversations = [replace(row, messages=(*row.messages, Message("assistant", text))) for text in texts]
        rendered = [self._render(each, image in head, whole=True) for each in conversations]
        wholes = [self._tokenize(text, prompt.id) for text in rendered]
        return closed_samples(prompt, head, wholes, end=self._end, image=image)

    def demonstrate(self, prompt: EncodedPrompt, *, all_turns: bool = False) -> Sample:
        if prompt.prompt.is_document:
            return self._documents.sample(prompt, self._tokenize(prompt.text, prompt.id), self._expand)
        if (demonstration := prompt.prompt.demonstration) is None:
            raise DataError(
                "the row has no demonstration to learn from",
                where=prompt.id,
                remedy="name the column that holds the completions, or choose an algorithm that samples",
            )
        if all_turns:
            return self._whole(prompt, demonstration)
        return Sample(prompt, (self._shown(demonstration, prompt.text, prompt.id),))

    def blanked(self, prompt: EncodedPrompt) -> EncodedPrompt:
        row = replace(prompt.prompt, images=tuple(map(blank_file, prompt.prompt.images)))
        return replace(prompt, prompt=row, images=tuple(map(self._media.blank, prompt.images)))

    def viewed(self, prompt: EncodedPrompt, change: Callable[[int, ImageArray], ImageArray]) -> EncodedPrompt:
        refs = tuple(
            self._media.view(ref, change(place, np.asarray(self._media.load(ref))))
            for place, ref in enumerate(prompt.images)
        )
        sizes = [(ref.width, ref.height) for ref in refs]
        if sizes == [(ref.width, ref.height) for ref in prompt.images]:
            return replace(prompt, images=refs)
        ids = self._tokenize(prompt.text, prompt.id)
        return replace(prompt, images=refs, token_ids=self._expand(ids, sizes, prompt.id))

    def calls(self, text: str) -> tuple[Call, ...]:
        return self._reader.read(text)

    def insertion(self, turn: Segment, content: Content, role: str) -> Segment:
        """See ``engine_api.PromptEncoder``.

        A turn that ended with another end-of-sequence token than the template's, such as ``<|endoftext|>``, still gets
        the template's: it is text to the template, and the policy is not trained on what is inserted.

        Raises:
            ConfigError: The template cannot carry such an observation; ``check_turns`` would have told.
            DataError: The content cannot be read by this model: images, or half of a character.
        """
        images = tuple(part for part in content if not isinstance(part, str))
        if images and not self._folder.family.vision:
            raise DataError("the observation has images, and the model reads text only", where=OBSERVATION)
        role, message = self._suffix.observation(content, role)
        return self._inserted(turn, [message], images, role, OBSERVATION)

    def check_turns(self, *, images: bool = False) -> None:
        """Prove that the chat template can carry observations; the first call takes some 0.1 s.

        A suffix that is appended to a turn is then what the template makes of the whole conversation, in text and in
        tokens.

        Args:
            images: True if observations may hold images.

        Raises:
            ConfigError: It cannot, with what to set or to choose.
        """
        for kind in (False, True) if images and self._folder.family.vision else (False,):
            self._suffix.carrier("tool", kind)
            self._suffix.carrier("user", kind)

    def exchange(self, content: Content, role: str) -> tuple[IntArray, IntArray]:
        """Tokens of a question, a turn, an observation and the head of the next turn: as an episode appends them, and
        as the chat template writes the whole conversation.

        Raises:
            ConfigError: The template cannot carry such an observation.
            DataError: The content cannot be read by this model.
        """
        template, head = self._template, self._template.fill([self._template.message("user", (ASKED,))])
        said = said_after(template, head)
        turn = np.array([*self._tokenize(said, OBSERVATION), self._suffix.end], np.int32)
        seen = self.insertion(Segment(turn, True, np.zeros(len(turn), np.float32)), content, role)
        appended = np.concatenate([np.array(self._tokenize(head, OBSERVATION), np.int32), turn, seen.token_ids])
        whole = template.fill(conversation(template, said, self._suffix.observation(content, role)[1]))
        sizes = [(part.width, part.height) for part in content if not isinstance(part, str)]
        return appended, self._expand(self._tokenize(whole, OBSERVATION), sizes, OBSERVATION)

    def by_template(self, prompt: EncodedPrompt) -> IntArray:
        """See ``engine_api.PromptEncoder``."""
        text, folder = self._render(prompt.prompt, bool(prompt.images)), self._folder
        options: dict[str, Any] = {"text": [text], "add_special_tokens": False}
        if not prompt.images:
            return np.array(folder.tokenizer(**options)["input_ids"][0], np.int32)
        images = [self._media.load(ref) for ref in prompt.images]
        options |= folder.images.processor_arguments(self._media.grid)
        return np.array(folder.processor(images=images, **options)["input_ids"][0], np.int32)

    @property
    def end_of_turn(self) -> int:
        """The id with which the chat template ends a turn of the assistant."""
        return self._suffix.end

    @property
    def targets(self) -> str:
        """The beginning and the end of what is learned of demonstrations, for a person."""
        (end,) = self._template.names([self._end])
        head = self._template.fill([self._template.message("user", (QUESTION,))])
        tag = thoughts.begun(head)
        return f"end with {end}" + (f"; the prompt has {tag}, and theirs is left out" if tag else "")

    @property
    def tools_by(self) -> str:
        """The way in which the policy learns of tools: ``template``, ``text`` or ``none``."""
        return self._tool_prompt.way

    def ways_of_observations(self, *, images: bool = False) -> dict[str, str]:
        """The proven role of messages with observations of role ``tool``: with text, and with images if asked.

        Raises:
            ConfigError: As ``check_turns``.
        """
        self.check_turns(images=images)
        ways = {"text": self._suffix.carrier("tool", False).role}
        return ways | (
            {"images": self._suffix.carrier("tool", True).role} if images and self._folder.family.vision else {}
        )

    def deviation(self, *, images: bool = False) -> str:
        """A clause on the template that says how the policy's text differs from it; empty if it does not.

        Raises:
            ConfigError: As ``check_turns``.
        """
        return self._suffix.carrier("tool", images and self._folder.family.vision).deviation

    @cached_property
    def _suffix(self) -> TurnSuffix:
        return TurnSuffix(self._template, self._rules)

    @cached_property
    def _reader(self) -> CallReader:
        lines, marks = self._suffix.headers()
        return CallReader(self._tools, bare=self._tool_prompt.bare, headers=lines, marks=marks)

    @cached_property
    def _end(self) -> int:
        """The id that ends a shown turn: the template's end of turn, or the end of sequence where it has none."""
        try:
            return self._suffix.end
        except ConfigError:  # the template takes one turn only, or ends turns with a text
            vocabulary, eos = self._folder.vocabulary, self._folder.tokenizer.eos_token_id
            known = (end for end in (vocabulary.end_of_turn, eos) if end is not None)
            return next(known, vocabulary.eos[0])

    def _inserted(
        self,
        turn: Segment,
        messages: Sequence[Filled],
        images: tuple[ImageRef, ...],
        role: str,
        where: str,
        without: str = "",
    ) -> Segment:
        """The segment between a turn and the next one.

        Args:
            without: An end of the next turn's head that is left out.
        """
        ended = len(turn.token_ids) > 0 and int(turn.token_ids[-1]) in self._suffix.ends
        ids = self._suffix.ids(messages, where, ended=ended, without=without)
        token_ids = self._expand(ids, [(ref.width, ref.height) for ref in images], where)
        return Segment(token_ids, False, np.zeros(len(token_ids), np.float32), images=images, role=role)

    def _whole(self, prompt: EncodedPrompt, demonstration: str) -> Sample:
        """A row's conversation, with its ``earlier_turns`` and the demonstration as the policy's."""
        messages = (*prompt.prompt.messages, Message("assistant", demonstration))
        earlier = earlier_turns(messages[:-1])
        if prompt.images and any(self._num_images(messages[place]) for place in earlier):
            raise DataError(
                "a turn of the assistant shows an image, and no policy writes images",
                where=prompt.id,
                remedy="set algorithm.turns to last, or remove the row",
            )
        answers = self._thoughtless(prompt, earlier)
        learned = {*earlier, len(messages) - 1}
        first, opening = min(learned), prefill(self._template) if answers else ""
        images = iter(prompt.images)
        refs = tuple(islice(images, sum(map(self._num_images, messages[:first]))))
        head = self._render(replace(prompt.prompt, messages=messages[:first]), bool(prompt.images))
        text = head.removesuffix(opening) if first in answers else head
        ids = self._expand(self._tokenize(text, prompt.id), [(ref.width, ref.height) for ref in refs], prompt.id)
        segments, between = list[Segment](), list[Message]()
        for place, message in enumerate(messages[first:], first):
            if place not in learned:
                between.append(message)
                continue
            without = opening if place in answers else ""
            if segments:
                segments.append(self._between(segments[-1], between, images, prompt.id, without))
            shown = answers.get(place, message.content)
            segments.append(self._shown(shown, "" if place in answers else head, prompt.id))
            between = []
        return Sample(replace(prompt, text=text, token_ids=ids, images=refs), tuple(segments))

    def _thoughtless(self, prompt: EncodedPrompt, earlier: Sequence[int]) -> Mapping[int, str]:
        """``EarlierTurns.answers`` of a row; none where thoughts are kept by the config."""
        if not earlier or self._rules.keep_thoughts:
            return {}
        row, has_images = prompt.prompt, bool(prompt.images)
        (end,) = self._template.names([self._end])
        turns = EarlierTurns(self._template, self._suffix, self._render(row, has_images), end, prompt.id)

        def render(messages: Sequence[Message]) -> str:
            return self._render(replace(row, messages=tuple(messages)), has_images, as_said=True)

        return turns.answers(row.messages, earlier, render)

    def _between(
        self, turn: Segment, messages: Sequence[Message], images: Iterator[ImageRef], where: str, without: str
    ) -> Segment:
        """A row's messages between two turns of the assistant; ``without`` as of ``_inserted``."""
        refs = tuple(islice(images, sum(map(self._num_images, messages))))
        role = messages[-1].role if messages else "user"
        read = [self._template.read(each, has_images=bool(refs)) for each in messages]
        return self._inserted(turn, read, refs, role, where, without)

    def _num_images(self, message: Message) -> int:
        return message.content.count(IMAGE_PLACEHOLDER) if self._folder.family.vision else 0

    def _shown(self, text: str, head: str, where: str, what: str = "the demonstration") -> Segment:
        """A turn that a dataset shows to the policy, with its end.

        Args:
            head: The row's prompt, which ends as each turn's head does.
            what: The words for the text in messages.

        Raises:
            DataError: It holds special tokens of the model, or its thought does not go on from the prompt's.
        """
        ids = [*self._tokenize(thoughts.continued(text, head, where), where), self._end]
        # Neither form is right here: the token would end the completion or open an image, and its spelling would be
        # learned.
        if special := set(ids[:-1]) & (self._template.special_ids | set(self._folder.vocabulary.banned)):
            raise DataError(
                f"{what} holds special tokens of the model",
                where=where,
                possible=f"no {', '.join(self._template.names(sorted(special)))}",
                remedy="mend or remove the row",
            )
        return Segment(np.array(ids, np.int32), True, np.zeros(len(ids), np.float32))

    def _render(self, prompt: Prompt, has_images: bool, *, as_said: bool = False, whole: bool = False) -> str:
        """The prompt as the template writes it, each ``<image>`` an image if there are any, else text.

        Args:
            as_said: True to write turns of the assistant as the policy's own, which may hold special tokens.
            whole: True for a conversation that its last turn, which shows no image, ends; else the head of the policy's
                next turn does.
        """
        if prompt.images and not self._folder.family.vision:
            raise DataError(
                "the row has images, and the model reads text only",
                where=prompt.id,
                remedy="choose a vision-language model, or a dataset without images",
            )
        if prompt.is_document:
            return self._documents.render(prompt)
        given = self._tool_prompt.added_to(prompt)
        last = given[-1] if whole else None
        messages = [
            self._template.said(each.content)
            if as_said and each.role == "assistant"
            else self._template.read(each, has_images=has_images and each is not last)
            for each in given
        ]
        try:
            return self._template.fill_whole(messages) if whole else self._template.fill(messages)
        except Exception as error:  # the template is the model's: any exception is its own
            raise DataError(
                f"the model's chat template fails: {error}",
                where=prompt.id,
                remedy="mend the row, such as the order of its roles, or choose another model",
            ) from error

    def _tokenize(self, text: str, where: str) -> list[int]:
        return self._template.tokenize(text, where)

    def _expand(self, ids: list[int], sizes: Sequence[tuple[int, int]], where: str) -> IntArray:
        """Replace each image's placeholder by its tokens."""
        image_token = self._folder.image_token_id
        if ids.count(image_token) != len(sizes):
            raise DataError(
                f"the prompt has {plural(ids.count(image_token), 'image token')} and {plural(len(sizes), 'image')}",
                where=where,
                possible=f"one {IMAGE_PLACEHOLDER} per image, and no special tokens of the model in the text",
                remedy="mend the row",
            )
        if not sizes:
            return np.array(ids, np.int32)
        images = iter(self._folder.images.expansion(*size) for size in sizes)
        return np.array([i for token in ids for i in (next(images) if token == image_token else (token,))], np.int32)


def unexpanded(token_ids: IntArray, images: Sequence[ImageRef], folder: ModelFolder) -> list[int]:
    """The tokens with one placeholder per image, as vLLM takes them.

    Args:
        images: All that are in the tokens, in order.
    """
    ids: list[int] = token_ids.tolist()
    found, end = list[int](), 0
    for ref in images:
        image, token = folder.images.expansion(ref.width, ref.height), folder.image_token_id
        begin = ids.index(token, end) - image.index(token)
        found += [*ids[end:begin], token]
        end = begin + len(image)
    return found + ids[end:]
