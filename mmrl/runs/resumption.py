"""Whether a run may go on from a checkpoint: what has changed since, and what of that changes its results."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from mmrl.config.sections import RENAMED, Config
from mmrl.config.yaml_tree import to_flow
from mmrl.errors import ConfigError
from mmrl.runs.setup import RunSetup
from mmrl.system.redaction import Redactor

if TYPE_CHECKING:
    from mmrl.engine.folder import ModelFolder

_MEMORY = (
    "kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
    "enable_prefix_caching", "enable_chunked_prefill", "block_size", "swap_space", "max_model_len", "seed",
)  # fmt: skip
"""Arguments of vLLM that are a matter of memory and speed."""
MAY_CHANGE = (
    "trainer.run_dir", "trainer.eval_*", "trainer.save_every", "trainer.keep_checkpoints", "trainer.best_*",
    "trainer.on_mismatch", "trainer.step_timeout_s", "trainer.max_restarts", "trainer.steps",
    "trainer.epochs", "trainer.stop_when",
    "cluster.*", "trackers", "trackers.*", "data.eval", "data.eval.*",
    "model.path", "model.revision", "model.trust_remote_code", "model.gradient_checkpointing",
    *(f"sampler.engine.{key}" for key in _MEMORY), "sampler.tensor_parallel_size", "sampler.gpu_memory_utilization",
    "learner.tokens_per_microbatch", "learner.share_prefix", "learner.zero_stage", "learner.offload",
    "rewards.*.timeout_s", "rewards.*.on_error", "rewards.*.workers",
    "data.train", "data.train.*", "data.mix", "data.mix.*", "data.prompt_template", "data.system_prompt",
    "data.max_prompt_tokens", "data.overlong", "data.on_bad_row", "data.max_bad_rows", "data.image_root",
)  # fmt: skip
"""Keys that may change: they do not decide what is learned, or, as paths and columns, only through the model's files
and the training prompts, whose fingerprints are compared."""
MODEL, DATA = "model", "data.train"
"""Names of the fingerprints."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a checkpoint's run and this one.

    Attributes:
        key: The dotted key, or a fingerprint's name.
        matters: Whether it changes what is learned.
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


def fingerprints(setup: RunSetup) -> dict[str, str]:
    """Of the model's files and the training prompts."""
    return {MODEL: model_fingerprint(setup.folder), DATA: setup.training.fingerprint}


def model_fingerprint(folder: ModelFolder) -> str:
    """Of a hub model its commit, of a folder the sizes, beginnings and ends of its files."""
    from mmrl.cluster.nodes import fingerprints as of_files

    if folder.commit is not None:
        return folder.commit
    files = folder.files()
    return hashlib.sha256(repr((files, of_files(folder.path, files))).encode()).hexdigest()


def changed_config(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Differences between two resolved configs, as ``plain_config`` gives them."""
    old, new = {RENAMED.get(key, key): value for key, value in _flat(before)}, dict(_flat(now))
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    decays = now["learner"]["schedule"] != "constant"  # towards the last step
    return [
        Change(key, old.get(key), new.get(key), not _is_free(key) or (key == "trainer.steps" and decays))
        for key in keys
    ]


def changed_fingerprints(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Differences in what the config's paths lead to."""
    return [Change(key, before.get(key), now[key], True) for key in now if before.get(key) != now[key]]


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


def _is_free(key: str) -> bool:
    return any(fnmatch(key, pattern) for pattern in MAY_CHANGE)
