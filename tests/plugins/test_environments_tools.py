"""The environment `tools`: plain functions as tools."""

from __future__ import annotations

import asyncio

import pytest

from mmrl.errors import ConfigError
from mmrl.types import Call, Message, Observation, Prompt, Turn
from mmrl_environments.tools import Tools

FILE = '''\
import asyncio
import time
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import ToolError
from mmrl.types import Observation

CALLS = []

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second,
            which may be left out.
    """
    CALLS.append((a, b))
    return a + b

async def ask(question: str) -> dict:
    """Ask somebody.

    Args:
        question: What to ask.
    """
    await asyncio.sleep(0)
    if question == "?":
        raise ToolError("Ask more.")
    if question == "!":
        raise ValueError("no answer")
    return {"answer": question.upper(), "done": None}

def plot(sides: list[int]) -> list:
    """Plot something.

    Args:
        sides: Width and height.
    """
    return ["a plot", np.zeros((sides[1], sides[0], 3), np.uint8)]

def photo(form: str) -> list:
    """Show a file.

    Args:
        form: Its form.
    """
    file = b"\\x89PNG of a file"
    return ["a photo", {"bytes": file, "bytearray": bytearray(file), "memoryview": memoryview(file)}[form]]

def odd(kind: str) -> object:
    """Answer oddly.

    Args:
        kind: The kind.
    """
    circle = []
    circle.append(circle)
    return {"set": {1}, "object": {"deep": object()}, "circle": circle}[kind]

def numbers(kind: str) -> object:
    """Answer with numbers of numpy.

    Args:
        kind: The kind.
    """
    values = np.array([0.5, 2.0], np.float32)
    deep = {"a": values, "b": np.bool_(True)}
    return {"one": values[1], "list": [np.int64(3), "x"], "some": values, "deep": deep}[kind]

def slow(seconds: float) -> float:
    """Take long.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return seconds

def looping(a: int) -> str:
    """Run a loop.

    Args:
        a: A number.
    """
    asked = ask(str(a))
    try:
        return asyncio.run(asked)
    finally:
        asked.close()

def roll(times: Annotated[int, Field(ge=1, le=9)]) -> int:
    """Roll.

    Args:
        times: How often.
    """
    return times

def finish() -> Observation:
    """Finish."""
    return Observation("over", reward=2.0, done=True, info={"why": "asked"})

def bare(a, b: int):
    """Bare.

    Args:
        a: One.
        b: Two.
    """

def silent(a: int):
    pass

def secret(a: int, b: int):
    """Something.

    Args:
        a: One.

    Returns:
        b: Two.
    """

def many(*words: str):
    """Many.

    Args:
        words: Some.
    """

def strange(a: "Unheard"):
    """Strange.

    Args:
        a: One.
    """

NUMBER = 3
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(FILE)
    return path


def begin(file, *names, **options):
    tools = Tools(Tools.Config(tools=[f"{file}:{name}" for name in names], **options))
    tools.prepare()
    tools.reset(Prompt("p", (Message("user", "?"),)), 0)
    return tools


def ask(environment, *calls: Call) -> Observation:
    async def step() -> Observation:
        return await environment.step(Turn("", calls, 0, "stop", 100))

    return asyncio.run(step())


def test_functions_of_files_and_modules_answer_calls(file):
    tools = begin(file, "add", "ask", "plot", "finish")
    found = ask(tools, Call("add", {"a": 2}), Call("add", {"a": "3", "b": 4}), Call("ask", {"question": "why"}))
    assert found.content == ["3\n", "7\n", '{"answer": "WHY", "done": null}']
    assert not found.done and found.reward == 0
    text, image = ask(tools, Call("plot", {"sides": [5, 4]})).content
    assert text == "a plot" and image.shape == (4, 5, 3)
    found = ask(tools, Call("finish", {}))
    assert (found.content, found.reward, found.done, found.info) == (["over"], 2.0, True, {"why": "asked"})
    assert ask(tools).done


def test_calls_after_the_one_that_ends_the_episode_are_not_made(file):
    tools = begin(file, "add", "finish")
    found = ask(tools, Call("add", {"a": 1}), Call("finish", {}), Call("finish", {}), Call("add", {"a": 9}))
    assert (found.content, found.reward, found.done) == (["2\n", "over"], 2.0, True)


def test_calls_for_which_a_turn_has_no_time_are_told_to_the_policy(file):
    tools = begin(file, "slow")
    tools.timeout_s = 1.0
    found = ask(tools, *[Call("slow", {"seconds": 0.5})] * 9)
    late = "Not called: the calls of this turn took too long."
    assert found.content == ["0.5\n", "0.5\n", *[f"{late}\n"] * 6, late]


@pytest.mark.parametrize("on_error", ["fail", "answer"])
def test_an_event_loop_within_the_environments_is_a_failure_that_says_what_to_do(file, on_error):
    said = "running event loop" if on_error == "fail" else "write it as `async def`"
    with pytest.raises(RuntimeError, match=said):
        ask(begin(file, "looping", on_error=on_error), Call("looping", {"a": 1}))


def test_bounds_of_a_hint_hold(file):
    tools = begin(file, "roll")
    found = ask(tools, Call("roll", {"times": 9}), Call("roll", {"times": 10}))
    assert found.content == ["9\n", "roll: times: Input should be less than or equal to 9."]


@pytest.mark.parametrize(
    ("kind", "said"),
    [("one", "2.0"), ("list", '[3, "x"]'), ("some", "[0.5, 2.0]"), ("deep", '{"a": [0.5, 2.0], "b": true}')],
)
def test_numbers_of_numpy_are_text_and_no_images(file, kind, said):
    assert ask(begin(file, "numbers"), Call("numbers", {"kind": kind})).content == [said]


@pytest.mark.parametrize("form", ["bytes", "bytearray", "memoryview"])
def test_a_list_of_a_text_and_an_encoded_image_is_both(file, form):
    text, image = ask(begin(file, "photo"), Call("photo", {"form": form})).content
    assert text == "a photo" and bytes(image) == b"\x89PNG of a file"


@pytest.mark.parametrize(("kind", "said"), [("set", "a set: "), ("object", "a dict: .*object"), ("circle", "a list: ")])
def test_an_answer_that_is_none_fails_with_its_tool_its_type_and_what_is_possible(file, kind, said):
    with pytest.raises(TypeError, match=f"the tool 'odd' answers with {said}.*; possible: a text, an image") as caught:
        ask(begin(file, "odd"), Call("odd", {"kind": kind}))
    assert len(str(caught.value)) < 260


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call("add", {"a": "two"}), "add: a: Input should be a valid integer"),
        (Call("add", {"a": 1, "c": 2}), "unexpected keyword argument 'c'"),
        (Call("add", {}), "missing a required argument: 'a'"),
        (Call("ask", {"question": "?"}), "Ask more."),
        (Call("ask", {"question": 3}), "ask: question: "),
        (Call("plot", {"sides": "5"}), "plot: sides: "),
        (Call("bare", {}), "There is no tool 'bare'. Tools: add, ask, plot."),
        (Call("add", {"x" * 10**6: 1}), "add: "),
    ],
)
def test_a_call_that_does_not_fit_is_answered(file, call, said):
    (text,) = ask(begin(file, "add", "ask", "plot"), call).content
    assert said in text and len(text) < 400


def test_an_exception_fails_the_episode_or_is_answered(file):
    call = Call("ask", {"question": "!"})
    with pytest.raises(ValueError, match="no answer"):
        ask(begin(file, "ask"), call)
    assert ask(begin(file, "ask", on_error="answer"), call).content == ["no answer"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bare", "no type hints for a"),
        ("silent", "has no docstring"),
        ("secret", "does not describe b"),
        ("many", "which a call by names cannot give"),
        ("strange", "type hints of the tool .* cannot be read: name 'Unheard'"),
        ("NUMBER", "is a int, and no function"),
        ("ad", "has no function ad"),
    ],
)
def test_a_function_that_can_be_no_tool_is_refused_before_the_start(file, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        begin(file, name)
    assert caught.value.where.endswith(f"my_tools.py:{name}") and caught.value.remedy + caught.value.possible


def test_what_cannot_be_found_is_refused(file, tmp_path):
    for target, message in (
        ("nowhere.py:f", "cannot be read: No such file"),
        ("no_such_package:f", "No module named 'no_such_package'"),
        ("nothing", "names no function"),
        (f"{file}:add/../x", "names no function"),
    ):
        with pytest.raises(ConfigError, match=message):
            Tools(Tools.Config(tools=[target]))
    with pytest.raises(ConfigError, match="several tools are called add"):
        begin(file, "add", "add")
    (tmp_path / "broken.py").write_text("def f(:")
    with pytest.raises(ConfigError, match="cannot be imported: SyntaxError"):
        Tools(Tools.Config(tools=[f"{tmp_path / 'broken.py'}:f"]))


def test_a_function_of_a_module_is_found_on_the_path(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    tools = Tools(Tools.Config(tools=["my_tools:add"]))
    assert ask(tools, Call("add", {"a": 5})).content == ["6"]


def test_functions_of_a_file_share_its_module_and_have_schemas(file):
    from transformers.utils import get_json_schema

    tools = begin(file, "add", "ask").tools()
    schema = get_json_schema(tools[0])["function"]
    assert schema["parameters"]["required"] == ["a"]
    assert schema["parameters"]["properties"]["b"]["type"] == "integer"
    assert get_json_schema(tools[1])["function"]["name"] == "ask"
    assert tools[0].__globals__ is tools[1].__globals__
