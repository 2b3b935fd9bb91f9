"""From metrics to alarms: curves that grow, and what all monitors share, so that their alarms are worth reading.

A finding becomes an alarm once it has held for as many looks in a row as it needs (``Finding.hits``). It then holds
until its severity falls below ``WELL``. The same cause makes no other alarm before that, nor within ``QUIET_STEPS``
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.errors import contract_error, plugin_errors
from mmrl.interfaces import Alarm, Curve, Finding, Monitor, RunFacts, StepRecord, StepView
from mmrl.interfaces.monitors import PREFIX
from mmrl.types import FloatArray, IntArray

WELL = 0.8
"""Severity below which an alarm is over."""
QUIET_STEPS = 20
"""Fewest steps between two alarms of one cause."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The monitors' answer to a step.

    Attributes:
        metrics: Their numbers, by the names under which they are logged.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    alarms: Sequence[Alarm] = ()


class History:
    """The metrics of a run's steps, as curves."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a step, after those before it; values that are not finite are left out."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._columns.setdefault(name, _Column()).add(step, value)

    def curve(self, name: str) -> Curve:
        """A metric's values so far."""
        return self._columns.get(name, _Column()).curve


class _Column:
    """Steps and values in arrays with room for more."""

    def __init__(self) -> None:
        self._steps: IntArray = np.empty(32, np.int64)
        self._values: FloatArray = np.empty(32, np.float64)
        self._count = 0

    def add(self, step: int, value: float) -> None:
        if self._count == len(self._steps):
            self._steps, self._values = (np.concatenate([a, np.empty_like(a)]) for a in (self._steps, self._values))
        self._steps[self._count], self._values[self._count] = step, value
        self._count += 1

    @property
    def curve(self) -> Curve:
        steps, values = self._steps[: self._count], self._values[: self._count]
        steps.flags.writeable = values.flags.writeable = False
        return Curve(steps, values)


@dataclass
class _Cause:
    """A cause's looks so far.

    Attributes:
        since: The step of the first hit in a row.
        last: The step of the last alarm.
    """

    hits: int = 0
    since: int = 0
    is_on: bool = False
    last: int | None = None

    def judge(self, step: int, finding: Finding) -> bool:
        """True if the finding is an alarm at this step."""
        if finding.severity < WELL:
            self.is_on = False
        if finding.severity < 1:
            self.hits = 0
            return False
        self.since = self.since if self.hits else step
        self.hits += 1
        is_quiet = self.last is not None and step - self.last < QUIET_STEPS
        if self.hits < finding.hits or self.is_on or is_quiet:
            return False
        self.is_on, self.last = True, step
        return True


class Watch:
    """The monitors of a run, which look at one step after the other.

    Args:
        monitors: By name.
        num_steps: Steps that the run is to take.
        on_fault: Called with a monitor's name and exception, once; it is then left out.
    """

    def __init__(
        self,
        monitors: Mapping[str, Monitor],
        run: RunFacts,
        num_steps: int,
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        self._monitors, self._run, self._num_steps = dict(monitors), run, num_steps
        self._on_fault, self._history = on_fault, History()
        self._causes: dict[tuple[str, str], _Cause] = {}

    def look(self, step: int, metrics: Mapping[str, float], record: StepRecord | None) -> Looked:
        """Measure a step and look at it, after those before it.

        Args:
            metrics: Also the numbers that are measured already.
            record: None measures nothing.
        """
        measured = {} if record is None else self._measured(record)
        metrics = {**metrics, **measured}
        self._history.add(step, metrics)
        alarms = [
            alarm
            for label, monitor in list(self._monitors.items())
            for alarm in self._alarms(label, monitor, self._view(step, label, metrics))
        ]
        return Looked(measured, alarms)

    def _view(self, step: int, label: str, metrics: Mapping[str, float]) -> StepView:
        return StepView(step, self._num_steps, self._run, metrics, label, self._history.curve)

    def _measured(self, record: StepRecord) -> dict[str, float]:
        found = dict[str, float]()
        for label, monitor in list(self._monitors.items()):
            try:
                values = measured_by(monitor, record)
            except Exception as error:
                self._leave_out(label, error)
                continue
            found |= {f"{PREFIX}{label}/{name}": value for name, value in values.items()}
        return found

    def _alarms(self, label: str, monitor: Monitor, view: StepView) -> Iterator[Alarm]:
        try:
            findings = found_by(monitor, view)
        except Exception as error:
            self._leave_out(label, error)
            return
        for finding in findings:
            cause = self._causes.setdefault((label, finding.cause), _Cause())
            if cause.judge(view.step, finding):
                message = message_of(finding, cause.since)
                yield Alarm(view.step, cause.since, label, message, dict(finding.values), finding.cause)

    def _leave_out(self, label: str, error: Exception) -> None:
        del self._monitors[label]
        self._on_fault(label, error)


def measured_by(monitor: Monitor, record: StepRecord) -> dict[str, float]:
    """A monitor's numbers of a step, those that are finite.

    Raises:
        PluginError: It raised, or answered anything but numbers by name.
    """
    with plugin_errors(monitor, "measure"):
        found = dict(monitor.measure(record))
        for name, value in found.items():
            if not isinstance(name, str) or not _is_number(value):
                what = f"answered {name!r:.80}: {value!r:.80}"
                raise contract_error(monitor, "measure", what, "answer numbers by name")
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def found_by(monitor: Monitor, view: StepView) -> list[Finding]:
    """A monitor's findings at a step, one for each cause.

    Raises:
        PluginError: It raised, or answered anything else.
    """
    with plugin_errors(monitor, "look"):
        found = list(monitor.look(view))
        for finding in found:
            if not isinstance(finding, Finding):
                raise contract_error(monitor, "look", f"answered {finding!r:.80}", "answer a list of Finding")
            if not (_is_number(finding.severity) and not math.isnan(finding.severity)):
                what = f"answered a severity of {finding.severity!r:.80}"
                raise contract_error(monitor, "look", what, "answer a number; leave out a cause that cannot be judged")
        causes = [finding.cause for finding in found]
        if len(causes) > len(set(causes)):
            what = f"answered two findings of one cause: {', '.join(causes)}"
            raise contract_error(monitor, "look", what, "give each a cause of its own")
    return found


def message_of(finding: Finding, since: int) -> str:
    """A finding in words: what, since when, the numbers, and what to do."""
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in finding.values.items())
    return f"{finding.what}, since step {since}{f' ({numbers})' if numbers else ''}: {finding.remedy}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
