"""Episodes from a sampler and environments: turns are sampled while others are answered.

Everything here happens in the caller's thread, and nothing that is sampled depends on how long an environment takes:
the sampler admits an answer at the step that is due, and only the order in which groups are finished may differ.

An episode ends with ``environment`` if that is done, even where the policy has merely stopped calling tools; ``stop``
is for completions that nobody answers, and no episode ends so. The last turn that ``environment.max_turns`` allows is
answered too: its reward counts. A turn that was cut because the policy has no tokens left is not.

Where an algorithm branches, a group's later episodes begin when all earlier ones of the round are over, the scores of
their environments too: so it does not depend on time from which of them the others go on, nor when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Protocol

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.engine_api import Finished, PromptEncoder, Sampler, SamplingRequest
from mmrl.errors import DataError
from mmrl.rollout.episodes.branching import Branching
from mmrl.rollout.episodes.episode import Episode, Limits, answered_after
from mmrl.rollout.episodes.failures import CallFailed, CallTally
from mmrl.rollout.episodes.observations import ReceivedObservation
from mmrl.rollout.episodes.pool import EnvironmentPool, Session
from mmrl.system.clock import Clock
from mmrl.types import (
    IMAGE_PLACEHOLDER,
    Content,
    EncodedPrompt,
    ImageRef,
    RawImage,
    Rollout,
    RolloutGroup,
    Turn,
)

_WAIT_S = 0.02
"""Longest wait for an answer before the sampler is polled again."""
_TEXT_PLACEHOLDER = f"{IMAGE_PLACEHOLDER[:1]}\u200b{IMAGE_PLACEHOLDER[1:]}"
"""The placeholder as a text that stands for no image: a zero-width space leaves it readable."""


class Images(Protocol):
    """The part of ``MediaStore`` that is needed here."""

    def add(self, raw: RawImage) -> ImageRef: ...


class EpisodePlayer:
    """Plays episodes of one environment.

    Args:
        spec: The environment.
        max_new_tokens: Most tokens of the policy in an episode.
        components: Names of what the environment scores.
        images: The run's store.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        max_new_tokens: int,
        components: Sequence[str],
        pool: EnvironmentPool,
        encoder: PromptEncoder,
        images: Images,
    ) -> None:
        self.spec, self.limits, self.components = spec, Limits.of(spec, max_new_tokens), tuple(components)
        self.pool, self.encoder, self.images = pool, encoder, images

    def tally(self) -> CallTally:
        """A new count of a step's calls."""
        return CallTally(self.spec.name)

    def play(
        self,
        sampler: Sampler,
        requests: Sequence[SamplingRequest],
        seeds: Sequence[int],
        tally: CallTally,
        clock: Clock,
        event: Callable[..., None],
        branching: Branching | None = None,
    ) -> Generator[tuple[int, RolloutGroup]]:
        """Groups of episodes as they finish, each with the index of its request.

        Args:
            requests: Groups to sample; prompts still have their raw images.
            seeds: Each group's, for its environments.
            event: Called with a kind and fields for each episode whose environment failed.
            branching: How a part of some groups goes on from the rest of them; None if all episodes begin anew.

        Raises:
            EpisodeError: The environment cannot be made, or fails too often.
            PluginError: An algorithm names no place to go on from.
        """
        round_ = EpisodeRound(self, sampler, tally, clock, event)
        try:
            yield from round_.play(requests, seeds, branching)
        except BaseException:
            # Only then: the sampler counts on from the steps at which a whole round's last answers are due.
            sampler.drop()
            raise
        finally:
            round_.close()


class EpisodeRound:
    """Episodes that share the sampler."""

    def __init__(
        self, player: EpisodePlayer, sampler: Sampler, tally: CallTally, clock: Clock, event: Callable[..., None]
    ) -> None:
        self._player, self._sampler, self._tally, self._clock, self._event = player, sampler, tally, clock, event
        self._seconds_before = player.pool.seconds
        self._branching: Branching | None = None
        self._groups: list[list[Episode]] = []
        self._histories: dict[Episode, list[tuple[Turn | None, str]]] = {}  # of episodes that others may go on from
        self._sessions: dict[Episode, Session] = {}  # of episodes that are not over
        self._calls_left: dict[Episode, int] = {}
        self._tickets: dict[int, Episode] = {}  # of episodes that are not over
        self._ticket_of: dict[Episode, int] = {}
        self._sampling: set[int] = set()
        self._calls: dict[Future[Any], tuple[Episode, bool]] = {}  # True for a score

    def play(
        self, requests: Sequence[SamplingRequest], seeds: Sequence[int], branching: Branching | None = None
    ) -> Iterator[tuple[int, RolloutGroup]]:
        """Groups as they finish."""
        self._branching = branching
        self._reset(requests, seeds)
        self._submit()
        unfinished = dict(enumerate(self._groups))
        while unfinished:
            self._go_on()
            over = [index for index, group in unfinished.items() if not any(each in self._sessions for each in group)]
            for index in over:
                if len(unfinished[index]) == requests[index].num_samples:
                    group = unfinished.pop(index)
                    yield index, RolloutGroup(group[0].prompt, self._rollouts(group))
            if unfinished.keys() <= {*over}:  # at one time, whatever time the environments take
                for index, group in unfinished.items():
                    self._branch(group, requests[index], seeds[index])
                self._submit()
            elif self._sample():
                self._wait()

    def close(self) -> None:
        """Close the environments of episodes that are not over, without the calls that have not begun."""
        for future in (*self._calls, *(session.opened for session in self._sessions.values())):
            future.cancel()
        for session in self._sessions.values():
            session.close()
        self._clock.beside("environment", self._player.pool.seconds - self._seconds_before)
        if failures := self._player.pool.take_close_failures():
            environment, last = self._player.spec.name, failures[-1]
            self._event(
                "environment_failed",
                message=f"environment {environment!r} failed in {len(failures)} of its calls of close, in which no "
                f"episode is lost; the last time, it {last.cause}",
                environment=environment,
                cause=last.cause,
                details=last.details,
            )

    def _rollouts(self, group: Sequence[Episode]) -> tuple[Rollout, ...]:
        return tuple(episode.rollout(self._player.components) for episode in group)

    def _reset(self, requests: Sequence[SamplingRequest], seeds: Sequence[int]) -> None:
        """Begin all episodes but those that go on from others, each group with one prompt."""
        later = [0 if self._branching is None else self._branching.count(index) for index in range(len(requests))]
        self._groups = [
            self._open(request, seed, later=count) for request, seed, count in zip(requests, seeds, later, strict=True)
        ]
        wait([session.opened for session in self._sessions.values()])
        for request, group in zip(requests, self._groups, strict=True):
            self._begin(request, group)

    def _open(self, request: SamplingRequest, seed: int, *, later: int = 0) -> list[Episode]:
        """A group's episodes, whose environments begin in the background.

        Args:
            later: How many of them will go on from others.
        """
        player, row, first = self._player, request.prompt.prompt, request.num_samples - later
        delay, bare = answered_after(player.spec), replace(request.prompt, prompt=replace(row, images=()))
        group = [Episode(request, member, player.limits, delay, bare) for member in range(first)]
        for episode in group:
            self._take_in(episode, player.pool.open(row, seed), calls=0)
        self._tally.possible += later * self._most_calls
        return group

    def _branch(self, group: list[Episode], request: SamplingRequest, seed: int) -> None:
        """Begin a group's next episodes, each of which goes on from one that is over."""
        assert self._branching is not None, "some groups have fewer episodes than they want"
        chosen = self._branching.chosen(self._rollouts(group))
        self._tally.possible -= len(chosen) * self._most_calls
        begun = next((episode for episode in group if episode.played), None)
        for branch in chosen:
            parent = group[branch.member] if branch.turn or begun is None else begun  # all share the prompt
            episode = Episode.branched(parent, len(group), branch)
            group.append(episode)
            if begun is None:
                episode.fail("has failed at every reset of the prompt's first episodes")
                continue
            answered = self._histories[parent][: 1 + branch.turn]
            session = self._player.pool.branch(request.prompt.prompt, seed, answered)
            self._take_in(episode, session, calls=1 + branch.turn)

    @property
    def _most_calls(self) -> int:
        """Calls of the environment in an episode that takes all of its turns."""
        return 1 + self._player.limits.turns + bool(self._player.components)

    def _take_in(self, episode: Episode, session: Session, *, calls: int) -> None:
        """Note an episode that is not over.

        Args:
            calls: Calls that it has made.
        """
        self._sessions[episode] = session
        self._calls_left[episode] = self._most_calls - calls
        self._tally.possible += self._calls_left[episode]

    def _begin(self, request: SamplingRequest, group: Sequence[Episode]) -> None:
        """Merge a group's first observation into its prompt; members that begin otherwise have failed."""
        first: ReceivedObservation | None = None
        intact = list[Episode]()
        for episode in group:
            try:
                observation = self._result(self._sessions[episode].opened, episode)
                if observation.done or observation.reward:
                    raise CallFailed("answered reset with done or a reward, which only turns have")
                if observation.hash != (first := first or observation).hash:
                    raise CallFailed("began otherwise than other episodes of the same prompt and seed")
                intact.append(episode)
            except CallFailed as failure:
                self._fail(episode, failure)
        if first is None:
            return
        try:
            prompt = self._merged(request.prompt, first)
            for episode in group:
                episode.begin(prompt, len(prompt.images) - len(request.prompt.images))
        except CallFailed as failure:
            for episode in intact:
                self._fail(episode, failure)

    def _merged(self, encoded: EncodedPrompt, observation: ReceivedObservation) -> EncodedPrompt:
        """The prompt with an observation at the end of its last message, and without raw images."""
        row, limits = encoded.prompt, self._player.limits
        if not observation.content:
            return replace(encoded, prompt=replace(row, images=()))
        *before, last = row.messages
        raws = [
            RawImage(part, f"first observation of {row.id}") for part in observation.content if isinstance(part, bytes)
        ]
        texts = [
            IMAGE_PLACEHOLDER if isinstance(part, bytes) else part.replace(IMAGE_PLACEHOLDER, _TEXT_PLACEHOLDER)
            for part in observation.content
        ]
        message = replace(last, content="".join([last.content, "\n" * bool(last.content), *texts]))
        longer = replace(row, messages=(*before, message), images=(*row.images, *raws))
        try:
            found = self._player.encoder.encode(longer)
        except DataError as error:
            raise CallFailed(f"answered reset with what the model cannot read: {error.what}") from error
        length = len(found.token_ids) - len(encoded.token_ids)
        for name, count, most in (
            ("max_observation_tokens", length, limits.observation_tokens),
            ("max_tokens", length + 1, limits.tokens),  # one for the policy
            ("max_images", len(raws), limits.images),
        ):
            if count > most:
                raise CallFailed(f"answered reset with {count} where environment.{name} allows {most}")
        images = (*encoded.images, *found.images[len(encoded.images) :])  # an evaluation may have blanked some
        return replace(found, prompt=replace(longer, images=()), images=images, epoch=encoded.epoch)

    def _submit(self) -> None:
        """Begin to sample, for all episodes that have begun and are not sampled yet."""
        episodes = [episode for episode in self._sessions if episode not in self._ticket_of]
        tickets = self._sampler.submit([episode.turn_request() for episode in episodes]) if episodes else ()
        self._tickets |= zip(tickets, episodes, strict=True)
        self._ticket_of |= zip(episodes, tickets, strict=True)
        self._sampling.update(tickets)

    def _sample(self) -> bool:
        """True if something waits for an environment: the sampler, a part of its ranks, or the end of the round. Before
        that, the sampler works until it has news."""
        if not self._tickets:
            return bool(self._calls)
        polled = self._sampler.poll()
        for finished in polled.finished:
            self._sampled(finished)
        return bool(polled.waits) or not (polled.finished or self._sampling)

    def _sampled(self, finished: Finished) -> None:
        """Have a turn answered, or end its episode if it was cut."""
        ticket, episode = finished.ticket, self._tickets[finished.ticket]
        self._sampling.discard(ticket)
        (rollout,) = finished.group.rollouts
        turn = episode.take(rollout, self._player.encoder.calls(rollout.text), finished.began, finished.step)
        if episode.finish_reason is None:
            self._call(episode, self._sessions[episode].step(turn))
        else:
            self._end(episode)

    def _go_on(self) -> None:
        """Take in all answers that are there: each episode goes on with its next turn, is scored, or is left."""
        for future in [future for future in self._calls if future.done()]:
            episode, is_score = self._calls.pop(future)
            try:
                result = self._result(future, episode)
                if is_score:
                    episode.components = result
                else:
                    self._answered(episode, result)
            except CallFailed as failure:
                self._fail(episode, failure)
            if is_score:
                self._leave(episode)
            elif episode.finish_reason is not None:
                self._end(episode)
            elif (ticket := self._ticket_of.get(episode)) is not None:
                self._sampler.answer(ticket, episode.turn_request())
                self._sampling.add(ticket)

    def _answered(self, episode: Episode, observation: ReceivedObservation) -> None:
        """Note an observation, and insert it unless the episode is over."""
        player = self._player
        try:
            content: Content = tuple(
                part if isinstance(part, str) else player.images.add(RawImage(part, f"observation, {episode.where}"))
                for part in observation.content
            )
            episode.note(content, observation.role, observation.reward, observation.done, observation.info)
            if episode.finish_reason is None:
                episode.insert(player.encoder.insertion(episode.segments[-1], content, observation.role))
        except DataError as error:
            raise CallFailed(f"answered with what the model cannot read: {error.what}") from error

    def _end(self, episode: Episode) -> None:
        """End an episode at the sampler, and have it scored."""
        if (ticket := self._ticket_of.get(episode)) is not None:
            del self._tickets[ticket]
            self._sampler.answer(ticket, None)
        if (self._player.components or episode.is_unproven) and not episode.failure:
            self._score(episode)
        else:
            self._leave(episode)

    def _score(self, episode: Episode) -> None:
        self._call(episode, self._sessions[episode].score(), is_score=True)

    def _call(self, episode: Episode, future: Future[Any], *, is_score: bool = False) -> None:
        """Note a call that is under way."""
        self._calls[future] = episode, is_score

    def _leave(self, episode: Episode) -> None:
        """Close an episode, which makes no more calls, unless that is done."""
        self._tally.possible -= self._calls_left.pop(episode, 0)
        if (session := self._sessions.pop(episode, None)) is not None:
            if self._branching is not None:
                self._histories[episode] = session.answered
            session.close()

    def _result(self, future: Future[Any], episode: Episode) -> Any:
        """The result of a call; counts it."""
        self._tally.call()
        self._calls_left[episode] -= 1
        return future.result()

    def _fail(self, episode: Episode, failure: CallFailed) -> None:
        """End an episode whose environment did not answer as it must.

        Raises:
            EpisodeError: Environments failed too often.
        """
        episode.fail(failure.cause)
        self._leave(episode)
        self._tell(episode, failure)
        self._tally.fail(failure, episode.where)

    def _tell(self, episode: Episode, failure: CallFailed) -> None:
        environment, prompt = self._player.spec.name, episode.prompt
        self._event(
            "environment_failed",
            message=f"environment {environment!r} {failure.cause}: {episode.where}",
            environment=environment,
            prompt=prompt.id,
            epoch=prompt.epoch,
            member=episode.member,
            turn=len(episode.played) - 1,
            cause=failure.cause,
            details=failure.details,
        )

    def _wait(self) -> None:
        """Wait for an answer; not long, and on the clock, where it holds the sampler up."""
        if not self._tickets:  # scores alone are missing
            wait(self._calls, return_when=FIRST_COMPLETED)
            return
        start = time.perf_counter()
        wait(self._calls, _WAIT_S, return_when=FIRST_COMPLETED)
        self._clock.beside("environment_wait", time.perf_counter() - start)
