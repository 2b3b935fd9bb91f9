"""The interface of monitors: plugins that look at each step of a run, and tell what goes wrong.

    [project.entry-points."mmrl.monitors"]
    loud = "my_package.loud:Loud"

A monitor has no memory. What it takes from a step's groups are numbers, which are logged beside the metrics
(``measure``). What it finds follows from metrics alone (``look``). So a run that goes on finds what an unbroken one
finds, and `mmrl monitor` finds the same in a run that is recorded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mmrl.interfaces.plugins import Plugin, RunFacts
from mmrl.types import CreditedGroup, FloatArray, GroupKey, IntArray

BASELINE_STEPS = 20
"""Steps at the start of a run that later ones are compared with."""
PREFIX = "monitor/"
"""Names of measured numbers begin with it, the monitor's name and a slash."""


class Baseline(NamedTuple):
    """A metric at the start of a run: median and standard deviation over its first steps."""

    median: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric's finite values up to a step, in order.

    Attributes:
        steps: (n,) int64; 0 is the evaluation before the first step.
        values: (n,) float64.
    """

    steps: IntArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.values)

    def tail(self, count: int) -> FloatArray:
        """The last so many values; all, if there are fewer."""
        return self.values[-count:] if count else self.values[:0]

    def baseline(self, count: int = BASELINE_STEPS) -> Baseline | None:
        """The first so many values after step 0; None until there are more than that."""
        known = self.values[np.searchsorted(self.steps, 1) :]
        if len(known) <= count:
            return None
        return Baseline(float(np.median(known[:count])), float(known[:count].std()))


def _nothing() -> tuple[()]:
    return ()


@dataclass(frozen=True)
class StepRecord:
    """The groups of a step, as ``measure`` sees them; each property is read when it is first asked for.

    Attributes:
        step: 0 is before the first, when there may be an evaluation.
        run: Facts of the run; of an environment's components only their sum is in ``run.rewards``.
        read_groups, read_evaluation, read_blank: Give ``groups``, ``evaluation`` and ``blank``.
        read_previous: Gives ``previous``.
        read_given: Gives ``given``.
    """

    step: int
    run: RunFacts
    read_groups: Callable[[], Sequence[CreditedGroup]] = _nothing
    read_evaluation: Callable[[], Sequence[CreditedGroup]] = _nothing
    read_blank: Callable[[], Sequence[CreditedGroup]] = _nothing
    read_previous: Callable[[], frozenset[GroupKey]] = frozenset
    read_given: Callable[[], Sequence[CreditedGroup]] = _nothing

    @cached_property
    def groups(self) -> Sequence[CreditedGroup]:
        """All that the step sampled, those that it learned from first; none where nothing is sampled."""
        return self.read_groups()

    @cached_property
    def given(self) -> Sequence[CreditedGroup]:
        """All that the step took from its rows: demonstrations or comparisons, whose rewards are scores."""
        return self.read_given()

    @property
    def trained(self) -> list[CreditedGroup]:
        """The groups that the step sampled and learned from."""
        return [group for group in self.groups if group.trained]

    @cached_property
    def evaluation(self) -> Sequence[CreditedGroup]:
        """The groups of the evaluation after the step, those of all sets; empty if there was none."""
        return self.read_evaluation()

    @cached_property
    def blank(self) -> Sequence[CreditedGroup]:
        """The groups of the evaluation with blank images; empty if there was none."""
        return self.read_blank()

    @cached_property
    def previous(self) -> frozenset[GroupKey]:
        """The keys of the groups that the step before learned from."""
        return self.read_previous()


@dataclass(frozen=True)
class StepView:
    """A step and those before it in numbers, as ``look`` sees them.

    Attributes:
        step: Its number; 0 is the evaluation before the first.
        num_steps: Steps that the run is to take.
        run: As in ``StepRecord``.
        metrics: Metrics of this step, measured numbers too.
        label: The monitor's name.
        curves: Gives the curve of a metric.
    """

    step: int
    num_steps: int
    run: RunFacts
    metrics: Mapping[str, float]
    label: str
    curves: Callable[[str], Curve]

    def get(self, name: str) -> float | None:
        """A metric of this step; None if it has none, or none that is finite."""
        value = self.metrics.get(name)
        return value if value is not None and np.isfinite(value) else None

    def measured(self, name: str) -> float | None:
        """A number that the monitor measured of this step, as ``get``."""
        return self.get(f"{PREFIX}{self.label}/{name}")

    def curve(self, name: str) -> Curve:
        """A metric up to this step; empty if no step has it."""
        return self.curves(name)

    def measured_curve(self, name: str) -> Curve:
        """A number that the monitor measures, as ``curve``."""
        return self.curves(f"{PREFIX}{self.label}/{name}")


@dataclass(frozen=True, slots=True)
class Finding:
    """How near a step is to something that a monitor warns of.

    Attributes:
        severity: 1 or more is a hit. Less than 0.8 ends an alarm: only after that there can be another.
        what: The fault, as a sentence without its end, such as ``longer completions earn more``.
        remedy: The next thing to do.
        values: The numbers that show it, by names that a reader understands, ``baseline_length``.
        cause: Its name among the findings of a monitor; each has alarms of its own.
        hits: Looks in a row that make an alarm.
    """

    severity: float
    what: str
    remedy: str
    values: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    hits: int = 3


@dataclass(frozen=True, slots=True)
class Alarm:
    """A finding that has held for as many looks as it needs.

    Attributes:
        since: The step of the first of these looks.
        monitor: Its name.
        message: The fault, since when, the numbers, and what to do.
    """

    step: int
    since: int
    monitor: str
    message: str
    values: Mapping[str, float]
    cause: str = ""


class Monitor(Plugin):
    """Looks at steps, and tells what goes wrong; it cannot change anything.

    An object sees the steps of one run, or only some of them: what it answers must follow from its arguments alone. One
    that raises is left out from then on.
    """

    def measure(self, record: StepRecord) -> Mapping[str, float]:
        """Numbers of a step's groups, logged as ``monitor/<name>/<number>``; values that are not finite are left out.

        Leave out what a step cannot tell: many have no evaluation, some no groups.
        """
        return {}

    @abstractmethod
    def look(self, step: StepView) -> Sequence[Finding]:
        """A finding for each cause that this step tells of, be it bad or well.

        Answer also what is well, with a severity below 1, because that ends an alarm. A cause that is left out stays as
        it was.
        """
