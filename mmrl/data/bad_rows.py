"""Rows of a dataset that cannot be used: counted by cause, and too many of them refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from mmrl.errors import DataError

OnBadRow = Literal["drop", "fail"]

TOO_LONG = "data/overlong"
"""The count of rows whose prompt, or an answer of theirs, is too long."""
LEAST = 1000
"""Rows that are counted at least, if there are as many: the first ones that are reached may happen to be bad."""
_SHOWN = 3
"""Causes that a message names, and rows where there is one cause alone."""
_SHOWN_ROWS = 10
"""Rows that a message names."""


class BadRows:
    """The bad rows of one dataset.

    Args:
        where: The dataset, for messages.
        num_rows: Rows that it has, good or bad.
        policy: ``fail`` refuses the dataset at its first bad row, ``drop`` at too many.
        max_share: Share of the rows that may be bad.
        is_ahead: True if rows are counted as a run reaches them, and the share is of those.

    Attributes:
        reached: Rows that were looked at, as often as that.
        causes: The count of each cause; numbers in causes are left out, so that alike ones count as one.
    """

    def __init__(
        self, where: str, num_rows: int, policy: OnBadRow, max_share: float, *, is_ahead: bool = False
    ) -> None:
        self._where, self._policy, self._max_share = where, policy, max_share
        self.reached = 0 if is_ahead else num_rows
        self._least = min(num_rows, LEAST) if is_ahead else num_rows
        self.causes: Counter[str] = Counter()
        self._examples: list[tuple[str, str]] = []
        self._advice: dict[str, tuple[str, str]] = {}

    def add(self, row: str, error: DataError) -> str:
        """Note a row; returns why it is dropped, on one line.

        Raises:
            DataError: The policy is to fail.
        """
        cause = re.sub(r"\d+", "…", error.what)
        self.causes[cause] += 1
        place = _place(row, error.where)
        if self._policy == "fail":
            remedy = _or(error.remedy, "set data.on_bad_row: drop")
            where = f"{self._where}, {place}"
            raise DataError(error.what, where=where, possible=error.possible, remedy=remedy) from error
        # Texts alone: an error holds on to the frames that it came through, with the bytes of an image in them.
        if len(self._examples) < _SHOWN_ROWS:
            self._examples.append((place, cause))
        self._advice.setdefault(cause, (error.possible, error.remedy))
        return error.what if error.where in ("", row) else f"{error.what} ({error.where})"

    def check(self) -> None:
        """Refuse the dataset if too many of its rows are bad.

        Raises:
            DataError: Counts the causes, names the first rows.
        """
        count, rows = self.causes.total(), max(self.reached, self._least)
        if count <= self._max_share * rows:
            return
        causes = [f"{number} x {cause}" for cause, number in self.causes.most_common(_SHOWN)]
        possible, remedy = self._advice.get(self.causes.most_common(1)[0][0], ("", ""))
        more = f", and {len(self.causes) - _SHOWN} more" if len(self.causes) > _SHOWN else ""
        shown = [place for place, _ in self._examples]
        if len(self.causes) > 1:
            shown = [f"{place} ({cause})" for place, cause in self._examples]
            possible, remedy = "", f"{remedy} (that is for the first cause)" if remedy else ""
        what = (
            f"{count} of {self.reached} rows cannot be used, more than data.max_bad_rows = {self._max_share:g}: "
            f"{', '.join(causes)}{more}"
        )
        leave_out = "raise data.max_bad_rows, and they are left out"
        if count == self.reached > 1 and len(self.causes) == 1:
            what, leave_out = f"all {count} rows cannot be used, for one cause: {next(iter(self.causes))}", ""
            shown = shown[:_SHOWN]
        rest = [f"and {count - len(shown)} more"] if count > len(shown) else []
        raise DataError(
            what,
            where=f"{self._where}, {'; '.join([*shown, *rest])}",
            possible=possible,
            remedy=_or(remedy, leave_out),
        )


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = [f"and {len(names) - _SHOWN_ROWS} more"] if len(names) > _SHOWN_ROWS else []
    return separator.join([*names[:_SHOWN_ROWS], *more])


def _place(row: str, where: str) -> str:
    """Row and place, without the row's name where the place has it already."""
    if where == row or where.startswith(f"{row},"):
        return f"row {where}"
    number = re.escape(row.rpartition("/")[2])
    has_row = re.search(rf"\brow {number}\b", where) is not None
    return where if has_row else f"row {row}: {where}" if where else f"row {row}"


def _or(*remedies: str) -> str:
    return "; or ".join(filter(None, remedies))
