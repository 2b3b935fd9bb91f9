"""An environment's process, seen from here: its start, its calls with deadlines, and its scratch folder."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from dataclasses import dataclass
from typing import Any

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.rollout.episodes.failures import CallFailed, EpisodeError
from mmrl.rollout.episodes.scratch import Scratch
from mmrl.system.console import visible
from mmrl.system.worker_process import Reply, WorkerProcess, WorkerProcessEnded, public_variables

START_TIMEOUT_S = 600.0
"""For a worker to import, make and prepare its environment; the deadlines of calls begin later."""


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """Facts of an environment that are known before its first episode.

    Attributes:
        tools: JSON schemas of the tools that the policy may call, as chat templates take them; empty if the worker was
            not asked for them.
        example: A turn that acts, where actions are texts; empty if there is none, or the worker was not asked for it.
        components: Names of what it scores, beside the sum of its turns' rewards.
        timeout_s: Seconds that one call may take.
        repeatable: True if episodes can be played again.
    """

    tools: tuple[dict[str, Any], ...]
    components: tuple[str, ...]
    timeout_s: float
    example: str = ""
    repeatable: bool = True


class EnvironmentProcess(WorkerProcess):
    """A worker process with a scratch folder that is removed with it.

    Args:
        wants_tools: True if its facts are to tell of its tools.

    Raises:
        EpisodeError: This machine has no room for a folder, or for a process.
    """

    def __init__(self, spec: EnvironmentSpec, *, wants_tools: bool = False) -> None:
        self._spec, self._wants_tools = spec, wants_tools
        self._numbers = itertools.count()
        self._facts: EnvironmentFacts | None = None
        try:
            self._scratch = Scratch()
            try:
                super().__init__("mmrl.rollout.episodes.worker", public_variables())
            except BaseException:
                self._scratch.remove()
                raise
        except OSError as error:
            raise EpisodeError(
                f"no worker can be started for environment {spec.name!r}: {error}",
                where=tempfile.gettempdir(),
                remedy="make room in that folder, or set TMPDIR to another one; or set environment.workers to less",
            ) from error

    def await_start(self) -> EnvironmentFacts:
        """The environment's facts, when it is prepared.

        Raises:
            EpisodeError: It cannot be made.
        """
        if self._facts is None:
            self.send(pickle.dumps((self._spec, str(self._scratch.path), self._wants_tools)), START_TIMEOUT_S)
            try:
                reply = self.receive(START_TIMEOUT_S)
            except WorkerProcessEnded as end:
                reply = {"what": f"ended its worker ({end.how}) before its first call", "details": end.stderr}
            if reply is None:
                reply = {"what": f"was not prepared within {START_TIMEOUT_S:g} s"}
            self._facts = self._read(reply)
        return self._facts

    def call(self, verb: str, session: int, *arguments: Any) -> Reply:
        """The reply to a call of an episode, which must have started.

        Raises:
            CallFailed: The environment raised, answered nonsense, or hung or crashed; the process has then ended.
        """
        number, timeout_s = next(self._numbers), self.await_start().timeout_s
        try:
            reply = self.ask(pickle.dumps((number, verb, session, *arguments)), timeout_s)
        except WorkerProcessEnded as end:
            raise CallFailed(f"ended its worker ({end.how})") from None
        if reply is None:
            raise CallFailed(f"did not answer within {timeout_s:g} s; its worker was killed")
        if reply.get("number") != number:
            self.kill()
            raise CallFailed("answered a call that was not made; its worker was killed")
        if (fault := reply.get("fault")) is not None:
            cause = " at ".join(filter(None, [fault["what"], fault.get("place")]))
            raise CallFailed(visible(cause), visible(fault.get("details", ""), "\n"))
        return reply

    def stop(self) -> None:
        super().stop()
        self._scratch.remove()

    def _read(self, reply: Reply) -> EnvironmentFacts:
        if "error" in reply:
            error = EpisodeError(**{key: visible(text) for key, text in reply["error"].items()})
            error.details = reply["details"]
            raise error
        if "facts" not in reply:
            error = EpisodeError(
                f"environment {self._spec.name!r} {visible(reply['what'])}",
                where=visible(reply.get("place", "")),
                remedy="correct the environment",
            )
            error.details = reply.get("details", "")
            raise error
        facts = reply["facts"]
        return EnvironmentFacts(
            tuple(facts.get("tools", ())),
            tuple(facts["components"]),
            facts["timeout_s"],
            facts.get("example", ""),
            bool(facts["repeatable"]),
        )
