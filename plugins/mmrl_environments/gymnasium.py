"""Any environment of gymnasium, read as texts or as rendered images.

    environment: {name: gymnasium, id: FrozenLake-v1, kwargs: {is_slippery: false}, render: true,
                  actions: [left, down, right, up], action: "<answer>(.*?)</answer>", penalty: -0.1}

Each episode makes one of its own, ``gymnasium.make(id, **kwargs)``, and resets it with the prompt's seed. With
``kwargs_column`` a row of the dataset has further keywords, as a mapping or as JSON, so that prompts differ, such as
``{"desc": ["SFF", "HFF", "FFG"]}``. The policy first reads the state at the end of its prompt.

``render: true`` shows frames (``rgb_array``), ``image_side`` their longest side; else the policy reads the observation
as a text. An action is a word of ``actions``, which are in the order of their numbers, or a number; where the actions
are no plain numbers, it is a JSON list of numbers. It is the argument of the tool ``act``, or, with the pattern
``action``, a part of the text; the last one counts. What cannot be read as an action is answered with those that can,
and costs ``penalty``; the game does not go on meanwhile.

Rewards are the environment's own, and the episode is over when it terminates or truncates. Nothing needs a display.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, JsonValue

from mmrl.errors import ConfigError, DataError
from mmrl.interfaces import Environment, PluginConfig, Tool
from mmrl.types import Call, Observation, Prompt, Turn
from mmrl_environments.actions import ActionPattern, last_action, text_of

_INSTALL = "pip install 'mmrl-train[gymnasium]'"
_HEADLESS = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
_LONGEST = 2000
"""Characters of an action's text."""


class Gymnasium(Environment):
    """Plays an environment of gymnasium."""

    class Config(PluginConfig):
        id: Annotated[str, Field(min_length=1)]
        """Its registered name, such as FrozenLake-v1, or module:Name-v0."""
        kwargs: dict[str, JsonValue] = Field(default_factory=dict)
        """Keywords of gymnasium.make."""
        kwargs_column: str | None = None
        """Column with further keywords of a row, a mapping or JSON; they win."""
        render: bool = False
        """True shows frames; false tells observations as text."""
        image_side: Annotated[int, Field(ge=1, le=4096)] | None = None
        """Longest side of a frame in pixels; null is the environment's."""
        actions: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
        """Words for the actions, in the order of their numbers; null are the numbers."""
        action: ActionPattern | None = None
        """Regular expression whose group is an action, instead of calls of the tool act."""
        penalty: Annotated[float, Field(le=0, ge=-1e6)] = 0.0
        """Reward of a turn without an action that can be read."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._game: Any = None
        self._space: Any = None
        _check_id(config.id)

    def prepare(self) -> None:
        game = self._make({})
        try:
            self._space = game.action_space
            _check_space(self._space, self.config)
        finally:
            game.close()

    def example(self) -> str:
        space = self._space
        if self.config.action is None or space is None:
            return ""
        return text_of(self.config.action, self.config.actions[0] if self.config.actions else _first(space))

    def tools(self) -> Sequence[Tool]:
        if self.config.action is not None:
            return []
        if self._space is None:
            self.prepare()
        value: dict[str, Any] = {"type": "string", "description": self._forms()}
        if self.config.actions:
            value["enum"] = list(self.config.actions)
        parameters = {"type": "object", "properties": {"action": value}, "required": ["action"]}
        function = {"name": "act", "description": "Take an action.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self._game = self._make(self._row_kwargs(prompt))
        self._space = self._game.action_space
        state, _ = self._game.reset(seed=seed % 2**31)
        return Observation(self._shown(state), role="user")

    async def step(self, turn: Turn) -> Observation:
        if self.config.action is None:
            return await self.run_calls(turn) if turn.calls else self._unreadable("user")
        written = last_action(self.config.action, turn.text)
        return self._act(written, "user")

    def call(self, call: Call) -> Any:
        if call.name != "act":
            return self._unreadable("tool")
        given = (call.arguments or {}).get("action")
        return self._act(given if isinstance(given, str) or given is None else json.dumps(given), "tool")

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None

    def _act(self, written: str | None, role: Any) -> Observation:
        action = None if written is None else self._read(written[:_LONGEST].strip())
        if action is None:
            return self._unreadable(role)
        state, reward, terminated, truncated, _ = self._game.step(action)
        is_over = bool(terminated or truncated)
        told = action.tolist() if isinstance(action, np.ndarray | np.generic) else action
        return Observation(self._shown(state), float(reward), is_over, role, info={"action": told})

    def _unreadable(self, role: Any) -> Observation:
        text = f"This is no action. {self._forms()}"
        return Observation(text, self.config.penalty, role=role, info={"action": None})

    def _read(self, written: str) -> Any:
        """The action that a text names; None if it names none."""
        space, spaces = self._space, _spaces()
        if isinstance(space, spaces.Text):
            return written if space.contains(written) else None
        if isinstance(space, spaces.Discrete):
            names = [name.casefold() for name in self.config.actions or ()]
            if written.casefold() in names:
                return np.int64(space.start) + names.index(written.casefold())
            number = _numbers(written)
            action: Any = np.int64(number) if type(number) is int and abs(number) < 2**62 else None
        else:
            numbers = _numbers(written)
            try:
                with np.errstate(over="ignore"):
                    action = np.array(numbers, space.dtype) if isinstance(numbers, list) else None
            except (TypeError, ValueError, OverflowError):
                return None
        if action is None or not np.isfinite(action).all():  # a Box without bounds contains infinity
            return None
        return action if space.contains(action) else None

    def _forms(self) -> str:
        """The actions that there are, for the policy."""
        space, spaces = self._space, _spaces()
        if self.config.actions:
            return f"Actions: {', '.join(self.config.actions)}."
        if isinstance(space, spaces.Discrete):
            return f"Actions: whole numbers from {space.start} to {space.start + space.n - 1}."
        if isinstance(space, spaces.Text):
            return f"Actions: texts of {space.min_length} to {space.max_length} characters."
        shape = "x".join(map(str, space.shape))
        if isinstance(space, spaces.Box):
            return f"Actions: a JSON list of {shape} numbers from {_range(space)}."
        return f"Actions: a JSON list of {shape} whole numbers."

    def _make(self, further: Mapping[str, Any]) -> Any:
        import gymnasium

        for name, value in _HEADLESS.items():
            os.environ.setdefault(name, value)
        keywords = {**self.config.kwargs, **further, "render_mode": "rgb_array" if self.config.render else None}
        try:
            return gymnasium.make(self.config.id, **keywords)
        except Exception as error:
            what = f"gymnasium cannot make {self.config.id}: {type(error).__name__}: {error}"
            if isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled):
                raise ConfigError(what, where="environment.id", remedy="install what it needs") from error
            where = f"environment.kwargs: {keywords}"
            raise ConfigError(what, where=where[:300], remedy="give it the keywords that it takes") from error

    def _row_kwargs(self, prompt: Prompt) -> dict[str, Any]:
        column = self.config.kwargs_column
        if column is None:
            return {}
        value = prompt.columns.get(column)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                value = None
        if not isinstance(value, Mapping):
            what = f"the column {column} has no mapping, nor JSON of one: {prompt.columns.get(column)!r:.80}"
            raise DataError(what, where=f"row {prompt.id}", remedy='write such as {"desc": ["SF", "FG"]}')
        return {str(name): _plain(item) for name, item in value.items() if item is not None}

    def _shown(self, state: Any) -> Any:
        if not self.config.render:
            return _text(state)
        return self._frame(self._game.render())

    def _frame(self, frame: Any) -> Any:
        from PIL import Image
        from PIL.Image import Resampling

        image = Image.fromarray(np.asarray(frame, np.uint8))
        side = self.config.image_side
        if side is None or max(image.size) == side:
            return image
        width, height = (max(1, round(each * side / max(image.size))) for each in image.size)
        return image.resize((width, height), Resampling.BOX if side < max(image.size) else Resampling.BICUBIC)


def _spaces() -> Any:
    import gymnasium

    return gymnasium.spaces


def _check_id(name: str) -> None:
    try:
        import gymnasium
    except ImportError as error:
        what = "the environment gymnasium needs the package gymnasium"
        raise ConfigError(what, where="environment: gymnasium", remedy=_INSTALL) from error
    module, _, registered = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(registered)
    except ImportError as error:
        what = f"the module of {name!r} cannot be imported: {error}"
        raise ConfigError(what, where="environment.id", remedy="install its package") from error
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(registered, gymnasium.registry, n=3, cutoff=0.5)
        raise ConfigError(
            f"gymnasium has no environment {name!r}",
            where="environment.id",
            possible=", ".join(near) or "the names that gymnasium.pprint_registry() prints",
            remedy=f"did you mean {near[0]}?" if near else "name the module that registers it too: module:Name-v0",
        ) from error


def _check_space(space: Any, config: Gymnasium.Config) -> None:
    """Raises ConfigError if no text can name an action, or the words are not as many as the actions."""
    spaces = _spaces()
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box | spaces.Text):
        what = f"the actions of {config.id} are {space}, which a text cannot name"
        raise ConfigError(what, where="environment.id", possible="Discrete, MultiDiscrete, MultiBinary, Box, Text")
    if config.actions is None:
        return
    if not isinstance(space, spaces.Discrete):
        what = f"the actions of {config.id} are {space}, and have no words"
        raise ConfigError(what, where="environment.actions", remedy="leave it out")
    if len(config.actions) != space.n or len({name.casefold() for name in config.actions}) != space.n:
        what = f"{config.id} has {space.n} actions, and there are {len(config.actions)} words for them"
        raise ConfigError(what, where="environment.actions", possible=f"{space.n} different words")


def _first(space: Any) -> str:
    """An action of the space, as it is written."""
    spaces = _spaces()
    if isinstance(space, spaces.Text):
        return str(next(iter(space.character_list)) * max(space.min_length, 1))
    if isinstance(space, spaces.Discrete):
        return str(space.start)
    if isinstance(space, spaces.Box):
        middle = np.clip(np.zeros(space.shape), space.low, space.high)
        return json.dumps(middle.astype(space.dtype).tolist())
    start = space.start if isinstance(space, spaces.MultiDiscrete) else np.zeros(space.shape, np.int64)
    return json.dumps(start.tolist())


def _numbers(written: str) -> Any:
    """The JSON value of a text; None if it is none."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


def _range(space: Any) -> str:
    low, high = float(space.low.min()), float(space.high.max())
    return f"{low:g} to {high:g}" if math.isfinite(low) and math.isfinite(high) else "any"


def _text(state: Any) -> str:
    """An observation as text: JSON where it can be."""
    return state if isinstance(state, str) else json.dumps(_plain(state), ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """Numpy unpacked, tuples as lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
