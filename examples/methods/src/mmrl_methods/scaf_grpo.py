r"""Scaf-GRPO: scaffolded hints for prompts that no completion of a group solves (arXiv:2510.19807, section 3).

As ``ghpo``, with hints of three kinds in place of the beginning of a solution, from the vaguest to the plainest: the
knowledge that is needed, a plan, and the steps of a solution. Each is given in parts, 1/4 of it first, then 2/4, ...;
the plainer kind follows where all of the vaguer one did not help. So the first hint that leads to a right completion is
the least one.

    hint_{k,j} = the first j/4 of hint k,  k = knowledge, planning, solution;  j = 1..4

Deviations from the paper, and why:

- There one wrong completion of the group gives way to a right one that was sampled with the hint. Here the group is
  sampled once more with the hint, and learned given it: its completions then have one prompt and one distribution.
- The first 15 % of a run, in which the paper gives no hint, are left out: ``retry`` depends on the group alone.
- A hint is cut at a space and no sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mmrl.types import Prompt
from mmrl_methods.ghpo import Hinted, different


class ScafGRPO(Hinted):
    class Config(Hinted.Config):
        lead: str = "\nHint: "
        """Text between the question and the hint."""
        columns: tuple[str, ...] = Field(default=("knowledge", "planning", "solution"), min_length=1, strict=False)
        """Columns with the hints, the vaguest first."""
        parts: Annotated[int, Field(ge=1)] = 4
        """Parts in which each hint is given."""

    config: Config

    @property
    def num_hints(self) -> int:
        return len(self.config.columns) * self.config.parts

    @property
    def needed_columns(self) -> str:
        return f"columns names {', '.join(self.config.columns)}"

    def hints(self, row: Prompt) -> Sequence[str]:
        given = [row.columns.get(name) for name in self.config.columns]
        words = [hint.split() for hint in given if isinstance(hint, str) and hint.strip()]
        parts = range(1, self.config.parts + 1)
        return different(
            " ".join(each[: -(-len(each) * part // self.config.parts)]) for each in words for part in parts
        )
