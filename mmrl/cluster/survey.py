"""A survey of a cluster's nodes before engines start: the versions on each, and the folders that it sees."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from mmrl.cluster.nodes import PACKAGES, holds, installed_versions, probe_file
from mmrl.cluster.ray_cluster import on_every_node
from mmrl.config.sections import Config
from mmrl.plugin_host.used import used_plugins

Visibility = Literal["shared", "private"]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node.

    Attributes:
        node: The cluster's own name for it.
        folders: For the driver's folders by what they hold (``run folder``, ``model``): ``shared`` if the node sees
            the same one, ``private`` if not.
        versions: Distributions by canonical name, and ``python``; empty where one is not installed.
    """

    node: str
    num_gpus: int
    folders: Mapping[str, Visibility]
    versions: Mapping[str, str]


def node_reports(config: Config) -> list[NodeReport]:
    """A report of every node that the config's cluster has; ``local`` has none but the driver's.

    Raises:
        ResourceError: The cluster cannot be reached, or the run folder cannot be written.
    """
    if config.cluster.name == "local":
        return []
    used = {plugin.distribution for plugin in used_plugins(config)} - {"file"}
    packages = sorted({*PACKAGES, "ray"} | {canonicalize_name(distribution) for distribution in used})
    with _probes(config) as probes:
        return on_every_node(config.cluster, report, probes, packages)


def report(node: str, num_gpus: int, probes: Mapping[str, tuple[str, bytes]], packages: Sequence[str]) -> NodeReport:
    """The report of the node that this process is on.

    Args:
        probes: For each of the driver's folders, a file in it and the file's content.
    """
    folders: dict[str, Visibility] = {
        name: "shared" if holds(path, content) else "private" for name, (path, content) in probes.items()
    }
    versions = dict.fromkeys(packages, "") | installed_versions(packages)
    return NodeReport(node, num_gpus, folders, versions)


@contextmanager
def _probes(config: Config) -> Iterator[dict[str, tuple[str, bytes]]]:
    run_dir = Path(config.trainer.run_dir).expanduser().absolute()
    model = Path(config.model.path).expanduser() / "config.json"
    there = next(folder for folder in (run_dir, *run_dir.parents) if os.path.isdir(folder))
    with probe_file(there) as found:
        probes = {"run folder": found}
        if model.is_file():
            probes["model"] = str(model.absolute()), model.read_bytes()
        yield probes
