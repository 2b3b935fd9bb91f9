"""The process in which rewards run: it reads groups from stdin and answers with one JSON line per reward.

Requests are our own pickled records; nothing of a plugin is pickled, and nothing that a plugin made is unpickled by
the trainer. What a reward prints goes nowhere: the stream for replies is out of its reach. Rewards run in the main
thread, where math-verify's signals work. See ``mmrl.scoring`` for the other end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import numbers
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

from mmrl import registry
from mmrl.config import RewardSpec
from mmrl.errors import MMRLError
from mmrl.interfaces import Reward
from mmrl.types import Rollout, RolloutGroup

Reply = dict[str, Any]


def serve() -> None:
    """Make the rewards, say so, then score groups until stdin ends."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = _take_over_streams()
    made = [_make(spec) for spec in pickle.load(requests)]
    rewards = [reward for reward in made if isinstance(reward, Reward)]
    if len(rewards) < len(made):
        return _send(replies, next(reply for reply in made if isinstance(reply, dict)))
    _send(replies, {"ready": True})
    with contextlib.suppress(EOFError):
        while True:
            _serve_group(rewards, pickle.load(requests), replies)


def _make(spec: RewardSpec) -> Reward | Reply:
    try:
        return registry.create("reward", spec)
    except MMRLError as error:
        parts = {"what": error.what, "where": error.where, "possible": error.possible, "remedy": error.remedy}
        return {"error": parts, "details": traceback.format_exc()}
    except BaseException as error:
        return {"name": spec.name, **_raised(error)}


def _serve_group(rewards: Sequence[Reward], group: bytes, replies: IO[bytes]) -> None:
    """One reply per reward, up to the first that fails; each gets its own copy, so none sees another's changes."""
    for reward in rewards:
        reply = _score(reward, pickle.loads(group))
        _send(replies, reply)
        if "values" not in reply:
            return


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
        return {"values": check_scores(reward.score(group.rollouts), len(group.rollouts))}
    except BadScores as error:
        return {"what": f"answered {error.got}", "possible": error.expected, "index": error.index}
    except BaseException as error:
        return _raised(error) | {"index": _culprit(reward, group.rollouts)}


def _culprit(reward: Reward, rollouts: Sequence[Rollout]) -> int | None:
    """The first rollout with which alone the reward raises too."""
    return next((index for index, rollout in enumerate(rollouts) if _raises(reward, rollout)), None)


def _raises(reward: Reward, rollout: Rollout) -> bool:
    try:
        reward.score([rollout])
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


def _send(replies: IO[bytes], reply: Reply) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """The streams to the parent; stdin, stdout and stderr of this process are empty from here on."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b") as nowhere:
        for stream in (0, 1, 2):
            os.dup2(nowhere.fileno(), stream)
    return requests, replies


def _die_with_parent() -> None:
    """End this process when the parent is gone, whatever a reward is doing.

    An idle worker sees its stdin end. A busy one is ended by a thread, or by the kernel (Linux) where C code holds
    the interpreter lock.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        set_parent_death_signal = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
