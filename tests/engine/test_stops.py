"""Where a sampler stops, what is over there, and how cut requests go on: by hand, and whenever answers are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.engine.sampler.admissions import Admissions, OneByOneSampler, turn_ids
from mmrl.engine_api import EAGER, Cut, Polled, SamplingRequest
from mmrl.types import EncodedPrompt, Prompt, Rollout, RolloutGroup, Segment
from tests.scripted_sampler import ScriptedSampler

SEEN = Segment(np.array([50, 51], np.int32), False, np.zeros(2, np.float32), role="tool")


def member(name: str, steps: int, answered_after: int | None = None) -> SamplingRequest:
    """A request of the group of that name that takes so many steps."""
    prompt = EncodedPrompt(prompt=Prompt(name, ()), text="", token_ids=np.arange(3, dtype=np.int32), images=())
    return SamplingRequest(prompt, 1, 1.0, steps, seed=0, answered_after=answered_after, may_be_cut=True)


@pytest.fixture
def sampler() -> ScriptedSampler:
    """Writes the token's place in its turn, from 0."""

    def write(request: SamplingRequest) -> Sequence[int]:
        before = len(turn_ids(request, np.zeros(0, np.int32)))
        return range(before, before + request.max_new_tokens)

    return ScriptedSampler(write)


def until_stop(sampler: ScriptedSampler) -> tuple[list[int], list[int], int]:
    """Tickets that are finished, tickets that are over, and the step of the stop; nothing is answered."""
    finished, over = list[int](), list[int]()
    while True:
        news = sampler.poll()
        finished += [each.ticket for each in news.finished]
        over += news.over
        if news.stopped:
            return finished, over, sampler.admissions.step
        assert not news.waits


def left(cuts: Sequence[Cut]) -> list[tuple[int, list[int], int]]:
    """Returns the ticket of each cut request, the tokens that it has, and how many are left."""
    found = []
    for each in cuts:
        rollout = Rollout(each.request.prompt, each.request.segments, 0, "", "stop", 0)
        found.append((each.ticket, rollout.token_ids.tolist(), each.request.max_new_tokens))
    return found


def test_a_stop_after_steps_cuts_each_request_at_its_token_and_it_goes_on_from_there(sampler):
    sampler.submit([member("a", 2), member("a", 5), member("b", 9)])
    sampler.stop_after(3, 0)
    assert until_stop(sampler) == ([0], [0], 3)
    assert sampler.poll() == Polled(stopped=True)  # no step is made
    cuts = sampler.cut()
    assert left(cuts) == [(1, [0, 1, 2], 2), (2, [0, 1, 2], 6)]
    assert [each.request.segments[0].weight_version for each in cuts] == [0, 0]
    sampler.leave()
    sampler.weight_version = 1
    sampler.submit([each.request for each in cuts])
    sampler.stop_after(4, 0)
    assert until_stop(sampler) == ([0], [0], 4)
    again = sampler.cut()
    assert left(again) == [(1, [0, 1, 2, 3, 4, 5, 6], 2)]
    sampler.leave()
    sampler.weight_version = 2
    sampler.submit([again[0].request])
    ((finished,),) = [sampler.poll().finished]
    (rollout,) = finished.group.rollouts
    assert rollout.token_ids.tolist() == list(range(9)) and rollout.text == "0 1 2 3 4 5 6 7 8"
    assert [(s.weight_version, s.continues, s.finish_reason) for s in rollout.segments] == [
        (0, False, None), (1, True, None), (2, True, None),
    ]  # fmt: skip
    assert (rollout.weight_version, rollout.finish_reason) == (2, "length")
    assert rollout.turn_of_token.tolist() == [0] * 9 and rollout.mask.all()


def test_a_stop_waits_for_whole_groups(sampler):
    sampler.submit([member("a", 2), member("a", 7), member("b", 9), member("c", 4), member("c", 1)])
    sampler.stop_after(3, 2)
    assert until_stop(sampler) == ([4, 0, 3, 1], [4, 0, 3, 1], 7)
    assert left(sampler.cut()) == [(2, [0, 1, 2, 3, 4, 5, 6], 2)]


def test_further_stops_count_from_the_last_one_and_take_what_was_submitted_there(sampler):
    sampler.submit([member("a", 2), member("b", 9), member("c", 20)])
    sampler.stop_after(1, 1)
    assert until_stop(sampler) == ([0], [0], 2)
    sampler.submit([member("d", 3)])
    assert sampler.poll() == Polled(stopped=True)
    sampler.stop_after(0, 2)
    assert until_stop(sampler) == ([3, 1], [3, 1], 9)
    sampler.stop_after(2, 0)
    assert until_stop(sampler) == ([], [], 11)
    assert [ticket for ticket, _, _ in left(sampler.cut())] == [2]


def test_a_sampler_without_requests_is_at_its_stop(sampler):
    sampler.stop_after(16, 3)
    assert sampler.poll() == Polled(stopped=True) and sampler.cut() == []
    sampler.submit([member("a", 2)])  # it is cut, and nobody has told it where to stop
    assert [each.ticket for each in sampler.poll().finished] == [0]
    assert not sampler.poll().stopped


def test_a_stop_of_fewer_groups_than_there_are_ends_with_the_last(sampler):
    sampler.submit([member("a", 2), member("b", 9)])
    sampler.stop_after(50, 5)
    assert until_stop(sampler) == ([0, 1], [0, 1], 9)


def test_a_request_that_has_not_begun_comes_back_as_it_was():
    sampler = ScriptedSampler(lambda request: [7] * request.max_new_tokens, most=1)
    requests = [member("a", 5), member("b", 5), member("c", 5)]
    sampler.submit(requests)
    sampler.stop_after(2, 0)
    assert until_stop(sampler) == ([], [], 2)
    cuts = sampler.cut()
    assert left(cuts) == [(0, [7, 7], 3), (1, [7], 4), (2, [], 5)]
    assert cuts[2].request is requests[2]


def observed(sampler: ScriptedSampler, ticket: int, rollout: Rollout, steps: int, answered_after: int) -> None:
    """Answer with an observation of two tokens and a turn of so many steps."""
    turn = member(rollout.prompt.id, steps, answered_after)
    sampler.answer(ticket, replace(turn, segments=(*rollout.segments, SEEN)))


@pytest.mark.parametrize("given", ["early", "late"])
def test_an_answer_that_is_due_after_the_stop_counts_for_nothing_given_or_not(sampler, given):
    sampler.submit([member("a", 1, 4), member("b", 2, 9), member("c", 12, 2), member("d", 1, 20)])
    sampler.stop_after(6, 0)
    found = {each.ticket: each.group.rollouts[0] for _ in range(2) for each in sampler.poll().finished}
    assert sorted(found) == [0, 1, 3]  # due at 4, 10 and 20
    if given == "early":
        sampler.answer(0, None)
        observed(sampler, 1, found[1], 3, 9)
        sampler.answer(3, None)
    else:
        assert sampler.poll().waits == (0,) and sampler.admissions.step == 4
        sampler.answer(0, None)
    assert until_stop(sampler) == ([], [0], 6)
    assert left(sampler.cut()) == [(2, [0, 1, 2, 3, 4, 5], 6)]  # neither 1 nor 3, which is not over


@pytest.mark.parametrize("given", ["early", "late"])
def test_an_answer_that_is_due_at_the_stop_is_waited_for(sampler, given):
    sampler.submit([member("a", 1, 5), member("b", 12), member("c", 1, 5)])
    sampler.stop_after(5, 0)  # the turns end at step 0, and the answers are due at 5
    found = {each.ticket: each.group.rollouts[0] for each in sampler.poll().finished}
    if given == "late":
        assert sampler.poll().waits == (0, 2)
    observed(sampler, 0, found[0], 3, 5)
    sampler.answer(2, None)
    assert until_stop(sampler) == ([], [2], 5)
    assert left(sampler.cut()) == [(0, [0, 50, 51], 3), (1, [0, 1, 2, 3, 4], 7)]


@pytest.mark.parametrize("given", ["early", "late"])
def test_where_nothing_runs_the_count_jumps_no_further_than_the_stop(sampler, given):
    sampler.submit([member("a", 1, 30), member("b", 2)])
    sampler.stop_after(16, 1)
    (first,) = sampler.poll().finished
    if given == "early":
        sampler.answer(0, None)
    assert until_stop(sampler) == ([1], [1], 16)
    if given == "late":
        sampler.answer(0, None)
    sampler.submit([member("c", 3)])  # begins at 16, though nothing else runs
    sampler.stop_after(0, 1)
    assert until_stop(sampler) == ([2], [2], 19)
    sampler.stop_after(0, 1)
    assert until_stop(sampler) == ([], [0], 30)
    assert first.ticket == 0 and sampler.cut() == []


def test_where_a_group_is_missing_the_count_jumps_over_the_stop_to_the_answer(sampler):
    sampler.submit([member("a", 1, 30)])
    sampler.stop_after(16, 1)
    sampler.poll()
    assert sampler.poll().waits == (0,) and sampler.admissions.step == 30
    sampler.answer(0, None)
    assert until_stop(sampler) == ([], [0], 30)


def test_a_turn_that_is_cut_goes_on_within_its_episode(sampler):
    sampler.submit([member("a", 2, 3)])
    sampler.stop_after(9, 0)
    (rollout,) = sampler.poll().finished[0].group.rollouts
    observed(sampler, 0, rollout, 7, 3)  # begins at 4
    assert until_stop(sampler) == ([], [], 9)
    (cut,) = sampler.cut()
    assert left([cut]) == [(0, [0, 1, 50, 51, 0, 1, 2, 3, 4], 2)] and not cut.request.segments[-1].continues
    sampler.leave()
    sampler.weight_version = 5
    sampler.submit([cut.request])
    (finished,) = sampler.poll().finished
    (rollout,) = finished.group.rollouts
    assert rollout.text == "0 1 2 3 4 5 6"  # of the turn, and of the turn alone
    assert [s.continues for s in rollout.segments] == [False, False, False, True]
    assert [s.weight_version for s in rollout.segments] == [0, None, 0, 5]
    assert rollout.turn_of_token.tolist() == [0] * 4 + [1] * 7


def test_what_is_submitted_in_between_and_what_is_answered_eagerly_cannot_be_stopped(sampler):
    sampler.submit([member("a", 3)])
    sampler.stop_after(2, 0)
    with pytest.raises(AssertionError, match="before the sampler is told where to stop"):
        sampler.submit([member("b", 3)])
    with pytest.raises(AssertionError, match="where it has stopped"):
        sampler.cut()
    for other in (replace(member("a", 3, EAGER)), replace(member("a", 3), num_samples=2)):
        sampler.leave()
        with pytest.raises(AssertionError, match="cannot be cut"):
            sampler.submit([other])


def test_requests_are_not_sampled_to_their_ends_at_a_stop_but_after_the_cut(sampler):
    sampler.submit([member("a", 3)])
    sampler.stop_after(2, 0)
    until_stop(sampler)
    plain = replace(member("b", 4), may_be_cut=False)
    with pytest.raises(AssertionError, match="do not go by a stop"):
        list(sampler.generate([plain]))
    assert [index for index, _ in sampler.generate([plain])] == [0]  # all was given up


def test_a_sampler_that_samples_each_request_to_its_end_refuses_a_stop():
    class Whole(OneByOneSampler):
        def _group(self, request: SamplingRequest) -> RolloutGroup:
            return RolloutGroup(request.prompt, ())

    with pytest.raises(AssertionError, match="samples each request to its end"):
        Whole().stop_after(16, 1)


def test_requests_that_cannot_be_cut_are_neither_counted_nor_told_as_over(sampler):
    plain = replace(member("a", 2), may_be_cut=False)
    sampler.submit([plain, member("b", 4)])
    sampler.stop_after(0, 1)
    assert until_stop(sampler) == ([0, 1], [1], 4)


def test_members_of_a_prompt_begin_together_as_a_group_does():
    members = [member(name, 1) for name in "abc" for _ in range(3)]
    steps = Admissions(most=2)
    steps.submit(members)
    assert [ticket for ticket, _ in steps.admit()] == [0, 1, 2, 3, 4, 5]
    steps = Admissions(most=9, most_tokens=4)
    steps.submit(members)
    assert [ticket for ticket, _ in steps.admit()] == [0, 1, 2, 3]  # 3 tokens for a, and the first of b with 3 more
    written = Segment(np.arange(2, dtype=np.int32), True, np.zeros(2, np.float32))
    steps = Admissions(most=9, most_tokens=6)
    steps.submit([replace(each, segments=(written,)) for each in members])  # read anew: 3 + 2, then 2 more
    assert [ticket for ticket, _ in steps.admit()] == [0, 1]


def play(seed: int, eagerness: float, most: int | None) -> list[Any]:
    """All that may not depend on time, of episodes in rounds that are cut; some answers are given early."""
    plan, clock = np.random.default_rng(seed), np.random.default_rng([seed, int(eagerness * 100)])
    keys = [(group, place) for group in range(6) for place in range(3)]
    turns = {key: plan.integers(1, 9, plan.integers(1, 5)).tolist() for key in keys}
    delays = {key: None if plan.random() < 0.3 else int(plan.integers(1, 12)) for key in keys}

    def next_turn(key: tuple[int, int], rollout: Rollout | None) -> SamplingRequest | None:
        number = 0 if rollout is None else sum(segment.begins_turn for segment in rollout.segments)
        if number == len(turns[key]):
            return None
        request = member(f"g{key[0]}", turns[key][number], delays[key])
        return request if rollout is None else replace(request, segments=(*rollout.segments, SEEN))

    sampler = ScriptedSampler(lambda request: [7] * request.max_new_tokens, most=most)
    unfinished: dict[tuple[int, int], SamplingRequest | Rollout] = {key: next_turn(key, None) for key in keys}
    trace = list[Any]()
    while unfinished:
        requests = {key: next_turn(key, e) if isinstance(e, Rollout) else e for key, e in sorted(unfinished.items())}
        submitted = [key for key, request in requests.items() if request is not None]
        names = dict(enumerate(submitted))
        sampler.leave()
        sampler.submit([requests[key] for key in submitted])
        unfinished, owed = {}, set[int]()
        finished: dict[int, Rollout] = {}
        for _ in range(plan.integers(1, 4)):
            sampler.stop_after(plan.integers(0, 9), plan.integers(0, 3))
            told = list[Any]()
            while not (told and told[-1] is True):
                news = sampler.poll()
                told += [(names[each.ticket], each.began, each.step) for each in news.finished]
                for each in news.finished:
                    finished[each.ticket] = each.group.rollouts[0]
                    owed |= {each.ticket} if delays[names[each.ticket]] else set()
                told += [("over", names.pop(ticket)) for ticket in news.over]
                for ticket in clock.permutation(sorted(owed)).tolist():
                    if clock.random() < eagerness or (ticket in news.waits and clock.random() < 0.5):
                        owed.remove(ticket)
                        sampler.answer(ticket, next_turn(submitted[ticket], finished[ticket]))
                told += [True] if news.stopped else []
            trace += [sorted(told[:-1], key=repr), sampler.admissions.step]
        unfinished |= {submitted[each.ticket]: each.request for each in sampler.cut()}
        trace += [(key, request.max_new_tokens, len(request.token_ids)) for key, request in unfinished.items()]
        unfinished |= {key: finished[ticket] for ticket, key in names.items() if key not in unfinished}
        trace.append(sorted(names.values()))
    return trace


def test_stops_and_cuts_are_the_same_whenever_answers_are_given():
    for seed in range(25):
        most = (None, 2)[seed % 2]
        found = [play(seed, eagerness, most) for eagerness in (0.0, 0.2, 0.6, 1.0)]
        assert found[1:] == found[:1] * 3, seed
