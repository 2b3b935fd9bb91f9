"""A class that was written for TRL's ``environment_factory``: it runs as it is.

    environment: {class: my_game.py:Game}

The convention: the class is made without arguments, once for each episode. ``reset(**row)`` begins it and gets the
row's columns by name; what it returns, a text or content blocks or None, is read at the end of the prompt. Every public
method besides ``reset`` and ``get_reward`` is a tool, sync or async, with type hints and a docstring that describes its
arguments. It answers with a list of content blocks, or with anything else, which is read as ``str``. An exception is
answered with its message. The episode ends with a turn without calls.

``get_reward()``, sync or async, is the episode's score: the component ``reward``. Classes without it keep their reward
somewhere on themselves for a reward function, so ``reward`` names either the attribute, such as ``reward: reward``, or
the function itself, such as ``reward: my_game.py:reward_func``. The function is called with
``environments=[the object]`` and each column as a list of one; prompts and completions are not there.

Further than TRL: ``done: done`` names an attribute that is true when the game is over, which ends the episode then.
``reset`` gets the episode's ``seed`` if it has a parameter of that name and the row has no such column. Columns that it
has no parameters for are left out. ``random`` and ``numpy.random`` are seeded before each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from mmrl.errors import ConfigError
from mmrl.interfaces import Environment, PluginConfig, Tool
from mmrl.interfaces.environments import is_content
from mmrl.types import Call, Observation, Prompt, Score, Turn
from mmrl_environments.loading import check_tool, load
from mmrl_environments.pictures import full_size
from mmrl_environments.tools import as_answer

_REWARD = "reward"
_NO_TOOLS = frozenset({"reset", "get_reward"})


class TRLClass(Environment):
    """Plays an object of the class in each episode."""

    class Config(PluginConfig):
        model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

        target: Annotated[str, Field(alias="class", min_length=1)]
        """The class: path/to/file.py:Name or package.module:Name."""
        reward: Annotated[str, Field(min_length=1)] | None = None
        """Attribute, or function of TRL's (file.py:name), that has the score; null is get_reward, if there is one."""
        done: Annotated[str, Field(pattern=r"[A-Za-z]\w*")] | None = None
        """Attribute that is true when the episode is over; null: a turn without calls ends it."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._class = load(config.target, "class")
        if not isinstance(self._class, type):
            what = f"{config.target} is a {type(self._class).__name__}, and no class"
            raise ConfigError(what, where=config.target, remedy="name a class, or for functions: {tools: [...]}")
        if not callable(getattr(self._class, "reset", None)):
            what = f"the class {config.target} has no method reset"
            raise ConfigError(what, where=config.target, remedy="def reset(self, **row) -> str | None")
        self._names = _tool_names(self._class)
        for name in self._names:
            check_tool(getattr(self._class, name), f"{config.target}.{name}", is_method=True)
        self._reward: Callable[..., Any] | None = None
        if config.reward is not None and ":" in config.reward:
            self._reward = load(config.reward, "function")
        scores = config.reward is not None or hasattr(self._class, "get_reward")
        self.components = (_REWARD,) if scores else ()
        self._object: Any = None
        self._prompt: Prompt | None = None

    def tools(self) -> Sequence[Tool]:
        made = self._made() if self._object is None else self._object
        return [getattr(made, name) for name in self._names]

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        self._object, self._prompt = self._made(), prompt
        parameters = inspect.signature(self._object.reset).parameters
        row = {"seed": seed, **_row(prompt)} if "seed" in parameters else _row(prompt)
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        found = self._object.reset(**row)
        found = await found if inspect.isawaitable(found) else found
        return None if found is None else Observation(_content(found), role="user")

    async def step(self, turn: Turn) -> Observation:
        return await self.run_calls(turn)

    async def call(self, call: Call) -> Any:
        try:
            answer = super().call(call)
            answer = await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            raise as_answer(error) from error
        is_over = self.config.done is not None and bool(getattr(self._object, self.config.done))
        return Observation(_content(answer), done=is_over)

    async def score(self) -> Mapping[str, Score | None]:
        if not self.components:
            return {}
        assert self._prompt is not None
        if self._reward is not None:
            columns = {name: [value] for name, value in _row(self._prompt).items()}
            found = self._reward(environments=[self._object], **columns)
            found = await found if inspect.isawaitable(found) else found
            (value,) = found
        elif self.config.reward is not None:
            value = getattr(self._object, self.config.reward)
        else:
            value = self._object.get_reward()
            value = await value if inspect.isawaitable(value) else value
        return {_REWARD: None if value is None else float(value)}

    def _made(self) -> Any:
        try:
            return self._class()
        except TypeError as error:
            what = f"the class {self.config.target} cannot be made without arguments: {error}"
            raise ConfigError(what, where=self.config.target, remedy="give __init__ defaults") from error


def _tool_names(cls: type) -> list[str]:
    """Names of the methods that are tools, in alphabetical order, as TRL has them."""
    methods = inspect.getmembers(cls, inspect.isroutine)
    return [
        name
        for name, _ in methods
        if not name.startswith("_") and name not in _NO_TOOLS
        if not isinstance(inspect.getattr_static(cls, name), staticmethod)
    ]


def _row(prompt: Prompt) -> dict[str, Any]:
    """The row as TRL gives it: its columns, the conversation as ``prompt``, and decoded ``images``."""
    row = dict(prompt.columns)
    row.setdefault("prompt", [{"role": each.role, "content": each.content} for each in prompt.messages])
    if prompt.images:
        row.setdefault("images", [full_size(image) for image in prompt.images])
    return row


def _content(answer: Any) -> Any:
    """An answer for the policy: content blocks and images as they are, anything else as text."""
    return answer if isinstance(answer, list) and any(map(is_content, answer)) else str(answer)
