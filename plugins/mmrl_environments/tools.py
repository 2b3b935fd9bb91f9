"""Plain functions as tools: ``environment: {tools: [my_tools.py:crop, my_package.search:search]}``.

A function has type hints and a docstring that describes each argument, as Google's style has it; the policy's template
shows both. It may be ``async``. It answers with a text, an image, several of these in a list, or anything that JSON
can hold. A call with other arguments than the hints say is answered with what is wrong, and so is ``ToolError``. Any
other exception is a failure of the environment, unless ``on_error: answer`` tells it to the policy.

The functions of an episode have no state of their own: where they need one, write a class (``environment: {class:
my_game.py:Game}``). A turn without a call ends the episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mmrl.errors import ConfigError
from mmrl.interfaces import Environment, PluginConfig, Tool, ToolError
from mmrl.types import Call, Prompt
from mmrl_environments.loading import check_tool, load

Name = Annotated[str, Field(min_length=1)]


class Tools(Environment):
    """Functions that the policy may call."""

    class Config(PluginConfig):
        tools: Annotated[tuple[Name, ...], Field(min_length=1)]
        """Functions: path/to/file.py:name or package.module:name."""
        on_error: Literal["fail", "answer"] = "fail"
        """When a function raises: fail makes the episode invalid, answer tells the policy the exception's message."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._tools: list[Tool] = []
        for target in config.tools:
            function = load(target, "function")
            if not callable(function) or isinstance(function, type):
                what = f"{target} is a {type(function).__name__}, and no function"
                raise ConfigError(what, where=target, remedy="for a class: environment: {class: file.py:Name}")
            check_tool(function, target)
            self._tools.append(function)
        names = [getattr(each, "__name__", "") for each in self._tools]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"several tools are called {', '.join(sorted(twice))}", where=", ".join(config.tools))

    def tools(self) -> Sequence[Tool]:
        return self._tools

    def reset(self, prompt: Prompt, seed: int) -> None:
        return None

    async def call(self, call: Call) -> Any:
        try:
            answer = super().call(call)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            if self.config.on_error == "fail":
                raise
            raise as_answer(error) from error


def as_answer(error: Exception) -> ToolError:
    """A tool's exception as the policy reads it.

    Raises:
        RuntimeError: It is no mistake of the policy's: the tool runs an event loop within the environment's.
    """
    if isinstance(error, RuntimeError) and "running event loop" in str(error):
        raise RuntimeError(f"{error}: write it as `async def`, and await instead of asyncio.run") from error
    return error if isinstance(error, ToolError) else ToolError(str(error) or type(error).__name__)
