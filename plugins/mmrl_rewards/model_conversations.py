"""Rollouts in the tokens of a reward model: its own chat template writes them, its own processor reads their images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.data.chat_messages import ChatMessages, Filled
from mmrl.errors import ConfigError, PluginError, first_line
from mmrl.types import IMAGE_PLACEHOLDER, ImageRef, Message, Rollout

if TYPE_CHECKING:
    import torch

SystemPrompt = bool | str
"""True to keep a prompt's own, False to leave it out; a text, also an empty one, takes its place."""


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image as a processor gives it.

    Attributes:
        token_ids: The tokens that take the place of the image's placeholder.
        kinds: For each of them a number, by the names under which the model takes such numbers.
        pixels: The image's tensors, by the names under which the model takes them; several images are joined along the
            first axis.
    """

    token_ids: list[int]
    kinds: Mapping[str, list[int]]
    pixels: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and its completion.

    Attributes:
        token_ids: All tokens, those of images included.
        kinds: As of ``SeenImage``, 0 for tokens of text; empty without images.
        images: The images in the order of their tokens.
    """

    token_ids: list[int]
    kinds: Mapping[str, list[int]]
    images: tuple[SeenImage, ...]


class Conversations(ChatMessages):
    """Writes rollouts as a reward model's folder reads them.

    Args:
        folder: The reward model's folder, with its tokenizer.
        template: Jinja in place of the folder's own chat template.
        options: Values of the template's variables.
        reads_images: True if the model sees images; its folder then has a processor.
        drops_images: True to leave out the images of prompts.

    Raises:
        ConfigError: The folder has no processor for a model that sees images, or no chat template.
    """

    def __init__(
        self,
        folder: Path,
        *,
        reads_images: bool,
        drops_images: bool,
        template: str | None,
        options: Mapping[str, Any],
        system_prompt: SystemPrompt,
        trust_remote_code: bool,
    ) -> None:
        from transformers import AutoProcessor, AutoTokenizer

        loader = AutoProcessor if reads_images else AutoTokenizer
        try:
            self._renderer = loader.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # files of somebody else's: transformers raises whatever it stumbles over
            what = "processor" if reads_images else "tokenizer"
            raise ConfigError(
                f"the reward model's {what} cannot be read: {first_line(error)}",
                where=str(folder),
                remedy="copy its files from the folder of the model that this one was trained from",
            ) from error
        self._images_end = reads_images and not drops_images
        self._drops, self._options, self._system = drops_images, dict(options), system_prompt
        super().__init__(self._renderer.tokenizer if reads_images else self._renderer, in_parts=reads_images)
        if template is not None:
            self._renderer.chat_template = self._tokenizer.chat_template = template
        if not self.source:
            raise ConfigError(
                "the reward model has no chat template, so nothing says how it reads a conversation",
                where=str(folder),
                remedy="name a file with the template it was trained with: chat_template: chat.jinja",
            )

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def source(self) -> str:
        return str(getattr(self._renderer, "chat_template", None) or self._tokenizer.chat_template or "")

    def fill(self, messages: Sequence[Filled]) -> str:
        return str(self._renderer.apply_chat_template(list(messages), tokenize=False, **self._options))

    def written(self, rollout: Rollout, seen: dict[str, SeenImage]) -> Conversation:
        """A rollout's conversation, with the completion as the assistant's turn.

        Args:
            seen: Images by their hash, to which those of this rollout are added.

        Raises:
            PluginError: The prompt has images and the model sees none, or the template fails.
        """
        where, refs = f"prompt {rollout.prompt.id!r}", rollout.images
        if refs and not self._in_parts and not self._drops:
            raise PluginError(
                "the reward model sees no images, and this prompt has some",
                where=where,
                remedy="set images: drop, give the reward sources without images, or take a model that sees them",
            )
        messages = self._with_system([Message(m.role, self._content(m.content, refs)) for m in rollout.messages])
        shown = refs if self._images_end else ()
        filled = [self.read(each, has_images=bool(shown)) for each in messages]
        filled.append(self.read(Message("assistant", rollout.text), has_images=False))
        try:
            text = self.fill(filled)
        except Exception as error:  # the template is the model's: any exception is its own
            raise PluginError(
                f"the reward model's chat template fails: {first_line(error)}",
                where=where,
                remedy="check the order of roles in the rows, system_prompt, or chat_template",
            ) from error
        ids = self.tokenize(text, where)
        for ref in shown:
            if ref.hash not in seen:
                seen[ref.hash] = self._read_image(ref)
        return self._expanded(ids, [seen[ref.hash] for ref in shown], where)

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if self._system is True:
            return messages
        rest = [message for message in messages if message.role != "system"]
        return rest if self._system is False else [Message("system", self._system), *rest]

    def _content(self, text: str, refs: Sequence[ImageRef]) -> str:
        return text.replace(IMAGE_PLACEHOLDER, "").strip() if refs and self._drops else text

    @cached_property
    def _image_id(self) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(self._renderer.image_token))

    def _expanded(self, ids: list[int], images: Sequence[SeenImage], where: str) -> Conversation:
        """The tokens with each image's in place of its placeholder."""
        if not images:
            return Conversation(ids, {}, ())
        if ids.count(self._image_id) != len(images):
            raise PluginError(
                f"the reward model's chat template writes {ids.count(self._image_id)} of {len(images)} images",
                where=where,
                remedy="take a reward model, or a chat_template, that shows each image of a prompt once",
            )
        left, found = iter(images), list[int]()
        kinds: dict[str, list[int]] = {name: [] for name in images[0].kinds}
        for token in ids:
            image = next(left) if token == self._image_id else None
            found += [token] if image is None else image.token_ids
            for name, values in kinds.items():
                values += [0] if image is None else image.kinds[name]
        return Conversation(found, kinds, tuple(images))

    def _read_image(self, ref: ImageRef) -> SeenImage:
        """The image through the folder's processor, alone behind its placeholder."""
        from PIL import Image

        with Image.open(ref.path) as file:
            image = file.convert("RGB")
        given = dict(self._renderer(
            text=[self._renderer.image_token], images=[image], add_special_tokens=False, return_tensors="pt"
        ))  # fmt: skip
        of_tokens = dict(_of_tokens(given))
        ids = of_tokens.pop("input_ids")
        pixels = {
            name: value for name, value in given.items() if name not in ("input_ids", "attention_mask", *of_tokens)
        }
        return SeenImage(ids, of_tokens, pixels)


def _of_tokens(given: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """The numbers that a processor gives for each token, beside the mask of padding."""
    for name, value in given.items():
        if name == "input_ids" or name.endswith("type_ids"):
            yield name, value[0].tolist()
