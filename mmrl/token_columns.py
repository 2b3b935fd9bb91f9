"""The table of token columns: what a run has for each token of a completion, and where it comes from.

A column is an attribute of ``Batch`` (B arrays (T_i,)) and, with ``_T``, of ``PackedTokens`` ((T,) of a micro-batch);
both are None where the run lacks the column. Training rows, records, what travels between ranks, ``replay`` and the
viewer loop over the table. Which columns a run has follows from the needs of its algorithm (``Needs.columns``).

Letters: ``T`` tokens of a completion, ``U`` optimizer steps that took the completion in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy.typing as npt

Known = Literal["by credit", "sampled", "before the step", "before each update"]
"""The moment a column is known. Credit gives it, the sampler reports it with the tokens, or a network computes it: once
before the first optimizer step, or as each one begins."""

POLICY, REFERENCE = "policy", "reference"
"""The roles of the network that samples and is trained, and of the frozen initial one."""


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """A row of the table.

    Attributes:
        name: The attribute of ``Credit``, ``Sample``, ``Batch`` or ``PreUpdateStatistics`` that has it.
        known: The moment that it is known.
        record: Its field in records of rollouts; numbers by credit are one for all tokens there, or a list.
        title: Its name in messages.
        role: The network that computes it; empty if none does.
        output: The network's output that it is.
        need: The field of ``Needs`` that asks for it; empty if every run has it.
        replayed: Its key in batches of ``mmrl.testing.replay``, (B, T); empty if it has none.
        dtype: The type of its numbers; the loss takes all as float32.
        shape: The shape of a completion's numbers in records.
    """

    name: str
    known: Known
    record: str
    title: str
    role: str = ""
    output: str = ""
    need: str = ""
    replayed: str = ""
    dtype: npt.DTypeLike = "float32"
    shape: tuple[str, ...] = ("T",)

    @property
    def credited(self) -> str:
        """The attribute of ``CreditedGroup`` that has it; what the policy computes is called by the output there."""
        return self.output if self.role == POLICY else self.name

    @property
    def may_lack(self) -> bool:
        """True if records of rollouts that were learned from may lack it; every update computes the policy's own."""
        return bool(self.need) and self.role != POLICY


COLUMNS = (
    TokenColumn("advantages", "by credit", "advantage", "advantages", dtype="float64"),
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
        output="logprobs",
        need="old_logprobs",
        replayed="old_log_probs",
    ),
    TokenColumn(
        "reference_logprobs",
        "before the step",
        "reference_logprobs",
        "the reference policy's log-probs",
        role=REFERENCE,
        output="logprobs",
        need="reference_logprobs",
        replayed="ref_log_probs",
    ),
    TokenColumn(
        "logprobs",
        "before each update",
        "update_logprobs",
        "the policy's log-probs",
        role=POLICY,
        output="logprobs",
        replayed="log_probs",
        shape=("U", "T"),
    ),
    TokenColumn(
        "entropy",
        "before each update",
        "update_entropy",
        "the policy's entropy",
        role=POLICY,
        output="entropy",
        replayed="entropy",
        shape=("U", "T"),
    ),
)
"""In the order of the records' fields."""
