"""Hooks that change what a group is made of: what they may answer, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.config.sections import Config
from mmrl.errors import PluginError
from mmrl.interfaces import Algorithm, Needs
from mmrl.rollout.collector import Collector
from mmrl.rollout.experience import Memory, retried
from mmrl.rollout.kept import alone, kept_of
from mmrl.testing import make_rollouts
from mmrl.types import GIVEN, ImageRef, Message, RawImage, RolloutGroup, ScoredGroup

PICTURE = ImageRef("abc", 28, 28, "x.png")


class Answers:
    """An algorithm whose hooks answer these."""

    def __init__(self, remember: Any = (), recall: Any = None, retry: Any = None, experience: int = 2) -> None:
        self.remember = lambda group: remember
        self.recall = lambda group, kept: {} if recall is None else recall
        self.retry = retry
        self.needs = lambda: Needs(experience=experience)


def group(texts: str, rewards: list[float], step: int = 1, **row: Any) -> ScoredGroup:
    """A group of one-letter texts; a reward of NaN is not valid."""
    rollouts = [replace(each, weight_version=step) for each in make_rollouts(list(texts), answer="7")]
    prompt = replace(rollouts[0].prompt, epoch=step, prompt=replace(rollouts[0].prompt.prompt, **row))
    rollouts = [replace(each, prompt=prompt) for each in rollouts]
    values, valid = np.array(rewards), ~np.isnan(rewards)
    members = RolloutGroup(prompt, tuple(rollouts))
    answers = {"right": list(texts)}
    return ScoredGroup(members, np.where(valid, values, 0), valid, {"right": 2 * values}, answers=answers)


def memory(*args: Any, **answers: Any) -> Memory:
    return Memory(Answers(**answers), *args)  # type: ignore[arg-type]


def test_the_newest_of_a_prompt_push_out_the_oldest_and_are_offered_from_the_next_group_on() -> None:
    keeps, seen = memory({}, remember=[1, 2]), list[list[str]]()
    keeps._algorithm.recall = lambda group, kept: seen.append([each.rollout.text for each in kept]) or {}  # type: ignore
    first = group("abc", [0, 1, 2])
    assert keeps.exchanged([first, group("def", [0, 1, 2]), group("gh?", [0, 1, 2], id="other")])[0] is first
    before = keeps.kept
    keeps.exchanged([group("ijk", [0, 1, 2])])
    assert seen == [["b", "c"], ["e", "f"]]
    assert {name: [each.rollout.text for each in kept] for name, kept in before.items()} == {
        "What is 3 + 4?": ["e", "f"],
        "other": ["h", "?"],
    }
    other = group("xyz", [0, 1, 2])
    reworded = replace(other.group.prompt, token_ids=other.group.prompt.token_ids[1:])
    pictured = replace(other.group.prompt, images=(PICTURE,))
    for prompt in (reworded, pictured):  # of other tokens, or of another picture: nothing is offered
        keeps.exchanged([replace(other, group=RolloutGroup(prompt, other.rollouts))])
    assert len(seen) == 2


def test_a_kept_rollout_takes_a_place_with_its_score_its_version_and_the_groups_prompt() -> None:
    keeps = memory({}, remember=[1])
    keeps.exchanged([replace(group("ab", [0, 3]), token_rewards=[np.zeros(2), np.array([0.5, 1])])])
    keeps._algorithm.recall = lambda group, kept: {0: 0}
    now = replace(group("cd", [np.nan, 1], step=5), token_rewards=[np.ones(2), np.ones(2)])
    (found,) = keeps.exchanged([now])
    recalled, other = found.rollouts
    assert (recalled.text, recalled.index, recalled.weight_version, recalled.recalled) == ("b", 0, 1, True)
    assert recalled.prompt is other.prompt is now.group.prompt and other is now.rollouts[1] and not recalled.is_own
    assert found.rewards.tolist() == [3, 1] and found.valid.tolist() == [True, True]
    assert found.components["right"].tolist() == [6, 2] and found.answers == {"right": ["b", "d"]}
    assert [each.tolist() for each in found.token_rewards] == [[0.5, 1], [1, 1]]
    assert now.rewards.tolist() == [0, 1] and not now.valid[0]  # left as it was
    # Kept is what was sampled, not what was recalled; and a greedy rollout without a score leaves nobody valid.
    assert [each.rollout.text for each in keeps.kept["What is 3 + 4?"]] == ["b", "d"]
    unscored = replace(group("e", [0.0]), valid=np.zeros(1, bool))
    keeps._algorithm.remember = lambda group: ()
    (nobody,) = keeps.exchanged([replace(now, greedy=unscored, valid=np.zeros(2, bool), rewards=np.zeros(2))])
    assert nobody.valid.tolist() == [False, False] and nobody.rewards.tolist() == [0, 0]
    kept = [each for of_prompt in keeps.kept.values() for each in of_prompt]
    again = kept_of([alone(each) for each in kept])["What is 3 + 4?"]
    assert [(each.rollout.text, each.reward, each.components) for each in again] == [
        (each.rollout.text, each.reward, each.components) for each in kept
    ]


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ({"remember": [4]}, r"remember named 4, and the valid members are 0, 2"),
        ({"remember": [1]}, r"remember named 1, and the valid members are 0, 2"),
        ({"remember": [3]}, r"remember named 3, and the valid members are 0, 2"),
        ({"remember": [0, 0]}, r"remember named one of \[0, 0\] twice"),
        ({"remember": ["0"]}, r"remember named '0'"),
        ({"remember": 1}, r"remember raised TypeError"),
        ({"recall": {3: 0}}, r"recall named 3, and the members are 0, 1, 2"),
        ({"recall": {0: 1}}, r"recall named 1, and the kept rollouts are 0"),
        ({"recall": {0: 0, 1: 0}}, r"recall named one of \[0, 0\] twice"),
        ({"recall": [0]}, r"recall raised TypeError"),
    ],
)
def test_what_is_not_there_is_neither_kept_nor_recalled(answers: dict[str, Any], match: str) -> None:
    """The group has an invalid member and, as its last, a demonstration."""
    keeps = memory({}, remember=[0])
    keeps.exchanged([group("xyz", [0, 0, 0])])
    made = group("abcd", [1, np.nan, 1, 1])
    members = (*made.rollouts[:3], replace(made.rollouts[3], weight_version=GIVEN))
    with pytest.raises(PluginError, match=match):
        memory(keeps.kept, **answers).exchanged([replace(made, group=replace(made.group, rollouts=members))])


def test_a_retry_is_the_row_with_other_messages_and_counts() -> None:
    made = group("ab", [0, 0])
    row = made.group.prompt.prompt

    def asked(answer: Any) -> Any:
        return retried(Answers(retry=lambda group: answer), made)  # type: ignore[arg-type]

    assert asked(None) is None
    hint = (Message("user", "think"),)
    assert asked(replace(row, messages=hint)) == replace(row, messages=hint, retries=1)
    twice = replace(made.group.prompt, prompt=replace(row, retries=1))
    assert twice.key == (1, "What is 3 + 4? (retry 1)") and made.group.prompt.key == (1, "What is 3 + 4?")
    for answer, match in [
        (replace(row, id="p9"), "answered row 'p9' for row 'What is 3"),
        (
            replace(row, messages=(Message("user", "<image>"),)),
            "answered messages with 1 times <image>, and the row has 0",
        ),
        (replace(row, images=(RawImage(b"", "one"),)), "answered the row with other images"),
        ("a hint", "answered str, and no Prompt"),
        (hint, "answered tuple, and no Prompt"),
    ]:
        with pytest.raises(PluginError, match=rf"retry {match}"):
            asked(answer)


def test_each_try_of_a_prompt_has_a_seed_of_its_own() -> None:
    config = Config.model_validate(
        {
            "model": {"path": "models/any"},
            "data": {"train": {"name": "table", "path": "rows.jsonl"}},
            "rewards": [{"name": "math"}],
            "algorithm": {"name": "grpo"},
        }
    )
    collector = Collector(config, Any, Any, print, event=print)  # type: ignore[arg-type]
    prompt = group("ab", [0, 0]).group.prompt
    tries = [replace(prompt, prompt=replace(prompt.prompt, retries=number)) for number in range(3)]
    seeds = [collector._request(each, "", 2, 1.0).seed for each in [*tries, *tries]]
    assert len({*seeds}) == 3 and seeds[:3] == seeds[3:]


def test_an_algorithm_answers_nothing_until_it_is_written() -> None:
    class Plain(Algorithm):
        aggregation = credit = loss = None  # type: ignore[assignment]

    plain, made = Plain(None), group("ab", [0, 1])
    assert plain.retry(made) is None and plain.remember(made) == () and plain.recall(made, ()) == {}
