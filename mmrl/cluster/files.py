"""What a node shares with the driver, and how files get to and from one that shares nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mmrl.errors import ResourceError

PART_BYTES = 32 * 2**20
"""Files travel in parts, and images in parcels, of this size."""

Call = Callable[..., Future[Any]]
"""``Ranks.call``."""


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

    def send(self, call: Call, folder: Path, names: Iterable[str], target: str) -> None:
        """Copy files of a folder here to the node, part by part."""
        for name in names:
            with (folder / name).open("rb") as stream:
                call(self.leader, "write_part", f"{target}/{name}", 0, b"").result()
                while data := stream.read(PART_BYTES):
                    call(self.leader, "write_part", f"{target}/{name}", stream.tell() - len(data), data).result()

    def fetch(self, call: Call, source: str, folder: Path) -> None:
        """Move a folder from the node to here, part by part.

        Raises:
            ResourceError: A file cannot be written.
        """
        for name in call(self.leader, "files", source).result():
            self._fetch_file(call, f"{source}/{name}", folder / name)
        call(self.leader, "remove_folder", source).result()

    def _fetch_file(self, call: Call, source: str, target: Path) -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as stream:
                while data := call(self.leader, "read_part", source, stream.tell(), PART_BYTES).result():
                    stream.write(data)
        except OSError as error:
            raise ResourceError(f"cannot write what node {self.host} saved: {error}", where=str(target)) from error
