"""Assigns samples to ranks and micro-batches, and to their places in packed rows.

A row holds a prompt once for all of its completions: ``[prompt | completion 1 | ... | completion G]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from mmrl.ops.cost import causal_pairs, window_pairs
from mmrl.types import Sample, TrainingRow

MASKED = 2
"""A call may compute at most this many times the pairs of query and key that are needed. Beyond it, more calls with
fewer masked pairs are faster (measured on a CPU; group sizes 5 to 8, completions of 32 to 550 tokens)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of a packed row. Each attends to those before it, and to a whole prefix elsewhere in the row.

    Attributes:
        start: Position of the first token.
        length: Tokens.
        prefix_start: Position of the prefix's first token.
        prefix_length: Tokens of the prefix; 0 for none.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        return causal_pairs(self.length, self.prefix_length)

    def pairs_within(self, window: int) -> int:
        """Those in which the key is one of the ``window`` last tokens, the query included; the prefix counts along."""
        return window_pairs(self.prefix_length + self.length, window) - window_pairs(self.prefix_length, window)


def chunks_of(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans of the same prefix that one call of attention computes together, under a mask. A span without a prefix is
    alone, and needs no mask."""
    chunk: list[Span] = []
    for span in spans:
        wider = [*chunk, span]
        queries = sum(each.length for each in wider)
        computed, needed = queries * (queries + span.prefix_length), sum(each.pairs for each in wider)
        fits = chunk and span.prefix_length and span.prefix_start == chunk[0].prefix_start
        if fits and chunk[0].prefix_length and computed <= MASKED * needed:
            chunk = wider
            continue
        if chunk:
            yield chunk
        chunk = [span]
    yield chunk


@dataclass(frozen=True, slots=True)
class Item:
    """A sample, as planning sees it.

    Attributes:
        prompt: Equal for samples that may share their prompt.
        prompt_tokens: At least 1.
        completion_tokens: At least 1.
        forms: Times that it is in the row: once, and once for each view of its prompt.
        group: Equal for samples that belong into one micro-batch; None for one that may lie anywhere.
    """

    prompt: Hashable
    prompt_tokens: int
    completion_tokens: int
    forms: int = 1
    group: int | None = None

    @classmethod
    def of(cls, sample: Sample, row: TrainingRow | None = None, *, keeps_last: bool = False) -> Self:
        """The item of a sample with tokens. Prompts with the same tokens and images share one key.

        Args:
            row: The sample's, whose views are in the packed row too, and whose group may have to be whole; None if only
                its log-probs are computed.
            keeps_last: True if the packed row has its last token, too: it counts as one token more.
        """
        assert len(sample.token_ids), "a sample without tokens cannot be packed"
        prompt = sample.prompt
        forms = [prompt, *(prompt.views[name] for name in (row.own_views if row else ()))]
        key = prompt.token_ids.tobytes(), *(tuple(ref.hash for ref in form.images) for form in forms)
        group = row.group if row and row.whole_group else None
        return cls(key, len(prompt.token_ids), len(sample.token_ids) + keeps_last, len(forms), group)


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples of one prompt that lie together, their prompt once.

    Attributes:
        indices: The samples' indices.
        prompt_tokens: Tokens of their prompt.
        completions: Each completion's tokens in the row: all but the last, which predicts nothing, or all.
        forms: Times that all of this is in the row; the forms share nothing, and are never in two rows.
        group: The samples' group if it stays whole; such a unit is not split.
    """

    indices: tuple[int, ...]
    prompt_tokens: int
    completions: tuple[int, ...]
    forms: int = 1
    group: int | None = None

    @property
    def length(self) -> int:
        """Tokens of one form."""
        return self.prompt_tokens + sum(self.completions)

    @property
    def tokens(self) -> int:
        """Tokens in the row."""
        return self.forms * self.length

    @property
    def predicted(self) -> int:
        """Completion tokens; a position that predicts one of the policy's meets the head."""
        return self.forms * (sum(self.completions) + len(self.completions))

    def spans(self, start: int) -> list[Span]:
        """Spans of a form that begins at ``start``: the prompt, then each completion, empty ones too. A single
        completion continues the prompt's span."""
        if len(self.completions) == 1:
            return [Span(start, self.length)]
        starts = [start + self.prompt_tokens + offset for offset in offsets(self.completions)]
        spans = [
            Span(first, length, start, self.prompt_tokens)
            for first, length in zip(starts, self.completions, strict=False)
        ]
        return [Span(start, self.prompt_tokens), *spans]

    def halves(self) -> list[Unit]:
        """Two units of half of the completions each."""
        middle = len(self.indices) // 2
        parts = slice(middle), slice(middle, None)
        return [replace(self, indices=self.indices[part], completions=self.completions[part]) for part in parts]

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key in its attention."""
        return self.forms * sum(span.pairs for span in self.spans(0))

    @property
    def masked_pairs(self) -> int:
        """Pairs of a query and a key in the masks of its completions, where these share their prompt."""
        sizes = [(sum(span.length for span in chunk), chunk[0].prefix_length) for chunk in chunks_of(self.spans(0))]
        return self.forms * sum(queries * (queries + prefix) for queries, prefix in sizes if prefix)

    def pairs_within(self, window: int) -> int:
        """Those of a layer with a window; see ``Span``."""
        return self.forms * sum(span.pairs_within(window) for span in self.spans(0))


def units_of(items: Sequence[Item], budget: int | None = None, *, share: bool = True) -> list[Unit]:
    """Samples that share a prompt as one unit, or as several where one would have more than ``budget`` tokens.

    Samples of different groups that stay whole share nothing.

    Args:
        budget: None for any number of tokens. A sample that is longer is a unit of its own, and so are the samples of a
            prompt whose group stays whole.
        share: False makes each sample a unit.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault((item.group, item.prompt) if share else index, []).append(index)
    units = []
    for members in groups.values():
        first = items[members[0]]
        lengths = [items[index].completion_tokens - 1 for index in members]
        parts: Iterable[Sequence[int]] = [range(len(members))]
        if budget is not None and first.group is None:
            parts = map(sorted, first_fit(lengths, budget // first.forms - first.prompt_tokens))
        for part in parts:
            indices, own = tuple(members[i] for i in part), tuple(lengths[i] for i in part)
            units.append(Unit(indices, first.prompt_tokens, own, first.forms, first.group))
    return units


def bundles_of(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units that belong into one micro-batch: those of a group that stays whole; every other one is alone."""
    bundles: dict[Hashable, list[Unit]] = {}
    for place, unit in enumerate(units):
        bundles.setdefault((unit.group, place if unit.group is None else 0), []).append(unit)
    return list(bundles.values())


def shares_of(units: Sequence[Unit], parts: int, cost: Callable[[Unit], float]) -> list[list[Unit]]:
    """Units of each part, balanced by cost. Units are split only if there are fewer than parts, groups that stay whole
    never."""
    units = list(units)
    while len(units) < parts:
        loose = [unit for unit in units if unit.group is None and len(unit.indices) > 1]
        if not loose:
            break
        dearest = max(loose, key=lambda unit: len(unit.indices))
        units.remove(dearest)
        units += dearest.halves()
    bundles = bundles_of(units)
    shares = balance([sum(map(cost, bundle)) for bundle in bundles], parts)
    return [[unit for i in share for unit in bundles[i]] for share in shares]


def plan_microbatches(units: Sequence[Unit], budget: int, cost: Callable[[Unit], float]) -> list[list[Unit]]:
    """Units of each micro-batch: at most ``budget`` tokens each, as few micro-batches as first-fit finds, and costs as
    equal as that allows. The most expensive micro-batch comes first, so that those of several ranks match. A group
    that stays whole and has more tokens is a micro-batch of its own."""
    bundles = bundles_of(units)
    tokens = [sum(unit.tokens for unit in bundle) for bundle in bundles]
    bins = first_fit(tokens, budget)
    even = balance([sum(map(cost, bundle)) for bundle in bundles], len(bins))
    if all(sum(tokens[i] for i in part) <= budget or len(part) == 1 for part in even):
        bins = even
    parts = [[unit for i in part for unit in bundles[i]] for part in bins]
    return sorted(parts, key=lambda part: -sum(map(cost, part)))


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of each bin: at most ``budget`` tokens, every index once, longest first.

    First-fit decreasing: deterministic, and within 22 % of the fewest possible. A length above the budget is in a bin
    of its own.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if fit is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fit].append(index)
            room[fit] -= lengths[index]
    return bins


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of each part, ascending: every index once, with sums of costs as equal as possible.

    Longest processing time first (Graham, 1969): deterministic, and within a third of the best.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        part = min(range(parts), key=lambda p: (sums[p], len(shares[p]), p))
        shares[part].append(index)
        sums[part] += costs[index]
    return [sorted(share) for share in shares]


def offsets(lengths: Iterable[int]) -> list[int]:
    """Start of each sample in a packed row, and the row's end: ``[0, l_0, l_0 + l_1, ...]``."""
    return list(itertools.accumulate(lengths, initial=0))
