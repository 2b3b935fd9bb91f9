"""The work and the room of a run to come: batches, epochs, and bytes on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.sections import Config
from mmrl.errors import ResourceError

_RECORD_BYTES_PER_TOKEN = 24
"""A completion token's bytes in RUN/rollouts: id, text, an advantage, three log-probs and an entropy."""
_RECORD_BYTES_PER_NUMBER = 4
"""A float32's bytes in RUN/rollouts: each of several optimizer steps adds a log-prob and an entropy."""
_RECORD_BYTES_PER_PROMPT_TOKEN = 8


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The numbers that follow from a config and the prompts that are there.

    Attributes:
        shares: Each training dataset's source, its prompts, and its share of the prompts that are drawn.
        longest: Tokens of the longest training prompt.
        evaluated: Prompts of an evaluation.
    """

    config: Config
    shares: Sequence[tuple[str, int, float]]
    longest: int
    evaluated: int

    @property
    def rows(self) -> int:
        """Training prompts."""
        return sum(rows for _, rows, _ in self.shares)

    def data(self) -> dict[str, Any]:
        """For a program."""
        trainer, sampler, learner = self.config.trainer, self.config.sampler, self.config.learner
        completions = trainer.prompts_per_step * sampler.group_size
        return {
            "prompts_per_step": trainer.prompts_per_step,
            "completions_per_step": completions,
            "updates_per_step": learner.minibatches * learner.epochs,
            "completions_per_update": round(completions / learner.minibatches, 1),
            "completions_per_rank": round(completions / self.config.cluster.ranks, 1),
            "steps": trainer.steps,
            "updates": trainer.steps * learner.minibatches * learner.epochs,
            "epochs_of_data": round(trainer.steps * trainer.prompts_per_step / self.rows, 2),
            "epochs_by_source": {
                source: round(trainer.steps * trainer.prompts_per_step * share / rows, 2)
                for source, rows, share in self.shares
            },
            "evaluations": _evaluations(self.config) if self.evaluated else 0,
            "completions_per_evaluation": self.evaluated * trainer.eval_samples,
            "longest_sample": self.longest + self.config.max_completion_tokens,
            "tokens_per_microbatch": learner.tokens_per_microbatch,
        }

    def lines(self) -> list[str]:
        """For a person."""
        data = self.data()
        lines = [
            f"{data['prompts_per_step']} prompts x {self.config.sampler.group_size} = {data['completions_per_step']} "
            f"completions a step; {_times(data['updates_per_step'], 'optimizer step')} of "
            f"{data['completions_per_update']:g}",
            f"{data['steps']} steps = {data['epochs_of_data']:g} epochs of {self.rows} prompts, {data['updates']} "
            "optimizer steps",
        ]
        if len(self.shares) > 1:
            epochs = data["epochs_by_source"]
            lines += [
                f"{share:.0%} from {name}: {epochs[name]:g} epochs of {rows}" for name, rows, share in self.shares
            ]
        if self.config.cluster.ranks > 1:
            lines.append(f"{data['completions_per_rank']:g} completions per rank, {self.config.cluster.ranks} ranks")
        if data["evaluations"]:
            lines.append(f"{data['evaluations']} evaluations of {data['completions_per_evaluation']} completions")
        return lines

    def warnings(self) -> Iterator[str]:
        """Settings that go together badly."""
        data = self.data()
        if data["longest_sample"] > data["tokens_per_microbatch"]:
            yield (
                f"one sample may take {data['longest_sample']} tokens, more than learner.tokens_per_microbatch = "
                f"{data['tokens_per_microbatch']}: it then makes a row of its own, and memory must hold it"
            )


def _evaluations(config: Config) -> int:
    trainer = config.trainer
    return 2 + (trainer.steps - 1) // trainer.eval_every if trainer.eval_every else 0


def _times(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that the run writes at most, and bytes that are free there; None if that is not known."""

    folder: Path
    free: int
    checkpoints: int | None
    rollouts: int
    media: int

    @property
    def needed(self) -> int:
        return (self.checkpoints or 0) + self.rollouts + self.media

    def data(self) -> dict[str, Any]:
        """For a program, in bytes."""
        return {
            "folder": str(self.folder),
            "free": self.free,
            "needed": self.needed,
            "checkpoints": self.checkpoints,
            "rollouts": self.rollouts,
            "media": self.media,
        }

    def lines(self) -> list[str]:
        """For a person."""
        checkpoints = "unknown" if self.checkpoints is None else gigabytes(self.checkpoints)
        return [
            f"at most {gigabytes(self.needed)} (checkpoints {checkpoints}, rollouts {gigabytes(self.rollouts)}, "
            f"images {gigabytes(self.media)}); {gigabytes(self.free)} free at {self.folder}"
        ]

    def problems(self) -> Iterator[ResourceError | str]:
        """Errors, and warnings as texts."""
        if self.needed > self.free:
            yield ResourceError(
                f"The run may write {gigabytes(self.needed)}, and {gigabytes(self.free)} are free",
                where=f"trainer.run_dir: {self.folder}",
                remedy="choose another trainer.run_dir, free space, lower trainer.keep_checkpoints, or set "
                "trainer.save_optimizer: last",
            )
        elif self.needed > 0.8 * self.free:
            yield f"the run may write {gigabytes(self.needed)} of the {gigabytes(self.free)} that are free"


def disk(
    config: Config,
    num_weights: int | None,
    lengths: Sequence[int],
    image_bytes: int,
    *,
    evaluated: int = 0,
    observed_bytes: int = 0,
) -> Disk:
    """Room on the disk.

    Args:
        num_weights: Parameters of the model; None if unknown.
        lengths: Tokens of the training prompts.
        image_bytes: Bytes of all stored images of prompts.
        observed_bytes: Bytes of an image of an observation; each turn is counted with one, up to the limit.
        evaluated: Prompts of an evaluation.
    """
    trainer, sampler = config.trainer, config.sampler
    folder = Path(trainer.run_dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    completions = trainer.steps * trainer.prompts_per_step * sampler.group_size
    prompt_bytes = sum(lengths) / len(lengths) * _RECORD_BYTES_PER_PROMPT_TOKEN
    epochs = config.learner.epochs if config.learner.minibatches * config.learner.epochs > 1 else 0
    token_bytes = _RECORD_BYTES_PER_TOKEN + 2 * epochs * _RECORD_BYTES_PER_NUMBER
    rollouts = int(completions * (config.max_completion_tokens * token_bytes + prompt_bytes / sampler.group_size))
    answers = _evaluations(config) * evaluated * trainer.eval_samples
    rollouts += int(answers * (config.max_completion_tokens * _RECORD_BYTES_PER_TOKEN + prompt_bytes))
    # One more than are kept: the oldest is removed after the newest is whole.
    kept = trainer.keep_checkpoints + 1 + (trainer.best_metric is not None)
    with_optimizer = {"all": kept, "last": 2, "none": 0}[trainer.save_optimizer]
    weight, optimizer = _checkpoint_bytes(config)
    checkpoints = None if num_weights is None else num_weights * (weight * kept + optimizer * with_optimizer)
    environment = config.environment
    observed = 0 if environment is None else min(environment.max_images, environment.max_turns)
    media = image_bytes + completions * observed * observed_bytes
    return Disk(folder, shutil.disk_usage(folder).free, checkpoints, rollouts, media)


def _checkpoint_bytes(config: Config) -> tuple[int, int]:
    """Most bytes of a checkpoint for each parameter: of the weight, and of the optimizer's state.

    That has Adam's two averages in float32, and in bfloat16 the float32 weight too.
    """
    return (4, 8) if config.model.dtype == "float32" else (2, 4 + 8)


def gigabytes(count: int) -> str:
    """A number of bytes as a text such as ``1.5 GB`` or ``12 MB``."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
