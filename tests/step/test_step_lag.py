"""A step's lag: by hand, and what a step does with the probe and with versions that are not the ones asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.errors import NumericsError
from mmrl.ops.parity import Gap
from mmrl.rollout.batch import SampledStep
from mmrl.step.audit.ranks import Compared
from mmrl.step.check import LogprobCheck
from mmrl.step.lag import StepLag, learners_version, staleness
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, Prompt, Rollout, RolloutGroup, ScoredGroup, Segment


def group(*rollouts: tuple[tuple[int, int, bool], ...]) -> ScoredGroup:
    """Rollouts of parts: tokens, version, and True if the policy wrote them."""
    prompt = EncodedPrompt(prompt=Prompt("p", ()), text="", token_ids=np.zeros(2, np.int32), images=())
    made = []
    for index, parts in enumerate(rollouts):
        segments = tuple(Segment(np.ones(n, np.int32), own, np.zeros(n, np.float32), v) for n, v, own in parts)
        made.append(Rollout(prompt, segments, index, "", "stop", parts[-1][1]))
    return ScoredGroup(RolloutGroup(prompt, tuple(made)), np.zeros(len(made)), np.ones(len(made), bool), {})


MIXED = group(((3, 4, True), (9, 6, False), (2, 6, True)), ((5, 7, True),))


def test_staleness_is_a_mean_over_the_policys_tokens_in_optimizer_steps() -> None:
    # 3 tokens 5 behind, 2 tokens 3 behind, 5 tokens 2 behind; the 9 that were inserted count nowhere.
    assert staleness([MIXED], 9) == {"staleness/mean": (15 + 6 + 10) / 10, "staleness/max": 5.0}
    assert staleness([group(((4, 2, True),))], 2) == {"staleness/mean": 0.0, "staleness/max": 0.0}
    assert staleness([], 3) == {}


def test_the_learners_version_follows_from_what_a_step_tells() -> None:
    assert learners_version([MIXED], staleness([MIXED], 9)) == 9
    assert learners_version([MIXED], {}) is None and learners_version([], {"staleness/max": 1.0}) is None


class Probe:
    """Notes what is asked; both sides are this far apart."""

    def __init__(self, log: list[Any], gap: float = 0.0) -> None:
        self._log, self._gap = log, gap

    def ask_learner(self, learner: Any, version: int) -> None:
        self._log.append(("learner", version))

    def compared(self, version: int) -> Compared:
        self._log.append(("compared", version))
        return Compared(version, [Gap(self._gap, self._gap, self._gap, 0.0)], [[]])


def step_lag(log: list[Any], probe: Probe | None, *, sampled_with: int | None = 4, partial: bool = False) -> StepLag:
    @contextmanager
    def learning() -> Iterator[None]:
        yield

    queue = SimpleNamespace(
        idle_s=0.0,
        schedule=SimpleNamespace(lag=0 if partial else 1),
        open=lambda step, version: log.append(("open", step, version)),
        holds=lambda step: False,
        version_of=lambda step: sampled_with,
    )
    engine = SimpleNamespace(publish=lambda: 6, learning=learning)
    asked: dict[str, Any] = {
        "cluster": {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1},
        "trainer": {"staleness": 1},
    }
    if partial:
        asked = {"sampler": {"partial": {"engine_steps": 16}}}
    data = {"train": {"name": "table"}}
    config = from_mapping({"model": {"path": "m"}, "data": data, "algorithm": {"name": "grpo"}, **asked})
    return StepLag(config, engine, queue, 3, Clock(), probe)  # type: ignore[arg-type]


def check() -> LogprobCheck:
    return LogprobCheck("float32", "stop", event=lambda kind, **fields: None)


def sampled(*versions: int) -> SampledStep:
    return SampledStep(3, versions[0], [group(*(((4, version, True),) for version in versions))])


def test_the_learner_scores_the_probe_before_the_slot_of_its_version_opens() -> None:
    log: list[Any] = []
    lag = step_lag(log, Probe(log))
    assert log == [("learner", 6), ("open", 3, 6)]
    lag.check(sampled(4, 4), check())
    assert log[2:] == [("compared", 4)]  # of the version that has sampled this step, and not of the newest


def test_a_probe_that_disagrees_stops_the_step() -> None:
    with pytest.raises(NumericsError, match=r"on the probe of version 4 of the weights, which sampled step 3"):
        step_lag([], Probe([], gap=0.1)).check(sampled(4), check())


@pytest.mark.parametrize("version", [3, 5])
def test_a_step_of_another_version_than_was_asked_for_is_refused(version: int) -> None:
    with pytest.raises(NumericsError, match=rf"sampled with version 4 of the weights, and has tokens of {version}"):
        step_lag([], None).check(sampled(4, version), check())


def test_a_batch_of_a_checkpoint_is_not_judged_again() -> None:
    step_lag([], Probe([], gap=0.1), sampled_with=None).check(sampled(2), check())


def test_rollouts_in_parts_may_have_older_tokens_and_none_of_later_weights() -> None:
    log: list[Any] = []
    step_lag(log, Probe(log), partial=True).check(SampledStep(3, 4, [group(((3, 4, True), (2, 6, True)))]), check())
    assert log == [("learner", 6), ("compared", 6)]
    with pytest.raises(NumericsError, match="sampled with version 6 of the weights, and has tokens of 7"):
        step_lag([], None, partial=True).check(SampledStep(3, 4, [MIXED]), check())
