"""The tools of an MCP server that speaks over standard input and output.

    environment: {name: mcp, command: [python, -m, my_server], per: episode}

``command`` is a list of words, started without a shell, in an empty folder that is removed; words that name a file here
are made absolute. The server's environment has PATH, HOME, LANG and the like, and ``env``: none of the user's tokens.
Its tools, or those in ``tools``, are the policy's, with the server's own names, descriptions and schemas. Texts and
images of a result are what the policy reads; an error that the server reports of a call is read as text. A call that
takes longer than ``call_timeout_s`` makes the episode invalid, and so does a server that ends; it is started again.

``per: worker`` shares a server between the episodes of a process: right for servers without a state. ``per: episode``
starts one for each, which costs its start. A turn without a call ends the episode. The server runs code that you named;
what its tools may do with arguments that a model wrote is up to it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mmrl.environments import Environment, Tool, ToolError
from mmrl.errors import ConfigError
from mmrl.interfaces import PluginConfig
from mmrl.types import Call, Observation, Prompt

_INSTALL = "pip install 'mmrl-train[mcp]'"
_SURROGATES = re.compile("[\ud800-\udfff]")
_INVALID_PARAMS = -32602
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
        """Those that the policy may call; null is all."""
        per: Literal["worker", "episode"] = "worker"
        """worker: episodes of a process share a server. episode: each has its own."""
        start_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
        """Seconds until the server has told its tools."""
        call_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
        """Seconds of one call."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            what = "the environment mcp needs the package mcp"
            raise ConfigError(what, where="environment: mcp", remedy=_INSTALL) from error
        here = (str(Path(word).absolute()) if Path(word).is_file() else word for word in config.command[1:])
        self._command = (config.command[0], *here)
        if shutil.which(config.command[0]) is None:
            what = f"there is no program {config.command[0]!r}"
            raise ConfigError(what, where="environment.command", remedy="install it, or give its path")
        self._shared = list[_Server]()
        self._own: _Server | None = None
        self._tools: list[Tool] = []

    def prepare(self) -> None:
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
        elif not self._shared[0].is_alive:
            self._shared[0].stop()
            self._shared[:] = [await asyncio.to_thread(self._started)]

    async def call(self, call: Call) -> Any:
        names = [tool["function"]["name"] for tool in self._tools if isinstance(tool, dict)]
        if call.name not in names:
            raise ToolError(f"There is no tool {call.name[:80]!r}. Tools: {', '.join(names)}.")
        server = self._own or self._shared[0]
        return await server.call(call.name, _sendable(call.arguments or {}), self.config.call_timeout_s)

    def close(self) -> None:
        if self._own is not None:
            self._own.stop()
            self._own = None

    def _started(self) -> _Server:
        return _Server(self._command, self.config.env, self.config.start_timeout_s)

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
        return self._thread.is_alive()

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Observation:
        """The result's texts and images.

        Raises:
            ToolError: The server reports an error of the call.
            RuntimeError: It has ended, or does not answer in time.
        """
        from mcp import MCPError

        if not self.is_alive:
            raise RuntimeError(f"the MCP server has ended: {self._said()}")
        asked = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, dict(arguments)), self._loop)
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(asked), timeout_s)
        except TimeoutError as error:
            raise RuntimeError(f"the tool {name} of the MCP server did not answer within {timeout_s:g} s") from error
        except MCPError as error:
            if error.error.code == _INVALID_PARAMS:
                raise ToolError(f"{name}: {str(error)[:_TAIL]}") from error
            self.stop()
            raise RuntimeError(f"the MCP server fails: {error}; {self._said()}") from error
        return Observation([_content(part) for part in result.content], info={"is_error": bool(result.is_error)})

    def stop(self) -> None:
        """End the server; does nothing if it has ended."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(_STOP_S)

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
        from mcp import Client, StdioServerParameters, stdio_client

        self._task = asyncio.current_task()
        with tempfile.TemporaryDirectory(prefix="mmrl-mcp-") as folder:
            parameters = StdioServerParameters(
                command=self._command[0],
                args=list(self._command[1:]),
                env={"LANG": "C.UTF-8", **self._env},
                cwd=folder,
                encoding_error_handler="replace",
            )
            async with Client(stdio_client(parameters, errlog=self._errors)) as client:
                self._client, tools, cursor = client, list[Any](), None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
                self._ready.set_result(tools)
                await self._loop.create_future()  # until it is cancelled

    def _said(self) -> str:
        """The end of what the server has written to its standard error."""
        try:
            self._errors.seek(0)
            return self._errors.read()[-_TAIL:].strip()
        except (OSError, ValueError):
            return ""


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
