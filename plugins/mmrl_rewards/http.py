"""The numbers that a reward service answers, over HTTP.

One POST of JSON per ``batch_size`` rollouts, at most ``concurrency`` at a time:

    {"items": [{"id": ..., "prompt": [{"role": ..., "content": ...}], "completion": ..., "answer": ...,
                "columns": {...}, "choices": [...], "source": ..., "finish_reason": "stop",
                "images": ["<base64 of a PNG>", ...]}]}

``images`` only with ``send_images``; they are the normalised pixels that the model saw. Cells that JSON cannot hold are
sent as text, numbers that are not finite as null. The service answers a list with one finite number or null (cannot be
scored) per item, in order, or ``{"scores": [...]}``.

``api: classify`` and ``api: pooling`` speak to vLLM's endpoints of the same names instead, for a reward model that fits
no rank (a 72B one): see plugins/README.md. The score is then the raw number at place
``output`` of the model's answer; from ``pooling``, which answers for every token, that of the last one.

Connection errors, time-outs, 429 and 5xx are tried again, ``retries`` times, after ``backoff_s``, twice that, ...;
other answers are errors at once. All of it must fit into the reward's own ``timeout_s``. Redirects are not followed
and HTTP_PROXY is not read: requests go to ``url`` and nowhere else.

Workers run without the user's secrets, so variables such as SERVICE_TOKEN do not reach them: a header with a secret is
read from a file, ``secret_headers: {Authorization: ~/.service_token}``. An Authorization of one word gets ``Bearer``
put before it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import IMAGE_PLACEHOLDER, Rollout, Score

if TYPE_CHECKING:
    import httpx

_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_WAIT_S = 30.0
_MAX_ANSWER_BYTES = 16 * 2**20
_FAILED = "start the service, or correct url"


class Http(Reward):
    """A remote reward service."""

    workers = 1
    groups_per_call = 16

    class Config(PluginConfig):
        url: str
        """Address of the service, such as http://127.0.0.1:8000/score, or .../classify with ``api: classify``."""
        api: Literal["mmrl", "classify", "pooling"] = "mmrl"
        """Form of requests and answers: this module's, or that of vLLM's endpoint."""
        model: str | None = None
        """For vLLM's endpoints: the name that the model is served under; null is the only one."""
        output: int = Field(default=0, ge=0)
        """For vLLM's endpoints: place of the score among the model's outputs."""
        batch_size: int = Field(default=64, gt=0)
        """Most rollouts in a request; vLLM's endpoints get one conversation each."""
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
        send_images: bool = False
        """True to send the prompt's images."""
        columns: list[str] | None = None
        """Columns that are sent; null is all."""

        @field_validator("url")
        @classmethod
        def _is_plain(cls, url: str) -> str:
            try:
                parts = urlsplit(url)
                valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
            except ValueError:
                valid = False
            if not valid:
                raise ValueError("not an http or https address, such as http://127.0.0.1:8000/score")
            if parts.username or parts.password:
                raise ValueError("no user or password in the address: put an Authorization into secret_headers")
            return url

        @model_validator(mode="after")
        def _fits(self) -> Http.Config:
            if self.api == "mmrl" and (self.model or self.output):
                raise ValueError("model and output are for api: classify and api: pooling")
            if self.api != "mmrl" and self.columns is not None:
                raise ValueError(f"api: {self.api} sends no columns")
            return self

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._secrets = {name: _secret(name, path) for name, path in config.secret_headers.items()}

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        import httpx

        size = self.config.batch_size if self.config.api == "mmrl" else 1
        batches = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        limits = httpx.Limits(max_connections=self.config.concurrency)
        headers = self.config.headers | self._secrets
        gate = asyncio.Semaphore(self.config.concurrency)
        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False) as client:
            tasks = [asyncio.ensure_future(self._ask(client, gate, batch)) for batch in batches]
            try:
                return [score for scores in await asyncio.gather(*tasks) for score in scores]
            finally:
                for task in tasks:
                    task.cancel()

    async def _ask(
        self, client: httpx.AsyncClient, gate: asyncio.Semaphore, rollouts: Sequence[Rollout]
    ) -> list[Score | None]:
        async with gate:
            request = self._request(rollouts)
            for attempt in range(self.config.retries + 1):
                answer, failure, wait_s = await self._attempt(client, request)
                if answer is not None:
                    return self._scores(answer, len(rollouts))
                if wait_s is None:
                    raise self._error(failure, "correct the request's options, or the service")
                if attempt < self.config.retries:
                    await asyncio.sleep(min(max(wait_s, self.config.backoff_s * 2**attempt), _LONGEST_WAIT_S))
            raise self._error(f"{failure}, {self.config.retries + 1} attempts", _FAILED)

    async def _attempt(self, client: httpx.AsyncClient, request: bytes) -> tuple[bytes | None, str, float | None]:
        """The answer's body, or None, what failed, and the least wait before another attempt (None: do not)."""
        import httpx

        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await self._post(client, request)
        except TimeoutError:
            return None, f"did not answer within {self.config.request_timeout_s:g} s", 0.0
        except httpx.TransportError as error:
            return None, f"cannot be reached ({type(error).__name__}: {error})", 0.0

    async def _post(self, client: httpx.AsyncClient, request: bytes) -> tuple[bytes | None, str, float | None]:
        content_type = {"Content-Type": "application/json"}
        async with client.stream("POST", self.config.url, content=request, headers=content_type) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    return None, f"answered more than {_MAX_ANSWER_BYTES} bytes", None
            if response.status_code == 200:
                return bytes(body), "", None
            failure = f"answered {response.status_code} {response.reason_phrase}"
            if response.status_code in _PASSING:
                return None, failure, _seconds(response.headers.get("Retry-After"))
            return None, f"{failure}: {self._excerpt(bytes(body))}", None

    def _request(self, rollouts: Sequence[Rollout]) -> bytes:
        if self.config.api == "mmrl":
            return _json({"items": [self._item(rollout) for rollout in rollouts]})
        (rollout,) = rollouts
        body: dict[str, Any] = {"messages": self._conversation(rollout), "add_generation_prompt": False}
        body |= {"model": self.config.model} if self.config.model else {}
        body |= {"use_activation": False}
        return _json(body | ({"task": "token_classify"} if self.config.api == "pooling" else {}))

    def _item(self, rollout: Rollout) -> dict[str, Any]:
        wanted = rollout.columns if self.config.columns is None else self.config.columns
        item = {
            "id": rollout.prompt.id,
            "prompt": [{"role": message.role, "content": message.content} for message in rollout.messages],
            "completion": rollout.text,
            "answer": rollout.answer,
            "columns": {name: rollout.columns.get(name) for name in wanted},
            "choices": rollout.choices,
            "source": rollout.source,
            "finish_reason": rollout.finish_reason,
        }
        if self.config.send_images:
            item["images"] = [_base64(image.path) for image in rollout.images]
        return item

    def _conversation(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The chat with the completion as its last turn; the server applies the reward model's own template."""
        images = iter(rollout.images)
        shown = self._parts if rollout.images else lambda text, images: text
        turns = [{"role": m.role, "content": shown(m.content, images)} for m in rollout.messages]
        return [*turns, {"role": "assistant", "content": rollout.text}]

    def _parts(self, text: str, images: Any) -> Any:
        if IMAGE_PLACEHOLDER not in text:
            return text
        if not self.config.send_images:
            return text.replace(IMAGE_PLACEHOLDER, "").strip()
        before, *others = text.split(IMAGE_PLACEHOLDER)
        parts = [{"type": "text", "text": before}] if before else []
        for after in others:
            url = f"data:image/png;base64,{_base64(next(images).path)}"
            parts.append({"type": "image_url", "image_url": {"url": url}})  # type: ignore[dict-item]
            parts += [{"type": "text", "text": after}] if after else []
        return parts

    def _scores(self, body: bytes, count: int) -> list[Score | None]:
        expected = f"a list of {count} numbers or nulls"
        try:
            answer = json.loads(body)
            if self.config.api != "mmrl":
                return [_output(item, self.config.output) for item in answer["data"]]
            scores = answer["scores"] if isinstance(answer, Mapping) else answer
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            scores = None
        if not isinstance(scores, list) or len(scores) != count or not all(map(_is_score, scores)):
            raise self._error(f"did not answer {expected}, but {self._excerpt(body)}", "correct the service, or api")
        return scores

    def _error(self, what: str, remedy: str) -> PluginError:
        return PluginError(f"{self.config.url} {what}", remedy=remedy)

    def _excerpt(self, body: bytes) -> str:
        """The beginning of an answer, without the secrets that a service may echo."""
        text = body.decode("utf-8", "replace")
        for secret in self._secrets.values():
            for part in {secret, secret.split()[-1]}:
                text = text.replace(part, "[redacted]")
        return repr(text[:120])


def _output(item: Mapping[str, Any], place: int) -> Score:
    values = item["probs"] if "probs" in item else item["data"]
    while isinstance(values[-1], list):
        values = values[-1]
    if not _is_score(values[place]) or values[place] is None:
        raise ValueError
    return float(values[place])


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0


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


def _base64(path: str) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


def _json(value: Any) -> bytes:
    return json.dumps(_plain(value), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """The value as JSON: NaN and infinity become null, values without a form there become text."""
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
