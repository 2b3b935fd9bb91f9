"""From dataset rows to the prompts of a run."""

from __future__ import annotations

import hashlib
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, ClassVar, Literal, TypeVar

from mmrl.data.bad_rows import TOO_LONG, BadRows, OnBadRow, listed
from mmrl.data.lengths import distribution
from mmrl.data.order import Order, PromptOrder, WeightedOrder
from mmrl.data.templates import PromptTemplate
from mmrl.engine_api import PromptEncoder
from mmrl.errors import DataError, HubError, UselessRow, plugin_errors, plural
from mmrl.types import IMAGE_PLACEHOLDER, Message, Prompt

OVERLONG = "longer than data.max_prompt_tokens"
"""The cause of rows that are dropped for their length."""

_FEW = 0.1
"""Share of a dataset's rows up to which those that differ from all others may be mistakes."""

_SPELLED = re.compile(r"<image>|<\|?(?i:image|img)[\s_-]{0,2}\d{1,4}\|?>")
"""Places of images, also by number, as datasets write them."""
_TELL_EVERY = 100
"""Rows between two calls of ``progress``."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """One of the datasets that a run draws from.

    Attributes:
        source: The source of rows that name none; begins the ids of rows where there are several datasets.
        rows: The rows that its loader gave.
        weight: Its share of the positions, in any unit; None in all datasets takes their sizes.
        fingerprint: A text that changes when the rows do, found without reading them; empty if there is none.
        notes: Tells what of the dataset was left out and may be needed; asked after the rows were read.
    """

    source: str
    rows: Sequence[Prompt]
    weight: float | None = None
    fingerprint: str = ""
    notes: Callable[[], Sequence[str]] = tuple


Progress = Callable[[str, int, int], object]
"""Called with a phase, the count so far and the total."""


class PromptSource:
    """The usable rows of one or several datasets, with the run's system prompt and template.

    Every row is measured once, here; prompts themselves are read again when they are asked for. Rows are numbered
    through all datasets.

    Args:
        datasets: The datasets.
        encoder: Measures prompts.
        system_prompt: Put before rows that have no system message of their own.
        prompt_template: Jinja text, or a path to a ``.jinja`` or ``.j2`` file, for the last user message; sees
            ``prompt`` (its text) and ``row`` (the columns). Runs in a sandbox.
        overlong: ``drop`` or ``fail`` for longer rows; a prompt is never cut.
        on_bad_row: ``drop`` or ``fail`` for rows that cannot be used.
        max_bad_rows: Share of such rows above which a dataset is refused.
        max_images: Most images of a row that can be used; None is any number.
        check: Called with each row; raises DataError for one that cannot be used, and UselessRow for one that is left
            out for another reason.
        reads_images: True if the model does, so that places of images are told which have none, and are text.
        name: The config section, for messages.
        progress: Told of the rows that were measured.

    Attributes:
        lengths: Tokens of each prompt that was kept.
        overlong_lengths: Tokens of each one that was too long.
        useless: Rows from which nothing can be learned though they are right, by cause.
        left_out: These and the ones that were too long, by the name of their count.
        sources: Rows of each source among those that were kept.
        categories: Likewise of each category; that of rows without one is empty.
        max_images: Most images in one of them.
        without_image: For each dataset, ids of those that have no image.
        spelled: For each dataset, ids of those that have no image and spell the place of one, which is text.
        dropped: (prompt id, or row where it has none, and reason) of each one that was dropped.

    Raises:
        ConfigError: The template cannot be read, or is not valid Jinja.
        DataError: Too many rows cannot be used, one is too long with ``overlong="fail"``, or a dataset has none left.
    """

    is_scanned: ClassVar[bool] = True
    """True if every row was measured at the start."""

    def __init__(
        self,
        datasets: Sequence[DatasetRows],
        encoder: PromptEncoder,
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        max_prompt_tokens: int,
        overlong: Literal["drop", "fail"] = "drop",
        on_bad_row: OnBadRow = "drop",
        max_bad_rows: float = 0.01,
        max_images: int | None = None,
        check: Callable[[Prompt], object] = lambda prompt: None,
        reads_images: bool = False,
        name: str = "data.train",
        progress: Progress = lambda phase, done, total: None,
    ) -> None:
        self.name = name
        self._datasets = tuple(datasets)
        self._starts = [0, *accumulate(len(each.rows) for each in self._datasets)]
        self._sizes = [0] * len(self._datasets)
        self._encoder, self._limit, self._most_images = encoder, max_prompt_tokens, max_images
        self._overlong, self._progress, self._check = overlong, progress, check
        self._system_prompt, self._reads_images = system_prompt, reads_images
        self._template = None if prompt_template is None else PromptTemplate(prompt_template, "data.prompt_template")
        self._on_bad_row, self._max_bad_rows = on_bad_row, max_bad_rows
        self._bad = [BadRows(self._where(p), len(p.rows), on_bad_row, max_bad_rows) for p in self._datasets]
        self._listener: Callable[[str, str], object] = lambda prompt, reason: None
        self.dropped: list[tuple[str, str]] = []
        self.lengths: list[int] = []
        self.overlong_lengths: list[int] = []
        self.useless, self.left_out = Counter[str](), Counter[str]()
        self.sources: Counter[str] = Counter()
        self.categories: Counter[str] = Counter()
        self.max_images = 0
        self.without_image: list[list[str]] = [[] for _ in self._datasets]
        self.spelled: list[list[str]] = [[] for _ in self._datasets]
        self._kept = array("q")
        self._broken: set[int] = set()
        self._digest = hashlib.sha256(repr((system_prompt, self._template and self._template.text)).encode())
        self._open()

    def _open(self) -> None:
        """Measure every row, and keep those that can be used."""
        seen: set[str] = set()
        for index in range(len(self._datasets)):
            self._select(index, seen)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        return self.prepared(self._row(self._number(index)))

    @property
    def num_rows(self) -> int:
        """Rows of all datasets, kept or not."""
        return self._starts[-1]

    @property
    def longest(self) -> int:
        """Most tokens of a prompt that a run may draw."""
        return max(self.lengths)

    @property
    def num_usable(self) -> int:
        """The number of prompts without those that turned out to be of no use."""
        return len(self._kept) - len(self._broken)

    @property
    def causes(self) -> Counter[str]:
        """Rows that were dropped, by cause."""
        overlong = Counter({OVERLONG: len(self.overlong_lengths)} if self.overlong_lengths else {})
        return sum((bad.causes for bad in self._bad), overlong + self.useless)

    @property
    def shares(self) -> list[tuple[str, int, float]]:
        """Each dataset's source, its number of prompts, and its share of the prompts that a run draws."""
        sizes = self._sizes
        weights = [sizes[i] if each.weight is None else each.weight for i, each in enumerate(self._datasets)]
        return [(p.source, sizes[i], weights[i] / sum(weights)) for i, p in enumerate(self._datasets)]

    @property
    def warnings(self) -> list[str]:
        """Notes of loaders, and rows without an image where nearly every row has one: that may be a mistake."""
        sizes = self._sizes
        found = [f"{self._where(each)}: {note}" for each in self._datasets for note in each.notes()]
        for dataset, ids in enumerate(self.without_image):
            if ids and sizes[dataset] > 2 and len(ids) <= max(1, _FEW * sizes[dataset]):
                where = f"{self._where(self._datasets[dataset])}: {len(ids)} of {sizes[dataset]} rows"
                have = "has no image, as the others have" if len(ids) == 1 else "have no image, as the others have"
                found.append(f"{where} {have}: {listed(ids)}")
        return found + [self._spelling(dataset, ids, sizes[dataset]) for dataset, ids in self._spelled()]

    def _spelled(self) -> list[tuple[int, list[str]]]:
        """Datasets with rows that spell the place of an image and have none, and their ids."""
        return [(dataset, ids) for dataset, ids in enumerate(self.spelled) if ids] if self._reads_images else []

    def _spelling(self, dataset: int, ids: Sequence[str], size: int) -> str:
        """A warning of such rows among so many."""
        spell, have = ("spells", "has") if len(ids) == 1 else ("spell", "have")
        what = f"{spell} {IMAGE_PLACEHOLDER} or the like and {have} no image, so it is read as text: {listed(ids)}"
        lost = "; if there are pictures, name their column (images)" if 2 * len(ids) > size else ""
        return f"{self._where(self._datasets[dataset])}: {len(ids)} of {size} rows {what}{lost}"

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
        weights = [each.weight for each in self._datasets if each.weight is not None]
        if len(self._datasets) == 1 or len(weights) < len(self._datasets):
            return PromptOrder(len(self), seed)
        return WeightedOrder(self._sizes, weights, [p.source for p in self._datasets], seed)

    def state(self) -> list[dict[str, Any]] | None:
        """The counts of rows that a run that goes on needs, as JSON can hold them; None if it needs none."""
        return None

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take over the answer of ``state``; an empty one is that of a run that begins."""
        return

    def attempt(self, index: int, make: Callable[[Prompt], _T], made: _T | None = None) -> _T | None:
        """The result of ``make`` on a prompt; None if the prompt proves unusable only now, such as by its pixels.

        Args:
            made: The result, if it is there already.

        Raises:
            DataError: Such rows are too many, or not to be dropped.
        """
        if made is not None:
            return made
        if index in self._broken:
            return None
        number = self._number(index)
        found = self._use(number, make)
        if found is not None:
            return found[1]
        self._bad[self._dataset(number)].check()
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
            where, remedy = self.name, f"lower {what} to {len(self)} or less, or use more data"
            if self.is_scanned:
                dropped = "".join(f", {count} dropped: {cause}" for cause, count in self.causes.most_common())
                lengths = distribution(self.lengths + self.overlong_lengths)
                where = f"{self.name} ({plural(self.num_rows, 'row')} read{dropped}); {lengths}"
                remedy = f"lower {what} to {len(self)} or less, use more data, or raise data.max_prompt_tokens"
            raise DataError(
                f"There are fewer rows than one step needs: {plural(len(self), 'row')}, {what} asks for {minimum_rows}",
                where=where,
                remedy=remedy,
            )

    def _where(self, dataset: DatasetRows) -> str:
        return self.name if len(self._datasets) == 1 else f"{self.name}, dataset {dataset.source}"

    def _number(self, index: int) -> int:
        """The number of the row that a prompt is made of."""
        return self._kept[index]

    def _dataset(self, number: int) -> int:
        """The dataset of a row."""
        return bisect_right(self._starts, number) - 1

    def _row(self, number: int) -> Prompt:
        dataset = self._dataset(number)
        rows, source, row = self._datasets[dataset].rows, self._datasets[dataset].source, number - self._starts[dataset]
        with plugin_errors(rows, "__getitem__"):
            prompt = rows[row]
            if not (isinstance(prompt, Prompt) and isinstance(prompt.id, str) and prompt.messages):
                raise TypeError(f"row {row} is no Prompt with a text as id and at least one message: {prompt!r:.200}")
        name = prompt.id if len(self._datasets) == 1 else f"{source}/{prompt.id}"
        return replace(prompt, id=name, source=prompt.source or source)

    def _use(self, number: int, make: Callable[[Prompt], _T]) -> tuple[Prompt, _T] | None:
        """A row's prompt and the result of ``make`` on it; None if the row had to be dropped."""
        dataset = self._dataset(number)
        name = str(number - self._starts[dataset])
        try:
            prompt = self._row(number)
            name = prompt.id
            return prompt, make(self.prepared(prompt))
        except HubError:  # no row's fault
            raise
        except UselessRow as error:
            self.useless[error.what] += 1
            self.left_out[error.counted] += 1
            self._drop(number, name, error.what)
            return None
        except DataError as error:
            self._drop(number, name, self._bad[dataset].add(name, error))
            return None

    def _drop(self, number: int, prompt: str, reason: str) -> None:
        self.dropped.append((prompt, reason))
        self._listener(prompt, reason)

    def _measure(self, prompt: Prompt) -> int:
        """Tokens of a prompt; of its images, headers are read."""
        if self._most_images is not None and len(prompt.images) > self._most_images:
            raise DataError(
                f"The row has {plural(len(prompt.images), 'image')}, more than data.max_images = {self._most_images}",
                where=prompt.id,
                remedy="raise data.max_images",
            )
        self._check(prompt)
        return self._encoder.num_tokens(prompt)

    def _select(self, dataset: int, seen: set[str]) -> None:
        """Measure a dataset's rows, and keep those that can be used."""
        where, lengths, limit = self._where(self._datasets[dataset]), list[int](), self._limit
        useless = self.useless.copy()
        for number in range(self._starts[dataset], self._starts[dataset + 1]):
            if number % _TELL_EVERY == 0:
                self._progress(f"rows of {self.name}", number, self.num_rows)
            used = self._use(number, self._measure)
            if used is None:
                continue
            prompt, length = used
            if prompt.id in seen:
                raise DataError(f"Two rows have the id {prompt.id!r}", where=where, remedy="make the ids unique")
            seen.add(prompt.id)
            lengths.append(length)
            if length > limit:
                self._drop_overlong(number, prompt.id, length)
                continue
            self._kept.append(number)
            self._sizes[dataset] += 1
            self._digest.update(contents(prompt, length).encode("utf-8", "surrogatepass"))
            self.lengths.append(length)
            self.sources[prompt.source] += 1
            self.categories[prompt.category] += 1
            self.max_images = max(self.max_images, len(prompt.images))
            self.without_image[dataset] += [] if prompt.images else [prompt.id]
            self.spelled[dataset] += [prompt.id] if spells_images(prompt) else []
        self._bad[dataset].check()
        if not self._sizes[dataset]:
            raise self._none_left(where, lengths, self._bad[dataset].causes + (self.useless - useless))

    def _none_left(self, where: str, lengths: Sequence[int], causes: Counter[str]) -> DataError:
        """The error of a dataset all of whose rows are dropped.

        Args:
            lengths: Tokens of prompts, all of them too long.
            causes: Counts of the reasons of all other rows.
        """
        found = [distribution(lengths)] if lengths or not causes else []
        found += [f"{plural(count, 'row')}: {cause}" for cause, count in causes.most_common()]
        remedy = "change what the causes name, or use other rows"
        if lengths or not causes:
            where += f", data.max_prompt_tokens = {self._limit}"
            remedy = "raise data.max_prompt_tokens or lower data.max_pixels"
        return DataError(f"No row is left: {', '.join(found)}", where=where, remedy=remedy)

    def _drop_overlong(self, number: int, prompt: str, length: int) -> None:
        reason = f"{plural(length, 'token')}, more than data.max_prompt_tokens = {self._limit}"
        if self._overlong == "fail":
            raise DataError(
                f"A prompt is too long: {reason}",
                where=f"{self._where(self._datasets[self._dataset(number)])}, row {prompt}",
                remedy="raise data.max_prompt_tokens, lower data.max_pixels, or set data.overlong to drop",
            )
        self.overlong_lengths.append(length)
        self.left_out[TOO_LONG] += 1
        self._drop(number, prompt, reason)

    def prepared(self, prompt: Prompt) -> Prompt:
        """A loader's row with the run's system prompt and template; documents have none of both."""
        messages = prompt.messages
        if prompt.is_document:
            return prompt
        if self._template is not None:
            messages = self._fill(self._template, prompt)
        if self._system_prompt is not None and not any(m.role == "system" for m in messages):
            messages = (Message("system", self._system_prompt), *messages)
        return prompt if messages is prompt.messages else replace(prompt, messages=messages)

    def _fill(self, template: PromptTemplate, prompt: Prompt) -> tuple[Message, ...]:
        turns = [index for index, message in enumerate(prompt.messages) if message.role == "user"]
        if not turns:
            raise DataError("data.prompt_template has no user message to fill", where=prompt.id)
        content, has_images = prompt.messages[turns[-1]].content, bool(prompt.images)
        text = template.fill(content, prompt.columns, prompt.id, has_images=has_images)
        return (*prompt.messages[: turns[-1]], Message("user", text), *prompt.messages[turns[-1] + 1 :])


def spells_images(prompt: Prompt) -> bool:
    """True for a row without images in which a text spells the place of one."""
    return not prompt.images and any(_SPELLED.search(message.content) for message in prompt.messages)


def contents(prompt: Prompt, length: int) -> str:
    """The text that fingerprints of rows are made of."""
    turns = [(message.role, message.content) for message in prompt.messages]
    said = (prompt.id, prompt.source, turns, prompt.answer, prompt.demonstration, prompt.choices, length)
    compared = [(each.text, each.score) for each in prompt.candidates]
    return repr((*said, compared) if compared else said)
