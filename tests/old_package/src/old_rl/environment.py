"""A tool that says what it is told."""

from __future__ import annotations

from mmrl.interfaces import Environment, PluginConfig, ToolError, tool
from mmrl.types import Prompt


class OldEcho(Environment):
    components = ("said",)

    class Config(PluginConfig):
        pass

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._said = 0

    @tool
    def say(self, text: str) -> str:
        """Say a text.

        Args:
            text: The text.
        """
        if not text:
            raise ToolError("There is no text.")
        self._said += 1
        return text

    def score(self) -> dict[str, float]:
        return {"said": float(self._said)}
