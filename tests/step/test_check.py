"""The check of log-probs, on given numbers: what warns and what stops follows from the network's own rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mmrl.errors import NumericsError
from mmrl.step.check import WIDE_TOKENS, LogprobCheck
from mmrl.types import CreditedGroup, EncodedPrompt, Prompt, Rollout, RolloutGroup, Sample, ScoredGroup, Segment

TOKENS = 50


def rollout(name: str, values: np.ndarray) -> Rollout:
    prompt = EncodedPrompt(prompt=Prompt(name, ()), text="", token_ids=np.full(4, int(name), np.int32), images=())
    segment = Segment(np.ones(len(values), np.int32), True, values.astype(np.float32))
    return Rollout(prompt, (segment,), index=0, text="", finish_reason="stop", weight_version=0)


@dataclass
class Numbers:
    """An engine whose true log-probs are -1; each side is off by ``size`` times its own signs, as rounding is."""

    sampler: float = 0.0
    packed: float = 0.0
    single: float = 0.0
    has_room: bool = True
    wide_samples: int = 0
    rng: Any = field(default_factory=lambda: np.random.default_rng(0))

    @contextmanager
    def learning(self) -> Iterator[Numbers]:
        yield self

    def off(self, by: float) -> np.ndarray:
        """Mean absolute difference ``by``, in float64."""
        return -1.0 + by * self.rng.choice([-1, 1], TOKENS) * self.rng.uniform(0.5, 1.5, TOKENS)

    def samples(self) -> list[Rollout]:
        return [rollout(str(number), self.off(self.sampler)) for number in range(12)]

    def network(self, role: str) -> Numbers:
        return self

    def score(self, samples: Sequence[Sample], *, way: str = "packed") -> list[np.ndarray]:
        if way == "wide":
            self.wide_samples = len(samples)
            return [self.off(0.0) for _ in samples] if self.has_room else []
        return [self.off(self.packed if way == "packed" else self.single) for _ in samples]


def events_of(precision: str, numbers: Numbers, on_mismatch: Any = "stop") -> tuple[LogprobCheck, list[Any]]:
    found: list[Any] = []
    check = LogprobCheck(precision, on_mismatch, event=lambda kind, **fields: found.append((kind, fields)))
    check.check_first(numbers.samples(), numbers)  # type: ignore[arg-type]
    return check, found


def step(check: LogprobCheck, by: float) -> None:
    groups, values = [], [np.full(TOKENS, -1.0)]
    for sampled in Numbers(sampler=by).samples():
        group = RolloutGroup(sampled.prompt, (sampled,))
        groups.append(CreditedGroup(ScoredGroup(group, np.zeros(1), np.ones(1, bool), {}), values, values))
    check.check_step(7, groups)


MEASURED = [
    # What was measured of sound networks: a random tiny one, and SmolLM2-135M.
    ("float32", {"single": 2.1e-7, "packed": 2.0e-7, "sampler": 1.0e-6}),
    ("float32", {"single": 2.6e-6, "packed": 2.6e-6, "sampler": 1.8e-5}),
    ("bfloat16", {"single": 9.6e-4, "packed": 9.5e-4, "sampler": 1.4e-3}),
    ("bfloat16", {"single": 2.8e-2, "packed": 3.0e-2, "sampler": 3.0e-2}),
    ("bfloat16", {"single": 3.4e-2, "packed": 3.4e-2, "sampler": 4.5e-2}),
]


@pytest.mark.parametrize(("precision", "sizes"), MEASURED)
def test_sound_networks_are_told_their_rounding_and_nothing_else(precision, sizes):
    _, events = events_of(precision, Numbers(**sizes))
    ((kind, fields),) = events
    assert kind == "numerics" and fields["noise"] == pytest.approx(sizes["single"], rel=0.05)
    assert f"{fields['gap']:.1e} apart" in fields["message"] and "would stop" in fields["message"]


@pytest.mark.parametrize(
    ("precision", "sizes", "said"),
    [
        # A tiny network's rounding widens nothing: faults that move it by little are found as before.
        ("float32", {"single": 2e-7, "packed": 2e-7, "sampler": 1.2e-4}, "sampler and learner disagree before"),
        ("float32", {"single": 2.6e-6, "packed": 2.6e-6, "sampler": 1.1e-3}, "sampler and learner disagree before"),
        ("bfloat16", {"single": 9.6e-4, "packed": 9.6e-4, "sampler": 0.07}, "sampler and learner disagree before"),
        ("bfloat16", {"single": 2.8e-2, "packed": 3.0e-2, "sampler": 0.11}, "sampler and learner disagree before"),
        # Packing is judged by the wider type, not by itself.
        ("float32", {"single": 2.6e-6, "packed": 2e-4}, "packed and one-by-one log-probs disagree"),
        ("bfloat16", {"single": 1e-3, "packed": 0.08}, "packed and one-by-one log-probs disagree"),
        ("bfloat16", {"single": 3e-2, "packed": 0.15}, "packed and one-by-one log-probs disagree"),
        # A learner that is wrong itself is no measure.
        ("float32", {"single": 3e-4, "packed": 3e-4, "sampler": 3e-4}, "plain transformers in float64 disagree"),
        ("bfloat16", {"single": 0.4, "packed": 0.4, "sampler": 0.4}, "plain transformers in float32 disagree"),
    ],
)
def test_what_is_further_off_than_rounding_stops(precision, sizes, said):
    with pytest.raises(NumericsError, match=said) as caught:
        events_of(precision, Numbers(**sizes))
    assert "a mean of" in caught.value.possible


def test_the_message_says_which_side_is_off():
    with pytest.raises(NumericsError, match=r"the sampler is off by 1\.\d+e-01 and the learner by 2\.\d+e-02"):
        events_of("bfloat16", Numbers(single=2.8e-2, packed=2.8e-2, sampler=0.15))


def test_a_gap_that_moves_probabilities_is_told_with_its_remedy():
    _, events = events_of("bfloat16", Numbers(single=3.4e-2, packed=3.4e-2, sampler=6e-2))
    message = events[0][1]["message"]
    assert "by a factor of 1.0" in message and "`correction`" in message
    assert (
        "`correction`" not in events_of("bfloat16", Numbers(single=1e-3, packed=1e-3, sampler=2e-3))[1][0][1]["message"]
    )


@pytest.mark.parametrize(
    ("precision", "sizes", "verdict"),
    [
        ("bfloat16", {"single": 2.8e-2, "packed": 3e-2, "sampler": 4.5e-2}, "warn"),
        ("bfloat16", {"single": 0.0, "packed": 0.25, "sampler": 0.2}, "stop"),
        ("float32", {"single": 0.0, "packed": 2e-7, "sampler": 1e-6}, "ok"),
        ("float32", {"single": 0.0, "packed": 2e-4}, "stop"),
        ("float32", {"single": 0.0, "packed": 2e-7, "sampler": 2e-4}, "stop"),
    ],
)
def test_without_room_for_a_wider_type_packing_tells_the_rounding(precision, sizes, verdict):
    _, events = events_of(precision, Numbers(has_room=False, **sizes), "warn")
    verdicts = [fields["verdict"] for kind, fields in events if kind == "mismatch"]
    assert (verdicts or ["ok"])[0] == verdict
    told = [fields["message"] for kind, fields in events if kind == "numerics"]
    assert len(told) == (precision == "bfloat16") and all("float32 has no room here" in each for each in told)


def test_later_steps_are_judged_by_the_gap_that_was_sound_at_the_start():
    check, events = events_of("bfloat16", Numbers(single=3.4e-2, packed=3.4e-2, sampler=5e-2))
    step(check, 0.1)  # beside a gap of 0.06 at the start
    assert [kind for kind, _ in events] == ["numerics"]
    with pytest.raises(NumericsError, match="sampler and learner disagree in step 7"):
        step(check, 0.3)


def test_a_gap_that_was_not_sound_widens_nothing():
    check, events = events_of("float32", Numbers(single=2e-7, packed=2e-7, sampler=0.01), "warn")
    step(check, 0.01)
    assert [fields["verdict"] for kind, fields in events if kind == "mismatch"] == ["stop", "stop"]


def test_the_wider_type_gets_samples_of_some_hundred_tokens_and_at_least_one(monkeypatch):
    numbers = Numbers()
    events_of("float32", numbers)
    assert numbers.wide_samples == WIDE_TOKENS // (TOKENS + 4)
    monkeypatch.setattr("mmrl.step.check.WIDE_TOKENS", 10)
    events_of("float32", numbers)
    assert numbers.wide_samples == 1


def in_parts(old: float, fresh: float) -> Rollout:
    """A completion in two parts, by versions 3 and 4, whose log-probs are off by these from the learner's."""
    parts = (np.full(TOKENS, -1.0 + old), 3), (np.full(TOKENS, -1.0 + fresh), 4)
    segments = tuple(
        Segment(np.ones(TOKENS, np.int32), True, values.astype(np.float32), version, continues=version == 4)
        for values, version in parts
    )
    return Rollout(rollout("1", np.zeros(1)).prompt, segments, index=0, text="", finish_reason="stop", weight_version=4)


def checked_step(version: int | None, *rollouts: Rollout) -> dict[str, float]:
    check = LogprobCheck("float32", "stop", event=lambda kind, **fields: None)
    groups = [
        CreditedGroup(
            ScoredGroup(RolloutGroup(each.prompt, (each,)), np.zeros(1), np.ones(1, bool), {}),
            [np.full(2 * TOKENS, -1.0)],
            [np.full(2 * TOKENS, -1.0)],
        )
        for each in rollouts
    ]
    return check.check_step(7, groups, version)


def test_a_step_compares_the_tokens_of_the_learners_own_version_alone():
    found = checked_step(4, in_parts(0.5, 1e-6), in_parts(-0.5, 2e-6))
    assert found["mismatch/logprob_abs_max"] == pytest.approx(2e-6, rel=0.1)
    assert found["mismatch/logprob_abs_mean"] == pytest.approx(1.5e-6, rel=0.1)
    for version in (3, None):
        with pytest.raises(NumericsError, match="sampler and learner disagree in step 7"):
            checked_step(version, in_parts(0.5, 1e-6))
    assert checked_step(5, in_parts(0.5, 1e-6)) == {}
    with pytest.raises(NumericsError, match="sampler and learner disagree in step 7"):
        checked_step(4, in_parts(0.0, 0.01))


@pytest.mark.parametrize(("version", "says_a_gap"), [(0, True), (1, False)])
def test_the_first_batch_of_older_weights_measures_the_rounding_and_compares_no_sampler(version, says_a_gap):
    found: list[Any] = []
    numbers = Numbers(single=2e-3, packed=2e-3, sampler=0.5 * (version == 1))
    check = LogprobCheck("bfloat16", "stop", event=lambda kind, **fields: found.append((kind, fields)))
    check.check_first(numbers.samples(), numbers, version=version)  # type: ignore[arg-type]
    ((kind, fields),) = found
    assert kind == "numerics" and fields["noise"] == pytest.approx(2e-3, rel=0.1)
    assert ("gap" in fields) == ("apart;" in fields["message"]) == says_a_gap
