"""What the nodes of a cluster have in common with the driver, and what not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mmrl.cluster.nodes import NodeReport
from mmrl.doctor.finding import Finding


def node_findings(nodes: Sequence[NodeReport], own_versions: Mapping[str, str]) -> Iterator[Finding]:
    """A row per node, and one for each where versions differ from the driver's.

    Args:
        own_versions: The driver's, in the form of ``NodeReport.versions``.
    """
    for node in nodes:
        private = [name for name, visibility in node.folders.items() if visibility == "private"]
        folders = ", ".join(f"{name} {visibility}" for name, visibility in node.folders.items())
        note = f"; what is in its {' and '.join(private)} will be sent there" if private else ""
        yield Finding("nodes", node.host, "ok", f"{node.num_gpus} GPU(s); {folders or 'no folder compared'}{note}")
        differences = sorted(_differences(node.versions, own_versions))
        if differences:
            remedy = "install the same versions on every node"
            yield Finding("nodes", node.host, "bad", "differs from the driver: " + ", ".join(differences), remedy)


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for name, version in there.items():
        if version != here.get(name, ""):
            yield f"{name} {version or 'missing'} (here {here.get(name, 'missing')})"
