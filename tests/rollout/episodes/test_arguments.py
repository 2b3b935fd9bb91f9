"""Calls with arguments of a wrong kind are the policy's mistakes, which never fail an environment."""

import asyncio

import pytest

from mmrl.interfaces import Environment, tool
from mmrl.types import Call, Turn


class Sums(Environment):
    def reset(self, prompt, seed):
        return None

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    @tool
    async def count(self, words: list[str]) -> int:
        """Count letters.

        Args:
            words: Some.
        """
        return sum(map(len, words))


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("add", {"a": 2, "b": 3}, "5"),
        ("add", {"a": "2"}, "3"),
        ("add", {"a": "two"}, "add: a: Input should be a valid integer, unable to parse string as an integer."),
        ("add", {"a": [1]}, "add: a: Input should be a valid integer."),
        ("add", {"a": None}, "add: a: Input should be a valid integer."),
        ("add", {}, "add: missing a required argument: 'a'."),
        ("add", {"a": 1, "c": 1}, "add: got an unexpected keyword argument 'c'."),
        ("count", {"words": ["ab", "c"]}, "3"),
        ("count", {"words": 7}, "count: words: Input should be a valid list."),
    ],
)
def test_a_tool_gets_what_its_hints_say_or_the_policy_is_told(name, arguments, answer):
    turn = Turn("", (Call(name, arguments),), 0, "stop", 9)
    observation = asyncio.run(Sums(Sums.Config()).run_calls(turn))
    assert observation.content == [answer] and not observation.done
