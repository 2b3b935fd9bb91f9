"""What the nodes of a cluster have in common with the driver, and what not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mmrl.cluster.nodes import NodeReport
from mmrl.doctor.finding import Finding


def node_findings(nodes: Sequence[NodeReport], own_versions: Mapping[str, str]) -> Iterator[Finding]:
    """A row per node, by number (host names are private), and one for each where versions differ from the driver's.

    Args:
        own_versions: The driver's, in the form of ``NodeReport.versions``.
    """
    for number, node in enumerate(nodes, 1):
        name = f"node {number}"
        private = [folder for folder, visibility in node.folders.items() if visibility == "private"]
        folders = ", ".join(f"{folder} {visibility}" for folder, visibility in node.folders.items())
        note = f"; what is in its {' and '.join(private)} will be sent there" if private else ""
        yield Finding("nodes", name, "ok", f"{node.num_gpus} GPU(s); {folders or 'no folder compared'}{note}")
        differences = sorted(_differences(node.versions, own_versions))
        if differences:
            remedy = "install the same versions on every node"
            yield Finding("nodes", name, "bad", "differs from the driver: " + ", ".join(differences), remedy)


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for name, version in there.items():
        own = here.get(name, "")
        if version != own:
            yield f"{name} {version or 'missing'} (here {own or 'missing'})"
