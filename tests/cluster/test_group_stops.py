"""Stops and cuts on many ranks: each set by its own count, the same whatever takes its time, and not a step further."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.cluster.group_sampler import portions
from mmrl.engine_api import Polled, Sampler, SamplingRequest
from mmrl.types import Rollout, Segment
from tests.cluster.scripted_ranks import prompts
from tests.scripted_sampler import ScriptedSampler

GROUPS, MEMBERS = 8, 3
SEEN = Segment(np.array([5, 6], np.int32), False, np.zeros(2, np.float32), role="tool")


def members(*, plays: bool) -> list[SamplingRequest]:
    """The first turns of all members, whose lengths differ much; some are answered."""
    found = []
    for place, prompt in enumerate(prompts(GROUPS)):
        for member in range(MEMBERS):
            seed = (place * 97 + member) << 16
            answered_after = 1 + (place + member) % 6 if plays and member else None
            length = int(np.random.default_rng(seed).integers(1, 40))
            found.append(SamplingRequest(prompt, 1, 1.0, length, seed, (), answered_after, may_be_cut=True))
    return found


def long(request: SamplingRequest) -> list[int]:
    """As many tokens as the request may have; they depend on its seed and on what was before."""
    rng = np.random.default_rng([request.seed, len(request.token_ids)])
    return rng.integers(0, 99, request.max_new_tokens).tolist()


def next_turn(request: SamplingRequest, rollout: Rollout) -> SamplingRequest | None:
    """A further turn of some episodes."""
    turns = sum(segment.begins_turn for segment in rollout.segments)
    if turns > request.seed >> 16 & 1:
        return None
    return replace(request, segments=(*rollout.segments, SEEN), max_new_tokens=7 + turns, seed=request.seed + turns)


def rounds(sampler: Sampler, *, plays: bool, clock: Any = None) -> list[Any]:
    """All that may not depend on time, of two stops and the cut after them."""
    requests = members(plays=plays)
    sampler.submit(requests)
    owed, trace = dict[int, Rollout](), list[Any]()
    for steps, groups in ((9, 2), (2, 3)):
        sampler.stop_after(steps, groups)
        told, over = list[Any](), list[int]()
        while True:
            news = sampler.poll()
            told += [(each.ticket, each.began, each.step, rows(each.group.rollouts)) for each in news.finished]
            over += news.over
            owed |= {e.ticket: e.group.rollouts[0] for e in news.finished if requests[e.ticket].answered_after}
            for ticket in sorted(owed):
                if clock is None or ticket in news.waits or clock.random() < 0.3:
                    sampler.answer(ticket, next_turn(requests[ticket], owed.pop(ticket)))
            if news.stopped:
                break
        trace += [sorted(told), sorted(over)]
        assert not set(over) & set(owed)
    assert sampler.poll() == Polled(stopped=True)
    cuts = sampler.cut()
    assert [each.ticket for each in cuts] == sorted(each.ticket for each in cuts)
    assert sampler.poll() == Polled()
    for each in cuts:
        assert each.request.prompt is requests[each.ticket].prompt and each.request.may_be_cut
        assert each.request.answered_after == requests[each.ticket].answered_after
        whole = Rollout(each.request.prompt, each.request.segments, 0, "", "stop", 0)
        trace.append((each.ticket, rows([whole]), each.request.max_new_tokens))
    return trace


def rows(rollouts: Any) -> list[Any]:
    return [
        (s.token_ids.tolist(), s.by_policy, s.weight_version, s.finish_reason, s.continues, s.sampler_logprobs.tolist())
        for rollout in rollouts
        for s in rollout.segments
    ]


@pytest.mark.parametrize("plays", [False, True], ids=["completions", "episodes"])
@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_each_set_stops_by_its_own_count_whatever_takes_its_time(ranks, size, plays, group_of):
    found, steps = [], []
    for run in range(3):
        group, workers = group_of(ranks, size)
        rng = np.random.default_rng(run)
        for rank, each in enumerate(workers.samplers):
            each._write = long
            each.pause = (0.0, 0.002 * (rank // size), 0.002 * (1 - rank // size))[run]
        with group.sampling() as sampler:
            found.append(rounds(sampler, plays=plays, clock=rng if run else None))
        steps.append([each.steps for each in workers.samplers])
        for first in range(0, ranks, size):
            assert all(each.began == workers.samplers[first].began for each in workers.samplers[first : first + size])
    assert found[1:] == found[:1] * 2
    assert steps[1:] == steps[:1] * 2  # polls that were ahead of the stop have made no step
    if ranks == size:
        assert found[0] == rounds(ScriptedSampler(long), plays=plays)
    else:
        assert len(set(steps[0])) == 2  # the sets had uneven work


def test_members_of_a_prompt_stay_on_a_set_and_sets_have_shares_of_the_groups(group_of):
    group, workers = group_of(4, 2)
    with group.sampling() as sampler:
        sampler.submit(members(plays=False))
        sampler.stop_after(1, 5)
    submitted = [next(args[1] for args in calls if args[0] == "submit") for calls in workers.calls]
    keys = [{each.prompt.key for each in requests} for requests in submitted]
    assert keys[0] == keys[1] and keys[2] == keys[3] and not keys[0] & keys[2] and len(keys[0] | keys[2]) == GROUPS
    asked = [next(args[1:] for args in calls if args[0] == "stop_after") for calls in workers.calls]
    assert asked == [(1, part) for part in portions(5, [len(keys[0]), len(keys[2])]) for _ in range(2)]


def test_a_group_for_each_of_more_sets_than_groups_is_whole(group_of):
    group, workers = group_of(3)
    with group.sampling() as sampler:
        sampler.submit(members(plays=False)[: 2 * MEMBERS])
        sampler.stop_after(50, 2)
        over = list[int]()
        while not (news := sampler.poll()).stopped:
            over += news.over
        over += news.over
        assert sorted(over) == list(range(2 * MEMBERS))
        assert sampler.cut() == []
    counts = [sum(len(args[1]) for args in calls if args[0] == "submit") for calls in workers.calls]
    assert sorted(counts) == [0, MEMBERS, MEMBERS]


def test_a_cut_request_travels_without_what_the_driver_knows_and_goes_on_with_it(group_of):
    group, workers = group_of(2)
    long_observation = replace(SEEN, token_ids=np.zeros(5000, np.int32), sampler_logprobs=np.zeros(5000, np.float32))
    written = Segment(np.array([1, 2], np.int32), True, np.zeros(2, np.float32), 3, finish_reason="stop")
    for each in workers.samplers:
        each._write = long
    with group.sampling() as sampler:
        first, second = members(plays=True)[0], members(plays=True)[MEMBERS + 1]
        first = replace(first, max_new_tokens=9)
        second = replace(second, max_new_tokens=9, segments=(written, long_observation))
        sampler.submit([first, second])
        sampler.stop_after(4, 0)
        while not sampler.poll().stopped:
            pass
        sizes = workers.sizes = []
        cuts = [cut.request for cut in sampler.cut()]
    assert max(sizes) < 2000
    assert [cut.max_new_tokens for cut in cuts] == [5, 5]
    assert cuts[1].segments[:2] == second.segments and len(cuts[1].segments) == 3
    assert cuts[1].segments[2].token_ids.tolist() == long(second)[:4] and cuts[1].segments[2].weight_version == 0
    for each in workers.samplers:
        each.weight_version = 1
    with group.sampling() as sampler:
        sampler.submit(cuts)
        finished = [each for _ in range(2) for each in sampler.poll().finished]
    for each in finished:
        (rollout,) = each.group.rollouts
        assert [s.continues for s in rollout.segments][-2:] == [False, True]
        assert [s.weight_version for s in rollout.segments][-2:] == [0, 1]
        assert rollout.segments[:-1] == cuts[each.ticket].segments
        assert len(rollout.text.split()) == 9


def test_requests_that_are_given_up_after_a_stop_leave_nothing_behind(group_of):
    group, workers = group_of(2)
    for each in workers.samplers:
        each._write = long
    with group.sampling() as sampler:
        sampler.submit(members(plays=False))
        sampler.stop_after(3, 0)
        while not sampler.poll().stopped:
            pass
        sampler.drop()
        assert sampler.poll() == Polled()
        requests = [SamplingRequest(prompt, 2, 1.0, 9, seed=i) for i, prompt in enumerate(prompts(3))]
        assert sorted(dict(sampler.generate(requests))) == [0, 1, 2]
    for each in workers.samplers:
        assert not each.admissions.running and not each.admissions.stopped


@pytest.mark.parametrize(
    ("count", "sizes", "parts"),
    [
        (5, [4, 4], [3, 2]),
        (4, [5, 3], [3, 1]),  # 2.5 and 1.5: the first of equal remainders
        (7, [6, 3, 1], [4, 2, 1]),  # 4.2, 2.1 and 0.7
        (6, [3, 0, 1], [5, 0, 1]),  # 4.5 and 1.5
        (3, [0, 0], [0, 0]),
        (0, [2, 1], [0, 0]),
        (9, [2, 1], [6, 3]),  # more than there are
    ],
)  # fmt: skip
def test_groups_are_divided_by_largest_remainders(count, sizes, parts):
    assert portions(count, sizes) == parts
    assert all(part <= size for part, size in zip(parts, sizes, strict=True)) or count > sum(sizes)
