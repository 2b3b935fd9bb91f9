"""The tools of an MCP server that speaks over standard input and output.

    environment: {name: mcp, command: [python, -m, my_server], per: episode}

``command`` is a list of words, started without a shell, in an empty folder that is removed; words that name a file here
are made absolute. The server's environment has PATH, LANG and the like, your HOME, where launchers such as npx keep
what they have installed, and ``env``: none of the user's tokens. It ends with its worker, killed or not.
Its tools, or those in ``tools``, are the policy's, with the server's own names, descriptions and schemas. Texts and
images of a result are what the policy reads; any error that the server reports of a call is read as text. A call that
takes longer than ``call_timeout_s`` makes its episode invalid and ends the server, and so does one that the server ends
in. The next call, of whatever episode, then starts it again.

``per: worker`` shares a server between the episodes of a process: right for servers without a state. ``per: episode``
starts one for each, which costs its start. ``repeatable: true`` says that the same calls are answered alike again. A
turn without a call ends the episode. The server runs code that you named; what its tools may do with arguments that a
model wrote is up to it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mmrl.errors import ConfigError
from mmrl.interfaces import Environment, PluginConfig, Tool, ToolError
from mmrl.types import Call, Observation, Prompt
from mmrl_rewards.sandboxes import SUPERVISING

_INSTALL = "pip install 'mmrl-train[mcp]'"
_SURROGATES = re.compile("[\ud800-\udfff]")
_STOP_S = 10.0
_TAIL = 2000
"""Characters of the server's errors in a message."""

Word = Annotated[str, Field(min_length=1)]


class MCP(Environment):
    """Calls the tools of a server."""

    class Config(PluginConfig):
        command: Annotated[tuple[Word, ...], Field(min_length=1)]
        """The server's program and its arguments, such as [python, -m, my_server]."""
        env: dict[str, str] = Field(default_factory=dict)
        """Further environment variables of the server."""
        tools: Annotated[tuple[Word, ...], Field(min_length=1)] | None = None
        """Tools that the policy may call; null is all."""
        per: Literal["worker", "episode"] = "worker"
        """worker: episodes of a process share a server. episode: each has its own."""
        start_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
        """Seconds until the server has told its tools; per episode, less than environment.timeout_s."""
        call_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
        """Seconds of one call; less than environment.timeout_s."""
        repeatable: bool = False
        """True says that the same calls are answered alike again, as algorithms that branch need it."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.repeatable = config.repeatable
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            what = "the environment mcp needs the package mcp"
            raise ConfigError(what, where="environment: mcp", remedy=_INSTALL) from error
        program, *words = config.command
        # Words may be long programs, of which Path.is_file raises an error.
        here = (os.path.abspath(word) if os.path.isfile(word) else word for word in words)
        self._command = (str(Path(program).absolute()) if os.sep in program else program, *here)
        self._env = {name: os.environ[name] for name in ("HOME",) if name in os.environ} | config.env
        if shutil.which(config.command[0]) is None:
            what = f"there is no program {config.command[0]!r}"
            raise ConfigError(what, where="environment.command", remedy="install it, or give its path")
        self._shared = list[_Server]()
        self._own: _Server | None = None
        self._tools: list[Tool] = []

    def prepare(self) -> None:
        limits = ["call_timeout_s", *(["start_timeout_s"] if self.config.per == "episode" else [])]
        for name in limits:
            if (seconds := getattr(self.config, name)) >= self.timeout_s:
                raise ConfigError(
                    f"{name} is {seconds:g}, but the environment is given up after {self.timeout_s:g} s",
                    where=f"environment.{name}, environment.timeout_s",
                    remedy=f"set environment.timeout_s to more than {seconds:g}, or {name} to less",
                )
        server = self._started()
        try:
            self._tools = self._chosen(server.tools)
        finally:
            if self.config.per == "episode":
                server.stop()
        if self.config.per == "worker":
            self._shared[:] = [server]

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def reset(self, prompt: Prompt, seed: int) -> None:
        if self.config.per == "episode":
            self._own = await asyncio.to_thread(self._started)
        else:
            await self._living()

    async def call(self, call: Call) -> Any:
        names = [tool["function"]["name"] for tool in self._tools if isinstance(tool, dict)]
        if call.name not in names:
            raise ToolError(f"There is no tool {call.name[:80]!r}. Tools: {', '.join(names)}.")
        server = self._own or await self._living()
        return await server.call(call.name, _sendable(call.arguments or {}), self.config.call_timeout_s)

    def close(self) -> None:
        if self._own is not None:
            self._own.stop()
            self._own = None

    async def _living(self) -> _Server:
        """The server that episodes share, started again if it has ended."""
        if not self._shared[0].is_alive:
            self._shared[0].begin_to_stop()
            self._shared[:] = [await asyncio.to_thread(self._started)]
        return self._shared[0]

    def _started(self) -> _Server:
        return _Server(self._command, self._env, self.config.start_timeout_s)

    def _chosen(self, listed: Sequence[Any]) -> list[Tool]:
        found = {tool.name: tool for tool in listed}
        unknown = sorted({*(self.config.tools or ())} - found.keys())
        if unknown or not found:
            what = f"the server has no tool {', '.join(unknown)}" if unknown else "the server has no tools"
            raise ConfigError(what, where="environment.tools", possible=", ".join(sorted(found)))
        names = self.config.tools or tuple(found)
        return [_schema(found[name]) for name in names]


class _Server:
    """A running server, spoken to from a thread with an event loop of its own.

    Attributes:
        tools: As the server lists them.

    Raises:
        ConfigError: It does not start, or does not tell its tools in time.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
        self._command, self._env = command, env
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[Any] | None = None
        self._ready: Future[Sequence[Any]] = Future()
        self._client: Any = None
        self._replies: Any = None
        self._is_stopping = False
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()
        try:
            self.tools = self._ready.result(timeout_s)
        except BaseException as error:
            said = self._said()
            self.stop()
            late = f"it has not told its tools within {timeout_s:g} s"
            cause = late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"the MCP server does not start: {cause}" + (f"\n{said}" if said else ""),
                where=f"environment.command: {' '.join(self._command)}",
                remedy="try the command in a terminal: it should wait for input",
            ) from error

    @property
    def is_alive(self) -> bool:
        """True if it takes calls: it has not ended, nor is it about to."""
        has_ended = self._replies is None or not self._replies.statistics().open_send_streams
        return self._thread.is_alive() and not self._is_stopping and not has_ended

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Observation:
        """The result's texts and images.

        Raises:
            ToolError: The server reports an error of the call.
            RuntimeError: It has ended, or does not answer in time and is ended.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if not self.is_alive:
            raise RuntimeError(f"the MCP server has ended: {self._said()}")
        asked = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, dict(arguments)), self._loop)
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(asked), timeout_s)
        except TimeoutError as error:
            self.begin_to_stop()
            raise RuntimeError(f"the tool {name} of the MCP server did not answer within {timeout_s:g} s") from error
        except MCPError as error:
            is_closed = error.error.code == CONNECTION_CLOSED and error.error.message == "Connection closed"
            if self.is_alive and not is_closed:  # servers have errors of that number too
                raise ToolError(f"{name}: {str(error)[:_TAIL]}") from error
            self.begin_to_stop()
            raise RuntimeError(f"the MCP server has ended in a call of {name}: {self._said()}") from error
        content = list[Any]()
        for part in map(_content, result.content):
            if content and isinstance(content[-1], str) and isinstance(part, str):
                content[-1] += "\n"  # servers send a list as a text for each item
            content.append(part)
        return Observation(content, info={"is_error": bool(result.is_error)})

    def stop(self) -> None:
        """End the server and wait for its end; does nothing if it has ended."""
        self.begin_to_stop()
        self._thread.join(_STOP_S)

    def begin_to_stop(self) -> None:
        """End the server in the background: one that hangs takes seconds to end."""
        if not self._is_stopping and self._thread.is_alive():
            self._is_stopping = True
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(_innermost(error))

    async def _serve(self) -> None:
        from mcp import Client, StdioServerParameters

        self._task = asyncio.current_task()
        words = list(self._command)
        if sys.platform == "linux":
            words = [sys.executable, "-I", "-S", "-c", _SUPERVISOR, str(os.getpid()), *words]
        with tempfile.TemporaryDirectory(prefix="mmrl-mcp-") as folder:
            parameters = StdioServerParameters(
                command=words[0],
                args=words[1:],
                env={"LANG": "C.UTF-8", **self._env},
                cwd=folder,
                encoding_error_handler="replace",
            )
            async with Client(self._streams(parameters)) as client:
                self._client, tools, cursor = client, list[Any](), None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
                self._ready.set_result(tools)
                await self._loop.create_future()  # until it is cancelled

    @contextlib.asynccontextmanager
    async def _streams(self, parameters: Any) -> AsyncIterator[Any]:
        """The streams of a server that is started; those of its replies tell when it ends."""
        from mcp import stdio_client

        async with stdio_client(parameters, errlog=self._errors) as streams:
            self._replies = streams[0]
            yield streams

    def _said(self) -> str:
        """The end of what the server has written to its standard error."""
        try:
            self._errors.seek(0)
            return self._errors.read()[-_TAIL:].strip()
        except (OSError, ValueError):
            return ""


_SUPERVISOR = (
    SUPERVISING
    + """
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # it has been killed meanwhile
waited = {signal.SIGCHLD, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
server = os.fork()
if not server:
    prctl(1, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
    for each in (signal.SIGPIPE, signal.SIGXFSZ):  # this interpreter ignores them
        signal.signal(each, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        os.write(2, f"{sys.argv[2]}: {error.strerror}\\n".encode())
    os._exit(127)
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)  # the server alone has these
os.dup2(null, 1)
ended, deadline = None, None
while ended is None and (deadline is None or time.monotonic() < deadline):
    got = signal.sigtimedwait(waited, 3600 if deadline is None else max(0, deadline - time.monotonic()))
    if got and got.si_signo == signal.SIGTERM and deadline is None:
        deadline = time.monotonic() + 1
        os.kill(server, signal.SIGTERM)
    while ended is None and (found := os.waitpid(-1, os.WNOHANG))[0]:
        ended = found[1] if found[0] == server else None
end_descendants()
os._exit(1 if ended is None else os.waitstatus_to_exitcode(ended) & 255)
"""
)
"""Runs the server and ends it with the worker: it has a session of its own, and a kill of the worker's misses it."""


def _innermost(error: BaseException) -> BaseException:
    """The first exception in groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _schema(tool: Any) -> Tool:
    parameters = {"type": "object", "properties": {}, **tool.input_schema}
    described = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _sendable(value: Any) -> Any:
    """Arguments without lone surrogates, which UTF-8 cannot hold."""
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {_SURROGATES.sub("\ufffd", str(key)): _sendable(item) for key, item in value.items()}
    return [_sendable(item) for item in value] if isinstance(value, list | tuple) else value


def _content(part: Any) -> Any:
    """A part of a result as the policy reads it."""
    if part.type == "text":
        return part.text
    if part.type == "image":
        try:
            return base64.b64decode(part.data, validate=True)
        except binascii.Error as error:
            raise RuntimeError(f"the MCP server answers with an image that is no base64: {error}") from error
    return json.dumps(part.model_dump(mode="json", exclude_none=True), ensure_ascii=False)
