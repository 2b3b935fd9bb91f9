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

Some failures are tried again (``service.py``); all attempts must fit into the reward's own ``timeout_s``.

A key is read from an environment variable, ``api_key_env: SERVICE_TOKEN``, which this reward's worker alone gets, or
any header from a file, ``secret_headers: {Authorization: ~/.service_token}``. An Authorization of one word gets
``Bearer`` put before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from mmrl.interfaces import Reward
from mmrl.types import IMAGE_PLACEHOLDER, ImageRef, Rollout, Score
from mmrl_rewards.chat import parts_of
from mmrl_rewards.service import Ask, Service, ServiceConfig, as_json, base64_of, gathered


class Http(Reward):
    """A remote reward service."""

    workers = 1
    groups_per_call = 16
    secrets = ("api_key_env",)

    class Config(ServiceConfig):
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
        send_images: bool = False
        """True to send the prompt's images."""
        columns: list[str] | None = None
        """Columns that are sent; null is all."""

        @model_validator(mode="after")
        def _fits(self) -> Http.Config:
            if self.api == "mmrl" and (self.model or self.output):
                raise ValueError("model and output are for api: classify and api: pooling")
            if self.api != "mmrl" and self.columns is not None:
                raise ValueError(f"api: {self.api} sends no columns")
            return self

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._service = Service(config)

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        size = self.config.batch_size if self.config.api == "mmrl" else 1
        batches = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        async with self._service.session() as ask:
            found = await gathered([self._ask(ask, batch) for batch in batches])
        return [score for scores in found for score in scores]

    async def _ask(self, ask: Ask, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return self._scores(await ask(lambda: self._request(rollouts)), len(rollouts))

    def _request(self, rollouts: Sequence[Rollout]) -> bytes:
        if self.config.api == "mmrl":
            return as_json({"items": [self._item(rollout) for rollout in rollouts]})
        (rollout,) = rollouts
        body: dict[str, Any] = {"messages": self._conversation(rollout), "add_generation_prompt": False}
        body |= {"model": self.config.model} if self.config.model else {}
        body |= {"use_activation": False}
        return as_json(body | ({"task": "token_classify"} if self.config.api == "pooling" else {}))

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
            item["images"] = [base64_of(image) for image in rollout.images]
        return item

    def _conversation(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The chat with the completion as its last turn; the server applies the reward model's own template."""
        images = iter(rollout.images)
        shown = self._content if rollout.images else lambda text, images: text
        turns = [{"role": m.role, "content": shown(m.content, images)} for m in rollout.messages]
        return [*turns, {"role": "assistant", "content": rollout.text}]

    def _content(self, text: str, images: Iterator[ImageRef]) -> Any:
        if self.config.send_images or IMAGE_PLACEHOLDER not in text:
            return parts_of(text, images)
        return text.replace(IMAGE_PLACEHOLDER, "").strip()

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
            got = self._service.excerpt(body)
            raise self._service.error(f"did not answer {expected}, but {got}", "correct the service, or api")
        return scores


def _output(item: Mapping[str, Any], place: int) -> Score:
    values = item["probs"] if "probs" in item else item["data"]
    while isinstance(values[-1], list):
        values = values[-1]
    if not _is_score(values[place]) or values[place] is None:
        raise ValueError
    return float(values[place])


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))
