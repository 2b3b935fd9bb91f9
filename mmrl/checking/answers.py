"""Whether the rewards do what they are for: golds that no answer can match, and answers of every kind tried.

Rewards run in their worker processes as in a run, so one that hangs costs its deadline here too.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from mmrl.checking.report import excerpt
from mmrl.config import RewardSpec
from mmrl.errors import DataError, PluginError
from mmrl.prompts import PromptSource
from mmrl.scoring.failures import Failures
from mmrl.scoring.pool import Answer, RewardPool
from mmrl.scoring.scorer import Scorer, reward_pools
from mmrl.types import EncodedPrompt, FinishReason, IntArray, Prompt, Rollout, RolloutGroup, Segment

MAX_ROWS = 10_000
"""Rows whose golds are graded, evenly spread over a longer dataset."""
SHOWN = 10
SLOW_S = 0.5
"""An answer that takes longer is graded too slowly: its gold has a value that cannot be computed."""
_TOWER = re.compile(r"\*\*|\d\s*!|\^[^^]*\^\s*\{?\s*\d")
"""Powers of powers and factorials, whose digits may not fit any memory."""
_IN_FLIGHT = 512
_ONLY = frozenset({0})
_COMPARED = 50
"""Other rows' golds that a demonstration is held against."""


@dataclass(frozen=True, slots=True)
class GoldReport:
    """How the reward that tells right from wrong takes the golds.

    Attributes:
        reward: Its component's name.
        graded: Rows looked at that have a gold.
        absent: Rows without one.
        rejected: (prompt id, gold, why) where no form of the gold earns more than a wrong answer.
        unboxed: Ids of rows whose gold is accepted, but not in a box.
        demonstrations: Rows with a demonstration.
        towers: (prompt id, gold) where the gold is a power of powers or a factorial.
        slow: (prompt id, gold, seconds) where one answer took longer than ``SLOW_S`` to be graded.
        contradicted: (prompt id, gold) where the demonstration does not earn the row's gold.
        swapped: Of those that were held against other rows' golds, the share that earns one of them.
    """

    reward: str
    graded: int
    absent: int
    rejected: Sequence[tuple[str, str, str]]
    unboxed: Sequence[str]
    towers: Sequence[tuple[str, str]] = ()
    slow: Sequence[tuple[str, str, float]] = ()
    demonstrations: int = 0
    contradicted: Sequence[tuple[str, str]] = ()
    swapped: float = 0.0

    def data(self) -> dict[str, Any]:
        """For a program."""
        return {
            "reward": self.reward,
            "graded": self.graded,
            "without_gold": self.absent,
            "rejected": [{"prompt": name, "gold": gold, "why": why} for name, gold, why in self.rejected],
            "accepted_only_without_box": list(self.unboxed),
            "towers": [{"prompt": name, "gold": gold} for name, gold in self.towers],
            "slow": [{"prompt": name, "gold": gold, "seconds": seconds} for name, gold, seconds in self.slow],
            "demonstrations": self.demonstrations,
            "demonstrations_contradict_gold": [{"prompt": name, "gold": gold} for name, gold in self.contradicted],
        }

    def lines(self) -> list[str]:
        """For a person."""
        accepted = self.graded - len(self.rejected)
        lines = [f"golds      reward {self.reward!r} accepts {accepted} of {self.graded}"]
        lines[0] += f"; {self.absent} rows have none" if self.absent else ""
        lines += [f"           not {name}: {gold} ({why})" for name, gold, why in self.rejected[:SHOWN]]
        if self.unboxed:
            lines.append(f"           {len(self.unboxed)} only without a box, such as {self.unboxed[0]}")
        lines += [f"           power or factorial {name}: {gold}" for name, gold in self.towers[:SHOWN]]
        lines += [f"           slow {name}: {gold} ({seconds:.1f} s)" for name, gold, seconds in self.slow[:SHOWN]]
        if self.demonstrations:
            agree = self.demonstrations - len(self.contradicted)
            lines.append(f"examples   {agree} of {self.demonstrations} demonstrations earn their row's gold")
            lines += [f"           not {name}: {gold}" for name, gold in self.contradicted[:SHOWN]]
        return lines

    def problems(self, where: str, tolerated: float) -> Iterator[DataError | str]:
        """Errors, and warnings as texts."""
        if not self.graded:
            yield DataError(
                f"No row has a gold that reward {self.reward!r} can grade",
                where=where,
                remedy="name the column that holds the answers, or choose a reward that needs none",
            )
            return
        slow = [(name, gold, f"{seconds:.1f} s") for name, gold, seconds in self.slow]
        for rows, verb in ((self.rejected, "accepts no answer to"), (slow, "cannot grade in time")):
            if not rows:
                continue
            shown = "; ".join(f"{name}: {gold} ({why})" for name, gold, why in rows[:SHOWN])
            text = f"reward {self.reward!r} {verb} {len(rows)} of {self.graded} golds"
            if len(rows) > tolerated * self.graded:
                yield DataError(
                    f"R{text[1:]}: these rows teach nothing",
                    where=f"{where}: {shown}",
                    remedy="choose a reward that fits the answers, name another answer column, or remove the rows",
                )
            else:
                yield f"{where}: {text}: {shown}"
        if self.towers:
            shown = "; ".join(f"{name}: {gold}" for name, gold in self.towers[:SHOWN])
            yield f"{where}: {len(self.towers)} golds are powers of powers or factorials, an effort to grade: {shown}"
        if len(self.contradicted) > tolerated * max(self.demonstrations, 1):
            shown = "; ".join(f"{name}: gold {gold}" for name, gold in self.contradicted[:SHOWN])
            text = f"{len(self.contradicted)} of {self.demonstrations} demonstrations do not earn their row's gold"
            if self.swapped >= 0.5:
                yield DataError(
                    f"{text}, but most of them earn another row's: golds are swapped or wrong",
                    where=f"{where}: {shown}",
                    remedy="compare these rows with their source",
                )
            else:
                yield f"{where}: {text}: reward {self.reward!r} may not read them: {shown}"


@dataclass(slots=True)
class _Row:
    """A row in the middle of being graded."""

    prompt: Prompt
    gold: str
    forms: Sequence[str]
    future: Future[Mapping[int, Answer]]
    failures: Failures
    why: str = ""
    seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)


def check_golds(prompts: PromptSource, spec: RewardSpec) -> GoldReport:
    """Grade each row's gold against itself, in a box, in answer tags and bare, against a wrong answer.

    Args:
        prompts: Of which at most ``MAX_ROWS`` are looked at.
        spec: The reward that tells right from wrong.
    """
    places = np.unique(np.linspace(0, len(prompts) - 1, min(len(prompts), MAX_ROWS)).astype(int)).tolist()
    rejected, unboxed, contradicted = list[tuple[str, str, str]](), list[str](), list[_Row]()
    slow, towers = list[Prompt](), list[tuple[str, str]]()
    golds = dict[str, None]()
    absent = demonstrations = 0
    ((_, pool),) = reward_pools([spec])
    with closing(pool):
        for row in _finished(_submit(pool, prompts[place]) for place in places):
            if row.scores and all(np.isnan(score) for score in row.scores.values()):
                absent += 1
                continue
            wrong = np.nan_to_num(row.scores.get("wrong", 0.0))
            right = {form: score for form, score in row.scores.items() if form in ("boxed", "tagged", "bare")}
            golds[row.gold] = None
            if _TOWER.search(row.gold):
                towers.append((row.prompt.id, excerpt(row.gold)))
            if row.seconds > SLOW_S:
                slow.append(row.prompt)
            if not any(score > wrong for score in right.values()):
                why = row.why or f"right {max(right.values()):g}, wrong {wrong:g}"
                rejected.append((row.prompt.id, excerpt(row.gold), why))
            elif not right["boxed"] > wrong:
                unboxed.append(row.prompt.id)
            if "demonstration" in row.scores:
                demonstrations += 1
                if not row.scores["demonstration"] > wrong:
                    contradicted.append(row)
        # Once more: the first call of a worker imports what it needs, and a machine may be busy.
        again = [row for row in _finished(_submit(pool, prompt, again=True) for prompt in slow) if row.seconds > SLOW_S]
        swapped = _earn_others(pool, contradicted[:SHOWN], list(golds)) if contradicted else 0.0
    return GoldReport(
        reward=spec.metric,
        graded=len(places) - absent,
        absent=absent,
        rejected=rejected,
        unboxed=unboxed,
        towers=towers,
        slow=[(row.prompt.id, excerpt(row.gold), row.seconds) for row in again],
        demonstrations=demonstrations,
        contradicted=[(row.prompt.id, excerpt(row.gold)) for row in contradicted],
        swapped=swapped,
    )


def _submit(pool: RewardPool, prompt: Prompt, *, again: bool = False) -> _Row:
    """``again`` asks with another wrong answer, of which the reward does not know yet."""
    gold = gold_text(prompt.answer)
    wrong = "-98766" if again else wrong_for(gold)
    texts = {**right_forms(gold), "wrong": f"\\boxed{{{wrong}}}"}
    if prompt.demonstration is not None:
        texts["demonstration"] = prompt.demonstration
    rollouts, failures = completions(unread(prompt), [*texts.values()]).rollouts, Failures(bounded=False)
    return _Row(prompt, gold, [*texts], pool.submit(rollouts, _ONLY, failures), failures)


def _finished(rows: Iterator[_Row]) -> Iterator[_Row]:
    """The rows with their scores, in order; so few are on their way at a time that memory stays bounded."""
    waiting = deque(islice(rows, _IN_FLIGHT))
    while waiting:
        row = waiting.popleft()
        waiting.extend(islice(rows, 1))
        try:
            answer = row.future.result()[0]
            row.scores = dict(zip(row.forms, map(_number, answer.scores), strict=True))
            row.seconds = max(answer.seconds)
            row.why = "; ".join(dict.fromkeys(failure.cause for failure in row.failures.since(0)))
        except PluginError as error:
            row.why = error.what
        if row.why:  # failed, which is not the same as unscorable
            row.scores = {form: np.nan_to_num(row.scores.get(form, 0.0)) for form in row.forms}
        yield row


def _number(score: float | None) -> float:
    return np.nan if score is None else score


def _earn_others(pool: RewardPool, rows: Sequence[_Row], golds: Sequence[str]) -> float:
    """The share of the rows whose demonstration earns another row's gold."""
    earning = 0
    for row in rows:
        assert row.prompt.demonstration is not None
        others = [gold for gold in golds if gold != row.gold][:_COMPARED]
        earning += any(_earns(pool, replace(row.prompt, answer=gold), row.prompt.demonstration) for gold in others)
    return earning / len(rows)


def _earns(pool: RewardPool, prompt: Prompt, text: str) -> bool:
    """Whether the text earns anything as an answer to the prompt."""
    future = pool.submit(completions(unread(prompt), [text]).rollouts, _ONLY, Failures(bounded=False))
    try:
        return (future.result()[0].scores[0] or 0.0) > 0
    except PluginError:
        return False


@dataclass(frozen=True, slots=True)
class Trial:
    """One answer to one prompt, and what each reward gives for it; NaN where it cannot score."""

    kind: str
    text: str
    components: Mapping[str, float]
    total: float

    def data(self) -> dict[str, Any]:
        """For a program; null where it cannot be scored."""
        scores = {name: None if np.isnan(value) else value for name, value in self.components.items()}
        return {"answer": self.kind, "text": self.text, "rewards": scores, "reward": self.total}

    def line(self) -> str:
        """For a person."""
        scores = ", ".join(
            f"{name} {'-' if np.isnan(value) else f'{value:g}'}" for name, value in self.components.items()
        )
        return f"{self.kind:<10} {self.total:>6.3g}  ({scores})  {excerpt(self.text)}"


def try_rewards(scorer: Scorer, prompt: EncodedPrompt, max_new_tokens: int) -> list[Trial]:
    """A right, a wrong, an empty and a truncated answer, scored by all rewards.

    Raises:
        PluginError: A reward fails.
    """
    gold = gold_text(prompt.answer)
    whole = prompt.demonstration or f"The answer is \\boxed{{{gold}}}."
    texts = {
        "right": f"The answer is \\boxed{{{gold}}}.",
        "wrong": f"The answer is \\boxed{{{wrong_for(gold)}}}.",
        "empty": "",
        "truncated": whole[: max(whole.rfind("\\boxed{") + len("\\boxed{"), len(whole) // 2)],
    }
    groups = [
        completions(prompt, [text], max_new_tokens if kind == "truncated" else None) for kind, text in texts.items()
    ]
    trials = []
    for (kind, text), future in zip(texts.items(), [scorer.submit(group) for group in groups], strict=True):
        scored = future.result()
        components = {name: float(values[0]) for name, values in scored.components.items()}
        trials.append(Trial(kind, text, components, float(scored.rewards[0])))
    return trials


def gold_text(answer: Any) -> str:
    """A gold as a model would write it: of a list, the first."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    while isinstance(answer, list | tuple) and answer and not all(isinstance(item, int | float) for item in answer):
        answer = answer[0]
    return str(answer)


def right_forms(gold: str) -> dict[str, str]:
    """Ways of giving the gold as an answer."""
    return {"boxed": f"\\boxed{{{gold}}}", "tagged": f"<answer>{gold}</answer>", "bare": gold}


def wrong_for(gold: str) -> str:
    """An answer of the same kind that is not the gold."""
    if re.fullmatch(r"[+-]?\d{1,15}", gold):
        return str(int(gold) + 1)
    if re.fullmatch(r"[A-Z]", gold):
        return "A" if gold == "B" else "B"
    return "-98765"


def unread(prompt: Prompt) -> EncodedPrompt:
    """The prompt as far as a reward of texts needs it: no tokens, and its images not decoded."""
    return EncodedPrompt(
        id=prompt.id,
        messages=prompt.messages,
        answer=prompt.answer,
        columns=prompt.columns,
        demonstration=prompt.demonstration,
        text="\n".join(message.content for message in prompt.messages),
        token_ids=np.zeros(0, np.int32),
        images=(),
        source=prompt.source,
        choices=prompt.choices,
    )


def completions(prompt: EncodedPrompt, texts: Sequence[str], cut_at: int | None = None) -> RolloutGroup:
    """The texts as completions of a prompt: one token each byte, or ``cut_at`` tokens, cut off there."""
    finish: FinishReason = "stop" if cut_at is None else "length"
    rollouts = []
    for index, text in enumerate(texts):
        ids: IntArray = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)
        ids = np.append(ids, 0).astype(np.int32) if cut_at is None else np.resize(ids, cut_at).astype(np.int32)
        segment = Segment(ids, True, np.zeros(len(ids), np.float32))
        rollouts.append(Rollout(prompt, (segment,), index, text, finish, 0))
    return RolloutGroup(prompt, tuple(rollouts))
