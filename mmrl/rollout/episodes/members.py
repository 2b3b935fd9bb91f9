"""Episodes that go on from step to step. A step may end in the middle of a turn, or while an answer is out.

The groups that a step leaves do not depend on how long an environment takes. An answer that was not due at the
sampler's stop is as if it had not come: the episode is left as its last turn has left it, and the answer is taken at
the beginning of the next step, before anything is sampled. So is a score that such an answer has led to. The
environments stay open meanwhile; those of a run that goes on are played again, from their seeds and the recorded turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from mmrl.engine_api import Finished, Sampler, SamplingRequest
from mmrl.rollout.episodes.episode import Episode, answered_after
from mmrl.rollout.episodes.failures import CallFailed, CallTally
from mmrl.rollout.episodes.player import EpisodePlayer, EpisodeRound
from mmrl.rollout.episodes.pool import Session
from mmrl.rollout.members import Members
from mmrl.rollout.unfinished import UnfinishedGroup
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, GroupKey, Rollout, RolloutGroup, SampleKey

CLOSING_S = 10.0
"""Most seconds that a run's end waits for environments to give back what they hold."""


@dataclass(slots=True)
class OpenSession:
    """An episode's environment, and what was asked of it since the last turn was sampled.

    Attributes:
        answer: The answer to that turn.
        score: The episode's components.
        is_told: True if a failure of one of these was told.
    """

    session: Session
    answer: Future[Any] | None = None
    score: Future[Any] | None = None
    is_told: bool = False


class OpenSessions:
    """The environments of all episodes that go on, between steps."""

    def __init__(self) -> None:
        self._of: dict[SampleKey, OpenSession] = {}

    def take(self, key: SampleKey) -> OpenSession | None:
        """Hand over an episode's environment; returns None if the episode has to be played again."""
        return self._of.pop(key, None)

    def keep(self, sessions: Mapping[SampleKey, OpenSession]) -> None:
        """Keep environments for the next step."""
        self._of |= sessions

    def close(self) -> None:
        """Close all of them, and wait for that, but not for ever."""
        open_, self._of = list(self._of.values()), {}
        for each in open_:
            each.session.close()
        wait([each.session.closed for each in open_ if each.session.closed is not None], CLOSING_S)


@dataclass(slots=True)
class _Group:
    """A group in flight; its members are episodes, or rollouts that are finished."""

    unfinished: UnfinishedGroup
    request: SamplingRequest
    members: list[Episode | Rollout]


class EpisodeMembers(EpisodeRound, Members):
    """Episodes of one step, some of which go on from earlier ones.

    Args:
        request_of: The request for the group of a prompt.
        seed_of: The seed of its environments.
        sessions: Environments that are open.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        sampler: Sampler,
        tally: CallTally,
        clock: Clock,
        event: Callable[..., None],
        request_of: Callable[[EncodedPrompt], SamplingRequest],
        seed_of: Callable[[EncodedPrompt], int],
        sessions: OpenSessions,
    ) -> None:
        super().__init__(player, sampler, tally, clock, event)
        self._request_of, self._seed_of, self._kept = request_of, seed_of, sessions
        self._in_flight: dict[GroupKey, _Group] = {}
        self._open_of: dict[Episode, OpenSession] = {}
        self._before: dict[Episode, Episode] = {}  # each one as its last turn has left it
        self._taken: dict[Episode, list[bool]] = {}  # calls since then, True for those that failed
        self._episodes: dict[int, Episode] = {}  # of all tickets
        self._settled: set[Episode] = set()  # those that are over for the sampler
        self._is_stopped = False

    def submit(self, groups: Sequence[UnfinishedGroup]) -> None:
        for group in groups:
            self._in_flight[group.key] = self._begun(group)
        new = [self._in_flight[group.key] for group in groups if group.observed is None]
        wait([self._open_of[each].session.opened for found in new for each in _episodes(found)])
        for found in new:
            self._begin(found.request, _episodes(found))
        while out := self._out(lambda episode: episode not in self._ticket_of):  # since an earlier step
            wait(out, return_when=FIRST_COMPLETED)
            self._go_on()
        self._submit()
        self._episodes |= {ticket: episode for episode, ticket in self._ticket_of.items()}

    def finished(self, engine_steps: int, groups: int) -> Iterator[RolloutGroup]:
        without_sampler = sum(map(self._is_finished, self._in_flight.values()))
        self._sampler.stop_after(engine_steps, max(groups - without_sampler, 0))
        self._is_stopped = False
        while True:
            self._go_on()
            for key, found in list(self._in_flight.items()):
                if self._is_finished(found):
                    del self._in_flight[key]
                    yield RolloutGroup(_prompt(found), tuple(map(self._rollout, found.members)))
            if self._is_stopped:
                if not (out := self._out(self._settled.__contains__)):
                    return
                wait(out, return_when=FIRST_COMPLETED)
            elif self._sample():
                self._wait()

    def cut(self) -> list[UnfinishedGroup]:
        requests = {cut.ticket: cut.request for cut in self._sampler.cut()}
        left = [self._left(found, requests) for found in self._in_flight.values()]
        goes_on = [each for found in self._in_flight.values() for each in _episodes(found) if not self._is_over(each)]
        self._kept.keep({_key(episode): self._open_of[episode] for episode in goes_on})
        self.close()
        return left

    def abandon(self) -> None:
        self._sampler.drop()
        for future in self._calls:
            future.cancel()
        for each in self._open_of.values():
            each.session.close()
        self._kept.close()
        self.close()

    def close(self) -> None:
        self._sessions.clear()  # those are kept, or closed
        self._calls.clear()
        super().close()

    # Groups

    def _begun(self, group: UnfinishedGroup) -> _Group:
        """A group with its episodes, whose environments begin in the background or go on."""
        prompt, size = group.group.prompt, len(group.goes_on)
        request = replace(self._request_of(prompt), num_samples=size, may_be_cut=True)
        if group.observed is None:
            return _Group(group, request, [*self._open(request, self._seed_of(prompt))])
        members: list[Episode | Rollout] = [
            self._reopened(group, request, index) if goes_on else group.group.rollouts[index]
            for index, goes_on in enumerate(group.goes_on)
        ]
        return _Group(group, request, members)

    def _reopened(self, group: UnfinishedGroup, request: SamplingRequest, index: int) -> Episode:
        """An episode that goes on, and the call that it waits for."""
        rollout, player = group.group.rollouts[index], self._player
        episode = Episode.resumed(
            request, player.limits, answered_after(player.spec), rollout, group.observed or (0, 0)
        )
        turns = episode.answered_turns
        known = self._kept.take(_key(episode))
        if known is None:
            assert group.row is not None, "a group of episodes has its row"
            answered = zip([None, *turns], group.observations[index], strict=True)
            known = OpenSession(player.pool.reopen(group.row, self._seed_of(episode.prompt), list(answered)))
        self._open_of[episode] = known
        self._take_in(episode, known.session, calls=1 + len(turns))
        self._remember(episode)
        if episode.finish_reason is not None:
            self._end(episode)
        elif episode.is_unanswered:
            self._call(episode, known.answer or known.session.step(episode.played[-1].turn))
        return episode

    def _left(self, found: _Group, requests: Mapping[int, SamplingRequest]) -> UnfinishedGroup:
        """A group as the step leaves it.

        Args:
            requests: The sampler's, by ticket.
        """
        rollouts, observations = list[Rollout](), list[tuple[str, ...]]()
        for member in found.members:
            if isinstance(member, Rollout) or self._is_over(member):
                rollouts.append(self._rollout(member))
                observations.append(())
                continue
            request = requests.get(self._ticket_of[member])
            if request is None:  # its turn is finished, and the answer was not due
                self._forget_calls(member)
                member, session = self._before[member], self._open_of[member].session
            else:
                parts, session = request.segments[len(member.segments) :], self._open_of[member].session
                self._clock.count("generate", sum(len(part.token_ids) for part in parts[len(member.parts) :]))
                member.parts = parts
            rollouts.append(member.so_far())
            observations.append(tuple(hash_ for _, hash_ in session.answered[: 1 + len(member.answered_turns)]))
        return replace(
            found.unfinished,
            group=RolloutGroup(_prompt(found), tuple(rollouts)),
            goes_on=tuple(isinstance(each, Episode) and not self._is_over(each) for each in found.members),
            observed=found.unfinished.observed or _episodes(found)[0].observed,
            observations=tuple(observations),
        )

    def _rollout(self, member: Episode | Rollout) -> Rollout:
        return member if isinstance(member, Rollout) else member.rollout(self._player.components)

    def _is_finished(self, found: _Group) -> bool:
        return all(map(self._is_over, _episodes(found)))

    def _is_over(self, episode: Episode) -> bool:
        """True if an episode is over for the sampler, if it ever saw it, and scored."""
        is_settled = episode in self._settled or episode not in self._ticket_of
        return is_settled and episode not in self._sessions

    # Calls

    def _out(self, of: Callable[[Episode], bool]) -> list[Future[Any]]:
        """The calls of some episodes that are under way."""
        return [future for future, (episode, _) in self._calls.items() if of(episode)]

    def _take_in(self, episode: Episode, session: Session, *, calls: int) -> None:
        super()._take_in(episode, session, calls=calls)
        self._open_of.setdefault(episode, OpenSession(session))
        self._taken[episode] = []

    def _sample(self) -> bool:
        polled = self._sampler.poll()
        for finished in polled.finished:
            self._sampled(finished)
        self._settled.update(self._episodes[ticket] for ticket in polled.over)
        self._is_stopped = polled.stopped
        return not self._is_stopped and bool(polled.waits)

    def _sampled(self, finished: Finished) -> None:
        episode = self._tickets[finished.ticket]
        self._open_of[episode] = OpenSession(self._open_of[episode].session)
        before = len(episode.segments), sum(len(part.token_ids) for part in episode.parts)
        super()._sampled(finished)
        sampled = sum(len(segment.token_ids) for segment in episode.segments[before[0] :])
        self._clock.count("generate", sampled - before[1])
        self._remember(episode)

    def _remember(self, episode: Episode) -> None:
        """Keep an episode as its last turn has left it."""
        self._before[episode], self._taken[episode] = replace(episode, played=[*episode.played]), []

    def _call(self, episode: Episode, future: Future[Any], *, is_score: bool = False) -> None:
        super()._call(episode, future, is_score=is_score)
        known = self._open_of[episode]
        if is_score:
            known.score = future
        else:
            known.answer = future

    def _score(self, episode: Episode) -> None:
        if (known := self._open_of[episode].score) is None:
            super()._score(episode)
        else:  # asked in an earlier step
            self._call(episode, known, is_score=True)

    def _result(self, future: Future[Any], episode: Episode) -> Any:
        self._taken[episode].append(False)
        return super()._result(future, episode)

    def _fail(self, episode: Episode, failure: CallFailed) -> None:
        if self._taken[episode]:
            self._taken[episode][-1] = True
        super()._fail(episode, failure)

    def _tell(self, episode: Episode, failure: CallFailed) -> None:
        if not self._open_of[episode].is_told:
            super()._tell(episode, failure)
        self._open_of[episode].is_told = True

    def _forget_calls(self, episode: Episode) -> None:
        """Leave the calls that an episode has made since its last turn to the step in which they are due."""
        taken = self._taken[episode]
        self._tally.made -= len(taken)
        self._tally.failed -= sum(taken)


def _episodes(group: _Group) -> list[Episode]:
    return [member for member in group.members if isinstance(member, Episode)]


def _prompt(group: _Group) -> EncodedPrompt:
    """A group's prompt, with the first observation."""
    return group.members[0].prompt


def _key(episode: Episode) -> SampleKey:
    return *episode.prompt.key, episode.member
