"""The section of the config on ranks and their places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from mmrl.config.base import Contradiction, Section, Text

Ranks = Annotated[int, Field(ge=1, le=4096)]


class ClusterConfig(Section):
    """Ranks and their places."""

    name: Literal["local", "ray"] = "local"
    """local: one rank, in this process. ray: one process per rank, on one node or many."""
    ranks: Ranks = 1
    """Ranks, each with a device of its own; each of them samples and learns, in turns."""
    sampler_ranks: Ranks | None = None
    """In place of `ranks`: ranks that sample and never learn; null has none. `learner_ranks` goes with it."""
    learner_ranks: Ranks | None = None
    """In place of `ranks`: ranks that learn and never sample; null has none. `sampler_ranks` goes with it."""
    address: Text | None = None
    """An existing Ray cluster, such as `10.0.0.1:6379` or `auto`; null starts one on this machine."""

    @property
    def is_split(self) -> bool:
        """True if some ranks sample alone and the others learn alone."""
        return self.sampler_ranks is not None and self.learner_ranks is not None

    @property
    def num_sampler_ranks(self) -> int:
        """Ranks that sample."""
        return self.sampler_ranks or self.ranks

    @property
    def num_learner_ranks(self) -> int:
        """Ranks that learn."""
        return self.learner_ranks or self.ranks

    @property
    def num_ranks(self) -> int:
        """Ranks with all of their tasks: processes, and devices."""
        return self.num_sampler_ranks + self.num_learner_ranks if self.is_split else self.ranks

    @property
    def sampler_key(self) -> str:
        """The dotted key of the number of ranks that sample."""
        return "cluster.sampler_ranks" if self.is_split else "cluster.ranks"

    @property
    def learner_key(self) -> str:
        """The dotted key of the number of ranks that learn."""
        return "cluster.learner_ranks" if self.is_split else "cluster.ranks"

    @property
    def ranks_keys(self) -> str:
        """The dotted keys of the number of ranks, for messages."""
        return "cluster.sampler_ranks, cluster.learner_ranks" if self.is_split else "cluster.ranks"

    def contradictions(self) -> Iterator[Contradiction]:
        if self.name == "local" and self.ranks > 1:
            what = f"cluster.ranks is {self.ranks}, but cluster.name: local is one rank"
            yield Contradiction(("ranks", "name"), what, "set cluster.name: ray, or remove cluster.ranks")
        if self.name == "local" and self.address:
            what = "cluster.address is for ray, but cluster.name is local"
            yield Contradiction(("address", "name"), what, "set cluster.name: ray, or remove cluster.address")
        sides = {"sampler_ranks": self.sampler_ranks, "learner_ranks": self.learner_ranks}
        given = [key for key, value in sides.items() if value is not None]
        if len(given) == 1:
            (other,) = sides.keys() - set(given)
            what = f"cluster.{given[0]} is set, and cluster.{other} is not: ranks of their own sample, and others learn"
            yield Contradiction(tuple(sides), what, f"set cluster.{other} too, or remove cluster.{given[0]}")
        if given and self.name == "local":
            what = f"cluster.{given[0]} is for ray, but cluster.name: local is one rank"
            yield Contradiction((*given, "name"), what, f"set cluster.name: ray, or remove cluster.{given[0]}")
        if given and self.ranks > 1:
            what = f"cluster.ranks and cluster.{given[0]} are both set, and each of them counts ranks"
            yield Contradiction(("ranks", *given), what, f"remove cluster.ranks, or cluster.{given[0]}")

    def against(self, together: Mapping[str, int], staleness: int, sequence: int) -> Iterator[Contradiction]:
        """Contradictions with other sections, by dotted keys.

        Args:
            together: The sizes of the sampler's copies, by their keys.
            staleness: ``trainer.staleness``.
            sequence: ``learner.sequence_parallel_size``.
        """
        size, key = math.prod(together.values()), self.sampler_key
        if (self.name == "ray" or self.ranks == 1) and self.num_sampler_ranks % size:
            divided = [name for name, each in together.items() if each > 1]
            what = f"{' times '.join(divided)} is {size}, which does not divide {self.num_sampler_ranks} ({key})"
            remedy = f"set cluster.name: ray and {key} to a multiple of it, or lower it"
            yield Contradiction((*divided, key), what, remedy)
        ranks, key = self.num_learner_ranks, self.learner_key
        if (self.name == "ray" or self.ranks == 1) and ranks % sequence:
            what = f"learner.sequence_parallel_size is {sequence}, which does not divide {ranks} ({key})"
            sizes = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            remedy = f"set it to {'one of ' * (ranks > 1)}{sizes}, or cluster.name: ray and {key} to a multiple of it"
            yield Contradiction(("learner.sequence_parallel_size", key), what, remedy)
        if staleness and not self.is_split:
            what = f"trainer.staleness is {staleness}, but ranks that sample and learn in turns have the newest weights"
            keys = ("trainer.staleness", "cluster.sampler_ranks", "cluster.learner_ranks")
            remedy = "set cluster.sampler_ranks and cluster.learner_ranks, or remove trainer.staleness"
            yield Contradiction(keys, what, remedy)
