"""``import mmrl``: its names, and its functions with the fake engine in their processes."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mmrl
from mmrl.api.given import loaded_with
from mmrl.commands import child_command
from mmrl.commands.cli import main
from mmrl.errors import ConfigError, DataError, PluginError
from mmrl.interfaces import Environment, PluginConfig
from mmrl.rollout.records import RecordedRollout
from mmrl.rollout.records.paging import GroupPages, IndexedGroup
from mmrl.types import Prompt, Rollout
from tests.faults.runs import REWARDS, Runs, records
from tests.warm_workers import forked_from

ROOT = Path(__file__).parents[2]
FUNCTIONS = {"check", "evaluate", "export", "load_evaluation", "load_run", "load_sweep", "sweep", "train"}
ANSWERS = {"Answer", "Check", "Evaluation", "GroupPages", "Metrics", "RecordedEvaluation", "Run", "Sweep"}
ERRORS = {
    "ConfigError", "DataError", "DeviceBusyError", "DeviceMemoryError", "HubError", "HubUnreachableError", "MMRLError",
    "NumericsError", "PluginError", "RankLostError", "ResourceError",
}  # fmt: skip
PLUGINS = {
    "API_VERSION", "Aggregation", "AggregationMode", "Algorithm", "CorrectionMode", "DatasetFacts", "DatasetLoader",
    "Environment", "Finding", "KLEstimator", "Monitor", "Needs", "Plugin", "PluginConfig", "Refill", "Reward",
    "RunFacts", "SampledRow", "Scores", "StepRecord", "StepView", "Tool", "ToolError", "Tracker", "tool",
}  # fmt: skip
RECORDS = {
    "Batch", "Call", "Candidate", "Content", "Credit", "EncodedPrompt", "FinishReason", "IMAGE_PLACEHOLDER",
    "ImageRef", "Message", "Observation", "PackedTokens", "PlayedTurn", "Prompt", "RawImage", "Rollout", "RolloutGroup",
    "Sample", "Score", "ScoredGroup", "Segment", "TokenLoss", "Turn", "Unscored",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(mmrl.__all__) == {"__version__"} | FUNCTIONS | ANSWERS | ERRORS | PLUGINS | RECORDS
    assert set(dir(mmrl)) >= set(mmrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mmrl.trian


def test_every_name_is_what_type_checkers_take_it_for() -> None:
    tree = ast.parse(Path(mmrl.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    shown = {alias.name: node.module for node in imports for alias in node.names if str(node.module) != "importlib"}
    assert set(shown) - {"old_names"} == set(mmrl.__all__)
    for name, module in ((name, shown[name]) for name in mmrl.__all__):
        assert getattr(mmrl, name) is getattr(importlib.import_module(str(module)), name)


def test_a_name_is_imported_when_it_is_used() -> None:
    code = """
import sys, mmrl
heavy = {"torch", "pydantic", "numpy", "yaml"}
own = {name for name in sys.modules if name.startswith("mmrl.")}
assert own == {"mmrl.errors", "mmrl.system", "mmrl.system.old_names", "mmrl.system.version"}
assert not heavy & set(sys.modules)
mmrl.ConfigError
assert not heavy & set(sys.modules)
for name in mmrl.__all__:
    getattr(mmrl, name)
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.fixture
def runs(
    request: pytest.FixtureRequest, tmp_path: Path, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runs]:
    """Configs of runs that have the fake engine, in processes of their own; in the full tier forks of a warm one."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(child_command, "MODULE", "tests.faults.errands")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as forks:
        if request.node.get_closest_marker("full"):
            warm = request.getfixturevalue("warm_engines")
            forks.enter_context(forked_from(warm, ["tests.faults.errands"], child_command))
        yield Runs(tmp_path, models("qwen2"))


def mapping(runs: Runs, **sections: Any) -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(runs.config(**sections).read_text())
    return loaded


def test_the_page_names_what_there_is() -> None:
    page = (ROOT / "mmrl" / "api" / "README.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", page, re.S))
    named = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    recorded = {*dir(RecordedRollout), *dir(GroupPages), *dir(IndexedGroup)}
    known = {*mmrl.__all__, *dir(mmrl.Run), *dir(mmrl.Metrics), *dir(mmrl.Check), *dir(mmrl.Evaluation), *recorded}
    known |= {*dir(mmrl.Sweep), "rolling", "mean", "plot", "dropna"}  # of pandas
    assert named <= known and len(page.splitlines()) <= 80


def late(rollouts: list[Rollout]) -> list[float]:
    """More for late letters."""
    return [sum(map(ord, each.text)) / 1000 for each in rollouts]


def weighed(rollouts: list[Rollout], factor: float = 1.0) -> list[float]:
    """A factor for each."""
    return [factor for _ in rollouts]


@pytest.mark.full
def test_runs_train_twice_in_a_process_and_go_on(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def look(step: int, metrics: Any) -> None:
        seen.append(step)
        assert (metrics["reward/mean"] > 0 if step else "reward/mean" not in metrics) and mmrl.load_run(
            "run"
        ).path == runs.folder / "run"

    config = mapping(runs, trainer={"steps": 2, "prompts_per_step": 3, "save_every": 1, "run_dir": "run"})
    run = mmrl.train(config, {"rewards": [{"name": f"{REWARDS}:letters"}]}, callbacks=[look])
    assert run.stopped == "" and seen == [0, 1, 2] and run.path == runs.folder / "run"
    assert list(run.metrics.curve("reward/mean")) == [1, 2]
    assert len(list(run.rollouts(step=2))) == 12
    assert "step 2/2" in capsys.readouterr().out
    again = mmrl.train(config, {"trainer.steps": 3, "trainer": {"seed": 0}}, callbacks=[look])
    assert seen == [0, 1, 2, 3] and [each.step for each in again.checkpoints] == [1, 2, 3]
    assert any(event["kind"] == "resumed" for event in again.events)
    faster = {"trainer.steps": 4, "trainer.seed": 0, "learner.lr": 0.02}
    with pytest.raises(ConfigError, match=r"--allow-change learner.lr; in Python, allow_change"):
        mmrl.train(config, faster)
    assert max(mmrl.train(config, faster, allow_change=["learner.lr"]).metrics.steps) == 4


def broken(rollouts: list[Rollout]) -> list[float]:
    """Fails on each answer."""
    return [1 / 0 for _ in rollouts]


@pytest.mark.full
def test_a_check_is_asserted_and_shown_and_leaves_nothing(runs: Runs) -> None:
    rows = [{"problem": "2 + 2?", "answer": "4"}, {"problem": "3 + 3?", "answer": "6"}] * 4
    config = {key: value for key, value in mapping(runs).items() if key != "data"}
    found = mmrl.check(config, rewards="exact", dataset=rows, eval_dataset=rows[:1])
    assert found, found
    assert not found.errors and found.data["batches"]["steps"] == 4
    assert "data.eval: 1 of 1 rows ask and show the same as a row of data.train" in found.warnings
    assert "8 of 8 rows kept" in repr(found) and f"warning    {found.warnings[0]}" in repr(found)
    bad = mmrl.check(config, {"rewards.0.weight": 2.0}, rewards=broken, dataset=rows)
    (error,) = bad.errors
    assert not bad and "ZeroDivisionError: division by zero" in error and f"error      {error}" in str(bad)
    with pytest.raises(ConfigError, match=r"unknown key trainer\.step\b"):
        mmrl.check(config, {"trainer.step": 3}, dataset=rows)
    assert not (runs.folder / "run").exists()


RULE = """
from mmrl import Aggregation, Algorithm, Credit, TokenLoss

class Rule(Algorithm):
    aggregation = Aggregation("token-mean")

    def credit(self, batch):
        return Credit(batch.rewards - batch.rewards.mean())

    def loss(self, tokens):
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)
"""
SCRIPT = """
from PIL import Image

import mmrl
from mmrl.commands import child_command
from mmrl.api.given import loaded_with

child_command.MODULE = "tests.faults.errands"
SCALE = 0.5
print("the script runs")

def scaled(text):
    return SCALE * len(text)

def long(rollouts, bonus: float = 0.0):
    return [scaled(each.text) + bonus for each in rollouts]

images = [Image.new("RGB", (56, 56), (n, 0, 0)) for n in range(4)]
rows = [{{"problem": f"<image>{{n}}?", "images": [image], "answer": str(n)}} for n, image in enumerate(images)]
run = mmrl.train(
    "config.yaml",
    rewards=[{{"name": long, "bonus": 1.0}}, "{rewards}:early"],
    dataset=rows,
    algorithm="rule.py:Rule",
)
found = list(run.rollouts(step=2))
assert all(each.rewards["long"] == 1.0 + 0.5 * len(each.text) for each in found)
assert {{Image.open(each.images[0]).getpixel((0, 0))[0] for each in run.rollouts()}} == set(range(4))
print("it is done", run)
"""


@pytest.mark.full
def test_a_script_gives_a_function_of_its_own_rows_with_images_and_a_rule_of_a_file(
    runs: Runs, models: Callable[[str], Path]
) -> None:
    trainer = {"steps": 2, "prompts_per_step": 2, "save_every": 1, "run_dir": "run"}
    config = mapping(runs, trainer=trainer, model={"path": str(models("qwen2_5_vl"))})
    (runs.folder / "config.yaml").write_text(json.dumps({key: config[key] for key in config.keys() - {"data"}}))
    (runs.folder / "rule.py").write_text(RULE)
    (runs.folder / "script.py").write_text(SCRIPT.format(rewards=REWARDS))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=runs.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the script runs") == 1 and "it is done" in done.stdout
    (row_file,) = (runs.folder / "run" / "given").glob("rows-*/train.parquet")
    (source,) = (runs.folder / "run" / "given").glob("long-*.py")
    assert "the script runs" not in source.read_text()
    run = mmrl.load_run("run")
    assert run.config["data"]["train"]["path"] == str(row_file)
    assert [each["name"] for each in run.config["rewards"]] == [f"{source}:long", f"{REWARDS}:early"]
    assert run.config["algorithm"]["name"] == "rule.py:Rule"


def test_a_module_gives_its_function_by_name(runs: Runs) -> None:
    from mmrl.api.given import loaded_with

    config = loaded_with(mapping(runs), {}, [late], None, None).config
    assert config.rewards[0].name in (f"import:{__name__}:late", f"{Path(__file__)}:late")
    assert config.rewards[0].metric == "late" and not (runs.folder / "run").exists()
    assert loaded_with(mapping(runs), {}, late, None, None).config.rewards == config.rewards
    (scaled,) = loaded_with(mapping(runs), {}, partial(weighed, factor=3.0)).config.rewards
    assert scaled.name.endswith(":weighed") and scaled.options == {"factor": 3.0}


def solve(guess: int) -> str:
    """Tell if a guess is right.

    Args:
        guess: The guess.
    """
    return "right" if guess == 7 else "wrong"


class Game(Environment):
    """Ends at once."""

    class Config(PluginConfig):
        hard: bool = False

    def reset(self, prompt: Prompt, seed: int) -> None:
        return None


def test_an_environment_is_given_as_name_class_entry_or_tools(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": {"name": "table", "path": "x"}},
        "algorithm": {"name": "grpo"},
        "trainer": {"run_dir": str(tmp_path / "run")},
    }

    def entry(given: Any) -> dict[str, Any]:
        spec = loaded_with(config, {"environment.max_turns": 3}, environment=given).config.environment
        assert spec is not None and spec.max_turns == 3
        return {"name": spec.name, **spec.options}

    game, function = f"import:{__name__}:Game", f"import:{__name__}:solve"
    assert entry(Game) == {"name": game, "hard": False}
    assert entry(game) == {"name": game, "hard": False}
    assert entry({"name": Game, "hard": True}) == {"name": game, "hard": True}
    assert entry(solve) == entry([solve]) == entry({"name": "tools", "tools": [function]})
    with pytest.raises(ConfigError, match="int 7 is no function or class"):
        entry(7)


def test_an_error_of_the_config_rises_at_once_and_leaves_nothing(runs: Runs) -> None:
    def local(rollouts: list[Rollout]) -> list[float]:
        return [0.0 for _ in rollouts]

    with pytest.raises(ConfigError, match=r"unknown key trainer\.step\b") as caught:
        mmrl.train(mapping(runs), {"trainer.step": 3})
    assert caught.value.where == "overrides"
    with pytest.raises(ConfigError, match=r"unknown key learner\.rl"):
        mmrl.train(mapping(runs, learner={"rl": 3}), rewards=[local])
    with pytest.raises(ConfigError, match="no key can be 3"):
        mmrl.train(mapping(runs), {3: 3})  # type: ignore[dict-item]
    with pytest.raises(PluginError, match="no installed package has a reward plugin called 'exct'"):
        mmrl.train(mapping(runs), rewards=["exct"])
    with pytest.raises(ConfigError, match="2 errors in the config"):
        mmrl.train(mapping(runs), {"trainer.steps": 0, "learner.lr": 3})
    assert not (runs.folder / "run").exists()
    (runs.folder / "run").write_text("")
    with pytest.raises(ConfigError, match="run is not a folder"):
        mmrl.train(mapping(runs), rewards=[local])


def test_an_error_of_the_run_is_that_of_the_command(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.rows.write_text('{"id": "1", "prompt": "?"}\n')
    config = runs.config()
    assert main(["train", str(config)]) == 3
    told = capsys.readouterr().err
    old = {"sampler.memory_fraction": 0.4}  # its name in 0.2.0
    with pytest.raises(DataError) as caught, pytest.warns(FutureWarning, match="sampler.gpu_memory_utilization"):
        mmrl.train(config, old)
    assert told == f"mmrl: {caught.value}\n"


@pytest.mark.full
def test_a_callback_stops_the_run_with_false_and_with_an_error(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    config = mapping(runs, trainer={"steps": 10**6, "prompts_per_step": 3, "save_every": 10**6, "run_dir": "run"})
    live = []

    def enough(step: int, metrics: Any) -> bool:
        live.append(mmrl.load_run("run").is_live)
        return step < 3

    run = mmrl.train(config, callbacks=[enough])
    assert run.stopped == "by the callback enough after step 3" and "stopped by the callback enough" in repr(run)
    told = "stopped by the callback enough after step 3"
    assert (run.events[-1]["message"], run.events[-1]["exit_code"]) == (told, 0)
    assert (lines := records(run.path / "attempts.jsonl"))[-1]["message"] == told and lines[-1]["exit_code"] == 0
    assert "SIGTERM" not in (out := capsys.readouterr()).err + out.out
    assert live[0] and not run.is_live and run.checkpoints[-1].step == max(run.metrics.steps)

    def fail(step: int, metrics: Any) -> None:
        raise LookupError(f"step {step}")

    last = run.checkpoints[-1].step
    with pytest.raises(LookupError, match=f"step {last + 1}"):
        mmrl.train(config, callbacks=[fail])
    assert run.checkpoints[-1].step > last


@pytest.mark.full
def test_an_evaluation_answers_as_the_command(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"eval": {"name": "table", "path": runs.rows}}
    config = {"data": data, "rewards": [{"name": f"{REWARDS}:early"}], "sampler": {"memory_fraction": 0.4}}
    found = mmrl.evaluate(runs.model, config, samples=2, limit=3)
    assert "sampler.memory_fraction is now called sampler.gpu_memory_utilization" in capsys.readouterr().err
    assert found.data["settings"]["samples"] == 2 and found.data["counts"]["prompts"] == 3
    assert found.metrics["eval/accuracy"] == found.data["metrics"]["eval/accuracy"]["value"]
    assert str(found).startswith(f"model   {runs.model}")
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        mmrl.evaluate(runs.model, {"data": {}})
    with pytest.raises(ConfigError, match="--samples is 0"):
        mmrl.evaluate(runs.model, {"data": data, "rewards": [{"name": f"{REWARDS}:early"}]}, samples=0)


@pytest.mark.full
def test_a_model_is_exported_as_by_the_command(runs: Runs) -> None:
    report = mmrl.export(runs.model, "out", dtype="bfloat16")
    assert report.data["out"] == str(runs.folder / "out") and report.data["dtype"] == "bfloat16"
    assert (runs.folder / "out" / "model.safetensors").exists()
    assert "compared" in str(report)
    with pytest.raises(ConfigError, match="--dtype is 'fp16'"):
        mmrl.export(runs.model, "other", dtype="fp16")
    with pytest.raises(ConfigError, match="OUT is not empty"):
        mmrl.export(runs.model, "out")
