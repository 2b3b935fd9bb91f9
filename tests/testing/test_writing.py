"""The plugins that plugins/WRITING.md shows are sound."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.testing import alarms_of, check_algorithm, check_environment, check_monitor, check_reward

PAGE = Path(__file__).parents[2] / "plugins/WRITING.md"
GUIDE = PAGE.with_name("ENVIRONMENTS.md")


def shown(name: str) -> Any:
    """The class of that name in the page's Python."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if f"class {name}(" in code]
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(block, namespace)
    return namespace[name]


@pytest.mark.parametrize("name", ["Reinforce", "Mine"])
def test_the_algorithms_of_the_page_pass_the_checks(name: str) -> None:
    check_algorithm(shown(name))


def test_the_reward_of_the_page_passes_the_checks() -> None:
    check_reward(shown("Shortest"), options={"per_token": 0.01})


def test_the_environment_of_the_page_passes_the_checks() -> None:
    check_environment(shown("Dice"), options={"goal": 30})


def test_the_monitor_of_the_page_passes_the_checks_and_tells_what_it_is_for() -> None:
    monitor = shown("LateAnswers")
    check_monitor(monitor)
    steps = {step: {"monitor/mine/place": 10.0 * step} for step in range(1, 99)}
    assert [alarm.step for alarm in alarms_of(monitor(monitor.Config()), steps)] == [23]


@pytest.mark.parametrize(("file", "option"), [("my_tools.py", "tools"), ("my_game.py", "class")])
def test_the_tool_and_the_class_of_the_guide_run_by_its_own_config(
    file: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GUIDE.read_text()
    (code,) = re.findall(rf"```python\n(# {file}\n.*?)```", text, re.S)
    (line,) = re.findall(rf"^environment: \{{{option}: .*$", text, re.M)
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(code)
    spec = EnvironmentSpec.model_validate(yaml.safe_load(line)["environment"])
    check_environment(spec.name, options=spec.options)
