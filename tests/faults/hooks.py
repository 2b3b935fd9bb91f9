"""Algorithms of the fake engine's runs that ask for hooks, and their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmrl.interfaces import Aggregation, Algorithm, Needs
from mmrl.types import Batch, Credit, PackedTokens, Spans, TokenLoss


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
