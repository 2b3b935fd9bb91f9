"""The model that `--model` names: a folder, a model on the hub, a run, or a checkpoint of one."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from mmrl.config.load import LoadedConfig, load_config
from mmrl.config.yaml_tree import Located, read_tree
from mmrl.errors import ConfigError, MMRLError
from mmrl.plugin_host.registry import options_class
from mmrl.runs.checkpoints import Checkpoint, CheckpointError, find
from mmrl.runs.files import read_records
from mmrl.system.redaction import remember_secrets

OPTIONAL = ("algorithm", "data.train")
"""Plugins of a config that an evaluation has no use for."""
_LONGEST = 1000
"""Characters of a text that may be a path."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to evaluate.

    Attributes:
        model: The value for ``model.path``: a folder, or a name on the hub.
        checkpoint: The model's checkpoint; None if it has none.
        is_as_trained: True if the config of the checkpoint's run is used, and not another.
        initial: ``model.path`` and ``model.revision`` of the config itself: the model that it was trained from.
    """

    model: str
    checkpoint: Checkpoint | None = None
    is_as_trained: bool = True
    initial: tuple[str, str | None] | None = None

    @property
    def config(self) -> Path | None:
        """The config file of the checkpoint's run; it may be missing."""
        return None if self.checkpoint is None else self.checkpoint.path.parents[1] / "config.yaml"

    @property
    def overrides(self) -> list[str]:
        """Command-line words that take back what a config says of another model."""
        nothing = ["model.revision=null", "model.freeze=[]", "model.lora=null", "model.quantize=null"]
        if self.is_as_trained and self.checkpoint is not None:  # whose folder has the run's template
            nothing.append("model.chat_template=null")
        return nothing

    @property
    def word(self) -> str:
        """The command-line word that names this model."""
        return f"model.path={json.dumps(self.model)}"

    @contextmanager
    def explaining(self, overrides: Sequence[str | Located] = ()) -> Iterator[None]:
        """Replace an error by one about paths in the run's config that lead nowhere from here, if there are any.

        Args:
            overrides: Values over the run's config.
        """
        try:
            yield
        except MMRLError as error:
            raise self._misplaced(overrides) or error from error

    def _misplaced(self, overrides: Sequence[str | Located]) -> ConfigError | None:
        if self.checkpoint is None or self.config is None or not self.is_as_trained:
            return None
        begun = list(read_records(self.checkpoint.path.parents[1] / "attempts.jsonl"))
        folder = next((Path(each["folder"]) for each in reversed(begun) if "folder" in each), None)
        if folder is None or folder == Path.cwd():
            return None
        words = [each for each in overrides if isinstance(each, str)]
        tree, _ = read_tree([self.config, *(each for each in overrides if isinstance(each, Located))], words)
        found = {key: value for key, value in _paths(tree) if not Path(value).exists() and (folder / value).exists()}
        if not found:
            return None
        words = [f"{key}={shlex.quote(str(folder / value))}" for key, value in found.items()]
        # A word of the command line cannot change one entry of the rewards.
        from_here = "" if any(key.startswith("rewards.") for key in found) else f", or add {' '.join(words)}"
        return ConfigError(
            f"the run's config has paths that count from where it was started, {folder}",
            where=", ".join(f"{key}: {value}" for key, value in found.items()),
            remedy=f"run this command there (cd {shlex.quote(str(folder))}){from_here}",
        )


def _paths(tree: Located, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value of each text that an evaluation may read as a relative path."""
    if isinstance(tree.value, dict | list):
        for name, item in tree.value.items() if isinstance(tree.value, dict) else enumerate(tree.value):
            if key or name in ("data", "rewards"):
                yield from _paths(item, f"{key}.{name}" if key else str(name))
    elif isinstance(tree.value, str) and not key.startswith(("data.train.", "data.mix.")):
        path = re.sub(r"(\.py):\w+$", r"\1", tree.value)
        if path and len(path) < _LONGEST and "\n" not in path and not Path(path).expanduser().is_absolute():
            yield key, path


def load(
    name: str | None,
    configs: Sequence[Path | Located],
    overrides: Sequence[str | Located],
    on_damage: Callable[[Checkpoint, CheckpointError], None],
) -> tuple[LoadedConfig, Subject | None]:
    """The config of an evaluation, and its subject.

    Args:
        name: The model, as in ``subject``; None for that of the config.
        configs: By default that of the checkpoint's run.
        overrides: Words of the command line, or values.

    Raises:
        CheckpointError: As ``subject``.
        ConfigError: The config has errors; names all of them.
        PluginError: Plugins cannot be used.
    """
    found = None if name is None else subject(name, on_damage)
    if found is not None:
        found = replace(found, is_as_trained=not configs)
        configs = configs or ([found.config] if found.config else [])
        found = replace(found, initial=_initial(configs, overrides))
        overrides = [*found.overrides, *overrides, found.word]  # another model.path is that of a reference
    words = [each for each in overrides if isinstance(each, str)]
    configs = [*configs, *(each for each in overrides if isinstance(each, Located))]
    with found.explaining(overrides) if found is not None else nullcontext():
        loaded = load_config(configs, words, options_class=options_class, optional=OPTIONAL)
    remember_secrets(loaded.config.model_dump(mode="json"))
    return loaded, found


def _initial(configs: Sequence[Path | Located], overrides: Sequence[str | Located]) -> tuple[str, str | None] | None:
    """``model.path`` and ``model.revision`` that these say; None if they name no model."""
    words = [each for each in overrides if isinstance(each, str)]
    tree, _ = read_tree([*configs, *(each for each in overrides if isinstance(each, Located))], words)
    model = tree.value.get("model") if isinstance(tree.value, dict) else None
    held = model.value if model is not None and isinstance(model.value, dict) else {}
    path, revision = (None if (each := held.get(key)) is None else each.value for key in ("path", "revision"))
    return (path, revision if isinstance(revision, str) else None) if isinstance(path, str) else None


def subject(name: str, on_damage: Callable[[Checkpoint, CheckpointError], None]) -> Subject:
    """The subject that a word names.

    Args:
        on_damage: Called with each checkpoint of a run that is newer than the one taken, and its error.

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
        return Subject(str(checkpoint.model), checkpoint)
    return Subject(str(path))
