"""Episodes on many ranks: real workers as threads, with samplers that a function writes for."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.engine_api import EAGER, Polled, SamplingRequest
from mmrl.types import Segment
from tests.cluster.scripted_ranks import prompts, write
from tests.engine import episodes
from tests.scripted_sampler import ScriptedSampler


def observation(length: int, images: Any = ()) -> Segment:
    ids = np.full(length, 5, np.int32)
    return Segment(ids, False, np.zeros(length, np.float32), images=tuple(images), role="tool")


OBSERVATIONS = [observation(2), observation(4)]


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_episodes_on_ranks_are_those_of_one_sampler_whenever_they_are_answered(ranks, size, group_of):
    asked = prompts(7)
    beside = [SamplingRequest(prompt, 3, 1.0, 9, seed=40 + i) for i, prompt in enumerate(prompts(2))]
    alone = episodes.play(ScriptedSampler(write), asked, OBSERVATIONS, beside)
    found, begins = [], []
    for timing in ("early", "late", "random"):
        group, workers = group_of(ranks, size)
        with group.sampling() as sampler:
            found.append(episodes.play(sampler, asked, OBSERVATIONS, beside, timing))
            assert sampler.poll() == Polled()
        begins.append([each.began for each in workers.samplers])
    for other in found[1:]:
        episodes.assert_same(other, found[0])
    if ranks == size:
        episodes.assert_same(found[0], alone)
    assert begins[1:] == begins[:1] * 2
    for first in range(0, ranks, size):  # the ranks of a set admit the same at the same steps
        assert begins[0][first : first + size] == [begins[0][first]] * size and begins[0][first]
    for ticket, each in found[0].items():
        assert each.rollout.token_ids.tolist() == alone[ticket].rollout.token_ids.tolist()
        assert each.rollout.prompt is (asked + prompts(2))[ticket] if ticket < 7 else True


def test_a_set_that_waits_stops_no_other(group_of):
    group, workers = group_of(2)
    with group.sampling() as sampler:
        workers.samplers[1].pause = 0.05
        short = replace(episodes.first_turn(prompts(1)[0], 0, 8), answered_after=2)
        first, _ = sampler.submit([short, replace(short, answered_after=None, num_samples=1)])
        on_second = workers.samplers[1]
        on_second._write = lambda request: [3] * 60
        sampler.submit([SamplingRequest(prompts(2)[1], 1, 1.0, 60, seed=0)] * 2)
        finished: list[int] = []
        while first not in finished:
            finished += [each.ticket for each in sampler.poll().finished]
        while not (news := sampler.poll()).waits:
            finished += [each.ticket for each in news.finished]
        assert list(news.waits) == [first]
        before, start = on_second.steps, time.monotonic()
        for _ in range(5):
            assert list(sampler.poll().waits) == [first]
        assert 0.05 < time.monotonic() - start < 30
        assert on_second.steps > before
        sampler.answer(first, None)
        while (news := sampler.poll()).finished or news.waits:
            assert not news.waits
            finished += [each.ticket for each in news.finished]
    assert sorted(finished) == [0, 1, 2, 3]


def test_images_of_an_observation_reach_each_rank_before_the_turn_that_reads_them(group_of, picture):
    group, workers = group_of(["here", "there", "there"], 1)
    for node in group.nodes[1:]:
        node.shares_files = False
    refs = [group.media.add(picture(56, 56, seed)) for seed in range(2)]
    shown = [observation(4, refs[:1]), observation(4, refs)]
    with group.sampling() as sampler:
        played = episodes.play(sampler, prompts(6), shown, timing="random")
    assert all(each.rollout.all_images == (refs[0], *refs) for each in played.values())
    for rank, calls in enumerate(workers.calls):
        known: set[str] = set()
        sent = [name for call in calls if call[0] == "receive_images" for name in call[1]]
        assert sorted(sent) == (sorted(ref.hash for ref in refs) if rank else [])
        for method, *args in calls:
            if method == "receive_images":
                known |= args[0].keys()
            elif method == "answer" and rank:
                assert {ref.hash for request in args[1] for ref in request.images} <= known


def test_a_turn_travels_without_what_the_driver_knows(group_of):
    group, workers = group_of(1)
    with group.sampling() as sampler:
        sampler.submit([episodes.first_turn(prompts(1)[0], 0)])
        (first,) = sampler.poll().finished
        answer = episodes.next_turn(first, OBSERVATIONS, 5)
        assert answer is not None
        sampler.answer(first.ticket, answer)
        (second,) = sampler.poll().finished
    (rollout,) = second.group.rollouts
    assert rollout.prompt is answer.prompt and rollout.segments[:2] == answer.segments
    assert (second.began, second.ticket) == (first.step + episodes.LATENCY, first.ticket)
    ((request,),) = [args[1] for method, *args in workers.calls[0] if method == "answer"]
    assert request.prompt.prompt.columns == {} and request.segments == answer.segments


def test_what_is_given_up_comes_to_nothing_and_the_ranks_go_on(group_of):
    group, workers = group_of(2)
    with group.sampling() as sampler:
        sampler.submit([episodes.first_turn(prompt, 1, 8) for prompt in prompts(6)])
        sampler.poll()
        sampler.drop()
        assert sampler.poll() == Polled()
        requests = [SamplingRequest(prompt, 2, 1.0, 9, seed=i) for i, prompt in enumerate(prompts(3))]
        groups = dict(sampler.generate(requests))
        assert sorted(groups) == [0, 1, 2]
        assert all(groups[i].rollouts[1].token_ids.tolist() == write(requests[i]) for i in groups)
        sampler.submit([episodes.first_turn(prompts(1)[0], 1)])
    assert sampler.poll() == Polled()
    assert all(not each.admissions.running and each.admissions.step == 0 for each in workers.samplers)


def test_eager_answers_are_taken_on_the_way(group_of):
    group, workers = group_of(2)
    for each in workers.samplers:
        each.pause = 0.01
    left = {}
    with group.sampling() as sampler:
        requests = [replace(episodes.first_turn(prompt, 1, 8), answered_after=EAGER) for prompt in prompts(5)]
        left = dict.fromkeys(sampler.submit(requests), 3)
        while left:
            news = sampler.poll()
            for each in news.finished:
                left[each.ticket] -= 1
                segments = (*each.group.rollouts[0].segments, OBSERVATIONS[0])
                goes_on = replace(requests[each.ticket], segments=segments) if left[each.ticket] else None
                sampler.answer(each.ticket, goes_on)
                if goes_on is None:
                    del left[each.ticket]
        assert sampler.poll() == Polled()
    assert sum(len(each.began) for each in workers.samplers) == 15
