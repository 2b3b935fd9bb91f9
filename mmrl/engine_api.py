"""The seams inside: an engine, and the sampler, the learner and the prompt encoder that the loop works with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmrl.errors import MMRLError
from mmrl.types import EncodedPrompt, FloatArray, Prompt, RolloutGroup, Sample, TrainingRow


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A group to sample.

    Attributes:
        prompt: The prompt to continue.
        num_samples: Completions wanted.
        temperature: 0 is greedy.
        max_new_tokens: Limit per completion, the end-of-sequence token included.
        seed: The first member's seed; member ``i`` uses ``seed + i``.
    """

    prompt: EncodedPrompt
    num_samples: int
    temperature: float
    max_new_tokens: int
    seed: int


class Sampler(Protocol):
    """Generates with the newest weights; only ``Engine.sampling`` yields one."""

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        """Groups as they finish, each with the index of its request."""
        ...


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The results of one optimizer step.

    Attributes:
        metrics: Reduced over all micro-batches and ranks.
        logprobs: Each row's, (T_i,) float32, before the step.
        entropies: Likewise the entropies, as ``PackedTokens.entropy_T``.
        fault: The reason why no rank took the step, such as a loss that is not finite; empty if all did.
        notice: A change that the learner made by itself to take it, such as a smaller micro-batch; empty if nothing.
        flops: Operations that the own rows' passes need, see ``ops.cost``; 0 if they are not counted.
        memory_bytes: Allocated on the device at most, above what was allocated before; None if that is not known.
    """

    metrics: Mapping[str, float]
    logprobs: Sequence[FloatArray]
    entropies: Sequence[FloatArray]
    fault: str = ""
    notice: str = ""
    flops: int = 0
    memory_bytes: int | None = None


class Learner(Protocol):
    """Owns the device and the trained weights; only ``Engine.learning`` yields one."""

    def logprobs(self, samples: Sequence[Sample], *, packed: bool = True) -> list[FloatArray]:
        """(T_i,) float32 log-probs of each completion under the current policy; one by one unless ``packed``."""
        ...

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """(T_i,) float32 log-probs under the initial policy."""
        ...

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """One optimizer step on the weighted sum of the rows' losses.

        Raises:
            DeviceMemoryError: The device has too little memory for it.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write what a run goes on from: ``model/`` and ``state/``; the learner can go on whatever happens.

        ``model/`` is a Hugging Face folder that ``from_pretrained`` and vLLM load. ``state/`` has the optimizer's state
        by the names of the weights, its number of steps, and the generators of all ranks: any number of ranks and any
        ZeRO stage can read it.

        Raises:
            NumericsError: A weight is not finite.
            ResourceError: The files cannot be written.
        """
        ...


class PromptEncoder(Protocol):
    """Turns prompts into the model's tokens; needs the tokenizer, not the weights."""

    def num_tokens(self, prompt: Prompt) -> int:
        """Length of the encoded prompt, image tokens included, from the images' headers alone.

        Raises:
            DataError: The row's images and placeholders do not fit, or an image cannot be used.
        """
        ...

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Tokens of a prompt, its images normalised and stored.

        Raises:
            DataError: As ``num_tokens``; or the pixels cannot be decoded.
        """
        ...

    def demonstrate(self, prompt: EncodedPrompt) -> Sample:
        """The prompt with its demonstration as completion, an end-of-sequence token appended."""
        ...


class Engine(Protocol):
    """One policy in two engines on the same devices.

    The verbs exist only on what the two context managers yield. Entering ``sampling`` means that the newest
    weights are in; with unchanged weights it costs nothing. An exception hands the device back.
    """

    @property
    def precision(self) -> str:
        """``float32`` or ``bfloat16``, of sampler and learner alike."""
        ...

    def sampling(self) -> AbstractContextManager[Sampler]: ...

    def learning(self) -> AbstractContextManager[Learner]: ...

    def describe(self) -> Mapping[str, Any]:
        """The parts that really run: devices, precisions, sampler, attention, versions; for RUN/environment.json."""
        ...

    def abandon(self, error: MMRLError) -> bool:
        """Make what is under way raise ``error``, called from another thread; False if it cannot be stopped."""
        ...

    def start_trace(self) -> None:
        """Begin to record what rank 0's process and its device do."""
        ...

    def stop_trace(self, path: Path | None) -> None:
        """End the recording, and write it as a Chrome trace, ``.json.gz``; None drops it.

        Raises:
            OSError: It cannot be written; of another node, ``ResourceError``.
        """
        ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """Marks a block of the caller's in the recording, if the caller is recorded: if rank 0 is its process."""
        ...

    def memory_bytes_max(self) -> int:
        """Peak memory of the fullest rank so far: taken of its GPU by all processes, or resident in its own."""
        ...

    def close(self) -> None:
        """Give everything back, also after a failure."""
        ...
