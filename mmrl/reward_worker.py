"""The process in which rewards run: it reads groups and answers with one line per reward.

Nothing of a plugin is pickled. Rewards run in the main thread, where math-verify's signals work. See ``mmrl.scoring``
for the other end.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import pickle
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from mmrl import registry
from mmrl.child import Line, Reply
from mmrl.config import RewardSpec
from mmrl.errors import MMRLError
from mmrl.interfaces import Reward
from mmrl.types import Rollout, RolloutGroup


def serve() -> None:
    """Make the rewards, say so, then score groups until there are no more."""
    line = Line()
    requests = iter(line)
    made = [_make(spec) for spec in next(requests)]
    rewards = [reward for reward in made if isinstance(reward, Reward)]
    if len(rewards) < len(made):
        line.send(next(reply for reply in made if isinstance(reply, dict)))
        return
    line.send({"ready": True})
    for group in requests:
        _serve_group(rewards, group, line)


def _make(spec: RewardSpec) -> Reward | Reply:
    try:
        return registry.create("reward", spec)
    except MMRLError as error:
        parts = {"what": error.what, "where": error.where, "possible": error.possible, "remedy": error.remedy}
        return {"error": parts, "details": traceback.format_exc()}
    except BaseException as error:
        return {"name": spec.name, **_raised(error)}


def _serve_group(rewards: Sequence[Reward], group: bytes, line: Line) -> None:
    """One reply per reward, up to the first that fails; each gets its own copy, so none sees another's changes."""
    for reward in rewards:
        reply = _score(reward, pickle.loads(group))
        line.send(reply)
        if "values" not in reply:
            return


def call(reward: Reward, rollouts: Sequence[Rollout]) -> object:
    """What the reward answers, whichever of its forms it has, sync or async; not checked."""
    if type(reward).score is not Reward.score:
        answer = reward.score(rollouts)
        return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer
    answers = [reward.score_one(rollout) for rollout in rollouts]
    return asyncio.run(_all(answers)) if any(inspect.isawaitable(each) for each in answers) else answers


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


async def _all(answers: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*answers)


def check_scores(values: object, count: int) -> list[float | None]:
    """The scores of a group as plain floats, None where the reward could not score.

    Lists, tuples and arrays of Python or numpy numbers and booleans are accepted.

    Raises:
        BadScores: Anything else, with the place of the first fault.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise BadScores(None, f"a list of {count} numbers", f"{type(values).__name__} {_excerpt(values)}")
    if len(values) != count:
        raise BadScores(None, f"{count} scores, one per rollout", f"{len(values)} scores")
    return [_check_score(index, value) for index, value in enumerate(values)]


class BadScores(Exception):
    """A reward broke its contract: what was expected, what came, at which rollout (None: the whole answer)."""

    def __init__(self, index: int | None, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.index, self.expected, self.got = index, expected, got


def _check_score(index: int, value: object) -> float | None:
    if value is None:
        return None
    expected = "a finite number, or None for a rollout that cannot be scored"
    if not isinstance(value, numbers.Real | np.bool_):
        raise BadScores(index, expected, f"{type(value).__name__} {_excerpt(value)}")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise BadScores(index, expected, _excerpt(value))
    return score


def _score(reward: Reward, group: RolloutGroup) -> Reply:
    try:
        return {"values": check_scores(call(reward, group.rollouts), len(group.rollouts))}
    except BadScores as error:
        return {"what": f"answered {error.got}", "possible": error.expected, "index": error.index}
    except BaseException as error:
        return _raised(error) | {"index": _culprit(reward, group.rollouts)}


def _culprit(reward: Reward, rollouts: Sequence[Rollout]) -> int | None:
    """The first rollout with which alone the reward raises too."""
    return next((index for index, rollout in enumerate(rollouts) if _raises(reward, rollout)), None)


def _raises(reward: Reward, rollout: Rollout) -> bool:
    try:
        call(reward, [rollout])
    except BaseException:
        return True
    return False


def _raised(error: BaseException) -> Reply:
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "what": f"raised {type(error).__name__}: {_excerpt(error, str)}",
        "place": f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}",
        "details": "".join(traceback.format_exception(error)),
    }


def _excerpt(value: object, text: Callable[[object], str] = repr, limit: int = 200) -> str:
    try:
        shown = text(value)
    except Exception:
        shown = "(that cannot be shown)"
    return shown if len(shown) <= limit else shown[:limit] + "..."
