"""``check_reward``: the rules that every reward keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import numpy as np

from mmrl.errors import MMRLError, plugin_errors
from mmrl.interfaces import Reward
from mmrl.plugin_host import registry
from mmrl.rollout.rewards.worker import BadScores, CheckedScore, call, check_scores, total_of
from mmrl.testing.rollouts import OTHER_GOLDS, sample_groups
from mmrl.testing.rules import Untried, broken, failed
from mmrl.types import Rollout


def check_reward(
    reward: str | type[Reward] | Reward | Callable[..., Any],
    *,
    options: Mapping[str, Any] | None = None,
    rollouts: Sequence[Rollout] | None = None,
) -> None:
    """Raise at the first rule of rewards that this one breaks.

    The rules: one finite number, or several by name, or None for each rollout, in order; spans lie within the text,
    with a finite number each; the same again for the same rollouts, and in another order for another order; rollouts
    are not modified; no rollouts give no scores; what a rollout answers (``answer_of``) is a text or None, and the same
    again. By default rollouts are right, wrong, empty, cut-off and odd answers to a question in text. If their
    reference is a list, a number or missing, a reward that is not made for that may raise.

    Args:
        reward: A registered name, a class, a reward, a function (see ``plugin_host.foreign_rewards``), or a name in a
            file, ``path/to/file.py:name``.
        options: The reward's options, unless it is an object already.
        rollouts: Rollouts to score instead, those of a prompt side by side, for a reward that needs columns or images;
            ``make_rollouts`` makes them.

    Raises:
        PluginError: A rule is broken, or the reward does not fit its interface.
        ConfigError: The options do not fit.
    """
    made = registry.given("reward", reward, options)
    if not isinstance(made.penalty, bool):
        raise broken(made, "penalty is True or False", repr(made.penalty), "make it a bool")
    for group in sample_groups("7") if rollouts is None else _by_prompt(rollouts):
        _check_group(made, tuple(group))
    _scores(made, ())
    for answer in OTHER_GOLDS if rollouts is None else ():
        with suppress(Untried):
            for group in sample_groups(answer):
                _check_group(made, tuple(group))


def _by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    return [list(members) for _, members in groupby(rollouts, lambda rollout: rollout.prompt.id)]


def _check_group(reward: Reward, group: tuple[Rollout, ...]) -> None:
    before = _content(group)
    scores = _scores(reward, group)
    if _content(group) != before:
        changed = next(i for i, (one, other) in enumerate(zip(before, _content(group), strict=True)) if one != other)
        found = f"{_show(group[changed])} is another afterwards"
        raise broken(reward, "rollouts stay as they are", found, "work on copies of what a rollout holds")
    for rollout in group:
        _check_answer(reward, rollout)
    order = np.random.default_rng(0).permutation(len(group)).tolist()
    remedy = "score each rollout by its own content, with no random numbers and no memory of earlier calls"
    for rule, places in (("the same rollouts get the same scores", range(len(group))), ("scores keep order", order)):
        again = _scores(reward, tuple(group[place] for place in places))
        for place, score in zip(places, again, strict=True):
            if score != scores[place]:
                found = f"{_show(group[place])} got {_score(scores[place])}, then {_score(score)}"
                raise broken(reward, rule, found, remedy)


def _check_answer(reward: Reward, rollout: Rollout) -> None:
    with plugin_errors(reward, "answer_of"):
        answers = [reward.answer_of(rollout) for _ in range(2)]
    if not all(isinstance(answer, str | None) for answer in answers) or answers[0] != answers[1]:
        remedy = "return the same text for the same completion, or None where it gives no answer"
        found = f"{_show(rollout)} got {answers[0]!r:.80}, then {answers[1]!r:.80}"
        raise broken(reward, "answer_of answers with a text or None", found, remedy)


def _scores(reward: Reward, group: tuple[Rollout, ...]) -> list[CheckedScore]:
    try:
        with plugin_errors(reward, "score"):
            values = call(reward, group)
    except MMRLError as error:
        remedy = "answer for each, None where it cannot be scored; to check_reward, pass rollouts that suit it"
        remedy = remedy if group else "return []"
        prompt = f"answer {group[0].answer!r}" if group else "none"
        raise failed(reward, f"rollouts can be scored ({len(group)}, {prompt})", error, remedy, Untried) from error
    try:
        return check_scores(values, len(group), total=total_of(reward), text_of=lambda index: group[index].text)
    except BadScores as error:
        where = "" if error.index is None else f"; {_show(group[error.index])}"
        remedy = "return a list with a finite number, or None, for each rollout"
        raise broken(reward, f"score answers {error.expected}", f"it answered {error.got}{where}", remedy) from error


def _score(score: CheckedScore) -> str:
    parts = [f"{name} {value}" for name, value in score.parts.items()]
    parts += [f"characters {start} to {end} {value}" for start, end, value in score.spans]
    return f"{score.value} ({', '.join(parts)})" if parts else f"{score.value}"


def _content(group: Sequence[Rollout]) -> list[str]:
    """The content of rollouts as text, to compare after a call."""
    with np.printoptions(threshold=sys.maxsize):
        return [repr(rollout) for rollout in group]


def _show(rollout: Rollout) -> str:
    return f"rollout {rollout.index} of {rollout.prompt.id!r}, {rollout.text[:60]!r}"
