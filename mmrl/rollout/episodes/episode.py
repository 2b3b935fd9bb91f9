"""One episode's state: what is in it so far, what its limits leave, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.data.order import part_seed, request_seed
from mmrl.engine_api import EAGER, SamplingRequest
from mmrl.types import (
    ENVIRONMENT,
    NO_VERSION,
    Branch,
    Call,
    Content,
    EncodedPrompt,
    FinishReason,
    PlayedTurn,
    Rollout,
    Segment,
    Turn,
    before_turn,
    policy_turns,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an episode; ``tokens`` counts all that follows the dataset's prompt, the first observation too."""

    turns: int
    turn_tokens: int
    policy_tokens: int
    observation_tokens: int
    tokens: int
    images: int

    @classmethod
    def of(cls, spec: EnvironmentSpec, max_new_tokens: int) -> Limits:
        turn_tokens, tokens = spec.limits(max_new_tokens)
        return cls(spec.max_turns, turn_tokens, max_new_tokens, spec.max_observation_tokens, tokens, spec.max_images)


@dataclass(slots=True, eq=False)
class Episode:
    """One episode; it ends with ``finish_reason``.

    Attributes:
        request: The group's.
        member: Its place in the group.
        prompt: The group's, with the first observation.
        began_with: Tokens of the first observation.
        num_images: Images of its observations.
        segments: Segments after the prompt so far, but for those of a turn that was cut.
        parts: The parts of a turn that was cut, which its next request goes on with.
        played: Its turns; the last one may still have no answer.
        last: The sampler's rollout of the latest turn.
        components: The answer of ``Environment.score``.
        branch: The place at which it goes on from another one of the group.
    """

    request: SamplingRequest
    member: int
    limits: Limits
    answered_after: int
    prompt: EncodedPrompt
    began_with: int = 0
    num_images: int = 0
    segments: tuple[Segment, ...] = ()
    parts: tuple[Segment, ...] = ()
    played: list[PlayedTurn] = field(default_factory=list)
    last: Rollout | None = None
    finish_reason: FinishReason | None = None
    failure: str = ""
    components: dict[str, float | None] = field(default_factory=dict)
    branch: Branch | None = None

    @classmethod
    def branched(cls, parent: Episode, member: int, branch: Branch) -> Episode:
        """An episode that goes on from its parent's state before a turn that this one has sampled."""
        began_with, num_images = parent.observed
        segments = before_turn(parent.segments, branch.turn)
        return cls(
            parent.request,
            member,
            parent.limits,
            parent.answered_after,
            parent.prompt,
            began_with,
            num_images + sum(len(segment.images) for segment in segments),
            segments,
            played=parent.played[: branch.turn],
            branch=branch,
        )

    @classmethod
    def resumed(
        cls, request: SamplingRequest, limits: Limits, answered_after: int, rollout: Rollout, observed: tuple[int, int]
    ) -> Episode:
        """An episode that an earlier step has left.

        Args:
            rollout: The answer of ``so_far``.
            observed: As of ``UnfinishedGroup``.
        """
        turns, played = policy_turns(rollout.segments), list(rollout.episode)
        parts = turns[-1] if len(turns) > len(played) else ()
        segments = rollout.segments[: len(rollout.segments) - len(parts)]
        began_with, num_images = observed
        return cls(
            request,
            rollout.index,
            limits,
            answered_after,
            rollout.prompt,
            began_with,
            num_images + sum(len(segment.images) for segment in segments),
            segments,
            parts,
            played,
            rollout if played else None,
            None if rollout.finish_reason == "stop" else rollout.finish_reason,
        )

    def so_far(self) -> Rollout:
        """The episode as it is; ``UnfinishedGroup`` tells what its fields mean."""
        last = self.last
        return Rollout(
            prompt=self.prompt,
            segments=(*self.segments, *self.parts),
            index=self.member,
            text="" if last is None else last.text,
            finish_reason=self.finish_reason or "stop",
            weight_version=NO_VERSION if last is None else last.weight_version,
            episode=tuple(self.played),
        )

    @property
    def observed(self) -> tuple[int, int]:
        """Tokens and images of the first observation."""
        return self.began_with, self.num_images - sum(len(segment.images) for segment in self.segments)

    @property
    def is_unanswered(self) -> bool:
        """True if its last turn has no answer."""
        return bool(self.played) and self.played[-1].content is None

    @property
    def is_unproven(self) -> bool:
        """True if it goes on from another one, and its environment may have been asked nothing since."""
        return self.branch is not None and self.is_unanswered

    @property
    def answered_turns(self) -> list[Turn]:
        """Its turns, but for a last one without an answer."""
        return [played.turn for played in self.played[: len(self.played) - self.is_unanswered]]

    @property
    def where(self) -> str:
        """Its name, for a person."""
        return f"prompt {self.prompt.id!r}, episode {self.member}, turn {max(len(self.played) - 1, 0)}"

    @property
    def policy_tokens_left(self) -> int:
        return self.limits.policy_tokens - sum(len(s.token_ids) for s in self.segments if s.by_policy)

    @property
    def tokens_left(self) -> int:
        return self.limits.tokens - self.began_with - sum(len(s.token_ids) for s in self.segments)

    def begin(self, prompt: EncodedPrompt, num_images: int) -> None:
        """Note the prompt with the first observation, and how many images are that one's."""
        self.began_with = len(prompt.token_ids) - len(self.prompt.token_ids)
        self.prompt, self.num_images = prompt, num_images

    def turn_request(self) -> SamplingRequest:
        """The request for the next turn, or for the rest of one that was cut."""
        turn, seed, sampled = len(self.played), self.request.seed, sum(len(part.token_ids) for part in self.parts)
        return SamplingRequest(
            prompt=self.prompt,
            num_samples=1,
            temperature=self.request.temperature,
            max_new_tokens=max(min(self.limits.turn_tokens, self.policy_tokens_left, self.tokens_left) - sampled, 1),
            seed=part_seed(seed, self.member, self.prompt.id, len(self.parts), turn)
            if self.parts
            else request_seed(seed, self.member, self.prompt.id, turn),
            segments=(*self.segments, *self.parts),
            answered_after=self.answered_after,
            may_be_cut=self.request.may_be_cut,
        )

    def take(self, rollout: Rollout, calls: tuple[Call, ...], began: int, finished: int) -> Turn:
        """Note a turn that was sampled. It may be the last: one that is cut for want of tokens is not answered."""
        *parts, segment = rollout.segments[len(self.segments) :]
        length = sum(len(part.token_ids) for part in (*parts, segment))
        cut: FinishReason | None = None
        if rollout.finish_reason == "length" and length >= self.policy_tokens_left:
            cut = "length"
        elif rollout.finish_reason == "length" and length >= self.tokens_left:
            cut = "budget"
        version = rollout.weight_version if segment.weight_version is None else segment.weight_version
        segment = replace(segment, finish_reason=rollout.finish_reason, weight_version=version)
        self.segments, self.parts, self.last = (*self.segments, *parts, segment), (), rollout
        left = max(min(self.policy_tokens_left, self.tokens_left), 0)
        turn = Turn(rollout.text, calls, len(self.played), rollout.finish_reason, left)
        self.played.append(PlayedTurn(turn, began=began, finished=finished))
        self.finish_reason = cut
        return turn

    def note(self, content: Content, role: str, reward: float, done: bool, info: Mapping[str, object]) -> None:
        """Note the answer to the last turn. End the episode if the environment says so, or if no turn, no token of the
        policy or no room for the images is left; ``insert`` sees to the limits of all tokens."""
        played = self.played[-1]
        self.played[-1] = replace(played, content=content, role=role, reward=reward, done=done, info=info)
        if done:
            self.finish_reason = "environment"
        elif len(self.played) == self.limits.turns:
            self.finish_reason = "turns"
        elif self.policy_tokens_left < 1:
            self.finish_reason = "length"
        elif self.num_images + _num_images(content) > self.limits.images:
            self.finish_reason = "budget"

    def insert(self, segment: Segment) -> None:
        """Go on after the last answer, whole; or end, and admit nothing of it."""
        length = len(segment.token_ids)
        if length > self.limits.observation_tokens or length >= self.tokens_left:
            self.finish_reason = "budget"
            return
        self.segments = (*self.segments, segment)
        self.num_images += len(segment.images)

    def fail(self, cause: str) -> None:
        """End it because its environment did not answer as it must."""
        self.finish_reason, self.failure = "failed", cause

    def rollout(self, components: tuple[str, ...]) -> Rollout:
        """The episode as it ended.

        Args:
            components: Names of what the environment scores.
        """
        assert self.finish_reason is not None
        scored: dict[str, float | None] = {ENVIRONMENT: sum(played.reward for played in self.played), **self.components}
        return Rollout(
            prompt=self.prompt,
            segments=self.segments,
            index=self.member,
            text="" if self.last is None else self.last.text,
            finish_reason=self.finish_reason,
            weight_version=0 if self.last is None else self.last.weight_version,
            episode=tuple(self.played),
            components=dict.fromkeys((ENVIRONMENT, *components)) if self.failure else scored,
            failure=self.failure,
            experts=None if self.last is None else self.last.experts,
            branch=self.branch,
        )


def answered_after(spec: EnvironmentSpec) -> int:
    """Engine steps after which observations are read."""
    return spec.latency_steps if spec.scheduling == "reproducible" else EAGER


def _num_images(content: Content) -> int:
    return sum(not isinstance(part, str) for part in content)
