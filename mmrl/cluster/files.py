"""Nodes as the driver knows them, and copies of files to and from a node that shares none with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from mmrl.data.images import MediaStore
from mmrl.errors import ResourceError
from mmrl.types import EncodedPrompt, ImageRef, Prompt

PART_BYTES = 32 * 2**20
"""Files travel in parts, and images in parcels, of this size."""

Ask = Callable[..., Any]
"""``RankCalls.ask``."""


@dataclass(eq=False, slots=True)
class Node:
    """One node, as the driver knows it.

    Attributes:
        id: The cluster's name for it.
        host: Its name for people.
        leader: The first rank on it, which receives files for all.
        shares_files: True if the driver's run folder is visible there.
        folder: A temporary folder there, for copies of files that it cannot see; empty if it needs none.
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


def send_images(ask: Ask, media: MediaStore, nodes: Sequence[Node], images: Sequence[Iterable[ImageRef]]) -> None:
    """Bring each rank's images to its node, each once, unless the node shares the driver's files.

    Args:
        nodes: Each rank's node.
    """
    for node, own in zip(nodes, images, strict=True):
        for files in missing_images(media, node, own):
            ask(node.leader, "receive_images", files)
            node.images.update(files)


def missing_images(
    media: MediaStore, node: Node, images: Iterable[ImageRef], known: Iterable[str] = ()
) -> Iterator[dict[str, bytes]]:
    """The files that a node lacks of some images, in parcels; none if it shares the driver's.

    Args:
        known: Hashes of further images that need not be sent.
    """
    if node.shares_files:
        return
    names = dict.fromkeys(ref.hash for ref in images)
    yield from _parcels(media, [name for name in names if name not in node.images and name not in known])


def _parcels(media: MediaStore, names: Iterable[str]) -> Iterator[dict[str, bytes]]:
    """Stored images by hash, in parcels of about ``PART_BYTES``."""
    parcel: dict[str, bytes] = {}
    size = 0
    for name in names:
        parcel[name] = media.read_file(name)
        size += len(parcel[name])
        if size >= PART_BYTES:
            yield parcel
            parcel, size = {}, 0
    if parcel:
        yield parcel


def bare(prompt: EncodedPrompt) -> EncodedPrompt:
    """The prompt with its row's id and source, all that a rank needs of the row: columns may be large."""
    return replace(prompt, prompt=Prompt(prompt.id, (), source=prompt.prompt.source))
