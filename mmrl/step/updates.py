"""The account of a step's optimizer steps: ledger, events and progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mmrl.errors import NumericsError
from mmrl.step.learn import Update
from mmrl.token_columns import CRITIC
from mmrl.types import SampleKey

MAX_FAULTS = 3
"""Optimizer steps in a row that may come to nothing because a number is not finite."""


class UpdateRecorder(Protocol):
    """The recorder of a run's optimizer steps."""

    def trained(self, step: int, update: int, samples: Sequence[SampleKey]) -> None:
        """The samples that entered an optimizer step."""
        ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...


class UpdateLog:
    """Counts a run's optimizer steps and records them.

    Attributes:
        updates: Optimizer steps taken so far, those of a critic left out.
        faults_in_a_row: By network, the number of its last ones in a row that came to nothing.
    """

    def __init__(self, recorder: UpdateRecorder) -> None:
        self._recorder = recorder
        self.updates = 0
        self.faults_in_a_row: dict[str, int] = {}

    def note(self, step: int, update: Update, total: int) -> None:
        """Record an optimizer step.

        Args:
            total: Optimizer steps of the step.

        Raises:
            NumericsError: Too many in a row came to nothing.
        """
        if update.result.fault:
            self._report_fault(step, update)
            return
        self.faults_in_a_row[update.network] = 0
        if update.result.notice:
            self._recorder.event("adapted", message=update.result.notice, step=step)
        if update.samples:
            self.updates += 1
            self._recorder.trained(step, self.updates, update.samples)
        if update.network != CRITIC:
            self._recorder.progress("update", update.done, total)

    def _report_fault(self, step: int, update: Update) -> None:
        """Note an optimizer step that came to nothing, with its rows.

        Raises:
            NumericsError: It is one of too many in a row.
        """
        in_a_row = self.faults_in_a_row[update.network] = self.faults_in_a_row.get(update.network, 0) + 1
        rows, fault, name, whose = update.rows, update.result.fault, "advantages", ""
        if update.network == CRITIC:
            name, whose = "returns", " of the critic"
        learned = np.concatenate([np.zeros(0), *(row.columns[name] for row in rows)])
        self._recorder.event(
            "update_skipped",
            message=f"no optimizer step{whose} was taken in step {step}: {fault}",
            step=step,
            in_a_row=in_a_row,
            samples=sorted({row.sample.prompt.id for row in rows}),
            completion_tokens=[len(row.mask) for row in rows],
            weights=[row.weight for row in rows],
            **{name: {"min": float(learned.min(initial=0)), "max": float(learned.max(initial=0))}},
        )
        if in_a_row >= MAX_FAULTS:
            raise NumericsError(
                f"{MAX_FAULTS} optimizer steps{whose} in a row came to nothing: {fault}",
                where=f"step {step}; events.jsonl has the samples and statistics of each, RUN/rollouts the rollouts",
                remedy=f"lower {'critic' if update.network == CRITIC else 'learner'}.lr; the last checkpoint is good",
            )
