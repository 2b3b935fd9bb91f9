"""A number to find: the policy guesses, and reads whether it is higher or lower."""

from __future__ import annotations

import random
from typing import Annotated

from pydantic import Field

from mmrl.environments import Environment, ToolError, tool
from mmrl.interfaces import PluginConfig
from mmrl.types import Observation, Prompt


class HigherLower(Environment):
    """The plugin that a config names ``new_plugin``."""

    components = ("guesses",)

    class Config(PluginConfig):
        highest: Annotated[int, Field(ge=2)] = 100
        """The number is from 1 to it."""

    config: Config

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self._number, self._guesses = random.Random(seed).randint(1, self.config.highest), 0
        return Observation(f"Find a number from 1 to {self.config.highest}.")

    @tool
    def guess(self, number: int) -> Observation:
        """Guess the number.

        Args:
            number: The guess.
        """
        if not isinstance(number, int):  # arguments are model output
            raise ToolError("number is a whole number.")
        self._guesses += 1
        if number == self._number:
            return Observation("Found.", reward=1.0, done=True)
        return Observation("It is higher." if number < self._number else "It is lower.")

    def score(self) -> dict[str, float]:
        return {"guesses": float(self._guesses)}
