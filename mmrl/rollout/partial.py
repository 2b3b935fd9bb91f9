"""Steps whose rollouts are sampled in parts.

A step's sampling ends when the sampler has made so many engine steps and as many groups are finished as a step learns.
The other groups go on in the next step, with its weights. A step learns from the first finished groups in the order in
which their prompts were drawn; those beyond its batch are carried to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from mmrl.engine_api import SamplingRequest
from mmrl.interfaces import Algorithm
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.collector import Collector, Sampling, select
from mmrl.rollout.episodes.members import EpisodeMembers, OpenSessions
from mmrl.rollout.members import Completions, Members
from mmrl.rollout.unfinished import CarriedGroup, UnfinishedGroup, finished_among, unfinished_among
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, GroupKey, ScoredGroup

NEW = (0, 0)
"""The ``place`` of a finished group that is carried, and that no step has recorded."""

_G = TypeVar("_G", bound=CarriedGroup)


class PartialCollector(Collector):
    """A collector whose steps leave groups unfinished.

    The environments of episodes that go on stay open from step to step, until ``close``.
    """

    @cached_property
    def _sessions(self) -> OpenSessions:
        return OpenSessions()

    def partial_groups(
        self,
        step: int,
        algorithm: Algorithm,
        draw: Callable[[int], Sequence[tuple[int, EncodedPrompt]]],
        carried: Sequence[CarriedGroup],
        clock: Clock,
        version: int | None = None,
    ) -> SampledStep:
        """The groups that a step learns from and those that its algorithm rejects; all others in flight are carried.

        A group is among the ``groups`` of one step alone. If the algorithm selects, the next prompt's group replaces
        each one that it rejects.

        Args:
            draw: The next so many prompts, each with the epoch that it is drawn in.
            carried: The groups that the step before has carried.
            version: The version of the weights to sample with; None is the newest.

        Raises:
            PluginError: ``Algorithm.select`` or a reward fails, or a reward or the environment fails too often.
        """
        self.generated = []
        partial, wanted, needs = self._config.sampler.partial, self._config.trainer.prompts_per_step, algorithm.needs()
        assert partial is not None, "rollouts are sampled in parts"
        flight, unfinished = _Flight(carried), unfinished_among(carried)
        count = max(partial.num_groups(wanted) - len(carried), 0)
        with self._sampling(clock, version, self.probe) as sampling, self._members(sampling) as members:
            for number in range(1 + (needs.refill.max_rounds if needs.refill else 0)):
                missing = wanted - len(flight.kept)
                if number and missing <= 0:
                    break
                with clock.phase("prompts"):
                    drawn = draw(missing if number else count)
                    new = [self._new(replace(prompt, epoch=epoch)) for epoch, prompt in drawn]
                flight.add(new)
                members.submit(new if number else [*unfinished, *new])
                engine_steps = 0 if number else partial.engine_steps
                found = flight.in_order(self._finished(sampling, members, engine_steps, missing, needed=needs.rewards))
                with clock.phase("credit"):
                    kept = select(algorithm, found) if needs.refill and found else [True] * len(found)
                flight.judge(number, found, kept)
            with clock.phase("generate"):
                left: list[CarriedGroup] = [*members.cut()]
        recorded, learned, surplus = flight.divided(wanted)
        gathered = self._gathered(step, recorded, sampling)
        return replace(gathered, learned=learned, carried=flight.in_order([*left, *surplus]))

    def close(self) -> None:
        self._sessions.close()

    def _new(self, prompt: EncodedPrompt) -> UnfinishedGroup:
        size = self._config.sampler.group_size
        return UnfinishedGroup.new(prompt, size, has_environment=self._player is not None)

    def _group_request(self, prompt: EncodedPrompt) -> SamplingRequest:
        sampler = self._config.sampler
        return self._request(prompt, "", sampler.group_size, sampler.temperature)

    @contextmanager
    def _members(self, sampling: Sampling) -> Iterator[Members]:
        members: Members
        if self._player is None:
            clock = sampling.clock
            members = Completions(sampling.sampler, self._group_request, lambda count: clock.count("generate", count))
        else:
            assert sampling.calls is not None
            members = EpisodeMembers(
                self._player,
                sampling.sampler,
                sampling.calls,
                sampling.clock,
                self._event,
                self._group_request,
                self._environment_seed,
                self._sessions,
            )
        try:
            yield members
        except BaseException:
            members.abandon()
            raise

    def _finished(
        self, sampling: Sampling, members: Members, engine_steps: int, missing: int, *, needed: bool
    ) -> list[ScoredGroup]:
        """Groups that are finished until the sampler stops, scored.

        Args:
            missing: Groups that the step needs; more may be finished.
            needed: As of ``Scorer.submit``.
        """
        clock, size, wanted = sampling.clock, self._config.sampler.group_size, self._config.trainer.prompts_per_step
        scores, keys = self._scores(sampling, needed=needed), list[GroupKey]()
        sampling.failures.expect(size * max(missing, 0))
        with scores.telling():
            with clock.phase("generate"):
                for finished in members.finished(engine_steps, max(missing, 0)):
                    group = self._with_shown(finished, sampling.failures)
                    keys.append(group.prompt.key)
                    self.generated.append(group)
                    if len(keys) > missing:
                        sampling.failures.expect(size)
                    scores.add(keys[-1], group)
                    self._progress("generate", min(wanted - missing + len(keys), wanted), wanted)
            with clock.phase("score"):
                return [replace(scores.result(key), place=NEW) for key in keys]


class _Flight:
    """The groups that a step has in flight.

    Args:
        carried: Those of earlier steps, in the order in which they were drawn.

    Attributes:
        kept: Finished groups that the algorithm keeps.
    """

    def __init__(self, carried: Sequence[CarriedGroup]) -> None:
        self._order = {group.key: place for place, group in enumerate(carried)}
        self._rounds: dict[GroupKey, int] = {}
        self._rejected: list[ScoredGroup] = []
        self.kept = finished_among(carried)

    def add(self, drawn: Iterable[UnfinishedGroup]) -> None:
        """Take in groups that were drawn after all others."""
        for group in drawn:
            self._order[group.key] = len(self._order)

    def in_order(self, groups: Iterable[_G]) -> list[_G]:
        """The groups in the order in which they were drawn."""
        return sorted(groups, key=lambda group: self._order[group.key])

    def judge(self, number: int, found: Sequence[ScoredGroup], kept: Sequence[bool]) -> None:
        """Take in what was finished in a round."""
        for group, keep in zip(found, kept, strict=True):
            self._rounds[group.key] = number
            if keep:
                self.kept.append(group)
            else:
                self._rejected.append(replace(group, kept=False))

    def divided(self, wanted: int) -> tuple[list[ScoredGroup], list[ScoredGroup], list[ScoredGroup]]:
        """The groups that this step records, those of them and of skipped steps that it learns from, and the others.

        The first are in rounds, each in the order of its prompts.
        """
        kept = self.in_order(self.kept)
        learned, surplus = kept[:wanted], kept[wanted:]
        recorded = self.in_order([*(group for group in learned if group.place is not None), *self._rejected])
        recorded.sort(key=lambda group: self._rounds.get(group.key, 0))
        counts = dict.fromkeys(self._rounds.values(), 0)
        placed = dict[GroupKey, ScoredGroup]()
        for group in recorded:
            number = self._rounds.get(group.key, 0)
            place = counts.setdefault(number, 0)
            placed[group.key], counts[number] = replace(group, place=(number, place)), place + 1
        return [*placed.values()], [placed.get(group.key, group) for group in learned], surplus
