"""The seams inside: an engine, and the sampler, the learner and the prompt encoder that the loop works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from mmrl.errors import ConfigError, MMRLError
from mmrl.token_columns import POLICY
from mmrl.types import (
    Call,
    Content,
    EncodedPrompt,
    FloatArray,
    ImageArray,
    Inspection,
    IntArray,
    Prompt,
    RolloutGroup,
    Sample,
    Segment,
    TrainingRow,
)
from mmrl.types.sampling import EAGER as EAGER
from mmrl.types.sampling import Cut as Cut
from mmrl.types.sampling import Finished as Finished
from mmrl.types.sampling import Polled as Polled
from mmrl.types.sampling import SamplingRequest as SamplingRequest
from mmrl.types.update import UpdateResult as UpdateResult

Way = Literal["packed", "single", "wide"]
"""The way in which a network computes: ``packed`` has several samples in a row, ``single`` one. ``wide`` is plain
transformers in a wider type, bfloat16 in float32 and float32 in float64, with the weights that the sampler gets."""


class Sampler(Protocol):
    """Generates with the weights that ``Engine.sampling`` was asked for; only that yields one.

    Requests are submitted, and polled until they are finished. A request with ``answered_after`` keeps its ticket: when
    it is finished, its caller answers with the episode's next request, or with None if the episode is over. An answer
    is admitted ``answered_after`` engine steps after the end of the turn, whenever it is given: a late one is waited
    for, an early one waits. If nothing else runs, the count of steps jumps to the earliest one that is due. What shares
    a batch is thus the same in every run. ``EAGER`` answers are admitted when they are given.
    """

    def submit(self, requests: Sequence[SamplingRequest]) -> Sequence[int]:
        """Begin to sample; returns a ticket for each request."""
        ...

    def answer(self, ticket: int, request: SamplingRequest | None) -> None:
        """Go on with the episode of a finished request; None ends it."""
        ...

    def poll(self) -> Polled:
        """Sample until a request is finished or an answer is missing; empty if nothing is left.

        With ``EAGER`` requests it may return earlier, with nothing, so that their answers can be given.
        """
        ...

    def drop(self) -> None:
        """Give up every request; leaving ``Engine.sampling`` does so too."""
        ...

    def stop_after(self, engine_steps: int, groups: int) -> None:
        """Stop once so many further steps are made and so many further groups are over; ``Polled.stopped`` tells it.

        Nothing that is left is a stop too. A group is the submitted requests of one ``prompt.key`` that may be cut. A
        request that is answered is over at the step at which its None is due. Steps over which the count jumps are
        counted. Answers that are due at the stop are waited for; others may be missing. No step is made after the stop
        until this is called again. It is called when all requests are submitted, before the first poll or at a stop.
        """
        raise AssertionError("this sampler samples each request to its end")

    def cut(self) -> Sequence[Cut]:
        """Give up every request at a stop, and tell in the order of the tickets how each of them goes on.

        An episode whose turn is finished, and whose answer was not due, is not among them, whether that was given or
        not. Prefix caches are dropped.
        """
        raise AssertionError("this sampler samples each request to its end")

    def score(self, samples: Sequence[Sample], temperature: float) -> list[list[FloatArray]]:
        """For each rank that samples, (T_i,) float32 log-probs of each completion's tokens under the distribution from
        which that rank would sample them at a temperature; 0 where the policy did not write the token.

        No request may be left. Prefix caches are dropped.
        """
        raise AssertionError("this sampler does not score tokens")

    def forget_prompts(self) -> None:
        """Drop what finished requests have left in caches, so that later ones are computed as if they were the first.

        No request may be left. A sampler without caches has nothing to drop.
        """
        return

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        """Groups as they finish, each with the index of its request; nobody answers them."""
        try:
            left = {ticket: index for index, ticket in enumerate(self.submit(requests))}
            while left:
                news = self.poll()
                assert not news.stopped, "requests that are sampled to their ends do not go by a stop"
                for finished in news.finished:
                    yield left.pop(finished.ticket), finished.group
        finally:
            self.drop()


@dataclass(frozen=True, slots=True)
class NetworkFiles:
    """The files of a network in a checkpoint.

    Attributes:
        model: Its Hugging Face folder, from the checkpoint's.
        state: The folder of its learner's state; empty if nothing trains it.
        optimizer: True if the state has the optimizer's, in files whose names begin with ``optimizer``.
    """

    model: str = "model"
    state: str = "state"
    optimizer: bool = True

    @classmethod
    def of(cls, role: str, *, optimizer: bool = True, trained: bool = True) -> NetworkFiles:
        """A role's: the policy's are in the checkpoint's folder, those of another in a folder of the role's name."""
        within = "" if role == POLICY else f"{role}/"
        return cls(f"{within}model", f"{within}state" if trained else "", optimizer and trained)


class Network(Protocol):
    """One network of a learner, of the role that ``Learner.network`` was asked for."""

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        """(T_i,) log-probs of each completion; float32, in the ``wide`` way float64. Of a critic the values of the
        places that predict its tokens, inserted ones among them.

        Args:
            way: See ``Way``. Where the ``wide`` way cannot be gone, as the device has no room for it, the list is
                empty.
        """
        ...

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        """(B,) float32 values after the last token of each sample; only of a network with a score head."""
        raise AssertionError("this network has no score head")

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """One optimizer step on the weighted sum of the rows' losses; only of a network that is trained.

        Raises:
            DeviceMemoryError: The device has too little memory for it.
        """
        ...


class Learner(Protocol):
    """Owns the device and the weights of a run's networks; only ``Engine.learning`` yields one.

    Attributes:
        networks: The networks by role. The ``policy`` is trained. The ``reference`` is the frozen initial policy, or
            a teacher, which is there if the algorithm needs it. A ``reward`` model is trained alone, a ``critic``
            beside the policy.
    """

    networks: Mapping[str, Network]

    def network(self, role: str) -> Network:
        """The network of a role.

        Raises:
            ConfigError: The run has none; it names the role, and those that there are.
        """
        if role not in self.networks:
            raise ConfigError(
                f"no network of this run has the role {role!r}",
                possible=", ".join(self.networks),
                remedy="ask for one of these; what an algorithm needs, and the config, decide which there are",
            )
        return self.networks[role]

    def reset_reference(self) -> None:
        """Make the reference the policy as it is now; it is written with each later checkpoint.

        Raises:
            DeviceMemoryError: The device has too little memory for it.
        """
        raise AssertionError("this learner's reference stays what it is")

    def save(self, folder: Path) -> Mapping[str, NetworkFiles]:
        """Write what a run goes on from: a model and a state of each network that is trained, which are returned.

        A reference that was reset is a model without a state.

        The learner can go on whatever happens. A model is a Hugging Face folder that ``from_pretrained`` and vLLM load.
        A state has the optimizer's by the names of the weights, its number of steps, and the generators of all ranks:
        any number of ranks and any ZeRO stage can read it.

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

    def reworded(self, prompt: EncodedPrompt, row: Prompt) -> EncodedPrompt:
        """A prompt with the messages of another form of its row, and with its own images.

        Raises:
            DataError: The template cannot write them.
        """
        ...

    def demonstrate(self, prompt: EncodedPrompt, *, all_turns: bool = False) -> Sample:
        """The prompt with its demonstration as completion, an end-of-sequence token appended.

        Args:
            all_turns: True to make a segment by the policy of each of the assistant's ``earlier_turns`` too; the prompt
                then ends before the first of them.

        Raises:
            DataError: There is no demonstration, or it cannot be learned.
        """
        ...

    def rendered(self, prompt: Prompt) -> EncodedPrompt:
        """The prompt's text alone, without tokens and images.

        Raises:
            DataError: The template cannot write it, or it has images and the model reads text only.
        """
        ...

    def given(self, prompt: EncodedPrompt, *, closed: bool = False) -> tuple[Sample, ...]:
        """The prompt with each of its row's candidates as completion, an end-of-sequence token appended.

        Args:
            closed: True to have each conversation's tokens as the chat template writes it whole: what follows the end
                of the answer is an inserted segment. The samples' prompt is what all of them begin with.

        Raises:
            DataError: A candidate cannot be learned.
        """
        ...

    def blanked(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """The prompt with blank images of the same sizes, also where an environment is given those of the dataset."""
        ...

    def viewed(self, prompt: EncodedPrompt, change: Callable[[int, ImageArray], ImageArray]) -> EncodedPrompt:
        """The prompt with other images, which have the tokens of their sizes.

        Args:
            change: The pixels in place of an image's, by its place and its own pixels.

        Raises:
            DataError: An image that it answers cannot be used.
        """
        ...

    def by_template(self, prompt: EncodedPrompt) -> IntArray:
        """The prompt's tokens as the model's own chat template and processor write them, for an audit."""
        ...

    def exchange(self, content: Content, role: str) -> tuple[IntArray, IntArray]:
        """Tokens of a question, a turn, an observation and the head of the next turn, for an audit: as an episode
        appends them, and as the model's chat template writes the whole conversation.

        Raises:
            ConfigError: The template cannot carry such an observation.
        """
        ...

    def calls(self, text: str) -> tuple[Call, ...]:
        """The tool calls in a turn of the policy, in the format of the model's template."""
        ...

    def insertion(self, turn: Segment, content: Content, role: str) -> Segment:
        """The segment between a turn of the policy and its next one.

        It holds the end of the turn as far as the policy has not written it, the observation in a message of this role
        (or of the role that the model's template can carry), and the head of the next turn. Special tokens that texts
        spell stay text.

        Args:
            turn: The policy's.
        """
        ...


class Engine(Protocol):
    """One policy in two engines, on the same devices or on devices of their own.

    The verbs exist only on what the two context managers yield. Entering ``sampling`` means that the weights that were
    asked for are in; with unchanged weights it costs nothing. An exception hands the device back. Where
    ``samples_apart``, both may be open at once, each in one thread; else one of them.
    """

    @property
    def precision(self) -> str:
        """``float32`` or ``bfloat16``, of sampler and learner alike."""
        ...

    @property
    def samples_apart(self) -> bool:
        """True if ranks of their own sample, while others learn."""
        return False

    def publish(self) -> int:
        """Set the newest weights aside for the sampler; returns their version.

        They are kept until the sampler takes a later version. Where the same ranks sample and learn, nothing is kept.
        """
        ...

    def sampling(self, version: int | None = None) -> AbstractContextManager[Sampler]:
        """A sampler with the weights of a version that was published; None is the newest weights.

        Raises:
            SamplersRestarted: Ranks that sample were lost while it was open, and are there again.
        """
        ...

    def learning(self) -> AbstractContextManager[Learner]: ...

    def describe(self) -> Mapping[str, Any]:
        """The parts that really run: devices, precisions, sampler, attention, versions; for RUN/environment.json."""
        ...

    def inspect(self, prompts: Sequence[EncodedPrompt]) -> Inspection:
        """Compare what sampler and learner hold and read, for an audit; the newest weights are sent first.

        Every rank compares its own engines. The answer has the worst of all of them.

        Args:
            prompts: Those with images are shown to both vision towers.
        """
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
