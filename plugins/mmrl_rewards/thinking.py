"""Separates the thinking of a completion from its reply. Text between think tags is no answer.

Rules, for ``<think>`` and the other marks of ``_rest``, in any letter case:

- Thinking reaches from an open tag to the closing tag of its name, or to one of another name where its own is not open.
  Tags within it are a part of it.
- After an open tag that nothing closes there is no reply yet.
- Text before a closing tag that nothing opened is thinking too: chat templates end the prompt with the open tag. After
  thinking that has ended, such a tag is a slip and is left out.
- Where the prompt ends with an open tag, the completion begins in thinking.
- Outside of thinking a tag in a closed code fence is code. A tag in its own quotation marks or backticks is a mention.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator

from mmrl.types import THOUGHT_NAMES, Rollout

_ATTRIBUTES = r"(?:\s+[\w:-]+\s*=[^<>]{0,100})?\s*"


def _rest(slash: str, word: str) -> str:
    """``<think>``, Kimi's ``◁think▷``, Magistral's ``[THINK]``, ``<|START_THINKING|>`` without the first character."""
    return (
        rf"(?:(?<=<)(?i:{slash}(?:{THOUGHT_NAMES}){_ATTRIBUTES}>|\|{word}_(?:of_)?(?:thinking|thought)\|>)"
        rf"|(?<=◁){slash}think▷|(?<=\[){slash}THINK\])"
    )


_FIRST = r"[<◁\[]"
"""Stands alone at a tag's beginning, where a search is quick that way."""
_OPEN, _CLOSE = _rest("", "(?:start|begin)"), _rest("/", "end")
_TAG = re.compile(rf"{_FIRST}(?:(?P<open>{_OPEN})|{_CLOSE})")
_ANY = f"{_FIRST}(?:{_OPEN}|{_CLOSE})"
_QUOTE = re.compile(rf"(?<![\w`\"'])([`\"']){_ANY}(?:[^`\"'\n]{{0,100}}{_ANY})?\1")
_FENCE = re.compile(r"^[^\S\n]*```", re.MULTILINE)
_OPEN_AT_END = re.compile(rf"{_FIRST}{_OPEN}\s*\Z")
_NAME = re.compile(r"\w+(?::\w+)?")
_LONGEST_TAG = 200
GAP = "\x1f"
"""Stands in a reply where thinking was left out: a space to readers, and two boxes beside it are no neighbours."""


def reply_of(rollout: Rollout) -> str:
    """The completion without its thinking; "" if it is still thinking."""
    return reply(rollout.text, opened_by_prompt(rollout))


def opened_by_prompt(rollout: Rollout) -> str:
    """The open think tag at the end of the prompt, with the white space after it; "" if there is none."""
    found = _OPEN_AT_END.search(rollout.prompt.text[-_LONGEST_TAG:])
    return found[0] if found else ""


def reply(text: str, opened: str = "") -> str:
    """The text without its thinking, in time linear in the text.

    Args:
        opened: The tag that is open before the text; "" if there is none.
    """
    parts, start = list[str](), 0
    for begin, end in _thinking(text, opened):
        parts.append(text[start:begin])
        start = end
    return GAP.join([*parts, text[start:]]).strip(GAP) if parts else text


def _thinking(text: str, opened: str) -> list[tuple[int, int]]:
    """Start and end of every stretch of thinking, in order, none within another."""
    tags, found = _OpenTags(), list[tuple[int, int]]()
    if opened:
        tags.open(_name(opened), 0)
    for tag in _tags(text, bool(opened)):
        if tag["open"]:
            tags.open(_name(tag[0]), tag.start())
            continue
        begin = tags.close(_name(tag[0]), tag.start())
        if begin is None and not found:
            begin = 0
        while found and begin is not None and found[-1][0] >= begin:
            found.pop()
        found.append((tag.start() if begin is None else begin, tag.end()))
    if (begin := tags.first_open()) is not None:
        found.append((begin, len(text)))
    return found


def _tags(text: str, thinks: bool) -> Iterator[re.Match[str]]:
    """The think tags of a text that are neither mentioned nor, outside of thinking, code."""
    tags = list(_TAG.finditer(text))
    fences = deque(fence.start() for fence in _FENCE.finditer(text) if tags)
    in_fence, quote_end = False, 0
    for tag in tags:
        while fences and fences[0] < tag.start():
            fences.popleft()
            in_fence = not in_fence and not thinks
        if quote := _QUOTE.match(text, max(tag.start() - 1, 0)):
            quote_end = quote.end()
        if tag.start() < quote_end or (in_fence and fences):
            continue
        thinks, in_fence = bool(tag["open"]), False
        yield tag


class _OpenTags:
    """The think tags that are open at a place of a text, outermost first, with where they start."""

    def __init__(self) -> None:
        self._open, self._counts, self._closed = list[tuple[str, int]](), Counter[str](), dict[str, int]()

    def open(self, name: str, start: int) -> None:
        self._open.append((name, start))
        self._counts[name] += 1

    def close(self, name: str, at: int) -> int | None:
        """Start of the outermost open tag; None if none was open."""
        begin = self._open[0][1] if self._open else None
        self._closed[name] = at
        is_own = self._counts[name] > 0
        while self._open:
            popped, _ = self._open.pop()
            self._counts[popped] -= 1
            if is_own and popped == name:
                break
        return begin

    def first_open(self) -> int | None:
        """Start of the first tag that no closing tag of its name follows; None if there is none."""
        return next((start for name, start in self._open if start > self._closed.get(name, -1)), None)


def _name(tag: str) -> str:
    name = _NAME.search(tag)
    return name[0].casefold() if name else ""
