"""Writes tensors of any size to files of bounded size, one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmrl.config.sections import LoraConfig
from mmrl.engine import adapters
from mmrl.engine.folder import INDEX, ModelFolder
from mmrl.engine.policy import Policy, gathered
from mmrl.errors import MMRLError, NumericsError, ResourceError
from mmrl.system import failpoints

SHARD_BYTES = 2**30
"""Most bytes of a file, unless one tensor has more. Saving holds as much in memory beside the model."""
WEIGHTS = "model.safetensors"


class Failures:
    """Errors of this rank, kept while all ranks go on with their collectives.

    Args:
        written: Name of the files being written, for messages.

    Attributes:
        first: The first error; None so far.
    """

    def __init__(self, written: str = "the checkpoint") -> None:
        self._written = written
        self.first: MMRLError | None = None

    def add(self, error: MMRLError) -> None:
        self.first = self.first or error

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Keep the error if the block cannot write to ``path``."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            self.add(
                ResourceError(
                    f"{self._written} cannot be written: {error}",
                    where=str(path),
                    remedy="free space there, or see that the folder can be written",
                )
            )

    def raise_first(self) -> None:
        """Raise the first error of any rank, on all of them."""
        errors: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(errors, self.first)
        for error in errors:
            if error is not None:
                raise error


def shards(sizes: Mapping[str, int], limit: int | None = None) -> list[list[str]]:
    """Names for each file, in order: as many as ``limit`` bytes (``SHARD_BYTES``) hold, and at least one."""
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit or SHARD_BYTES
        files[-1].append(name)
        room -= size
    return files


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]],
    files: Sequence[Sequence[str]],
    write: Callable[[int, dict[str, torch.Tensor]], None],
    target: Path,
    failures: Failures,
) -> None:
    """Give rank 0's ``write`` the tensors of one file after the other, numbered from 1.

    All ranks run through ``tensors`` even after a failure, because making them is collective.

    Args:
        files: The tensors' names in their order.
    """
    writes = _rank() == 0
    held: dict[str, torch.Tensor] = {}
    number = 1
    for name, tensor in tensors:
        if not writes or failures.first:
            held.clear()
            continue
        held[name] = tensor.cpu()
        if len(held) == len(files[number - 1]):
            with failures.writing(target):
                failpoints.reach("save.shard")
                write(number, held)
            held = {}
            number += 1


def save_model(policy: Policy, folder: ModelFolder, target: Path, failures: Failures) -> None:
    """Write a policy as a Hugging Face folder.

    Collective: all ranks gather, and rank 0 writes. A weight that is not finite is a failure, like a full disk.
    """
    save_weights(policy, policy.model.dtype, target, failures)
    with failures.writing(target):
        if _rank() == 0 and not failures.first:
            folder.save_files(target)


def save_weights(
    policy: Policy, dtype: torch.dtype, target: Path, failures: Failures, limit: int | None = None
) -> None:
    """Write a policy's weights with the names on disk that ``save_pretrained`` gives, and its config; collective.

    Args:
        dtype: Element type of the weights; the config has the policy's own.
        limit: Most bytes of a file; ``SHARD_BYTES`` if not given.
    """
    files = shards({name: numel(p) * dtype.itemsize for name, p in policy.model.named_parameters()}, limit)
    shard_of: dict[str, int] = {}

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors import safe_open

        policy.model.save_pretrained(target, state_dict=tensors)
        with safe_open(target / WEIGHTS, "pt") as file:
            shard_of.update(dict.fromkeys(file.keys(), number))
        if len(files) > 1:  # not its last name yet: the next call would take it for one of another model
            (target / WEIGHTS).rename(target / f"{WEIGHTS}.{number}")

    write_checked(policy.named_weights(dtype, tied=False), files, write, target, failures)
    with failures.writing(target):
        if _rank() == 0 and not failures.first and len(files) > 1:
            _name_shards(target, shard_of, policy, dtype)


def save_adapter(lora: LoraConfig, policy: Policy, folder: ModelFolder, target: Path, failures: Failures) -> None:
    """Write a policy's adapters as a folder that peft loads; collective, as ``save_model``."""
    from safetensors.torch import save_file

    def matrices() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in adapters.file_names(policy.adapted).items():
            with gathered(parameter):
                yield name, parameter.detach().clone()

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, target / adapters.WEIGHTS)
        adapters.write_config(folder, policy.adapted, lora, target)
        folder.save_files(target)

    write_checked(matrices(), [list(adapters.file_names(policy.adapted))], write, target, failures)


def write_checked(
    tensors: Iterable[tuple[str, torch.Tensor]],
    files: Sequence[Sequence[str]],
    write: Callable[[int, dict[str, torch.Tensor]], None],
    target: Path,
    failures: Failures,
) -> None:
    """``write_shards`` of weights into a new folder; one that is not finite is a failure."""
    strange: list[str] = []

    def checked() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in tensors:
            if not torch.isfinite(weight).all():
                strange.append(name)
            yield name, weight

    with failures.writing(target):
        if _rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
    write_shards(checked(), files, write, target, failures)
    if strange:
        failures.add(
            NumericsError(
                f"{len(strange)} weights are not finite; they are not saved",
                where=", ".join(strange[:8]),
                remedy="go on from the last checkpoint with a lower learner.lr",
            )
        )


def numel(parameter: torch.nn.Parameter) -> int:
    """Elements of a weight, partitioned or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _rank() -> int:
    """This process's rank; 0 if it has not joined a group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _name_shards(target: Path, shard_of: Mapping[str, int], policy: Policy, dtype: torch.dtype) -> None:
    last = max(shard_of.values())
    names = {number: f"model-{number:05d}-of-{last:05d}.safetensors" for number in range(1, last + 1)}
    for number, name in names.items():
        (target / f"{WEIGHTS}.{number}").rename(target / name)
    parameters = sum(numel(parameter) for parameter in policy.model.parameters())
    totals = {"total_parameters": parameters, "total_size": parameters * dtype.itemsize}
    index = {"metadata": totals, "weight_map": {name: names[number] for name, number in sorted(shard_of.items())}}
    (target / INDEX).write_text(json.dumps(index, indent=2))
