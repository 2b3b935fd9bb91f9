r"""Fine-grained rewards: a value for each sentence, or part of one (arXiv:2306.01693, section 2 and appendix).

A model reads a question and a reply whose parts are told apart by a separator, and says of each part whether it has an
error of one kind:

    question: q answer: </s> part_1 </s> part_2 ...
    r_j = positive if the model finds no error in part j, else negative
    R   = sum_j r_j,  each r_j at the last token of its part

The paper has one such reward for irrelevance (``unit: clause``, 0.3 and -0.3), one for factual errors (``unit:
sentence``, 0.5 and -0.5), and one number for completeness, which is a reward of the whole reply. ``fine_grained_ppo``
learns from the values where they are; any other algorithm learns from their sum.

The model is a ``...ForTokenClassification`` of transformers, read at each separator: ``labels`` are those of an error
and of none, as in the released models, where label 0 is for all other tokens.

Deviations, and why:

- Sentences end at ``.``, ``!`` or ``?`` before white space, or at a line's end; the released code asks spaCy. Clauses
  also end at ``,`` or ``;`` if five words are on either side, as there.
- A reply that is too long for the model is unscored; the code cuts it off, and gives the rest no value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, model_validator

from mmrl.errors import ConfigError
from mmrl.interfaces import Reward
from mmrl.types import Rollout, Spans, Unscored
from mmrl_methods.local_models import LocalModelConfig, loaded, tokenizer_of
from mmrl_methods.served import question_of

Part = tuple[int, int]
"""Where a part begins and ends, in characters."""

_SENTENCE_END = re.compile(r"[.!?]+(?=\s)|\n|\Z")
_CLAUSE_END = re.compile(r"[,;](?=\s)")
_WORDS = 5
"""Least words of a clause, and of what follows it."""


class FineGrained(Reward):
    workers = 1

    class Config(LocalModelConfig):
        unit: Literal["sentence", "clause"] = "sentence"
        """Parts of a reply that have a value each."""
        positive: FiniteFloat = 0.5
        """Value of a part without an error."""
        negative: FiniteFloat = -0.5
        """Value of a part with an error."""
        labels: tuple[NonNegativeInt, NonNegativeInt] = (1, 2)
        """The model's labels of a part with an error, and of one without."""
        separator: Annotated[str, Field(min_length=1)] = "</s>"
        """Text before each part, at which the model is read; one token."""

        @model_validator(mode="after")
        def _differ(self) -> FineGrained.Config:
            if not self.positive or not self.negative:
                raise ValueError("positive and negative are not 0: a value of 0 cannot be told from none")
            if self.labels[0] == self.labels[1]:
                raise ValueError(f"labels are {self.labels[0]} and {self.labels[1]}: they differ")
            return self

    config: Config

    def prepare(self) -> None:
        _ = self._model, self._tokenizer

    def score_one(self, rollout: Rollout) -> Spans | Unscored:
        text = rollout.text
        parts = sentences(text) if self.config.unit == "sentence" else clauses(text)
        if not parts:
            return Spans(0.0, ())
        right = self._right(question_of(rollout), [text[start:end] for start, end in parts])
        if isinstance(right, Unscored):
            return right
        values = [self.config.positive if each else self.config.negative for each in right]
        spans = [(*part, value) for part, value in zip(parts, values, strict=True)]
        return Spans(sum(values), tuple(spans))

    def _right(self, question: str, parts: Sequence[str]) -> list[bool] | Unscored:
        """True for each part in which the model finds no error."""
        import torch

        mark, text, begins = self.config.separator, f"question: {question} answer:", list[int]()
        for part in parts:
            text += " "
            begins.append(len(text))
            text += f"{mark} {part.replace(mark, ' ').strip()}"
        encoded = self._tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
        count = encoded["input_ids"].shape[1]
        if count > self.config.max_tokens:
            return Unscored(f"reads at most {self.config.max_tokens} tokens, and there are {count}")
        at = {(start, end): place for place, (start, end) in enumerate(encoded["offset_mapping"][0].tolist())}
        ends = ((begin, begin + len(mark)) for begin in begins)
        places = [at[each] for each in ends if each in at]
        if len(places) < len(begins):
            what = f"{mark!r} is no token of its own"
            raise self._unfit(f"separator: {mark}", what, "the separator that the model was trained with")
        with torch.inference_mode():
            logits = self._model(input_ids=encoded["input_ids"].to(self._model.device)).logits[0].float()
        error, none = self.config.labels
        if max(error, none) >= logits.shape[1]:
            has = f"the model has {logits.shape[1]} labels"
            raise self._unfit(f"labels: {error}, {none}", has, f"0 to {logits.shape[1] - 1}")
        return [bool(logits[place, none] > logits[place, error]) for place in places]

    def _unfit(self, option: str, what: str, possible: str) -> ConfigError:
        return ConfigError(what, where=f"path: {self.config.path}, {option}", possible=possible)

    @cached_property
    def _model(self) -> Any:
        return loaded(self.config, "TokenClassification")

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self.config)


def sentences(text: str) -> list[Part]:
    """The sentences of a text, without the white space around them."""
    return _stripped(text, [match.end() for match in _SENTENCE_END.finditer(text)])


def clauses(text: str) -> list[Part]:
    """The sentences, cut at commas and semicolons that have five words of the sentence on either side."""
    found = list[Part]()
    for start, end in sentences(text):
        begin = start
        for match in _CLAUSE_END.finditer(text, start, end):
            before, after = text[begin : match.end()], text[match.end() : end]
            if min(len(before.split()), len(after.split())) >= _WORDS:
                found += _stripped(text, [match.end()], begin)
                begin = match.end()
        found += _stripped(text, [end], begin)
    return found


def _stripped(text: str, ends: Sequence[int], start: int = 0) -> list[Part]:
    """The parts that end there, without blank ones and without the white space around them."""
    parts = list[Part]()
    for end in ends:
        part = text[start:end]
        if part.strip():
            parts.append((start + len(part) - len(part.lstrip()), start + len(part.rstrip())))
        start = end
    return parts
