"""The driver's messages to a rank's process, and the process's answer before it builds its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrl.config.plugin_specs import Kind
from mmrl.data.images import ImageSizes
from mmrl.engine.network.template import TemplateChoice


@dataclass(frozen=True, slots=True)
class Installation:
    """The versions that a rank's process finds installed.

    Attributes:
        versions: Python's and the packages'; packages that are not installed are left out.
        plugins: By kind and name of each plugin asked for, its distribution and version, or why it cannot be used.
    """

    versions: Mapping[str, str]
    plugins: Mapping[tuple[Kind, str], str]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A rank's number among all ranks, and the address at which they meet: rank 0 listens there.

    Attributes:
        node_rank: Its place among the ranks of its node.
        address: Rank 0's address.
        own_address: The address by which ranks on other nodes reach this one; None if there are none.
        threads: Torch's number of threads; None leaves it as it is.
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
    """A rank builds its engine from this: plain values, since each process resolves plugins by name.

    Attributes:
        config: The resolved config.
        model: The model's folder, as this rank's node sees it.
        media: The media store's folder, as this rank's node sees it.
        template: The chat template, whose file the node may not have.
        with_learner: True if there is a learner.
        checkpoint: The folder to go on from, as this rank's node sees it; empty for none.
        trains: False if the learner computes log-probs alone.
        initial: The folder of its reference then, as this rank's node sees it; empty for none.
        teachers: The teachers' folders, as this rank's node sees them, in the order of the config.
        critic: The folder that ``critic.path`` names, as this rank's node sees it; empty for none.
    """

    config: Mapping[str, Any]
    rendezvous: Rendezvous
    model: str
    media: str
    grid: ImageSizes
    max_images: int
    with_sampler: bool
    with_learner: bool
    checkpoint: str = ""
    trains: bool = True
    initial: str = ""
    template: TemplateChoice = field(default_factory=TemplateChoice)
    teachers: tuple[str, ...] = ()
    critic: str = ""
