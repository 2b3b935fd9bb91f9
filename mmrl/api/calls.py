"""The commands train, check, eval and export as functions, for programs and notebooks that ``import mmrl``.

Each runs in a process of its own (``mmrl.commands.child_command``), so a notebook may call them as often as it likes,
from any folder.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.api.capture import GIVEN
from mmrl.api.datasets import DatasetLike
from mmrl.api.given import NOTHING, ConfigLike, EnvironmentLike, RewardLike, loaded_with
from mmrl.api.origins import Origins
from mmrl.commands.child_command import ChildCommand
from mmrl.config.load import plain_values
from mmrl.config.yaml_tree import Located
from mmrl.interfaces import Algorithm
from mmrl.runs.reader import NewMetrics, Run

Callback = Callable[[int, Mapping[str, float]], object]


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """The answer of a command.

    Attributes:
        data: The command's ``--json`` output.
        text: The printed output.
    """

    data: Mapping[str, Any]
    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation(Answer):
    """The results of an evaluation."""

    @property
    def metrics(self) -> dict[str, float]:
        """The value of each metric, such as ``eval/accuracy``; ``data["metrics"]`` has their intervals too."""
        return {name: each["value"] for name, each in self.data["metrics"].items()}


@dataclass(frozen=True, slots=True, repr=False)
class Check(Answer):
    """The findings of a check. It is true if there is no error: ``assert mmrl.check(config)``."""

    @property
    def errors(self) -> list[str]:
        """Errors that would stop or poison the run."""
        return [each["message"] for each in self.data["errors"]]

    @property
    def warnings(self) -> list[str]:
        """Facts that a user should know."""
        return list(self.data["warnings"])

    def __bool__(self) -> bool:
        return not self.errors


def train(
    config: ConfigLike,
    overrides: Mapping[str, Any] = NOTHING,
    *,
    rewards: RewardLike | Sequence[RewardLike] = (),
    dataset: DatasetLike | None = None,
    eval_dataset: DatasetLike | Mapping[str, DatasetLike] | None = None,
    algorithm: str | type[Algorithm] | None = None,
    environment: EnvironmentLike | None = None,
    callbacks: Sequence[Callback] = (),
    allow_change: Sequence[str] = (),
) -> Run:
    """Run a config, or go on with the run that its ``trainer.run_dir`` holds, as ``mmrl train`` does.

    Ctrl-C saves a checkpoint and ends the run; a second one ends it at once.

    Args:
        config: A YAML file or a mapping.
        overrides: Values that win over the config's and those below, such as ``{"trainer.steps": 20}``.
        rewards: Names, classes, functions of rollouts, or entries as in the config, whose ``name`` may be a class or
            function too. They replace the config's.
        dataset: The rows to train on: a list or generator of mappings, or a table of pandas, polars or datasets, which
            the loader of ``data.train``, or the installed loader of rows if it names none, reads from a parquet file;
            the path of a file or the name of a dataset on a hub; or a class that loads prompts.
        eval_dataset: The rows to evaluate on, likewise; or several of these by names, each with metrics of its own.
        algorithm: The name or class of the learning rule.
        environment: The name or class of what answers the policy's turns, or an entry as in the config, whose ``name``
            may be a class too; or functions, which are tools.
        callbacks: Each is called with a step and its metrics soon after the step; the run does not wait for it. One
            that returns False or raises stops the run, where nothing is lost; its error is raised.
        allow_change: Keys that may have changed in a run that goes on, as ``--allow-change``.

    Returns:
        The run; ``stopped`` says why it ended early. The same call goes on.

    Raises:
        MMRLError: See ``mmrl train``; each class has one of its exit codes.
        KeyboardInterrupt: Ctrl-C, when the run has ended.
    """
    origins = Origins()
    loaded = loaded_with(config, overrides, rewards, dataset, algorithm, environment, eval_dataset, origins=origins)
    checked = loaded.config
    for warning in loaded.warnings:
        warnings.warn(warning, FutureWarning, stacklevel=2)
    run = Run(checked.trainer.run_dir)
    new = NewMetrics(run.path)
    request = {"config": plain_values(checked), "allowed": [*allow_change]}
    command = ChildCommand("train", request, str(run.path))

    def watch() -> None:
        for step, metrics in new.read():
            for callback in callbacks:
                answer = callback(step, metrics)
                if isinstance(answer, bool | np.bool_) and not answer:
                    name = getattr(callback, "__name__", type(callback).__name__)
                    command.stop(f"by the callback {name} after step {step}", exit_code=0)

    with origins.telling():
        return Run(run.path, command.wait(watch).stopped)


def check(
    config: ConfigLike,
    overrides: Mapping[str, Any] = NOTHING,
    *,
    rewards: RewardLike | Sequence[RewardLike] = (),
    dataset: DatasetLike | None = None,
    eval_dataset: DatasetLike | Mapping[str, DatasetLike] | None = None,
    algorithm: str | type[Algorithm] | None = None,
    environment: EnvironmentLike | None = None,
) -> Check:
    """Look at everything of a run that needs no device, as ``mmrl check`` does; nothing is left in the run's folder.

    Args:
        config: As the others, see ``train``.

    Returns:
        The findings, errors among them: ``assert mmrl.check(config)``. Shown, it is the command's output.

    Raises:
        ConfigError: The config or an argument cannot be used.
        PluginError: A plugin is not installed, or does not fit.
        KeyboardInterrupt: Ctrl-C.
        InterruptedError: Somebody else's signal came.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (rewards, dataset, algorithm, environment, eval_dataset)
        origins = Origins()
        loaded = loaded_with(config, overrides, *given, folder=Path(folder) / GIVEN, origins=origins)
        request = {"config": plain_values(loaded.config)}
        with origins.telling():
            outcome = ChildCommand("check", request, "mmrl.check").wait()
    answer = outcome.complete()
    return Check(json.loads(origins.told(json.dumps(answer["data"]))), origins.told(answer["text"]))


def evaluate(
    model: str | os.PathLike[str] | None = None,
    config: ConfigLike | None = None,
    overrides: Mapping[str, Any] = NOTHING,
    *,
    on: str | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    limit: int | None = None,
    best_of: int | None = None,
    by: str | None = None,
    blank_images: bool = False,
    output: str | Path | None = None,
) -> Evaluation:
    """Evaluate a model on ``data.eval``, as ``mmrl eval`` does.

    Args:
        model: A model folder, a hub name, a run (its newest good checkpoint) or a checkpoint; None for the config's.
        config: By default the run's or checkpoint's.
        overrides: Values that win over the config's.
        on: The set of ``data.eval``, if it has several by names.
        samples: Completions of each prompt; more than one adds pass@k and majority@k.
        temperature: 0 is greedy; by default greedy for one completion, else ``sampler.temperature``.
        limit: Number of prompts, from the first on.
        best_of: Also tell of the best of n completions, for each n up to this one: ``data["best_of"]``.
        by: The component that chooses the best one, or a reward as ``--by`` names one.
        blank_images: Evaluate with grey images in place of the prompts' own, too.
        output: A folder for completions and results; the same call goes on there.

    Raises:
        MMRLError: The config, the data, a plugin or the machine does not allow it.
        KeyboardInterrupt: Ctrl-C.
        InterruptedError: Somebody else's signal came.
    """
    options = {
        "on": on,
        "samples": samples,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "limit": limit,
        "best_of": best_of,
        "by": by,
        "blank_images": blank_images,
        "output": None if output is None else str(output),
    }
    request = {
        "model": None if model is None else os.fspath(model),
        "config": None if config is None else Located.of(config, "").plain(),
        "overrides": Located.of(overrides, "").plain(),
        "options": options,
    }
    outcome = ChildCommand("evaluate", request, "mmrl.evaluate").wait()
    return Evaluation(**outcome.complete())


def export(
    checkpoint: str | os.PathLike[str],
    out: str | Path | None = None,
    *,
    role: str | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    base: str | None = None,
    shard_gb: float | None = None,
    push: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
) -> Answer:
    """Write a checkpoint as a model folder, compared with its source, as ``mmrl export`` does, and push it if wanted.

    Args:
        checkpoint: A checkpoint, a run (its newest good checkpoint) or a model folder.
        out: A new folder, or an empty one; with ``push`` by default one that is called as the repository.
        role: ``critic``, for the second network of a run that has one; by default the policy, or a reward model.
        dtype: float32, bfloat16 or float16; by default as stored.
        adapter: Keep an adapter as it is; else it is merged.
        base: The model that was adapted, if it has moved.
        shard_gb: Largest file of weights, in gigabytes.
        push: The repository on the hub that gets the folder, ``OWNER/NAME``; the same call goes on with a push that
            broke off.
        private: Who may see a repository that the push makes; by default as the hub does.
        revision: The branch that is pushed to.
        message: The commit's.

    Raises:
        MMRLError: There is no model, it does not agree with its source, ``out`` cannot be taken, or the hub refuses.
        KeyboardInterrupt: Ctrl-C; the folder is there whole, or not at all.
        InterruptedError: Somebody else's signal came, with the same outcome.
    """
    options = {"role": role, "dtype": dtype, "adapter": adapter, "base": base, "shard_gb": shard_gb}
    destination = {"repo": push, "revision": revision, "private": private, "message": message}
    request: dict[str, Any] = {"source": os.fspath(checkpoint), "options": options}
    request |= {"out": None if out is None else str(out), "push": destination}
    outcome = ChildCommand("export", request, str(out or push)).wait()
    return Answer(**outcome.complete())
