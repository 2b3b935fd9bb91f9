"""The rows of datasets that are too large to be read at the start of a run.

The order permutes all rows. A row is measured when it is reached, by the thread that prepares prompts where that is
ahead of the step; one that cannot be used is passed over, and the next row of the order takes its place. So what is
drawn at a position follows from the data, the seed and the position alone, as it does where all rows were measured.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from mmrl.data.bad_rows import LEAST, BadRows
from mmrl.data.prompts import PromptSource, contents, spells_images
from mmrl.errors import DataError
from mmrl.types import Prompt

AHEAD = "ahead-"
"""The beginning of fingerprints that are not made of all rows."""
_SAMPLED = 64
"""Rows that a fingerprint is made of if a loader has none to offer."""

_T = TypeVar("_T")


class PromptsAhead(PromptSource):
    """The rows of one or several datasets, measured as they are reached.

    Its length is that of the datasets: rows that cannot be used are known only when they are reached. They are counted
    each time, and so are all others, against ``max_bad_rows``; ``state`` has the counts. An id that does not end with
    the row's number gets it, as ids are never compared.

    Attributes:
        lengths: Empty, as are ``sources``, ``categories`` and ``without_image``.
        dropped: Empty: the listener is told once of each row, and nobody keeps them.
    """

    is_scanned = False

    def _open(self) -> None:
        policy, share = self._on_bad_row, self._max_bad_rows
        self._bad = [BadRows(self._where(p), len(p.rows), policy, share, is_ahead=True) for p in self._datasets]
        self._sizes = [len(each.rows) for each in self._datasets]
        self._told, self._usable = bytearray(self.num_rows), 0
        self.max_images = self._most_images or 0
        for dataset, size in zip(self._datasets, self._sizes, strict=True):
            if not size:
                what, remedy = "No row is left: the dataset has no rows", "leave the dataset out, or give it rows"
                raise DataError(what, where=self._where(dataset), remedy=remedy)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def longest(self) -> int:
        return self._limit

    @property
    def num_usable(self) -> int:
        return self.num_rows

    @property
    def fingerprint(self) -> str:
        """A hash of what the loaders know of their data without reading rows, and of the limits of rows."""
        prints = [dataset.fingerprint or self._sample(number) for number, dataset in enumerate(self._datasets)]
        limits = self._limit, self._most_images, self.shares
        return AHEAD + hashlib.sha256(f"{self._digest.hexdigest()} {prints} {limits}".encode()).hexdigest()

    def state(self) -> list[dict[str, Any]]:
        """Counts of all rows; for each dataset, the rows that were reached, and the causes of those that could not be
        used."""
        datasets = zip(self._datasets, self._bad, strict=True)
        counts = [{"source": p.source, "reached": bad.reached, "causes": dict(bad.causes)} for p, bad in datasets]
        left_out = {"left_out": dict(self.left_out)} if self.left_out else {}
        return [{"usable": self._usable, **left_out}, *counts]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        known = {each["source"]: each for each in state if "source" in each}
        self._usable = sum(each.get("usable", 0) for each in state)
        self.left_out = Counter(state[0].get("left_out", {}) if state else {})
        for dataset, bad in zip(self._datasets, self._bad, strict=True):
            found = known.get(dataset.source, {"reached": 0, "causes": {}})
            bad.reached, bad.causes = int(found["reached"]), Counter(found["causes"])

    def attempt(self, index: int, make: Callable[[Prompt], _T], made: _T | None = None) -> _T | None:
        """The result of ``make`` on a row, which counts as reached; None if it cannot be used.

        Raises:
            DataError: Such rows are too many, or not to be dropped, or no row can be used.
        """
        bad = self._bad[self._dataset(index)]
        bad.reached += 1
        found = self._measured(index, make) if made is None else made
        if found is not None:
            self._usable += 1
            return found
        bad.check()
        reached = sum(each.reached for each in self._bad)
        if not self._usable and reached >= min(LEAST, self.num_rows):
            causes = ", ".join(f"{count} x {cause}" for cause, count in self.causes.most_common())
            raise DataError(
                f"None of the first {reached} rows can be used: {causes}",
                where=f"{self.name}, data.max_prompt_tokens = {self._limit}",
                remedy="raise data.max_prompt_tokens or lower data.max_pixels",
            )
        return None

    def make(self, index: int, make: Callable[[Prompt], _T]) -> _T | None:
        prompt = self[index]
        return make(prompt) if self._measure(prompt) <= self._limit else None

    def _measured(self, number: int, make: Callable[[Prompt], _T]) -> _T | None:
        """The result of ``make`` on a row that fits; None if the row had to be dropped."""
        length = 0

        def fit(prompt: Prompt) -> _T | None:
            nonlocal length
            length = self._measure(prompt)
            return make(prompt) if length <= self._limit else None

        used = self._use(number, fit)
        if used is None:
            return None
        if length > self._limit:
            self._drop_overlong(number, used[0].id, length)
        return used[1]

    def _number(self, index: int) -> int:
        return index

    def _row(self, number: int) -> Prompt:
        prompt, row = super()._row(number), number - self._starts[self._dataset(number)]
        return prompt if prompt.id.rpartition("/")[2] == str(row) else replace(prompt, id=f"{prompt.id}/{row}")

    def _drop(self, number: int, prompt: str, reason: str) -> None:
        if not self._told[number]:
            self._told[number] = True
            self._listener(prompt, reason)

    def _spelled(self) -> list[tuple[int, list[str]]]:
        """As for rows that were all read, of some rows that are spread over each dataset."""
        if self._reads_images:
            for dataset, ids in enumerate(self.spelled):
                if not ids:
                    rows = self._spread(self._starts[dataset], self._starts[dataset + 1])
                    ids += [prompt.id for prompt in rows if isinstance(prompt, Prompt) and spells_images(prompt)]
        return super()._spelled()

    def _spelling(self, dataset: int, ids: Sequence[str], size: int) -> str:
        return super()._spelling(dataset, ids, min(size, _SAMPLED)).replace(" rows ", " rows that were looked at ", 1)

    def _sample(self, dataset: int) -> str:
        """A text of rows that are spread over a dataset whose loader tells nothing of its data."""
        return " ".join(self._sampled(self._starts[dataset], self._starts[dataset + 1]))

    def _sampled(self, start: int, end: int) -> Iterator[str]:
        for row in self._spread(start, end):
            yield contents(row, 0) if isinstance(row, Prompt) else f"{row} is bad"

    def _spread(self, start: int, end: int) -> Iterator[Prompt | int]:
        """Some rows of a stretch, the number alone of one that cannot be read."""
        for number in np.unique(np.linspace(start, end - 1, _SAMPLED).astype(int)).tolist():
            try:
                yield self._row(number)
            except DataError:
                yield number
