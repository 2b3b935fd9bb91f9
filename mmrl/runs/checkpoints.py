"""Checkpoints on disk: written whole or not at all, sealed, and believed only if every byte is as it was written.

    RUN/checkpoints/step-000010/manifest.json   roles, size and sha256 of every other file, and a seal of its own
                                model/          by the learner: a Hugging Face folder
                                state/          by the learner and the trainer: JSON and safetensors, never a pickle
    RUN/checkpoints/best                        a link to the one that is kept for its metric

One is written to a hidden folder, forced to the disk, sealed and renamed; old ones are removed only then. Names that
begin with a dot are left by processes that were killed meanwhile. A checkpoint is safe from a kill at any moment, and
from a loss of power as far as the file system keeps the promise of ``fsync``.

An optimizer's state may be dropped later. The manifest is replaced first, and files of the state that are still there
are no damage.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.engine_api import NetworkFiles
from mmrl.errors import ConfigError, DataError, ResourceError
from mmrl.runs.disk import files_below, force, of_each, sha256, sync
from mmrl.runs.manifest import POLICY_ALONE, LaterVersionError, Manifest
from mmrl.system import failpoints
from mmrl.token_columns import POLICY, REWARD

_MANIFEST = "manifest.json"
_BEST = "best"
_PREFIX = "step-"


_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""A file system's errors on a file that is gone or broken; the last two come from its own checksums."""


class CheckpointError(DataError):
    """A checkpoint that is damaged, incomplete or of another kind."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A sealed folder; ``verify`` decides if it is to be believed."""

    path: Path
    step: int

    @property
    def role(self) -> str:
        """The role of the network that the run trains: ``policy``, or ``reward`` of a reward model, which is alone."""
        return next((role for role in (POLICY, REWARD) if (self.path / NetworkFiles.of(role).model).exists()), POLICY)

    @property
    def model(self) -> Path:
        """The trained network's Hugging Face folder, or its adapter's."""
        return self.path / NetworkFiles.of(self.role).model

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the networks that it has.

        Raises:
            CheckpointError: The manifest is damaged.
        """
        return tuple(self._manifest().roles)

    @property
    def state(self) -> Path:
        """The folder of the run's state; a policy's own is there too."""
        return self.path / NetworkFiles.of(POLICY).state

    def read_state(self, name: str) -> Any:
        """A JSON file of the state.

        Raises:
            CheckpointError: It is no JSON.
        """
        try:
            return json.loads((self.state / name).read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"a file of the checkpoint cannot be read: {error}", where=str(self.path)) from error

    @property
    def has_optimizer(self) -> bool:
        """True if it has the optimizer's state, without which no run goes on from it.

        Raises:
            CheckpointError: The manifest is damaged.
        """
        return self._manifest().has_optimizer

    def require_optimizer(self) -> None:
        """Check that a run can go on from it.

        Raises:
            CheckpointError: The manifest is damaged.
            ConfigError: It has no optimizer's state.
        """
        if not self.has_optimizer:
            raise ConfigError(
                "the checkpoint has no optimizer state, so that no run can go on from it",
                where=f"{self.path}; trainer.save_optimizer was last or none",
                remedy=f"begin a new run from its weights: model.path={self.model} with another "
                "trainer.run_dir (an adapter: the folder that `mmrl export` writes); `mmrl eval` and `mmrl export` "
                "take it as it is",
            )

    def drop_optimizer(self) -> None:
        """Remove the optimizer's state; the manifest is replaced before, so that a kill leaves a good checkpoint.

        Raises:
            CheckpointError: The manifest is damaged.
            ResourceError: A file cannot be read now.
            OSError: The folder cannot be changed.
        """
        manifest = self._manifest()
        thinner = manifest.without_optimizer()
        if manifest.has_optimizer:
            failpoints.reach("checkpoint.thinning")
            hidden = self.path.parent / f".{_MANIFEST}-{self.path.name}"  # not within, where no list would have it
            hidden.write_text(thinner.text(), encoding="ascii")
            sync(hidden)
            hidden.replace(self.path / _MANIFEST)
            sync(self.path)
            failpoints.reach("checkpoint.thinned")
        for name, path in files_below(self.path):
            if thinner.drops(name):
                path.unlink()

    def verify(self) -> None:
        """Compare every file with the manifest: names and sizes first, then contents.

        Raises:
            CheckpointError: A file is missing, not listed, or not as it was written; names it.
            ResourceError: A file cannot be read now, or a later version of mmrl wrote the checkpoint, which says
                nothing against it.
        """
        manifest = self._manifest()
        expected = manifest.files
        with _reading(self.path):
            found = {
                name: path for name, path in files_below(self.path) if name != _MANIFEST and not manifest.drops(name)
            }
        for name in sorted(expected.keys() | found.keys()):
            if name not in found:
                raise _damaged("is missing", self.path / name)
            if name not in expected:
                raise _damaged("was not written with the checkpoint", self.path / name)
            size = expected[name]["size"]
            if _size(found[name]) != size:
                raise _damaged(f"is not the file of {size} bytes that was written", found[name])

        def compare(name: str) -> None:
            with _reading(found[name]):
                if sha256(found[name]) != expected[name]["sha256"]:
                    raise _damaged("has other content than was written", found[name])

        of_each(compare, sorted(expected))

    def _manifest(self) -> Manifest:
        path = self.path / _MANIFEST
        if _size(path) is None:
            raise _damaged("is no file", path)
        try:
            with _reading(path):
                manifest = Manifest.read(path.read_text(encoding="ascii"))
        except LaterVersionError as error:
            raise ResourceError(
                f"a later version of mmrl wrote the checkpoint: {error}",
                where=str(path),
                remedy="use the mmrl that wrote it, or a later one; nothing was changed",
            ) from error
        except ValueError as error:
            raise _damaged(f"cannot be read: {error}", path) from error
        if manifest.step != self.step:
            raise _damaged("is not the one that was written with this checkpoint", path)
        return manifest


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: RUN/checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[Checkpoint]:
        """All checkpoints by step, damaged ones too.

        Raises:
            ResourceError: The folder cannot be read now.
        """
        try:
            names = os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(self._folder, error) from error
        steps = [name for name in names if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdecimal()]
        return sorted((_named(self._folder / name) for name in steps), key=lambda checkpoint: checkpoint.step)

    def clean(self) -> None:
        """Remove the leftovers of killed processes. Only for the process that holds the run's lock."""
        for path in self._folder.glob(".*"):
            with contextlib.suppress(OSError):  # such as NFS's copies of files that somebody has open
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def newest(self, on_damage: Callable[[Checkpoint, CheckpointError], None]) -> Checkpoint | None:
        """The newest one that can be believed; None if there is none at all.

        Args:
            on_damage: Called with each newer one and its damage.

        Raises:
            CheckpointError: There are some, and all of them are damaged; or ``on_damage`` raises it.
            ResourceError: One cannot be read now.
        """
        error: CheckpointError | None = None
        for checkpoint in reversed(self.all()):
            try:
                checkpoint.verify()
            except CheckpointError as found:
                on_damage(checkpoint, found)
                error = error or found
            else:
                return checkpoint
        if error is not None:
            error.remedy = "no other checkpoint is left; choose another trainer.run_dir to start anew"
            raise error
        return None

    def set_aside(self, checkpoint: Checkpoint) -> None:
        """Rename a damaged one, so that it is never taken for one of this run's.

        Raises:
            ResourceError: The folder cannot be changed.
        """
        target = self._folder / f"damaged-{checkpoint.path.name}"
        try:
            if target.exists():
                shutil.rmtree(target)
            checkpoint.path.rename(target)
        except OSError as error:
            raise ResourceError(
                f"a damaged checkpoint cannot be set aside: {error.strerror or error}",
                where=str(checkpoint.path),
                remedy="make the folder writable, or move the checkpoint away",
            ) from error

    def write(self, step: int, fill: Callable[[Path], Mapping[str, NetworkFiles] | None]) -> Checkpoint:
        """Commit the files that ``fill`` puts into a folder; with an error nothing has changed.

        Args:
            fill: Answers the networks among the files by role; None is the policy alone.

        Raises:
            ResourceError: The disk is full or cannot be written.
        """
        final, temporary = self._folder / f"{_PREFIX}{step:06d}", self._folder / f".{_PREFIX}{step:06d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            failpoints.reach("checkpoint.begin")
            roles = fill(temporary) or POLICY_ALONE
            failpoints.reach("checkpoint.filled")
            _seal(temporary, step, roles)
            failpoints.reach("checkpoint.sealed")
            if final.exists():  # damaged: else the run would have resumed from it
                shutil.rmtree(final)
            temporary.rename(final)
            failpoints.reach("checkpoint.renamed")
            sync(self._folder)
        except OSError as error:
            raise ResourceError(
                f"the checkpoint of step {step} cannot be written: {error.strerror or error}",
                where=str(error.filename or self._folder),
                remedy="make room; earlier checkpoints are untouched",
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Checkpoint(final, step)

    def prune(self, keep: int, best: int | None = None, *, drop_optimizers: bool = False) -> None:
        """Remove all but the newest ``keep`` and the one of step ``best``, which gets the link.

        Args:
            drop_optimizers: True to remove the optimizer's state of all but the newest as well.
        """
        checkpoints = self.all()
        kept = {checkpoint.step for checkpoint in checkpoints[-keep:]} | {best}
        with contextlib.suppress(OSError):  # one that stays now is removed with the next one
            if best is not None:
                self._link(best)
            for checkpoint in checkpoints:
                if checkpoint.step not in kept:
                    failpoints.reach("checkpoint.pruning")
                    hidden = self._folder / f".removed-{checkpoint.path.name}"
                    checkpoint.path.rename(hidden)  # half a checkpoint must not look like one
                    shutil.rmtree(hidden)
            for checkpoint in self.all()[:-1] if drop_optimizers else ():
                with contextlib.suppress(CheckpointError, ResourceError):  # as above; a damaged one is named in time
                    checkpoint.drop_optimizer()

    def _link(self, best: int) -> None:
        temporary, target = self._folder / f".{_BEST}", f"{_PREFIX}{best:06d}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(self._folder / _BEST)


def find(path: Path, on_damage: Callable[[Checkpoint, CheckpointError], None]) -> Checkpoint:
    """The checkpoint that a path means: a checkpoint's folder, verified, or the newest of a run's.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = path.expanduser().resolve()
    if path.is_dir() and (path.name.startswith(_PREFIX) or (path / _MANIFEST).exists()):
        try:
            checkpoint = _named(path)
        except ValueError:
            raise CheckpointError(
                "the folder's name is not that of a checkpoint",
                where=str(path),
                remedy="call it as the run did, such as step-000010",
            ) from None
        checkpoint.verify()
        return checkpoint
    newest = Checkpoints(path if path.name == "checkpoints" else path / "checkpoints").newest(on_damage)
    if newest is None:
        raise CheckpointError(
            "there is no checkpoint",
            where=str(path),
            possible="a run's folder, or one of its checkpoints, such as RUN/checkpoints/step-000010",
        )
    return newest


def write_json(path: Path, value: Any) -> None:
    """Write a file of a checkpoint's state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="ascii")


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write a file of a checkpoint's state with an object in each line; one of them at a time is in memory."""
    with path.open("w", encoding="ascii") as file:
        file.writelines(f"{json.dumps(value)}\n" for value in values)


def _named(path: Path) -> Checkpoint:
    return Checkpoint(path, int(path.name.removeprefix(_PREFIX)))


def _damaged(what: str, path: Path) -> CheckpointError:
    return CheckpointError(f"a checkpoint is damaged: {path.name} {what}", where=str(path))


def _seal(folder: Path, step: int, roles: Mapping[str, NetworkFiles]) -> None:
    """Write the manifest, and force every file to the disk."""
    files = dict(sorted(files_below(folder)))

    def seal(path: Path) -> dict[str, Any]:
        return {"size": path.stat().st_size, "sha256": sha256(path)}

    with ThreadPoolExecutor(1) as disk:  # it writes what the processor hashes
        forced = disk.submit(force, folder)
        sealed = dict(zip(files, of_each(seal, list(files.values())), strict=True))
        forced.result()
    (folder / _MANIFEST).write_text(Manifest(step, sealed, roles).text(), encoding="ascii")
    sync(folder / _MANIFEST)
    sync(folder)


def _size(path: Path) -> int | None:
    """Bytes of a file; None of anything else, such as a link, or a pipe, whose reader would wait."""
    with _reading(path):
        found = path.lstat()
    return found.st_size if stat.S_ISREG(found.st_mode) else None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Tell a disk that no longer gives a file back from a machine that cannot read it now.

    Raises:
        CheckpointError: The file is gone or broken.
        ResourceError: Anything else, such as too many open files or a server that is away.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE:
            raise _damaged(f"cannot be read ({error})", path) from error
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"the checkpoints cannot be read: {error.strerror or error}",
        where=str(error.filename or path),
        remedy="nothing was changed; start again when the file can be read",
    )
