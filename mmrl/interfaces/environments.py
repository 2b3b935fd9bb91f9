"""The interface of environments: plugins that answer the policy's turns.

    [project.entry-points."mmrl.environments"]
    guess = "my_package.guess:Guess"

Each episode has an object of its own. It lives in a worker process, which may be killed and replaced at any time: an
episode of that process is then played again, from its seed and its recorded turns.
"""

from __future__ import annotations

import inspect
import json
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from mmrl.interfaces.arguments import Arguments, ToolError
from mmrl.interfaces.plugins import Plugin
from mmrl.types import Call, Observation, Prompt, Score, Turn

Tool = Callable[..., Any] | dict[str, Any]
"""A function with type hints and a docstring that describes its arguments, as Google's style has them; or a JSON schema
of OpenAI's form, whose calls ``Environment.call`` answers."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def tool(method: _Method) -> _Method:
    """Mark a method of an environment as a tool."""
    method.__mmrl_tool__ = True  # type: ignore[attr-defined]
    return method


class Environment(Plugin):
    """Answers the policy's turns.

    ``prepare`` is called on one object in each worker, and each episode begins with a shallow copy of that object: what
    ``prepare`` sets on ``self`` is shared, what an episode sets is its own.

    Attributes:
        timeout_s: Seconds that each call of a method may take; ``environment.timeout_s`` of the config wins, and is set
            before ``prepare``.
        components: Names of what ``score`` answers; they may follow from the options.
        repeatable: True if an episode that is played again, from its seed and the turns of the policy, is answered as
            it was. False for one that depends on what lies outside, such as a server with a memory; it may follow from
            the options. An algorithm that branches needs such episodes.
    """

    timeout_s: float = 60.0
    components: tuple[str, ...] = ()
    repeatable: bool = True

    def prepare(self) -> None:
        """Load large things, once in each worker; ``timeout_s`` does not count meanwhile."""
        return

    def tools(self) -> Sequence[Tool]:
        """The tools that the policy may call, the same in every episode; by default the methods marked ``@tool``."""
        found = (getattr(self, name) for name in dir(type(self)) if hasattr(getattr(type(self), name), "__mmrl_tool__"))
        return [method for method in found if callable(method)]

    def example(self) -> str:
        """A turn that acts, for environments whose actions are texts; ``mmrl check`` plays it. By default, none."""
        return ""

    @abstractmethod
    def reset(self, prompt: Prompt, seed: int) -> Observation | Awaitable[Observation | None] | None:
        """Begin an episode. What it returns is read at the end of the prompt's last message, before the first turn.

        Episodes of one prompt share it, so they must begin alike: all that is random follows from the seed, which they
        share too.

        Args:
            prompt: The dataset's row; its images are as the dataset has them, at full resolution.
            seed: From the run's seed, the epoch and the prompt.
        """

    def step(self, turn: Turn) -> Observation | Awaitable[Observation]:
        """Answer a turn; by default, run its calls. A turn without calls then ends the episode."""
        return self.run_calls(turn)

    async def run_calls(self, turn: Turn) -> Observation:
        """The answers of a turn's calls, in order, as one observation; done if there are no calls.

        A call that cannot be read, of a tool that is not there, or with wrong arguments is answered with what is wrong.
        Calls after one that ends the episode are not made, and of those after four fifths of ``timeout_s`` the policy
        reads that they were not.
        """
        if not turn.calls:
            return Observation(done=True)
        content, reward, done, infos = list[Any](), 0.0, False, list[Mapping[str, Any]]()
        deadline = time.monotonic() + 0.8 * self.timeout_s
        for call in turn.calls:
            late = "" if time.monotonic() < deadline else "Not called: the calls of this turn took too long."
            try:
                answer = call.error or late or self.call(call)
                answer = await answer if inspect.isawaitable(answer) else answer
            except ToolError as error:
                answer = str(error)
            if isinstance(answer, Observation):
                reward, done, infos = reward + answer.reward, done or answer.done, [*infos, answer.info]
                given = answer.content if isinstance(answer.content, list | tuple) else [answer.content]
                parts = [part for each in given for part in _parts(each, call.name)]
            else:
                parts = _parts(answer, call.name)
            if content and isinstance(content[-1], str) and parts and isinstance(parts[0], str):
                content[-1] += "\n"  # two answers of one turn
            content += parts
            if done:
                break
        return Observation(content, reward, done, info={k: v for info in infos for k, v in info.items()})

    def call(self, call: Call) -> Any:
        """The answer to one call: anything that JSON can hold, an image, a sequence of these, or an ``Observation``.

        By default the tool of that name is called, if the arguments fit its type hints. Its exceptions are the
        environment's failures; a tool tells the policy of a mistake by answering with a text, or by raising
        ``ToolError``.
        """
        tools = {getattr(each, "__name__", ""): each for each in self.tools() if callable(each)}
        if (function := tools.get(call.name)) is None:
            return f"There is no tool {call.name[:80]!r}. Tools: {', '.join(tools)}."
        try:
            arguments = Arguments.of(function).fit(call.arguments or {})
        except ToolError as error:
            return str(error)
        return function(**arguments)

    def score(self) -> Mapping[str, Score | None] | Awaitable[Mapping[str, Score | None]]:
        """The episode's ``components``, when it is over; None where one does not apply and the episode is invalid."""
        return {}

    def close(self) -> None:
        """Give back what the episode holds."""
        return


def _parts(answer: Any, tool: str) -> list[Any]:
    """An answer's texts and images; what is neither is text as JSON.

    Raises:
        TypeError: JSON cannot hold it.
    """
    if isinstance(answer, str) or is_content(answer):
        return [answer]
    if isinstance(answer, Sequence) and any(is_content(each) for each in answer):
        return [part for each in answer for part in _parts(each, tool)]
    try:
        return [json.dumps(answer, ensure_ascii=False, default=_as_python)]
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the tool {tool!r} answers with a {type(answer).__name__}: {error}; possible: a text, an image "
            "(PIL, uint8 array, bytes), a list of both, or anything that JSON can hold"
        ) from error


def _as_python(value: Any) -> Any:
    """A number or an array of numpy or torch as Python's own."""
    if hasattr(value, "__array__") and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def is_content(value: Any) -> bool:
    """True for an image, and for a block such as ``{"type": "text", ...}``; an answer is text as JSON without any."""
    if isinstance(value, dict):
        return value.get("type") in ("image", "text", "image_url")
    is_file = isinstance(value, bytes | bytearray | memoryview) or type(value).__name__ == "RawImage"
    is_array = hasattr(value, "__array__") and getattr(value, "ndim", 2) > 1  # else a number, or some
    return is_file or is_array or hasattr(value, "convert")
