"""The condition that ends a run early: one metric compared with one number, without code."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_FORM = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class StopCondition:
    """A condition such as ``eval/accuracy >= 0.9``."""

    metric: str
    comparison: str
    bound: float

    @classmethod
    def read(cls, text: str) -> StopCondition:
        """The condition that a text says.

        Raises:
            ValueError: It is no such condition.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"should be a metric, one of {', '.join(_COMPARISONS)}, and a number, not {text!r}")
        return cls(match[1], match[2], float(match[3]))

    def holds(self, metrics: Mapping[str, float | None]) -> bool:
        """True if a step's metrics fulfil it; a missing metric, or one that is no number, does not."""
        value = metrics.get(self.metric)
        return value is not None and _COMPARISONS[self.comparison](value, self.bound)

    def told(self, metrics: Mapping[str, float | None]) -> str:
        """The metric's value, and the condition."""
        return f"{self.metric} is {metrics[self.metric]:.4g}, and {self.comparison} {self.bound:g} was to be reached"
