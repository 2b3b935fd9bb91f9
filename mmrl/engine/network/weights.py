"""Writes tensors of any size to files of bounded size; each rank writes some of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mmrl.config.sections import LoraConfig
from mmrl.engine.network import adapters, quantization
from mmrl.engine.network.buffers import saved_buffers
from mmrl.engine.network.folder import INDEX, ModelFolder
from mmrl.engine.network.policy import Policy, gathered
from mmrl.errors import MMRLError, NumericsError, ResourceError
from mmrl.system import failpoints

SHARD_BYTES = 2**30
"""Most bytes of a file, unless one weight has more. Saving holds as much in memory beside the model, on each rank."""
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

    @contextmanager
    def raising(self) -> Iterator[None]:
        """A block after which its first error on any rank is raised on all of them."""
        try:
            yield
        except MMRLError as error:
            self.add(error)
        self.raise_first()

    def raise_first(self) -> None:
        """Raise the first error of any rank, on all of them."""
        for error in of_all_ranks(self.first):
            if error is not None:
                raise error

    def wait_for_all(self) -> None:
        """Wait until all ranks are here; what another could not write need not be written here either."""
        first = next(filter(None, of_all_ranks(self.first)), None)
        self.first = self.first or first


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
    """Give ``write`` the tensors of one file after the other, numbered from 1: the n-th of n ranks writes every n-th.

    All ranks run through ``tensors`` even after a failure, because making them is collective. A rank keeps the tensors
    of its own file alone. After each file of their own the ranks wait for each other, so that none waits for
    another's disk in a collective of DeepSpeed's, whose group has torch's default timeout.

    Args:
        files: The tensors' names in their order.
    """
    rank, ranks = _rank(), _ranks()
    held: dict[str, torch.Tensor] = {}
    number = count = 0
    for name, tensor in tensors:
        if number % ranks == rank and not failures.first:
            held[name] = tensor.to("cpu", copy=True)  # of its own, as gathered weights are views of one storage
        count += 1
        if count < len(files[number]):
            continue
        number, count = number + 1, 0
        if number % ranks == 0 or number == len(files):
            if held and not failures.first:
                with failures.writing(target):
                    failpoints.reach("save.shard")
                    write((number - 1) // ranks * ranks + rank + 1, held)
            held = {}
            failures.wait_for_all()


def save_model(policy: Policy, folder: ModelFolder, target: Path, failures: Failures) -> None:
    """Write a policy as a Hugging Face folder, with the files of the one that it was read from.

    Collective: all ranks gather, and write in turns. A weight that is not finite is a failure, like a full disk.
    """
    save_weights(policy, policy.model.dtype, target, failures)
    with failures.writing(target):
        if _rank() == 0 and not failures.first:
            folder.save_files(target)
            with suppress(FileNotFoundError):  # the source was removed meanwhile, and transformers' config stays
                folder.save_config(target, str(policy.model.dtype).removeprefix("torch."), policy.scored_by)


def save_weights(
    policy: Policy, dtype: torch.dtype, target: Path, failures: Failures, limit: int | None = None
) -> None:
    """Write a policy's weights with the names on disk that ``save_pretrained`` gives, and its config; collective.

    Args:
        dtype: Element type of the weights; the config has the policy's own.
        limit: Most bytes of a file; ``SHARD_BYTES`` if not given.
    """
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    buffers = {name: buffer.detach().to(dtype) for name, buffer in saved_buffers(policy.model).items()}
    sizes = {name: numel(p) * dtype.itemsize for name, p in policy.model.named_parameters()}
    files = shards(sizes | {name: buffer.nbytes for name, buffer in buffers.items()}, limit)
    file_of: dict[str, str] = {}
    with failures.writing(target):
        if _rank() == 0:  # the config, before any file of weights: it would remove those as another save's
            policy.model.save_pretrained(target, state_dict={})
    failures.wait_for_all()

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        # Not ``save_pretrained``, which writes on rank 0 alone.
        on_disk = revert_weight_conversion(policy.model, tensors)
        name = WEIGHTS if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # transformers 5.19 turns such weights when it reads a file, and not when it writes one; vLLM needs them turned.
        turned = {key: tensors[key].transpose(1, 2) for key in tensors if policy.family.turned_in_files(key)}
        written = {key: value.contiguous() for key, value in (on_disk | turned).items()}
        save_file(written, target / name, metadata=dict(format="pt"))  # noqa: C408, a reward has that string as its name
        file_of.update(dict.fromkeys(on_disk, name))

    tensors = chain(policy.named_weights(dtype, tied=False), buffers.items())
    write_checked(tensors, files, write, target, failures, unbounded=buffers)
    found = {key: name for own in of_all_ranks(file_of) for key, name in own.items()}
    with failures.writing(target):
        if _rank() == 0 and not failures.first and len(files) > 1:
            _write_index(target, found, policy, dtype)


def save_adapter(lora: LoraConfig, policy: Policy, folder: ModelFolder, target: Path, failures: Failures) -> None:
    """Write a policy's adapters as a folder that peft loads; collective, as ``save_model``."""
    from safetensors.torch import save_file

    names = adapters.file_names(policy.adapted, policy.score)

    def matrices() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in names.items():
            with gathered(parameter):
                yield name, parameter.detach().clone()

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, target / adapters.WEIGHTS)
        adapters.write_config(folder, policy.adapted, lora, target, scores=bool(policy.scored_by))
        quantization.write(policy.model, target)
        folder.save_files(target)

    write_checked(matrices(), [list(names)], write, target, failures)


def write_checked(
    tensors: Iterable[tuple[str, torch.Tensor]],
    files: Sequence[Sequence[str]],
    write: Callable[[int, dict[str, torch.Tensor]], None],
    target: Path,
    failures: Failures,
    unbounded: Collection[str] = (),
) -> None:
    """``write_shards`` of weights into a new folder; one that is not finite is a failure.

    Args:
        unbounded: Names of tensors that may be infinite, such as bounds.
    """
    strange: list[str] = []

    def check_and_write(number: int, held: dict[str, torch.Tensor]) -> None:
        strange.extend(n for n, weight in held.items() if n not in unbounded and not torch.isfinite(weight).all())
        write(number, held)

    with failures.writing(target):
        target.mkdir(parents=True, exist_ok=True)
    write_shards(tensors, files, check_and_write, target, failures)
    strange = [name for own in of_all_ranks(strange) for name in own]
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


def _ranks() -> int:
    """The number of ranks; 1 if this process has not joined a group."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def of_all_ranks(value: Any) -> list[Any]:
    """Each rank's value."""
    values = [value] * _ranks()
    if torch.distributed.is_initialized():
        torch.distributed.all_gather_object(values, value)
    return values


def _write_index(target: Path, file_of: Mapping[str, str], policy: Policy, dtype: torch.dtype) -> None:
    parameters = sum(numel(parameter) for parameter in policy.model.parameters())
    totals = {"total_parameters": parameters, "total_size": parameters * dtype.itemsize}
    index = {"metadata": totals, "weight_map": dict(sorted(file_of.items()))}
    (target / INDEX).write_text(json.dumps(index, indent=2))
