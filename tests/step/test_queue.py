"""The queue of batches: slots, versions, places, errors and ends, with a source that waits to be let go on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmrl.config.sections import TrainerConfig
from mmrl.data.prompts import DatasetRows, PromptSource
from mmrl.errors import ResourceError, SamplersRestarted
from mmrl.rollout.batch import SampledStep
from mmrl.step import queue as queue_module
from mmrl.step.queue import StepQueue
from mmrl.step.schedule import Schedule
from mmrl.step.slots import BATCHES, Kept, Place, batch_lines, kept_records, read_batch
from mmrl.step.source import Left
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, Message, Prompt, Rollout, RolloutGroup, ScoredGroup, Segment

PROMPTS = 2


def group(name: str, step: int, *, kept: bool = True) -> ScoredGroup:
    row = Prompt(name, (Message("user", "?"),))
    prompt = EncodedPrompt(prompt=row, text="?", token_ids=np.zeros(1, np.int32), images=())
    ids = np.arange(3, dtype=np.int32) + step
    segment = Segment(ids, True, -np.arange(3, dtype=np.float32) / 7)
    rollout = Rollout(prompt, (segment,), 0, "abc", "stop", step)
    return ScoredGroup(
        RolloutGroup(prompt, (rollout,)), np.array([1 / 3]), np.array([True]), {"right": np.array([1 / 3])}, kept=kept
    )


def written(folder: Path, batch: SampledStep) -> Path:
    """A file of a batch as a recorder writes it, which has null for what is no number."""
    path = folder / f"batch-{batch.step}.jsonl"
    path.write_text("".join(json.dumps(line).replace("NaN", "null") + "\n" for line in batch_lines(batch)))
    return path


class Gate:
    """A source whose batches wait until they are let go.

    Attributes:
        free: Batches that need not wait.
        asked: (step, version, prompts) of each gathering.
        faults: Raised by the gathering of these steps, one each time.
    """

    left_out = ()
    num_prompts = PROMPTS

    def __init__(self, *free: int) -> None:
        self.left, self.free, self.asked = Left(), set(free), list[tuple[int, int | None, list[str]]]()
        self.faults: dict[int, list[BaseException]] = {}
        self._changed = threading.Condition()

    def make(self, prompt: Prompt) -> str:
        return prompt.id

    def go_back(self, left: Left) -> None:
        self.left = left

    def resumed(self, left: Left, find: Any) -> Left:
        return left

    def let(self, *steps: int) -> None:
        with self._changed:
            self.free |= set(steps)
            self._changed.notify_all()

    def gather(self, step: int, draw: Any, clock: Clock, version: int | None = None) -> SampledStep:
        carried, self.left = self.left.carried, Left()
        names = [name for _, name in draw(PROMPTS)]
        with self._changed:
            self.asked.append((step, version, names))
            self._changed.notify_all()
            while step not in self.free:
                self._changed.wait(0.01)
                with clock.phase("generate"):
                    pass
        clock.count("generate", 3)
        if self.faults.get(step):
            raise self.faults[step].pop()
        groups = [group(name, step) for name in names]
        self.left = Left([group(f"left by {step}", step)])
        return SampledStep(step, step, groups, {"x": step / 3}, [*carried, *groups])

    def await_asked(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= count, 5)


def made(source: Gate, lag: int, steps: int = 9, **options: Any) -> StepQueue:
    encoder = SimpleNamespace(num_tokens=lambda prompt: 1)
    rows = [Prompt(f"p{i}", (Message("user", "?"),)) for i in range(50)]
    train = PromptSource([DatasetRows("kit", rows)], encoder, max_prompt_tokens=9)  # type: ignore[arg-type]
    config = TrainerConfig(staleness=lag, steps=steps, prompts_per_step=PROMPTS)
    return StepQueue(config, source, train, **options)  # type: ignore[arg-type]


@pytest.fixture
def gate() -> Any:
    gates = list[tuple[Gate, StepQueue]]()

    def make(lag: int, *free: int, **options: Any) -> tuple[Gate, StepQueue]:
        source = Gate(*free)
        gates.append((source, made(source, lag, **options)))
        return gates[-1]

    yield make
    for source, queue in gates:
        source.let(*range(99))
        queue.stop()


def test_slots_open_with_the_weights_of_the_schedule() -> None:
    for lag in range(5):
        schedule, opened = Schedule(lag, 9), dict[int, int]()
        for step in range(1, 10):
            for batch in range(len(opened) + 1, schedule.last_open(step) + 1):
                opened[batch] = step - 1
        assert opened == {batch: max(0, batch - 1 - lag) for batch in range(1, 10)}


def test_a_late_batch_has_the_weights_for_which_its_slot_was_opened(gate: Any) -> None:
    source, queue = gate(2)
    for step in range(1, 5):
        queue.open(step, 10 * (step - 1))
    source.let(*range(1, 7))
    queue.settle()
    assert [(step, version) for step, version, _ in source.asked] == [(1, 0), (2, 0), (3, 0), (4, 10), (5, 20), (6, 30)]
    assert [name for *_, names in source.asked for name in names] == [
        name for _, name in made(source, 2)._prompts.draw(12)
    ]


def test_a_checkpoint_has_the_batches_of_its_step_and_the_place_after_them(gate: Any) -> None:
    """Though a later one has drawn its prompts already."""
    source, queue = gate(1, 1, 2)
    queue.open(1, 0)
    queue.take(1, Clock())
    queue.settle()
    queue.open(2, 1)
    source.await_asked(3)
    assert queue.consumed_prompts == 6 and queue.is_there(1) and queue.can_keep(1)
    kept = queue.keep(1)
    assert [found.step for found in kept.batches] == [2] and kept.place.position == 4
    assert [each.key[1] for each in kept.place.left.carried] == ["left by 2"]
    assert queue.take(2, Clock()).step == 2 and [found.step for found in queue.keep(1).batches] == [2]
    assert not queue.is_there(2)
    source.let(3)
    assert [found.step for found in queue.keep(2).batches] == [3] and queue.keep(2).place.position == 6


def test_a_queue_goes_on_from_what_another_has_kept(gate: Any, tmp_path: Path) -> None:
    source, queue = gate(2, *range(99))
    for step in (1, 2, 3):
        queue.open(step, step - 1)
        queue.take(step, Clock())
    kept = queue.keep(3)
    state = {"consumed_prompts": kept.place.position, **kept.place.left.state(), **kept.rest()}
    state[BATCHES] = [written(tmp_path, found) for found in state[BATCHES]]
    assert {record["prompt_id"] for record in kept_records(state)} >= {"left by 3", "left by 5"}
    later, again = gate(2, *range(99))
    again.restore(Kept.of(state, tmp_path), 3)
    for step in (4, 5, 6):
        for each in (queue, again):
            each.open(step, step - 1)
        found, expected = again.take(step, Clock()), queue.take(step, Clock())
        assert list(batch_lines(found)) == list(batch_lines(expected))
    queue.settle()
    again.settle()
    assert later.asked == source.asked[5:] and [version for _, version, _ in later.asked] == [3, 4, 5]


def test_a_batch_is_read_as_it_was_with_the_groups_that_it_did_not_sample(tmp_path: Path) -> None:
    own, other = [group("a", 1), group("b", 1, kept=False), group("c", 1)], group("z", 0)
    batch = SampledStep(4, 3, own, {"x": 0.1, "y": float("nan")}, [other, own[0], own[2]])
    found = read_batch(written(tmp_path, batch), tmp_path)
    assert [each.key[1] for each in found.learned] == ["z", "a", "c"]
    assert found.learned[1] is found.groups[0] and found.learned[2] is found.groups[2] and not found.learns_all
    assert found.stats["x"] == 0.1 and np.isnan(found.stats["y"]) and [each.kept for each in found.groups] == [1, 0, 1]
    assert found.groups[0].rollouts[0].sampler_logprobs.tobytes() == own[0].rollouts[0].sampler_logprobs.tobytes()
    assert found.groups[0].rewards.tobytes() == own[0].rewards.tobytes()


def test_an_error_is_raised_by_the_step_whose_batch_fails_and_by_a_checkpoint_that_holds_it(gate: Any) -> None:
    source, queue = gate(2, *range(99))
    source.faults[3] = [ResourceError("no")]
    queue.open(1, 0)
    assert queue.take(1, Clock()).step == 1 and not queue.can_keep(1)
    queue.open(2, 1)
    queue.settle()
    assert queue.take(2, Clock()).step == 2
    for ask in (lambda: queue.keep(1), lambda: queue.keep(2), lambda: queue.take(3, Clock())):
        with pytest.raises(ResourceError, match="no"):
            ask()
    assert [step for step, *_ in source.asked] == [1, 2, 3]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_batch_of_a_lost_sampler_is_gathered_again_from_its_beginning(gate: Any, lag: int) -> None:
    told = list[BaseException]()
    source, queue = gate(lag, *range(99), may_restart=lambda error: told.append(error) or len(told) < 3)
    source.faults[2] = [SamplersRestarted("lost"), SamplersRestarted("lost")]
    first = made(source, 0)._prompts.draw(1)[0][1]
    for step in (1, 2, 3):
        if lag:
            queue.open(step, step)
        found = queue.take(step, Clock())
        assert [each.key[1] for each in found.learned[:1]] == [f"left by {step - 1}" if step > 1 else first]
    queue.settle()
    names = {step: names for step, _, names in source.asked}
    assert [step for step, *_ in source.asked[:5]] == [1, 2, 2, 2, 3] and len(told) == 2
    assert [name for step in (1, 2, 3) for name in names[step]] == [
        name for _, name in made(source, 0)._prompts.draw(6)
    ]
    source.faults[4 + lag] = [SamplersRestarted("lost for good")]
    for step in range(4, 4 + lag):
        queue.open(step, step)
        queue.take(step, Clock())
    with pytest.raises(SamplersRestarted, match="lost for good"):
        queue.take(4 + lag, Clock())


def test_a_queue_that_is_stopped_ends_what_it_gathers(gate: Any) -> None:
    source, queue = gate(1)
    queue.open(1, 0)
    source.await_asked(1)
    begin = time.monotonic()
    queue.stop()
    assert time.monotonic() - begin < 2 and queue._thread is not None and not queue._thread.is_alive()


def test_a_source_that_hangs_is_left_behind(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "HANGS_S", 0.1)
    source, queue = gate(1, 1)
    hanging = threading.Event()
    monkeypatch.setattr(source, "gather", lambda *_: hanging.wait(30))
    queue.open(1, 0)
    begin = time.monotonic()
    queue.stop()
    assert time.monotonic() - begin < 2
    hanging.set()


def test_seconds_without_an_open_slot_are_idle(gate: Any) -> None:
    source, queue = gate(1, 1, 2)
    before = queue.idle_s
    queue.open(1, 0)
    queue.settle()
    time.sleep(0.1)
    assert 0.1 <= queue.idle_s - before < 0.4
    queue.open(2, 1)
    source.await_asked(3)
    busy = queue.idle_s
    time.sleep(0.1)
    assert queue.idle_s == busy


def test_phases_of_a_thread_are_beside_those_of_the_step() -> None:
    clock, other = Clock(), Clock()
    with clock.phase("wait"):
        time.sleep(0.02)
    for name in ("generate", "score"):
        with other.phase(name):
            time.sleep(0.03)
    other.beside("environment", 5.0)
    other.count("generate", 9)
    clock.absorb(other)
    found = clock.metrics(30)
    assert found["perf/generate_s"] >= 0.03 and found["perf/environment_s"] == 5.0
    assert found["perf/generate_tokens_per_s"] == 9 / found["perf/generate_s"]
    assert found["perf/other_s"] == pytest.approx(found["perf/step_s"] - found["perf/wait_s"])


def test_a_place_is_that_of_a_run_that_begins() -> None:
    assert Place() == Place(0, None, Left())


def test_a_queue_is_settled_once_all_that_is_open_is_gathered(gate: Any) -> None:
    """Also just after a slot was opened, before the thread has begun."""
    source, queue = gate(1, 1, 2)
    queue.open(1, 0)
    queue.settle()
    assert [step for step, *_ in source.asked] == [1, 2]
    queue.open(2, 1)
    settled = threading.Event()

    def settle() -> None:
        queue.settle()
        settled.set()

    waiting = threading.Thread(target=settle)
    waiting.start()
    source.await_asked(3)
    assert not settled.wait(0.2)
    source.let(3)
    assert settled.wait(5)
    waiting.join()
