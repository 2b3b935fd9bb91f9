"""The points of a sweep, run one after another or several at once, until all have ended or a signal comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.commands import child_command
from mmrl.commands.child_command import Ended
from mmrl.commands.sweep.machines import Errand, Machine, PlacedRun
from mmrl.commands.sweep.plan import PlannedPoint, SweepPlan
from mmrl.errors import MMRLError, ResourceError, plural
from mmrl.runs.reader import Run
from mmrl.runs.sweeps import usual_metric
from mmrl.system.report import duration
from mmrl.system.signals import Interruption

LOOK_S = 0.2
"""Seconds between looks at the runs."""
BUSY_S = 120.0
"""Seconds for another process to leave a point's run: that of a sweep that was killed saves it first."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A point that did not come to its end."""

    name: str
    ended: Ended
    log: Path


@dataclass(slots=True)
class _Active:
    point: PlannedPoint
    run: PlacedRun
    began: float = field(default_factory=time.monotonic)
    is_told: bool = False


class Schedule:
    """Runs what is left of a sweep.

    Args:
        interruption: Its signals end the runs that are at work; it raises none by itself.
        tell: Prints a line.
    """

    def __init__(
        self, plan: SweepPlan, machine: Machine, interruption: Interruption, tell: Callable[[str], None]
    ) -> None:
        self._plan, self._machine, self._interruption, self._tell = plan, machine, interruption, tell
        self._waiting = left_of(plan)
        self._active: list[_Active] = []
        self._failures: list[Failure] = []
        self._idle_since: float | None = None
        self._is_stopping = False

    def run(self) -> list[Failure]:
        """Run all points; returns those that failed, or were ended by somebody else."""
        while self._waiting or self._active:
            if self._interruption.stopped is not None and not self._is_stopping:
                self._stop()
            while self._waiting and len(self._active) < self._machine.most and self._begin():
                pass
            for active in list(self._active):
                self._look_at(active)
            time.sleep(LOOK_S)
        return self._failures

    def _stop(self) -> None:
        """Begin nothing any more, and have the runs that are at work end where nothing is lost."""
        self._is_stopping = True
        self._waiting.clear()
        stopped = self._interruption.stopped
        assert stopped is not None
        for active in self._active:
            if stopped.exit_code == 130:
                active.run.call("interrupt")
            else:
                active.run.call("stop", stopped.why)

    def _begin(self) -> bool:
        """Begin the next point; False if there is no room, or other processes are at work on all that are left."""
        point = next((each for each in self._waiting if not Run(each.run).is_live), None)
        if point is None:
            self._wait_for_others()
            return False
        if (run := self._machine.start(errand_of(self._plan, point))) is None:
            return False
        self._idle_since = None
        self._waiting.remove(point)
        self._active.append(_Active(point, run))
        return True

    def _wait_for_others(self) -> None:
        """Give the points that are left up once other processes have been at work on them for long."""
        names = ", ".join(point.name for point in self._waiting)
        if self._active:
            return
        if self._idle_since is None:
            self._idle_since = time.monotonic()
            self._tell(f"waits for other processes, which are at work on {names}")
        elif time.monotonic() - self._idle_since > BUSY_S:
            for point in self._waiting:
                error = ResourceError(
                    f"another process is at work on {point.run}", remedy="end it, or wait for its end"
                )
                self._fail(point, Ended(error.exit_code, str(error)))
            self._waiting.clear()

    def _look_at(self, active: _Active) -> None:
        """Tell of a run's beginning and end."""
        host, ended = active.run.host, active.run.ended
        if not active.is_told and host is not None:
            active.is_told, active.began = True, time.monotonic()
            place = f" on {host}" if host else ""
            self._tell(f"{active.point.name}  {_begins(active.point)}{place}")
        if ended is None:
            return
        after = f" after {duration(time.monotonic() - active.began)}"
        self._active.remove(active)
        active.run.close()
        if ended.exit_code == 0 and not ended.message:
            self._tell(f"{active.point.name}  done{after}{_result(self._plan, active.point)}")
        elif self._is_stopping:
            self._tell(f"{active.point.name}  {ended.message.partition(chr(10))[0] or 'stopped'}")
        else:
            self._fail(active.point, ended, after)

    def _fail(self, point: PlannedPoint, ended: Ended, when: str = "") -> None:
        self._failures.append(Failure(point.name, ended, self._plan.log(point)))
        word = "was ended" if ended.exit_code in (0, 10, 130) else "failed"
        self._tell(f"{point.name}  {word}{when}: {ended.message.partition(chr(10))[0]}")


def left_of(plan: SweepPlan) -> list[PlannedPoint]:
    """The points that are not done."""
    return [point for point in plan.points if _state(point) != "done"]


def errand_of(plan: SweepPlan, point: PlannedPoint) -> Errand:
    """The run of a point, as the process that starts it needs it."""
    cluster = point.loaded.config.cluster
    request = {"config": point.config, "allowed": [], "origins": point.origins}
    return Errand(
        request,
        plan.log(point),
        devices=cluster.num_ranks,
        reserves=cluster.address is not None,
        folder=str(Path.cwd()),
        module=child_command.MODULE,
    )


def _state(point: PlannedPoint) -> str:
    try:
        return Run(point.run).state
    except MMRLError:  # its run tells what is wrong
        return "stopped"


def _begins(point: PlannedPoint) -> str:
    checkpoints = [] if not point.run.exists() else Run(point.run).checkpoints
    return f"goes on after step {checkpoints[-1].step}" if checkpoints else "started"


def _result(plan: SweepPlan, point: PlannedPoint) -> str:
    with suppress(MMRLError):
        metrics = Run(point.run).metrics
        if (name := usual_metric(plan.config, [metrics])) in metrics:
            return f": {name} {metrics[name]:.4g}"
    return ""


def told_failures(failures: Sequence[Failure]) -> list[str]:
    """Lines that tell which points failed, why, and where their consoles are."""
    lines = [f"{plural(len(failures), 'point')} did not come to the end:"]
    for failure in failures:
        lines += [f"  {failure.name}: {failure.ended.message}".replace("\n", "\n    "), f"    log: {failure.log}"]
    return lines
