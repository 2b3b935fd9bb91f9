"""Memory that a rank keeps on its machine, and the check that the machines have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.engine import device
from mmrl.errors import ResourceError, plural


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one rank's tensors in its machine's memory; page-locked ones are as large as torch makes them.

    Attributes:
        sampler: Bytes that vLLM backs up while it sleeps, and those of its tables.
        learner: Bytes that DeepSpeed offloads.
        reference: The reference policy, where it is away from the device between its uses.
        discards: True if a sleeping vLLM drops its weights; see ``sleep_backend``.
    """

    sampler: int = 0
    learner: int = 0
    reference: int = 0
    discards: bool = True

    @property
    def kept(self) -> int:
        """Bytes of all of them."""
        return self.sampler + self.learner + self.reference

    @property
    def needed(self) -> int:
        """With what a rank's process is allowed beside them; 0 if there are none."""
        return self.kept + device.RANK_BYTES if self.kept else 0

    def parts(self) -> str:
        """The parts for a person, the largest first."""
        named = {
            "vLLM's while it sleeps": self.sampler,
            "the learner's offloaded states": self.learner,
            "the reference policy": self.reference,
            "allowed for the process": device.RANK_BYTES,
        }
        found = sorted(named.items(), key=lambda pair: -pair[1])
        return ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in found if size)

    def remedies(self) -> list[str]:
        """Ways to take less, the one that helps most first."""
        sleep = "raise sampler.tensor_parallel_size, which divides vLLM's weights among ranks"
        if not self.discards:
            sleep = f"take vLLM 0.32 (bash examples/setup/install.sh), which need not back up its weights; or {sleep}"
        known = {
            sleep: self.sampler,
            "set learner.offload: none": self.learner,
            "set learner.zero_stage: 3": self.reference,
        }
        return [text for text, size in sorted(known.items(), key=lambda pair: -pair[1]) if size > self.kept // 20]


def check_hosts(machines: Sequence[tuple[str, int]], needed: HostMemory) -> None:
    """Refuse machines with too little memory for their ranks, before anything is loaded.

    Without this, the kernel would kill a rank at its first sleep or in its first update.

    Args:
        machines: Each rank's host, and the bytes of its memory.

    Raises:
        ResourceError: Says how much is missing.
    """
    for (host, total), ranks in sorted(Counter(machines).items()):
        here = needed.needed * ranks
        if here > total:
            raise ResourceError(
                f"{host} has {total / 1e9:.1f} GB of memory, and {plural(ranks, 'rank')} there would take about "
                f"{here / 1e9:.1f} GB: {(here - total) / 1e9:.1f} GB are missing",
                where=f"each rank: {needed.parts()}",
                possible=f"machines with {here / 1e9:.0f} GB for as many ranks",
                remedy="; or ".join([*needed.remedies(), "use more machines"]),
            )
