"""Differences between the nodes of a cluster and the driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mmrl.cluster.survey import NodeReport
from mmrl.commands.doctor.finding import Finding


def node_findings(nodes: Sequence[NodeReport], own_versions: Mapping[str, str]) -> Iterator[Finding]:
    """A row for each node, by number (host names are private), and one more if its versions differ from the driver's.

    The driver needs no vLLM; all nodes with devices must have the same.

    Args:
        own_versions: The driver's, as in ``NodeReport.versions``.
    """
    most_gpus = max((node.num_gpus for node in nodes), default=0)
    vllms = next((_vllm(node.versions) for node in nodes if node.num_gpus == most_gpus), {})
    for number, node in enumerate(nodes, 1):
        name = f"node {number}"
        private = [folder for folder, visibility in node.folders.items() if visibility == "private"]
        folders = ", ".join(f"{folder} {visibility}" for folder, visibility in node.folders.items())
        note = f"; what is in its {' and '.join(private)} will be sent there" if private else ""
        yield Finding("nodes", name, "ok", f"{node.num_gpus} GPU(s); {folders or 'no folder compared'}{note}")
        expected = {**own_versions, **(vllms if node.num_gpus or not most_gpus else _vllm(node.versions))}
        differences = sorted(_differences(node.versions, expected))
        if differences:
            remedy = "install the same versions on every node"
            yield Finding(
                "nodes", name, "bad", "differs from the driver or other nodes: " + ", ".join(differences), remedy
            )


def _vllm(versions: Mapping[str, str]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if name.startswith("vllm")}


def _differences(there: Mapping[str, str], expected: Mapping[str, str]) -> Iterator[str]:
    for name, version in there.items():
        wanted = expected.get(name, "").partition("+")[0]  # nodes leave out a build's suffix
        if version != wanted:
            yield f"{name} {version or 'missing'} (expected {wanted or 'none'})"
