"""The verdict of a language model that is served elsewhere, by OpenAI's chat completions: vLLM, SGLang, OpenAI, ...

A request has one turn of the user: the rubric (``rubric.py``) filled with the question, the completion and the
reference answer, and the prompt's images at their places in the question, as data URLs of the pixels that the policy
saw. The judge ends its answer with a verdict (``verdict.py``), which is worth 0 to 1.

``compare`` asks about two completions instead, in both orders: each completion and the row's reference answer
(``reference``), or the completions of a group (``group``). If the orders agree, the better one has 1 and the other 0;
if they do not, the judge has a place that it likes, and both have 0.5. Equal texts have 0.5 unasked. A completion's
score is the mean over what it was compared with; the component ``flipped`` is the share of its comparisons in which
the orders did not agree.

An answer without a verdict scores nothing: the rollout is left out of statistics and loss, and counted, and the event
``reward_unscored`` of the step shows the first such answer. So does a request that the service does not accept (400,
413, 422, such as a text that is too long for the judge), once the service has answered any; before, it is an error.

Verdicts are kept by what was asked (the text and the pixels), ``cache_size`` of them, as long as the worker lives. With
temperature 0 the same question has the same verdict in a run's process. Over two runs it has where the server's numbers
do not depend on what else it computes, which most servers do not promise.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, JsonValue, field_validator, model_validator

from mmrl.interfaces import Reward, RunFacts
from mmrl.types import IMAGE_PLACEHOLDER, ImageRef, Rollout, Score, Unscored
from mmrl_rewards.chat import data_url, parts_of
from mmrl_rewards.rubric import Rubric, reference
from mmrl_rewards.service import Ask, RefusedError, Service, ServiceConfig, as_json, gathered
from mmrl_rewards.thinking import GAP, reply_of
from mmrl_rewards.verdict import Form, UnreadableError

Verdict = float | Unscored

_ENDPOINT = "/chat/completions"
_REFUSED = frozenset({400, 413, 422})
"""Statuses that are about what was asked, and not about who asks or where."""
_OWN_KEYS = ("messages", "model", "temperature", "max_tokens", "response_format", "stream", "n")
_SHOWN = 200


class Judge(Reward):
    """A language model as a judge."""

    workers = 1
    groups_per_call = 16
    secrets = ("api_key_env",)

    class Config(ServiceConfig):
        url: str
        """Address of the API, such as http://127.0.0.1:8000/v1; requests go to /chat/completions there."""
        model: str | None = None
        """Name that the judge is served under; null asks for none, which suits servers with a single model."""
        rubric: str | None = None
        """Jinja template of the request: ``completion``, or ``a`` and ``b`` with ``compare``; ``question``, ``answer``,
        ``choices``, ``columns``, ``source``, ``images`` (their number), ``form`` (asks for the verdict, and is put at
        the end if it is not named). Null is a rubric on being right."""
        form: str | None = None
        """Text that asks for the verdict; null is one that fits ``verdict``, an empty text none."""
        verdict: Literal["json", "brackets"] = "json"
        """Form of the verdict: {"score": 7} or [[7]]; with ``compare`` {"winner": "A"} or [[A]]."""
        scale: tuple[float, float] = Field(default=(0.0, 1.0), strict=False)
        """Worst and best score, which are worth 0 and 1."""
        grades: dict[str, float] | None = Field(default=None, min_length=1)
        """Worth of each verdict in brackets that is a name and no number, such as {A: 1, B: 0}."""
        guided: bool = False
        """True to have the server hold the judge to a JSON verdict (``response_format``), without reasons."""
        compare: Literal["reference", "group"] | None = None
        """Compare in both orders: with the reference answer, or with the others of the group."""
        opponents: int | None = Field(default=None, gt=0)
        """With ``compare: group``: each completion meets the next so many of its group, cyclically; null is all."""
        send_images: bool = True
        """False for a judge that sees no images."""
        send_thinking: bool = True
        """False to leave the completion's thinking out."""
        temperature: float | None = Field(default=0.0, ge=0, le=2)
        """Temperature of the judge; null sends none."""
        max_tokens: int | None = Field(default=1024, gt=0)
        """Longest answer, thinking included; null sends no limit."""
        extra: dict[str, JsonValue] = Field(default_factory=dict)
        """Further keys of the request, such as chat_template_kwargs or reasoning_effort."""
        cache_size: int = Field(default=65536, ge=0)
        """Most verdicts that the worker keeps."""
        concurrency: int = Field(default=16, gt=0, le=256)
        """Most requests at a time."""
        request_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
        """Seconds of one attempt; all attempts must fit into the reward's ``timeout_s``."""
        retries: int = Field(default=4, ge=0, le=20)
        """Further attempts of a request that failed in a way that may pass."""
        backoff_s: float = Field(default=1.0, ge=0, le=60)
        """Wait before the first further attempt; doubles each time, a Retry-After of the service may lengthen it."""

        @field_validator("url")
        @classmethod
        def _with_endpoint(cls, url: str) -> str:
            parts = urlsplit(url)
            path = parts.path.rstrip("/") or "/v1"
            return urlunsplit(parts._replace(path=path if path.endswith(_ENDPOINT) else path + _ENDPOINT))

        @model_validator(mode="after")
        def _fits(self) -> Judge.Config:
            if not self.scale[0] < self.scale[1]:
                raise ValueError("scale is the worst score and a higher one, the best")
            if self.grades is not None and (self.verdict != "brackets" or self.compare):
                raise ValueError("grades is for verdict: brackets, without compare")
            if self.grades is not None and not all(0 <= worth <= 1 for worth in self.grades.values()):
                raise ValueError("each of the grades is worth 0 to 1")
            if self.guided and self.verdict != "json":
                raise ValueError("guided is for verdict: json; extra may have what your server knows beside it")
            if self.opponents is not None and self.compare != "group":
                raise ValueError("opponents is for compare: group")
            if own := sorted(set(self.extra) & set(_OWN_KEYS)):
                raise ValueError(f"extra has {', '.join(own)}, which the judge sends itself; null sends no such key")
            self.made_rubric()
            return self

        def made_form(self) -> Form:
            """The form of its verdicts."""
            return Form(self.verdict, *self.scale, self.grades, compares=self.compare is not None, guided=self.guided)

        def made_rubric(self) -> Rubric:
            """The template, whose errors are ValueErrors."""
            form = self.made_form().request() if self.form is None else self.form
            return Rubric(self.rubric, compares=self.compare is not None, form=form)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._service, self._form, self._rubric = Service(config), config.made_form(), config.made_rubric()
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._has_answered = False

    def check(self, run: RunFacts) -> list[str]:
        found, compares = [], self.config.compare == "group"
        if compares and run.group_size < 2:
            raise ValueError("compare: group needs sampler.group_size of 2 or more")
        if compares:
            found.append("the judge compares completions of a group: evaluations with one of each prompt are unscored")
        if self.config.temperature != 0:
            found.append("the judge samples its verdicts: temperature 0 makes them as good as repeatable")
        return found

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score | Unscored | None]:
        if self.config.compare is None:
            asked = [self._question(rollout, completion=self._completion(rollout)) for rollout in rollouts]
            verdicts = await self._verdicts(asked)
            return [verdicts[each.key] for each in asked]
        groups = groupby(
            rollouts, lambda each: (each.prompt.key, each.greedy)
        )  # a greedy one is no member of its group
        pairs = [pair for _, group in groups for pair in self._pairs([*group])]
        verdicts = await self._verdicts(question for pair in pairs for question in pair.questions)
        return [_standing(rollout, pairs, verdicts) for rollout in rollouts]

    def _pairs(self, group: Sequence[Rollout]) -> list[_Pair]:
        """The comparisons of a group's completions."""
        if self.config.compare == "reference":
            return [self._pair(each, None, text) for each in group if (text := reference(each))]
        count = len(group)
        reach = min(self.config.opponents or count, count // 2)
        places = {frozenset((at, (at + step) % count)) for at in range(count) for step in range(1, reach + 1)}
        couples = sorted(sorted(each) for each in places)
        return [self._pair(group[a], group[b], self._completion(group[b])) for a, b in couples]

    def _pair(self, one: Rollout, other: Rollout | None, text: str) -> _Pair:
        own = self._completion(one)
        if own == text:
            return _Pair(one, other, ())
        orders = [{"a": own, "b": text}, {"a": text, "b": own}]
        return _Pair(one, other, tuple(self._question(one, **order) for order in orders))

    def _completion(self, rollout: Rollout) -> str:
        return rollout.text if self.config.send_thinking else reply_of(rollout).replace(GAP, " ").strip()

    def _question(self, rollout: Rollout, **completions: str) -> _Question:
        images = rollout.images if self.config.send_images else ()
        return _Question(self._rubric.text(rollout, len(images), **completions), images)

    async def _verdicts(self, questions: Iterable[_Question]) -> Mapping[bytes, Verdict]:
        """The verdict on each question, by its key."""
        asked = {each.key: each for each in questions}
        new = [each for key, each in asked.items() if key not in self._known]
        async with self._service.session() as ask:
            found = await gathered([self._asked(ask, each) for each in new])
        refused = [each for each in found if isinstance(each, RefusedError)]
        self._has_answered |= len(refused) < len(found)
        if refused and not self._has_answered:
            if any(each.images for each in new):
                refused[0].remedy += "; a judge that sees no images needs send_images: false"
            raise refused[0]
        verdicts = {key: self._known[key] for key in asked if key in self._known}
        for question, verdict in zip(new, found, strict=True):
            if isinstance(verdict, RefusedError):
                verdicts[question.key] = Unscored(f"was refused: {verdict.what}")
            else:
                verdicts[question.key] = self._known[question.key] = verdict
        for key in asked:
            if key in self._known:
                self._known.move_to_end(key)
        while len(self._known) > self.config.cache_size:
            self._known.popitem(last=False)
        return verdicts

    async def _asked(self, ask: Ask, question: _Question) -> Verdict | RefusedError:
        try:
            return self._read(await ask(partial(self._request, question)))
        except RefusedError as error:
            if error.status not in _REFUSED:
                raise
            return error

    def _request(self, question: _Question) -> bytes:
        config = self.config
        body: dict[str, Any] = {"messages": [{"role": "user", "content": question.content()}]}
        chosen = {"model": config.model, "temperature": config.temperature, "max_tokens": config.max_tokens}
        body |= {name: value for name, value in chosen.items() if value is not None}
        if config.guided:
            schema = {"name": "verdict", "strict": True, "schema": self._form.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return as_json(body | config.extra)

    def _read(self, body: bytes) -> Verdict:
        try:
            choice = json.loads(body)["choices"][0]
            text, end = choice["message"].get("content") or "", choice.get("finish_reason")
            refusal = choice["message"].get("refusal") or ""
            answer = self._form.read(text)
        except UnreadableError as error:
            cut = ", which max_tokens cuts off" if end == "length" else ""
            shown = self._service.excerpt((text or refusal).encode(), _SHOWN)
            return Unscored(f"found {error} in the judge's answer {shown}{cut}")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            what = f"did not answer a chat completion, but {self._service.excerpt(body)}"
            raise self._service.error(what, "correct url: the address of an API like OpenAI's") from error
        return answer


@dataclass(frozen=True, slots=True)
class _Question:
    """A filled rubric, and the images of its placeholders."""

    text: str
    images: tuple[ImageRef, ...]

    @property
    def key(self) -> bytes:
        """A hash of all that is asked."""
        parts = [self.text, *(image.hash for image in self.images)]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()

    def content(self) -> Any:
        """The turn's content: images where the text has their places, else before it."""
        text, count = self.text, len(self.images)
        if text.count(IMAGE_PLACEHOLDER) != count:
            text = IMAGE_PLACEHOLDER * count + text.replace(IMAGE_PLACEHOLDER, "[image]")
        return parts_of(text, iter(self.images), data_url)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two completions that are compared, of which the second may be the reference answer (None).

    Attributes:
        questions: The same in both orders; none for equal texts.
    """

    one: Rollout
    other: Rollout | None
    questions: tuple[_Question, ...]

    def outcome(self, verdicts: Mapping[bytes, Verdict]) -> tuple[Verdict, bool]:
        """The worth of the first completion, and True if the verdict turns with the order."""
        if not self.questions:
            return 0.5, False
        first, second = (verdicts[each.key] for each in self.questions)
        if isinstance(first, Unscored):
            return first, False
        if isinstance(second, Unscored):
            return second, False
        return (first, False) if first == 1 - second else (0.5, True)


def _standing(rollout: Rollout, pairs: Sequence[_Pair], verdicts: Mapping[bytes, Verdict]) -> Score | Unscored:
    """The mean worth of a completion in its comparisons."""
    found = list[tuple[float, bool]]()
    why = Unscored("has nothing to compare it with")
    for pair in pairs:
        if rollout is pair.one or rollout is pair.other:
            worth, flipped = pair.outcome(verdicts)
            if isinstance(worth, Unscored):
                why = worth
            else:
                found.append((worth if rollout is pair.one else 1 - worth, flipped))
    if not found:
        return why
    return {
        "score": sum(worth for worth, _ in found) / len(found),
        "flipped": sum(flipped for _, flipped in found) / len(found),
    }
