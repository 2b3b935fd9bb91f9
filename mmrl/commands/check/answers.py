"""Made-up answers to a prompt, and the rewards that they earn.

Rewards run in their worker processes as in a run, so one that hangs costs its deadline here too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmrl.commands.check.spelling import respelled, written
from mmrl.rollout.rewards.failures import Failures
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.made_up import completions
from mmrl.system.report import excerpt
from mmrl.types import EncodedPrompt, Prompt


@dataclass(frozen=True, slots=True)
class TriedAnswer:
    """One answer to one prompt, and each reward's value for it; NaN where it cannot score.

    Attributes:
        reasons: Why it cannot, by reward, as far as rewards say so.
    """

    kind: str
    text: str
    components: Mapping[str, float]
    total: float
    is_scored: bool
    reasons: Mapping[str, str] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """For a program; null where it cannot be scored."""
        scores = {name: None if np.isnan(value) else value for name, value in self.components.items()}
        found = {"answer": self.kind, "text": self.text, "rewards": scores, "reward": self.total}
        return found | ({"reasons": dict(self.reasons)} if self.reasons else {})

    def cells(self) -> tuple[str, str, str, str]:
        """For a person: a row of a table."""
        scores = ", ".join(
            f"{name} {'-' if np.isnan(value) else f'{value:g}'}" for name, value in self.components.items()
        )
        return self.kind, f"{self.total:.3g}", f"({scores})", excerpt(self.text)

    def reason_lines(self) -> list[str]:
        """For a person: why rewards cannot score it."""
        return [f"{self.kind}: {reward} {why}" for reward, why in self.reasons.items()]


def try_rewards(
    scorer: Scorer, prompt: EncodedPrompt, max_new_tokens: int, own: Sequence[str] = ()
) -> list[TriedAnswer]:
    """A right, a wrong, an empty and a truncated answer, scored by all rewards.

    The right one has the form that earns most. Without a reference answer the first two are just two answers.

    Args:
        own: Right answers that rewards write themselves.

    Raises:
        PluginError: A reward fails.
    """
    row = prompt.prompt
    wrong = wrong_for(written(row.answer)[0])
    right = [f"The answer is \\boxed{{{reference}}}." for reference in (*written(row.answer), *own)]
    whole = row.demonstration or right[0]
    texts = {
        **{f"right {i}": text for i, text in enumerate(right)},
        "wrong": f"The answer is \\boxed{{{wrong}}}.",
        "empty": "",
        "truncated": whole[: max(whole.rfind("\\boxed{") + len("\\boxed{"), len(whole) // 2)],
    }
    groups = [
        completions(prompt, [text], max_new_tokens if kind == "truncated" else None) for kind, text in texts.items()
    ]
    tried = []
    submitted = [(Failures(bounded=False), group) for group in groups]
    scorings = [(failures, scorer.submit(group, failures)) for failures, group in submitted]
    for (kind, text), (failures, scoring) in zip(texts.items(), scorings, strict=True):
        scored = scoring.result()
        components = {name: float(values[0]) for name, values in scored.components.items()}
        reasons = {each.reward: each.cause for each in failures.unscored_since(0)}
        tried.append(TriedAnswer(kind, text, components, float(scored.rewards[0]), bool(scored.valid[0]), reasons))
    best = max(tried[: len(right)], key=lambda answer: (answer.is_scored, answer.total))
    if row.answer is None:
        return [replace(best, kind="one"), replace(tried[len(right)], kind="another"), *tried[len(right) + 1 :]]
    return [replace(best, kind="right"), *tried[len(right) :]]


def right_forms(answer: Any) -> dict[str, str]:
    """Ways of giving the reference answer, by name."""
    forms = {}
    for place, reference in enumerate(written(answer)):
        whole = " whole" if place else ""
        forms[f"boxed{whole}"] = f"\\boxed{{{reference}}}"
        forms[f"tagged{whole}"] = f"<answer>{reference}</answer>"
        forms[f"bare{whole}"] = reference
    return forms


def other_forms(answer: Any) -> dict[str, str]:
    """Ways of giving it in another spelling, by name; empty if it has none."""
    other = respelled(answer) if isinstance(answer, str) else None
    return {} if other is None else {"other boxed": f"\\boxed{{{other}}}", "other bare": other}


def wrong_for(reference: str) -> str:
    """An answer of the same kind that is far from the reference answer."""
    if re.fullmatch(r"[+-]?\d{1,15}", reference):
        return str(3 * abs(int(reference)) + 7)
    if re.fullmatch(r"[A-Z]", reference):
        return "A" if reference == "B" else "B"
    return "-98765"


def unread(prompt: Prompt) -> EncodedPrompt:
    """The prompt as far as a reward of texts needs it, without tokens and images."""
    text = "\n".join(message.content for message in prompt.messages)
    return EncodedPrompt(prompt=replace(prompt, images=()), text=text, token_ids=np.zeros(0, np.int32), images=())
