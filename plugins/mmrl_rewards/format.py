"""1 for a completion that has the form asked for, else 0; the form is a regular expression; no reference is read.

Accepted: completions that match ``pattern`` as a whole, ``.`` matching line breaks too. Where the prompt ends with an
open think tag, that tag and the completion together must match; a pattern of yours may also match the completion alone.
The default asks for a box at the end. A box or answer tags in thinking do not end a completion. The forms with a name
take time linear in the completion. The reward's ``timeout_s`` stops a pattern of yours that backtracks without end.
"""

from __future__ import annotations

import re

from pydantic import field_validator

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import is_box_at_end
from mmrl_rewards.thinking import opened_by_prompt, reply_of

_CONTENT = r"\s*+(?:(?!</?(?:think|answer)>).)++"
"""Text without tags that is not blank."""
FORMS = {
    "boxed": ".*",
    "answer": rf"(?>.*?<answer>){_CONTENT}</answer>\s*+",
    "think_then_answer": rf"\s*+<think>{_CONTENT}</think>\s*+<answer>{_CONTENT}</answer>\s*+",
    "think_then_boxed": rf"\s*+<think>{_CONTENT}</think>(?!.*</?think>).*",
}
"""Forms by name, without backtracking (possessive and atomic groups)."""
_BOX_AT_END = ("boxed", "think_then_boxed")
"""Forms that also ask for a box at the end, whose braces no regular expression can match."""


class Format(Reward):
    """Match with a regular expression."""

    class Config(PluginConfig):
        pattern: str = "boxed"
        r"""The form of the whole completion: a regular expression like ``<sum>\d+</sum>\s*``, or boxed (a box at
        the end), answer (answer tags at the end), think_then_answer (think tags, then answer tags, nothing else) or
        think_then_boxed (think tags, then text with a box at its end)."""

        @field_validator("pattern")
        @classmethod
        def _compiles(cls, pattern: str) -> str:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}; forms are {', '.join(FORMS)}") from error
            return pattern

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pattern = re.compile(FORMS.get(config.pattern, config.pattern), re.DOTALL)

    def score_one(self, rollout: Rollout) -> Score:
        whole = opened_by_prompt(rollout) + rollout.text
        if self.config.pattern not in FORMS:
            return float(any(map(self._pattern.fullmatch, {whole, rollout.text})))
        return float(bool(self._pattern.fullmatch(whole)) and self._ends_in_answer(rollout))

    def _ends_in_answer(self, rollout: Rollout) -> bool:
        texts = (
            rollout.text,
            reply_of(rollout),
        )  # the second lacks an answer in thinking, the first shows what follows
        if self.config.pattern in _BOX_AT_END:
            return all(map(is_box_at_end, texts))
        return all(text.rstrip().endswith("</answer>") for text in texts)
