"""Memory of the device that runs out: the phase in which it does, what to set, and the micro-batches that need less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from mmrl.engine import device
from mmrl.errors import DeviceMemoryError, first_line
from mmrl.types import Sample

T = TypeVar("T")

_ROWS = (
    "lower learner.tokens_per_microbatch or sampler.gpu_memory_utilization, turn "
    "model.gradient_checkpointing on, or raise learner.zero_stage (and cluster.ranks)"
)
_LESS_OF_LEARNER = "raise learner.zero_stage (and cluster.ranks), set learner.offload, or train adapters (model.lora)"
_SAMPLER_BESIDE = f"lower sampler.gpu_memory_utilization; for a smaller learner beside it, {_LESS_OF_LEARNER}"
REMEDIES = {
    "the start of the sampler": "end other processes on the device (nvidia-smi lists them), lower "
    "sampler.gpu_memory_utilization, or raise sampler.tensor_parallel_size (and cluster.ranks)",
    "the start of the learner": _LESS_OF_LEARNER,
    "the sampler's sleep": "vLLM backs up in page-locked memory of the host what no sync sends, or all of its weights: "
    "give the host more, or run fewer ranks on it",
    "the sampler's wake-up": _SAMPLER_BESIDE,
    "the weight sync": _SAMPLER_BESIDE,
    "sampling": "lower sampler.gpu_memory_utilization, which leaves more beside vLLM's own share, or "
    "sampler.engine.max_num_batched_tokens",
    "log-probs": _ROWS,
    "reference log-probs": _ROWS,
    "the log-probs in a wider type": _LESS_OF_LEARNER,
    "critic values": _ROWS,
    "critic scores": _ROWS,
    "reward scores": _ROWS,
    "the update": _ROWS,
    "the critic's update": _ROWS,
    "the optimizer step": _LESS_OF_LEARNER,
    "learning": _ROWS,
    "the copy of the policy": _LESS_OF_LEARNER,
    "the checkpoint": _LESS_OF_LEARNER,
}
"""Settings that need less memory, by the phase in which it ran out."""
OF_MICROBATCHES = {phase for phase, remedy in REMEDIES.items() if remedy is _ROWS}
"""Phases that need less with smaller micro-batches."""
OWNERS = {"generate": "sampling", "logprob": "log-probs", "sync": "the weight sync", "update": "the update"}
"""The phases of a rank's spans."""


def out_of_memory(phase: str, reason: str) -> DeviceMemoryError:
    """The error of a phase, a key of ``REMEDIES``, for which the device has too little memory."""
    error = DeviceMemoryError(
        f"out of memory in {phase}: {reason}",
        where="learner" if phase in OF_MICROBATCHES else "the device's memory",
        remedy=REMEDIES[phase],
    )
    error.microbatches_help = phase in OF_MICROBATCHES
    return error


@contextmanager
def memory_of(phase: str) -> Iterator[None]:
    """Turn the errors of a full device in a block into those of a phase; those of an inner phase stay.

    Raises:
        DeviceMemoryError: In their place.
    """
    try:
        yield
    except RuntimeError as error:
        if device.is_out_of_memory(error):
            raise out_of_memory(phase, first_line(error)) from error
        raise


class TokenBudget:
    """The tokens of a micro-batch, which a single rank halves once in a run when its device is full.

    Several ranks cannot: the others wait in a collective. The driver starts them again with half the tokens.

    Attributes:
        tokens: ``learner.tokens_per_microbatch`` times the ranks that hold a row, or half of it on a single rank.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._first = tokens
        self._notice = ""

    def within(
        self, phase: str, samples: Sequence[Sample], run: Callable[[], T], forget: Callable[[], object] = lambda: None
    ) -> T:
        """The result of ``run``, which is called again with half the tokens if memory runs out.

        Args:
            samples: Samples that it packs into micro-batches; none if it packs none.
            forget: Called in between; drops what the first call left behind.

        Raises:
            DeviceMemoryError: There is too little all the same, or smaller micro-batches are not possible.
        """
        try:
            return run()
        except RuntimeError as error:
            if not device.is_out_of_memory(error):
                raise
            reason = first_line(error)
            if not self._halve([sample.num_tokens for sample in samples]):
                raise out_of_memory(phase, reason) from error
        # Here, not in the handler: the error's traceback holds the activations.
        self._notice = (
            f"out of memory in {phase} ({reason}): learner.tokens_per_microbatch is {self.tokens} from now on"
        )
        with memory_of(phase):
            forget()
            return run()

    def take_notice(self) -> str:
        """The notice of a change since the last call; empty if there was none."""
        notice, self._notice = self._notice, ""
        return notice

    def _halve(self, lengths: Sequence[int]) -> bool:
        """Halve the tokens if that is possible; True if it was done."""
        halved = self.tokens // 2
        alone = torch.distributed.get_world_size() == 1
        if not alone or not lengths or self.tokens < self._first or max(lengths) > halved:
            return False
        self.tokens = halved
        return True
