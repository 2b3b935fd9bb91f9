"""Times of day and dates: ``9:30 a.m.``, ``9 pm``, ``21:30``; ``2020-05-12``, ``5/12/2020``."""

from __future__ import annotations

import re

from mmrl_rewards.quantities import upright_text

_TIME = re.compile(r"(?P<hour>\d{1,2})(?::(?P<minute>\d\d))?\s*(?P<half>[ap]\.?\s?m\b\.?)?", re.IGNORECASE)
_DATE = re.compile(r"(\d{4})([-/.])(\d\d?)\2(\d\d?)|(\d\d?)([-/.])(\d\d?)\6(\d{4})")


def same_date(reference: str, answer: str) -> bool | None:
    """True if two texts are the same date, written in the same order; None if neither is one in digits."""
    one, other = (_date(text) for text in (reference, answer))
    return one == other if one or other else None


def _date(text: str) -> list[int] | None:
    match = _DATE.fullmatch(upright_text(text).strip())
    return match and [int(part) for part in match.groups() if part and part.isdigit()]


def same_time(reference: str, answer: str) -> bool | None:
    """True if two texts are the same time of day; None if one is none, or neither has ``a.m.`` or ``p.m.``.

    The half of the day may be left out on one side: ``9:30`` and ``21:30`` are both right for ``9:30 p.m.``.
    """
    pair = [_TIME.fullmatch(upright_text(text).strip()) for text in (reference, answer)]
    one, other = pair
    if not one or not other or not (one["half"] or other["half"]):
        return None
    minutes = [_minutes(one), _minutes(other)]
    if None in minutes:
        return False
    is_half_day = not (one["half"] and other["half"]) and all(int(match["hour"]) <= 12 for match in (one, other))
    return len({value % 720 if is_half_day else value for value in minutes if value is not None}) == 1


def _minutes(match: re.Match[str]) -> int | None:
    """Minutes since midnight; None for a time that no clock shows."""
    hour, minute, half = int(match["hour"]), int(match["minute"] or 0), match["half"]
    if minute > 59 or hour > (12 if half else 24) or (half and not hour):
        return None
    if half:
        hour = hour % 12 + (12 if half[0] in "pP" else 0)
    return hour % 24 * 60 + minute
