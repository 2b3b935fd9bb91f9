"""The ranks that sample and those that learn: their numbers, and the worlds in which they work together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrl.config.sections import Config
from mmrl.engine.spec import EngineSpec


@dataclass(frozen=True, slots=True)
class Sides:
    """The ranks that sample and those that learn, by their numbers; the same ones, if they take turns.

    Attributes:
        worlds: The ranks of each world of torch.distributed, in order.
    """

    samplers: range
    learners: range
    worlds: Sequence[range]

    def turns(self, *, on_cpu: bool) -> list[list[int]]:
        """The ranks that may start at the same time.

        vLLM 0.32 calls the memory that ranks of a CPU share by their numbers in their world. So sets of ranks that
        sample start there one after the other.
        """
        if not on_cpu or self.samplers == self.learners:
            return [[rank for world in self.worlds for rank in world]]
        first, *others = self.worlds[:-1]
        return [[*first, *self.learners], *map(list, others)]


def sides_of(config: Config) -> Sides:
    """The sides of a config's ranks. Those that sample come first: sets of them are to be on one node."""
    count, size = config.cluster.num_ranks, config.sampler.ranks_together
    if not config.cluster.is_split:
        return Sides(range(count), range(count), [range(count)])
    samplers = range(config.cluster.num_sampler_ranks)
    learners = range(len(samplers), count)
    return Sides(samplers, learners, [*(range(first, first + size) for first in samplers[::size]), learners])


def of_one_side(spec: EngineSpec) -> EngineSpec:
    """The spec; if one side of split ranks is enough for it, as for an evaluation, with that side's ranks alone."""
    cluster = spec.config.cluster
    if not cluster.is_split or (spec.algorithm is not None and spec.trains and spec.with_sampler):
        return spec
    count = cluster.num_sampler_ranks if spec.with_sampler else cluster.num_learner_ranks
    own = cluster.model_copy(update={"ranks": count, "sampler_ranks": None, "learner_ranks": None})
    trainer = spec.config.trainer.model_copy(update={"staleness": 0})
    return replace(spec, config=spec.config.model_copy(update={"cluster": own, "trainer": trainer}))
