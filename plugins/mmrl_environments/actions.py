"""Actions that a policy writes as text, for models that call no tools: ``action: "<answer>(.*?)</answer>"``."""

from __future__ import annotations

import functools
import re
from typing import Annotated

from pydantic import AfterValidator


def _with_one_group(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error
    if groups != 1:
        raise ValueError(f"it has {groups} groups; put the one part that is the action into parentheses")
    return pattern


ActionPattern = Annotated[str, AfterValidator(_with_one_group)]
"""A regular expression whose one group is the action; ``.`` matches line breaks too."""


SEARCHED = 2**15
"""Characters at the end of a turn in which an action is looked for."""


def last_action(pattern: str, text: str) -> str | None:
    """The last action in a turn, without spaces around it; None if there is none in its last ``SEARCHED`` characters.

    A search reads a text of many beginnings without an end to its end from each. So what follows the last ending, where
    the pattern has a plain one such as ``</answer>``, is left out.
    """
    searched, ending = text[-SEARCHED:], _ending(pattern)
    before, ending, _ = searched.rpartition(ending) if ending else (searched, "", "")
    found = [match[1] for match in re.finditer(pattern, before + ending, re.DOTALL) if match[1] is not None]
    return found[-1].strip() if found else None


@functools.cache
def _ending(pattern: str) -> str:
    """The characters with which each match ends, as far as the pattern has them plainly."""
    if "|" in pattern or re.search(r"\(\?(?!:)", pattern):
        return ""
    ending = ""
    for token in reversed(re.findall(r"\\.|.", pattern, re.DOTALL)):
        if token in ".^$*+?{}[]()" or (len(token) == 2 and token[1].isalnum()):
            break
        ending = token[-1] + ending
    return ending


def text_of(pattern: str, action: str) -> str:
    """A text in which the pattern finds the action; empty if none is found by writing it for the pattern's group."""
    begin = re.search(r"(?<!\\)(?:\\\\)*\((?!\?)", pattern)
    if begin is None:
        return ""
    for end in (match.end() for match in re.finditer(r"\)[*+?]?", pattern[begin.end() :])):
        parts = pattern[: begin.end() - 1], pattern[begin.end() + end :]
        text = action.join(re.sub(r"\\(.)", r"\1", part) for part in parts)
        if last_action(pattern, text) == action:
            return text
    return ""
