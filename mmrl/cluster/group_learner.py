"""Many ranks as one learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mmrl.cluster.calls import RankCalls
from mmrl.cluster.files import bare, send_images
from mmrl.data.images import MediaStore
from mmrl.engine_api import UpdateResult
from mmrl.errors import MMRLError
from mmrl.ops.packing import Item, Unit, shares_of, units_of
from mmrl.types import EncodedPrompt, FloatArray, Sample, TrainingRow

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class GroupLearner:
    """Implements ``engine_api.Learner``: samples that share a prompt stay on one rank, costs are balanced."""

    calls: RankCalls
    media: MediaStore
    cost: Callable[[Unit, EncodedPrompt], float]
    shares_prefix: bool

    def logprobs(self, samples: Sequence[Sample], *, packed: bool = True) -> list[FloatArray]:
        shares = self._share(samples)
        return _merged(shares, self._all("logprobs", shares, samples, _bare_sample, packed))

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        shares = self._share(samples)
        return _merged(shares, self._all("reference_logprobs", shares, samples, _bare_sample))

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        shares = self._share([row.sample for row in rows])
        results: list[UpdateResult] = self._all("update", shares, rows, _bare_row)
        logprobs, entropies = ([getattr(each, name) for each in results] for name in ("logprobs", "entropies"))
        peaks = [each.memory_bytes for each in results if each.memory_bytes is not None]
        return replace(
            results[0],
            logprobs=_merged(shares, logprobs),
            entropies=_merged(shares, entropies),
            flops=sum(each.flops for each in results),
            memory_bytes=max(peaks, default=None),
        )

    def save(self, folder: Path) -> None:
        """Each rank writes files of its own; those of nodes that do not see the folder are fetched, node by node."""
        target = folder.absolute()
        places = [str(target) if node.shares_files else node.path("saved") for node in self.calls.nodes]
        away = [node for node in dict.fromkeys(self.calls.nodes) if not node.shares_files]
        failures: list[MMRLError | None] = self.calls.all("save", each=places)
        try:
            if failure := next(filter(None, failures), None):
                raise failure
            for node in away:
                node.fetch(self.calls.ask, node.path("saved"), target)
        finally:
            for node in away if not self.calls.failed else ():
                self.calls.ask(node.leader, "remove_folder", node.path("saved"))

    def _share(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Indices of each rank's samples."""

        def cost(unit: Unit) -> float:
            return self.cost(unit, samples[unit.indices[0]].prompt)

        units = units_of([Item.of(sample) for sample in samples], share=self.shares_prefix)
        return [[i for unit in share for i in unit.indices] for share in shares_of(units, len(self.calls.nodes), cost)]

    def _all(
        self, method: str, shares: Sequence[Sequence[int]], rows: Sequence[Row], bare: Callable[[Row], Row], *args: Any
    ) -> list[Any]:
        bare_rows = [[bare(rows[index]) for index in share] for share in shares]
        prompts = [[_sample_of(row).prompt for row in share] for share in bare_rows]
        send_images(self.calls.ask, self.media, self.calls.nodes, prompts)
        return self.calls.all(method, *args, each=bare_rows)


def _bare_sample(sample: Sample) -> Sample:
    return Sample(bare(sample.prompt), sample.segments)


def _bare_row(row: TrainingRow) -> TrainingRow:
    return replace(row, sample=_bare_sample(row.sample))


def _sample_of(row: Any) -> Sample:
    sample: Sample = row.sample if isinstance(row, TrainingRow) else row
    return sample


def _merged(shares: Sequence[Sequence[int]], answers: Sequence[Sequence[FloatArray]]) -> list[FloatArray]:
    """Answers of all ranks in the order of the samples."""
    by_index = {
        index: value
        for share, values in zip(shares, answers, strict=True)
        for index, value in zip(share, values, strict=True)
    }
    return [by_index[index] for index in range(len(by_index))]
