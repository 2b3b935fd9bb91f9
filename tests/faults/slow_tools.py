"""An environment of the fake engine's runs, whose tool takes another time at each call and in each run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random, SystemRandom
from typing import Any

from mmrl import Environment, Observation, tool
from mmrl.interfaces import PluginConfig
from mmrl.types import Call, Prompt, Turn

LETTERS = "abcdefghijklmno"


class SlowTools(Environment):
    """A hidden letter: each turn is a guess, and the tool tells where to look."""

    class Config(PluginConfig):
        longest_s: float = 0.3
        """A call of the tool takes from 0 s to this."""

    components = ("reached",)
    config: Config

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        random = Random(seed)
        self._hidden, self._reached, self._guesses = random.choice(LETTERS), 0.0, ""
        return Observation(f"One of {len(prompt.messages)} puzzles, number {random.randrange(100)}.", role="user")

    @tool
    async def look(self, guesses: str) -> str:
        """Tell where the hidden letter is.

        Args:
            guesses: Letters to compare it with.
        """
        await asyncio.sleep(SystemRandom().uniform(0.0, self.config.longest_s))
        self._guesses += guesses
        return " ".join("early" if each > self._hidden else "late" for each in self._guesses) or "write a letter"

    async def step(self, turn: Turn) -> Observation:
        seen = await self.call(Call("look", {"guesses": turn.text}))
        self._reached = float(self._hidden in turn.text)
        reward = sum(0.1 for each in turn.text if each < self._hidden) - 0.05 * turn.index
        return Observation(seen, reward, done=bool(self._reached), info={"guesses": self._guesses})

    def score(self) -> Mapping[str, Any]:
        return {"reached": self._reached}
