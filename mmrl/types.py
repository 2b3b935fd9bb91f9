"""The records that travel through a run, one per stage, frozen; arrays are ragged numpy, never padded.

    Prompt -> EncodedPrompt -> Rollout -> RolloutGroup -> ScoredGroup -> Batch -> TrainingRow
                                                            (as it is recorded) -> CreditedGroup

Shape letters: ``B`` rollouts in a batch, ``G`` rollouts of one group, ``P`` prompt tokens, ``T`` tokens of one
completion (or, for torch tensors in ``PackedTokens``, the completion tokens of a micro-batch).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mmrl.errors import OldNameWarning

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "turns", "budget", "environment", "failed"]
"""The end of a completion or an episode.

``stop``: an end-of-sequence token, and nobody goes on. ``length``: the limit of the policy's tokens. ``turns``: the
limit of turns. ``budget``: the limit of all tokens or images, or of one observation. ``environment``: it said that it
is done. ``failed``: the environment did not answer as it must.
"""
ENVIRONMENT = "environment"
"""The component that is the sum of an episode's ``Observation.reward``."""
TRUNCATED: frozenset[FinishReason] = frozenset({"length", "budget", "turns"})
"""Ends by a limit."""
FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

GroupKey = tuple[int, str]
"""(epoch, prompt id): the key of a group of rollouts, from sampling to the records."""
SampleKey = tuple[int, str, int]
"""(epoch, prompt id, index): the key of a sample; the index of a group's greedy rollout is -1."""

Score = float | Mapping[str, Any]
"""One reward's value for one rollout: any finite number, or several by name.

``rewards[].weights`` weighs several values into one; without it, ``overall`` or ``score`` is the value, and else their
sum. If one rollout of an answer has ``overall`` or ``score``, all must. The other values are components
``<label>/<name>`` of weight 0: logged and recorded, in no sum. Values beside an ``overall`` or ``score`` are ignored
if they are no numbers. A component may be None where it does not apply.
"""


@dataclass(frozen=True, slots=True)
class RawImage:
    """An image as the dataset holds it: encoded bytes, not yet decoded.

    Attributes:
        data: The encoded file (PNG, JPEG, WEBP, GIF, BMP or TIFF).
        label: Its origin, for error messages, such as ``"train.parquet row 17, images[0]"``.
    """

    data: bytes = field(repr=False)
    label: str


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A normalised image in the run's media store.

    Attributes:
        hash: sha256 (hex) of size and RGB pixels; the same hash reaches sampler and learner.
        width: Pixels, after the one resize to the model's grid.
        height: Pixels, after the one resize to the model's grid.
        path: The lossless PNG file with exactly these pixels.
        file_size: (width, height) of the dataset's file in pixels, as viewers show it, before the resize; None where it
            is not known, as in the records of older runs.
    """

    hash: str
    width: int
    height: int
    path: str
    file_size: tuple[int, int] | None = None


Content = tuple[str | ImageRef, ...]
"""Texts and normalised images in the order in which the model reads them."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. ``content`` is text in which each ``<image>`` stands for the prompt's next image."""

    role: str
    content: str


IMAGE_PLACEHOLDER = "<image>"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A completion that the dataset gives to be compared with others. Nothing reads it yet.

    Attributes:
        text: The completion.
        score: Its quality, such as 1 for a chosen and 0 for a rejected one; None if it is not known.
        images: Those that it shows itself.
    """

    text: str
    score: float | None = None
    images: tuple[RawImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row, as a loader gives it.

    Attributes:
        id: Unique and stable within the dataset; seeds are derived from it.
        messages: The conversation so far; the number of ``<image>`` equals ``len(images)``.
        images: In the order of their placeholders; empty for a text row.
        answer: The reference answer, raw; None if the dataset has none.
        columns: Every column of the row but images, for rewards and records.
        demonstration: A completion to imitate (supervised training); None if the dataset has none.
        source: The dataset that it is from, which decides which rewards score it; empty for the config's one.
        choices: The answers that the question offers, in the order of their letters A, B, ...
        candidates: Completions to compare; empty today.
    """

    id: str
    messages: tuple[Message, ...]
    images: tuple[RawImage, ...] = ()
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    demonstration: str | None = None
    source: str = ""
    choices: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A dataset row in the model's tokens.

    Attributes:
        prompt: The row; its images are in ``images`` alone.
        text: The rendered chat template with one image token per image, ending where the completion starts.
        token_ids: (P,) int32, each image token expanded to as many as the image has merged patches.
        images: References into the media store, in order.
        epoch: The pass over the data that drew it, from 0; 0 in an evaluation.
    """

    prompt: Prompt
    text: str
    token_ids: IntArray
    images: tuple[ImageRef, ...]
    epoch: int = 0

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def key(self) -> GroupKey:
        """The key of the group that is sampled from it; no other group of a run has the same."""
        return self.epoch, self.prompt.id

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Fields of the row that version 0.2.0 copied."""
            if name not in ("answer", "choices", "columns", "demonstration", "messages", "source"):
                raise AttributeError(f"'EncodedPrompt' object has no attribute {name!r}")
            _warn_of_old_name(f"rollout.prompt.{name}", f"rollout.prompt.prompt.{name}")
            return getattr(self.prompt, name)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a completion with one author.

    Attributes:
        token_ids: (T,) int32.
        by_policy: True if the policy wrote it; other segments (tool results) get no gradient.
        sampler_logprobs: (T,) float32 log-probs under the distribution that was sampled; zeros if not sampled.
        weight_version: The version of the weights that sampled it; None is the rollout's.
        images: Those whose tokens it holds, in order; only inserted segments have any.
        role: ``assistant`` for the policy's; else the role of the observation, ``tool`` or ``user``.
        finish_reason: ``stop`` or ``length`` for a turn of the policy; None for others, and where it is the rollout's.
    """

    token_ids: IntArray
    by_policy: bool
    sampler_logprobs: FloatArray
    weight_version: int | None = None
    images: tuple[ImageRef, ...] = ()
    role: str = "assistant"
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Sample:
    """A prompt and what follows it: the unit that the learner packs.

    Attributes:
        experts: (P + T - 1, L, K) the K experts to which the sampler has sent each token but the last, in each of L
            layers with experts; None if they are not known. They are not recorded.
    """

    prompt: EncodedPrompt
    segments: tuple[Segment, ...]
    experts: IntArray | None = field(default=None, kw_only=True)

    @cached_property
    def token_ids(self) -> IntArray:
        """(T,) int32 completion tokens, the end-of-sequence token included."""
        return _join([s.token_ids for s in self.segments], np.int32)

    @cached_property
    def mask(self) -> BoolArray:
        """(T,) True where the policy wrote the token."""
        return _join([np.full(len(s.token_ids), s.by_policy) for s in self.segments], np.bool_)

    @cached_property
    def sampler_logprobs(self) -> FloatArray:
        """(T,) float32, zero where the policy did not write the token."""
        return _join([s.sampler_logprobs for s in self.segments], np.float32)

    @cached_property
    def all_images(self) -> tuple[ImageRef, ...]:
        """Images of the prompt and of what follows it, in the order of their tokens."""
        return self.prompt.images + tuple(ref for segment in self.segments for ref in segment.images)

    @cached_property
    def turn_of_token(self) -> IntArray:
        """(T,) the turn, from 0, that each token belongs to; inserted tokens belong to the turn before them."""
        turns = np.cumsum([segment.by_policy for segment in self.segments]) - 1
        return _join([np.full(len(s.token_ids), k) for k, s in zip(turns, self.segments, strict=True)], np.int64)

    @property
    def key(self) -> SampleKey:
        return *self.prompt.key, 0

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return len(self.prompt.token_ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the policy wrote.

    Attributes:
        name: The tool; empty if it cannot be read.
        arguments: Model output, never to be trusted; None if they cannot be read.
        error: The reason why the call cannot be read, for the policy; empty if it can.
    """

    name: str
    arguments: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy, as an environment sees it.

    Attributes:
        text: Decoded without special tokens.
        calls: The tool calls in it, in order.
        index: The turn's number, from 0.
        finish_reason: ``stop``, or ``length`` if it was cut at ``environment.max_turn_tokens``.
        tokens_left: Most tokens that the policy may still write in this episode. What it is answered takes its share of
            ``environment.max_tokens`` too.
    """

    text: str
    calls: tuple[Call, ...]
    index: int
    finish_reason: FinishReason
    tokens_left: int


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to a turn.

    Attributes:
        content: A text, an image, or a sequence of both. Images are PIL images, uint8 arrays (H, W, 3) or (H, W),
            encoded bytes, ``RawImage``, or blocks such as ``{"type": "image", "image": ...}``.
        reward: The turn's reward.
        done: True if the episode is over; the policy does not read ``content`` then, but records keep it.
        role: The role of the message that the policy reads it in.
        info: Further facts for the records, as JSON can hold them.
    """

    content: Any = ""
    reward: float = 0.0
    done: bool = False
    role: Literal["tool", "user"] = "tool"
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """A turn of an episode and its environment's answer.

    Attributes:
        content: The observation's, images by hash; None if there was no answer.
        role: The role of the message that the policy read it in.
        reward: The turn's reward.
        done: True if the environment ended the episode.
        info: The observation's.
        began: Engine step at which the turn was admitted to the sampler's batch.
        finished: Engine step at which it was finished.
    """

    turn: Turn
    content: Content | None = None
    role: str = "tool"
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    began: int = 0
    finished: int = 0


@dataclass(frozen=True)
class Rollout(Sample):
    """One sampled completion, or one episode, as a reward sees it.

    Attributes:
        index: Its place within the group.
        text: The policy's last turn decoded without special tokens.
        finish_reason: See ``FinishReason``.
        weight_version: The version of the weights that sampled it.
        greedy: True if it is the prompt's one rollout at temperature 0, beside a group.
        episode: Its turns with the environment's answers; empty without an environment.
        components: The environment's scores, by name; None where it could not score.
        failure: The reason why its environment failed; empty if it did not. Such a rollout is invalid.
    """

    index: int
    text: str
    finish_reason: FinishReason
    weight_version: int
    greedy: bool = False
    episode: tuple[PlayedTurn, ...] = ()
    components: Mapping[str, float | None] = field(default_factory=dict)
    failure: str = ""

    @property
    def key(self) -> SampleKey:
        return *self.prompt.key, -1 if self.greedy else self.index

    @property
    def turns(self) -> tuple[str, ...]:
        """The policy's texts, turn by turn; ``text`` is the last."""
        return tuple(played.turn.text for played in self.episode) or (self.text,)

    @property
    def truncated(self) -> bool:
        """True if a limit ended it."""
        return self.finish_reason in TRUNCATED

    @property
    def answer(self) -> Any:
        return self.prompt.prompt.answer

    @property
    def columns(self) -> Mapping[str, Any]:
        return self.prompt.prompt.columns

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.prompt.prompt.messages

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The prompt's; ``all_images`` has those of observations too."""
        return self.prompt.images

    @property
    def source(self) -> str:
        return self.prompt.prompt.source

    @property
    def choices(self) -> tuple[str, ...]:
        return self.prompt.prompt.choices


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt instance."""

    prompt: EncodedPrompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group and its rewards.

    Attributes:
        rewards: (G,) float64 weighted sums of the components; 0 where invalid.
        valid: (G,) False where any reward answered None or failed: such a rollout enters neither statistics nor loss.
        components: Raw value of every reward, (G,) float64 each, NaN for None, and for rewards of other sources; and of
            rewards that answer several values, each of these as ``<label>/<name>``.
        greedy: The prompt's one rollout at temperature 0, if the algorithm needs it; enters no loss. Where it could not
            be scored, none of the group's rollouts is valid.
        answers: Each rollout's answer, by the reward that reads it (``Reward.answer_of``).
        kept: False if the algorithm rejects it; it is asked only with ``Needs.refill``.
        place: The round in which it was sampled, and its place in there, from 0; None if that was in an earlier step.
    """

    group: RolloutGroup
    rewards: FloatArray
    valid: BoolArray
    components: Mapping[str, FloatArray]
    greedy: ScoredGroup | None = None
    answers: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    kept: bool = True
    place: tuple[int, int] | None = None

    @property
    def key(self) -> GroupKey:
        return self.group.prompt.key

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return self.group.rollouts

    def component(self, name: str) -> FloatArray:
        """(G,) values of a component; NaN where no reward has answered one of that name."""
        return self.components.get(name, np.full(len(self.rewards), np.nan))


@dataclass(frozen=True)
class Batch:
    """A whole rollout batch, as ``Algorithm.credit`` sees it.

    Attributes:
        rewards: (B,) float64.
        valid: (B,) rewards that may be used.
        group_ids: (B,) int64, one id per prompt instance; not necessarily contiguous.
        masks: B arrays (T_i,) bool; False where a token gets no gradient.
        truncated: (B,) completions and episodes that a limit ended.
        components: Raw value of each reward by name, (B,) float64; NaN in a valid row means that no reward of that name
            scores rows of its source, and leaves it out of the sum.
        weights: Factor of each component in ``rewards``; 0 of those that are a part of another, ``<label>/<name>``.
        penalties: Names of the components that are penalties (``Reward.penalty``).
        greedy_components: Components of the greedy rollout of each row's prompt, (B,) float64; None unless ``needs``
            asked.
        old_logprobs: B arrays (T_i,), the learner's before the update; None unless ``needs`` asked or several
            optimizer steps follow.
        reference_logprobs: B arrays (T_i,); None unless ``needs`` asked.
        sampler_logprobs: B arrays (T_i,) as the sampler reported them.
        values: B arrays (T_i,), the critic's for each position that predicts a token; None unless ``needs`` asked, and
            always today.
        final_values: (B,) the critic's after the last token; always None today.
        turns: B arrays (T_i,) int, the turn of an episode that each token belongs to; inserted tokens belong to the
            turn before them. None without an environment, as are all that follow.
        turn_rewards: B arrays (K_i,) with the environment's reward of each turn.
        turn_states: B sequences of K_i texts, equal where the policy acted upon the same state: what it last read.
    """

    rewards: FloatArray
    valid: BoolArray
    group_ids: IntArray
    masks: Sequence[BoolArray]
    truncated: BoolArray
    components: Mapping[str, FloatArray]
    old_logprobs: Sequence[FloatArray] | None
    reference_logprobs: Sequence[FloatArray] | None
    sampler_logprobs: Sequence[FloatArray]
    weights: Mapping[str, float] = field(default_factory=dict)
    penalties: frozenset[str] = frozenset()
    greedy_components: Mapping[str, FloatArray] | None = None
    values: Sequence[FloatArray] | None = None
    final_values: FloatArray | None = None
    turns: Sequence[IntArray] | None = None
    turn_rewards: Sequence[FloatArray] | None = None
    turn_states: Sequence[Sequence[str]] | None = None

    def component(self, name: str) -> FloatArray:
        """(B,) values of a component; NaN where no reward has answered one of that name."""
        return self.components.get(name, np.full(len(self.rewards), np.nan))


@dataclass(frozen=True, slots=True, init=False)
class Credit:
    """The credit of each rollout, or of each of its tokens.

    Attributes:
        advantages: (B,), or B arrays (T_i,).
        keep: (B,) rows that enter the loss; None keeps all valid ones. Acts before weights are computed.
        metrics: Further numbers to log.
        constants: Numbers of this step for ``loss``, which other processes compute.
        returns: B arrays (T_i,) that a critic learns; nothing reads them today.
    """

    advantages: FloatArray | Sequence[FloatArray]
    keep: BoolArray | None
    metrics: Mapping[str, float]
    constants: Mapping[str, float]
    returns: Sequence[FloatArray] | None

    def __init__(
        self,
        advantages: FloatArray | Sequence[FloatArray] | None = None,
        keep: BoolArray | None = None,
        metrics: Mapping[str, float] = MappingProxyType({}),
        constants: Mapping[str, float] = MappingProxyType({}),
        returns: Sequence[FloatArray] | None = None,
        *,
        values: FloatArray | Sequence[FloatArray] | None = None,
    ) -> None:
        """``values`` is version 0.2.0's name of the advantages."""
        if values is not None:
            _warn_of_old_name("Credit(values=...)", "Credit(advantages=...)")
            advantages = values
        if advantages is None:
            raise TypeError("a Credit needs advantages")
        given = {"advantages": advantages, "keep": keep, "metrics": metrics, "constants": constants, "returns": returns}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @property
    def values(self) -> FloatArray | Sequence[FloatArray]:
        """The advantages; goes with the next version."""
        _warn_of_old_name("Credit.values", "Credit.advantages")
        return self.advantages


@dataclass(frozen=True, slots=True)
class PreUpdateStatistics:
    """One rollout's statistics before an optimizer step; both are empty if the step came to nothing.

    Attributes:
        logprobs: (T_i,) float32, the learner's.
        entropy: (T_i,) float32, as ``PackedTokens.entropy_T``.
    """

    logprobs: FloatArray
    entropy: FloatArray


@dataclass(frozen=True, slots=True)
class CreditedGroup:
    """A group and the step's results; those that were not trained on have advantages 0 and no log-probs.

    Attributes:
        advantages: G arrays (T_i,).
        logprobs: G arrays (T_i,), the learner's before the update; empty where the rollout is in no loss.
        trained: True if the step has learned from it.
        reference_logprobs: G arrays (T_i,); none where the algorithm needs no reference policy.
        updates: For each rollout, the optimizer steps that took it in, in order; none where it is in no loss.
    """

    scored: ScoredGroup
    advantages: Sequence[FloatArray]
    logprobs: Sequence[FloatArray]
    trained: bool = False
    reference_logprobs: Sequence[FloatArray] = ()
    updates: Sequence[Sequence[PreUpdateStatistics]] = ()

    @property
    def key(self) -> GroupKey:
        return self.scored.key


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A sample with everything that the loss needs.

    Attributes:
        weight: The sequence weight of the aggregation mode (algorithms: ``sum_i w_i sum_t m_it L_it``).
        mask: (T,) tokens in the loss.
        advantages: (T,) float32.
        old_logprobs: (T,) float32; None means "the current ones, detached".
        reference_logprobs: (T,) float32; None without a reference policy.
        constants: Those of the step's ``Credit``.
    """

    sample: Sample
    weight: float
    mask: BoolArray
    advantages: FloatArray
    old_logprobs: FloatArray | None
    reference_logprobs: FloatArray | None
    constants: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The completion tokens of one micro-batch, in packed order, as ``Algorithm.loss`` sees them.

    Masked tokens are present; whatever the loss is there, it is ignored. A sequence is never split.

    Attributes:
        logprobs_T: Current log-probs at the sampling temperature, with gradient.
        old_logprobs_T: Before the update, detached.
        sampler_logprobs_T: As the sampler reported them.
        reference_logprobs_T: None without a reference policy.
        advantages_T: Detached.
        mask_T: bool, tokens in the loss.
        sequence_T: int64, which sequence (0..num_sequences-1) each token belongs to.
        num_sequences: Sequences in this micro-batch.
        entropy_T: In nats, of the distribution that each token was sampled from, at the sampling temperature; with
            gradient only if ``Needs.entropy_gradient``.
        constants: Those of the step's ``Credit``.
    """

    logprobs_T: torch.Tensor
    old_logprobs_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    reference_logprobs_T: torch.Tensor | None
    advantages_T: torch.Tensor
    mask_T: torch.Tensor
    sequence_T: torch.Tensor
    num_sequences: int
    entropy_T: torch.Tensor
    constants: Mapping[str, float] = field(default_factory=dict)

    def sequence_sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """(num_sequences,) sums over each sequence's tokens in the loss."""
        import torch

        masked_T = torch.where(self.mask_T, values_T, torch.zeros_like(values_T))
        return masked_T.new_zeros(self.num_sequences).index_add(0, self.sequence_T, masked_T)

    def sequence_mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """(num_sequences,) means over each sequence's tokens in the loss; 0 for a sequence without any."""
        counts = self.sequence_sum(self.mask_T.to(values_T.dtype))
        return self.sequence_sum(values_T) / counts.clamp(min=1)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """An unreduced loss.

    Attributes:
        loss_T: The loss of each token; the framework weighs, sums and minimises it.
        terms: Named parts of ``loss_T``, logged as ``loss/<name>`` with the same weights.
        metrics: Per-token values, logged as means over the tokens in the loss.
    """

    loss_T: torch.Tensor
    terms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


def _warn_of_old_name(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next version", OldNameWarning, stacklevel=3)


def _join(arrays: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    """The arrays as one; a single one itself, as its copy would take as much memory again."""
    if len(arrays) == 1:
        return arrays[0].astype(dtype, copy=False)
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)


THOUGHT_NAMES = "think|thinking|thoughts?|reason|reasoning|reflection|scratchpad|seed:think"
"""Regular expression of the names of tags in angle brackets between which models think, in lower case."""
