"""The reference answers of a reward's rows as they were graded: for programs, as lines, and as problems."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.errors import DataError, MMRLError, PluginError
from mmrl.system.report import rows, shortened

SHOWN = 10
"""Rows of each problem that are shown."""


@dataclass(slots=True)
class ReferenceReport:
    """The reference answers of a reward's rows, graded by that reward, which tells right from wrong.

    Attributes:
        reward: Its component's name; one of several rewards also names its sources.
        graded: Rows that it can score.
        unscored: Ids of rows that it cannot score: they have no reference for it.
        without_reference: Rows that it scores without a reference, so that no answer is right or wrong.
        error: The first thing that the reward raised; it would stop a run.
        ignores_references: True if rejected rows earn the same with another reference: it judges something else.
        values: Its least and largest value for any answer.
        rejected: (prompt id, reference answer, why) where no form of it, as a person writes it, earns more than a wrong
            answer.
        misspelled: (prompt id, reference answer, the other spelling) where it is accepted as the data spells it alone.
        unboxed: Ids of rows whose reference answer is accepted, but not in a box.
        towers: (prompt id, reference answer) where it is a power of powers or a factorial.
        slow: (prompt id, reference answer, seconds) where one answer took longer than ``SLOW_S`` to be graded.
        demonstrations: Rows with a demonstration.
        contradicted: (prompt id, reference answer) where the demonstration does not earn it.
        swapped: Share of some contradicted rows whose demonstrations earn another row's reference answer.
        partial: A score other than 0 and 1, and the form of the answer that earned it; None if there was none.
    """

    reward: str
    graded: int = 0
    unscored: list[str] = field(default_factory=list)
    without_reference: int = 0
    error: PluginError | None = None
    ignores_references: bool = False
    values: tuple[float, float] = (math.inf, -math.inf)
    rejected: list[tuple[str, str, str]] = field(default_factory=list)
    misspelled: list[tuple[str, str, str]] = field(default_factory=list)
    unboxed: list[str] = field(default_factory=list)
    towers: list[tuple[str, str]] = field(default_factory=list)
    slow: list[tuple[str, str, float]] = field(default_factory=list)
    demonstrations: int = 0
    contradicted: list[tuple[str, str]] = field(default_factory=list)
    swapped: float = 0.0
    partial: tuple[float, str] | None = None

    def data(self) -> dict[str, Any]:
        """For a program."""
        return {
            "reward": self.reward,
            "graded": self.graded,
            "unscored": len(self.unscored),
            "unscored_rows": self.unscored,
            "ignores_references": self.ignores_references,
            "without_reference": self.without_reference,
            "rejected": [
                {"prompt": name, "reference": reference, "why": why} for name, reference, why in self.rejected
            ],
            "accepted_only_as_spelled": [
                {"prompt": name, "reference": reference, "also": other} for name, reference, other in self.misspelled
            ],
            "accepted_only_without_box": self.unboxed,
            "towers": [{"prompt": name, "reference": reference} for name, reference in self.towers],
            "slow": [
                {"prompt": name, "reference": reference, "seconds": seconds} for name, reference, seconds in self.slow
            ],
            "demonstrations": self.demonstrations,
            "demonstrations_contradict_reference": [
                {"prompt": name, "reference": reference} for name, reference in self.contradicted
            ],
        }

    def lines(self) -> list[str]:
        """For a person."""
        accepted = self.graded - len(self.rejected)
        lines = [f"answers    reward {self.reward} accepts {accepted} of {self.graded} reference answers"]
        lines[0] += f"; cannot score {rows(len(self.unscored))}" if self.unscored else ""
        lines[0] += (
            f"; {rows(self.without_reference)} without one, scored all the same" if self.without_reference else ""
        )
        found = [[f"cannot score {_shown(self.unscored)}"] if self.unscored else []]
        if not self.ignores_references:
            found.append([f"not {name}: {reference} ({why})" for name, reference, why in self.rejected])
        found.append(
            [f"only as spelled {name}: {reference}, not {other}" for name, reference, other in self.misspelled]
        )
        if self.unboxed:
            found.append([f"{len(self.unboxed)} only without a box, such as {self.unboxed[0]}"])
        found.append([f"power or factorial {name}: {reference}" for name, reference in self.towers])
        found.append([f"slow {name}: {reference} ({seconds:.1f} s)" for name, reference, seconds in self.slow])
        lines += [f"           {line}" for each in found for line in shortened(each, SHOWN)]
        if self.demonstrations:
            agree = self.demonstrations - len(self.contradicted)
            lines.append(
                f"examples   {agree} of {self.demonstrations} demonstrations earn their row's reference answer"
            )
            contradicted = [f"not {name}: {reference}" for name, reference in self.contradicted]
            lines += [f"           {line}" for line in shortened(contradicted, SHOWN)]
        return lines

    def judges_style(self, alone: bool) -> bool:
        """True if it ignores references, and may: it tells something else apart.

        Args:
            alone: True if it is the run's only reward; then its values must differ.
        """
        return self.ignores_references and not (alone and self.values[0] == self.values[1])

    def partly_right(self) -> str:
        """A warning where accuracy is no mean of the reward, as that gives other values than 0 and 1; else empty."""
        if self.partial is None:
            return ""
        score, form = self.partial
        to = "a wrong answer" if form == "wrong" else "an answer"
        return (
            f"reward {self.reward} gives {score:g} to {to}, and not 0 or 1 alone: accuracy is the share of value 1, "
            "and the reward's mean is told beside it; trainer.eval_metric may name another reward"
        )

    def problems(self, where: str, tolerated: float, alone: bool) -> Iterator[MMRLError | str]:
        """Errors, and warnings as texts.

        Args:
            where: The dataset, and the column of its answers if that is known.
            tolerated: Share of the rows up to which a problem is only a warning.
            alone: True if it is the run's only reward.
        """
        if self.error is not None:
            yield self.error
            return
        total, unscored = self.graded + len(self.unscored) + self.without_reference, len(self.unscored)
        if unscored:
            yield _graded(
                f"Reward {self.reward} cannot score {unscored} of {rows(total)}, whatever the answer",
                f"{where}: {_shown(self.unscored)}",
                "name the column that holds the answers, correct these rows, or give them a source of their own and "
                "another reward (rewards[].sources)",
                is_error=unscored > tolerated * total,
            )
        if self.judges_style(alone):
            yield (
                f"{where}: reward {self.reward} does not read the reference answers, and gives right and wrong answers "
                "alike: it may judge their style, and teaches no answer"
            )
        yield from self._ungradable(where, tolerated, [] if self.judges_style(alone) else self.rejected)
        if self.misspelled:
            shown = _shown(f"{name}: {reference}, not {other}" for name, reference, other in self.misspelled)
            yield (
                f"{where}: reward {self.reward} accepts {len(self.misspelled)} of {self.graded} reference answers only "
                f"as they are spelled there: {shown}; choose a reward that reads them, or write the column as the "
                "model is to answer"
            )
        if self.towers:
            shown = _shown(f"{name}: {reference}" for name, reference in self.towers)
            what = "reference answers are powers of powers or factorials, slow to grade"
            yield f"{where}: {len(self.towers)} {what}: {shown}"
        if len(self.contradicted) > tolerated * self.demonstrations and not self.judges_style(alone):
            yield self._contradiction(where)

    def _contradiction(self, where: str) -> DataError | str:
        shown = _shown(f"{name}: reference answer {reference}" for name, reference in self.contradicted)
        count, total = len(self.contradicted), self.demonstrations
        text = f"{count} of {total} demonstrations do not earn their row's reference answer"
        if self.swapped < 0.5:
            return f"{where}: {text}: reward {self.reward} may not read them: {shown}"
        return DataError(
            f"{text}, but most of them earn another row's: reference answers are swapped or wrong",
            where=f"{where}: {shown}",
            remedy="compare these rows with their source",
        )

    def _ungradable(
        self, where: str, tolerated: float, rejected: Sequence[tuple[str, str, str]]
    ) -> Iterator[DataError | str]:
        slow = [(name, reference, f"{seconds:.1f} s") for name, reference, seconds in self.slow]
        for found, verb in ((rejected, "accepts no answer to"), (slow, "cannot grade in time")):
            if found:
                yield _graded(
                    f"Reward {self.reward} {verb} {len(found)} of {self.graded} reference answers: these rows teach "
                    "nothing",
                    f"{where}: {_shown(f'{name}: {reference} ({why})' for name, reference, why in found)}",
                    "choose a reward that fits the answers, name another answer column, or correct or remove the rows",
                    is_error=len(found) > tolerated * self.graded,
                )


def _graded(text: str, where: str, remedy: str, *, is_error: bool) -> DataError | str:
    """A problem of some rows as an error, or as a warning that says the same."""
    return (
        DataError(text, where=where, remedy=remedy) if is_error else f"{where}: {text[0].lower()}{text[1:]}; {remedy}"
    )


def _shown(texts: Iterable[str]) -> str:
    return "; ".join(shortened([*texts], SHOWN))
