"""The table of token columns: what a run has for each token of a completion, and where it comes from.

``PackedTokens`` has each column, with ``_T``: (T,) of a micro-batch. ``Batch`` has those that are sampled or known
before the step: B arrays (T_i,). One that the run lacks is None, but for ``old_logprobs_T``: then it is the current
log-probs. Training rows, records, what travels between ranks, ``replay`` and the viewer loop over the table. Which
columns a run has follows from the needs of its algorithm (``Needs.columns``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy.typing as npt

Known = Literal["by credit", "sampled", "before the step", "before each update"]
"""The moment a column is known. Credit gives it, the sampler reports it with the tokens, or a network computes it: once
before the first optimizer step, or as each one begins."""

POLICY, REFERENCE, REWARD, CRITIC = "policy", "reference", "reward", "critic"
"""The roles of networks: the one that samples and is trained; the frozen one, which is the initial policy or a teacher;
a reward model, which is trained alone; and a critic, which is trained beside the policy."""


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """A row of the table.

    Attributes:
        name: The attribute of ``Credit``, ``Sample``, ``Batch`` or ``PreUpdateStatistics`` that has it.
        known: The moment that it is known.
        record: Its field in records of rollouts; numbers by credit are one for all tokens there, or a list.
        title: Its name in messages.
        role: The network that computes it; empty if none does. Before the step it is what ``Network.score`` answers, so
            a network has one such column.
        need: The field of ``Needs`` that asks for it; empty if every run has it.
        replayed: Its key in batches of ``mmrl.testing.replay``, (B, T); empty if it has none.
        loss_name: Its name in ``PackedTokens``, before ``_T``, where that is another.
        dtype: The type of its numbers; the loss takes all as float32.
    """

    name: str
    known: Known
    record: str
    title: str
    role: str = ""
    need: str = ""
    replayed: str = ""
    loss_name: str = ""
    dtype: npt.DTypeLike = "float32"

    @property
    def packed(self) -> str:
        """The attribute of ``PackedTokens`` that has it."""
        return f"{self.loss_name or self.name}_T"

    @property
    def credited(self) -> str:
        """The attribute of ``CreditedGroup`` that has it: the policy's before the step have no ``old_`` there."""
        return self.name.removeprefix("old_")

    @property
    def mismatched(self) -> str:
        """The attribute of ``Batch`` and ``CreditedGroup`` that has it for prompts with other rows' completions."""
        return f"mismatched_{self.credited}"

    @property
    def mismatched_record(self) -> str:
        """The field of these in records of rollouts."""
        return f"mismatched_{self.record}"

    @property
    def mismatched_replayed(self) -> str:
        """The key of these in batches of ``mmrl.testing.replay``."""
        return f"mismatched_{self.replayed.removeprefix('old_')}"

    @property
    def is_per_update(self) -> bool:
        """True if a completion has numbers for each optimizer step that took it in."""
        return self.known == "before each update"

    @property
    def may_lack(self) -> bool:
        """True if records of rollouts that were learned from may lack it; every update computes the policy's own."""
        return bool(self.need) and self.role != POLICY


COLUMNS = (
    TokenColumn("advantages", "by credit", "advantage", "advantages", dtype="float64"),
    TokenColumn("returns", "by credit", "return", "returns", need="values", dtype="float64"),
    TokenColumn(
        "sampler_logprobs",
        "sampled",
        "sampler_logprobs",
        "the sampler's log-probs",
        replayed="rollout_log_probs",
    ),
    TokenColumn(
        "old_logprobs",
        "before the step",
        "learner_logprobs",
        "the policy's log-probs before the step",
        role=POLICY,
        need="old_logprobs",
        replayed="old_log_probs",
    ),
    TokenColumn(
        "reference_logprobs",
        "before the step",
        "reference_logprobs",
        "the reference policy's log-probs",
        role=REFERENCE,
        need="reference_logprobs",
        replayed="ref_log_probs",
    ),
    TokenColumn(
        "values",
        "before the step",
        "value",
        "the critic's values before the step",
        role=CRITIC,
        need="values",
        replayed="values",
        loss_name="old_values",
    ),
    TokenColumn(
        "logprobs",
        "before each update",
        "update_logprobs",
        "the policy's log-probs",
        role=POLICY,
        replayed="log_probs",
    ),
    TokenColumn(
        "entropy",
        "before each update",
        "update_entropy",
        "the policy's entropy",
        role=POLICY,
        replayed="entropy",
    ),
    TokenColumn(
        "vpreds",
        "before each update",
        "update_value",
        "the critic's values",
        role=CRITIC,
        need="values",
        replayed="vpreds",
        loss_name="values",
    ),
)
"""In the order of the records' fields."""

CRITIC_COLUMNS = tuple(column for column in COLUMNS if column.need == "values")
"""Columns of a critic, which its rows have in place of the policy's."""

MISMATCHED_COLUMNS = tuple(column for column in COLUMNS if column.known == "before the step" and column.role != CRITIC)
"""Columns that prompts with other rows' completions have too, in a run whose algorithm asks for them."""

VIEW_COLUMNS = tuple(
    TokenColumn(
        column.name,
        column.known,
        f"{column.record}_of_views",
        f"{column.title} given a view",
        role=POLICY,
        need="views",
        replayed=column.replayed,
    )
    for column in COLUMNS
    if column.known == "before each update" and column.role == POLICY
)
"""Columns that a run has for each view that is scored. ``PackedTokens.views`` and ``PreUpdateStatistics.views`` have
them by the view's name, as have records of runs with views."""
