"""Which prompt comes next, and how dataset rows become the prompts of a run.

Order and seeds are pure functions of names and positions, never of what ran before: a resumed run, another number
of ranks or a refilled batch draws the same prompts with the same randomness.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from mmrl.errors import DataError, plugin_errors
from mmrl.interfaces import PromptEncoder
from mmrl.templates import PromptTemplate
from mmrl.types import IntArray, Message, Prompt

MAX_GROUP_SIZE = 2**16


class PromptOrder:
    """``permutation(seed, epoch)[position]``: every row once per epoch, in an order of that epoch's own."""

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise DataError("There are no rows to put in order")
        self.num_rows = num_rows
        self.seed = seed
        self._epoch = -1
        self._permutation: IntArray = np.zeros(0, np.int64)

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, row index) at a position counted from the start of the run."""
        epoch, offset = divmod(position, self.num_rows)
        if epoch != self._epoch:
            # Sorted raw keys rather than Generator.permutation: NumPy keeps bit streams stable, not algorithms.
            keys = np.random.PCG64(_hash(f"{self.seed}/{epoch}", 16)).random_raw(self.num_rows)
            self._epoch, self._permutation = epoch, np.argsort(keys, kind="stable")
        return epoch, int(self._permutation[offset])

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """(epoch, row index) at ``count`` positions from ``start``."""
        return [self.at(position) for position in range(start, start + count)]


def request_seed(run_seed: int, epoch: int, prompt_id: str, attempt: int) -> int:
    """A seed below 2**62 whose low 16 bits are zero, so that member ``i`` of the group can use ``seed + i``."""
    return _hash(f"{run_seed}/{epoch}/{attempt}/{prompt_id}", 8) % 2**62 // MAX_GROUP_SIZE * MAX_GROUP_SIZE


class PromptSource:
    """A loader's rows with the run's system prompt and template, without those that are too long.

    Every row is measured once, here; prompts themselves are read again when they are asked for.

    Args:
        rows: What the loader gave.
        encoder: Measures prompts.
        system_prompt: Put before rows that have no system message of their own.
        prompt_template: Jinja text, or a path to a ``.jinja`` or ``.j2`` file, for the last user message; sees
            ``prompt`` (its text) and ``row`` (the columns). Runs in a sandbox.
        overlong: What happens to longer rows; a prompt is never cut.
        name: The config section, for messages.

    Attributes:
        lengths: Tokens of each prompt that was kept.
        max_images: Most images in one of them.
        without_demonstration: Ids of those that have no completion to imitate.
        dropped: (prompt id, reason) of each one that was not.

    Raises:
        ConfigError: The template cannot be read or does not fit the rows.
        DataError: A row cannot be used, is too long with ``overlong="fail"``, or nothing is left.
    """

    def __init__(
        self,
        rows: Sequence[Prompt],
        encoder: PromptEncoder,
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        max_prompt_tokens: int,
        overlong: Literal["drop", "fail"] = "drop",
        name: str = "data.train",
    ) -> None:
        self.name = name
        self._rows = rows
        self._system_prompt = system_prompt
        self._template = None if prompt_template is None else PromptTemplate(prompt_template, "data.prompt_template")
        self.dropped: list[tuple[str, str]] = []
        self._select(encoder, max_prompt_tokens, overlong)

    @property
    def causes(self) -> Counter[str]:
        """Rows that were dropped, by kind."""
        return Counter({"too long": len(self.dropped)}) if self.dropped else Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        return self._prepare(self._row(self._kept[index]))

    def _row(self, index: int) -> Prompt:
        with plugin_errors(self._rows, "__getitem__"):
            row = self._rows[index]
            if not (isinstance(row, Prompt) and isinstance(row.id, str) and row.messages):
                raise TypeError(f"row {index} is no Prompt with a text as id and at least one message: {row!r:.200}")
            return row

    def require(self, minimum_rows: int, what: str) -> None:
        """Check that there are at least ``minimum_rows``, which ``what`` asks for.

        Raises:
            DataError: There are fewer.
        """
        if len(self) < minimum_rows:
            raise DataError(
                f"There are fewer rows than one step needs: {len(self)} rows, {what} asks for {minimum_rows}",
                where=f"{self.name} ({len(self._rows)} rows read, {len(self.dropped)} dropped as too long)",
                remedy=f"lower {what} to {len(self)} or less, use more data, or raise data.max_prompt_tokens",
            )

    def _select(self, encoder: PromptEncoder, limit: int, overlong: Literal["drop", "fail"]) -> None:
        lengths: list[int] = []
        seen: set[str] = set()
        self.max_images = 0
        self.without_demonstration: list[str] = []
        for index in range(len(self._rows)):
            row = self._row(index)
            if row.id in seen:
                raise DataError(f"Two rows have the id {row.id!r}", where=self.name, remedy="make the ids unique")
            seen.add(row.id)
            lengths.append(encoder.num_tokens(self._prepare(row)))
            if lengths[-1] > limit:
                reason = f"{lengths[-1]} tokens, more than data.max_prompt_tokens = {limit}"
                if overlong == "fail":
                    raise DataError(
                        f"A prompt is too long: {reason}",
                        where=f"{self.name}, row {row.id}",
                        remedy="raise data.max_prompt_tokens, lower data.max_pixels, or set data.overlong to drop",
                    )
                self.dropped.append((row.id, reason))
            else:
                self.max_images = max(self.max_images, len(row.images))
                self.without_demonstration += [row.id] if row.demonstration is None else []
        self._kept = [index for index, length in enumerate(lengths) if length <= limit]
        self.lengths = [lengths[index] for index in self._kept]
        if not self._kept:
            raise DataError(
                f"No row is left: {_histogram(lengths)}",
                where=f"{self.name}, data.max_prompt_tokens = {limit}",
                remedy="raise data.max_prompt_tokens or lower data.max_pixels",
            )

    def _prepare(self, prompt: Prompt) -> Prompt:
        messages = prompt.messages
        if self._template is not None:
            messages = self._fill(self._template, prompt)
        if self._system_prompt is not None and not any(m.role == "system" for m in messages):
            messages = (Message("system", self._system_prompt), *messages)
        return prompt if messages is prompt.messages else replace(prompt, messages=messages)

    def _fill(self, template: PromptTemplate, prompt: Prompt) -> tuple[Message, ...]:
        where = f"{self.name}, row {prompt.id}"
        turns = [index for index, message in enumerate(prompt.messages) if message.role == "user"]
        if not turns:
            raise DataError("data.prompt_template has no user message to fill", where=where)
        text = template.fill(prompt.messages[turns[-1]].content, prompt.columns, where)
        return (*prompt.messages[: turns[-1]], Message("user", text), *prompt.messages[turns[-1] + 1 :])


def _histogram(lengths: Sequence[int], num_bins: int = 5) -> str:
    """Such as ``40 rows of 100 to 600 tokens (100-199: 25, 200-299: 3, ...)``."""
    if not lengths:
        return "the dataset has no rows"
    low, high = min(lengths), max(lengths)
    width = (high - low) // num_bins + 1
    counts = np.bincount((np.asarray(lengths) - low) // width)
    bins = [f"{low + i * width}-{low + (i + 1) * width - 1}: {count}" for i, count in enumerate(counts)]
    return f"{len(lengths)} rows of {low} to {high} tokens ({', '.join(bins)})"


def _hash(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=num_bytes).digest(), "big")
