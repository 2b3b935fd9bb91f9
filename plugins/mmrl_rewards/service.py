"""Requests to a service over HTTP: how many run at a time, which are tried again, and the secrets that they carry.

Connection errors, time-outs, 408, 429 and 5xx are tried again, ``retries`` times, after ``backoff_s``, twice that, ...;
other answers are errors at once. Redirects are not followed and HTTP_PROXY is not read: requests go to ``url`` and
nowhere else.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from mmrl.errors import ConfigError, PluginError, plural
from mmrl.interfaces import PluginConfig
from mmrl.types import ImageRef

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_WAIT_S = 30.0
_MAX_ANSWER_BYTES = 16 * 2**20
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FAILED = "start the service, or correct url"


class ServiceConfig(PluginConfig):
    """Options of a reward that a service answers."""

    url: str
    """Address of the service."""
    concurrency: int = Field(default=4, gt=0, le=256)
    """Most requests at a time."""
    request_timeout_s: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    """Seconds of one attempt, from connecting to the last byte."""
    retries: int = Field(default=2, ge=0, le=20)
    """Further attempts of a request that failed in a way that may pass."""
    backoff_s: float = Field(default=0.5, ge=0, le=60)
    """Wait before the first further attempt; doubles each time, a Retry-After of the service may lengthen it."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of each request; no secrets, since the config is saved with the run."""
    secret_headers: dict[str, str] = Field(default_factory=dict)
    """Header to the file that holds its value."""
    api_key_env: str | None = None
    """Environment variable with a key that is sent as ``Authorization: Bearer``; its name, never the key."""

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:
            valid = False
        if not valid:
            raise ValueError("not an http or https address, such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ValueError("no user or password in the address: put an Authorization into secret_headers")
        return url

    @field_validator("api_key_env")
    @classmethod
    def _is_variable(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError("the name of an environment variable, not the key, such as OPENAI_API_KEY")
        return name

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if self.api_key_env and any(name.casefold() == "authorization" for name in self.secret_headers):
            raise ValueError("api_key_env and secret_headers both send an Authorization")
        return self


class RefusedError(PluginError):
    """A request that the service does not accept, whatever it is asked next.

    Attributes:
        status: The answer's; 0 for one that is too long.
    """

    def __init__(self, what: str, *, status: int, remedy: str) -> None:
        super().__init__(what, remedy=remedy)
        self.status = status


Ask = Callable[[Callable[[], bytes]], Coroutine[Any, Any, bytes]]
"""Posts the JSON that a function makes when its turn has come; the body of the answer."""


class Service:
    """A service's address, and the way to it.

    Raises:
        ConfigError: A file with a secret cannot be read, or the variable with the key is not set.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._secrets = {name: _secret(name, path) for name, path in config.secret_headers.items()}
        if config.api_key_env is not None:
            self._secrets["Authorization"] = f"Bearer {_key(config.api_key_env)}"

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Ask]:
        """Connections for some requests, of which ``concurrency`` run at a time.

        A request raises PluginError: RefusedError at once, others when the last attempt has failed.
        """
        import httpx

        config, gate = self._config, asyncio.Semaphore(self._config.concurrency)
        headers, limits = config.headers | self._secrets, httpx.Limits(max_connections=config.concurrency)
        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False) as client:

            async def ask(request: Callable[[], bytes]) -> bytes:
                async with gate:
                    return await self._ask(client, request())

            yield ask

    async def _ask(self, client: httpx.AsyncClient, request: bytes) -> bytes:
        failure, wait_s = "", 0.0
        for attempt in range(self._config.retries + 1):
            if attempt:
                backoff_s = self._config.backoff_s * 2 ** (attempt - 1)
                await asyncio.sleep(min(max(wait_s, backoff_s), _LONGEST_WAIT_S))
            answer, failure, wait_s = await self._attempt(client, request)
            if answer is not None:
                return answer
        raise self.error(f"{failure}, {plural(self._config.retries + 1, 'attempt')}", _FAILED)

    async def _attempt(self, client: httpx.AsyncClient, request: bytes) -> tuple[bytes | None, str, float]:
        """The answer's body, or None, what failed, and the least wait before another attempt."""
        import httpx

        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await self._post(client, request)
        except TimeoutError:
            return None, f"did not answer within {self._config.request_timeout_s:g} s", 0.0
        except httpx.TransportError as error:
            return None, f"cannot be reached ({type(error).__name__}: {error})", 0.0

    async def _post(self, client: httpx.AsyncClient, request: bytes) -> tuple[bytes | None, str, float]:
        content_type = {"Content-Type": "application/json"}
        async with client.stream("POST", self._config.url, content=request, headers=content_type) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise self._refused(f"answered more than {_MAX_ANSWER_BYTES} bytes", 0)
            if response.status_code == 200:
                return bytes(body), "", 0.0
            failure = f"answered {response.status_code} {response.reason_phrase}"
            if response.status_code in _PASSING:
                return None, failure, _seconds(response.headers.get("Retry-After"))
            raise self._refused(f"{failure}: {self.excerpt(bytes(body))}", response.status_code)

    def _refused(self, what: str, status: int) -> RefusedError:
        remedy = "correct the request's options, or the service"
        return RefusedError(f"{self._config.url} {what}", status=status, remedy=remedy)

    def error(self, what: str, remedy: str) -> PluginError:
        """An error of the service: its address and what it did."""
        return PluginError(f"{self._config.url} {what}", remedy=remedy)

    def excerpt(self, body: bytes, most: int = 120) -> str:
        """The beginning of an answer, without the secrets that a service may echo."""
        text = body.decode("utf-8", "replace")
        for secret in self._secrets.values():
            for part in {secret, secret.split()[-1]}:
                text = text.replace(part, "[redacted]")
        return repr(text[:most])


async def gathered(answers: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All answers in order; the first error, after which nothing more is asked."""
    tasks = [asyncio.ensure_future(each) for each in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def base64_of(image: ImageRef) -> str:
    """The image's PNG file in base64."""
    return base64.b64encode(Path(image.path).read_bytes()).decode()


def as_json(value: Any) -> bytes:
    """The value as JSON; NaN and infinity become null, values without a form there become text."""
    return json.dumps(_plain(value), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0


def _key(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        remedy = f"set it where mmrl is started: export {variable}=..."
        raise ConfigError(f"The environment variable {variable} is not set", where="api_key_env", remedy=remedy)
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"The environment variable {variable} holds no single line of text", where="api_key_env")
    return value


def _secret(header: str, path: str) -> str:
    try:
        value = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The value of the header {header} cannot be read: {getattr(error, 'strerror', None) or error}",
            where=path,
            possible="a text file with the header's value",
        ) from error
    if not value or not value.isascii() or not value.isprintable():
        raise ConfigError(f"The file with the value of the header {header} holds no single line of text", where=path)
    return f"Bearer {value}" if header.casefold() == "authorization" and " " not in value else value
