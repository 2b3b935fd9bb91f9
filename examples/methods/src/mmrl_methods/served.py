"""A model that a server answers for: the options of such a reward, its requests, and the texts that it may be shown.

Connections that fail, time-outs, 408, 429 and 5xx are tried again; any other answer but 200 is an error at once.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import PluginConfig
from mmrl.types import IMAGE_PLACEHOLDER, ImageRef, Rollout

_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_SHOWN = 200
_MARK = re.compile(r"<(?=\||/?s>)|\[(?=/?INST\])")


class ServedConfig(PluginConfig):
    """Options of a reward whose model is served."""

    url: str
    """Address of the server's API, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name that the model is served under; null sends none, which suits servers with a single model."""
    api_key_env: str | None = None
    """Environment variable with a key that is sent as `Authorization: Bearer`; its name, never the key."""
    concurrency: int = Field(default=16, gt=0, le=256)
    """Most requests at a time."""
    request_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds of one attempt; all attempts must fit into the reward's `timeout_s`."""
    retries: int = Field(default=4, ge=0, le=20)
    """Further attempts of a request that failed in a way that may pass."""
    backoff_s: float = Field(default=1.0, ge=0, le=60)
    """Wait before the first further attempt; doubles each time."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^/@\s]+(/\S*)?", url):
            raise ValueError("not an http or https address, such as http://127.0.0.1:8000/v1")
        return url.rstrip("/")


async def answers(config: ServedConfig, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The server's JSON answers to requests, in order.

    Args:
        path: Is appended to the address, such as ``/chat/completions``.
        bodies: The requests; ``model`` is added.

    Raises:
        ConfigError: The variable with the key is not set.
        PluginError: A request failed at each attempt, was refused, or was not answered by JSON.
    """
    import httpx

    gate, headers = asyncio.Semaphore(config.concurrency), {}
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env, "").strip()
        if not key:
            remedy = f"set it where mmrl is started: export {config.api_key_env}=..."
            what = f"the environment variable {config.api_key_env} is not set"
            raise ConfigError(what, where="api_key_env", remedy=remedy)
        headers["Authorization"] = f"Bearer {key}"
    named = {} if config.model is None else {"model": config.model}
    is_secure = config.url.startswith("https:")  # certificates take a tenth of a second to read
    options: dict[str, Any] = {"headers": headers, "timeout": config.request_timeout_s, "verify": is_secure}
    async with httpx.AsyncClient(**options, trust_env=False) as client:

        async def answer(body: Mapping[str, Any]) -> Any:
            async with gate:
                return await _answer(client, config, config.url + path, {**named, **body})

        tasks = [asyncio.ensure_future(answer(body)) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def _answer(client: Any, config: ServedConfig, address: str, body: Mapping[str, Any]) -> Any:
    import httpx

    failure = ""
    for attempt in range(config.retries + 1):
        if attempt:
            await asyncio.sleep(min(config.backoff_s * 2 ** (attempt - 1), 30.0))
        try:
            response = await client.post(address, json=body)
        except httpx.TransportError as error:
            failure = f"cannot be reached ({type(error).__name__})"
            continue
        if response.status_code == 200:
            try:
                return response.json()
            except ValueError as error:
                raise unreadable(address, response.text) from error
        failure = f"answered {response.status_code}: {response.text[:_SHOWN]!r}"
        if response.status_code not in _PASSING:
            raise PluginError(f"{address} {failure}", remedy="correct the reward's options, or the server")
    raise PluginError(f"{address} {failure}, {config.retries + 1} attempts", remedy="start the server, or correct url")


def unreadable(address: str, answer: object) -> PluginError:
    """The error of an answer of another form than the API's."""
    return PluginError(f"{address} answered {str(answer)[:_SHOWN]!r}", remedy="correct url: this is another API")


def inert(text: str) -> str:
    """A text of a dataset or a policy in which marks that chat templates take for their own are broken by a space."""
    return _MARK.sub(lambda mark: f"{mark[0]} ", text).replace(IMAGE_PLACEHOLDER, "[image]")


def question_of(rollout: Rollout) -> str:
    """The prompt's turns as text; one turn alone stands without its role."""
    turns = [message for message in rollout.messages if message.content.strip()]
    if len(turns) == 1:
        return inert(turns[0].content)
    return "\n\n".join(f"{message.role}: {inert(message.content)}" for message in turns)


def chat(text: str, images: Sequence[ImageRef]) -> list[dict[str, Any]]:
    """A request's ``messages``: one turn of the user, images before its text as data URLs of their pixels."""
    if not images:
        return [{"role": "user", "content": text}]
    parts: list[dict[str, Any]] = []
    for image in images:
        pixels = base64.b64encode(Path(image.path).read_bytes()).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixels}"}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
