"""Actions that a policy writes as text, for models that call no tools: ``action: "<answer>(.*?)</answer>"``."""

from __future__ import annotations

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


def last_action(pattern: str, text: str) -> str | None:
    """The last action in a turn, without spaces around it; None if there is none."""
    found = [match[1] for match in re.finditer(pattern, text, re.DOTALL) if match[1] is not None]
    return found[-1].strip() if found else None
