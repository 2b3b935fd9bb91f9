"""When requests are admitted: by hand, and the same whenever their answers are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mmrl.engine.sampler.admissions import Admissions
from mmrl.engine_api import EAGER, Polled, SamplingRequest
from mmrl.types import EncodedPrompt, Prompt, RolloutGroup, Segment
from tests.scripted_sampler import ScriptedSampler

PROMPT = EncodedPrompt(prompt=Prompt("row", ()), text="", token_ids=np.arange(3, dtype=np.int32), images=())


def lasting(steps: int, answered_after: int | None = 2) -> SamplingRequest:
    """A request that takes so many steps."""
    return SamplingRequest(PROMPT, 1, 1.0, steps, seed=0, answered_after=answered_after)


@pytest.fixture
def sampler() -> ScriptedSampler:
    return ScriptedSampler(lambda request: [7] * request.max_new_tokens)


def told(polled: Polled) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(ticket, began, step) of what is finished, and the tickets that are waited for."""
    return [(each.ticket, each.began, each.step) for each in polled.finished], list(polled.waits)


def test_an_answer_is_admitted_so_many_steps_after_the_end(sampler):
    assert list(sampler.submit([lasting(1), lasting(5, None)])) == [0, 1]
    assert told(sampler.poll()) == ([(0, 0, 0)], [])  # the step with number 0
    sampler.answer(0, lasting(2))  # early: due at 0 + 2
    assert told(sampler.poll()) == ([(0, 2, 3)], [])
    assert told(sampler.poll()) == ([(1, 0, 4)], [])  # the answer to 0 is due at 5
    assert told(sampler.poll()) == ([], [0])
    assert told(sampler.poll()) == ([], [0])
    sampler.answer(0, None)
    assert told(sampler.poll()) == ([], [])


def test_a_late_answer_holds_all_up_and_changes_nothing(sampler):
    sampler.submit([lasting(1), lasting(9, None)])
    assert told(sampler.poll()) == ([(0, 0, 0)], [])
    assert told(sampler.poll()) == ([], [0]) and sampler.admissions.step == 2
    sampler.answer(0, lasting(2))
    assert told(sampler.poll()) == ([(0, 2, 3)], [])


def test_the_end_of_an_episode_is_waited_for_too(sampler):
    sampler.submit([lasting(1), lasting(4, None)])
    sampler.poll()
    assert told(sampler.poll()) == ([], [0])
    sampler.answer(0, None)
    assert told(sampler.poll()) == ([(1, 0, 3)], [])
    assert told(sampler.poll()) == ([], [])


def test_if_nothing_runs_the_count_jumps_to_the_earliest_that_is_due(sampler):
    sampler.submit([lasting(1, 7), lasting(2, 3)])
    assert told(sampler.poll()) == ([(0, 0, 0)], [])
    assert told(sampler.poll()) == ([(1, 0, 1)], [])
    sampler.answer(0, lasting(1, None))  # due at 7
    assert told(sampler.poll()) == ([], [1]) and sampler.admissions.step == 4
    sampler.answer(1, None)
    assert told(sampler.poll()) == ([(0, 7, 7)], [])


def test_answers_that_are_due_together_are_admitted_in_the_order_of_step_and_ticket(sampler):
    sampler.submit([lasting(3, 1), lasting(1, 3), lasting(3, 1)])
    assert [told(sampler.poll())[0] for _ in range(2)] == [[(1, 0, 0)], [(0, 0, 2), (2, 0, 2)]]
    for ticket in (2, 1):
        sampler.answer(ticket, lasting(1, None))
    assert told(sampler.poll()) == ([], [0])  # none is admitted before all are there
    sampler.answer(0, lasting(1, None))
    assert [each.ticket for each in sampler.poll().finished] == [0, 1, 2]
    assert sampler.began == [(0, 0), (1, 0), (2, 0), (0, 3), (1, 3), (2, 3)]


def test_an_eager_answer_is_admitted_when_it_is_given(sampler):
    sampler.submit([lasting(1, EAGER), lasting(4, EAGER)])
    assert told(sampler.poll()) == ([(0, 0, 0)], [])
    assert told(sampler.poll()) == ([], [])  # one step more, so that the answer can be given
    sampler.answer(0, lasting(1, EAGER))
    assert told(sampler.poll()) == ([(0, 2, 2)], [])
    assert told(sampler.poll()) == ([(1, 0, 3)], [])
    assert told(sampler.poll()) == ([], [0, 1])  # nothing runs
    sampler.answer(1, None)
    assert told(sampler.poll()) == ([], [0])
    sampler.answer(0, None)
    assert told(sampler.poll()) == ([], [])


def test_what_is_submitted_after_the_ends_begins_at_the_same_step_though_they_were_not_polled(sampler):
    begins = []
    for polls in (0, 1):
        sampler.leave()
        sampler.submit([lasting(1, 9)])
        sampler.poll()
        sampler.answer(0, None)
        for _ in range(polls):
            assert told(sampler.poll()) == ([], [])
        sampler.submit([lasting(1, None)])
        begins += told(sampler.poll())[0]
    assert begins == [(1, 9, 9), (1, 9, 9)]


def test_what_is_dropped_is_forgotten_and_steps_and_tickets_count_on(sampler):
    sampler.submit([lasting(1), lasting(9)])
    sampler.poll()
    sampler.drop()
    assert told(sampler.poll()) == ([], [])
    with pytest.raises(AssertionError, match="ticket 0 waits for no answer"):
        sampler.answer(0, None)
    assert list(sampler.submit([lasting(1)])) == [2] and told(sampler.poll()) == ([(2, 1, 1)], [])
    sampler.leave()
    assert list(sampler.submit([lasting(1)])) == [0] and told(sampler.poll()) == ([(0, 0, 0)], [])


def test_an_answer_is_taken_once(sampler):
    sampler.submit([lasting(1), lasting(1, None)])
    sampler.poll()
    sampler.answer(0, None)
    for ticket in (0, 1):
        with pytest.raises(AssertionError, match="waits for no answer"):
            sampler.answer(ticket, None)


def test_a_turn_follows_what_was_before_it(sampler):
    sampler.submit([lasting(2)])
    (first,) = sampler.poll().finished
    (rollout,) = first.group.rollouts
    assert [s.finish_reason for s in rollout.segments] == ["length"] and rollout.segments[0].weight_version == 0
    sampler.answer(0, replace(lasting(1, None), segments=rollout.segments))
    (rollout,) = sampler.poll().finished[0].group.rollouts
    assert rollout.token_ids.tolist() == [7, 7, 7] and rollout.segments[1].finish_reason is None


def play(
    rng: np.random.Generator, episodes: Sequence[Sequence[int]], eagerness: float, most: int | None
) -> list[tuple[int, int]]:
    """Begins of all turns of episodes with turns of these lengths; answers are given in a random order, some early."""
    sampler = ScriptedSampler(lambda request: [7] * request.max_new_tokens, most=most)
    left = [list(turns) for turns in episodes]
    tickets = sampler.submit([lasting(turns.pop(0), 1 + i % 5) for i, turns in enumerate(left)])
    owed = dict[int, int]()
    by_ticket = dict(zip(tickets, left, strict=True))

    def answer(ticket: int) -> None:
        turns, answered_after = by_ticket[ticket], owed.pop(ticket)
        sampler.answer(ticket, lasting(turns.pop(0), answered_after) if turns else None)

    while True:
        news = sampler.poll()
        owed |= {each.ticket: 1 + each.ticket % 5 for each in news.finished}
        if not news.finished and not news.waits:
            return sampler.began
        for ticket in rng.permutation(list(owed)).tolist():
            if rng.random() < eagerness or (ticket in news.waits and rng.random() < 0.5):
                answer(ticket)


def test_the_schedule_is_the_same_whenever_answers_are_given():
    rng = np.random.default_rng(0)
    for number in range(30):
        most = (None, 2)[number % 2]
        episodes = [rng.integers(1, 9, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 12))]
        found = [play(rng, episodes, eagerness, most) for eagerness in (0.0, 0.1, 0.5, 1.0)]
        assert found[1:] == found[:1] * 3
        assert len(found[0]) == sum(map(len, episodes))


def test_the_schedule_is_that_of_a_calculation_step_by_step():
    """Two episodes of two turns: 0 takes 3 and 2 steps and is answered after 2, 1 takes 1 and 4 and is after 3."""

    def turn(ticket: int, number: int) -> SamplingRequest:
        return lasting([[3, 2], [1, 4]][ticket][number], 2 + ticket)

    sampler = ScriptedSampler(lambda request: [7] * request.max_new_tokens)
    sampler.submit([turn(0, 0), turn(1, 0)])
    assert told(sampler.poll())[0] == [(1, 0, 0)]  # due at 3
    assert told(sampler.poll())[0] == [(0, 0, 2)]  # due at 4
    sampler.answer(0, turn(0, 1))
    sampler.answer(1, turn(1, 1))
    # 1 runs in steps 3 to 6, 0 in steps 4 and 5.
    assert told(sampler.poll())[0] == [(0, 4, 5)]
    assert told(sampler.poll())[0] == [(1, 3, 6)]


def admitted(steps: Admissions) -> list[int]:
    """Tickets that the next step begins with; those that ran are finished."""
    steps.finish((ticket, RolloutGroup(PROMPT, ())) for ticket in list(steps.running))
    return [ticket for ticket, _ in steps.admit()]


def test_at_most_so_many_requests_begin_at_a_step_and_the_others_go_first_at_the_next():
    steps = Admissions(most=2)
    steps.submit([lasting(1, None)] * 5)
    assert [admitted(steps) for _ in range(4)] == [[0, 1], [2, 3], [4], []]


def test_fewer_requests_begin_if_they_bring_many_new_tokens():
    written, observed = (Segment(np.arange(n, dtype=np.int32), n > 1, np.zeros(n, np.float32)) for n in (100, 1))
    turn = replace(lasting(1, None), segments=(written, observed))
    steps = Admissions(most=9, most_tokens=4)
    steps.submit([lasting(1, 4), lasting(1, 4)])
    assert [admitted(steps) for _ in range(2)] == [[0, 1], []]
    for ticket in (0, 1):
        steps.answer(ticket, turn)  # 103 tokens were read before, and 1 was not
    assert admitted(steps) == [0, 1]
    steps.submit([turn, turn, lasting(1, None)])  # these go on from others, which another rank may have read
    assert [admitted(steps) for _ in range(4)] == [[2], [3], [4], []]


def test_a_request_with_more_tokens_than_a_step_takes_begins_alone():
    steps = Admissions(most=9, most_tokens=2)
    steps.submit([lasting(1, None)] * 2)
    assert [admitted(steps) for _ in range(3)] == [[0], [1], []]


def test_what_is_left_at_a_step_goes_before_answers():
    sampler = ScriptedSampler(lambda request: [7] * request.max_new_tokens, most=1)
    sampler.submit([lasting(1, 1), *[lasting(1, None)] * 2])
    assert told(sampler.poll()) == ([(0, 0, 0)], [])
    sampler.answer(0, lasting(1, None))  # due at 1
    assert [told(sampler.poll())[0] for _ in range(3)] == [[(1, 1, 1)], [(2, 2, 2)], [(0, 3, 3)]]
