"""The outcome of one probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """The outcome of one probe.

    Attributes:
        probe: Its name.
        number: The measure, such as a gap in nats.
        bound: The value that the number is held against.
        verdict: ``bad`` may stop a run.
        found: A sentence with the number.
        finds: Faults that this probe finds, for a person.
        is_least: True if the number must exceed the bound, as a movement must; else it may not.
    """

    probe: str
    number: float
    bound: float
    verdict: Verdict
    found: str
    finds: str
    is_least: bool = False

    @classmethod
    def at_most(cls, probe: str, number: float, bound: float, found: str, finds: str) -> ProbeRow:
        """A row whose number may not exceed the bound; a number that is not finite is bad."""
        return cls(probe, number, bound, "ok" if number <= bound else "bad", found, finds)

    @classmethod
    def more_than(cls, probe: str, number: float, bound: float, found: str, finds: str) -> ProbeRow:
        """A row whose number must exceed the bound."""
        return cls(probe, number, bound, "ok" if number > bound else "bad", found, finds, is_least=True)

    @property
    def ratio(self) -> float:
        """How near the number is to being bad: 1 is at the bound, more is beyond it."""
        over, under = (self.bound, self.number) if self.is_least else (self.number, self.bound)
        return over / under if under else float(over > 0 or self.is_least)
