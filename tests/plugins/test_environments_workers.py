"""First-party environments in a run's own worker process."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from PIL import Image

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.rollout.episodes.observations import Answer
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
CASES = {
    "tools": ({"tools": ["my_tools.py:where"]}, ["where"]),
    "zoom": ({"name": "zoom", "grid": 2}, ["cell"]),
    "gymnasium": ({"name": "gymnasium", "id": "FrozenLake-v1", "render": True}, ["act"]),
    "mcp": (
        {"name": "mcp", "command": [sys.executable, "-m", "mcp_server_time"]},
        ["get_current_time", "convert_time"],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_an_environment_tells_its_tools_and_plays(name, tmp_path, monkeypatch):
    options, tools = CASES[name]
    (tmp_path / "my_tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "canary-of-a-token")
    file = io.BytesIO()
    Image.new("RGB", (80, 40), "red").save(file, "PNG")
    prompt = Prompt("p", (Message("user", "<image>?"),), (RawImage(file.getvalue(), "red"),))
    calls = {
        "where": {"name": "HF_TOKEN"},
        "cell": {"number": 4},
        "act": {"action": "2"},
        "get_current_time": {"timezone": "UTC"},
    }
    process = EnvironmentProcess(EnvironmentSpec.model_validate(options), wants_tools=True)
    try:
        facts = process.await_start()
        assert [tool["function"]["name"] for tool in facts.tools] == tools and facts.components == ()
        process.call("open", 1, prompt, 7)
        turn = Turn("", (Call(tools[0], calls[tools[0]]),), 0, "stop", 100)
        (part,) = Answer.of(process.call("step", 1, turn)).content
        if isinstance(part, bytes):
            assert min(Image.open(io.BytesIO(part)).size) >= 224
        else:
            assert "canary" not in part and str(tmp_path) + os.sep not in part + os.sep
        assert Answer.of(process.call("step", 1, Turn("", (), 1, "stop", 90))).done == (name != "gymnasium")
        process.call("close", 1)
    finally:
        process.stop()
    assert {path.name for path in Path().iterdir()} <= {"my_tools.py", "__pycache__"}
