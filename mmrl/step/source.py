"""The source of a step's groups, and the rows that are of use to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from mmrl.config.sections import Config
from mmrl.engine_api import PromptEncoder
from mmrl.errors import DataError
from mmrl.interfaces import Algorithm, Needs
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.collector import Collector
from mmrl.rollout.records import group_records, read_groups
from mmrl.step.views import ViewMaker
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, Prompt, ScoredGroup

Draw = Callable[[int], Sequence[tuple[int, Any]]]
"""The next so many prompts as ``Source.make`` made them, each with the epoch that it is drawn in."""


@dataclass(frozen=True, slots=True)
class Left:
    """The groups that a step leaves for the next one. It is replaced and never changed, so that a queue may keep it.

    Attributes:
        carried: Groups to use first.
    """

    carried: Sequence[ScoredGroup] = ()

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {"carried_groups": group_records(self.carried)}

    @classmethod
    def of(cls, state: Mapping[str, Any], media: Path) -> Self:
        """The object of an answer of ``state``.

        Args:
            media: The folder of the groups' images.
        """
        return cls(read_groups(state["carried_groups"], media))


class Source(ABC):
    """The source of a step's groups: a way to make prompts ready, and one to gather a step.

    Args:
        event: Called with a kind and fields for each thing that a run is told.

    Attributes:
        samples: True if each step samples the policy, and rewards score it; else rows have the completions.
        compares: True if the rows have scores of their own.
        texts: The noun for the texts that a step learns from.
        left_out: Names of the counts of rows that are left out, each a metric of every step: ``data/ties``.
        left: The groups that are left for the next step.
    """

    samples: ClassVar[bool]
    compares: ClassVar[bool] = False
    texts: ClassVar[str]
    left_out: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        encoder: PromptEncoder,
        collector: Collector,
        event: Callable[..., None],
    ) -> None:
        self._config, self._algorithm, self._encoder = config, algorithm, encoder
        self._collector, self._event = collector, event
        self._views = ViewMaker(config, algorithm, encoder)
        self.left = Left()

    @abstractmethod
    def make(self, prompt: Prompt) -> Any:
        """The object that is made of a prompt when it is drawn."""

    @abstractmethod
    def gather(self, step: int, draw: Draw, clock: Clock, version: int | None = None) -> SampledStep:
        """The step's groups.

        Args:
            version: The version of the weights to sample with; None is the newest.

        Raises:
            SamplersRestarted: To be gathered again, from what ``left`` and the rows were before.
            MMRLError: A reward or the algorithm fails, and nothing was sampled.
        """

    def go_back(self, left: Left) -> None:
        """Take over what an earlier step has left, or a run that goes on."""
        self.left = left

    @classmethod
    def check_row(cls, prompt: Prompt, config: Config, needs: Needs, encoder: PromptEncoder) -> None:
        """See that a training row is of use to the algorithm, before it is drawn.

        Raises:
            DataError: It lacks what the algorithm learns from, or that cannot be learned.
            UselessRow: There is nothing to learn from it.
        """
        check_question(prompt)

    @classmethod
    def evaluates_given(cls, config: Config) -> bool:
        """True if evaluations judge the groups that held-out rows have themselves, and sample nothing."""
        return False

    @classmethod
    def group(cls, prompt: EncodedPrompt, needs: Needs, encoder: PromptEncoder) -> ScoredGroup:
        """The group that a row has itself.

        Raises:
            DataError: It has none that can be learned.
        """
        raise NotImplementedError(f"{cls.__name__} samples its groups")


def check_question(prompt: Prompt) -> None:
    """See that the policy can be asked with a row.

    Raises:
        DataError: It is a document.
    """
    if prompt.is_document:
        raise DataError(
            "The row is a document, and nothing can be sampled for it",
            where=prompt.id,
            possible="an algorithm that learns from demonstrations; for an evaluation, no rewards",
            remedy="choose such an algorithm, or leave the option document of this dataset out",
        )
