"""What each node of a cluster says of itself, before engines start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mmrl.config import Config

Visibility = Literal["shared", "private"]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node.

    Attributes:
        node: The cluster's own name for it.
        host: What to call it in messages.
        folders: For the driver's folders by what they hold (``run folder``, ``model``): ``shared`` if the node sees
            the same one, ``private`` if not.
        versions: Distributions by canonical name, and ``python``; empty where one is not installed.
    """

    node: str
    host: str
    num_gpus: int
    folders: Mapping[str, Visibility]
    versions: Mapping[str, str]


def node_reports(config: Config) -> list[NodeReport]:
    """A report of every node that the config's cluster has; ``local`` has none but the driver's."""
    assert config.cluster.name == "local", config.cluster.name
    return []
