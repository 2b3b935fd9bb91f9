"""Calls with arguments of a wrong kind are the policy's mistakes, which never fail an environment."""

import asyncio

import pytest

from mmrl.interfaces import Arguments, Environment, ToolError, tool
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


@pytest.mark.parametrize("order", [("a", "b", "c", "d"), ("d", "c", "b", "a")])
def test_the_first_wrong_argument_of_the_call_is_named(order):
    """Sets of names have another order in each process."""

    def four(a: int, b: int, c: int, d: int) -> None: ...

    with pytest.raises(ToolError, match=f"four: {order[0]}: "):
        Arguments(four).fit(dict.fromkeys(order, "x"))


def test_hints_are_read_once_for_all_objects_of_a_class_and_calls_stay_their_own(monkeypatch):
    made = []
    original = Arguments.__init__
    monkeypatch.setattr(Arguments, "__init__", lambda self, function: made.append(1) or original(self, function))

    class Counts(Environment):
        def reset(self, prompt, seed):
            self.total = 0

        @tool
        def more(self, by: int) -> int:
            """Count.

            Args:
                by: How much.
            """
            self.total += by
            return self.total

    one, other = Counts(Counts.Config()), Counts(Counts.Config())
    for each in (one, other):
        each.reset(None, 0)
    assert [each.call(Call("more", {"by": "2"})) for each in (one, other, one)] == [2, 2, 4]
    assert len(made) == 1
