"""The section of the config on ranks and their places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mmrl.config.base import Contradiction, Section, Text


class ClusterConfig(Section):
    """Ranks and their places."""

    name: Literal["local", "ray"] = "local"
    """local: one rank, in this process. ray: one process per rank, on one node or many."""
    ranks: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks, each with a device of its own."""
    address: Text | None = None
    """An existing Ray cluster, such as `10.0.0.1:6379` or `auto`; null starts one on this machine."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.name == "local" and self.ranks > 1:
            what = f"cluster.ranks is {self.ranks}, but cluster.name: local is one rank"
            yield Contradiction(("ranks", "name"), what, "set cluster.name: ray, or remove cluster.ranks")
        if self.name == "local" and self.address:
            what = "cluster.address is for ray, but cluster.name is local"
            yield Contradiction(("address", "name"), what, "set cluster.name: ray, or remove cluster.address")
