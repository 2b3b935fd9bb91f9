r"""TTRL: test-time reinforcement learning (arXiv:2504.16084, section 2): the majority's answer is the label.

For each prompt, ``N`` completions with the answers ``a_1..a_N``:

    a*  = the most frequent answer
    R_i = 1 if a_i = a*, else 0

No reference answer is read, so a policy may learn from questions alone, such as those that it is tested on. Any
algorithm with groups learns from it; the paper's is GRPO.

The components beside the score are ``majority_share``, the share of the completions that give ``a*``, and
``label_right``, 1 where ``a*`` is the row's reference answer. The latter is for people, where a row has one. To see the
accuracy itself, list the reward ``exact`` or ``math`` with ``weight: 0``, and name it in ``trainer.eval_metric``.

Deviations from the paper's code, and why:

- It samples 64 completions for the vote and trains on 32 of them. Here all ``sampler.group_size`` do both.
- A completion without an answer has no vote, and 0. A group without any answer has 0 throughout, and no label.
- Of several answers that are equally frequent, each is a label. The code takes the one that was sampled first, which
  makes a reward depend on the order of the group. A group whose answers all differ then has no advantage.
- Answers are equal as text or as numbers (``0.5`` and ``1/2``); the code asks a verifier of formulas.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from pydantic import field_validator

from mmrl.interfaces import PluginConfig, Reward, RunFacts
from mmrl.types import Rollout, Score
from mmrl_methods.answers import answer_in, references


class TTRL(Reward):
    class Config(PluginConfig):
        pattern: str | None = None
        r"""Regular expression of an answer, whose last match counts, or its first group; null is the last
        `\boxed{...}`, else the last `<answer>...</answer>`, else the last number."""
        marked: bool = False
        """True if a number without a box or tags is no answer."""

        @field_validator("pattern")
        @classmethod
        def _is_pattern(cls, pattern: str | None) -> str | None:
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
            return pattern

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pattern = None if config.pattern is None else re.compile(config.pattern)

    def check(self, run: RunFacts) -> list[str]:
        if run.group_size < 2:
            raise ValueError(f"a vote needs completions of one prompt; set sampler.group_size, now {run.group_size}")
        if len(run.rewards) == 1:
            return ["a single completion is its own majority: for accuracy, list another reward with weight 0"]
        return []

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        groups = groupby(rollouts, key=lambda each: (each.prompt.key, each.greedy))  # a greedy one votes alone
        return [score for _, group in groups for score in self._scores([*group])]

    def answer_of(self, rollout: Rollout) -> str | None:
        return answer_in(rollout.text, self._pattern, marked=self.config.marked)

    def _scores(self, group: Sequence[Rollout]) -> list[Score]:
        answers = [self.answer_of(rollout) for rollout in group]
        votes = Counter(answer for answer in answers if answer is not None)
        most = max(votes.values(), default=0)
        labels = {answer for answer, count in votes.items() if count == most}
        right = references(group[0].answer)
        is_right = float(not labels.isdisjoint(right)) if right and labels else None
        shown = {"majority_share": most / len(group), "label_right": is_right}
        return [{"score": float(answer in labels), **shown} for answer in answers]
