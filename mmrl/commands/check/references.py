"""Reference answers that no answer can match, that graders hang on, or that their own demonstrations contradict."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from mmrl.commands.check.answers import other_forms, right_forms, unread, wrong_for
from mmrl.commands.check.reference_report import SHOWN, ReferenceReport
from mmrl.commands.check.spelling import written
from mmrl.errors import PluginError
from mmrl.rollout.rewards.failures import Failures
from mmrl.rollout.rewards.pool import RewardScores
from mmrl.rollout.rewards.scorer import PooledReward
from mmrl.runs.made_up import completions
from mmrl.system.report import excerpt
from mmrl.types import EncodedPrompt, Prompt

SLOW_S = 0.5
"""An answer that takes longer is graded too slowly: its reference has a value that cannot be computed."""
_TOWER = re.compile(r"\*\*|\d\s*!|\^[^^]*\^\s*\{?\s*\d")
"""Powers of powers and factorials, whose digits may not fit any memory."""
_TRIES = 4
"""Times that a slow answer is graded, of which all must be slow."""
_IN_FLIGHT = 512
_COMPARED = 50
"""Other rows' references that a demonstration is compared with."""


Written = Callable[[Prompt], tuple[EncodedPrompt, str | None]]
"""A row as its reward sees it, and the right answer that the reward itself writes; None is the reference answer."""


def _as_it_is(prompt: Prompt) -> tuple[EncodedPrompt, None]:
    return unread(prompt), None


def check_references(
    prompts: Iterable[Prompt], reward: PooledReward, name: str, right: Written = _as_it_is
) -> ReferenceReport:
    """Compare each row's reference answer, in a box, in answer tags and bare, with a wrong answer.

    It is written as a person would, and not as the data spells it.

    Args:
        prompts: Rows that the reward scores.
        reward: One that tells right from wrong.
        name: The reward's name in the report.
        right: Gives the row's right answer, where it has another form than the reference answer.
    """
    report = ReferenceReport(name)
    contradicted, slow, rejected, references = list[_Row](), list[Prompt](), list[_Row](), dict[str, None]()
    for row in _finished(_submit(reward, prompt, right) for prompt in prompts):
        if row.error is not None:
            report.error = row.error
            break
        if row.is_unscored:
            report.unscored.append(row.prompt.id)
            continue
        if row.prompt.answer is None:
            report.without_reference += 1
            continue
        references[row.reference] = None
        before = len(report.rejected)
        _note(report, row)
        rejected += [row] * (len(report.rejected) - before)
        if row.seconds > SLOW_S:
            slow.append(row.prompt)
        if not row.earns("demonstration"):
            contradicted.append(row)
    report.slow = [(row.prompt.id, excerpt(row.prompt.answer), row.seconds) for row in _still_slow(reward, slow, right)]
    report.contradicted = [(row.prompt.id, excerpt(row.prompt.answer)) for row in contradicted]
    report.ignores_references = bool(rejected) and all(_is_the_same(reward, row) for row in rejected[:SHOWN])
    if contradicted:
        report.swapped = _earn_others(reward, contradicted[:SHOWN], list(references))
    return report


@dataclass(slots=True)
class _Row:
    """A row that is being graded.

    Attributes:
        forms: The form of each rollout.
        answer: Waits for the reward's answer.
        why: How the reward failed on it, where that does not stop a run.
        seconds: Time of the slowest rollout.
        scores: Scores by form; NaN where the reward cannot score.
    """

    prompt: Prompt
    reference: str
    forms: Sequence[str]
    answer: Callable[[], RewardScores]
    failures: Failures
    error: PluginError | None = None
    why: str = ""
    seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def is_unscored(self) -> bool:
        return not self.why and all(np.isnan(score) for score in self.scores.values())

    def earns(self, form: str) -> bool:
        """True if this form earns more than the wrong answer, or the row lacks it."""
        return form not in self.scores or bool(np.nan_to_num(self.scores[form]) > np.nan_to_num(self.scores["wrong"]))

    def finish(self) -> None:
        try:
            answer = self.answer()
        except PluginError as error:
            self.error = error
            return
        values = (np.nan if score is None else score for score in answer.scores)
        self.scores = dict(zip(self.forms, values, strict=True))
        self.seconds = max(answer.seconds)
        self.why = "; ".join(dict.fromkeys(failure.cause for failure in self.failures.since(0)))


def _note(report: ReferenceReport, row: _Row) -> None:
    """Add one row to the report."""
    report.graded += 1
    shown = excerpt(row.prompt.answer)
    if _TOWER.search(row.reference):
        report.towers.append((row.prompt.id, shown))
    forms, others = right_forms(row.prompt.answer), other_forms(row.prompt.answer)
    is_earned = any(row.earns(form) for form in forms)
    if not is_earned and not any(row.earns(form) for form in others):
        best, wrong = max(np.nan_to_num(row.scores[form]) for form in forms), np.nan_to_num(row.scores["wrong"])
        why = row.why or f"right {best:g}, wrong {wrong:g}"
        if row.reference != str(row.prompt.answer) and isinstance(row.prompt.answer, str | float):
            why += f", written {excerpt(row.reference)}"
        report.rejected.append((row.prompt.id, shown, why))
    elif others and not any(row.earns(form) for form in others):
        report.misspelled.append((row.prompt.id, shown, excerpt(others["other bare"])))
    elif not any(row.earns(form) for form in (*forms, *others) if "boxed" in form):
        report.unboxed.append(row.prompt.id)
    report.demonstrations += "demonstration" in row.forms
    scores = {form: score for form, score in row.scores.items() if not np.isnan(score)}
    report.values = (min([report.values[0], *scores.values()]), max([report.values[1], *scores.values()]))
    partial = ((score, form) for form, score in scores.items() if score not in (0.0, 1.0))
    report.partial = report.partial or next(partial, None)


def _still_slow(reward: PooledReward, prompts: Sequence[Prompt], right: Written) -> list[_Row]:
    """The rows that are slow again: each worker's first call imports packages, and a machine may be busy."""
    rows = list[_Row]()
    for again in range(1, _TRIES):
        graded = _finished(_submit(reward, prompt, right, again) for prompt in prompts)
        rows = [row for row in graded if row.seconds > SLOW_S]
        if not 0 < len(rows) <= SHOWN:
            break
        prompts = [row.prompt for row in rows]
    return rows


def _submit(reward: PooledReward, prompt: Prompt, right: Written, again: int = 0) -> _Row:
    """Grade a row; each time that it is graded ``again`` it gets another wrong answer, which is new to the reward."""
    reference = written(prompt.answer)[0]
    (seen, own), texts = right(prompt), _answers(prompt, f"{-98765 - again}" if again else wrong_for(reference))
    texts |= {} if own is None else right_forms(own)
    rollouts, failures = completions(seen, [*texts.values()]).rollouts, Failures(bounded=False)
    return _Row(prompt, reference, [*texts], reward.ask(rollouts, failures), failures)


def _answers(prompt: Prompt, wrong: str) -> dict[str, str]:
    """The row's answers, by form."""
    demonstration = {} if prompt.demonstration is None else {"demonstration": prompt.demonstration}
    return {**right_forms(prompt.answer), **other_forms(prompt.answer), "wrong": f"\\boxed{{{wrong}}}", **demonstration}


def _is_the_same(reward: PooledReward, row: _Row) -> bool:
    """True if the row's answers earn the same with another reference."""
    texts = _answers(row.prompt, wrong_for(row.reference))
    other = unread(replace(row.prompt, answer=wrong_for(row.reference)))
    answer = reward.ask(completions(other, [*texts.values()]).rollouts, Failures(bounded=False))
    try:
        scores = [np.nan if score is None else score for score in answer().scores]
    except PluginError:
        return False
    return bool(row.scores) and np.array_equal(scores, [row.scores[form] for form in texts], equal_nan=True)


def _finished(rows: Iterator[_Row]) -> Iterator[_Row]:
    """The rows with their scores, in order; few are under way at a time, so that memory stays bounded."""
    waiting = deque(islice(rows, _IN_FLIGHT))
    while waiting:
        row = waiting.popleft()
        waiting.extend(islice(rows, 1))
        row.finish()
        yield row


def _earn_others(reward: PooledReward, rows: Sequence[_Row], references: Sequence[str]) -> float:
    """The share of the rows whose demonstration earns another row's reference."""
    earning = 0
    for row in rows:
        assert row.prompt.demonstration is not None
        others = [reference for reference in references if reference != row.reference][:_COMPARED]
        earning += any(
            _earns(reward, replace(row.prompt, answer=reference), row.prompt.demonstration) for reference in others
        )
    return earning / len(rows)


def _earns(reward: PooledReward, prompt: Prompt, text: str) -> bool:
    """True if the text earns anything as an answer to the prompt."""
    answer = reward.ask(completions(unread(prompt), [text]).rollouts, Failures(bounded=False))
    try:
        return (answer().scores[0] or 0.0) > 0
    except PluginError:
        return False
