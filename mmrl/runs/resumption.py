"""The check that a run may go on from a checkpoint: changes since then, and those that change its results."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmrl.config.keys import default_of, may_change
from mmrl.config.sections import RENAMED, Config
from mmrl.config.yaml_tree import to_flow
from mmrl.errors import ConfigError
from mmrl.system.redaction import Redactor

if TYPE_CHECKING:
    from mmrl.engine.network.folder import ModelFolder

MODEL, TEMPLATE, DATA, EVALUATED = "model", "model.chat_template", "data.train", "data.eval"
"""Names of the fingerprints; one of several evaluation sets adds its own."""
_OWN = "the model's own"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a checkpoint's run and this one.

    Attributes:
        key: The dotted key, or a fingerprint's name.
        matters: True if it changes what is learned.
    """

    key: str
    before: Any
    now: Any
    matters: bool

    def __str__(self) -> str:
        return f"{self.key}: {to_flow(self.before)} -> {to_flow(self.now)}"


def plain_config(config: Config) -> dict[str, Any]:
    """The config as it is kept with a checkpoint, without secrets."""
    plain: dict[str, Any] = Redactor().plain(config.model_dump(mode="json"))
    return plain


def model_fingerprint(folder: ModelFolder) -> str:
    """A hub model's commit, or a hash of the sizes, beginnings and ends of a folder's files."""
    from mmrl.cluster.nodes import fingerprints as of_files

    if folder.commit is not None:
        return folder.commit
    files = folder.files()
    return hashlib.sha256(repr((files, of_files(folder.path, files))).encode()).hexdigest()


def template_fingerprint(folder: ModelFolder) -> dict[str, str]:
    """A hash of the chat template in place of the model's own, by its key; empty without one."""
    text = folder.template.text
    return {} if text is None else {TEMPLATE: hashlib.sha256(text.encode()).hexdigest()}


def changed_config(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Differences between two resolved configs, as ``plain_config`` gives them.

    A version before a key existed did what the key's default does.
    """
    old, new = {RENAMED.get(key, key): value for key, value in _flat(before)}, dict(_flat(now))
    old |= {key: default for key in new if key not in old and (default := default_of(key)) is not None}
    decays = now["learner"]["schedule"] != "constant"  # towards the last step
    return [
        replace(change, matters=not may_change(change.key) or (change.key == "trainer.steps" and decays))
        for change in _differences(old, new)
    ]


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Differences between two trees of values, which all matter."""
    return _differences(dict(_flat(before)), dict(_flat(now)))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [Change(key, old.get(key), new.get(key), True) for key in keys]


def changed_fingerprints(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Differences in the files that the config's paths lead to."""
    return [Change(key, before.get(key), now[key], True) for key in now if before.get(key) != now[key]]


def changed_contents(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Differences between a run's fingerprints and those of its checkpoint.

    Code and evaluation sets that the checkpoint has none of are left out: they came into the config, which is a change
    of its own, or an older version did not look at them. Nothing is learned from evaluation sets.
    """
    if TEMPLATE in before or TEMPLATE in now:
        before, now = {TEMPLATE: _OWN, **before}, {TEMPLATE: _OWN, **now}
    known = {key: value for key, value in now.items() if key in before or key in (MODEL, DATA)}
    return [
        replace(change, matters=False) if change.key.startswith(EVALUATED) else change
        for change in changed_fingerprints(before, known)
    ]


def refuse(changes: Sequence[Change], allowed: Collection[str], where: str) -> None:
    """Raise unless every change that matters is allowed by name.

    Raises:
        ConfigError: Names those that are not.
    """
    blocking = [change for change in changes if change.matters and change.key not in allowed]
    if blocking:
        names = " ".join(f"--allow-change {change.key}" for change in blocking)
        raise ConfigError(
            "the run cannot go on as it began:\n" + "\n".join(f"    {change}" for change in blocking),
            where=where,
            remedy=f"undo the change, allow it ({names}; in Python, allow_change), or choose another trainer.run_dir",
        )


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key; nothing of an empty section."""
    if value == {}:
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    parts = [part for name, item in items for part in _flat(item, f"{key}.{name}" if key else str(name))]
    if parts:
        yield from parts
    else:
        yield key, value
