"""A calculator as a tool: numbers, brackets and + - * / ** //, %.

Nothing is run: the expression is parsed, and its tree is computed step by step. A turn without a call ends the episode.
``calls`` is the number of times that it was asked, as a component; give it a weight to make calls dear, such as
``weights: {calls: -0.01}``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field

from mmrl.environments import Environment, ToolError, tool
from mmrl.interfaces import PluginConfig
from mmrl.types import Prompt

_TWO: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST = 1e100


class Calculator(Environment):
    components = ("calls",)

    class Config(PluginConfig):
        max_characters: Annotated[int, Field(ge=1, le=10_000)] = 200
        """Longer expressions are refused."""

    config: Config

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._calls = 0

    @tool
    def calculate(self, expression: str) -> str:
        """Calculate an expression.

        Args:
            expression: Such as (3 + 4) * 2.
        """
        self._calls += 1
        if not isinstance(expression, str) or len(expression) > self.config.max_characters:
            raise ToolError(f"An expression is a text of up to {self.config.max_characters} characters.")
        try:
            return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            raise ToolError(f"This cannot be calculated: {error!s:.100}.") from error

    def score(self) -> dict[str, float]:
        return {"calls": float(self._calls)}


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("only numbers")
        case ast.Constant(value=int() | float() as number):
            return _bounded(float(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            return _bounded(_TWO[type(op)](_value(left), _value(right)))
    raise ValueError("only numbers, brackets and + - * / ** // %")


def _bounded(number: float) -> float:
    if isinstance(number, complex) or not abs(number) < _LARGEST:
        raise ValueError("the number is too large, or none")
    return number
