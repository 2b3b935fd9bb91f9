"""The checks of environments: each rule is broken once."""

from __future__ import annotations

import itertools
import random
from typing import ClassVar

import numpy as np
import pytest

from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import Environment, ToolError, tool
from mmrl.testing import check_environment
from mmrl.testing.environments import hostile_turns, sample_rows
from mmrl.testing.rules import Untried
from mmrl.types import Observation

LOCAL = {"i_know_local_is_no_security_boundary": True}


class Dice(Environment):
    """Sound: it rolls dice until the policy stops."""

    components = ("points",)

    def prepare(self) -> None:
        self.sides = [1, 2, 3, 4, 5, 6]

    def reset(self, prompt, seed):
        self.random, self.points = random.Random(seed), 0
        return Observation(["You may roll.", np.zeros((4, 4, 3), np.uint8)])

    @tool
    async def roll(self, times: int) -> str:
        """Roll dice.

        Args:
            times: How many, from 1 to 9.
        """
        if not isinstance(times, int) or not 1 <= times <= 9:
            raise ToolError("times is from 1 to 9.")
        rolled = [self.random.choice(self.sides) for _ in range(times)]
        self.points += sum(rolled)
        return f"{rolled}"

    def score(self):
        return {"points": float(self.points)}


def changed(**methods) -> type[Environment]:
    return type("Changed", (Dice,), methods)


def test_a_sound_environment_passes():
    check_environment(Dice)
    check_environment(Dice, [sample_rows()[0]], script=["I do not roll."])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zoom", {"tools": ["crop", "mark"], "min_side": 16}),
        ("zoom", {"grid": 3, "action": "<answer>(.*?)</answer>", "coordinates": "pixels"}),
        ("gymnasium", {"id": "FrozenLake-v1", "render": True, "action": "<answer>(.*?)</answer>"}),
        ("gymnasium", {"id": "Blackjack-v1"}),
        pytest.param("python", LOCAL, marks=pytest.mark.full),
    ],
)
def test_first_party_environments_pass(name, options):
    check_environment(name, options=options, script=["<answer>1</answer>"] * 3 if "action" in options else None)


def breaking(line):
    """A tool that runs ``line(self)`` in each call."""

    def roll(self, times: int = 1) -> str:
        """Roll.

        Args:
            times: Any.
        """
        return line(self)

    return tool(roll)


COUNT = itertools.count()


def counted(self, prompt, seed):
    Dice.reset(self, prompt, seed)
    return Observation(str(next(COUNT)))


class Shared(Dice):
    """``prepare`` sets what episodes change."""

    def prepare(self) -> None:
        self.rolls = [0]

    def reset(self, prompt, seed):
        self.rolls[0] = self.points = 0

    @tool
    def roll(self) -> str:
        """Roll."""
        self.rolls[0] += 1
        return str(self.rolls[0])


class Remembering(Dice):
    """Something outside remembers a turn that went another way."""

    outside: ClassVar = set()

    def reset(self, prompt, seed):
        self.points, self.id = 0, prompt.id

    def step(self, turn):
        if "something else" in turn.text:
            self.outside.add(self.id)
        return Observation("seen" if self.id in self.outside else "not seen")


class Learning(Remembering):
    """Something outside counts the episodes that have ended."""

    outside: ClassVar = []

    def close(self):
        self.outside.append(self.id)

    def step(self, turn):
        return Observation(str(self.outside.count(self.id) > 5 and turn.index))


@pytest.mark.parametrize(
    ("environment", "rule", "detail"),
    [
        (Remembering, "is played again up to turn 1, with the same seed and turns", "observation 1 differs"),
        (Learning, "episodes that go on from others leave those as they were", "observation 1 differs"),
        (changed(reset=counted, repeatable=False), "begin alike", "observation 0 differs"),
        (changed(reset=lambda self, prompt, seed: 3), "reset begins an episode", "int 3"),
        (changed(reset=lambda self, prompt, seed: Observation(done=True)), "an episode begins undecided", "'text'"),
        (changed(reset=counted), "same again", "observation 0 differs"),
        (changed(roll=breaking(lambda self: str(next(COUNT)))), "same again", "observation 1 differs"),
        (Shared, "share nothing", "observation 1 differs"),
        (changed(step=lambda self, turn: "text"), "whatever a policy writes", "expected an Observation"),
        (changed(step=lambda self, turn: Observation(reward=float("nan"))), "policy writes", "a finite number"),
        (changed(step=lambda self, turn: Observation(np.zeros(3))), "whatever a policy writes", "uint8 array"),
        (changed(step=lambda self, turn: Observation(done=bool(turn.text[0]))), "policy writes", "IndexError"),
        (changed(step=lambda self, turn: Observation(done=1 // turn.tokens_left > 1)), "policy", "ZeroDivision"),
        (changed(roll=breaking(lambda self: 1 / 0)), "whatever a policy writes", "ZeroDivisionError"),
        (changed(components=("points", "luck")), "score answers its components", "points, luck"),
        (changed(components="points"), "components is a tuple of names", "'points'"),
        (changed(score=lambda self: {"points": float("inf")}), "score answers its components", "a finite number"),
        (changed(close=lambda self: 1 / 0), "close gives back", "ZeroDivisionError"),
        (changed(tools=lambda self: [print]), "cannot be described", "print"),
        (changed(tools=lambda self: [{"name": "roll"}]), "schema cannot be used", "roll"),
        (changed(tools=lambda self: 3), "tools() answers int", "3"),
        (changed(prepare=lambda self: 1 / 0), "prepare raised", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_what_shows_it(environment, rule, detail):
    with pytest.raises(PluginError) as caught:
        check_environment(environment)
    text = str(caught.value)
    assert rule in text and detail in text, text


def test_one_that_says_that_it_is_not_repeatable_need_not_be():
    check_environment(changed(roll=breaking(lambda self: str(next(COUNT))), repeatable=False))
    check_environment(type("Outside", (Remembering,), {"outside": set(), "repeatable": False}))


def test_one_that_needs_columns_of_its_own_is_untried_until_it_is_given_rows():
    needy = changed(reset=lambda self, prompt, seed: Observation(prompt.columns["map"]))
    with pytest.raises(Untried, match="reset begins an episode"):
        check_environment(needy)
    with pytest.raises(PluginError, match="KeyError") as caught:
        check_environment(needy, sample_rows())
    assert not isinstance(caught.value, Untried)


def test_options_that_do_not_fit_are_a_config_error():
    with pytest.raises(ConfigError, match="grid"):
        check_environment("zoom", options={"grid": 0})


def test_the_hostile_turns_hold_what_is_hard():
    text = "".join(turn.text for turn in hostile_turns())
    assert len(text) > 2**20 and all(each in text for each in ("<|im_end|>", "\x1b", "\ud800", "\x00"))
