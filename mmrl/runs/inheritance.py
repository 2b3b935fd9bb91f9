"""The history and the images that a run takes over from another one, from whose checkpoint it begins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mmrl.data.images import MediaStore
from mmrl.runs.checkpoints import Checkpoint, CheckpointError
from mmrl.runs.directory import RunDirectory
from mmrl.types import ImageRef


def inherit(
    checkpoint: Checkpoint, directory: RunDirectory, media: MediaStore, images: Iterable[Mapping[str, Any]]
) -> None:
    """Take over the history up to another run's checkpoint, and the images that are still needed.

    Args:
        directory: The folder of the run that begins.
        media: Its images.
        images: Records of the images of groups that the checkpoint carries over to later steps.

    Raises:
        CheckpointError: Images are not there.
        DataError: One does not show what its name says.
    """
    run = checkpoint.path.parents[1]
    directory.inherit(run, checkpoint.step)
    theirs = MediaStore(run / "media", media.grid)
    for image in images:
        name = _checked_hash(image["hash"], checkpoint)
        path = theirs.folder / f"{name}.png"
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(
                "an image that the checkpoint needs is not beside it, as a file of its own",
                where=str(path),
                remedy="begin from a checkpoint within its run's folder",
            )
        theirs.load(ImageRef(name, image["width"], image["height"], str(path)))
        media.write_file(name, theirs.read_file(name))


def _checked_hash(name: Any, checkpoint: Checkpoint) -> str:
    """The name of an image in a checkpoint that may be somebody else's."""
    if not (isinstance(name, str) and re.fullmatch(r"[0-9a-f]+", name)):
        raise CheckpointError(f"a carried image has no hash as its name: {name!r:.80}", where=str(checkpoint.path))
    return name
