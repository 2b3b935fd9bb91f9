"""The benchmark of schedules: clocks of the real queue and sampler are those of a schedule that is computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from mmrl.data.order import request_seed
from tests.benchmarks.simulated_engine import GRAIN, Costs, Load, SimulatedEngine
from tests.benchmarks.time_schedules import Schedule, run, simulated

LOAD = Load(prompts=3, group=2, prompt_tokens=4 * GRAIN, median=40.0 * GRAIN, limit=200 * GRAIN)
COSTS = Costs(sequences=4)
STEPS = 6


def lengths(engine: SimulatedEngine) -> list[list[int]]:
    """Simulated tokens of each completion of each batch, in the order in which they are submitted."""
    prompts = engine.order
    assert len(prompts) == STEPS * LOAD.prompts
    seeds = [(prompt, request_seed(0, 0, prompt, 0)) for prompt in prompts]
    found = [[LOAD.tokens(prompt, seed + member) for member in range(LOAD.group)] for prompt, seed in seeds]
    size = LOAD.prompts
    return [[*chain(*found[size * batch : size * (batch + 1)])] for batch in range(STEPS)]


def gathering(batch: list[int], devices: int) -> float:
    """Seconds of sampling completions in order, as many at once as there is room for."""
    waiting, running, seconds, prefill = [*batch], list[int](), 0.0, LOAD.prompts * LOAD.prompt_tokens
    while waiting or running:
        while waiting and len(running) < COSTS.sequences * devices:
            running.append(waiting.pop(0))
        seconds += GRAIN * (COSTS.step_s + COSTS.sequence_s * math.ceil(len(running) / devices))
        seconds += prefill * COSTS.prefill_s / devices
        prefill, running = 0, [each - 1 for each in running if each > 1]
    return seconds


def learning(batch: list[int], devices: int) -> float:
    tokens = GRAIN * sum(batch) + LOAD.group * LOAD.prompts * LOAD.prompt_tokens
    return COSTS.update_s + tokens * COSTS.learn_s / devices


@pytest.mark.parametrize("lag", [None, 0, 1, 2, 4])
def test_the_clocks_are_those_of_the_schedule(lag: int | None) -> None:
    """In turns one clock; apart batch t begins after batch t - 1 and after version t - 1 - k is published."""
    schedule = Schedule("", lag)
    split = (2, 2) if lag is None else (2, 1)
    engine, _ = simulated(LOAD, COSTS, schedule, split, STEPS)
    batches = lengths(engine)
    sampler = learner = 0.0
    published, ends, versions = {0: COSTS.publish_s if lag is not None else 0.0}, list[float](), [0]
    learner = published[0]
    for number, batch in enumerate(batches):
        version = max(0, number - (lag or 0))
        sampler = max(sampler, published[version])
        sampler += gathering(batch, split[0]) + COSTS.sync_s * (version != versions[-1])
        versions.append(version)
        learner = max(learner, sampler) + learning(batch, split[1])
        ends.append(learner)
        learner += COSTS.publish_s if lag is not None else 0.0
        published[number + 1] = learner
        if lag is None:
            sampler = learner
    np.testing.assert_allclose([time for time, _ in engine.learned], ends, rtol=1e-9)


def test_partial_rollouts_learn_as_many_groups_and_leave_the_longest_for_later() -> None:
    whole = run(LOAD, COSTS, Schedule("whole"), (2, 2), STEPS, warm=1)
    load = replace(LOAD, median=200.0 * GRAIN, limit=800 * GRAIN)
    schedule = Schedule("parts", in_flight=2.0)
    engine, recorder = simulated(load, COSTS, schedule, (2, 2), STEPS, further=16 * GRAIN)
    assert len(engine.learned) == STEPS
    assert max(values.get("staleness/max", 0.0) for values in recorder.logged.values()) >= 1
    assert whole.staleness == 0 and whole.step_s > 0


def test_an_episode_waits_for_its_tool_and_not_for_the_schedule() -> None:
    load = replace(LOAD, turns=3, tool_s=50.0, tool_spread=0.0)
    slow = run(load, COSTS, Schedule("slow"), (2, 2), 3, warm=1, latency_s=1.0)
    quick = run(replace(load, tool_s=0.001), COSTS, Schedule("quick"), (2, 2), 3, warm=1, latency_s=1.0)
    assert quick.idle_tools < 0.001
    assert slow.idle_tools > 0.3 and slow.step_s > quick.step_s + 45


def test_episodes_go_on_with_their_tools_from_round_to_round() -> None:
    load = replace(LOAD, turns=3, tool_s=2.0)
    engine, recorder = simulated(load, COSTS, Schedule("parts", 1, 2.0), (2, 1), STEPS, further=16 * GRAIN)
    assert len(engine.learned) == STEPS
    assert max(values.get("staleness/max", 0.0) for values in recorder.logged.values()) >= 2
