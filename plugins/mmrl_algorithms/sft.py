"""Supervised fine-tuning: maximum likelihood of the dataset's own completions.

    L = -1/N sum_i sum_t log pi(y_it),  N tokens in the batch

The mean is over the tokens of the whole batch, as in language-model training; the prompt gets no gradient.

A row may be a conversation. ``turns: last`` learns its last turn, and all before is the prompt. ``turns: all`` learns
every turn of the assistant after the first question that is not empty; questions, tools' answers and images in between
get no gradient.

A row may be a document, text with images in between: all of its text is learned, whatever ``turns`` says.

Where the chat template removes the thoughts of earlier turns, ``turns: all`` learns these without.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from mmrl.interfaces import Aggregation, AggregationMode, Algorithm, Needs, PluginConfig
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss


class SFT(Algorithm):
    source = "demonstrations"

    class Config(PluginConfig):
        aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
        """The average over per-token losses."""
        turns: Literal["last", "all"] = "last"
        """The turns of the assistant that are learned: a conversation's last, or all after its first question."""

    config: Config

    def needs(self) -> Needs:
        return Needs(all_turns=self.config.turns == "all")

    @property
    def aggregation(self) -> Aggregation:
        mode: AggregationMode = self.config.aggregation
        return Aggregation(mode)

    def credit(self, batch: Batch) -> Credit:
        return Credit(np.ones(len(batch.rewards)))

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        nll_T = -tokens.logprobs_T
        return TokenLoss(nll_T, {"policy": nll_T})
