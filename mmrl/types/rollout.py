"""Rollouts: their segments and turns, their groups, and the groups' rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np

from mmrl.types.arrays import BoolArray, FloatArray, IntArray, joined
from mmrl.types.prompt import Content, EncodedPrompt, GroupKey, ImageRef, Message, SampleKey

FinishReason = Literal["stop", "length", "turns", "budget", "environment", "failed"]
"""The end of a completion or an episode.

``stop``: an end-of-sequence token, and nobody goes on. ``length``: the limit of the policy's tokens. ``turns``: the
limit of turns. ``budget``: the limit of all tokens or images, or of one observation. ``environment``: it said that it
is done. ``failed``: the environment did not answer as it must.
"""
GIVEN = -1
"""The ``weight_version`` of a completion that nobody sampled: it is the dataset's own."""
NO_VERSION = -2
"""The ``weight_version`` of weights that no learner has sent, such as a model folder's own."""
SCORE = "score"
"""The component that is the score of a candidate, which the dataset gives."""
ENVIRONMENT = "environment"
"""The component that is the sum of an episode's ``Observation.reward``."""
TRUNCATED: frozenset[FinishReason] = frozenset({"length", "budget", "turns"})
"""Ends by a limit."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a completion with one author.

    Attributes:
        token_ids: (T,) int32.
        by_policy: True if the policy wrote it; other segments (tool results) get no gradient.
        sampler_logprobs: (T,) float32 log-probs under the distribution that was sampled; zeros if not sampled.
        weight_version: The version of the weights that sampled it; None is the rollout's.
        images: Images whose tokens it holds, in order; only inserted segments have any.
        role: ``assistant`` for the policy's; else the role of the observation, ``tool`` or ``user``.
        finish_reason: ``stop`` or ``length`` for a turn of the policy; None for others, where it is the rollout's, and
            where the next segment continues it.
        continues: True if it goes on with the turn of the segment before it, under other weights.
    """

    token_ids: IntArray
    by_policy: bool
    sampler_logprobs: FloatArray
    weight_version: int | None = None
    images: tuple[ImageRef, ...] = ()
    role: str = "assistant"
    finish_reason: FinishReason | None = None
    continues: bool = False

    @property
    def begins_turn(self) -> bool:
        """True if a turn of the policy begins with it; there are as many turns as such segments."""
        return self.by_policy and not self.continues


def policy_turns(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """The policy's turns, each with the segments in which it was sampled: one, or more if it was cut."""
    turns = list[tuple[Segment, ...]]()
    for segment in segments:
        if segment.begins_turn:
            turns.append((segment,))
        elif segment.by_policy:
            turns[-1] = (*turns[-1], segment)
    return turns


def before_turn(segments: Sequence[Segment], turn: int) -> tuple[Segment, ...]:
    """The segments before a turn of the policy, from 0; all of them if there are fewer turns."""
    begins = (place for place, segment in enumerate(segments) if segment.begins_turn)
    return tuple(segments[: next(islice(begins, turn, None), len(segments))])


@dataclass(frozen=True)
class Sample:
    """A prompt and what follows it: the unit that the learner packs.

    Attributes:
        experts: (P + T - 1, L, K) the K experts to which the sampler has sent each token but the last, in each of L
            layers with experts; None if they are not known. They are not recorded.
        view: The view of the prompt's images that it was sampled from, which the ``sampler_logprobs`` are about; empty
            for the prompt's own.
    """

    prompt: EncodedPrompt
    segments: tuple[Segment, ...]
    experts: IntArray | None = field(default=None, kw_only=True)
    view: str = field(default="", kw_only=True)

    def seen(self, view: str) -> Sample:
        """The same completion of a view of its prompt."""
        return Sample(self.prompt.views[view], self.segments)

    @cached_property
    def token_ids(self) -> IntArray:
        """(T,) int32 completion tokens, the end-of-sequence token included."""
        return joined([s.token_ids for s in self.segments], np.int32)

    @cached_property
    def mask(self) -> BoolArray:
        """(T,) True where the policy wrote the token."""
        return joined([np.full(len(s.token_ids), s.by_policy) for s in self.segments], np.bool_)

    @cached_property
    def sampler_logprobs(self) -> FloatArray:
        """(T,) float32, zero where the policy did not write the token."""
        return joined([s.sampler_logprobs for s in self.segments], np.float32)

    @cached_property
    def all_images(self) -> tuple[ImageRef, ...]:
        """Images of the prompt and of what follows it, in the order of their tokens."""
        return self.prompt.images + tuple(ref for segment in self.segments for ref in segment.images)

    @cached_property
    def turn_of_token(self) -> IntArray:
        """(T,) the turn, from 0, that each token belongs to; inserted tokens belong to the turn before them."""
        turns = np.cumsum([segment.begins_turn for segment in self.segments]) - 1
        return joined([np.full(len(s.token_ids), k) for k, s in zip(turns, self.segments, strict=True)], np.int64)

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


@dataclass(frozen=True, slots=True)
class Branch:
    """The place at which an episode goes on from another one of its group.

    Attributes:
        member: The other one's place in the group.
        turn: The turn of the other one, from 0, before which they part: all that comes before it is shared, and the new
            episode samples a turn of its own in its place. Before turn 0 they share the prompt alone.
    """

    member: int
    turn: int


@dataclass(frozen=True)
class Rollout(Sample):
    """One completion, or one episode, as a reward sees it.

    Attributes:
        index: Its place within the group.
        text: The policy's last turn decoded without special tokens.
        finish_reason: See ``FinishReason``.
        weight_version: The version of the weights that sampled it; ``GIVEN`` if nobody did.
        greedy: True if it is the prompt's one rollout at temperature 0, beside a group.
        episode: Its turns with the environment's answers; empty without an environment.
        components: The environment's scores, by name; None where it could not score.
        failure: The reason why its environment failed; empty if it did not. Such a rollout is invalid.
        recalled: True if an earlier step has sampled it, and it has taken a member's place (``Algorithm.recall``).
        branch: The place at which it goes on from another one of its group, whose turns and tokens before it are its
            own too; None for one that began by itself.
    """

    index: int
    text: str
    finish_reason: FinishReason
    weight_version: int
    greedy: bool = False
    episode: tuple[PlayedTurn, ...] = ()
    components: Mapping[str, float | None] = field(default_factory=dict)
    failure: str = ""
    recalled: bool = False
    branch: Branch | None = None

    @property
    def key(self) -> SampleKey:
        return *self.prompt.key, -1 if self.greedy else self.index

    @property
    def num_shared(self) -> int:
        """Tokens after the prompt that it has from the episode that it goes on from, the first ones; 0 without one."""
        return 0 if self.branch is None else sum(len(s.token_ids) for s in before_turn(self.segments, self.branch.turn))

    @cached_property
    def version_of_token(self) -> IntArray:
        """(T,) int64 the version of the weights that sampled each token; of inserted ones the rollout's."""
        versions = [self.weight_version if s.weight_version is None else s.weight_version for s in self.segments]
        return joined([np.full(len(s.token_ids), v) for v, s in zip(versions, self.segments, strict=True)], np.int64)

    @property
    def turns(self) -> tuple[str, ...]:
        """The policy's texts, turn by turn; ``text`` is the last."""
        return tuple(played.turn.text for played in self.episode) or (self.text,)

    @property
    def is_given(self) -> bool:
        """True if nobody sampled it; its ``sampler_logprobs`` are zeros, and mean nothing."""
        return self.weight_version == GIVEN

    @property
    def is_own(self) -> bool:
        """True if the step has sampled it; False for what the dataset gives, and for one of an earlier step."""
        return not (self.is_given or self.recalled)

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
    """A group and its rewards; a demonstration is a group of one rollout, without components.

    Attributes:
        rewards: (G,) float64 weighted sums of the components; 0 where invalid or without any.
        valid: (G,) False where any reward answered None or failed: such a rollout enters neither statistics nor loss.
        components: Raw value of every reward, (G,) float64 each, NaN for None, and for rewards of other sources; and of
            rewards that answer several values, each of these as ``<label>/<name>``.
        greedy: The prompt's one rollout at temperature 0, if the algorithm needs it; enters no loss. Where it could not
            be scored, none of the group's rollouts is valid.
        answers: Each rollout's answer, by the reward that reads it (``Reward.answer_of``).
        kept: False if the algorithm rejects it; it is asked only with ``Needs.refill``.
        place: The round in which it was sampled, and its place in there, from 0; None if that was in an earlier step.
        token_rewards: G arrays (T_i,) float64, the values of parts of the text, times the rewards' weights, at each
            part's last token; none unless the algorithm asks for ``token_rewards``.
    """

    group: RolloutGroup
    rewards: FloatArray
    valid: BoolArray
    components: Mapping[str, FloatArray]
    greedy: ScoredGroup | None = None
    answers: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    kept: bool = True
    place: tuple[int, int] | None = None
    token_rewards: Sequence[FloatArray] = ()

    @property
    def key(self) -> GroupKey:
        return self.group.prompt.key

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return self.group.rollouts

    @property
    def is_given(self) -> bool:
        """True if nobody sampled its rollouts; a demonstration may be beside sampled ones."""
        return all(rollout.is_given for rollout in self.rollouts)

    def component(self, name: str) -> FloatArray:
        """(G,) values of a component; NaN where no reward has answered one of that name."""
        return self.components.get(name, np.full(len(self.rewards), np.nan))


@dataclass(frozen=True, slots=True)
class Experience:
    """A rollout of an earlier step that the run keeps for its prompt, with its score (``Needs.experience``).

    Attributes:
        rollout: As it was sampled, by the weights of that step.
        reward: The weighted sum of its components.
        components: Raw value of each reward by name; NaN for None.
        answers: The answer that each reward which reads answers has read.
        token_rewards: (T,) as ``ScoredGroup.token_rewards``; None unless the algorithm asks for them.
    """

    rollout: Rollout
    reward: float
    components: Mapping[str, float]
    answers: Mapping[str, str | None] = field(default_factory=dict)
    token_rewards: FloatArray | None = None
