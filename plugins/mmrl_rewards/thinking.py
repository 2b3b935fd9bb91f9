"""Separates the thinking of a completion from its reply. What stands between think tags is no answer.

Rules, for ``<think>`` and the other marks of ``_tag``, in any letter case:

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
from collections import Counter
from collections.abc import Iterator

from mmrl.types import Rollout

_NAMES = "think|thinking|thoughts?|reason|reasoning|reflection|scratchpad|seed:think"
_ATTRIBUTES = r"(?:\s+[\w:-]+\s*=[^<>]{0,100})?\s*"


def _tag(slash: str, word: str) -> str:
    """``<think>``, Kimi's ``◁think▷``, Magistral's ``[THINK]``, ``<|START_THINKING|>``, ``<|begin_of_thought|>``."""
    return (
        rf"(?:<{slash}(?:{_NAMES}){_ATTRIBUTES}>|◁{slash}think▷|\[{slash}(?-i:THINK)\]"
        rf"|<\|{word}_(?:of_)?(?:thinking|thought)\|>)"
    )


_OPEN, _CLOSE = _tag("", "(?:start|begin)"), _tag("/", "end")
_ANY = f"(?:{_OPEN}|{_CLOSE})"
_TOKENS = re.compile(
    rf"(?P<fence>^[ \t]*```[^\n]*$)|(?<![\w`\"'])(?P<quote>[`\"']){_ANY}(?:[^`\"'\n]{{0,100}}{_ANY})?(?P=quote)"
    rf"|(?P<open>{_OPEN})|(?P<close>{_CLOSE})",
    re.IGNORECASE | re.MULTILINE,
)
_OPEN_AT_END = re.compile(rf"(?:{_OPEN})\s*\Z", re.IGNORECASE)
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
    for token in _tags(text, bool(opened)):
        if token["open"]:
            tags.open(_name(token[0]), token.start())
            continue
        begin = tags.close(_name(token[0]), token.start())
        if begin is None and not found:
            begin = 0
        while found and begin is not None and found[-1][0] >= begin:
            found.pop()
        found.append((token.start() if begin is None else begin, token.end()))
    if (begin := tags.first_open()) is not None:
        found.append((begin, len(text)))
    return found


def _tags(text: str, thinks: bool) -> Iterator[re.Match[str]]:
    """The think tags of a text that are neither mentioned nor, outside of thinking, code."""
    tokens = [token for token in _TOKENS.finditer(text) if not token["quote"]]
    last_fence = max((token.start() for token in tokens if token["fence"]), default=0)
    in_fence = False
    for token in tokens:
        if token["fence"]:
            in_fence = not in_fence and not thinks
        elif not in_fence or token.start() > last_fence:
            thinks, in_fence = bool(token["open"]), False
            yield token


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
