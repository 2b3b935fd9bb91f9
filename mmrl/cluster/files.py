"""What a node shares with the driver, and how files get to and from one that shares nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mmrl.errors import ResourceError

PART_BYTES = 32 * 2**20
"""Files travel in parts, and images in parcels, of this size."""

Ask = Callable[..., Any]
"""``RankGroup.ask``."""


@dataclass(eq=False, slots=True)
class Node:
    """One node, as the driver knows it.

    Attributes:
        id: The cluster's name for it.
        host: What people call it.
        leader: The first rank on it, which receives files for all.
        shares_files: Whether the driver's run folder is visible there.
        folder: A temporary folder there, for what it cannot see; empty if it needs none.
        images: Hashes of the images that it has received.
    """

    id: str
    host: str
    leader: int
    shares_files: bool = True
    folder: str = ""
    images: set[str] = field(default_factory=set)

    def path(self, name: str) -> str:
        """A place in its temporary folder."""
        return str(PurePosixPath(self.folder) / name)

    def send(self, ask: Ask, folder: Path, names: Iterable[str], target: str) -> None:
        """Copy files of a folder here to the node, part by part."""
        for name in names:
            with (folder / name).open("rb") as stream:
                ask(self.leader, "write_part", f"{target}/{name}", 0, b"")
                while data := stream.read(PART_BYTES):
                    ask(self.leader, "write_part", f"{target}/{name}", stream.tell() - len(data), data)

    def fetch(self, ask: Ask, source: str, folder: Path) -> None:
        """Copy a folder from the node to here, part by part.

        Raises:
            ResourceError: A file cannot be read or written.
        """
        for name in ask(self.leader, "files", source):
            self._fetch_file(ask, f"{source}/{name}", folder / name)

    def _fetch_file(self, ask: Ask, source: str, target: Path) -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as stream:
                while data := ask(self.leader, "read_part", source, stream.tell(), PART_BYTES):
                    stream.write(data)
        except OSError as error:
            raise ResourceError(f"cannot write what node {self.host} saved: {error}", where=str(target)) from error
