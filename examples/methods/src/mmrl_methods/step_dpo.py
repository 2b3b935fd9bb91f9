r"""Step-DPO: preferences of single reasoning steps (arXiv:2406.18629).

The two answers of a pair share the question ``q`` and the right steps ``s_1..s_(k-1)`` that come first; the chosen
goes on with a right step, the rejected with a wrong one, and both end there. With the logistic function ``s`` and the
log-ratio ``x`` of a step given all that comes before it,

    L = -log s(beta (x(s_win) - x(s_lose)))

and the step's loss is the mean over pairs. ``beta`` is 0.5 in the authors' runs with 7B, 0.4 with 72B.

A candidate here is the shared steps and the one step after them. What both share has the same log-ratio in both, so
its loss and its gradient cancel exactly, and the pair's margin is that of the two steps. In columns of the authors'
dataset Math-Step-DPO-10K: ``initial_reason_steps`` and ``chosen``, ``initial_reason_steps`` and ``rejected``.

That is DPO on such pairs. What is special are the rows, and they are looked at before a run: candidates of a row that
go on for more than a step, or that share none in most rows, are what Step-DPO is meant to avoid.

Deviation from the paper, and why: the authors put the shared steps into the prompt. Here they are a part of both
completions: the chat template then closes the prompt as the model knows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from pydantic import field_validator

from mmrl.ops.pairs import PairAlgorithm, Pairs
from mmrl.policy_gradient import Positive
from mmrl.types import Prompt

if TYPE_CHECKING:
    import torch

MOST = 0.5
"""The share of rows above which it is said of them that they share no step."""


class StepDPO(PairAlgorithm):
    class Config(PairAlgorithm.Config):
        beta: Positive = 0.5
        """Weight of the log-ratio: the greater, the nearer the policy stays to the reference."""
        step: str = r"(?m)^\s*Step \d+"
        """Regular expression of the begin of a step."""

        @field_validator("step")
        @classmethod
        def _check_step(cls, text: str) -> str:
            try:
                re.compile(text)
            except re.error as error:
                raise ValueError(f"step is no regular expression: {error}") from error
            return text

    config: Config

    def check_rows(self, rows: Iterable[Prompt]) -> Sequence[str]:
        found = [self._steps([each.text for each in row.candidates]) for row in rows if len(row.candidates) > 1]
        long, none = sum(after > 1 for _, after in found), sum(not before for before, _ in found)
        warnings = list[str]()
        if long:
            what = f"candidates of {long} of {len(found)} rows go on for more than a step after what they share"
            warnings.append(f"{what}; end each after the step that is judged")
        if none > MOST * len(found):
            what = f"candidates of {none} of {len(found)} rows share no step"
            warnings.append(f"{what}; begin each with the steps before, and let algorithm.step match how one begins")
        return warnings

    def losses(self, pairs: Pairs) -> Mapping[str, torch.Tensor]:
        from torch.nn.functional import logsigmoid

        return {"preference": -logsigmoid(self.config.beta * pairs.margins(pairs.log_ratios_N))}

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.config.beta * pairs.log_ratios_N

    def _steps(self, texts: Sequence[str]) -> tuple[int, int]:
        """The number of steps that the texts share as a whole, and the most that one of them has after these."""
        parts = [self._split(text) for text in texts]
        alike = takewhile(lambda steps: len(set(steps)) == 1, zip(*parts, strict=False))
        shared = sum(1 for _ in alike)
        return shared, max(len(each) for each in parts) - shared

    def _split(self, text: str) -> list[str]:
        """The steps of a text, without those of white space alone."""
        begins = [match.start() for match in re.finditer(self.config.step, text)]
        ends = [*begins, len(text)]
        parts = (text[start:end].strip() for start, end in zip([0, *begins], ends, strict=True))
        return [part for part in parts if part]
