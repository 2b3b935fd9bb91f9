r"""GHPO: guided hybrid policy optimization (arXiv:2507.10628): hints for prompts that no completion of a group solves.

GRPO, and beside it: a group whose completions are all wrong is sampled once more, with the beginning of a reference
solution in the prompt; with a longer one if that fails too.

    hint    = the first ratio * |s| characters of the row's solution s,  ratio = 0.25, 0.5, 0.75
    A_i     = (R_i - mean(R)) / (std(R) + eps)      within the group that is trained on, given its prompt and hint
    L_it    = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high)),  a mean over each completion, then over them

A group that stays wrong with the longest hint is kept, and has no advantage. Groups that are all right are kept too.
The hint's lead, its ratios and the test for "wrong" (a reward of at most 0) are those of the released code.

Deviations from the paper, and why:

- Its cold start, in which all prompts have a hint for the first 20 steps (by its text; the code's default is none), is
  left out: ``retry`` depends on the group alone, so that a run with stale weights repeats.
- A row without a solution has no hint: its group is kept as it is.
- The hint is cut at a character, as in the code; the paper counts tokens of the solution. Of a solution so short that
  hints are blank or alike, these are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from mmrl.interfaces import Needs, Refill, RunFacts
from mmrl.types import IMAGE_PLACEHOLDER, Message, Prompt, ScoredGroup
from mmrl_methods.grpo import GRPO

LEAD = "\nThe following text is the beginning part of the answer, which you can refer to for solving the problem:\n"
Ratio = Annotated[float, Field(gt=0, le=1)]


def different(hints: Iterable[str]) -> list[str]:
    """The hints without those that say no more than the one before, such as blank ones at first."""
    found = [""]
    for hint in hints:
        if hint.strip() != found[-1].strip():
            found.append(hint)
    return found[1:]


class Hinted(GRPO):
    """Base of algorithms that sample a group whose completions are all wrong once more, with a hint."""

    class Config(GRPO.Config):
        lead: str = LEAD
        """Text between the question and the hint."""
        metric: str | None = None
        """The reward that tells right from wrong; null is the first one that scores the row."""
        wrong: float = 0.0
        """A completion is wrong if the metric is at most this."""

    config: Config

    def hints(self, row: Prompt) -> Sequence[str]:
        """The hints of a row, in the order in which they are tried; none where it has none."""
        raise NotImplementedError

    @property
    def num_hints(self) -> int:
        """Most hints that a row may have."""
        raise NotImplementedError

    @property
    def needed_columns(self) -> str:
        """The columns that hints come from, as a message says it."""
        raise NotImplementedError

    def needs(self) -> Needs:
        return replace(super().needs(), refill=Refill(max_rounds=self.num_hints, on_starvation="train_partial"))

    def check(self, run: RunFacts) -> Sequence[str]:
        metric = self.config.metric
        if self.config.dynamic_sampling is not None:
            raise ValueError("dynamic_sampling replaces groups that hints are for; leave it out")
        if metric is not None and not run.has_component(metric):
            raise ValueError(f"metric is {metric!r}, and the rewards are {', '.join(run.rewards)}")
        return super().check(run)

    def check_rows(self, rows: Iterable[Prompt]) -> Sequence[str]:
        found = [bool(self.hints(row)) for row in rows]
        if found and not any(found):
            raise ValueError(f"none of {len(found)} rows has a hint; {self.needed_columns}")
        without = len(found) - sum(found)
        return [f"{without} of {len(found)} rows have no hint; {self.needed_columns}"] if without else ()

    def select(self, groups: Sequence[ScoredGroup]) -> Sequence[bool]:
        """Rejects a group that is all wrong and for which there is another hint."""
        return [not self._has_hint(group) for group in groups]

    def retry(self, group: ScoredGroup) -> Prompt | None:
        row = group.group.prompt.prompt
        if not self._has_hint(group):
            return None
        given = [self.config.lead + hint.replace(IMAGE_PLACEHOLDER, "") for hint in self.hints(row)]
        *before, last = row.messages
        question = last.content.removesuffix(given[row.retries - 1]) if row.retries else last.content
        return replace(row, messages=(*before, Message(last.role, question + given[row.retries])))

    def _has_hint(self, group: ScoredGroup) -> bool:
        """True if the group is all wrong, and another hint is left."""
        row = group.group.prompt.prompt
        return bool(row.messages) and row.retries < len(self.hints(row)) and self._is_wrong(group)

    def _is_wrong(self, group: ScoredGroup) -> bool:
        """True if some completion could be scored, and none of those is right."""
        name = self.config.metric
        scores = [group.component(name)] if name else list(group.components.values())
        values = next((each[group.valid] for each in scores if not np.isnan(each[group.valid]).any()), np.zeros(0))
        return bool(len(values) and (values <= self.config.wrong).all())


class GHPO(Hinted):
    class Config(Hinted.Config):
        solution: str = "solution"
        """Column with the reference solution."""
        ratios: tuple[Ratio, ...] = Field(default=(0.25, 0.5, 0.75), min_length=1, strict=False)
        """Shares of the solution that are given, one after the other, the smallest first."""

        @model_validator(mode="after")
        def _rise(self) -> GHPO.Config:
            if any(later <= earlier for earlier, later in pairwise(self.ratios)):
                raise ValueError(f"ratios are {', '.join(map(str, self.ratios))}: each is above the one before")
            return self

    config: Config

    @property
    def num_hints(self) -> int:
        return len(self.config.ratios)

    @property
    def needed_columns(self) -> str:
        return f"solution names the column {self.config.solution!r}, whose texts hints are parts of"

    def hints(self, row: Prompt) -> Sequence[str]:
        solution = row.columns.get(self.config.solution)
        if not isinstance(solution, str) or not solution.strip():
            return ()
        return different(solution[: round(len(solution) * ratio)] for ratio in self.config.ratios)
