"""Prompts in the model's tokens: chat template, image placeholders expanded to as many tokens as patches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.data.images import MediaStore, normalised_size
from mmrl.data.templates import bounded
from mmrl.engine.folder import ModelFolder
from mmrl.errors import DataError
from mmrl.types import IMAGE_PLACEHOLDER, EncodedPrompt, ImageRef, IntArray, Message, Prompt, Sample, Segment

_INVISIBLE = "\u200b"
"""A zero-width space. Within a special token's text it leaves the text readable, and makes it no token."""


class Encoder:
    """Implements ``interfaces.PromptEncoder`` with a model folder's tokenizer and chat template.

    Special tokens come from the template alone. A message's text that spells one stays text.
    """

    def __init__(self, folder: ModelFolder, media: MediaStore) -> None:
        self._folder, self._media = folder, media
        special = special_tokens(folder.tokenizer)
        self._special_ids = frozenset(special.values())
        # Longest first: a token may begin with another.
        names = sorted(special, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._try_template()

    def num_tokens(self, prompt: Prompt) -> int:
        sizes = [normalised_size(raw, self._media.grid) for raw in prompt.images]
        return len(self._expand(self._tokenize(self._render(prompt), prompt.id), sizes, prompt))

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        text = self._render(prompt)
        ids = self._tokenize(text, prompt.id)
        refs = tuple(self._media.add(raw) for raw in prompt.images)
        token_ids = self._expand(ids, [(ref.width, ref.height) for ref in refs], prompt)
        return EncodedPrompt(prompt=replace(prompt, images=()), text=text, token_ids=token_ids, images=refs)

    def demonstrate(self, prompt: EncodedPrompt) -> Sample:
        if (demonstration := prompt.prompt.demonstration) is None:
            raise DataError(
                "the row has no demonstration to learn from",
                where=prompt.id,
                remedy="name the column that holds the completions, or choose an algorithm that samples",
            )
        vocabulary = self._folder.vocabulary
        end = self._folder.tokenizer.eos_token_id
        ids = [*self._tokenize(demonstration, prompt.id), vocabulary.eos[0] if end is None else end]
        # Neither form is right here: the token would end the completion or open an image, and its spelling would be
        # learned.
        if special := set(ids[:-1]) & (self._special_ids | set(vocabulary.banned)):
            raise DataError(
                "the demonstration holds special tokens of the model",
                where=prompt.id,
                possible=f"no {', '.join(self._folder.tokenizer.convert_ids_to_tokens(sorted(special)))}",
                remedy="mend or remove the row",
            )
        return Sample(prompt, (Segment(np.array(ids, np.int32), True, np.zeros(len(ids), np.float32)),))

    def _render(self, prompt: Prompt) -> str:
        if prompt.images and not self._folder.family.vision:
            raise DataError(
                "the row has images, and the model reads text only",
                where=prompt.id,
                remedy="choose a vision-language model, or a dataset without images",
            )
        messages = [self._message(message) for message in prompt.messages]
        try:
            return self._fill(messages)
        except Exception as error:  # the template is the model's: any exception is its own
            raise DataError(
                f"the model's chat template fails: {error}",
                where=prompt.id,
                remedy="mend the row, such as the order of its roles, or choose another model",
            ) from error

    def _fill(self, messages: Sequence[Mapping[str, Any]]) -> str:
        renderer = self._folder.processor or self._folder.tokenizer
        return str(renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _try_template(self) -> None:
        """Raise DataError if the chat template runs for ever on one of a few conversations; rows are not watched."""
        text = f"{IMAGE_PLACEHOLDER * self._folder.family.vision}What is 2 + 2?"
        for roles in ("user",), ("system", "user"), ("user", "assistant", "user"):
            try:
                with bounded():
                    self._fill([self._message(Message(role, text)) for role in roles])
            except OverflowError as error:
                raise DataError(
                    f"the model's chat template fails: {error}",
                    where=self._folder.path,
                    remedy="mend chat_template.jinja there, or choose another model",
                ) from error
            except Exception:  # a row with these roles will be told
                pass

    def _message(self, message: Message) -> dict[str, Any]:
        role, content = self._spelled(message.role), self._spelled(message.content)
        if not self._folder.family.vision:
            return {"role": role, "content": content}
        pieces = re.split(f"({re.escape(IMAGE_PLACEHOLDER)})", content)
        parts = [
            {"type": "image"} if piece == IMAGE_PLACEHOLDER else {"type": "text", "text": piece}
            for piece in pieces
            if piece
        ]
        return {"role": role, "content": parts}

    def _spelled(self, text: str) -> str:
        """The text with an invisible character in each part that the tokenizer would read as a special token."""
        return self._special_text.sub(lambda match: f"{match[0][:1]}{_INVISIBLE}{match[0][1:]}", text)

    def _tokenize(self, text: str, row: str) -> list[int]:
        if lone := re.search("[\ud800-\udfff]", text):
            raise DataError(
                f"the text holds U+{ord(lone[0]):04X}, half of a character",
                where=row,
                possible="text that can be written as UTF-8",
                remedy="mend the row: write the character itself, or the escapes of both its halves",
            )
        return list(self._folder.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _expand(self, ids: list[int], sizes: list[tuple[int, int]], prompt: Prompt) -> IntArray:
        """Replace each image's placeholder by its tokens."""
        image_token = self._folder.image_token_id
        if ids.count(image_token) != len(sizes):
            raise DataError(
                f"the prompt has {ids.count(image_token)} image tokens and {len(sizes)} images",
                where=prompt.id,
                possible=f"one {IMAGE_PLACEHOLDER} per image, and no special tokens of the model in the text",
                remedy="mend the row",
            )
        if not sizes:
            return np.array(ids, np.int32)
        images = iter(self._folder.images.expansion(*size) for size in sizes)
        return np.array([i for token in ids for i in (next(images) if token == image_token else (token,))], np.int32)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Ids of the tokens that have a meaning of their own, by their text.

    These are the tokens that the tokenizer calls special, and all that look like ``<|...|>``, with either bar, such as
    the marks of turns of DeepSeek-R1. Plain tags such as ``<think>`` are ordinary text.
    """
    added = {str(token): (index, token.special) for index, token in tokenizer.added_tokens_decoder.items()}
    special = {text: index for text, (index, named) in added.items() if named or re.fullmatch(r"<[|｜].*[|｜]>", text)}
    names = [name for name in tokenizer.all_special_tokens if name]
    return special | dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))


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
