"""Many ranks as one sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from mmrl.cluster.calls import RankCalls
from mmrl.cluster.files import bare, missing_images, send_images
from mmrl.cluster.shipping import PackedRequests, PackedSamples
from mmrl.data.images import MediaStore
from mmrl.engine_api import EAGER, Cut, Finished, Polled, Sampler, SamplingRequest
from mmrl.ops.packing import balance
from mmrl.system.signals import defer_signals
from mmrl.types import EncodedPrompt, FloatArray, GroupKey, RolloutGroup, Sample

AHEAD = 2
"""Polls that a set of ranks may finish before the driver has taken the first one's news. A driver that gives up has to
wait for every call in the queue, so there are not more."""
WAIT_S = 0.02
"""Seconds after which the caller hears that an answer is missing on some ranks, while others go on."""


@dataclass(eq=False)
class RankSet:
    """Neighbouring ranks that hold one copy of the weights: they sample the same requests in the same steps.

    Attributes:
        ranks: The first one tells the driver of all of them.
        tickets: Tickets of the driver's by place; the place is the ranks' own ticket.
        running: Tickets of requests that are not finished.
        owed: Tickets of finished requests that are not answered; True for those whose answers are admitted at once.
        waits: Tickets without whose answers the ranks make no step.
        polls: Polls that are under way.
        groups: The group of each ticket that may be cut, and is not over.
        stops: None unless it was told where to stop; True from there on.
        sent: Hashes of images that are on their way to the ranks' nodes.
    """

    ranks: range
    tickets: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    owed: dict[int, bool] = field(default_factory=dict)
    waits: set[int] = field(default_factory=set)
    polls: int = 0
    groups: dict[int, GroupKey] = field(default_factory=dict)
    stops: bool | None = None
    sent: set[str] = field(default_factory=set)

    @property
    def may_be_polled(self) -> bool:
        """True if a further poll has news of its own."""
        if self.waits or self.polls >= AHEAD:
            return False
        if self.stops is not None:  # until one has told the stop; those that come after it make no step
            return not self.stops
        # Each poll finishes a request, or says what it waits for; while an answer is owed it may also do nothing.
        return self.polls < len(self.running) or (self.polls == 0 and bool(self.owed))

    def block(self, waits: Iterable[int]) -> None:
        """Take in what a poll waits for; answers that were given after it was asked for count."""
        waits = set(waits)
        missing = waits & self.owed.keys()
        went_on = len(missing) < len(waits) and any(self.owed[ticket] for ticket in missing)
        self.waits = set() if went_on else missing


class GroupSampler(Sampler):
    """Implements ``engine_api.Sampler``: ranks that hold one copy of the weights sample a share of the requests.

    An episode stays with its ranks. All ranks of a set get the same submits, answers and polls in the same order, so
    that they admit requests at the same steps. A set that waits for an answer does not stop the others; what is
    submitted while others run is admitted at a step that depends on time. Sets stop each by its own count, of its share
    of the groups.
    """

    def __init__(self, calls: RankCalls, media: MediaStore, ranks_together: int) -> None:
        self._calls, self._media = calls, media
        count = len(calls.nodes)
        self._sets = [RankSet(range(i, i + ranks_together)) for i in range(0, count, ranks_together)]
        self._places: dict[int, tuple[RankSet, int]] = {}  # of each ticket
        self._requests: dict[int, SamplingRequest] = {}  # the last of each ticket
        self._polls: dict[Future[Any], RankSet | None] = {}  # under way; the set's first rank answers
        self._others: list[Future[Any]] = []  # further calls, looked at for errors alone
        self._over: list[int] = []  # tickets that are over, and not told yet

    def submit(self, requests: Sequence[SamplingRequest]) -> Sequence[int]:
        shares = _shares(requests, len(self._sets))
        packed = [_packed([requests[i] for i in share]) for share in shares]
        images = [[ref for request in job for ref in request.images] for job in packed]
        by_rank = [number for number, each in enumerate(self._sets) for _ in each.ranks]
        send_images(self._calls.ask, self._media, self._calls.nodes, [images[number] for number in by_rank])
        self._calls.all("submit", each=[packed[number] for number in by_rank])
        first = len(self._places)
        for own, share in zip(self._sets, shares, strict=True):
            for index in share:
                self._places[first + index] = own, len(own.tickets)
                self._requests[first + index] = requests[index]
                own.tickets.append(first + index)
                own.running.add(first + index)
                if requests[index].may_be_cut:
                    own.groups[first + index] = requests[index].prompt.key
        return range(first, first + len(requests))

    def answer(self, ticket: int, request: SamplingRequest | None) -> None:
        own, place = self._places[ticket]
        assert ticket in own.owed, f"ticket {ticket} waits for no answer"
        if request is not None:
            self._send_images(own, request)
        with defer_signals():  # else some ranks would go on without it
            for rank in own.ranks:
                job = _packed([] if request is None else [request])
                self._others.append(self._calls.call(rank, "answer", place, job))
            own.waits = set() if own.owed.pop(ticket) else own.waits - {ticket}
            if request is not None:
                self._requests[ticket] = request
                own.running.add(ticket)
        self._ask()

    def poll(self) -> Polled:
        while True:
            self._ask()
            waits = tuple(sorted(ticket for own in self._sets for ticket in own.waits))
            if not self._polls:
                return Polled((), waits, all(own.stops for own in self._sets), self._take_over())
            is_owed_eagerly = any(any(own.owed.values()) for own in self._sets)
            done, _ = wait(self._polls, WAIT_S if waits or is_owed_eagerly else None, return_when=FIRST_COMPLETED)
            unfinished = [future for future in self._others if not future.done()]
            self._calls.check([*self._polls, *self._others])
            self._others = unfinished
            finished = tuple(each for future in done for each in self._news(future))
            if finished or waits or is_owed_eagerly:
                return Polled(finished, waits, over=self._take_over())

    def stop_after(self, engine_steps: int, groups: int) -> None:
        assert not self._polls, "a stop is asked for before the first poll, or at a stop"
        parts = portions(groups, [len({*own.groups.values()}) for own in self._sets])
        with defer_signals():
            for own, part in zip(self._sets, parts, strict=True):
                own.stops = False
                self._others += [self._calls.call(rank, "stop_after", engine_steps, part) for rank in own.ranks]

    def cut(self) -> Sequence[Cut]:
        assert all(own.stops for own in self._sets), "a sampler is cut where it has stopped"
        first = [rank == own.ranks.start for own in self._sets for rank in own.ranks]
        found: list[list[Cut]] = [each for each in self._calls.all("cut", each=first) if each is not None]
        cuts = [
            self._going_on(cut, own.tickets[cut.ticket])
            for own, each in zip(self._sets, found, strict=True)
            for cut in each
        ]
        self.forget()
        return sorted(cuts, key=lambda cut: cut.ticket)

    def drop(self) -> None:
        if any(own.running or own.owed or own.stops is not None for own in self._sets):
            with defer_signals():
                self._others += [self._calls.call(rank, "drop") for own in self._sets for rank in own.ranks]
        self.forget()

    def score(self, samples: Sequence[Sample], temperature: float) -> list[list[FloatArray]]:
        bare_prompts = {sample.prompt: bare(sample.prompt) for sample in samples}
        job = PackedSamples(Sample(bare_prompts[sample.prompt], sample.segments) for sample in samples)
        images = [ref for sample in samples for ref in sample.all_images]
        send_images(self._calls.ask, self._media, self._calls.nodes, [images] * len(self._calls.nodes))
        found = self._calls.all("score_sampled", job, temperature)
        return [values for of_rank in found for values in of_rank]

    def forget_prompts(self) -> None:
        self._calls.all("forget_prompts")

    def forget(self) -> None:
        """Give up what the ranks have dropped, or will drop."""
        self._others += self._polls
        self._polls.clear()
        self._over.clear()
        for own in self._sets:
            own.running, own.owed, own.waits, own.polls = set(), {}, set(), 0
            own.groups, own.stops = {}, None

    def check(self) -> None:
        """Raise what a call has failed with after the last poll; to be called when the ranks have left.

        The first rank of a set may have told of the last request before another one fails in the same step.
        """
        self._calls.check(self._others)

    def _ask(self) -> None:
        """Keep the ranks busy."""
        for own in self._sets * AHEAD:
            if own.may_be_polled:
                with defer_signals():
                    own.polls += 1
                    for rank in own.ranks:
                        is_first = rank == own.ranks.start
                        self._polls[self._calls.call(rank, "advance", is_first)] = own if is_first else None

    def _news(self, future: Future[Any]) -> list[Finished]:
        """Requests that a poll has finished, as the driver knows them."""
        own = self._polls.pop(future)
        if own is None:
            return []
        own.polls -= 1
        news: Polled = future.result()
        finished = [self._own(each, own.tickets[each.ticket]) for each in news.finished]
        for each in finished:
            own.running.remove(each.ticket)
            answered_after = self._requests[each.ticket].answered_after
            if answered_after is not None:
                own.owed[each.ticket] = answered_after == EAGER
        for place in news.over:
            del own.groups[own.tickets[place]]
            self._over.append(own.tickets[place])
        own.stops = own.stops if own.stops is None else own.stops or news.stopped
        own.block(own.tickets[place] for place in news.waits)
        return finished

    def _own(self, finished: Finished, ticket: int) -> Finished:
        """The same with the driver's ticket, prompt and segments."""
        request = self._requests[ticket]
        rollouts = (
            replace(each, prompt=request.prompt, segments=request.segments + each.segments)
            for each in finished.group.rollouts
        )
        return replace(finished, ticket=ticket, group=RolloutGroup(request.prompt, tuple(rollouts)))

    def _going_on(self, cut: Cut, ticket: int) -> Cut:
        """The same with the driver's ticket, and its request with what is new."""
        request, left = self._requests[ticket], cut.request.max_new_tokens
        if left == request.max_new_tokens:
            return Cut(ticket, request)
        return Cut(ticket, replace(request, segments=request.segments + cut.request.segments, max_new_tokens=left))

    def _take_over(self) -> Sequence[int]:
        over, self._over = tuple(self._over), []
        return over

    def _send_images(self, own: RankSet, request: SamplingRequest) -> None:
        """Send them to each rank before its next call: its node's leader may be busy with polls."""
        for rank in own.ranks:
            for files in missing_images(self._media, self._calls.nodes[rank], request.images, own.sent):
                self._others.append(self._calls.call(rank, "receive_images", files))
        own.sent.update(ref.hash for ref in request.images)


def _packed(requests: Iterable[SamplingRequest]) -> PackedRequests:
    """The requests without the columns of their rows, one prompt for all requests of a row."""
    known: dict[EncodedPrompt, EncodedPrompt] = {}
    return PackedRequests(replace(each, prompt=known.setdefault(each.prompt, bare(each.prompt))) for each in requests)


def _shares(requests: Sequence[SamplingRequest], count: int) -> list[list[int]]:
    """Indices of each set's requests; episodes of a prompt share its cached states if every set gets prompts enough.

    Requests of a prompt that may be cut stay together in any case.
    """
    units: dict[Any, list[int]] = {}
    for index, request in enumerate(requests):
        is_alone = request.answered_after is None and not request.may_be_cut
        units.setdefault(index if is_alone else request.prompt.key, []).append(index)
    if len(units) < 2 * count and not any(request.may_be_cut for request in requests):
        units = {index: [index] for index in range(len(requests))}
    costs = [sum(_cost(requests[index]) for index in unit) for unit in units.values()]
    members = list(units.values())
    return [sorted(index for unit in share for index in members[unit]) for share in balance(costs, count)]


def portions(count: int, sizes: Sequence[int]) -> list[int]:
    """The count divided in proportion to the sizes, to whole numbers: the largest remainders are rounded up."""
    whole = sum(sizes) or 1
    parts = [count * size // whole for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda index: (-(count * sizes[index] % whole), index))
    for index in by_remainder[: count - sum(parts)] if any(sizes) else ():
        parts[index] += 1
    return parts


def _cost(request: SamplingRequest) -> int:
    return len(request.prompt.token_ids) + request.num_samples * request.max_new_tokens
