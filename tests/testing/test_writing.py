"""The plugins that plugins/WRITING.md shows are sound."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from mmrl.config.load import load_config
from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.interfaces import DatasetLoader
from mmrl.plugin_host.registry import create, options_class
from mmrl.testing import alarms_of, check_algorithm, check_environment, check_monitor, check_reward, make_rollouts
from mmrl.types import ImageRef

PAGE = Path(__file__).parents[2] / "plugins/WRITING.md"
GUIDE = PAGE.with_name("ENVIRONMENTS.md")


def shown(name: str) -> Any:
    """The class of that name in the page's Python."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if f"class {name}(" in code]
    namespace: dict[str, Any] = {"__name__": "page"}
    if "(Reinforce)" in block:
        exec(re.findall(r"```python\n(# reinforce.py.*?)```", PAGE.read_text(), re.S)[0], namespace)
    exec(block, namespace)
    return namespace[name]


@pytest.mark.parametrize("name", ["Reinforce", "Mine", "Spread", "Guided", "Hints", "Replays"])
def test_the_algorithms_of_the_page_pass_the_checks(name: str) -> None:
    check_algorithm(shown(name))


def test_the_reward_of_the_page_passes_the_checks() -> None:
    check_reward(shown("Shortest"), options={"per_token": 0.01})


@pytest.mark.parametrize(
    ("text", "value", "columns", "truncated", "score"),
    [
        ("light", 200, {}, False, 1.0),
        (" light\n", 200, {}, False, 1.0),
        ("dark", 200, {}, False, 0.0),
        ("dark", 20, {}, False, 1.0),
        ("dark", 20, {}, True, 0.0),
        ("dark", 200, {"threshold": 220}, False, 1.0),
    ],
)
def test_the_function_of_the_page_opens_the_picture_of_a_rollout(
    tmp_path: Path, text: str, value: int, columns: dict[str, int], truncated: bool, score: float
) -> None:
    Image.new("RGB", (28, 28), (value, value, value)).save(tmp_path / "a.png")
    picture = ImageRef("hash", 28, 28, str(tmp_path / "a.png"), (56, 56))
    code = PAGE.read_text().partition("from PIL import Image\n")[2].partition("```")[0]
    namespace: dict[str, Any] = {}
    exec(f"from PIL import Image\n{code}", namespace)
    rollouts = make_rollouts([text], columns=columns, images=[picture], truncated=truncated)
    assert namespace["dark_or_light"](rollouts) == [score]


def test_the_function_of_the_page_values_each_sentence() -> None:
    (code,) = re.findall(r"```python\n(# numbers.py\n.*?)```", PAGE.read_text(), re.S)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(code, namespace)
    check_reward(namespace["numbers"])
    (found,) = namespace["numbers"](make_rollouts(["I add. It is 7"]))
    assert (found.value, found.spans) == (0.5, ((0, 6, 0.0), (6, 14, 1.0)))


def test_what_the_page_says_of_a_rollout_is_there() -> None:
    table = PAGE.read_text().partition("What a rollout has")[2].partition("```")[0]
    (rollout,) = make_rollouts(["x"])
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert len(names) == 12 and all(hasattr(rollout, name) for name in names)
    picture = ImageRef("hash", 1, 1, "path")
    assert all(hasattr(picture, name) for name in ("path", "width", "height", "file_size"))


def test_the_gymnasium_config_of_the_guide_loads_with_the_rows_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GUIDE.read_text().partition("## Wrap a gymnasium environment")[2]
    config, rows = (re.findall(rf"```{kind}\n(.*?)```", text, re.S)[0] for kind in ("yaml", "json"))
    monkeypatch.chdir(tmp_path)
    Path("lakes.jsonl").write_text(rows)
    Path("lake.yaml").write_text(f"model: {{path: m}}\nalgorithm: {{name: grpo}}\n{config}")
    loaded = load_config([Path("lake.yaml")], options_class=options_class).config
    dataset = create("dataset", loaded.data.train)
    assert isinstance(dataset, DatasetLoader)
    prompts = list(dataset.load())
    assert [prompt.columns["map"]["desc"][0] for prompt in prompts] == ["SFF", "SHF"]
    assert "Cross the ice" in prompts[0].messages[-1].content and prompts[0].answer is None
    assert loaded.environment is not None
    check_environment(loaded.environment.name, prompts, options=loaded.environment.options)


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
