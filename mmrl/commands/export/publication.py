"""An export that is pushed to the hub: the hub is asked first, then the folder is written, completed, and sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.commands.export.card import ADAPTER, BaseModel, is_edited, public_base
from mmrl.commands.export.model_folder import ExportedModel, ExportReport, export, find_model, write_card
from mmrl.commands.export.repository import Destination, Repository
from mmrl.errors import ConfigError
from mmrl.runs.checkpoints import Checkpoint, CheckpointError
from mmrl.system.version import __version__


def export_and_push(
    source: Path,
    out: Path | None,
    destination: Destination | None = None,
    *,
    on_damage: Callable[[Checkpoint, CheckpointError], None],
    tell: Callable[[str], None],
    role: str | None = None,
    **options: Any,
) -> ExportReport:
    """Export to ``out``, and push the folder if there is a destination.

    A push that broke off goes on when it is called again: a folder that is this export is not written anew, and the hub
    gets only what it lacks.

    Args:
        source: A checkpoint, a run (its newest good checkpoint is meant), or a Hugging Face folder.
        out: A new or empty folder; None is one that is called as the repository, in the working folder.
        options: Arguments of ``export``.
        on_damage: Called with each checkpoint of a run that is newer and damaged.
        tell: Called with sentences for people.
        role: As of ``find_model``.

    Raises:
        MMRLError: As ``find_model``, ``export``, ``Destination.look`` and ``Repository.push`` say.
    """
    if destination is None:
        if out is None:
            raise ConfigError("there is no OUT", where="mmrl export", remedy="name a new folder, or --push REPO")
        return export(find_model(source, on_damage, role), out, **options)
    repository = destination.look()  # first, as the hashes of a checkpoint take their time
    found = find_model(source, on_damage, role)
    base = public_base(found.model, options.get("base")) if options.get("adapter") else None
    report = export(found, out or Path(repository.name.rpartition("/")[2]), again=True, **options)
    _complete(report, repository, base)
    return replace(report, pushed=repository.push(report.out, _message(found), tell))


def _message(found: ExportedModel) -> str:
    checkpoint = found.checkpoint
    what = f"step {checkpoint.step} of {checkpoint.path.parents[1].name}" if checkpoint else found.model.name
    return f"Upload {what}, exported by mmrl {__version__}"


def _complete(report: ExportReport, repository: Repository, base: BaseModel | None) -> None:
    """Have the folder name what others can load: an adapter's base, and in the card the repository.

    A card that its user has edited stays.
    """
    found, folder = report.exported, report.out
    if base is not None:
        path = folder / ADAPTER
        config = json.loads(path.read_text(encoding="utf-8"))
        named = {"base_model_name_or_path": base.name, "revision": base.commit}
        if config | named != config:
            path.write_text(json.dumps(config | named, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if not is_edited(folder):
        write_card(found, folder, repository.name, base, asks_hub=True)
