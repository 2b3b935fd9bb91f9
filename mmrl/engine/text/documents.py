"""Documents in the model's tokens: texts and images without a chat template, which a policy learns as a whole.

    begin of sequence, if the tokenizer writes one | text | image | text | end of sequence

The tokens of an image, such as ``<|vision_start|><|image_pad|><|vision_end|>``, are those that the chat template
writes. They are read and not learned. Nor is the first token, before which there is nothing to predict it from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, islice

import numpy as np

from mmrl.data.chat_messages import MARK
from mmrl.engine.text.chat_template import ChatTemplate
from mmrl.errors import ConfigError, DataError
from mmrl.types import IMAGE_PLACEHOLDER, EncodedPrompt, IntArray, Prompt, Sample, Segment

Expand = Callable[[list[int], Sequence[tuple[int, int]], str], IntArray]


class DocumentText:
    """Writes documents as a chat template's model reads them, and parts what is learned from what is read."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template, self._folder = template, template.folder

    def render(self, prompt: Prompt) -> str:
        """The document from its begin to its end, with one token for each image.

        Raises:
            ConfigError: The tokenizer has no end of sequence, or the chat template writes no image within a text.
            DataError: There is no text, or it holds special tokens of the model.
        """
        content = prompt.messages[0].content
        texts = content.split(IMAGE_PLACEHOLDER) if prompt.images else [content]
        if not any(map(str.strip, texts)):
            raise DataError("the document has no text to learn", where=prompt.id, remedy="remove the row")
        # As in demonstrations, neither form is right: the token would end the document, its spelling would be learned.
        if special := self._template.without_special(content)[1]:
            raise DataError(
                "the document holds special tokens of the model",
                where=prompt.id,
                possible=f"no {', '.join(sorted(set(special)))}",
                remedy="mend or remove the row",
            )
        return self._begin + (self._image if prompt.images else "").join(texts) + self._end

    def sample(self, prompt: EncodedPrompt, ids: Sequence[int], expand: Expand) -> Sample:
        """The document as the policy's; its prompt is what comes before the first token that is learned.

        Args:
            prompt: All of the document.
            ids: Its tokens, one for each image.
            expand: Writes the tokens of images, of these sizes, in the place of their placeholders.
        """
        images, segments, text = iter(prompt.images), list[Segment](), ""
        for is_learned, stretch in self._parted(ids, prompt.id):
            count = 0 if is_learned else stretch.count(self._folder.image_token_id)
            refs = tuple(islice(images, count))
            token_ids = expand(stretch, [(ref.width, ref.height) for ref in refs], prompt.id)
            zeros, role = np.zeros(len(token_ids), np.float32), "assistant" if is_learned else "user"
            text = text if segments else self._folder.tokenizer.decode(stretch)
            segments.append(Segment(token_ids, is_learned, zeros, images=refs, role=role))
        head, *rest = segments
        return Sample(replace(prompt, text=text, token_ids=head.token_ids, images=head.images), tuple(rest))

    def _parted(self, ids: Sequence[int], where: str) -> Iterator[tuple[bool, list[int]]]:
        """The tokens in stretches that are learned or not, in turns; the first one is not."""
        learned = [False, *([True] * (len(ids) - 1))]
        if self._folder.family.vision:
            image = self._template.tokenize(self._image, where)
            for at in range(len(ids)):
                if list(ids[at : at + len(image)]) == image:
                    learned[at : at + len(image)] = [False] * len(image)
        for is_learned, run in groupby(zip(learned, ids, strict=True), key=lambda each: each[0]):
            yield is_learned, [token for _, token in run]

    @cached_property
    def _begin(self) -> str:
        tokenizer = self._folder.tokenizer
        writes_one = tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]
        return str(tokenizer.bos_token) if writes_one else ""

    @cached_property
    def _end(self) -> str:
        if (end := self._folder.tokenizer.eos_token) is None:
            raise ConfigError(
                "the tokenizer has no end of sequence, with which documents end",
                where=f"tokenizer_config.json of {self._folder.name}",
                remedy="add eos_token to it",
            )
        return str(end)

    @cached_property
    def _image(self) -> str:
        """The text of an image, as the chat template writes it between two texts of a message."""
        filled = self._template.fill([self._template.message("user", (MARK, None, MARK))])
        _, *between = filled.split(MARK)
        text = between[0].strip() if len(between) == 2 else ""
        if self._template.tokenize(text, self._template.where).count(self._folder.image_token_id) != 1:
            raise ConfigError(
                "the model's chat template writes no image between two texts, so documents with images have no form",
                where=self._template.where,
                remedy="choose another template (model.chat_template) or model, or documents without images",
            )
        return text
