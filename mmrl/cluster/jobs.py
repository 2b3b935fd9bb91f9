"""What the driver tells a rank's process, and what the process answers before it builds its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.config.sections import Kind
from mmrl.data.images import ImageGrid


@dataclass(frozen=True, slots=True)
class Installation:
    """What a rank's process finds installed.

    Attributes:
        versions: Of Python and of the packages; those that are not installed are left out.
        plugins: Of each plugin asked for, by kind and name: distribution and version, or why it cannot be used.
    """

    versions: Mapping[str, str]
    plugins: Mapping[tuple[Kind, str], str]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Which rank of all one is, and where they meet: where rank 0 listens.

    Attributes:
        node_rank: Its place among the ranks of its node.
        address: Of rank 0.
        own_address: By which ranks on other nodes reach this one; None if there are none.
        threads: Of torch; None leaves it as it is.
    """

    rank: int
    node_rank: int
    world_size: int
    address: str
    port: int
    own_address: str | None
    threads: int | None


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank builds its engine from: plain values, since plugins are resolved by name in each process.

    Attributes:
        config: The resolved config.
        model: The model's folder, as this rank's node sees it.
        media: The media store's folder, as this rank's node sees it.
        with_learner: Whether the policy is trained.
        checkpoint: The folder of ``model/`` and ``state/`` to go on from, as this rank's node sees it; empty for none.
    """

    config: Mapping[str, Any]
    rendezvous: Rendezvous
    model: str
    media: str
    grid: ImageGrid
    max_images: int
    with_sampler: bool
    with_learner: bool
    checkpoint: str = ""
