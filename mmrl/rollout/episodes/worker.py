"""The process in which environments live: one prepared object, of which each episode has a copy.

It answers calls line by line. Nothing of a plugin is pickled. See ``mmrl.rollout.episodes.pool`` for the other end.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import MMRLError
from mmrl.interfaces import Environment
from mmrl.plugin_host import registry
from mmrl.rollout.episodes.observations import BadAnswer, number, plain
from mmrl.rollout.worker_faults import excerpt, raised
from mmrl.system.worker_process import Line, Reply
from mmrl.types import Observation, Prompt, Turn


def serve() -> None:
    """Make the environment, report on it, then answer calls until there is nothing more."""
    line = Line()
    requests = iter(line)
    spec, scratch, wants_tools = next(requests)
    _write_into(Path(scratch))
    try:
        environment = registry.create("environment", spec)
        environment.timeout_s = float(spec.timeout_s or environment.timeout_s)
        environment.prepare()
        facts = _facts(environment, wants_tools=wants_tools)
    except MMRLError as error:
        parts = {"what": error.what, "where": error.where, "possible": error.possible, "remedy": error.remedy}
        line.send({"error": parts, "details": traceback.format_exc()})
        return
    except BaseException as error:
        line.send(raised(error))
        return
    _live_in(Path(scratch))
    line.send({"facts": facts})
    with asyncio.Runner() as runner:  # one loop for all calls: an environment may keep its connections
        sessions = Sessions(environment, Path(scratch), runner)
        for count, verb, session, *arguments in requests:
            line.send({"number": count, **sessions.reply(verb, session, *arguments)})


def _facts(environment: Environment, *, wants_tools: bool) -> Reply:
    components = [str(name) for name in environment.components]
    repeatable = bool(environment.repeatable)
    facts: Reply = {"timeout_s": environment.timeout_s, "components": components, "repeatable": repeatable}
    if wants_tools:
        from mmrl.rollout.episodes.tool_schemas import tool_schemas

        facts["tools"] = tool_schemas(environment.tools())
        facts["example"] = str(environment.example())
    return facts


def _write_into(scratch: Path) -> None:
    """Have temporary files be written there, from the start: they go with the folder, however this process ends."""
    _set_folder("TMPDIR", scratch / "tmp")
    tempfile.tempdir = None


def _live_in(scratch: Path) -> None:
    """Have all else that is written without a path of its own be written there too.

    That begins after ``prepare``, which reads caches of the user's HOME, and files by paths of the working folder.
    """
    _set_folder("HOME", scratch / "home")
    os.chdir(scratch)


def _set_folder(variable: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    os.environ[variable] = str(folder)


class Sessions:
    """The episodes of this process, each with its environment and a working directory of its own."""

    def __init__(self, prepared: Environment, scratch: Path, runner: asyncio.Runner) -> None:
        self._prepared, self._scratch, self._runner = prepared, scratch, runner
        self._environments: dict[int, Environment] = {}
        self._seeds: dict[int, int] = {}
        self._verbs: Mapping[str, Callable[..., Reply]] = {
            "open": self._open,
            "step": self._step,
            "score": self._score,
            "close": self._close,
        }

    def reply(self, verb: str, session: int, *arguments: Any) -> Reply:
        """The answer to one call, or its fault."""
        try:
            if session in self._environments:
                os.chdir(self._folder(session))
            return self._verbs[verb](session, *arguments)
        except BadAnswer as error:
            method = {"open": "reset"}.get(verb, verb)
            return {"fault": {"what": f"answered {method} with {error.got}; expected {error.expected}"}}
        except BaseException as error:
            return {"fault": raised(error)}

    def _open(self, session: int, prompt: Prompt, seed: int) -> Reply:
        environment = self._environments[session] = copy.copy(self._prepared)
        self._seeds[session] = seed
        self._folder(session).mkdir()
        os.chdir(self._folder(session))
        observation = self._call(session, "reset", environment.reset, prompt, seed)
        return plain(Observation() if observation is None else observation)

    def _step(self, session: int, turn: Turn) -> Reply:
        return plain(self._call(session, f"step {turn.index}", self._environments[session].step, turn))

    def _score(self, session: int) -> Reply:
        environment = self._environments[session]
        found = self._call(session, "score", environment.score)
        expected = f"a number or None for each of {', '.join(environment.components)}"
        if not isinstance(found, Mapping) or {*found} != {*environment.components}:
            raise BadAnswer(expected, f"{type(found).__name__} {excerpt(found)}")
        return {"components": {name: None if v is None else number(v, str(name)) for name, v in found.items()}}

    def _close(self, session: int) -> Reply:
        environment = self._environments.pop(session, None)
        try:
            if environment is not None:
                self._call(session, "close", environment.close)
        finally:
            self._seeds.pop(session, None)
            os.chdir(self._scratch)
            shutil.rmtree(self._folder(session), ignore_errors=True)
        return {}

    def _call(self, session: int, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """A method's answer, sync or async; its generators depend on the episode's seed and this call alone."""
        _seed(f"{self._seeds[session]}/{name}")
        answer = method(*arguments)
        return self._runner.run(_awaited(answer)) if inspect.isawaitable(answer) else answer

    def _folder(self, session: int) -> Path:
        return self._scratch / f"episode-{session}"


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _seed(name: str) -> None:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
