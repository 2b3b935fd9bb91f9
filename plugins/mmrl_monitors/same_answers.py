"""Wrong prompts whose completions all give the same answer: sampling more of them finds nothing else.

In multi-turn runs that fail, 70 % of the failures repeat one wrong answer. Measured are the prompts that are wrong
throughout: ``wrong`` is their share, and ``distinct`` the mean of (different answers - 1) / (completions - 1). That is
0 where all are the same and 1 where none is, whatever the group's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView
from mmrl.types import ScoredGroup
from mmrl_monitors.within import HALF

LEAST = 4
"""Completions of a prompt without which their answers are not compared."""


class SameAnswers(Monitor):
    """Prompts that are never right get the same wrong answer again and again."""

    class Config(PluginConfig):
        distinct: Annotated[float, Field(gt=0, lt=1)] = 0.08
        """Different answers beyond the first one, over completions beyond the first one."""
        wrong: Annotated[float, Field(gt=0, lt=1)] = 0.3
        """Share of the prompts that must be wrong throughout."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        if (right := record.run.accuracy) is None:
            return {}
        scored = [group.scored for group in record.groups if int(group.scored.valid.sum()) >= LEAST]
        shares = [_distinct(group, right) for group in scored if _is_wrong(group, right)]
        found = {"wrong": len(shares) / len(scored)} if scored else {}
        return found | ({"distinct": float(np.mean(shares))} if shares else {})

    def look(self, step: StepView) -> Sequence[Finding]:
        wrong, distinct = step.measured("wrong"), step.measured("distinct")
        if wrong is None:
            return ()
        few = 0.0 if distinct is None else self.config.distinct / max(distinct, 1e-6)
        return (
            Finding(
                min(few, wrong / self.config.wrong),
                "prompts that are never right get one wrong answer again and again",
                "raise sampler.temperature or the entropy bonus, warm up on demonstrations of such prompts, or leave "
                "them out: more completions of them find nothing else",
                {"distinct_answers": distinct or 0.0, "wrong_prompts": wrong},
            ),
        )


def _is_wrong(group: ScoredGroup, right: str) -> bool:
    values = group.component(right)[group.valid]
    return not np.isnan(values).all() and float(np.nanmax(values)) < HALF


def _distinct(group: ScoredGroup, right: str) -> float:
    """Different answers of the valid completions, 0 to 1; a text where no reward reads an answer."""
    read = group.answers.get(right, [None] * len(group.rollouts))
    texts = [" ".join(rollout.turns).strip() for rollout in group.rollouts]
    answers = [text if answer is None else answer for answer, text in zip(read, texts, strict=True)]
    valid = np.flatnonzero(group.valid).tolist()
    return (len({answers[i] for i in valid}) - 1) / (len(valid) - 1)
