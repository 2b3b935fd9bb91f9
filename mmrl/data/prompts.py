"""From dataset rows to the prompts of a run."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeVar

import numpy as np

from mmrl.data.bad_rows import BadRows, OnBadRow, listed
from mmrl.data.order import Order, PromptOrder, WeightedOrder, request_seed
from mmrl.data.templates import PromptTemplate
from mmrl.engine_api import PromptEncoder
from mmrl.errors import DataError, HubError, plugin_errors
from mmrl.types import Message, Prompt

__all__ = ["OVERLONG", "Order", "Part", "PromptOrder", "PromptSource", "WeightedOrder", "histogram", "request_seed"]

OVERLONG = "longer than data.max_prompt_tokens"
"""The cause of rows that are dropped for their length."""

_FEW = 0.1
"""Share of a dataset's rows up to which those that differ from all others may be mistakes."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """One of the datasets that a run draws from.

    Attributes:
        source: The source of rows that name none; begins the ids of rows where there are several datasets.
        rows: The rows that its loader gave.
        weight: Its share of the positions, in any unit; None in all datasets takes their sizes.
    """

    source: str
    rows: Sequence[Prompt]
    weight: float | None = None


class PromptSource:
    """The usable rows of one or several datasets, with the run's system prompt and template.

    Every row is measured once, here; prompts themselves are read again when they are asked for.

    Args:
        parts: The datasets.
        encoder: Measures prompts.
        system_prompt: Put before rows that have no system message of their own.
        prompt_template: Jinja text, or a path to a ``.jinja`` or ``.j2`` file, for the last user message; sees
            ``prompt`` (its text) and ``row`` (the columns). Runs in a sandbox.
        overlong: ``drop`` or ``fail`` for longer rows; a prompt is never cut.
        on_bad_row: ``drop`` or ``fail`` for rows that cannot be used.
        max_bad_rows: Share of such rows above which a dataset is refused.
        name: The config section, for messages.

    Attributes:
        lengths: Tokens of each prompt that was kept.
        overlong_lengths: Tokens of each one that was too long.
        sources: Rows of each source among those that were kept.
        max_images: Most images in one of them.
        without_demonstration: Ids of those that have no completion to imitate.
        without_image: For each dataset, ids of those that have no image.
        dropped: (prompt id, or row where it has none, and reason) of each one that was dropped.

    Raises:
        ConfigError: The template cannot be read, or is not valid Jinja.
        DataError: Too many rows cannot be used, one is too long with ``overlong="fail"``, or a dataset has none left.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        encoder: PromptEncoder,
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        max_prompt_tokens: int,
        overlong: Literal["drop", "fail"] = "drop",
        on_bad_row: OnBadRow = "drop",
        max_bad_rows: float = 0.01,
        name: str = "data.train",
    ) -> None:
        self.name = name
        self._parts = tuple(parts)
        self._system_prompt = system_prompt
        self._template = None if prompt_template is None else PromptTemplate(prompt_template, "data.prompt_template")
        self._bad = [BadRows(self._where(p), len(p.rows), on_bad_row, max_bad_rows) for p in self._parts]
        self._listener: Callable[[str, str], object] = lambda prompt, reason: None
        self.dropped: list[tuple[str, str]] = []
        self.lengths: list[int] = []
        self.overlong_lengths: list[int] = []
        self.sources: Counter[str] = Counter()
        self.max_images = 0
        self.without_demonstration: list[str] = []
        self.without_image: list[list[str]] = [[] for _ in self._parts]
        self._kept: list[tuple[int, int]] = []
        self._broken: set[int] = set()
        self._digest = hashlib.sha256(repr((system_prompt, self._template and self._template.text)).encode())
        seen: set[str] = set()
        for index in range(len(self._parts)):
            self._select(index, encoder, max_prompt_tokens, overlong, seen)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        return self._prepare(self._row(*self._kept[index]))

    @property
    def num_rows(self) -> int:
        """Rows that were read, kept or not."""
        return sum(len(part.rows) for part in self._parts)

    @property
    def num_usable(self) -> int:
        """The number of prompts without those that turned out to be of no use."""
        return len(self._kept) - len(self._broken)

    @property
    def causes(self) -> Counter[str]:
        """Rows that were dropped, by cause."""
        overlong = Counter({OVERLONG: len(self.overlong_lengths)} if self.overlong_lengths else {})
        return sum((bad.causes for bad in self._bad), overlong)

    @property
    def shares(self) -> list[tuple[str, int, float]]:
        """Each dataset's source, its number of prompts, and its share of the prompts that a run draws."""
        sizes = Counter(part for part, _ in self._kept)
        weights = [sizes[i] if part.weight is None else part.weight for i, part in enumerate(self._parts)]
        return [(p.source, sizes[i], weights[i] / sum(weights)) for i, p in enumerate(self._parts)]

    @property
    def warnings(self) -> list[str]:
        """Rows without an image in datasets of which nearly every row has one: an empty cell may be a mistake."""
        found, sizes = list[str](), Counter(part for part, _ in self._kept)
        for part, ids in enumerate(self.without_image):
            if ids and sizes[part] > 2 and len(ids) <= max(1, _FEW * sizes[part]):
                where = f"{self._where(self._parts[part])}: {len(ids)} of {sizes[part]} rows"
                have = "has no image, as the others have" if len(ids) == 1 else "have no image, as the others have"
                found.append(f"{where} {have}: {listed(ids)}")
        return found

    @property
    def fingerprint(self) -> str:
        """A hash of ids, texts, answers and lengths of all prompts, and of the datasets' shares."""
        return hashlib.sha256(f"{self._digest.hexdigest()} {self.shares}".encode()).hexdigest()

    def listen(self, listener: Callable[[str, str], object]) -> None:
        """Call with prompt id and reason for each row that was dropped, and for each one that will be."""
        for prompt, reason in self.dropped:
            listener(prompt, reason)
        self._listener = listener

    def order(self, seed: int) -> Order:
        """The order in which a run takes the rows."""
        weights = [part.weight for part in self._parts if part.weight is not None]
        if len(self._parts) == 1 or len(weights) < len(self._parts):
            return PromptOrder(len(self), seed)
        sizes = Counter(part for part, _ in self._kept)
        return WeightedOrder([sizes[i] for i in range(len(weights))], weights, [p.source for p in self._parts], seed)

    def attempt(self, index: int, make: Callable[[Prompt], _T]) -> _T | None:
        """The result of ``make`` on a prompt; None if the prompt proves unusable only now, such as by its pixels.

        Raises:
            DataError: Such rows are too many, or not to be dropped.
        """
        if index in self._broken:
            return None
        part, row = self._kept[index]
        found = self._use(part, row, make)
        if found is not None:
            return found[1]
        self._bad[part].check()
        self._broken.add(index)
        if not self.num_usable:
            raise DataError("No row is left: each one turned out to be of no use", where=self.name)
        return None

    def make(self, index: int, make: Callable[[Prompt], _T]) -> _T | None:
        """The result of ``make`` on a prompt, or its error; None for one that was of no use before. Leaves no trace."""
        return None if index in self._broken else make(self[index])

    def each(self, make: Callable[[Prompt], _T], limit: int | None = None) -> list[_T]:
        """The results of ``make`` on the usable prompts, in order; at most ``limit`` of them."""
        made = (self.attempt(index, make) for index in range(len(self)))
        return list(islice((value for value in made if value is not None), limit))

    def require(self, minimum_rows: int, what: str) -> None:
        """Check that there are at least ``minimum_rows``, which ``what`` asks for.

        Raises:
            DataError: There are fewer.
        """
        if len(self) < minimum_rows:
            dropped = "".join(f", {count} dropped: {cause}" for cause, count in self.causes.most_common())
            raise DataError(
                f"There are fewer rows than one step needs: {len(self)} rows, {what} asks for {minimum_rows}",
                where=f"{self.name} ({self.num_rows} rows read{dropped}); "
                f"{_distribution(self.lengths + self.overlong_lengths)}",
                remedy=f"lower {what} to {len(self)} or less, use more data, or raise data.max_prompt_tokens",
            )

    def _where(self, part: Part) -> str:
        return self.name if len(self._parts) == 1 else f"{self.name}, dataset {part.source}"

    def _row(self, part: int, row: int) -> Prompt:
        rows, source = self._parts[part].rows, self._parts[part].source
        with plugin_errors(rows, "__getitem__"):
            prompt = rows[row]
            if not (isinstance(prompt, Prompt) and isinstance(prompt.id, str) and prompt.messages):
                raise TypeError(f"row {row} is no Prompt with a text as id and at least one message: {prompt!r:.200}")
        name = prompt.id if len(self._parts) == 1 else f"{source}/{prompt.id}"
        return replace(prompt, id=name, source=prompt.source or source)

    def _use(self, part: int, row: int, make: Callable[[Prompt], _T]) -> tuple[Prompt, _T] | None:
        """A row's prompt and the result of ``make`` on it; None if the row had to be dropped."""
        name = str(row)
        try:
            prompt = self._row(part, row)
            name = prompt.id
            return prompt, make(self._prepare(prompt))
        except HubError:  # no row's fault
            raise
        except DataError as error:
            self._drop(name, self._bad[part].add(name, error))
            return None

    def _drop(self, prompt: str, reason: str) -> None:
        self.dropped.append((prompt, reason))
        self._listener(prompt, reason)

    def _select(
        self, part: int, encoder: PromptEncoder, limit: int, overlong: Literal["drop", "fail"], seen: set[str]
    ) -> None:
        """Measure a dataset's rows, and keep those that can be used."""
        where, lengths, before = self._where(self._parts[part]), list[int](), len(self._kept)
        for row in range(len(self._parts[part].rows)):
            used = self._use(part, row, encoder.num_tokens)
            if used is None:
                continue
            prompt, length = used
            if prompt.id in seen:
                raise DataError(f"Two rows have the id {prompt.id!r}", where=where, remedy="make the ids unique")
            seen.add(prompt.id)
            lengths.append(length)
            if length > limit:
                self._drop_overlong(prompt.id, length, limit, overlong, where)
                continue
            self._kept.append((part, row))
            self._digest.update(_contents(prompt, length).encode("utf-8", "surrogatepass"))
            self.lengths.append(length)
            self.sources[prompt.source] += 1
            self.max_images = max(self.max_images, len(prompt.images))
            self.without_demonstration += [prompt.id] if prompt.demonstration is None else []
            self.without_image[part] += [] if prompt.images else [prompt.id]
        self._bad[part].check()
        if len(self._kept) == before:
            causes = "".join(f", {count} rows: {cause}" for cause, count in self._bad[part].causes.most_common())
            raise DataError(
                f"No row is left: {_distribution(lengths)}{causes}",
                where=f"{where}, data.max_prompt_tokens = {limit}",
                remedy="raise data.max_prompt_tokens or lower data.max_pixels",
            )

    def _drop_overlong(self, prompt: str, length: int, limit: int, policy: str, where: str) -> None:
        reason = f"{length} tokens, more than data.max_prompt_tokens = {limit}"
        if policy == "fail":
            raise DataError(
                f"A prompt is too long: {reason}",
                where=f"{where}, row {prompt}",
                remedy="raise data.max_prompt_tokens, lower data.max_pixels, or set data.overlong to drop",
            )
        self.overlong_lengths.append(length)
        self._drop(prompt, reason)

    def _prepare(self, prompt: Prompt) -> Prompt:
        messages = prompt.messages
        if self._template is not None:
            messages = self._fill(self._template, prompt)
        if self._system_prompt is not None and not any(m.role == "system" for m in messages):
            messages = (Message("system", self._system_prompt), *messages)
        return prompt if messages is prompt.messages else replace(prompt, messages=messages)

    def _fill(self, template: PromptTemplate, prompt: Prompt) -> tuple[Message, ...]:
        turns = [index for index, message in enumerate(prompt.messages) if message.role == "user"]
        if not turns:
            raise DataError("data.prompt_template has no user message to fill", where=prompt.id)
        text = template.fill(prompt.messages[turns[-1]].content, prompt.columns, prompt.id)
        return (*prompt.messages[: turns[-1]], Message("user", text), *prompt.messages[turns[-1] + 1 :])


def _contents(prompt: Prompt, length: int) -> str:
    turns = [(message.role, message.content) for message in prompt.messages]
    return repr((prompt.id, prompt.source, turns, prompt.answer, prompt.demonstration, prompt.choices, length))


def histogram(lengths: Sequence[int], num_bins: int) -> list[tuple[int, int, int]]:
    """(lowest, highest, count) of bins of equal width that cover one or more lengths."""
    low, high = min(lengths), max(lengths)
    width = (high - low) // num_bins + 1
    counts = np.bincount((np.asarray(lengths) - low) // width)
    return [(low + i * width, low + (i + 1) * width - 1, int(count)) for i, count in enumerate(counts)]


def _distribution(lengths: Sequence[int]) -> str:
    """Such as ``40 rows of 100 to 600 tokens (100-199: 25, 200-299: 3, ...)``."""
    if not lengths:
        return "the dataset has no rows"
    bins = ", ".join(f"{low}-{high}: {count}" for low, high, count in histogram(lengths, 5))
    return f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens ({bins})"
