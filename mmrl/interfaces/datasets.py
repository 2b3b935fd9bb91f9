"""The interface of datasets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mmrl.interfaces.plugins import Plugin
from mmrl.types import Prompt, Rollout


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """Facts of a dataset that a loader is made for.

    Attributes:
        origin: Its place of publication, such as a name on a hub.
        licence: The licence that its publisher states; "not stated" if it is not known.
        rows: Rows of each split, as far as known.
        reward: The rewards that suit its answers, by name, the first one for accuracy.
        notes: Advice for its users.
    """

    origin: str
    licence: str = "not stated"
    rows: Mapping[str, int] = field(default_factory=dict)
    reward: tuple[str, ...] = ()
    notes: str = ""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row whose completion a policy has sampled.

    Attributes:
        prompt: The row, as ``load`` gives it.
        rollout: One of its completions as it was sampled: text and tokens of the prompt, and the tokens of its own.
        by: The model that sampled it, for people.
    """

    prompt: Prompt
    rollout: Rollout
    by: str


class DatasetLoader(Plugin):
    """Reads prompts.

    Attributes:
        facts: Facts of the one dataset that it is made for; None for loaders of any.
        reads_rows: True for a loader of any rows: its option ``path`` names a parquet file, and it finds the columns by
            itself. ``mmrl.train(config, dataset=rows)`` takes the only one that is installed. A subclass does not
            inherit it.
    """

    facts: ClassVar[DatasetFacts | None] = None
    reads_rows: ClassVar[bool] = False

    def describe(self) -> Mapping[str, str]:
        """Choices that ``load`` made by itself, for people, such as the column of each part; called after it."""
        return {}

    def notes(self) -> Sequence[str]:
        """Sentences on things that ``load`` or the reading of rows left out, and that may be needed.

        Each is shown once, as a warning, after the rows that a run reads at its start.
        """
        return ()

    def fingerprint(self) -> str:
        """A text that changes when the rows do, found without reading them, such as the sizes of files; after ``load``.

        A run of more than ``data.scan_rows`` rows goes on only if it is the same. Empty if there is none: some rows are
        compared then.
        """
        return ""

    def sampled(self) -> Sequence[SampledRow]:
        """Some rows as a policy has sampled them, asked for after ``load``; none where nobody did.

        A run whose chat template or tokenizer writes them otherwise says so.
        """
        return ()

    @abstractmethod
    def load(self) -> Sequence[Prompt]:
        """A sequence with ``len`` and ``[i]``; rows may be read lazily, and are the same at every reading.

        One thread at a time reads them, not always the main one.

        Raises:
            DataError: The data cannot be read, or lacks the columns that are needed.
        """
