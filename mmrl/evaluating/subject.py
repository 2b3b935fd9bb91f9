"""What `--model` names: a Hugging Face folder, a model on the hub, a run, or a checkpoint of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.checkpoints import Checkpoint, CheckpointError, find
from mmrl.config import LoadedConfig, load_config
from mmrl.config_files import Located
from mmrl.redaction import remember_secrets
from mmrl.registry import options_class

OPTIONAL = ("algorithm", "data.train")
"""Plugins of a config that an evaluation has no use for."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to evaluate.

    Attributes:
        model: What ``model.path`` is to be: a folder, or a name on the hub.
        checkpoint: Whose model it is; None for one that is no checkpoint's.
    """

    model: str
    checkpoint: Checkpoint | None = None

    @property
    def config(self) -> Path | None:
        """The config of the checkpoint's run, which may not be there."""
        return None if self.checkpoint is None else self.checkpoint.path.parents[1] / "config.yaml"

    @property
    def overrides(self) -> list[str]:
        """Command-line words that make a config one of this model."""
        return [f"model.path={json.dumps(self.model)}", "model.revision=null", "model.freeze=[]", "model.lora=null"]


def load(
    name: str | None,
    configs: Sequence[Path | Located],
    overrides: Sequence[str | Located],
    on_damage: Callable[[Checkpoint, CheckpointError], None],
) -> tuple[LoadedConfig, Checkpoint | None]:
    """The config of an evaluation, and the checkpoint that its model is of.

    Args:
        name: The model, as in ``subject``; None for that of the config.
        configs: By default that of the checkpoint's run.
        overrides: Words of the command line, or values.

    Raises:
        CheckpointError: As ``subject``.
        ConfigError: Everything that is wrong with the config.
        PluginError: Plugins cannot be used.
    """
    found = None if name is None else subject(name, on_damage)
    words = [each for each in overrides if isinstance(each, str)]
    if found is not None:
        configs = configs or ([found.config] if found.config else [])
        words = [*found.overrides, *words]
    configs = [*configs, *(each for each in overrides if isinstance(each, Located))]
    loaded = load_config(configs, words, options_class=options_class, optional=OPTIONAL)
    remember_secrets(loaded.config.model_dump(mode="json"))
    return loaded, None if found is None else found.checkpoint


def subject(name: str, on_damage: Callable[[Checkpoint, CheckpointError], None]) -> Subject:
    """What a word on the command line means.

    Args:
        on_damage: Called with each checkpoint of a run that is newer than the one taken, and what is wrong with it.

    Raises:
        CheckpointError: The checkpoint is damaged, or the run has none that is good.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        return Subject(name)
    is_checkpoint = (path / "manifest.json").exists() or path.name.startswith("step-")
    if not (path / "config.json").exists() and (
        is_checkpoint or path.name == "checkpoints" or (path / "checkpoints").is_dir()
    ):
        try:
            checkpoint = find(path, on_damage)
        except CheckpointError as error:
            error.remedy = "name another checkpoint; its model/ alone is evaluated as any folder is, unverified"
            raise
        return Subject(str(checkpoint.path / "model"), checkpoint)
    return Subject(str(path))
