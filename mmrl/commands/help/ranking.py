"""The order in which passages answer some words: BM25 (Robertson and Zaragoza 2009), headings counted several times.

A word that is the name of a key, a command or an exit code finds that first. Words are compared by modest stems, and a
few have others that pages use for the same thing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from mmrl.commands.help.passage import Passage

K1, B = 1.2, 0.4
TITLE = 4
"""Times that a word of a heading, or a key's last word, counts."""
ABOVE = 2
"""The same of what stands above it (the page's heading, or the key's section), and of a command's summary, so that its
further options make it no worse an answer."""
RELATED = 0.6
"""The weight of a word that is asked for by another one of the same meaning."""
EXACT = 1.5
"""The factor of a heading that says nothing but what was asked for."""
NAMED = 100.0
"""Added to what has the asked words for its name."""
WEIGHTS = {"code": 0.7, "section": 0.6, "plugin": 0.55, "option": 0.6, "word": 0.6, "page": 1.15}
"""Factors of what is seldom meant unless it is named, and of pages, whose sections explain."""
NEAR = 6
_TOKEN = re.compile(r"[a-z0-9][a-z0-9_+.\[\]-]*[a-z0-9_+]|[a-z0-9]")
_STOP = frozenset(
    """a an and are as at be by can do does for from how i in is it its me my of on or our should that the then there
    this to use using want what when where which while why will with you your""".split()  # noqa: SIM905
)
_RELATED = {
    "agent": "environment episode", "batch": "prompts_per_step", "checkpoint": "checkpoints",
    "continue": "resume goes", "crash": "killed faults", "crashed": "killed faults", "cuda": "gpu",
    "custom": "own writing", "dashboard": "view report", "dataset": "data", "debug": "check doctor",
    "deterministic": "seed", "error": "exit", "fast": "speed", "finetune": "train", "freeze": "frozen",
    "frozen": "freeze", "hangs": "hang", "hub": "push", "install": "set-up", "installation": "set-up",
    "judge": "model http", "logging": "trackers metrics", "lora": "adapters", "merge": "merged export",
    "multi": "several", "multinode": "nodes ray", "multiple": "several many", "notebook": "python jupyter",
    "offload": "host", "oom": "memory", "own": "writing plugin", "peft": "lora adapters", "plot": "view curves",
    "qlora": "quantize 4 bits", "reproduce": "seed", "resolution": "pixels max_pixels", "restart": "resume goes",
    "resume": "goes continued", "slow": "speed", "slurm": "cluster", "stuck": "hang", "throughput": "speed",
    "tower": "vision", "upload": "push", "validation": "eval evaluation", "vram": "memory",
}  # fmt: skip
"""Words of users, and those that pages use."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that answers, with its blocks that do, the best one first."""

    passage: Passage
    score: float
    blocks: tuple[str, ...]


class Index:
    """Passages, ready to be searched.

    Args:
        passages: Those with ``names`` are found by them first.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._counts = [_counts(each) for each in passages]
        self._headings = [_heading(each) for each in passages]
        self._lengths = [sum(count.values()) for count in self._counts]
        self._mean = sum(self._lengths) / max(len(passages), 1) or 1.0
        self._holders = Counter(term for count in self._counts for term in count)

    def search(self, words: str, limit: int) -> list[Hit]:
        """The passages that answer best, at most ``limit``."""
        wanted = _wanted(words)
        scored = [(self._score(i, wanted) + _named(each, words), i) for i, each in enumerate(self._passages)]
        best = sorted(((score, -i) for score, i in scored if score > 0), reverse=True)[:limit]
        return [Hit(self._passages[-i], score, self._best_blocks(-i, wanted)) for score, i in best]

    def near(self, words: str) -> list[str]:
        """Words of the passages that look like those that were asked for."""
        known = sorted({token for each in self._passages for token in _tokens(f"{each.title} {' '.join(each.blocks)}")})
        return list(
            dict.fromkeys(
                near for token in _tokens(words.lower()) for near in get_close_matches(token, known, NEAR, 0.7)
            )
        )[:NEAR]

    def _score(self, index: int, wanted: dict[str, float]) -> float:
        counts, total, met = self._counts[index], 0.0, 0.0
        norm = K1 * (1 - B + B * self._lengths[index] / self._mean)
        for term, weight in wanted.items():
            if (times := counts.get(term, 0)) > 0:
                total += weight * self._rarity(term) * times * (K1 + 1) / (times + norm)
                met += weight == 1.0
        asked = sum(weight == 1.0 for weight in wanted.values()) or 1
        exact = EXACT if self._headings[index] and self._headings[index] <= wanted.keys() else 1.0
        return total * (0.5 + 0.5 * met / asked) * exact * WEIGHTS.get(self._passages[index].kind, 1.0)

    def _rarity(self, term: str) -> float:
        holders = self._holders[term]
        return math.log(1 + (len(self._passages) - holders + 0.5) / (holders + 0.5))

    def _best_blocks(self, index: int, wanted: dict[str, float]) -> tuple[str, ...]:
        """The blocks with most of the wanted words, the best one first."""

        def score(block: str) -> float:
            found = set(_stems(block))
            return sum(weight * self._rarity(term) for term, weight in wanted.items() if term in found)

        blocks = self._passages[index].blocks
        ranked = sorted(range(len(blocks)), key=lambda i: (-score(blocks[i]), i))
        return tuple(blocks[i] for i in ranked)


def _wanted(words: str) -> dict[str, float]:
    """The stems that are looked for, with their weights."""
    tokens = [token for token in _tokens(words.lower()) if token not in _STOP] or list(_tokens(words.lower()))
    wanted = {stem: 1.0 for token in tokens for stem in [_stem(token)]}
    for token in tokens:
        for other in _RELATED.get(token, "").split():
            wanted.setdefault(_stem(other), RELATED)
        for part in _parts(token):
            wanted.setdefault(part, RELATED)
    return wanted


def _named(passage: Passage, words: str) -> float:
    """A bonus for what the words name: most for a whole key, less for its last word, least for others' word for it."""
    asked = " ".join(words.lower().split())
    if not passage.names or not asked:
        return 0.0
    plain = asked.removeprefix("mmrl ").lstrip("-")
    if plain in passage.names:
        rank = passage.names.index(plain)
        return NAMED * (2 if rank == 0 else 1) - rank
    return NAMED * 0.8 if plain in passage.aliases else 0.0


def _heading(passage: Passage) -> frozenset[str]:
    """The stems of a page's last heading; empty for what is found by its name."""
    title = passage.title.rpartition(" > ")[2].lower() if passage.kind == "page" else ""
    return frozenset(_stem(token) for token in _tokens(title) if token not in _STOP)


def _counts(passage: Passage) -> Counter[str]:
    counts: Counter[str] = Counter()
    above, _, title = passage.title.rpartition("." if passage.kind in ("key", "option") else " > ")
    for stem in _stems(title):
        counts[stem] += TITLE
    for stem in _stems(passage.blocks[0] if passage.kind == "command" else above):
        counts[stem] += ABOVE
    for alias in passage.aliases:
        counts.update(_stems(alias))
    for block in passage.blocks:
        counts.update(_stems(block))
    return counts


def _tokens(text: str) -> Iterator[str]:
    return (found[0] for found in _TOKEN.finditer(text))


def _stems(text: str) -> Iterator[str]:
    """The stems of a text's words, and of the parts of those that are keys."""
    for token in _tokens(text.lower()):
        yield _stem(token)
        yield from _parts(token)


def _parts(token: str) -> Iterator[str]:
    pieces = re.split(r"[._\[\]+-]+", token)
    return (_stem(piece) for piece in pieces if piece) if len(pieces) > 1 else iter(())


@cache
def _stem(word: str) -> str:
    """A word without the ends that number and tense give it."""
    if not word.isalpha() or len(word) < 4:
        return word
    for end, least in (("ations", 4), ("ation", 4), ("ating", 4), ("ated", 4), ("ates", 4), ("ate", 4), ("ings", 3),
                       ("ing", 3), ("ies", 2), ("ed", 3), ("es", 3), ("s", 3)):  # fmt: skip
        if word.endswith(end) and len(word) - len(end) >= least and not word.endswith(("ss", "us", "is")):
            word = word[: -len(end)] + ("y" if end == "ies" else "")
            break
    if len(word) > 4 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    return word.removesuffix("e") if len(word) > 3 else word
