"""Reports of a replay, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmrl.commands.replay.comparison import Change, Difference, Part, describe, is_function, number
from mmrl.errors import plural
from mmrl.system.console import visible
from mmrl.system.table import table

SHOWN = 10
"""Differences of each part that a person is shown."""
_NO_CHANGE = "nothing changed, the config is the run's"
_SECTIONS = (
    "reward/", "group/", "rollout/", "advantage/", "loss/", "policy/", "critic/", "kl/", "correction/", "preference/",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A step with other rewards or another algorithm.

    Attributes:
        changes: Differences from the run.
        rewards: Rollouts whose reward changes.
        was: The step's metrics in the run; ``would_be`` those now.
        moved: Metrics that change by more than rounding.
    """

    changes: Sequence[str]
    rewards: Part
    was: Mapping[str, float | None]
    would_be: Mapping[str, float]
    moved: frozenset[str]
    advantages: Change

    def data(self) -> dict[str, Any]:
        """For a program."""
        return {
            "changes": list(self.changes),
            "rewards": _part_data(self.rewards),
            "metrics": {name: {"was": was, "would_be": now} for name, was, now in self._metrics()},
            "advantages": asdict(self.advantages),
        }

    def lines(self, *, with_rollouts: bool = True) -> Iterator[str]:
        """For a person, with or without the rollouts whose rewards change."""
        yield from (f"what if: {change}" for change in self.changes or [_NO_CHANGE])
        changed = len({(each.rollout, each.greedy) for each in self.rewards.differences})
        compared = plural(self.rewards.compared, "rollout")
        yield f"  rewards      {f'{changed} of {compared} change' if self.rewards.compared else 'nothing to compare'}"
        yield from _shown(self.rewards.differences, "    ") if with_rollouts else ()
        found = self.advantages
        correlation = "" if found.correlation is None else f", correlation {found.correlation:.4f}"
        compared = plural(found.compared, "rollout")
        yield f"  advantages   {found.changed} of {compared} change, {found.flipped} the sign{correlation}"
        for what, names in (("added", found.added), ("removed", found.removed)):
            if names:
                some = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
                yield f"  groups       {len(names)} {what}: {some}"
        rows = [(name, number(was), number(now)) for name, was, now in self._metrics() if name in self.moved]
        if rows:
            yield from (f"  {line}" for line in table([("metric", "was", "would be"), *rows], "<>"))

    def _metrics(self) -> Iterator[tuple[str, float | None, float | None]]:
        for name in dict.fromkeys([*self.would_be, *self.was]):
            if name.startswith(_SECTIONS) and is_function(name):
                yield name, self.was.get(name), self.would_be.get(name)


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step that was replayed.

    Attributes:
        parts: Comparisons with the record; none in a what-if.
        reasons: Changes since then, if anything differs.
        notes: Facts that were not compared, or cannot be known.
        what_if: The effect of other rewards or another algorithm; also where rewards differ from the record.
    """

    run: str
    step: int
    num_rollouts: int
    parts: Sequence[Part]
    reasons: Sequence[str]
    notes: Sequence[str]
    what_if: WhatIf | None

    @property
    def differs(self) -> bool:
        return any(part.differences for part in self.parts)

    def data(self) -> dict[str, Any]:
        """For a program."""
        return {
            "run": self.run,
            "step": self.step,
            "rollouts": self.num_rollouts,
            "differs": self.differs,
            "parts": {part.name: _part_data(part) for part in self.parts},
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "what_if": None if self.what_if is None else self.what_if.data(),
        }

    def lines(self) -> Iterator[str]:
        """For a person."""
        yield visible(f"step {self.step} of {self.run}: {plural(self.num_rollouts, 'rollout')}")
        rows = [(part.name, str(part.compared), part.unit, _found(part)) for part in self.parts]
        for part, line in zip(self.parts, table(rows, "<><"), strict=True):
            yield visible(f"  {line}")
            yield from _shown(part.differences, "    ")
        yield from (visible(f"  why: {reason}") for reason in self.reasons)
        if self.what_if is not None:
            yield from map(visible, self.what_if.lines(with_rollouts=not self.parts))
        for note in self.notes:  # an error's has several lines
            yield from (visible(f"  {line}") for line in f"note: {note}".splitlines())


def _part_data(part: Part) -> dict[str, Any]:
    differences = [each.data() for each in part.differences]
    return {"unit": part.unit, "compared": part.compared, "note": part.note, "differences": differences}


def _found(part: Part) -> str:
    same = "no difference" if part.compared else "nothing to compare"
    found = f"{len(part.differences)} differ" if part.differences else same
    return f"{found} ({part.note})" if part.note else found


def _shown(differences: Sequence[Difference], indent: str) -> Iterator[str]:
    for each in differences[:SHOWN]:
        about = f"{describe(each)}: " if each.rollout else ""
        why = f"; {'; '.join(each.why)}" if each.why else ""
        was, now = number(each.was), number(each.now)
        if was == now:  # they differ in later digits
            was, now = repr(each.was), repr(each.now)
        yield visible(f"{indent}{about}{each.what} was {was}, is {now}{why}")
    if len(differences) > SHOWN:
        yield f"{indent}... and {len(differences) - SHOWN} more (--json has all)"
