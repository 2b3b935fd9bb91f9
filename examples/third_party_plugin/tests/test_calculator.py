"""The calculator, by hand, and the rules of environments."""

from __future__ import annotations

import asyncio

import pytest

from mmrl.testing import check_environment
from mmrl.types import Call, Message, Prompt, Turn
from mmrl_lite_ppo.calculator import Calculator


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("(3 + 4) * 2", "14"),
        (" 1 / 3", "0.333333333333"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 0", "This cannot be calculated: float division by zero."),
        ("9 ** 9 ** 9", "This cannot be calculated: "),
        ("(-8) ** 0.5", "This cannot be calculated: the number is too large, or none."),
        ("__import__('os').getcwd()", "This cannot be calculated: only numbers"),
        ("(" * 150, "This cannot be calculated: "),
        ("1" * 201, "An expression is a text of up to 200 characters."),
        ("True", "This cannot be calculated: only numbers."),
    ],
)
def test_an_expression_is_calculated_or_refused(expression: str, answer: str) -> None:
    calculator = Calculator(Calculator.Config())
    calculator.reset(Prompt("p", (Message("user", "?"),)), 0)
    turn = Turn("", (Call("calculate", {"expression": expression}),), 0, "stop", 100)
    found = asyncio.run(calculator.run_calls(turn))
    assert found.content[0].startswith(answer) and not found.done
    assert calculator.score() == {"calls": 1.0}


def test_it_keeps_the_rules_of_environments() -> None:
    check_environment("calculator")
