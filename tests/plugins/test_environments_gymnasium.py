"""The environment `gymnasium`: games as texts and as frames, with actions that a policy writes."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from mmrl.errors import ConfigError, DataError
from mmrl.types import Call, Message, Observation, Prompt, Turn
from mmrl_environments.gymnasium import Gymnasium

WORDS = ["left", "down", "right", "up"]
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": WORDS, "action": "<a>(.*?)</a>"}


def made(**options) -> Gymnasium:
    game = Gymnasium(Gymnasium.Config(**options))
    game.prepare()
    return game


def prompt(**columns) -> Prompt:
    return Prompt("p", (Message("user", "Reach the goal."),), columns=columns)


def ask(game: Gymnasium, text: str = "", *calls: Call) -> Observation:
    return asyncio.run(game.step(Turn(text, calls, 0, "stop", 100)))


def frame(observation: Observation) -> np.ndarray:
    return np.asarray(observation.content)


def test_a_way_over_the_ice_in_frames_is_that_of_gymnasium_itself():
    game = made(**LAKE, render=True)
    plain = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="rgb_array")
    plain.reset(seed=5)
    np.testing.assert_array_equal(frame(game.reset(prompt(), 5)), plain.render())
    for word in ("right", "RIGHT", " 1 ", "down", "down", "2"):
        found = ask(game, f"I go <a>up</a>, no, <a>{word}</a>")
        action = WORDS.index(word.lower()) if word.lower() in WORDS else int(word)
        _, reward, terminated, truncated, _ = plain.step(action)
        np.testing.assert_array_equal(frame(found), plain.render())
        assert (found.reward, found.done, found.info) == (reward, terminated or truncated, {"action": action})
        assert found.role == "user"
    assert found.done and found.reward == 1.0
    game.close()
    game.close()


def test_slippery_ice_repeats_by_its_seed_and_objects_share_nothing():
    def play(base: Gymnasium, seed: int) -> list[str]:
        game = copy.copy(base)
        found = [game.reset(prompt(), seed).content]
        while not (answer := ask(game, "<a>right</a>")).done:
            found.append(answer.content)
        return [*found, answer.content]

    base = made(**(LAKE | {"kwargs": {"is_slippery": True, "map_name": "8x8"}}))
    one, again, other = copy.copy(base), copy.copy(base), play(base, 8)
    one.reset(prompt(), 7)
    again.reset(prompt(), 7)
    for _ in range(5):  # side by side
        left, right = ask(one, "<a>right</a>"), ask(again, "<a>right</a>")
        assert left == right
    assert play(base, 7) == play(base, 7) != other
    assert play(base, 2**62 + 3) == play(base, 2**62 + 3)


def test_rows_have_maps_of_their_own():
    game = made(**LAKE, kwargs_column="map")
    for value in ({"desc": ["SG", "FF"]}, '{"desc": ["SG", "FF"]}', {"desc": np.array(["SG", "FF"]), "map_name": None}):
        game.reset(prompt(map=value), 0)
        found = ask(game, "<a>right</a>")
        assert found.reward == 1.0 and found.done
    for value in (None, "nowhere", [1]):
        with pytest.raises(DataError, match="the column map has no mapping"):
            game.reset(prompt(map=value), 0)
    with pytest.raises(ConfigError, match="gymnasium cannot make FrozenLake-v1"):
        game.reset(prompt(map={"size": 3}), 0)


UNREADABLE = ["", "forward", "4", "-1", "1.0", "true", "[1]", "{", "9" * 10**5, "[" * 10**5, "\ud800\x1b[2J<|im_end|>"]


@pytest.mark.parametrize("written", UNREADABLE, ids=range(len(UNREADABLE)))
def test_an_action_that_cannot_be_read_costs_the_penalty_and_is_told(written):
    game = made(**LAKE, penalty=-0.25)
    before = game.reset(prompt(), 0).content
    found = ask(game, f"<a>{written}</a>")
    assert found.content == "This is no action. Actions: left, down, right, up."
    assert found.reward == -0.25 and not found.done and found.info == {"action": None}
    assert ask(game, "no tags") == found
    assert before == "0" and ask(game, "<a>right</a>").content == "1"  # the game has not moved meanwhile


def test_actions_as_calls_of_a_tool():
    game = made(**(LAKE | {"action": None}), penalty=-0.5)
    (schema,) = game.tools()
    assert schema["function"]["parameters"]["properties"]["action"]["enum"] == WORDS
    game.reset(prompt(), 0)
    found = ask(game, "", Call("act", {"action": "right"}), Call("act", {"action": 2}))
    assert found.content == ["1\n", "2"] and found.reward == 0 and not found.done
    for call in (Call("act", {}), Call("act", None), Call("act", {"action": {"a": 1}}), Call("move", {"action": "up"})):
        found = ask(game, "", call)
        assert "This is no action" in found.content[0] and found.reward == -0.5
    assert ask(game, "I do not know").reward == -0.5
    calls = [Call("act", {"action": word}) for word in ("down", "down", "down", "right", "left", "left")]
    found = ask(game, "", *calls)
    assert found.done and found.reward == 1.0 and found.content[-1] == "15", "the last call is not made"


def test_other_spaces_of_actions_are_lists_of_numbers():
    game = made(id="CartPole-v1", action="<a>(.*?)</a>")
    state = json.loads(game.reset(prompt(), 0).content)
    assert len(state) == 4 and ask(game, "<a>1</a>").reward == 1.0
    car = made(id="MountainCarContinuous-v0", action="<a>(.*?)</a>")
    car.reset(prompt(), 0)
    assert ask(car, "<a>[0.5]</a>").info["action"] == [0.5]
    for written in ("[2]", "0.5", "[0.5, 0.5]", '["a"]', "[NaN]", "[[0.5]]", "[1e999]", "[" + "9" * 400 + "]"):
        found = ask(car, f"<a>{written}</a>")
        assert found.content == "This is no action. Actions: a JSON list of 1 numbers from -1 to 1.", written


class Unbounded(gymnasium.Env):
    """Its actions have no bounds, and infinity breaks it."""

    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    observation_space = action_space

    def __init__(self, render_mode=None):
        pass

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return action, float(action[0]), False, False, {}


def test_actions_without_bounds_are_finite():
    gymnasium.register("mmrl-tests/Unbounded-v0", Unbounded, disable_env_checker=True)
    try:
        game = made(id="mmrl-tests/Unbounded-v0", action="<a>(.*?)</a>", penalty=-1)
        game.reset(prompt(), 0)
        for written in ("[Infinity]", "[-Infinity]", "[NaN]", "[1e999]", "[1e39]"):
            found = ask(game, f"<a>{written}</a>")
            assert found.info == {"action": None} and found.reward == -1, written
        assert ask(game, "<a>[2.5]</a>").reward == 2.5
    finally:
        del gymnasium.registry["mmrl-tests/Unbounded-v0"]


@pytest.mark.parametrize(
    "options", [LAKE, LAKE | {"actions": None}, {"id": "MountainCarContinuous-v0", "action": "<a>(.*?)</a>"}]
)
def test_its_example_is_an_action(options):
    game = made(**options)
    game.reset(prompt(), 0)
    assert ask(game, game.example()).info["action"] in (0, [0.0])
    assert made(**(options | {"action": None})).example() == ""


def test_frames_are_shrunk_to_the_side_that_was_asked_for():
    game = made(**LAKE, render=True, image_side=64)
    shown = frame(game.reset(prompt(), 0))
    assert shown.shape == (64, 64, 3)
    full = made(**LAKE, render=True)
    boxes = frame(full.reset(prompt(), 0)).reshape(64, 4, 64, 4, 3).mean((1, 3))  # 256 to 64
    np.testing.assert_allclose(shown, boxes, atol=1)  # rounded twice, for rows and for columns


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"id": "FrozenLak-v1"}, "gymnasium has no environment 'FrozenLak-v1'", "did you mean FrozenLake-v1?"),
        ({"id": "FrozenLake-v7"}, "gymnasium has no environment", "did you mean FrozenLake-v1?"),
        ({"id": "no_such_package:Game-v0"}, "No module named 'no_such_package'", "install its package"),
        ({"id": "FrozenLake-v1", "actions": ["a"]}, "4 actions, and there are 1 words", "4 different words"),
        ({"id": "MountainCarContinuous-v0", "actions": ["a"]}, "have no words", "leave it out"),
        (
            {"id": "FrozenLake-v1", "kwargs": {"size": 3}},
            "unexpected keyword argument 'size'",
            "keywords that it takes",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_start(options, message, hint):
    with pytest.raises(ConfigError, match=message) as caught:
        made(**options)
    assert hint in caught.value.remedy + caught.value.possible


def test_without_gymnasium_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from mmrl_environments.gymnasium import Gymnasium\n"
        "Gymnasium(Gymnasium.Config(id='FrozenLake-v1'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the package gymnasium" in done.stderr and "pip install 'mmrl-train[gymnasium]'" in done.stderr


@pytest.mark.full
def test_frames_need_no_display_and_are_the_same_in_another_process():
    code = (
        "import hashlib, numpy, os\n"
        "for name in ('DISPLAY', 'SDL_VIDEODRIVER', 'WAYLAND_DISPLAY'): os.environ.pop(name, None)\n"
        "from mmrl.types import Prompt\n"
        "from mmrl_environments.gymnasium import Gymnasium\n"
        "game = Gymnasium(Gymnasium.Config(id='FrozenLake-v1', render=True))\n"
        "print(hashlib.sha256(numpy.asarray(game.reset(Prompt('p', ()), 3).content).tobytes()).hexdigest())"
    )
    lines = {subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)}
    assert len(lines) == 1 and len(lines.pop().strip()) == 64
