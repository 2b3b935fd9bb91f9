"""The work and the room of a run to come: batches, epochs, and bytes on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.sections import Config
from mmrl.errors import ResourceError
from mmrl.ops.time_left import times_due
from mmrl.step.source import Source
from mmrl.system.report import rows

_RECORD_BYTES_PER_TOKEN = 24
"""A completion token's bytes in RUN/rollouts: id, text, an advantage, three log-probs and an entropy."""
_RECORD_BYTES_PER_NUMBER = 4
"""A float32's bytes in RUN/rollouts: each of several optimizer steps adds a log-prob and an entropy."""
_RECORD_BYTES_PER_PROMPT_TOKEN = 8
_RECORD_BYTES_PER_STEP = 15_000
"""A file's schema and the heads of its columns."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The numbers that follow from a config and the prompts that are there.

    Attributes:
        shares: Each training dataset's source, its prompts, and its share of the prompts that are drawn.
        longest: Tokens of the longest training prompt.
        largest_image: Tokens of the largest image in the training rows; 0 without any.
        evaluated: Prompts of each evaluation set, by its name.
        source: The source of the run's steps.
    """

    config: Config
    shares: Sequence[tuple[str, int, float]]
    longest: int
    evaluated: Mapping[str, int]
    source: type[Source]
    largest_image: int = 0

    @property
    def rows(self) -> int:
        """Training prompts."""
        return sum(count for _, count, _ in self.shares)

    def data(self) -> dict[str, Any]:
        """For a program."""
        trainer, sampler, learner = self.config.trainer, self.config.sampler, self.config.learner
        what, samples = self.source.texts, self.source.samples
        texts = trainer.prompts_per_step * (sampler.group_size if samples else 1)
        longest = {"longest_sample": self.longest + self.config.max_completion_tokens} if samples else {}
        return {
            "prompts_per_step": trainer.prompts_per_step,
            f"{what}_per_step": texts,
            "updates_per_step": learner.minibatches * learner.epochs,
            f"{what}_per_update": round(texts / learner.minibatches, 1),
            f"{what}_per_rank": round(texts / self.config.cluster.num_learner_ranks, 1),
            "steps": trainer.steps,
            "updates": trainer.steps * learner.minibatches * learner.epochs,
            "epochs_of_data": round(trainer.steps * trainer.prompts_per_step / self.rows, 2),
            "epochs_by_source": {
                source: round(trainer.steps * trainer.prompts_per_step * share / count, 2)
                for source, count, share in self.shares
            },
            "evaluations": _evaluations(self.config) if self.evaluated else 0,
            "completions_per_evaluation": sum(self._answers.values()),
            **({"completions_by_evaluation_set": self._answers} if any(self.evaluated) else {}),
            **longest,
            "tokens_per_microbatch": learner.tokens_per_microbatch,
            "tokens_per_row": learner.tokens_per_microbatch * learner.sequence_parallel_size,
        }

    @property
    def _answers(self) -> dict[str, int]:
        """Completions of an evaluation, by the set that they are of."""
        sets = self.config.evaluations
        return {name: count * sets[name].num_samples for name, count in self.evaluated.items()}

    def lines(self) -> list[str]:
        """For a person."""
        data, what = self.data(), self.source.texts
        size = f"{data['prompts_per_step']} prompts x {self.config.sampler.group_size} = "
        prompts = size if self.source.samples else ""
        lines = [
            f"{prompts}{data[f'{what}_per_step']} {what} a step; {_times(data['updates_per_step'], 'optimizer step')} "
            f"of {data[f'{what}_per_update']:g}",
            f"{_times(data['steps'], 'step')} = {data['epochs_of_data']:g} epochs of {rows(self.rows)}, "
            f"{_times(data['updates'], 'optimizer step')}",
        ]
        if len(self.shares) > 1:
            epochs = data["epochs_by_source"]
            lines += [
                f"{share:.0%} from {name}: {epochs[name]:g} epochs of {count}" for name, count, share in self.shares
            ]
        if (ranks := self.config.cluster.num_learner_ranks) > 1:
            shared = self.config.learner.sequence_parallel_size
            together = f", of which {shared} share each row of up to {data['tokens_per_row']} tokens" * (shared > 1)
            lines.append(f"{data[f'{what}_per_rank']:g} {what} per rank, {ranks} ranks{together}")
        if data["evaluations"]:
            times = _times(data["evaluations"], "evaluation")
            each = ", ".join(f"{count} of {name}" for name, count in self._answers.items() if name)
            judged = what if self.source.evaluates_given(self.config) else "completions"
            lines.append(f"{times} of {data['completions_per_evaluation']} {judged}" + (f" ({each})" if each else ""))
        return lines

    def warnings(self) -> Iterator[str]:
        """Settings that go together badly."""
        data, size = self.data(), self.config.learner.sequence_parallel_size
        own, room = data["tokens_per_microbatch"], data["tokens_per_row"]
        if (longest := data.get("longest_sample", 0)) > room:
            what = f"learner.tokens_per_microbatch = {own}"
            what += f" on each of {size} ranks that share a row ({room})" if size > 1 else ""
            yield (
                f"one sample may take {longest} tokens, more than {what}: it then makes a row of its own, and memory "
                "must hold it"
            )
        if size > 1 and self.largest_image > own:
            yield (
                f"an image takes {self.largest_image} tokens, more than learner.tokens_per_microbatch = {own}: {size} "
                "ranks share the tokens of its row, but one of them computes the whole image in the vision tower, and "
                "its memory must hold that; lower data.max_pixels if it does not"
            )


def _evaluations(config: Config) -> int:
    trainer = config.trainer
    return 1 + times_due(trainer.eval_every, 0, trainer.steps) if trainer.eval_every else 0


def _times(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that the run writes at most, and bytes that are free there.

    Attributes:
        checkpoints: None if that is not known.
        rollouts: Recorded completions, those of evaluations too; 0 if there are none.
    """

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
        parts = [f"checkpoints {'unknown' if self.checkpoints is None else gigabytes(self.checkpoints)}"]
        parts += [f"rollouts {gigabytes(self.rollouts)}"] if self.rollouts else []
        parts += [f"images {gigabytes(self.media)}"] if self.media else []
        return [f"at most {gigabytes(self.needed)} ({', '.join(parts)}); {gigabytes(self.free)} free at {self.folder}"]

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
    evaluated: Mapping[str, int] | None = None,
    observed_bytes: int = 0,
    demonstrated: float | None = None,
) -> Disk:
    """Room on the disk.

    Args:
        num_weights: Parameters of the networks that are trained; None if unknown.
        lengths: Tokens of the training prompts.
        image_bytes: Bytes of all stored images of prompts.
        observed_bytes: Bytes of an image of an observation; each turn is counted with one, up to the limit.
        evaluated: Prompts of each evaluation set, by its name.
        demonstrated: Mean tokens of a demonstration if the run learns from these; None if it samples.
    """
    trainer, sampler = config.trainer, config.sampler
    folder = Path(trainer.run_dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    size, tokens = (sampler.group_size, config.max_completion_tokens) if demonstrated is None else (1, demonstrated)
    completions = trainer.steps * trainer.prompts_per_step * size
    prompt_bytes = sum(lengths) / len(lengths) * _RECORD_BYTES_PER_PROMPT_TOKEN
    epochs = config.learner.epochs if config.learner.minibatches * config.learner.epochs > 1 else 0
    token_bytes = _RECORD_BYTES_PER_TOKEN + 2 * epochs * _RECORD_BYTES_PER_NUMBER
    rollouts = int(completions * (tokens * token_bytes + prompt_bytes / size))
    rollouts += trainer.steps * _RECORD_BYTES_PER_STEP
    for name, count in (evaluated or {}).items():
        found = config.evaluations[name]
        answers, most = _evaluations(config) * count * found.num_samples, found.max_new_tokens
        most = most if config.environment is None else config.max_completion_tokens
        rollouts += int(answers * (most * _RECORD_BYTES_PER_TOKEN + prompt_bytes))
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

    That has Adam's two averages in float32, and in bfloat16 the float32 weight too. A reference that is reset is there
    a second time.
    """
    models = 1 if config.reference.reset_every is None else 2
    return (4 * models, 8) if config.model.dtype == "float32" else (2 * models, 4 + 8)


def gigabytes(count: int) -> str:
    """A number of bytes as a text such as ``1.5 GB`` or ``12 MB``."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
