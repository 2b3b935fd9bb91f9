"""The share of the row's tests that the program of a completion passes, or with ``all_or_nothing`` 1 or 0.

The program is the last closed code fence outside of thinking, else what is in answer tags. Tests are in
``tests_column`` (by default the reference answer), as a value or as JSON: pairs of standard input and expected output,
``{"inputs": [...], "outputs": [...]}`` or ``[{"input": ..., "output": ...}, ...]``, where lines are compared without
spaces at their ends; or Python code, or a list of pieces of it, that is run after the program and fails by raising,
such as ``assert f(2) == 4``. A rollout without tests, or with code that does not compile, is unscorable.

Code that a model wrote runs in a ``sandbox``, chosen by name. The one that ships, ``local``, is a process with resource
limits and NO security boundary: the program runs as the user. It therefore starts only with
``i_know_local_is_no_security_boundary: true``. A sandbox of one's own is ``package.module:Class`` (see
``mmrl_rewards.sandboxes``).

Pairs are compared outside the sandbox. Code that tests is run by a driver, in a child that has defined the program by
then and has no other way to know the tests: they are in no file, and neither they nor the mark of success are in the
program's source. One gap remains: tests and program share an interpreter, so a program that looks for its driver, or
whose values are equal to everything, can still pass. Use pairs if models search for such ways.

Each test has ``time_limit_s``; the first that does not end in time ends the row's tests, and the others count as
failed. The reward's ``timeout_s`` must cover ``max_tests`` tests that take their full time. Machines differ in speed:
choose a limit that right programs stay far below.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from mmrl.interfaces import Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import last_tagged
from mmrl_rewards.sandboxes import Outcome, Sandbox, SandboxOptions
from mmrl_rewards.thinking import reply_of

_FENCE = re.compile(r"^[^\S\n]*```[ \t]*(\w*)[^\n]*$", re.MULTILINE)
Test = tuple[str, str, str | None]
"""Code to run after the program, standard input, expected output (None: any)."""


class Code(Reward):
    """Tests of a program."""

    class Config(SandboxOptions):
        tests_column: str | None = None
        """Column with the tests; null is the reference answer."""
        all_or_nothing: bool = False
        """True if one failed test makes the score 0."""
        time_limit_s: float = Field(default=4.0, gt=0, le=3600)
        """Seconds of each test."""
        max_tests: int = Field(default=20, gt=0)
        """Most tests of a row that are run, from the first on."""
        max_characters: int = Field(default=50_000, gt=0)
        """Longer programs score 0."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._sandbox: Sandbox = config.open_sandbox()

    def score_one(self, rollout: Rollout) -> Score | None:
        column = self.config.tests_column
        tests = read_tests(rollout.answer if column is None else rollout.columns.get(column))[: self.config.max_tests]
        if not tests:
            return None
        program = _program(reply_of(rollout))
        if program is None or len(program) > self.config.max_characters:
            return 0.0
        passed = 0
        for test in tests:
            outcome = self._run(program, test)
            passed += outcome.passed
            if outcome.timed_out:
                break
        share = passed / len(tests)
        return float(share == 1) if self.config.all_or_nothing else share

    def _run(self, program: str, test: Test) -> Outcome:
        """Run code that tests. It passes only if its end is reached; the driver then prints a mark."""
        tests, stdin, expected = test
        mark = f"passed {secrets.token_hex(8)}"
        if expected is None:
            program, stdin = _DRIVER, json.dumps([program, tests, mark, secrets.token_hex(8)])
        outcome = self._sandbox.run(program, stdin, self.config.time_limit_s)
        printed = _lines(outcome.output)
        right = printed[-1:] == [mark] if expected is None else printed == _lines(expected)
        return Outcome(outcome.passed and right, outcome.output, outcome.timed_out)


_DRIVER = r"""
import ctypes, json, os, sys, types

orders, give = os.pipe()
told, tell = os.pipe()
child = os.fork()  # before anything is read: the child's memory has neither tests nor mark
if not child:
    os.close(give), os.close(told)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    orders = os.fdopen(orders)
    program = json.loads(orders.readline())
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    exec(compile(program, "program.py", "exec"), module.__dict__)
    os.write(tell, b"defined\n")
    tests, word = json.loads(orders.readline())
    exec(compile(tests, "tests.py", "exec", optimize=0), module.__dict__)
    os.write(tell, word.encode() + b"\n")
    os._exit(0)
os.close(orders), os.close(tell)
try:
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: the child cannot read this process's memory or files
except (OSError, AttributeError):
    pass
program, tests, mark, word = json.load(sys.stdin)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor can one that is run as root reopen what was read
try:
    told = os.fdopen(told)
    with os.fdopen(give, "w") as give:
        print(json.dumps(program), file=give, flush=True)
        if told.readline() != "defined\n":
            sys.exit(1)
        print(json.dumps([tests, word]), file=give, flush=True)
        if told.readline() != word + "\n":
            sys.exit(1)
except BrokenPipeError:
    os._exit(1)
print(mark)
"""
"""The driver that runs code that tests. It reads the program, the tests, the mark of success and the child's word."""


def read_tests(value: Any) -> list[Test]:
    """The tests that a cell holds; empty if it holds none in a known form."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    match value:
        case str():
            return [(value, "", None)] if value.strip() and _compiles(value) else []
        case Mapping() if isinstance(value.get("inputs"), Sequence) and isinstance(value.get("outputs"), Sequence):
            pairs = list(zip(value["inputs"], value["outputs"], strict=False))
            return [("", _text(given), _text(wanted)) for given, wanted in pairs]
        case Mapping() if "input" in value and "output" in value:
            return [("", _text(value["input"]), _text(value["output"]))]
        case list() | tuple():
            return [test for item in value for test in read_tests(item)]
    return []


def _compiles(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _program(text: str) -> str | None:
    """The content of the last closed code fence, else of the last answer tags."""
    fences = list(_FENCE.finditer(text))
    closed = fences[: len(fences) // 2 * 2]
    if closed:
        return text[closed[-2].end() : closed[-1].start()].strip("\n")
    return last_tagged(text)
