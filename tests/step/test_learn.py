"""The step's learning as a generator: what it tells and when, and what is left where it ends early."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from mmrl.errors import RankLostError
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.step.mismatched import partners_of
from mmrl.system.clock import Clock
from mmrl.types import GIVEN, ImageRef, Rollout, RolloutGroup, ScoredGroup, Segment
from mmrl_algorithms.grpo import GRPO
from mmrl_algorithms.kto import KTO
from tests.cluster.test_group import FakeRanks, group_of, prompt  # noqa: F401
from tests.step.test_loop import FLOPS, FakeEngine, faulty

TWO = LearnSettings(minibatches=2)


def scored(name: str) -> ScoredGroup:
    """Two completions, the second one right."""
    asked = prompt(name)
    segments = [Segment(np.full(2, 3 + place, np.int32), True, np.full(2, -1.0, np.float32)) for place in range(2)]
    rollouts = tuple(Rollout(asked, (segment,), place, "", "stop", 0) for place, segment in enumerate(segments))
    rewards = np.array([0.0, 1.0])
    return ScoredGroup(RolloutGroup(asked, rollouts), rewards, np.ones(2, bool), {"right": rewards})


GROUPS = [scored("a"), scored("b")]


@pytest.fixture
def algorithm() -> GRPO:
    return GRPO(GRPO.Config())


def test_each_part_is_told_when_it_is_done(algorithm):
    engine = FakeEngine(algorithm)
    told = [
        (update.phase, list(engine.verbs), [key[1] for key in update.samples], update.done)
        for update in learn(GROUPS, algorithm, engine, TWO)
    ]
    verbs = ["logprobs", "update", "update"]
    assert [each[:2] for each in told] == [("logprob", verbs[:1]), ("credit", verbs[:1]), *(
        ("update", verbs[:count]) for count in (2, 3)
    )]  # fmt: skip
    assert sorted(name for *_, names, _ in told for name in names) == ["a", "a", "b", "b"]
    assert [done for *_, done in told] == [0, 0, 1, 2]


def test_an_optimizer_step_that_came_to_nothing_has_rows_and_no_samples(algorithm, monkeypatch):
    monkeypatch.setattr(FakeEngine, "update", faulty(1))
    updates: list[Any] = []
    result = finished(learn(GROUPS, algorithm, FakeEngine(algorithm), TWO), updates.append)
    skipped, taken = updates[-2:]
    assert len(skipped.rows) == 2 and not skipped.samples and skipped.result.fault and skipped.done == 0
    assert len(taken.samples) == 2 and taken.done == 1 and result.metrics["policy/skipped_updates"] == 1


@pytest.mark.parametrize(("parts", "updates"), [(1, 0), (2, 0), (3, 1)])
def test_learning_that_is_left_takes_no_further_step_and_has_no_result(parts, updates, algorithm):
    engine = FakeEngine(algorithm)
    learning = learn(GROUPS, algorithm, engine, TWO)
    for _ in range(parts):
        next(learning)
    learning.close()
    assert engine.verbs.count("update") == updates
    with pytest.raises(RuntimeError, match="closed before its last optimizer step has no result; call learn again"):
        finished(learning)
    again = finished(learn(GROUPS, algorithm, engine, TWO))
    assert [len(group.updates) for group in again.groups] == [2, 2]


def test_what_the_caller_raises_between_two_optimizer_steps_ends_the_learning(algorithm):
    engine, clock = FakeEngine(algorithm), Clock()

    def note(update: Any) -> None:
        if update.done:
            raise KeyboardInterrupt

    learning = learn(GROUPS, algorithm, engine, TWO)
    with pytest.raises(KeyboardInterrupt):
        finished(learning, note, clock)
    assert engine.verbs.count("update") == 1 and next(learning, None) is None
    assert clock.metrics(1, 1.0)["perf/mfu"] * clock.metrics(1)["perf/update_s"] == pytest.approx(FLOPS)


def test_learning_left_half_way_leaves_all_ranks_ready(algorithm, group_of):  # noqa: F811
    """Ranks have answered whatever the caller has heard of, so none of them waits for another."""
    ranks = FakeRanks(["a", "b"])
    group = group_of(ranks)
    with group.learning() as learner:
        learning = learn(GROUPS, algorithm, learner, TWO)
        assert [next(learning).phase for _ in range(3)] == ["logprob", "credit", "update"]
        learning.close()
    with group.learning() as learner:
        finished(learn(GROUPS, algorithm, learner, TWO))
    assert [ranks.methods(rank).count("update") for rank in range(2)] == [3, 3]


@pytest.mark.timeout(60)
def test_a_rank_that_leaves_half_way_is_named_while_the_others_wait_for_it(algorithm, group_of):  # noqa: F811
    over = threading.Event()
    ranks = FakeRanks(["a", "b"])

    def leave(update: Any) -> None:
        if update.done:
            ranks.workers[0].faults["update"] = over.wait
            ranks.workers[1].faults["update"] = lambda: ranks.lose(1)

    with pytest.raises(RankLostError, match="rank 1"), group_of(ranks).learning() as learner:
        finished(learning := learn(GROUPS, algorithm, learner, TWO), leave)
    assert next(learning, None) is None
    over.set()


def given(name: str, *tokens: int, images: Any = ()) -> Rollout:
    """A completion that the dataset gives."""
    ids = np.array(tokens, np.int32)
    segments = (Segment(ids, True, np.zeros(len(ids), np.float32)),) if tokens else ()
    return Rollout(prompt(name, images=images), segments, 0, "", "stop", GIVEN)


def test_a_partner_is_the_next_row_of_another_prompt_and_another_completion():
    """Prompts are told apart by tokens and images, not by the row that they are from."""
    red, blue = (ImageRef(name, 28, 28, "") for name in ("red", "blue"))
    rows = [
        given("a", 1, 2),
        given("a", 3),  # the same prompt
        given("b", 1, 2),  # the same completion as the first
        given("c"),  # nothing to score
        given("c", 4, images=[red]),
        given("c", 5, images=[blue]),
    ]
    assert partners_of(rows) == [4, 2, 4, None, 5, 0]
    assert partners_of(rows[:2]) == [None, None] and partners_of([]) == []
    assert partners_of([rows[0], rows[2]]) == [None, None]


class Graded(FakeEngine):
    """A log-prob is minus the sum of the prompt's tokens over 1000, times the completion's token; twice that of the
    reference."""

    def score(self, samples: Any, *, way: str = "packed") -> Any:
        self.verbs.append("logprobs")
        return [-s.prompt.token_ids.sum() * s.token_ids.astype(np.float32) / 1000 for s in samples]

    def _of_reference(self, samples: Any) -> Any:
        self.verbs.append("reference_logprobs")
        return [2 * values for values in Graded.score(Graded(None), samples)]


def groups_of(*rollouts: Rollout) -> list[ScoredGroup]:
    scores = [np.array([float(place % 2 == 0)]) for place in range(len(rollouts))]
    return [
        ScoredGroup(RolloutGroup(each.prompt, (each,)), score, np.ones(1, bool), {"score": score})
        for each, score in zip(rollouts, scores, strict=True)
    ]


def test_each_prompt_is_scored_with_the_next_completion_by_both_networks():
    algorithm = KTO(KTO.Config(beta=0.5))
    engine = Graded(algorithm)
    result = finished(
        learn(groups_of(given("a", 1, 2), given("b", 3), given("c", 4)), algorithm, engine, LearnSettings())
    )
    a, b, c = (4 * ord(name) / 1000 for name in "abc")
    assert result.credit.constants["z0"] == pytest.approx((a * 3 + b * 4 + c * 3) / 3)
    assert result.metrics["preference/z0"] == result.credit.constants["z0"]
    assert engine.verbs == ["reference_logprobs", "logprobs", "reference_logprobs", "update"]


def test_without_a_partner_nothing_is_scored_and_z0_is_0():
    algorithm = KTO(KTO.Config())
    engine = Graded(algorithm)
    result = finished(learn(groups_of(given("a", 1), given("a", 2)), algorithm, engine, LearnSettings()))
    assert result.credit.constants["z0"] == 0 and engine.verbs == ["reference_logprobs", "update"]
