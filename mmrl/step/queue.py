"""The batches between a run's rows and its learner: gathered when they are taken, or ahead of it in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mmrl.config.sections import TrainerConfig
from mmrl.data.prompts import PromptSource
from mmrl.errors import SamplersRestarted
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.prefetch import PromptPrefetcher
from mmrl.step.schedule import Schedule
from mmrl.step.slots import Kept, Place, Slot
from mmrl.step.source import Source
from mmrl.system.clock import Clock
from mmrl.system.signals import defer_signals

LOOKS_S = 0.05
"""Seconds after which a thread that waits for another one lets signals through."""
HANGS_S = 30.0
"""Seconds after which a sampler that finishes no group is not waited for when a run ends."""


class _Ended(BaseException):
    """The queue was stopped while a batch was gathered; nobody takes it."""


class _Ending(Clock):
    """The clock of a batch, which ends its gathering where a phase begins or a group is finished."""

    def __init__(self, ended: threading.Event) -> None:
        super().__init__()
        self._ended = ended

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._check()
        with super().phase(name):
            yield

    def count(self, phase: str, tokens: int) -> None:
        super().count(phase, tokens)
        self._check()

    def _check(self) -> None:
        if self._ended.is_set():
            raise _Ended


class StepQueue:
    """Gathers batches in the order of the steps and hands them out; ``schedule`` says when, and with which weights.

    Without a lag a batch is gathered when it is taken, in the caller's thread. With one, a thread gathers the batches
    whose slots are open. What it uses (source, rows, rewards, environments, the sampler) is nobody else's meanwhile;
    ``settle`` waits until it does nothing.

    Args:
        train: The rows; their place is their beginning.
        may_restart: Called when ranks that sample were lost and are there again; False ends the run.
    """

    def __init__(
        self,
        config: TrainerConfig,
        source: Source,
        train: PromptSource,
        may_restart: Callable[[SamplersRestarted], bool] = lambda error: False,
    ) -> None:
        self._config, self._source, self._train, self._may_restart = config, source, train, may_restart
        self.schedule = Schedule.of(config)
        train.restore(())
        self._prompts: PromptPrefetcher[Any] = PromptPrefetcher(train, train.order(config.seed), source.make)
        self._slots: dict[int, Slot] = {}
        self._places = {0: self._place()}  # by the batch that was gathered last
        self._restored = 0  # the last batch that came from a checkpoint
        self._thread: threading.Thread | None = None
        # What follows is the thread's too, and changes only under this condition.
        self._changed = threading.Condition()
        self._versions: dict[int, int] = {}  # of batches whose slots are open
        self._gathered = self._open = 0
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._idle_s, self._idle_since = 0.0, time.perf_counter()
        self._is_idle = True

    @property
    def consumed_prompts(self) -> int:
        """Prompts taken from the data order so far: the position of the next one."""
        return self._prompts.position

    @property
    def left_out(self) -> dict[str, float]:
        """Rows that were left out so far, as metrics of a step."""
        return {name: float(self._train.left_out[name]) for name in self._source.left_out}

    @property
    def idle_s(self) -> float:
        """Seconds so far in which no batch was gathered, since no slot was open."""
        with self._changed:
            return self._idle_s + (time.perf_counter() - self._idle_since if self._is_idle else 0.0)

    def open(self, step: int, version: int) -> None:
        """Open the slots of a step that begins, and close those of earlier steps for good.

        Args:
            version: That of the weights which the step before has left.
        """
        with self._changed:
            last = self.schedule.last_open(step)
            self._versions |= dict.fromkeys(range(self._open + 1, last + 1), version)
            self._open = max(self._open, last)
            self._forget_before(step)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mmrl-sampling", daemon=True)
            self._thread.start()

    def take(self, step: int, clock: Clock) -> SampledStep:
        """The step's batch. A checkpoint of the step before still has it.

        Raises:
            MMRLError: As ``Source.gather``.
        """
        if self.schedule.lag:
            with clock.phase("wait"):
                self._await(step)
        elif step not in self._slots:
            self._forget_before(step)
            found = self._gather(step, None, clock)
            self._places[step], self._gathered, self._open = self._place(), step, step
            return found
        slot = self._slots[step]
        clock.absorb(slot.clock)
        clock.beside("queued", time.perf_counter() - slot.ready)
        return slot.found

    def holds(self, step: int) -> bool:
        """True if a batch is in its slot."""
        return step in self._slots

    def version_of(self, step: int) -> int | None:
        """The version that a batch in a slot was to be sampled with; None if that is not known any more."""
        return self._slots[step].version if step in self._slots else None

    def prepare(self, step: int) -> None:
        """Begin to make the prompts of the batch after this one, if there is one; with a lag, the thread does so."""
        if not self.schedule.lag:
            self._prepare(step)

    def settle(self) -> None:
        """Wait until nothing is gathered and nothing is prepared: no other thread samples, scores or reads rows then.

        It stays so until ``open`` is called.
        """
        self._wait(lambda: self._gathered >= self._open)
        self._prompts.wait()

    def can_keep(self, step: int) -> bool:
        """True if all batches that a checkpoint after a step holds could be gathered; waits for them."""
        last = self.last_kept(step)
        self._wait(lambda: self._gathered >= last)
        batches = [self._slots[each].found for each in range(step + 1, min(last, self._gathered) + 1)]
        return self._gathered >= last and all(each.fault is None for each in batches)

    def is_there(self, step: int) -> bool:
        """True if ``keep`` would not wait."""
        with self._changed:
            return self._gathered >= self.last_kept(step) or self._error is not None

    def keep(self, step: int) -> Kept:
        """All that a checkpoint after a step keeps; waits for the batches that it holds.

        Raises:
            MMRLError: One of them cannot be gathered.
        """
        last = self.last_kept(step)
        self._await(last)
        batches = [self._slots[each].found for each in range(step + 1, last + 1)]
        if fault := next((each.fault for each in batches if each.fault is not None), None):
            raise fault
        return Kept(self._places[last], batches)

    def restore(self, kept: Kept, step: int) -> None:
        """Go on after a step, from what a checkpoint has kept."""
        last = step + len(kept.batches)
        self._go_back(kept.place)
        self._source.go_back(self._source.resumed(kept.place.left, self._prompts.find))
        self._places = {last: self._place()}
        self._slots = {found.step: Slot(found, Clock()) for found in kept.batches}
        assert list(self._slots) == list(range(step + 1, last + 1)), "batches of a checkpoint follow its step"
        self._gathered = self._open = self._restored = last

    def stop(self) -> None:
        """Gather and prepare no more."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(HANGS_S)  # what hangs is left behind: the end of the engine ends it
        self._prompts.stop()

    def last_kept(self, step: int) -> int:
        """The last batch that a checkpoint after a step holds, or the step itself if it holds none."""
        return max(step, min(self.schedule.last_open(step), self._open), self._restored)

    def _await(self, step: int) -> None:
        """Wait until a batch is gathered.

        Raises:
            MMRLError: It cannot be.
        """
        self._wait(lambda: self._gathered >= step)
        if self._gathered < step and self._error is not None:
            raise self._error

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for the thread, until this is so or it has failed; signals come in between."""
        while True:
            with defer_signals(), self._changed:  # one that came here would break the condition
                if is_done() or self._error is not None or self._changed.wait_for(is_done, LOOKS_S):
                    return

    def _run(self) -> None:
        """Gather in the thread, slot by slot."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._gathered < self._open or self._ended.is_set())
                    if self._ended.is_set():
                        return
                    step = self._gathered + 1
                    version = self._versions.pop(step)
                    if self._is_idle:
                        self._idle_s, self._is_idle = self._idle_s + time.perf_counter() - self._idle_since, False
                clock, begin = _Ending(self._ended), time.perf_counter()
                found = self._gather(step, version, clock)
                clock.beside("gather", time.perf_counter() - begin)
                place = self._place()
                self._prepare(step)
                with self._changed:
                    slot = Slot(found, clock, version=version)
                    self._slots[step], self._places[step], self._gathered = slot, place, step
                    if found.fault is not None:
                        raise found.fault
                    self._rest()
        except BaseException as error:  # whoever takes the next batch raises it
            with self._changed:
                self._error = error
                self._rest()

    def _rest(self) -> None:
        """Note that the thread waits for a slot, or has ended."""
        if self._gathered >= self._open or self._error is not None:
            self._idle_since, self._is_idle = time.perf_counter(), True
        self._changed.notify_all()

    def _gather(self, step: int, version: int | None, clock: Clock) -> SampledStep:
        """A batch, gathered anew if the sampler was lost meanwhile; seeds are names, so it is the same one."""
        before = self._place()
        while True:
            try:
                return self._source.gather(step, self._prompts.draw, clock, version)
            except SamplersRestarted as error:
                if not self._may_restart(error):
                    raise
                self._go_back(before)

    def _prepare(self, step: int) -> None:
        if step < self._config.steps:
            self._prompts.prepare(self._source.num_prompts)

    def _place(self) -> Place:
        """The place now, after the batch that was gathered last."""
        return Place(self._prompts.position, self._train.state(), self._source.left)

    def _go_back(self, place: Place) -> None:
        self._prompts.go_to(place.position)
        self._train.restore(place.rows or ())
        self._source.go_back(place.left)

    def _forget_before(self, step: int) -> None:
        """Forget what no checkpoint needs once a step has begun."""
        self._slots = {each: slot for each, slot in self._slots.items() if each >= step}
        self._places = {each: place for each, place in self._places.items() if each >= step - 1}
