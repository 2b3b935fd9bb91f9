"""Many ranks as one learner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mmrl.cluster.calls import RankCalls
from mmrl.cluster.files import bare, send_images
from mmrl.cluster.shipping import PackedRows, PackedSamples
from mmrl.data.images import MediaStore
from mmrl.engine_api import Learner, NetworkFiles, UpdateResult, Way
from mmrl.errors import MMRLError
from mmrl.ops.packing import Item, Unit, shares_of, units_of
from mmrl.types import FloatArray, Sample, TrainingRow

T = TypeVar("T")


class GroupLearner(Learner):
    """Implements ``engine_api.Learner``: samples that share a prompt stay on one rank, costs are balanced.

    Args:
        ranks_of_a_row: Neighbouring ranks that hold packed rows together: they get the same samples, and answer alike.
    """

    def __init__(
        self,
        calls: RankCalls,
        media: MediaStore,
        cost: Callable[[Unit, Sequence[Sample]], float],
        *,
        roles: Iterable[str],
        shares_prefix: bool,
        ranks_of_a_row: int = 1,
    ) -> None:
        self.calls, self._media, self._cost, self._shares_prefix = calls, media, cost, shares_prefix
        self._ranks_of_a_row = ranks_of_a_row
        self.networks = {role: GroupNetwork(role, self) for role in roles}

    def save(self, folder: Path) -> Mapping[str, NetworkFiles]:
        """Each rank writes files of its own; those of nodes that do not see the folder are fetched, node by node."""
        target = folder.absolute()
        places = [str(target) if node.shares_files else node.path("saved") for node in self.calls.nodes]
        away = [node for node in dict.fromkeys(self.calls.nodes) if not node.shares_files]
        answers: list[Mapping[str, NetworkFiles] | MMRLError] = self.calls.all("save", each=places)
        try:
            for error in answers:
                if isinstance(error, MMRLError):
                    raise error
            for node in away:
                node.fetch(self.calls.ask, node.path("saved"), target)
        finally:
            for node in away if not self.calls.failed else ():
                self.calls.ask(node.leader, "remove_folder", node.path("saved"))
        return next(answer for answer in answers if not isinstance(answer, MMRLError))

    def reset_reference(self) -> None:
        self.calls.all("reset_reference")

    def share(self, samples: Sequence[Sample], rows: Sequence[TrainingRow] = ()) -> list[list[int]]:
        """Indices of each rank's samples, or of the ranks' that hold rows together.

        Args:
            rows: The samples', if they are trained on.
        """

        def cost(unit: Unit) -> float:
            return self._cost(unit, samples)

        items = [Item.of(row.sample, row) for row in rows] or [Item.of(sample) for sample in samples]
        units = units_of(items, share=self._shares_prefix)
        parts = len(self.calls.nodes) // self._ranks_of_a_row
        return [[i for unit in share for i in unit.indices] for share in shares_of(units, parts, cost)]

    def ask(self, method: str, *args: Any, jobs: Sequence[Any]) -> list[list[Any]]:
        """Call all ranks, each with the job of its share; for each job, the equal answers of its ranks."""
        count = len(self.calls.nodes) // len(jobs)
        answers = self.calls.all(method, *args, each=[job for job in jobs for _ in range(count)])
        return [answers[first : first + count] for first in range(0, len(answers), count)]

    def samples(self, shares: Sequence[Sequence[int]], samples: Sequence[Sample]) -> list[PackedSamples]:
        """Each share's samples, whose prompts are bare, one for all samples of a prompt; its ranks have the images."""
        known = {prompt: bare(prompt) for prompt in {sample.prompt for sample in samples}}
        jobs = [
            PackedSamples(
                Sample(known[sample.prompt], sample.segments, experts=sample.experts, view=sample.view)
                for sample in (samples[index] for index in share)
            )
            for share in shares
        ]
        own = [
            [
                ref
                for sample in job
                for form in (sample, *map(sample.seen, sample.prompt.views))
                for ref in form.all_images
            ]
            for job in jobs
            for _ in range(len(self.calls.nodes) // len(jobs))
        ]
        send_images(self.calls.ask, self._media, self.calls.nodes, own)
        return jobs


@dataclass(frozen=True, slots=True)
class GroupNetwork:
    """Implements ``engine_api.Network`` over many ranks, each of which has a network of this role."""

    role: str
    learner: GroupLearner

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        if way == "wide":  # one rank holds the model in a wider type; the others send their parts of the weights
            shares = [[*range(len(samples))], *([] for _ in self.learner.calls.nodes[1:])]
        else:
            shares = self.learner.share(samples)
        jobs = self.learner.samples(shares, samples)
        found: list[list[FloatArray]] = [first for first, *_ in self.learner.ask("score", self.role, way, jobs=jobs)]
        return found[0] if way == "wide" else _merged(shares, found)

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        shares = self.learner.share(samples)
        jobs = self.learner.samples(shares, samples)
        found: list[FloatArray] = [first for first, *_ in self.learner.ask("final_values", self.role, jobs=jobs)]
        return np.array(_merged(shares, [values.tolist() for values in found]), np.float32)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        samples = [row.sample for row in rows]
        shares = self.learner.share(samples, rows)
        jobs = [
            PackedRows(replace(rows[index], sample=sample) for index, sample in zip(share, own, strict=True))
            for share, own in zip(shares, self.learner.samples(shares, samples), strict=True)
        ]
        answers: list[list[UpdateResult]] = self.learner.ask("update", self.role, jobs=jobs)
        results = [first for first, *_ in answers]
        statistics = _merged(shares, [each.statistics for each in results])
        peaks = [each.memory_bytes for ranks in answers for each in ranks if each.memory_bytes is not None]
        return UpdateResult.of(
            results[0].metrics,
            statistics,
            fault=results[0].fault,
            notice=results[0].notice,
            flops=sum(each.flops for each in results),
            memory_bytes=max(peaks, default=None),
        )


def _merged(shares: Sequence[Sequence[int]], answers: Sequence[Sequence[T]]) -> list[T]:
    """Answers of all ranks in the order of the samples."""
    by_index = {
        index: value
        for share, values in zip(shares, answers, strict=True)
        for index, value in zip(share, values, strict=True)
    }
    return [by_index[index] for index in range(len(by_index))]
