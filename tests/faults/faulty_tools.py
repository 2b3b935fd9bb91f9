"""An environment of the fake engine's runs whose tool hangs in one call of a hundred, and crashes in another one."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Literal

from mmrl import Environment, Observation, Prompt, Turn


def fate(prompt: str, index: int, text: str) -> Literal["hangs", "crashes", ""]:
    """The end of a turn's call, by nothing but the turn; empty if it is answered."""
    drawn = hashlib.sha256(f"{prompt} {index} {text}".encode()).digest()
    chance = int.from_bytes(drawn[:6], "big") / 2**48
    return "hangs" if chance < 0.01 else "crashes" if chance < 0.02 else ""


class FaultyTools(Environment):
    """Answers how many letters were written so far."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._prompt, self._letters = prompt.id, 0

    def step(self, turn: Turn) -> Observation:
        match fate(self._prompt, turn.index, turn.text):
            case "hangs":
                time.sleep(3600)
            case "crashes":
                os._exit(9)
        self._letters += len(turn.text)
        return Observation(f"{self._letters} letters", 0.1 * turn.text.count("a"), role="user")
