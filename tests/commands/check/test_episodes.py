"""``mmrl check`` plays scripted episodes in the real environment, and prints them as the model would read them."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from mmrl.commands.check.episodes import Walk, cut_turns, observed_roles
from mmrl.commands.check.scripts import Script, example
from mmrl.commands.cli import main
from mmrl.commands.printing import tell
from mmrl.rollout.episodes.episode import Limits
from mmrl.system.report import Report
from mmrl.types import (
    EncodedPrompt,
    FinishReason,
    ImageRef,
    Message,
    PlayedTurn,
    Prompt,
    Rollout,
    Segment,
    Turn,
)

ENVIRONMENT = '''
from PIL import Image

from mmrl import Environment, Observation, ToolError, tool

class Peek(Environment):
    """Looks at a part of the picture."""

    components = ("looked",)

    def reset(self, prompt, seed):
        self.looks = 0
        return Observation(f"There are {len(prompt.images)} pictures.")

    @tool
    def peek(self, x: int, why: str) -> list:
        """Look at a part.

        Args:
            x: The place.
            why: The reason.
        """
        self.looks += 1
        return [f"seen at {x} \\x1b[31m<|im_end|>", self.picture(x)]

    def picture(self, x):
        return Image.new("RGB", (56, 28), (10 * x, 0, 0))

    def score(self):
        return {"looked": float(self.looks)}
'''


@pytest.fixture
def check(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of ``mmrl check`` with an environment from a file."""

    def run(*words: str, text: str = ENVIRONMENT, **options: Any) -> tuple[int, str, str]:
        (tmp_path / "peek.py").write_text(text)
        Image.new("RGB", (84, 56), "white").save(tmp_path / "white.png")
        rows = [{"problem": f"<image>what is {i}+1?", "images": ["white.png"], "answer": str(i + 1)} for i in range(4)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "model": {"path": str(models("qwen2_5_vl"))},
            "data": {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}, "max_prompt_tokens": 1024},
            "algorithm": {"name": "grpo"},
            "environment": {"name": f"{tmp_path / 'peek.py'}:Peek", "max_turns": 3, "workers": 1, **options},
            "sampler": {"group_size": 2, "max_new_tokens": 400},
            "trainer": {"prompts_per_step": 2, "steps": 1, "run_dir": str(tmp_path / "run")},
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        code = main(["check", str(path), *words])
        answer = capsys.readouterr()
        return code, answer.out, answer.err

    return run


def test_scripts_are_played_and_shown_with_the_policys_part_marked(check: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = check("--json")
    assert code == 0, err
    found = json.loads(out)["episodes"]
    assert (found["tools"], sorted(found["roles"])) == (["peek"], ["images", "text"])
    scripts = {each["script"]: each for each in found["scripts"]}
    assert list(scripts) == ["right call", "wrong call", "no call", "endless"]
    right = scripts["right call"]
    assert (right["turns"], right["calls"], right["invalid_calls"], right["images"]) == (2, 1, 0, 1)
    assert (right["finish_reason"], right["components"]) == ("environment", {"environment": 0.0, "looked": 1.0})
    authors = [part["author"] for part in right["conversation"]]
    assert authors == ["prompt", "policy", found["roles"]["images"], "policy"]
    prompt, turn, observation, _ = (part["text"] for part in right["conversation"])
    assert "There are 1 pictures." in prompt and "Look at a part." in prompt
    assert '"x": 1' in turn and turn.endswith("<|im_end|>")
    (image,) = re.findall(r"\[image [0-9a-f]{8} (\d+)x(\d+)(?: of \d+x\d+)?, (\d+) tokens\]", observation)
    assert int(image[0]) * int(image[1]) == 28**2 * int(image[2]) and "seen at 1" in observation
    assert observation.rstrip().endswith("<|im_start|>assistant") and observation.count("<|im_end|>") == 1
    wrong = scripts["wrong call"]["episode"][0]
    assert "no_such_argument" in wrong["content"][0]["text"] and scripts["wrong call"]["images"] == 0
    Image.new("RGB", (56, 28), (10, 0, 0)).save(picture := io.BytesIO(), "PNG")
    assert json.loads(out)["disk"]["media"] >= 4 * 3 * len(picture.getvalue())  # 4 completions of 3 turns
    endless = scripts["endless"]
    assert (endless["finish_reason"], endless["policy_tokens"], endless["inserted_tokens"]) == ("length", 400, 0)


ACTING = """
from mmrl import Environment, Observation

class Peek(Environment):
    def reset(self, prompt, seed): pass

    def example(self):
        return "<go>north</go>"

    def step(self, turn):
        went = "<go>" in turn.text
        return Observation("You went." if went else "", reward=float(went), done=not went, role="user")
"""


def test_a_right_action_is_played_where_actions_are_texts(check: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = check("--json", text=ACTING, max_turn_tokens=8)
    assert code == 0, err
    assert json.loads(out)["episodes"]["roles"] == {"text": "user"}
    (warning,) = (each for each in json.loads(out)["warnings"] if "right action" in each)
    assert "is cut after 8 tokens, in turn 1; raise environment.max_turn_tokens = 8" in warning
    code, out, err = check("--json", text=ACTING)
    assert code == 0 and json.loads(out)["warnings"] == [], err
    scripts = {each["script"]: each for each in json.loads(out)["episodes"]["scripts"]}
    assert list(scripts) == ["right action", "answer", "nonsense", "endless"]
    right = scripts["right action"]
    assert (right["turns"], right["components"]) == (2, {"environment": 1.0})
    assert "<go>north</go>" in right["conversation"][1]["text"] and "You went." in right["conversation"][2]["text"]


@pytest.mark.full
def test_people_see_limits_and_marked_lines_without_control_characters(
    check: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = check(max_turn_tokens=200, max_observation_tokens=200, max_images=1)
    assert code == 0, err
    assert "tools: peek, by " in out and "observations with images: as " in out
    assert "right call: ends with environment" in out and "images 1 of 1" in out
    assert "endless: ends with environment" in out  # a cut turn without a call goes to the environment
    assert "\x1b" not in out and "\\x1b[31m" in out
    policy = [line for line in out.splitlines() if line.lstrip().startswith("policy | ")]
    assert any("<tool_call>" in line or '"peek"' in line for line in policy)


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (ENVIRONMENT.replace("def reset", "def resets"), {}, "reset"),
        (ENVIRONMENT.replace("x: int, why: str", "x, why"), {}, "type hint"),
        (ENVIRONMENT, {"weights": {"looks": 1.0}}, "the environment scores no looks"),
        (ENVIRONMENT.replace("self.looks += 1", "raise OSError('no camera')"), {}, "no camera"),
    ],
    ids=["no-reset", "no-hints", "unknown-component", "fails"],
)
def test_a_fault_of_an_environment_is_explained_before_anything_starts(
    check: Callable[..., tuple[int, str, str]], text: str, options: dict[str, Any], message: str
) -> None:
    code, _, err = check("--json", text=text, **options)
    assert code in (2, 4) and message in err and "Traceback" not in err, err


def walked(kind: str, *observed: tuple[str, bool], finishes: Sequence[FinishReason] = ("stop",)) -> Walk:
    """An episode whose observations have a role and, some of them, an image."""
    image = ImageRef("0" * 16, "none", 28, 28)
    ids, zeros = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    segments = [Segment(ids, True, zeros)]
    for role, shows in observed:
        segments += [Segment(ids, False, zeros, images=(image,) * shows, role=role), Segment(ids, True, zeros)]
    prompt = EncodedPrompt(prompt=Prompt("p", (Message("user", "?"),)), text="?", token_ids=ids, images=())
    played = tuple(PlayedTurn(Turn("", (), place, finish, 9)) for place, finish in enumerate(finishes))
    rollout = Rollout(prompt, tuple(segments), 0, "", "stop", 0, episode=played)
    return Walk(Script(kind, ("",)), rollout, (), "")


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ([], {"text": "tool", "images": "user"}),
        ([("tool", False)], {"text": "tool", "images": "user"}),
        ([("tool", False), ("user", True)], {"text": "tool", "images": "user"}),
        ([("user", False)], {"text": "user"}),
        ([("user", False), ("user", True)], {"text": "user", "images": "user"}),
        ([("tool", False), ("user", False)], {"text": "tool and user"}),
    ],
)
def test_the_roles_of_observations_are_those_that_were_met(
    observed: Sequence[tuple[str, bool]], expected: dict[str, str]
) -> None:
    assert observed_roles([walked("right call", *observed)], {"text": "tool", "images": "user"}) == expected


@pytest.mark.parametrize(
    ("kind", "finishes", "limits", "raised"),
    [
        ("right call", ["length"], (9, 9), "sampler.max_new_tokens = 9"),
        ("right action", ["stop", "length"], (8, 9), "environment.max_turn_tokens = 8"),
        ("right call", ["stop", "stop"], (9, 9), None),
        ("endless", ["length"], (9, 9), None),
    ],
)
def test_a_right_turn_that_is_cut_is_told(
    kind: str, finishes: list[FinishReason], limits: tuple[int, int], raised: str | None
) -> None:
    walks = [walked(kind, *[("tool", False)] * (len(finishes) - 1), finishes=finishes)]
    found = cut_turns(walks, Limits(9, *limits, 9, 99, 9))
    turn = f"a {kind} is cut after 3 tokens, in turn {len(finishes)}; raise {raised}"
    assert [turn in each for each in found] == ([] if raised is None else [True])


def test_lines_of_the_policy_are_coloured_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    report = Report(lines=["  policy | a \x1b[2J", "    tool | policy | b"])
    for stream, colour, expected in (
        (Terminal(), {}, "\x1b[32m  policy | a \\x1b[2J\x1b[0m\n    tool | policy | b\n"),
        (Terminal(), {"NO_COLOR": "1"}, "  policy | a \\x1b[2J\n    tool | policy | b\n"),
        (io.StringIO(), {}, "  policy | a \\x1b[2J\n    tool | policy | b\n"),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in colour.items():
            monkeypatch.setenv(name, value)
        assert tell(report, as_json=False) == 0
        assert stream.getvalue() == expected


def test_an_example_fits_its_schema() -> None:
    box = {"type": "array", "items": {"type": "integer", "minimum": 3}, "minItems": 4}
    properties = {"box": box, "mode": {"enum": ["cut", "turn"]}, "deep": {"type": ["null", "boolean"]}, "free": {}}
    schema = {"type": "object", "properties": properties, "required": ["box", "mode", "deep"]}
    assert example(schema) == {"box": [3, 3, 3, 3], "mode": "cut", "deep": True}
    endless: dict[str, Any] = {"type": "object", "properties": {}}
    endless["properties"]["self"] = endless
    assert json.dumps(example(endless)).count("self") == 5
