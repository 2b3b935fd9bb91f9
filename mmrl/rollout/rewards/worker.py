"""The process in which rewards run: it reads rollouts and answers line by line.

Nothing of a plugin is pickled. Rewards run in the main thread, where math-verify's signals work. See
``mmrl.rollout.rewards.pool`` for the other end.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import numbers
import os
import pickle
import random
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import MMRLError, plural
from mmrl.interfaces import Reward
from mmrl.plugin_host import registry
from mmrl.plugin_host.foreign_rewards import FunctionReward, plain
from mmrl.rollout.worker_faults import excerpt, raised
from mmrl.system.worker_process import Line, Reply
from mmrl.types import Rollout, Spans, Unscored

_TOTALS = ("overall", "score")
"""Names of the component that is the score, in this order."""
_LONGEST_REASON = 500

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def serve() -> None:
    """Make the rewards, report each one's way to score, then score until there is nothing more."""
    line = Line()
    requests = iter(line)
    specs = next(requests)
    made = [_make(spec) for spec in specs]
    rewards = [reward for reward in made if isinstance(reward, Reward)]
    if len(rewards) < len(made):
        line.send(next(reply for reply in made if isinstance(reply, dict)))
        return
    line.send({"forms": [_form(reward) for reward in rewards]})
    with asyncio.Runner() as runner:  # one loop for all calls: a reward may keep its connections
        for place, blobs in requests:
            _Call(rewards[place], specs[place], blobs, line, runner.run).serve()
            line.send({"resident_bytes": _resident_bytes()})


def _make(spec: RewardSpec) -> Reward | Reply:
    try:
        reward = registry.create("reward", spec)
        reward.prepare()
        return reward
    except MMRLError as error:
        parts = {"what": error.what, "where": error.where, "possible": error.possible, "remedy": error.remedy}
        return {"error": parts, "details": traceback.format_exc()}
    except BaseException as error:
        return {"name": spec.name, **raised(error)}


def _form(reward: Reward) -> str:
    if type(reward).score is not Reward.score:
        return "together"
    return "side by side" if inspect.iscoroutinefunction(reward.score_one) else "one by one"


class _Call:
    """Some rollouts for one reward, which is given copies: nothing else sees its changes to them.

    Every reply is about a range of the rollouts: their values, or a fault and whether to skip it.
    """

    def __init__(self, reward: Reward, spec: RewardSpec, blobs: Sequence[bytes], line: Line, run: Run) -> None:
        self._reward, self._spec, self._blobs, self._line, self._run = reward, spec, blobs, line, run

    def serve(self) -> None:
        """Reply about all rollouts, or up to a fault that stops the run."""
        form, count = _form(self._reward), len(self._blobs)
        if form == "side by side":
            self._run(self._side_by_side())
        elif form == "one by one":
            _ = all(self._try(place, place + 1) for place in range(count))
        elif not self._try(0, count) and (culprit := self._culprit()) is not None:
            self._line.send({"culprit": culprit})

    def _try(self, start: int, stop: int) -> bool:
        """Score some of the rollouts and reply; False if it makes no sense to go on."""
        rollouts = self._copies(start, stop)
        _seed(rollouts[0])
        began = time.perf_counter()
        reply: Reply
        try:
            reply = self._values(call(self._reward, rollouts, self._run), start, stop)
        except BaseException as error:
            reply = self._fault(error)
        return self._send(start, stop, began, reply)

    async def _side_by_side(self) -> None:
        async def score(place: int) -> None:
            (rollout,) = self._copies(place, place + 1)
            _seed(rollout)
            began, deadline = time.perf_counter(), asyncio.timeout(self._spec.timeout_s)
            reply: Reply
            try:
                async with deadline:
                    answer: Any = self._reward.score_one(rollout)
                    reply = self._values([await answer], place, place + 1)
            except BaseException as error:
                late = {"what": f"did not answer within {self._spec.timeout_s:g} s", "details": "", "skip": True}
                reply = late if deadline.expired() else self._fault(error)
            self._send(place, place + 1, began, reply)

        await asyncio.gather(*map(score, range(len(self._blobs))))

    def _values(self, answer: object, start: int, stop: int) -> Reply:
        """A reply with the reward's answer, which must be scores."""

        def text_of(index: int) -> str:
            (rollout,) = self._copies(start + index, start + index + 1)
            return rollout.text

        scores = check_scores(answer, stop - start, self._spec.weights, total=total_of(self._reward), text_of=text_of)
        parts = {"parts": [dict(score.parts) for score in scores]} if any(score.parts for score in scores) else {}
        reasons = {"reasons": [score.why for score in scores]} if any(score.why for score in scores) else {}
        spans = {"spans": [score.spans for score in scores]} if any(score.spans for score in scores) else {}
        return {"values": [score.value for score in scores], **parts, **reasons, **spans, **self._answers(start, stop)}

    def _answers(self, start: int, stop: int) -> Reply:
        """The completions' answers, if the reward reads answers."""
        if type(self._reward).answer_of is Reward.answer_of:
            return {}
        answers = [self._reward.answer_of(rollout) for rollout in self._copies(start, stop)]
        for index, answer in enumerate(answers):
            if not isinstance(answer, str | None):
                got = f"{type(answer).__name__} {excerpt(answer)} from answer_of"
                raise BadScores(index, "a text, or None for a completion without an answer", got)
        return {"answers": answers}

    def _copies(self, start: int, stop: int) -> list[Rollout]:
        return [pickle.loads(blob) for blob in self._blobs[start:stop]]

    def _send(self, start: int, stop: int, began: float, reply: Reply) -> bool:
        if (index := reply.pop("index", None)) is not None:
            start, stop = start + index, start + index + 1
        self._line.send({"start": start, "stop": stop, "seconds": time.perf_counter() - began, **reply})
        return "values" in reply or reply["skip"]

    def _fault(self, error: BaseException) -> Reply:
        if isinstance(error, BadScores):
            return {"what": f"answered {error.got}", "possible": error.expected, "index": error.index, "skip": False}
        reply = raised(error)
        if isinstance(error, MMRLError):
            what = f"raised {type(error).__name__}: {excerpt(error.what, str)}"
            parts = {"place": error.where, "possible": error.possible, "remedy": error.remedy}
            reply |= {"what": what, **{name: part for name, part in parts.items() if part}}
        style = self._reward.style if isinstance(self._reward, FunctionReward) else None
        if style == "mmrl" and _takes_one(error):
            reply["what"] += " (a file's function is given a list of rollouts and returns one number for each)"
            reply["remedy"] = "write it as def name(rollouts): return [... for rollout in rollouts]"
        if style == "trl" and self._spec.style is None and _takes_rollouts(error):
            reply["what"] += " (by its parameters it is a function of TRL's, which is given completions, not rollouts)"
            reply["remedy"] = "if it takes rollouts, say so in the reward's entry: style: mmrl; else correct the reward"
        elif style == "trl" and _takes_texts(error):
            reply["what"] += " (as in TRL, completions are lists of messages where prompts are)"
            reply["remedy"] = 'read completion[0]["content"], or declare completions: list[str] to be given texts'
        return {**reply, "skip": self._spec.on_error == "skip"}

    def _culprit(self) -> int | None:
        """The first rollout that makes the reward raise when it is given alone; None if there is none."""
        return next((place for place in range(len(self._blobs)) if self._raises(place)), None)

    def _raises(self, place: int) -> bool:
        try:
            call(self._reward, self._copies(place, place + 1), self._run)
        except BaseException:
            return True
        return False


def _takes_one(error: BaseException) -> bool:
    """True if a function seems to have taken the list of rollouts for a single one."""
    about_list = re.search(r"'list'|\blist indices\b", str(error))
    return isinstance(error, AttributeError | TypeError) and about_list is not None


def _takes_rollouts(error: BaseException) -> bool:
    """True if a function seems to have taken completions for rollouts."""
    if not isinstance(error, AttributeError) or not isinstance(error.obj, str | list | dict):
        return False
    return error.name in {*Rollout.__dataclass_fields__, *dir(Rollout)}


def _takes_texts(error: BaseException) -> bool:
    """True if a function seems to have taken lists of messages for texts."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, list | dict) and hasattr(str, error.name or "")
    return isinstance(error, TypeError) and "expected string or bytes-like object, got 'list'" in str(error)


def _seed(rollout: Rollout) -> None:
    """Seed the generators by the rollout alone, so that neither its worker nor earlier rollouts matter."""
    name = f"{rollout.prompt.id}/{rollout.index}".encode("utf-8", "surrogatepass")
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")
    random.seed(seed)
    np.random.seed(seed)


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def call(reward: Reward, rollouts: Sequence[Rollout], run: Run = asyncio.run) -> object:
    """The reward's answer, whichever of its forms it has, sync or async; not checked.

    Args:
        run: Runs a coroutine to its end.
    """
    if type(reward).score is not Reward.score:
        answer = reward.score(rollouts)
        return run(_awaited(answer)) if inspect.isawaitable(answer) else answer
    answers = [reward.score_one(rollout) for rollout in rollouts]
    return run(_all(answers)) if any(inspect.isawaitable(each) for each in answers) else answers


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


async def _all(answers: Sequence[Any]) -> list[Any]:
    return [await answer if inspect.isawaitable(answer) else answer for answer in answers]


class CheckedScore(NamedTuple):
    """A rollout's score as a plain float, None where the reward could not score, and the values beside the score.

    Attributes:
        why: The reason for None, if the reward gives one.
        spans: (start, end, value) of parts of the text.
    """

    value: float | None
    parts: Mapping[str, float | None] = MappingProxyType({})
    why: str = ""
    spans: Sequence[tuple[int, int, float]] = ()


def total_of(reward: Reward) -> str | None:
    """The component that is the score if the reward answers several; None if its answers decide that."""
    return reward.total if isinstance(reward, FunctionReward) else None


def check_scores(
    values: object,
    count: int,
    weights: Mapping[str, float] | None = None,
    *,
    total: str | None = None,
    text_of: Callable[[int], str] = lambda index: "",
) -> list[CheckedScore]:
    """The scores of a group, each a number or several by name; see ``mmrl.types.Score``.

    Lists, tuples and arrays of Python or numpy numbers and booleans are accepted.

    Args:
        weights: Factors of the components in the score, of which each must then be there.
        total: The component that is the score where there are no weights, and must then be there; None takes the first
            of ``overall`` and ``score`` that any rollout has.
        text_of: The text of a rollout, by its place, which spans must be parts of.

    Raises:
        BadScores: Anything else, with the place of the first fault.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise BadScores(None, f"a list of {count} numbers", f"{type(values).__name__} {excerpt(values)}")
    if len(values) != count:
        raise BadScores(None, f"{plural(count, 'score')}, one per rollout", plural(len(values), "score"))
    scores = [value.value if isinstance(value, Spans) else value for value in values]
    names = {name for score in scores if isinstance(score, Mapping) for name in score}
    total = None if weights else total or next((name for name in _TOTALS if name in names), None)
    return [
        _check_spans(index, value, weights, total, text_of(index))
        if isinstance(value, Spans)
        else _check_score(index, value, weights, total)
        for index, value in enumerate(values)
    ]


class BadScores(Exception):
    """A reward broke its contract: the rollout (None: the whole answer), the expected value, and the given one."""

    def __init__(self, index: int | None, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.index, self.expected, self.got = index, expected, got


def _check_spans(
    index: int, given: Spans, weights: Mapping[str, float] | None, total: str | None, text: str
) -> CheckedScore:
    """A score with the values of parts of the text."""
    if not isinstance(given.spans, Sequence) or isinstance(given.spans, str):
        raise BadScores(index, "spans as (start, end, value) each", f"spans {excerpt(given.spans)}")
    spans = []
    for span in given.spans:
        if not isinstance(span, Sequence) or len(span) != 3:
            raise BadScores(index, "spans as (start, end, value) each", f"a span {excerpt(span)}")
        start, end = plain(span[0]), plain(span[1])
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text)):
            expected = f"spans within the text, 0 <= start < end <= {plural(len(text), 'character')}"
            raise BadScores(index, expected, f"the span from {excerpt(start)} to {excerpt(end)}")
        spans.append((start, end, _check_number(index, span[2], f" as the value of characters {start} to {end}")))
    return _check_score(index, given.value, weights, total)._replace(spans=spans)


def _check_score(index: int, value: object, weights: Mapping[str, float] | None, total: str | None) -> CheckedScore:
    if value is None:
        return CheckedScore(None)
    if isinstance(value, Unscored):
        return CheckedScore(None, why=str(value.why)[:_LONGEST_REASON])
    if isinstance(value, Mapping):
        return _check_components(index, value, weights, total)
    if weights:
        expected = f"the components that weights names: {', '.join(weights)}"
        raise BadScores(index, expected, f"{type(value).__name__} {excerpt(value)}")
    return CheckedScore(_check_number(index, value))


def _check_components(
    index: int, given: Mapping[Any, object], weights: Mapping[str, float] | None, total: str | None
) -> CheckedScore:
    """Several values by name; without one that is the score, and without weights, they are summed."""
    if total is not None and total not in given:
        expected = f"the component {total!r}, which is the score, for every rollout that is scored"
        raise BadScores(index, expected, _named(given))
    parts: dict[str, float | None] = {}
    for name, value in given.items():
        if total is None or name == total or value is None or _is_number(value):
            parts[str(name)] = None if value is None else _check_number(index, value, f" under {name!r}")
    missing = [name for name in weights or () if name not in parts]
    if missing or not parts:
        expected = f"components {', '.join(missing)}, which weights names" if missing else "at least one component"
        raise BadScores(index, expected, _named(given))
    if total is not None:
        return CheckedScore(parts.pop(total), parts)
    terms = [(factor, parts[name]) for name, factor in (weights or dict.fromkeys(parts, 1.0)).items()]
    known = [factor * value for factor, value in terms if value is not None]
    return CheckedScore(sum(known) if len(known) == len(terms) else None, parts)


def _named(given: Mapping[Any, object]) -> str:
    return f"components {', '.join(map(str, given)) or '(none)'}"


def _is_number(value: object) -> bool:
    return isinstance(plain(value), numbers.Real | np.bool_)


def _check_number(index: int, value: object, where: str = "") -> float:
    value = plain(value)
    expected = "a finite number, or None for a rollout that cannot be scored"
    if not isinstance(value, numbers.Real | np.bool_):
        raise BadScores(index, expected, f"{type(value).__name__} {excerpt(value)}{where}")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise BadScores(index, expected, f"{excerpt(value)}{where}")
    return score
