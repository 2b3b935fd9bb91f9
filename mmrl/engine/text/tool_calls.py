"""Tool calls in a turn of the policy. The text is model output: any of it may be broken, huge or hostile.

Three forms are read, as models write them:

    <tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>
    <tool_call><function=look><parameter=x>1</parameter></function></tool_call>
    {"name": "look", "parameters": {"x": 1}}                                     the whole turn, ``bare``

Everything is found with ``str.find`` and one JSON decoder, so the time is linear in the text.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl.types import Call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 64
"""Most calls of a turn; the next one is an error, and what follows it is not read."""
MAX_DEPTH = 32
"""Deepest nesting of arguments."""
FORM = f'{OPEN}\n{{"name": "the tool", "arguments": {{"an argument": "its value"}}}}\n{CLOSE}'
BARE_FORM = '{"name": "the tool", "parameters": {"an argument": "its value"}}'
_SPACE = " \t\r\n"
_ARGUMENT_KEYS = "arguments", "parameters"


class CallReader:
    """Reads the calls of a turn.

    Args:
        tools: JSON schemas of the tools, which say how values of the second form are read.
        bare: True if a turn that is JSON and nothing else is a call.
        headers: Lines with which the template begins messages. The policy may go on after its turn with messages of
            others that it makes up: nothing counts from such a line on.
        marks: Special tokens of such headers, for a policy that spells them.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        bare: bool = False,
        headers: Sequence[str] = (),
        marks: Sequence[str] = (),
    ) -> None:
        self._bare, self._headers, self._marks = bare, frozenset(headers), tuple(marks)
        self._types: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            self._types[str(function.get("name"))] = (function.get("parameters") or {}).get("properties") or {}

    def read(self, text: str) -> tuple[Call, ...]:
        """The calls in a turn's text, in order; one that cannot be read has its ``error``."""
        text = text[: min((at for mark in self._marks if (at := text.find(mark)) >= 0), default=len(text))]
        if self._bare and OPEN not in text:
            return tuple(self._bare_calls(text))
        return tuple(self._tagged_calls(text))

    def _tagged_calls(self, text: str) -> Iterator[Call]:
        end = 0
        for count in range(MAX_CALLS + 1):
            begin = text.find(OPEN, end)
            if begin < 0 or self._has_header(text[end:begin]):
                return
            if count == MAX_CALLS:
                yield _broken(f"a turn has more than {MAX_CALLS} calls")
                return
            call, end = self._tagged(text, begin + len(OPEN))
            yield call

    def _tagged(self, text: str, begin: int) -> tuple[Call, int]:
        """The call whose opening tag ends here, and the place after it."""
        at = _skip(text, begin)
        if text.startswith("<function=", at):
            return self._marked_up(text, at)
        try:
            value, at = _decode(text, at)
        except ValueError as error:
            closed, next_open = text.find(CLOSE, begin), text.find(OPEN, begin)
            if closed < 0 or 0 <= next_open < closed:
                end = next_open if next_open >= 0 else len(text)
                return _broken(f"{error}, and {CLOSE} is missing"), end
            return _broken(str(error)), closed + len(CLOSE)
        at = _skip(text, at)
        if not text.startswith(CLOSE, at):
            return _broken(f"{CLOSE} does not follow the JSON"), at
        return _call(value, FORM), at + len(CLOSE)

    def _marked_up(self, text: str, begin: int) -> tuple[Call, int]:
        """A call of the second form that begins here."""
        closed = text.find(CLOSE, begin)
        end = len(text) if closed < 0 else closed
        after = end if closed < 0 else end + len(CLOSE)
        opening = begin + len("<function=")
        bracket, function_end = text.find(">", opening, end), text.rfind("</function>", opening, end)
        name = text[opening:bracket].strip() if bracket >= 0 else ""
        if closed < 0 or not name or function_end < bracket:
            missing = CLOSE if closed < 0 else ">" if not name else "</function>"
            return Call(name, None, f"The call cannot be read: {missing} is missing."), after
        return self._with_parameters(name, text[bracket + 1 : function_end]), after

    def _with_parameters(self, name: str, body: str) -> Call:
        arguments, at = dict[str, Any](), _skip(body, 0)
        while at < len(body):
            bracket = body.find(">", at)
            if not body.startswith("<parameter=", at) or bracket < 0:
                return Call(name, None, "The call cannot be read: <parameter=name> is missing before a value.")
            key, close = body[at + len("<parameter=") : bracket].strip(), body.find("</parameter>", bracket)
            if close < 0:
                return Call(name, None, f"The call cannot be read: </parameter> is missing after {key[:50]!r}.")
            if key in arguments:
                return Call(name, None, f"The call cannot be read: the argument {key[:50]!r} comes twice.")
            value = body[bracket + 1 : close].removeprefix("\n").removesuffix("\n")
            arguments[key] = self._typed(name, key, value)
            at = _skip(body, close + len("</parameter>"))
        return _checked(name, arguments)

    def _typed(self, name: str, key: str, value: str) -> Any:
        """A value as its schema has it: text, or JSON; text too if it is no JSON."""
        schema = self._types.get(name, {}).get(key)
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return value
        try:
            return _whole(value)
        except ValueError:
            return value

    def _bare_calls(self, text: str) -> Iterator[Call]:
        """Calls of a turn that is nothing but JSON objects, with semicolons in between."""
        at = _skip(text, 0)
        for count in range(MAX_CALLS + 1):
            if not text.startswith("{", at):
                if at < len(text) and count and not self._has_header("\n" + text[at:]):
                    yield _broken("something follows the JSON", BARE_FORM)
                return
            if count == MAX_CALLS:
                yield _broken(f"a turn has more than {MAX_CALLS} calls", BARE_FORM)
                return
            try:
                value, at = _decode(text, at)
            except ValueError as error:
                if count or '"name"' in text:
                    yield _broken(str(error), BARE_FORM)
                return
            if not isinstance(value, dict) or "name" not in value:
                return  # an answer that is JSON
            yield _call(value, BARE_FORM)
            at = _skip(text, at, f"{_SPACE};")

    def _has_header(self, text: str) -> bool:
        """True if a line is the head of a message."""
        return bool(self._headers) and not self._headers.isdisjoint(text.split("\n")[1:])


def _call(value: Any, form: str) -> Call:
    """The call that a JSON value describes."""
    if not isinstance(value, dict):
        return _broken("its JSON is no object", form)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _broken("its JSON has no text as name", form)
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if value.get(key) is not None), {})
    if isinstance(arguments, str):
        try:
            arguments = _whole(arguments)
        except ValueError as error:
            return Call(name, None, f"The arguments cannot be read: {error}. A call looks like this:\n{form}")
    if not isinstance(arguments, dict):
        return Call(name, None, f"The arguments are no JSON object. A call looks like this:\n{form}")
    return _checked(name, arguments)


def _checked(name: str, arguments: dict[str, Any]) -> Call:
    """The call, if others can work with its values."""
    left: list[tuple[Any, int]] = [(name, 0), (arguments, 1)]
    while left:
        value, depth = left.pop()
        if depth > MAX_DEPTH:
            return Call(_text(name), None, f"The arguments are nested more than {MAX_DEPTH} levels deep.")
        if isinstance(value, str) and _text(value) != value:
            return Call(_text(name), None, "The call holds half of a character (a lone surrogate).")
        if isinstance(value, dict):
            left += [(key, depth) for key in value]
            value = list(value.values())
        left += [(each, depth + 1) for each in (value if isinstance(value, list) else ())]
    return Call(name, arguments)


def _text(text: str) -> str:
    """The text without halves of characters."""
    return text.encode("utf-8", "replace").decode()


def _broken(what: str, form: str = FORM) -> Call:
    return Call("", None, f"The call cannot be read: {what}. A call looks like this:\n{form}")


def _skip(text: str, at: int, characters: str = _SPACE) -> int:
    """The next place from here on that holds none of these characters."""
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins here, and the place after it.

    Raises:
        ValueError: There is none, or it holds a key twice or a number that is not finite.
    """
    if not text.startswith(("{", "[", '"', "-", *"0123456789", "true", "false", "null"), at):
        raise ValueError("there is no JSON")
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON is broken ({error.msg}, character {error.pos - at})") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _whole(text: str) -> Any:
    """The JSON value that a text is.

    Raises:
        ValueError: It is none, or something follows.
    """
    value, end = _decode(text, _skip(text, 0))
    if _skip(text, end) < len(text):
        raise ValueError("something follows the JSON")
    return value


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:20]} is no number that can be used")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {name[:50]!r} comes twice")
    return found


def _integer(number: str) -> int:
    if len(number) > 1000:  # digits; Python refuses some more, and others read fewer
        raise ValueError("a number has more than 1000 digits")
    return int(number)


_DECODER = json.JSONDecoder(
    parse_constant=_finite, parse_float=_finite, parse_int=_integer, object_pairs_hook=_unique, strict=False
)
