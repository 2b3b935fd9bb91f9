"""The environment `class`: classes written for TRL's `environment_factory` run unchanged."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import re
from typing import Any

import pytest

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.errors import ConfigError
from mmrl.plugin_host import registry
from mmrl.rollout.episodes.process import EnvironmentFacts
from mmrl.rollout.episodes.tool_schemas import tool_schemas
from mmrl.rollout.records import read_step, recorded_steps
from mmrl.types import Call, Message, Prompt, Rollout, Turn
from mmrl_environments.trl_class import TRLClass
from tests.faults.fake_engine import FakeEngine
from tests.faults.runs import Runs

FILE = '''\
import random


class Number:
    """Written for TRL: nothing in it knows mmrl."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.secret = int(kwargs["answer"])
        self.reward = 0.0
        return "The number has %d digits." % len(kwargs["answer"])

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.

        Returns:
            What is wrong with it.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = number == self.secret
        self.reward = float(self.done)
        return "right" if self.done else "too small" if number < self.secret else "too large"

    async def peek(self) -> dict:
        """Look at a digit."""
        return {"digit": self.secret % 10}

    def show(self) -> list:
        """Look at a picture."""
        from PIL import Image
        return [{"type": "text", "text": "seen"}, {"type": "image", "image": Image.new("RGB", (4, 4))}]

    def digits(self, count: int) -> list:
        """List digits.

        Args:
            count: How many.
        """
        return [int(digit) for digit in str(self.secret)][:count]

    def scan(self, side: int) -> list:
        """Look at pixels.

        Args:
            side: How many.
        """
        import numpy as np
        return ["pixels", np.zeros((side, side), np.uint8)]

    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        import asyncio
        asked = asyncio.sleep(seconds)
        try:
            asyncio.run(asked)
        finally:
            asked.close()

    def _hidden(self):
        pass


class Owner(Number):
    async def get_reward(self) -> float:
        return 2 * self.reward


class Plain(Number):
    def reset(self, answer, seed=None):
        self.secret, self.seed = int(answer), seed


def reward_func(environments, answer, **kwargs) -> list[float]:
    return [env.reward + len(word) for env, word in zip(environments, answer, strict=True)]


class NoReset:
    pass


class Bare:
    def reset(self): pass
    def move(self, where): """Move."""


class Needy:
    def __init__(self, url): pass
    def reset(self): pass
'''
LADDER = '''\
import random


class Ladder:
    """In the form of TRL's documentation: it draws its task itself, tells it, and scores itself."""

    def reset(self, **kwargs) -> str | None:
        self.height = 0
        self.goal = random.randint(1, 6)
        return f"Climb to rung {self.goal}."

    def get_reward(self) -> float:
        return float(self.height == self.goal)

    def climb(self, rungs: int) -> int:
        """
        Climb some rungs.

        Args:
            rungs: Rungs to climb.

        Returns:
            The rung that was reached.
        """
        self.height += rungs
        return self.height
'''
ROW = Prompt("p", (Message("user", "Guess."),), columns={"answer": "42", "level": 3})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_game.py"
    path.write_text(FILE)
    return path


def begin(file, name="Number", **options):
    base = TRLClass(TRLClass.Config(**{"class": f"{file}:{name}"}, **options))
    base.prepare()
    base.tools()
    game = copy.copy(base)
    return game, asyncio.run(game.reset(ROW, 7))


def ask(game, *calls: Call):
    return asyncio.run(game.step(Turn("", calls, 0, "stop", 100)))


def scored(game):
    return asyncio.run(game.score())


def test_a_class_of_trls_plays_an_episode(file):
    game, first = begin(file, reward="reward")
    assert (first.content, first.role) == ("The number has 2 digits.", "user")
    assert [tool.__name__ for tool in game.tools()] == ["digits", "guess", "peek", "scan", "show", "wait"]
    assert ask(game, Call("guess", {"number": 50})).content == ["too large"]
    assert scored(game) == {"reward": 0.0}
    found = ask(game, Call("guess", {"number": "42"}), Call("guess", {"number": 42}), Call("peek", {}))
    assert found.content == ["right\n", "Game over.\n", "{'digit': 2}"] and not found.done
    text, image = ask(game, Call("show", {})).content
    assert text["text"] == "seen" and image["image"].size == (4, 4)
    assert ask(game, Call("digits", {"count": 2}), Call("digits", {"count": 0})).content == ["[4, 2]\n", "[]"]
    text, pixels = ask(game, Call("scan", {"side": 3})).content
    assert text == "pixels" and pixels.shape == (3, 3)
    assert scored(game) == {"reward": 1.0} and ask(game).done
    for call in (
        Call("reset", {"answer": "1"}),
        Call("_hidden", {}),
        Call("guess", {"number": "x"}),
        Call("get_reward", {}),
    ):
        (text,) = ask(game, call).content
        assert "no tool" in text or "valid integer" in text
    assert scored(game) == {"reward": 1.0}


def test_a_loop_within_the_environments_is_no_answer(file):
    game, _ = begin(file)
    with pytest.raises(RuntimeError, match="write it as `async def`, and await"):
        ask(game, Call("wait", {"seconds": 0}))


def test_the_score_is_get_reward_an_attribute_or_a_function_of_trls(file):
    for name, options, right in (
        ("Owner", {}, 2.0),
        ("Owner", {"reward": "reward"}, 1.0),
        ("Number", {"reward": f"{file}:reward_func"}, 3.0),
    ):
        game, _ = begin(file, name, **options)
        assert game.components == ("reward",)
        ask(game, Call("guess", {"number": 42}))
        assert scored(game) == {"reward": right}
    game, _ = begin(file)
    assert game.components == () and scored(game) == {}


def test_done_ends_the_episode_where_it_is_named(file):
    game, _ = begin(file, done="done")
    assert not ask(game, Call("guess", {"number": 1})).done
    assert ask(game, Call("guess", {"number": 42})).done


def test_reset_gets_what_it_has_parameters_for_and_episodes_have_objects_of_their_own(file):
    one, first = begin(file, "Plain")
    assert first is None and one._object.seed == 7
    other, _ = begin(file, "Plain")
    ask(one, Call("guess", {"number": 42}))
    assert one._object.done and not other._object.done


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", "has no method reset"),
        ("Bare", "Bare.move has no type hints for where"),
        ("Needy", "cannot be made without arguments"),
        ("reward_func", "is a function, and no class"),
        ("Numbr", "has no class Numbr"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_the_start(file, name, message):
    with pytest.raises(ConfigError, match=message):
        begin(file, name)


def test_the_config_names_it_by_class(file):
    spec = EnvironmentSpec.model_validate({"class": f"{file}:Owner", "max_turns": 3})
    assert spec.name == "class" and spec.max_turns == 3
    assert registry.create("environment", spec).components == ("reward",)


@pytest.mark.full
def test_a_run_trains_on_such_a_class(fake_runs: Runs, tmp_path, monkeypatch):
    """The policy's first letter stands for a call: of one rung, two or three. A turn without letters calls nothing."""
    path = tmp_path / "ladder.py"
    path.write_text(LADDER)
    ladder = TRLClass(TRLClass.Config(**{"class": f"{path}:Ladder"}))
    facts = EnvironmentFacts(tuple(tool_schemas(ladder.tools())), ladder.components, 60.0)
    monkeypatch.setattr("mmrl.runs.environment.environment_facts", lambda spec: facts)
    plain = FakeEngine._rollout

    def calling(self: FakeEngine, *given: Any) -> Rollout:
        rollout = plain(self, *given)
        if not rollout.text:
            return dataclasses.replace(rollout, text="I am there.")
        call = {"name": "climb", "arguments": {"rungs": 1 + ord(rollout.text[0]) % 3}}
        return dataclasses.replace(rollout, text=f"<tool_call>\n{json.dumps(call)}\n</tool_call>")

    monkeypatch.setattr(FakeEngine, "_rollout", calling)
    limits = {"max_turns": 2, "max_turn_tokens": 2, "max_observation_tokens": 60, "workers": 1}
    config = fake_runs.config(
        "ladder",
        environment={"class": f"{path}:Ladder", **limits},
        rewards=[],
        sampler={"group_size": 4, "max_new_tokens": 8},
        trainer={"steps": 1, "prompts_per_step": 3, "run_dir": str(fake_runs.folder / "ladder")},
    )
    assert fake_runs.train(config) == 0
    (record,) = recorded_steps(fake_runs.folder / "ladder").values()
    rewards = set[float]()
    for group in read_step(record).groups:
        for rollout in group.credited.scored.rollouts:
            rungs = [call.arguments["rungs"] for played in rollout.episode for call in played.turn.calls]
            told = re.search(r"Climb to rung (\d)\.$", rollout.prompt.prompt.messages[-1].content)
            assert told is not None and not rollout.failure  # a group draws one goal, or it has failed
            reached = float(sum(rungs) == int(told[1]))
            assert rollout.components["reward"] == reached
            rewards.add(reached)
    assert rewards == {0.0, 1.0}
