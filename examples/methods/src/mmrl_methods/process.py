r"""Process rewards by step, from a model that was trained to judge steps (Math-Shepherd, arXiv:2312.08935; the idea:
arXiv:2305.20050).

A causal model reads the question and the solution, with a tag after each step; the share of one of two words at a tag
is the probability that the step is right:

    q step_1 tag \n step_2 tag ...
    p_j   = p(good) / (p(good) + p(bad)) at the tag after step j
    score = min_j p_j, or another of ``total``;  p_j at the last token of step j

``grpo_process`` and ``fine_grained_ppo`` learn from the values where they are. The score, which any other algorithm
learns from, and by which solutions are ranked, is the least p in Math-Shepherd and the product in arXiv:2305.20050.

The default words are those of ``peiyi9979/math-shepherd-mistral-7b-prm``. Other models of this kind differ in ``tag``
and words. Steps are lines that are not blank, or what ``between`` separates.

Deviations, and why:

- A solution without a step has the score 0, so that an empty one is no right one.
- Words and tags that the policy writes itself are read as any text; only the reward's own tags are judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from mmrl.errors import ConfigError
from mmrl.interfaces import Reward
from mmrl.types import Rollout, Spans, Unscored
from mmrl_methods.local_models import LocalModelConfig, loaded, tokenizer_of
from mmrl_methods.served import question_of

Total = Literal["min", "product", "mean", "last", "sum"]

_LEAST = 1e-6
"""A value of 0 could not be told from none."""


class Process(Reward):
    workers = 1

    class Config(LocalModelConfig):
        good: str = "+"
        """The word that says that a step is right; one token."""
        bad: str = "-"
        """The word that says that it is wrong."""
        tag: str = "ки"
        """Text after each step, where the model is read; one token."""
        between: str = Field(default="\n", min_length=1)
        """Text between two steps."""
        total: Total = "min"
        """The score of a solution: the least, product, mean or sum of its steps' values, or that of the last step."""

    config: Config

    def prepare(self) -> None:
        _ = self._model, self._words

    def score_one(self, rollout: Rollout) -> Spans | Unscored:
        steps = steps_of(rollout.text, self.config.between)
        if not steps:
            return Spans(0.0, ())
        values = self._values(question_of(rollout), [rollout.text[start:end] for start, end in steps])
        if isinstance(values, Unscored):
            return values
        spans = [(start, end, max(value, _LEAST)) for (start, end), value in zip(steps, values, strict=True)]
        return Spans(_TOTALS[self.config.total](values), tuple(spans))

    def _values(self, question: str, steps: Sequence[str]) -> list[float] | Unscored:
        """The probability that each step is right."""
        import torch

        text, ends = question, list[int]()
        for number, step in enumerate(steps):
            text += f"{self.config.between if number else ' '}{step.strip()} {self.config.tag}"
            ends.append(len(text))
        encoded = self._tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
        tokens = encoded["input_ids"][0]
        if len(tokens) > self.config.max_tokens:
            return Unscored(f"reads at most {self.config.max_tokens} tokens, and there are {len(tokens)}")
        good, bad, tag = self._words
        at = {end: place for place, (start, end) in enumerate(encoded["offset_mapping"][0].tolist()) if end > start}
        places = [at[end] for end in ends if end in at]
        if len(places) < len(ends) or any(tokens[place] != tag for place in places):
            raise self._no_token("tag", self.config.tag)
        with torch.inference_mode():
            logits = self._model(input_ids=tokens[None].to(self._model.device), use_cache=False).logits[0]
        shares = logits[places][:, [good, bad]].double().softmax(-1)
        values: list[float] = shares[:, 0].tolist()
        return values

    @cached_property
    def _words(self) -> tuple[int, int, int]:
        """The ids of good, bad and the tag."""
        config, encode = self.config, self._tokenizer.encode
        words = encode(f"{config.good} {config.bad}", add_special_tokens=False)
        tag = encode(config.tag, add_special_tokens=False)
        if len(words) != 2:
            raise self._no_token("good and bad", f"{config.good} {config.bad}")
        if not tag:
            raise self._no_token("tag", config.tag)
        return words[0], words[1], tag[-1]

    def _no_token(self, option: str, text: str) -> ConfigError:
        what = f"{text!r} is not one token for each word in the model's tokenizer"
        return ConfigError(
            what, where=f"path: {self.config.path}, {option}", possible="the words that it was trained on"
        )

    @cached_property
    def _model(self) -> Any:
        return loaded(self.config, "CausalLM")

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self.config)


def steps_of(text: str, between: str) -> list[tuple[int, int]]:
    """Where each step that is not blank begins and ends, without white space around it."""
    steps, start = list[tuple[int, int]](), 0
    for part in text.split(between):
        if part.strip():
            steps.append((start + len(part) - len(part.lstrip()), start + len(part.rstrip())))
        start += len(part) + len(between)
    return steps


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_TOTALS: Mapping[Total, Any] = {"min": min, "product": math.prod, "mean": _mean, "last": _last, "sum": sum}
