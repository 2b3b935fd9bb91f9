"""``mmrl export``: a checkpoint, or any model folder, as a folder of its own that is there whole or not at all.

It is written to a hidden folder beside OUT, compared with its source, forced to the disk, and renamed: a kill at any
moment leaves nothing at OUT. The next export to the same OUT removes the rest of a killed one.

OUT has a model card, README.md, and mmrl.json, which says what was exported: so a push that broke off goes on with the
folder that is there.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.cluster.nodes import fingerprints, installed_versions
from mmrl.cluster.process import prepare_process
from mmrl.commands.export.card import ADAPTER, CARD, PROVENANCE, BaseModel, ModelCard
from mmrl.commands.export.licence import licence_of
from mmrl.engine_api import NetworkFiles
from mmrl.errors import ConfigError, ResourceError, plural
from mmrl.runs.checkpoints import Checkpoint, CheckpointError, find
from mmrl.runs.disk import force, sha256, sync
from mmrl.runs.resumption import MODEL
from mmrl.system import failpoints
from mmrl.system.redaction import Redactor, without_paths
from mmrl.system.version import __version__
from mmrl.token_columns import CRITIC, POLICY

if TYPE_CHECKING:
    from mmrl.commands.export.repository import Pushed
    from mmrl.engine.aids.exporting import Export

DTYPES = "float32", "bfloat16", "float16"


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The model to export.

    Attributes:
        model: A Hugging Face folder.
        checkpoint: The model's checkpoint, verified; None if the folder is no run's.
        role: The role that the model has there.
    """

    model: Path
    checkpoint: Checkpoint | None
    role: str = POLICY

    @property
    def path(self) -> Path:
        """The checkpoint, or the folder that is no run's."""
        return self.checkpoint.path if self.checkpoint else self.model

    @property
    def base(self) -> BaseModel | None:
        """The model that training began from, or that an adapter's folder names; None if nothing says so."""
        if self.checkpoint:
            record = self.checkpoint.read_state("run.json")
            own = (record["config"].get("critic") or {}).get("path") if self.role == CRITIC else None
            key = MODEL if own is None else "critic.path"
            return BaseModel.of(own or record["config"]["model"]["path"], record["fingerprints"][key])
        if (self.model / ADAPTER).is_file():
            config = json.loads((self.model / ADAPTER).read_text(encoding="utf-8"))
            return BaseModel.of(str(config["base_model_name_or_path"]))
        return None


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The answer of ``mmrl export``.

    Attributes:
        export: None if the folder was there already, whole and of the same weights.
        pushed: The repository's part of the answer; None if nothing was pushed.
    """

    exported: ExportedModel
    out: Path
    export: Export | None
    pushed: Pushed | None = None

    def data(self) -> dict[str, Any]:
        """For programs."""
        checkpoint = self.exported.checkpoint
        return {
            "source": str(self.exported.path),
            "step": checkpoint.step if checkpoint else None,
            "out": str(self.out),
            **(dataclasses.asdict(self.export) if self.export else {"was_there": True}),
            **({"pushed": dataclasses.asdict(self.pushed)} if self.pushed else {}),
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        what = f"the {CRITIC} of a checkpoint" if self.exported.role == CRITIC else "a checkpoint"
        verified = f"{what}, as its manifest says" if self.exported.checkpoint else "a model folder"
        stored = f"; {self.export.stored}" if self.export else ""
        yield f"source    {_shown(self.exported.path)}: {verified}{stored}"
        if self.export:
            yield from self._written(self.export)
        else:
            yield f"kept      {_shown(self.out)}: an earlier export of these weights, whole"
        if self.pushed:
            yield from self.pushed.lines()

    def _written(self, done: Export) -> Iterator[str]:
        origin = f", {done.masters} of them from the optimizer's float32 weights" if done.masters else ""
        files = plural(done.files, "file")
        yield f"weights   {done.weights} in {done.dtype}{origin}; {done.size_bytes / 1e6:.1f} MB in {files}"
        yield f"kept      {', '.join(done.kept)}"
        compared = f"{plural(done.tokens, 'score' if done.scores else 'token')} of {plural(done.samples, 'sample')}"
        rounded = f", all from rounding to {done.dtype}" if done.is_rounded else ""
        gap = f"mean {done.gap.abs_mean:.1e}, max {done.gap.abs_max:.1e} {'' if done.scores else 'nats '}apart"
        yield f"compared  {compared}, before and after: {gap}{rounded}"
        yield f"wrote     {_shown(self.out)}"


def export(
    found: ExportedModel,
    out: Path,
    *,
    dtype: str | None = None,
    shard_gb: float | None = None,
    adapter: bool = False,
    base: str | None = None,
    again: bool = False,
) -> ExportReport:
    """Export to ``out``, which is new or empty.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``; None for the stored one.
        shard_gb: Largest file of weights, in gigabytes.
        adapter: Keep an adapter as it is; else it is merged into its model.
        base: The model that was adapted, if the adapter names another.
        again: Take ``out`` as it is if it is an earlier export of the same, whole.

    Raises:
        ConfigError: The model cannot be exported, or ``out`` cannot be taken.
        NumericsError: The written model does not compute the same as its source.
        ResourceError: The disk is full, or cannot be read or written.
    """
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype is {dtype!r}", where="mmrl export", possible=", ".join(DTYPES))
    if adapter and (dtype or shard_gb):
        raise ConfigError(
            "--adapter copies the adapter as it is", where="--dtype, --shard-size", remedy="leave them out"
        )
    if shard_gb is not None and not 1e-4 <= shard_gb < 1e6:
        raise ConfigError(f"--shard-size is {shard_gb}", where="mmrl export", possible="gigabytes, from 0.0001 on")
    shard_bytes = None if shard_gb is None else int(shard_gb * 1e9)
    prepare_process()
    out = out.expanduser().resolve()
    wanted = _identity(found, dtype, shard_bytes, adapter, base)
    if again and _holds(out, wanted):
        return ExportReport(found, out, None)
    _check_out(out)
    inside = found.checkpoint.path.parent if found.checkpoint else found.model
    if out.is_relative_to(inside):
        raise ConfigError("OUT is inside of what is exported", where=str(out), remedy="choose a folder outside")
    from mmrl.engine.aids.exporting import export_adapter, export_model

    try:
        with _hidden(out) as folder, tempfile.TemporaryDirectory() as media:
            state = found.model.with_name("state") if found.checkpoint and found.checkpoint.has_optimizer else None
            if adapter:
                done = export_adapter(found.model, folder, Path(media), base=base)
            else:
                done = export_model(
                    found.model, state, folder, Path(media), dtype=dtype, shard_bytes=shard_bytes, base=base
                )
            provenance = _provenance(found, done, folder) | {"export_sha256": wanted}
            (folder / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="ascii")
            write_card(found, folder, out.name)
    except OSError as error:
        raise ResourceError(
            f"the model cannot be exported: {error.strerror or error}",
            where=str(error.filename or out),
            remedy="make room, or make it readable and writable; nothing was exported",
        ) from error
    return ExportReport(found, out, done)


def write_card(
    found: ExportedModel, folder: Path, name: str, base: BaseModel | None = None, *, asks_hub: bool = False
) -> None:
    """Write the card of an exported folder; a model folder that is no run's has its own, which is copied.

    Args:
        name: The name that the card calls the model by.
        base: The base, if it has another name than ``found`` says.
        asks_hub: Ask the hub for the base's licence.
    """
    checkpoint = found.checkpoint
    if not checkpoint and (found.model / CARD).is_file():
        shutil.copyfile(found.model / CARD, folder / CARD)
        return
    base, began = base or found.base, None
    if checkpoint:
        began = Path(checkpoint.read_state("run.json")["config"]["model"]["path"])
    ModelCard(checkpoint, base, folder).write(name, licence_of(base, began, asks_hub=asks_hub))


def _identity(found: ExportedModel, *options: object) -> str:
    """A hash of the source's files and of the options, which changes when an export would write something else."""
    files = sorted(path.name for path in found.model.iterdir() if path.is_file())
    sources = fingerprints(str(found.model), files)
    has_state = bool(found.checkpoint and found.checkpoint.has_optimizer)
    return hashlib.sha256(repr((files, sources, has_state, *options)).encode()).hexdigest()


def _holds(out: Path, wanted: str) -> bool:
    """True if a folder is the export of this identity, and its weights are as they were written.

    Raises:
        ConfigError: It is that export, and its weights have changed since.
    """
    try:
        facts = json.loads((out / PROVENANCE).read_text(encoding="ascii"))
        weights = dict(facts["weights_sha256"])
        if facts["export_sha256"] != wanted:
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    for name, digest in weights.items():
        if not (out / name).is_file() or sha256(out / name) != digest:
            what = f"{name} is not as the export wrote it"
            raise ConfigError(what, where=str(out), remedy="remove the folder, and export again")
    return True


def _shown(path: Path) -> Path:
    """The path from the working folder, where it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find_model(
    path: Path, on_damage: Callable[[Checkpoint, CheckpointError], None], role: str | None = None
) -> ExportedModel:
    """The model that a path means: a checkpoint, a run (its newest good checkpoint), or a Hugging Face folder.

    Args:
        on_damage: Called with each checkpoint of a run that is newer and damaged.
        role: The network's; None is the policy, or the reward model that was trained.

    Raises:
        ConfigError: There is no model, or none of that role.
        CheckpointError: The checkpoint is damaged.
    """
    path = path.expanduser().resolve()
    for inner in (path, path.parent):
        if path.name == "model" and (inner.parent / "manifest.json").exists():
            # A checkpoint's, which can be verified.
            return find_model(inner.parent, on_damage, role or (None if inner == path else inner.name))
    if not path.is_dir():
        raise ConfigError(
            f"there is no folder {path}",
            where="mmrl export",
            possible="a checkpoint such as RUN/checkpoints/step-000010, a run's folder, or a Hugging Face folder",
        )
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        if role is not None:
            what = f"the folder is one model, and no checkpoint with a {role} in it"
            raise ConfigError(what, where=str(path), remedy="name a run or a checkpoint, or leave out --role")
        return ExportedModel(path, None)
    checkpoint = find(path, on_damage)
    role = checkpoint.role if role is None else role
    if role not in checkpoint.roles:
        raise ConfigError(
            f"the checkpoint has no {role}",
            where=str(checkpoint.path),
            possible=", ".join(checkpoint.roles),
            remedy="leave out --role, or name a checkpoint of a run with one, such as ppo's with a critic",
        )
    return ExportedModel(checkpoint.path / NetworkFiles.of(role).model, checkpoint, role)


def _check_out(out: Path) -> None:
    """Raise unless the folder is new or empty."""
    if out.exists() and not out.is_dir():
        raise ConfigError("OUT is a file", where=str(out), remedy="name a new folder")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError("OUT is not empty", where=str(out), remedy="name a new folder, or empty this one")
    if out.is_mount():
        raise ConfigError("OUT is where a disk is mounted", where=str(out), remedy=f"name a folder in it: {out}/model")


@contextmanager
def _hidden(out: Path) -> Iterator[Path]:
    """An empty folder that becomes ``out`` when the block ends well, and else is removed.

    Raises:
        ResourceError: Another process exports to the same place.
        OSError: It cannot be made or renamed.
    """
    hidden = out.with_name(f".{out.name}.mmrl-export")
    hidden.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(hidden, os.O_RDONLY)
    try:
        _lock(descriptor, hidden, out)
        try:
            for path in hidden.iterdir():  # a killed export left it
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield hidden
            force(hidden)
            failpoints.reach("export.forced")
            _rename(hidden, out)
            failpoints.reach("export.renamed")
            sync(out.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, hidden: Path, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(descriptor), hidden.stat())  # else it has just been renamed or removed
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    if not is_ours:
        raise ResourceError("another process exports to the same folder", where=str(out), remedy="choose another OUT")


def _rename(hidden: Path, out: Path) -> None:
    try:
        hidden.rename(out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            what = "somebody has written to OUT meanwhile"
            raise ConfigError(what, where=str(out), remedy="name a new folder") from error
        raise


def _provenance(exported: ExportedModel, done: Export, folder: Path) -> dict[str, Any]:
    """Where the weights come from, without paths of this machine and without secrets."""
    versions = installed_versions(("torch", "transformers", "safetensors"))
    facts: dict[str, Any] = {
        "exported_by": {"mmrl": __version__, **versions},
        "dtype": done.dtype,
        "reads_images": done.reads_images,
        "scores": done.scores,
        "weights": done.weights,
        "weights_from_float32_masters": done.masters,
        "agreement": {"tokens": done.tokens, **dataclasses.asdict(done.gap)},
    }
    facts["weights_sha256"] = {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    if exported.checkpoint:
        facts |= {**_run_facts(exported.checkpoint, exported.base), "role": exported.role}
    else:
        facts["source"] = exported.model.name
    plain: dict[str, Any] = Redactor().plain(facts)
    return plain


def _run_facts(checkpoint: Checkpoint, base: BaseModel | None) -> dict[str, Any]:
    record = checkpoint.read_state("run.json")
    config = record["config"]
    return {
        "run": checkpoint.path.parents[1].name,
        "step": checkpoint.step,
        "trained_by": {"mmrl": record["mmrl"]},
        "base_model": base.facts if base else {},
        "algorithm": without_paths(config["algorithm"]["name"]),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
    }
