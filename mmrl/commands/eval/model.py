"""The model of an evaluation: whole, and with a mark of its weights."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config.sections import Config
from mmrl.errors import ResourceError

if TYPE_CHECKING:
    from mmrl.engine.network.folder import ModelFolder


@contextmanager
def with_whole_model(config: Config) -> Iterator[Config]:
    """The config of a whole model: an adapter is merged, into a folder that is removed in the end."""
    folder = Path(config.model.path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        yield config
        return
    from mmrl.engine.aids.exporting import write_merged

    with tempfile.TemporaryDirectory() as temporary:
        try:
            write_merged(folder, Path(temporary))
        except OSError as error:
            what = f"the adapter cannot be merged: {error.strerror or error}"
            raise ResourceError(what, where=temporary, remedy="make room, or set TMPDIR to a larger disk") from error
        model = config.model.model_copy(update={"path": temporary, "revision": None})
        yield config.model_copy(update={"model": model})


def weights_of(folder: ModelFolder) -> str:
    """A hub model's commit, or a hash of a folder's files, whole: frozen parts may begin and end many of them."""
    if folder.commit is not None:
        return folder.commit
    digest = hashlib.sha256()
    for name in folder.files():
        with (Path(folder.path) / name).open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
