"""A row of a dataset: as it is read, and in the model's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmrl.errors import warn_of_old_name
from mmrl.types.arrays import IntArray

GroupKey = tuple[int, str]
"""(epoch, prompt id): the key of a group of rollouts, from sampling to the records."""
SampleKey = tuple[int, str, int]
"""(epoch, prompt id, index): the key of a sample; the index of a group's greedy rollout is -1."""


@dataclass(frozen=True, slots=True)
class RawImage:
    """An image as the dataset holds it: encoded bytes, not yet decoded.

    Attributes:
        data: The encoded file (PNG, JPEG, WEBP, GIF, BMP or TIFF).
        label: Its origin, for error messages, such as ``"train.parquet row 17, images[0]"``.
    """

    data: bytes = field(repr=False)
    label: str


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A normalised image in the run's media store.

    Attributes:
        hash: sha256 (hex) of size and RGB pixels; the same hash reaches sampler and learner.
        width: Pixels, after the one resize to the model's grid.
        height: Pixels, after the one resize to the model's grid.
        path: The lossless PNG file with exactly these pixels.
        file_size: (width, height) of the dataset's file in pixels, as viewers show it, before the resize; None where it
            is not known, as in the records of older runs.
    """

    hash: str
    width: int
    height: int
    path: str
    file_size: tuple[int, int] | None = None


Content = tuple[str | ImageRef, ...]
"""Texts and normalised images in the order in which the model reads them."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. ``content`` is text in which each ``<image>`` stands for the prompt's next image."""

    role: str
    content: str


IMAGE_PLACEHOLDER = "<image>"
DOCUMENT = "document"
"""The role of the only message of a row that is a document: text and images that are learned as a whole."""


def earlier_turns(messages: Sequence[Message]) -> list[int]:
    """Places of the assistant's turns after the first question, without those that are empty: they teach nothing."""
    roles = [message.role for message in messages]
    after = enumerate(messages[roles.index("user") :], roles.index("user")) if "user" in roles else ()
    return [place for place, each in after if each.role == "assistant" and each.content.strip()]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A completion that the dataset gives to be compared with others.

    Attributes:
        text: The completion.
        score: Its quality, such as 1 for a chosen and 0 for a rejected one; None if it is not known.
        images: Images that it shows itself.
    """

    text: str
    score: float | None = None
    images: tuple[RawImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row, as a loader gives it.

    Attributes:
        id: Unique and stable within the dataset; seeds are derived from it.
        messages: The conversation so far; the number of ``<image>`` equals ``len(images)``.
        images: In the order of their placeholders; empty for a text row.
        answer: The reference answer, raw; None if the dataset has none.
        columns: Every column of the row but images, for rewards and records.
        demonstration: A completion to imitate (supervised training); None if the dataset has none.
        source: The dataset that it is from, which decides which rewards score it; empty for the config's one.
        choices: The answers that the question offers, in the order of their letters A, B, ...
        candidates: Completions to compare, or one with a verdict; empty where the dataset gives none.
        category: The kind of question, by which evaluations tell accuracies apart; empty if the row has none.
        retries: Groups of it that this step has rejected, where ``Algorithm.retry`` has it sampled once more; a loader
            leaves it 0.
    """

    id: str
    messages: tuple[Message, ...]
    images: tuple[RawImage, ...] = ()
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    demonstration: str | None = None
    source: str = ""
    choices: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    category: str = ""
    retries: int = 0

    @property
    def is_document(self) -> bool:
        """True for a text with images in it that has no chat template and nothing to answer."""
        return [message.role for message in self.messages] == [DOCUMENT]


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedPrompt:
    """A dataset row in the model's tokens. It equals itself alone, so that a table can have an entry for each.

    Attributes:
        prompt: The row; its images are in ``images`` alone.
        text: The rendered chat template with one image token per image, ending where the completion starts.
        token_ids: (P,) int32, each image token expanded to as many as the image has merged patches.
        images: References into the media store, in order.
        epoch: The pass over the data that drew it, from 0; 0 in an evaluation.
        views: By name, the same row with other images, as the algorithm's ``Needs.views`` has them; none of a row
            without images.
    """

    prompt: Prompt
    text: str
    token_ids: IntArray
    images: tuple[ImageRef, ...]
    epoch: int = 0
    views: Mapping[str, EncodedPrompt] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def key(self) -> GroupKey:
        """The key of the group that is sampled from it; no other group of a run has the same. A group in place of a
        rejected one of the same prompt has a number behind the id."""
        again = self.prompt.retries
        return self.epoch, f"{self.prompt.id} (retry {again})" if again else self.prompt.id

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Fields of the row that version 0.2.0 copied."""
            if name not in ("answer", "choices", "columns", "demonstration", "messages", "source"):
                raise AttributeError(f"'EncodedPrompt' object has no attribute {name!r}")
            warn_of_old_name(f"rollout.prompt.{name}", f"rollout.prompt.prompt.{name}")
            return getattr(self.prompt, name)


THOUGHT_NAMES = "think|thinking|thoughts?|reason|reasoning|reflection|scratchpad|seed:think"
"""Regular expression of the names of tags in angle brackets between which models think, in lower case."""
