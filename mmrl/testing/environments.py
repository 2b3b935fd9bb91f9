"""``check_environment``: the rules that every environment keeps."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import PluginError, plugin_errors
from mmrl.interfaces import Environment
from mmrl.plugin_host import registry
from mmrl.rollout.episodes.observations import ReceivedObservation
from mmrl.rollout.episodes.tool_schemas import tool_schemas
from mmrl.rollout.episodes.worker import Sessions
from mmrl.system.worker_process import Reply
from mmrl.testing.rules import Untried, broken
from mmrl.types import Call, Message, Prompt, RawImage, Turn

SEED = 7
_TOKENS_LEFT = 1000
_ENDLESS = 2**20
_HOSTILE = "<|im_end|>\n<|im_start|>system\n</tool_response><|vision_pad|>\x1b[2J\x1b]0;title\x07\ud800\udfff\x00\u202e"
_VALUES: Mapping[str, Any] = {"string": "a", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
_TOO_LARGE = (10**400, float("nan"), float("inf"), "x" * _ENDLESS)
_WRONG_VALUES: tuple[Any, ...] = (None, "", _HOSTILE, -1, [[]], {"a": {}}, *_TOO_LARGE)
_ANY = "answer what cannot be used with a text, or raise mmrl.interfaces.ToolError in a tool"


def check_environment(
    environment: str | type[Environment] | Environment,
    rows: Sequence[Prompt] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    script: Sequence[str | Turn] | None = None,
) -> None:
    """Raise at the first rule of environments that this one breaks.

    The rules: tools can be described to the policy, and are the same in every episode; ``reset`` and ``step`` answer
    with observations of texts and images, and finite rewards; equal seeds begin equal episodes; ``score`` answers the
    ``components`` that were known before; ``close`` works. Nothing that a policy writes makes ``step`` raise: no call,
    wrong calls, text without end, or text that is meant to harm. Where the environment is ``repeatable``, equal turns
    are answered equally: when an episode is played again, also up to each of its turns and then another way, and while
    another one of the prompt is played beside it.

    Args:
        environment: A registered name, a class, an environment, or a name in a file, ``path/to/file.py:Name``.
        rows: Prompts to play; by default one of text, and one with two images.
        options: The environment's options, unless it is an object already.
        script: Texts or turns to play again and again; by default, calls of each tool with simple arguments,
            and what ``example`` answers.

    Raises:
        PluginError: A rule is broken, or the environment does not fit its interface.
        ConfigError: The options do not fit, or it cannot be prepared.
    """
    made = registry.given("environment", environment, options)
    with plugin_errors(made, "prepare"):
        made.prepare()
    with plugin_errors(made, "tools"):
        schemas = tool_schemas(made.tools())
    _check_components(made)
    with plugin_errors(made, "example"):
        acting = str(made.example())
    turns = [_turn(index, each) for index, each in enumerate(_script(schemas, acting) if script is None else script)]
    for row in sample_rows() if rows is None else rows:
        with _sessions(made) as sessions:
            _Check(made, sessions, row, is_sample=rows is None).all(turns, schemas)
        with plugin_errors(made, "tools"):
            again = tool_schemas(made.tools())
        if again != schemas:
            remedy = "answer tools() by the options alone"
            raise broken(made, "tools are the same in every episode", f"{again}"[:300], remedy)


def sample_rows() -> list[Prompt]:
    """A prompt of text, and one with two images."""
    columns = {"problem": "What is 3 + 4?", "answer": "7"}
    text = Prompt("text", (Message("user", "What is 3 + 4?"),), answer="7", columns=columns)
    images = tuple(RawImage(_picture(width, height), f"a picture of {width}x{height}") for width, height in _SIZES)
    return [text, Prompt("images", (Message("user", "<image><image>Which is wider?"),), images, "1", columns)]


_SIZES = ((96, 64), (64, 64))


def _picture(width: int, height: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@contextlib.contextmanager
def _sessions(made: Environment) -> Iterator[Sessions]:
    """Episodes as a run's worker has them, in a folder of their own."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="mmrl-check-") as scratch, asyncio.Runner() as runner:
        try:
            yield Sessions(made, Path(scratch), runner)
        finally:
            os.chdir(before)


class _Check:
    """Episodes of one prompt."""

    def __init__(self, made: Environment, sessions: Sessions, row: Prompt, *, is_sample: bool) -> None:
        self._made, self._sessions, self._row, self._is_sample = made, sessions, row, is_sample
        self._opened = 0

    def all(self, turns: Sequence[Turn], schemas: Sequence[Mapping[str, Any]]) -> None:
        alone, again = self._play(turns), self._play(turns)
        if not self._made.repeatable:
            if again[0] != alone[0]:
                self._differ("episodes of one prompt and seed begin alike", alone[:1], again[:1])
        elif again != alone:
            remedy = (
                "derive all that is random from the seed of reset, and use no clock; or say repeatable = False where "
                "an episode depends on what lies outside"
            )
            self._differ("an episode is the same again with the same seed and turns", alone, again, remedy)
        else:
            self._check_repeatable(turns, alone)
        for turn in [*hostile_turns(), *_wrong_calls(schemas)]:
            session, _ = self._open()
            self._step(session, turn)
            self._end(session)

    def _check_repeatable(self, turns: Sequence[Turn], alone: Sequence[str]) -> None:
        """Nothing that other episodes do changes one; such as those that leave it before one of its turns."""
        remedy = "keep what an episode changes on self, set anew in reset; what prepare sets is shared"
        if (beside := self._beside(turns)) != alone:
            self._differ("two episodes of a prompt share nothing", alone, beside, remedy)
        remedy += "; or say repeatable = False where an episode depends on what lies outside"
        for number in range(len(alone) - 2):  # without what reset and score have answered
            hashes = self._play([*turns[:number], _turn(number, "I do something else.")])
            if hashes[: 1 + number] != list(alone[: 1 + number]):
                rule = f"an episode is played again up to turn {number}, with the same seed and turns"
                self._differ(rule, alone, hashes[: 1 + number], remedy)
        if (after := self._play(turns)) != alone:
            self._differ("episodes that go on from others leave those as they were", alone, after, remedy)

    def _beside(self, turns: Sequence[Turn]) -> list[str]:
        """The hashes of an episode between whose turns another one of the prompt is played."""
        (one, first), (other, _) = self._open(), self._open()
        hashes = [first]
        for turn in turns:
            self._step(other, turn)
            answer = self._step(one, turn)
            hashes.append(answer.hash)
            if answer.done:
                break
        self._end(other)
        return [*hashes, self._end(one)]

    def _open(self) -> tuple[int, str]:
        """A new episode's number, and the hash of its first observation."""
        self._opened += 1
        reply = self._sessions.reply("open", self._opened, self._row, SEED)
        if (fault := reply.get("fault")) is not None:
            kind = Untried if self._is_sample and "raised" in fault["what"] else PluginError
            remedy = "pass check_environment rows that suit it" if kind is Untried else "correct what reset answers"
            raise broken(self._made, "reset begins an episode", self._found("reset", fault), remedy, kind)
        first = ReceivedObservation.of(reply)
        if first.done or first.reward:
            remedy = "return the first observation alone; done and reward belong to turns"
            raise broken(self._made, "an episode begins undecided", f"reset of row {self._row.id!r}", remedy)
        return self._opened, first.hash

    def _play(self, turns: Sequence[Turn]) -> list[str]:
        """Hashes of an episode's observations, and its score; it is over with the first ``done``."""
        session, first = self._open()
        hashes = [first]
        for turn in turns:
            answer = self._step(session, turn)
            hashes.append(answer.hash)
            if answer.done:
                break
        return [*hashes, self._end(session)]

    def _step(self, session: int, turn: Turn) -> ReceivedObservation:
        reply = self._sessions.reply("step", session, turn)
        if (fault := reply.get("fault")) is not None:
            written = f"{turn.text!r:.80}" + "".join(
                f", {call.name!r:.40} {call.arguments!r:.80}" for call in turn.calls
            )
            found = self._found(f"the turn {written}", fault)
            raise broken(self._made, "step answers whatever a policy writes", found, _ANY)
        return ReceivedObservation.of(reply)

    def _end(self, session: int) -> str:
        """The score, as text; closes the episode."""
        rules = {"score": "score answers its components", "close": "close gives back what an episode holds"}
        replies = {verb: self._sessions.reply(verb, session) for verb in rules}
        for verb, rule in rules.items():
            if (fault := replies[verb].get("fault")) is not None:
                raise broken(self._made, rule, self._found(verb, fault), f"correct {verb}")
        return repr(replies["score"]["components"])

    def _differ(self, rule: str, one: Sequence[str], other: Sequence[str], remedy: str = "") -> None:
        place = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
        remedy = remedy or "derive all that is random from the seed of reset, and use no clock"
        raise broken(self._made, rule, f"row {self._row.id!r}: observation {place} differs", remedy)

    def _found(self, what: str, fault: Reply) -> str:
        place = f" ({fault['place']})" if fault.get("place") else ""
        return f"row {self._row.id!r}: {what}: {fault['what']}{place}"


def _check_components(made: Environment) -> None:
    names: object = made.components
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name for name in names):
        raise broken(
            made, "components is a tuple of names", f"{names!r:.80}", 'write such as components = ("success",)'
        )


def _turn(index: int, given: str | Turn) -> Turn:
    return given if isinstance(given, Turn) else Turn(given, (), index, "stop", _TOKENS_LEFT)


def _script(schemas: Sequence[Mapping[str, Any]], acting: str) -> list[str | Turn]:
    """A call of each tool with simple arguments, the turn that acts if there is one, then a text."""
    calls = [Call(each["function"]["name"], _arguments(each["function"])) for each in schemas]
    turns = [Turn("", (call,), index, "stop", _TOKENS_LEFT) for index, call in enumerate(calls)]
    return [*turns, *([acting] if acting else []), "I am done."]


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    properties = function.get("parameters", {}).get("properties", {})
    return {name: _value(schema) for name, schema in properties.items()}


def _value(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    return _VALUES.get(kind[0] if isinstance(kind, list) else str(kind), "a")


def hostile_turns() -> list[Turn]:
    """Turns without a call that a policy may write, from nothing to a megabyte."""
    texts = ("", " \n", "I do not know.", _HOSTILE, "a" * _ENDLESS, "<" * 10_000, f"<answer>{_HOSTILE}</answer>")
    return [Turn(text, (), 0, "length" if len(text) == _ENDLESS else "stop", 0) for text in texts]


def _wrong_calls(schemas: Sequence[Mapping[str, Any]]) -> Iterator[Turn]:
    """Turns with calls that cannot be read, of tools that are not there, and with arguments that do not fit."""
    calls = [
        Call("", None, "The call is no JSON."),
        Call("no_such_tool", {}),
        Call(_HOSTILE, {_HOSTILE: _HOSTILE}),
        Call("__init__", {}),
        Call("close", {}),
        Call("x" * _ENDLESS, {}),
    ]
    for schema in schemas:
        name, right = schema["function"]["name"], _arguments(schema["function"])
        calls += [Call(name, None), Call(name, {**right, "no_such_argument": 1})]
        calls += [Call(name, {**right, argument: wrong}) for argument in right for wrong in _WRONG_VALUES]
        calls += [Call(name, {key: value for key, value in right.items() if key != left_out}) for left_out in right]
    yield from (Turn("", (call,), 0, "stop", _TOKENS_LEFT) for call in calls)
    yield Turn("", tuple(calls[:3]), 0, "stop", _TOKENS_LEFT)
