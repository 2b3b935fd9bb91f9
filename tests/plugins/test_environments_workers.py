"""First-party environments in a run's own worker process."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from PIL import Image

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.rollout.episodes.observations import ReceivedObservation
from mmrl.rollout.episodes.process import EnvironmentProcess
from mmrl.types import Call, Message, Prompt, RawImage, Turn

TOOLS = '''\
import os

def where(name: str) -> str:
    """Tell a variable of the environment.

    Args:
        name: The variable.
    """
    return f"{os.environ.get(name)} {os.getcwd()}"
'''
GAME = '''\
import os

class Game:
    def reset(self, **row):
        self.name = row["variable"]

    def tell(self, further: int) -> str:
        """Tell a variable of the environment.

        Args:
            further: A number.
        """
        return f"{os.environ.get(self.name)} {os.getcwd()} {further + 1}"

    def get_reward(self) -> float:
        return float(self.name == "HF_TOKEN")
'''
CASES = {
    "tools": ({"tools": ["my_tools.py:where"]}, ["where"]),
    "class": ({"class": "my_game.py:Game"}, ["tell"]),
    "python": ({"name": "python", "i_know_local_is_no_security_boundary": True}, ["python"]),
    "zoom": ({"name": "zoom", "grid": 2}, ["cell"]),
    "gymnasium": ({"name": "gymnasium", "id": "FrozenLake-v1", "render": True}, ["act"]),
    "mcp": (
        {"name": "mcp", "command": [sys.executable, "-m", "mcp_server_time"]},
        ["get_current_time", "convert_time"],
    ),
}


DESCRIBED = ("tools", "gymnasium", "mcp")
"""Those that are asked for their schemas, which import transformers where tools are functions."""


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_an_environment_tells_its_tools_and_plays(name, tmp_path, monkeypatch):
    options, tools = CASES[name]
    (tmp_path / "my_tools.py").write_text(TOOLS)
    (tmp_path / "my_game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "canary-of-a-token")
    file = io.BytesIO()
    Image.new("RGB", (80, 40), "red").save(file, "PNG")
    prompt = Prompt(
        "p", (Message("user", "<image>?"),), (RawImage(file.getvalue(), "red"),), columns={"variable": "HF_TOKEN"}
    )
    calls = {
        "where": {"name": "HF_TOKEN"},
        "tell": {"further": "1"},
        "python": {"code": "import os; print(os.environ.get('HF_TOKEN'), os.getcwd())"},
        "cell": {"number": 4},
        "act": {"action": "2"},
        "get_current_time": {"timezone": "UTC"},
    }
    process = EnvironmentProcess(EnvironmentSpec.model_validate(options), wants_tools=name in DESCRIBED)
    try:
        facts = process.await_start()
        assert [tool["function"]["name"] for tool in facts.tools] == (tools if name in DESCRIBED else [])
        assert facts.components == (("reward",) if name == "class" else ())
        process.call("open", 1, prompt, 7)
        turn = Turn("", (Call(tools[0], calls[tools[0]]),), 0, "stop", 100)
        (part,) = ReceivedObservation.of(process.call("step", 1, turn)).content
        if isinstance(part, bytes):
            assert min(Image.open(io.BytesIO(part)).size) >= 224
        else:
            assert "canary" not in part and str(tmp_path) + os.sep not in part + os.sep
        assert ReceivedObservation.of(process.call("step", 1, Turn("", (), 1, "stop", 90))).done == (
            name != "gymnasium"
        )
        if name == "class":
            assert process.call("score", 1)["components"] == {"reward": 1.0}
        process.call("close", 1)
    finally:
        process.stop()
    assert {path.name for path in Path().iterdir()} <= {"my_tools.py", "my_game.py", "__pycache__"}
