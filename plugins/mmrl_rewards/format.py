"""1 for a completion that has the form asked for, else 0; the form is a regular expression, the gold plays no part.

Accepted: completions that match ``pattern`` as a whole, ``.`` matching line breaks too. The default asks for a box at
the end. A pattern that backtracks without end is stopped by the reward's ``timeout_s``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import field_validator

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score


class Format(Reward):
    """Match with a regular expression."""

    class Config(PluginConfig):
        pattern: str = r".*\\boxed\{.+\}[\s.$]*"
        r"""What the whole completion must match, such as ``<think>.*</think>.*\\boxed\{.+\}\s*``."""

        @field_validator("pattern")
        @classmethod
        def _compiles(cls, pattern: str) -> str:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
            return pattern

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pattern = re.compile(config.pattern, re.DOTALL)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return [float(self._pattern.fullmatch(rollout.text) is not None) for rollout in rollouts]
