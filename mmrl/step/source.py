"""The source of a step's groups, and the rows that are of use to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from mmrl.config.sections import Config
from mmrl.engine_api import PromptEncoder
from mmrl.errors import DataError
from mmrl.interfaces import Algorithm, Needs
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.collector import Collector
from mmrl.rollout.kept import Kept
from mmrl.rollout.records import carried_records, read_carried
from mmrl.rollout.records.carried import UNFINISHED, experience_records, read_experience
from mmrl.rollout.unfinished import CarriedGroup
from mmrl.step.views import ViewMaker
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, GroupKey, Prompt, ScoredGroup

Draw = Callable[[int], Sequence[tuple[int, Any]]]
"""The next so many prompts as ``Source.make`` made them, each with the epoch that it is drawn in."""
Find = Callable[[Collection[GroupKey]], Mapping[GroupKey, Prompt]]
"""The rows of groups that were drawn, by the groups' keys."""


@dataclass(frozen=True, slots=True)
class Left:
    """The groups that a step leaves for the next one. It is replaced and never changed, so that a queue may keep it.

    Attributes:
        carried: Groups to use first, those of a skipped step. Where rollouts are sampled in parts it is all that are in
            flight, in the order in which they were drawn.
        in_parts: True for rollouts that are sampled in parts.
        kept: Rollouts of earlier groups, where the algorithm asks for ``experience``.
    """

    carried: Sequence[CarriedGroup] = ()
    in_parts: bool = False
    kept: Kept = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {**carried_records(self.carried, in_parts=self.in_parts), **experience_records(self.kept)}

    @classmethod
    def of(cls, state: Mapping[str, Any], media: Path) -> Self:
        """The object of an answer of ``state``.

        Args:
            media: The folder of the groups' images.
        """
        return cls(read_carried(state, media), UNFINISHED in state, read_experience(state, media))


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
        self.left = Left(in_parts=config.sampler.partial is not None)

    @property
    def num_prompts(self) -> int:
        """Prompts that the next step draws at first."""
        partial, count = self._config.sampler.partial, self._config.trainer.prompts_per_step
        return max((count if partial is None else partial.num_groups(count)) - len(self.left.carried), 0)

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
        """Take over what an earlier step has left."""
        self.left = left

    def resumed(self, left: Left, find: Find) -> Left:
        """The groups that a checkpoint has left, with all that it does not hold itself."""
        return left

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
