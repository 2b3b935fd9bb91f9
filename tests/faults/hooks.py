"""Algorithms of the fake engine's runs that ask for hooks, and their rewards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.interfaces import Aggregation, Algorithm, Needs, Refill
from mmrl.types import (
    Batch,
    Credit,
    Experience,
    Message,
    PackedTokens,
    Prompt,
    ScoredGroup,
    Spans,
    TokenLoss,
)


class _Reinforce(Algorithm):
    """Advantages of each token, with the batch's mean as baseline."""

    asked = Needs()

    def needs(self) -> Needs:
        return self.asked

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("token-mean")

    def credit(self, batch: Batch) -> Credit:
        mean = batch.rewards[batch.valid].mean() if batch.valid.any() else 0.0
        return Credit(np.where(batch.valid, batch.rewards - mean, 0.0))

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)


class Dense(_Reinforce):
    """Each token's advantage is what rewards say of the text from there on."""

    asked = Needs(token_rewards=True)

    def credit(self, batch: Batch) -> Credit:
        assert batch.token_rewards is not None
        to_go = [np.cumsum(values_T[::-1])[::-1] for values_T in batch.token_rewards]
        return Credit(to_go, metrics={"dense/sum": float(sum(values_T.sum() for values_T in batch.token_rewards))})


def spans(rollouts: Sequence[Any]) -> list[Any]:
    """The first half of a text is worth the place of its first letter, the whole of it 1."""
    return [
        Spans(
            float(len(each.text)), ((0, (len(each.text) + 1) // 2, ord(each.text[0]) - 100.0), (0, len(each.text), 1))
        )
        if each.text
        else 0.0
        for each in rollouts
    ]


class Shown(_Reinforce):
    """The demonstration of each prompt is learned beside what the policy writes, and counts in the baseline."""

    asked = Needs(demonstration=True)

    def credit(self, batch: Batch) -> Credit:
        assert batch.given is not None
        assert batch.given.sum() == len(np.unique(batch.group_ids))
        assert all(not each.any() for each in itertools.compress(batch.sampler_logprobs, batch.given))
        return super().credit(batch)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        given_T = tokens.given_N[tokens.sequence_T]
        # What nobody sampled has no ratio to the sampler: the numbers are those before the step.
        ratio_T = (tokens.logprobs_T - tokens.sampler_logprobs_T).exp()
        return TokenLoss(-tokens.advantages_T * ratio_T, {}, {"shown/share": given_T.to(ratio_T.dtype)})


class Hinted(_Reinforce):
    """A group whose rewards are all 0 is sampled again with the answer in the question, at most twice; others stay."""

    asked = Needs(refill=Refill(3))

    def select(self, groups: Sequence[ScoredGroup]) -> Sequence[bool]:
        return [bool(group.rewards.any()) for group in groups]

    def retry(self, group: ScoredGroup) -> Prompt | None:
        row = group.group.prompt.prompt
        if row.retries == 2:
            return None
        hint = Message("user", f"{row.messages[-1].content}it is {row.answer}")
        return replace(row, messages=(*row.messages[:-1], hint))


class Replaying(_Reinforce):
    """Of each group the best is kept, and the oldest kept one takes the place of its worst."""

    asked = Needs(experience=2)

    def remember(self, group: ScoredGroup) -> Sequence[int]:
        return [int(np.argmax(np.where(group.valid, group.rewards, -np.inf)))] if group.valid.any() else []

    def recall(self, group: ScoredGroup, kept: Sequence[Experience]) -> Mapping[int, int]:
        return {int(np.argmin(group.rewards)): 0}

    def credit(self, batch: Batch) -> Credit:
        assert batch.recalled is not None
        return replace(super().credit(batch), metrics={"replaying/recalled": float(batch.recalled.sum())})


def rare(rollouts: Sequence[Any]) -> list[float]:
    """1 for a text that begins with one of three letters."""
    return [float(each.text[:1] in ("a", "b", "c")) for each in rollouts]
