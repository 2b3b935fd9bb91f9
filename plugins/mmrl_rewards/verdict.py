"""The verdict of a judge: the form that it is asked for, and its value in what the judge writes.

A verdict on one completion is a number of a range, or a grade by name; one on two completions is the better one, or a
tie. It stands in a JSON object or in double brackets, after any thinking and any other text; the last one counts, as
models repeat the form before they fill it. Anything else is no verdict.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmrl_rewards.thinking import reply

_LONGEST = 20_000
"""Characters at the end of an answer that are searched."""
_BRACKETS = re.compile(r"\[\[([^\[\]]{1,60})\]\]")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?|[+-]?\.\d+")
_WINNERS = {"a": 1.0, "b": 0.0, "tie": 0.5, "c": 0.5}
"""Worth of A by the better one; MT-Bench writes a tie as C."""
_STEPS = 10


class UnreadableError(Exception):
    """An answer without a verdict; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of verdicts.

    Attributes:
        kind: ``json`` is ``{"score": 7}`` or ``{"winner": "A"}``, ``brackets`` is ``[[7]]`` or ``[[A]]``.
        low: The worst score, which is worth 0.
        high: The best one, worth 1.
        grades: Worth of each name that a verdict in brackets may be; None for numbers.
        compares: True for verdicts on two completions.
        guided: True if the server lets the judge write nothing else.
    """

    kind: Literal["json", "brackets"]
    low: float = 0.0
    high: float = 1.0
    grades: Mapping[str, float] | None = None
    compares: bool = False
    guided: bool = False

    def request(self) -> str:
        """The sentences that ask a judge for it."""
        if self.guided:
            return f"Answer with JSON alone: {self._wanted()}"
        return f"Reason in a few sentences. Then end with your verdict on a line of its own: {self._wanted()}"

    def _wanted(self) -> str:
        if self.compares and self.kind == "json":
            return '{"winner": "A"}, {"winner": "B"} or, if neither is better, {"winner": "tie"}.'
        if self.compares:
            return "[[A]], [[B]] or, if neither is better, [[C]]."
        if self.grades is not None:
            return f"one of {', '.join(f'[[{name}]]' for name in self.grades)}."
        form = '{"score": X}' if self.kind == "json" else "[[X]]"
        return f"{form}, where X is a number from {self.low:g} (worst) to {self.high:g} (best)."

    def schema(self) -> dict[str, Any]:
        """The verdict's JSON schema: a choice of whole numbers where the range has few, else of eleven steps."""
        name, choices = "score", list[Any](self._steps())
        if self.compares:
            name, choices = "winner", ["A", "B", "tie"]
        return {
            "type": "object",
            "properties": {name: {"enum": choices}},
            "required": [name],
            "additionalProperties": False,
        }

    def _steps(self) -> list[float]:
        low, high = self.low, self.high
        if low.is_integer() and high.is_integer() and _STEPS // 2 < high - low + 1 <= 101:
            return list(range(int(low), int(high) + 1))
        return [round(low + (high - low) * step / _STEPS, 6) for step in range(_STEPS + 1)]

    def read(self, answer: str) -> float:
        """The worth, from 0 to 1, of the completion, or of A beside B.

        Raises:
            UnreadableError: There is no such verdict.
        """
        text = reply(answer)[-_LONGEST:]
        return self._in_json(text) if self.kind == "json" else self._in_brackets(text)

    def _in_json(self, text: str) -> float:
        key = "winner" if self.compares else "score"
        found = [each[key] for each in _objects(text) if key in each]
        if not found:
            raise UnreadableError(f'no {{"{key}": ...}}')
        return self._winner(found[-1]) if self.compares else self._number(found[-1])

    def _in_brackets(self, text: str) -> float:
        found = _BRACKETS.findall(text)
        if not found:
            raise UnreadableError("no [[...]]")
        if self.compares:
            return self._winner(found[-1])
        if self.grades is None:
            return self._number(found[-1])
        grades = {name.casefold(): worth for name, worth in self.grades.items()}
        worth = grades.get(found[-1].strip().casefold())
        if worth is None:
            raise UnreadableError(f"[[{found[-1]}]], which is none of {', '.join(self.grades)},")
        return worth

    def _winner(self, found: Any) -> float:
        worth = _WINNERS.get(found.strip().casefold()) if isinstance(found, str) else None
        if worth is None:
            raise UnreadableError(f"the winner {found!r}, which is neither A nor B nor a tie,")
        return worth

    def _number(self, found: Any) -> float:
        if isinstance(found, str) and _NUMBER.fullmatch(found.strip()):
            found = float(found)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise UnreadableError(f"the score {found!r}, which is no number,")
        if not (math.isfinite(found) and self.low <= found <= self.high):
            raise UnreadableError(f"the score {found:g}, which is not from {self.low:g} to {self.high:g},")
        return (found - self.low) / (self.high - self.low)


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, in order; none within another."""
    decoder, found, place = json.JSONDecoder(), list[dict[str, Any]](), text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            value, end = None, place + 1
        if isinstance(value, dict):
            found.append(value)
        place = text.find("{", end)
    return found
