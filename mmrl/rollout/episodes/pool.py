"""Worker processes that hold environments; each episode sticks to one of them.

One thread here drives one worker, so the calls of its episodes follow each other. A worker that hangs or crashes costs
the episode that was being answered; the others of that worker are played again in its successor, before their next
call, from their seeds and recorded turns.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.rollout.episodes.failures import CallFailed, EpisodeError
from mmrl.rollout.episodes.observations import ReceivedObservation
from mmrl.rollout.episodes.process import EnvironmentProcess
from mmrl.types import Prompt, Turn

_STOP_TIMEOUT_S = 1.0
Components = dict[str, float | None]


@dataclass(slots=True, eq=False)
class Session:
    """One episode's environment, as the pool keeps it.

    Its methods begin calls in the background. Their futures raise CallFailed if the environment does not answer as it
    must, now or in an earlier call; and EpisodeError if there is no environment at all.

    Attributes:
        opened: The first observation; of an episode that begins with another one's turns, None when these are played.
        home: The process that has its environment; None before the first call.
        answered: Each turn that was answered, with the hash of the observation after it; first the one of ``reset``.
        failure: Its first one.
        closed: Done when it has given back what it holds; None before ``close``.
    """

    number: int
    prompt: Prompt
    seed: int
    lane: _Lane
    opened: Future[ReceivedObservation | None] = field(default_factory=Future)
    home: EnvironmentProcess | None = None
    answered: list[tuple[Turn | None, str]] = field(default_factory=list)
    failure: CallFailed | None = None
    closed: Future[Any] | None = None

    def step(self, turn: Turn) -> Future[ReceivedObservation]:
        """Have a turn answered."""
        return self.lane.submit(lambda: self.lane.play(self, turn))

    def score(self) -> Future[Components]:
        """Have the episode's components scored."""
        return self.lane.submit(lambda: self.lane.score(self))

    def close(self) -> None:
        """Give back what it holds; nothing is asked after this. A second time does nothing."""
        if self.closed is None:
            self.closed = self.lane.leave(self)


class EnvironmentPool:
    """Workers that hold the same environment; use it as a context manager.

    Workers start at construction, side by side, and nobody waits for them before the first answer.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._lanes = [_Lane(spec) for _ in range(spec.workers)]
        self._count = 0

    @property
    def seconds(self) -> float:
        """Time that calls have taken so far, those of all workers together."""
        return sum(lane.seconds for lane in self._lanes)

    def take_close_failures(self) -> list[CallFailed]:
        """The failures of ``close`` since the last time."""
        found = list[CallFailed]()
        for lane in self._lanes:
            known, lane.close_failures = lane.close_failures, []
            found += known
        return found

    def open(self, prompt: Prompt, seed: int) -> Session:
        """Begin an episode, in the worker with the fewest."""
        session = self.reopen(prompt, seed, ())
        session.lane.submit(lambda: session.lane.play(session, None), session.opened)
        return session

    def reopen(self, prompt: Prompt, seed: int, answered: Sequence[tuple[Turn | None, str]]) -> Session:
        """Go on with an episode that was played by other workers: they play it again before its next call.

        Args:
            answered: As ``Session.answered``.
        """
        lane = min(self._lanes, key=lambda lane: lane.num_sessions)
        lane.num_sessions += 1
        session = Session(self._count, prompt, seed, lane, answered=list(answered))
        self._count += 1
        return session

    def branch(self, prompt: Prompt, seed: int, answered: Sequence[tuple[Turn | None, str]]) -> Session:
        """Begin an episode with what another one was answered; it is played again at once, in the worker with the
        fewest. If it is then answered differently, its first call fails.

        Args:
            answered: As ``Session.answered``.
        """
        session = self.reopen(prompt, seed, answered)
        session.lane.submit(lambda: session.lane.catch_up(session), session.opened)
        return session

    def close(self) -> None:
        """Cancel calls that have not begun and end the workers; one that is still busy after a second is killed."""
        for lane in self._lanes:
            lane.begin_to_close()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for lane in self._lanes:
            lane.finish(deadline)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], Any]
    future: Future[Any]


class _Lane:
    """A worker, the thread that drives it, and the calls that wait for it.

    Attributes:
        num_sessions: Episodes that are open here.
        seconds: Time that calls have taken.
        close_failures: Failures of ``close``, which no episode waits for.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._process: EnvironmentProcess | None = None
        self._never_started: EpisodeError | None = None
        self._has_lived = False
        self._is_closed = False
        self.num_sessions, self.seconds = 0, 0.0
        self.close_failures: list[CallFailed] = []
        self._thread = threading.Thread(target=self._drive, name="mmrl-environment", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any], future: Future[Any] | None = None) -> Future[Any]:
        """Have a function run in the thread, after those before it."""
        future = Future() if future is None else future
        if self._is_closed:
            raise RuntimeError("the environment's workers are closed")
        self._jobs.put(_Job(run, future))
        return future

    def leave(self, session: Session) -> Future[Any]:
        """Close an episode after its calls so far."""
        self.num_sessions -= 1
        if not self._is_closed:
            return self.submit(lambda: self._close(session))
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def play(self, session: Session, turn: Turn | None) -> ReceivedObservation:
        """The observation after a turn; the first one if that is None."""
        found: ReceivedObservation = self._guarded(session, lambda process: self._ask(process, session, turn))
        session.answered.append((turn, found.hash))
        return found

    def catch_up(self, session: Session) -> None:
        """Play an episode again in this worker, unless that is done."""
        self._guarded(session, lambda process: None)

    def score(self, session: Session) -> Components:
        """The episode's components."""
        found: Components = self._guarded(session, lambda process: process.call("score", session.number)["components"])
        return found

    def begin_to_close(self) -> None:
        """Cancel the calls that have not begun, and have the thread end after the one under way."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job.future.cancel()
                job.future.set_running_or_notify_cancel()
        self._jobs.put(None)

    def finish(self, deadline: float) -> None:
        """End the thread and its worker, by force after the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        while self._thread.is_alive():
            if self._process is not None:
                self._process.kill()
            self._thread.join(0.1)

    def _drive(self) -> None:
        with contextlib.suppress(EpisodeError):
            self._living()
        while job := self._jobs.get():
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(job.run())
                except BaseException as error:
                    job.future.set_exception(error)
        if self._process is not None:
            self._process.stop()

    def _guarded(self, session: Session, run: Callable[[EnvironmentProcess], Any]) -> Any:
        """The result of a call of an episode, which is played again first if its worker has gone."""
        if session.failure is not None:
            raise session.failure
        try:
            process, start = self._living(), time.monotonic()
            try:
                if session.home is not process:
                    self._play_again(session, process)
                return run(process)
            finally:
                self.seconds += time.monotonic() - start
        except CallFailed as failure:
            session.failure = failure
            raise

    def _play_again(self, session: Session, process: EnvironmentProcess) -> None:
        """Give an episode an environment in this process that has answered all its turns so far."""
        session.home = process
        for turn, expected in session.answered:
            if self._ask(process, session, turn).hash != expected:
                what = "its reset" if turn is None else f"turn {turn.index}"
                raise CallFailed(f"answered {what} differently when its episode was played again")

    def _ask(self, process: EnvironmentProcess, session: Session, turn: Turn | None) -> ReceivedObservation:
        if turn is None:
            reply = process.call("open", session.number, session.prompt, session.seed)
        else:
            reply = process.call("step", session.number, turn)
        try:
            return ReceivedObservation.of(reply)
        except (KeyError, TypeError, ValueError) as error:
            process.kill()
            raise CallFailed(f"answered what cannot be read ({error!r}); its worker was killed") from error

    def _close(self, session: Session) -> None:
        if session.home is not None and session.home is self._process and not self._process.has_ended:
            try:
                self._process.call("close", session.number)
            except CallFailed as failure:
                self.close_failures.append(failure)

    def _living(self) -> EnvironmentProcess:
        """A worker that has started: a new one if the last has ended.

        Raises:
            EpisodeError: The environment cannot be made.
            CallFailed: It was made before, and cannot be made again just now.
        """
        if self._never_started is not None:
            raise self._never_started
        if self._process is not None and self._process.has_ended:
            self._discard()
        if self._is_closed and self._process is None:
            raise EpisodeError("the environment's workers are closed")
        try:
            if self._process is None:
                self._process = EnvironmentProcess(self._spec)
            self._process.await_start()
        except EpisodeError as error:
            if not self._has_lived:
                self._never_started = error
                raise
            self._discard()
            what = f"lost its worker, and another one did not start: {error.what}"
            raise CallFailed(what, getattr(error, "details", "")) from error
        self._has_lived = True
        return self._process

    def _discard(self) -> None:
        """Remove a worker that has ended or is of no use."""
        if self._process is not None:
            self._process.stop()
            self._process = None
