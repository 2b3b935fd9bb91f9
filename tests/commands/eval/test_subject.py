"""What `--model` means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.commands.eval.subject import subject
from mmrl.config.yaml_tree import Located
from mmrl.errors import ConfigError, DataError
from mmrl.runs.checkpoints import Checkpoint, CheckpointError, Checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2."""

    def fill(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")

    for step in (1, 2):
        Checkpoints(tmp_path / "run" / "checkpoints").write(step, fill)
    return tmp_path / "run"


def never(checkpoint: Checkpoint, error: CheckpointError) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize(
    ("name", "step"), [("", 2), ("checkpoints", 2), ("checkpoints/step-000001", 1), ("checkpoints/best", 1)]
)
def test_a_run_is_its_newest_checkpoint_and_a_checkpoint_itself(run, name, step):
    Checkpoints(run / "checkpoints").prune(2, best=1)
    found = subject(str(run / name), never)
    assert found.checkpoint is not None and found.checkpoint.step == step
    assert found.model == str(run / "checkpoints" / f"step-{step:06d}" / "model")
    assert found.config == run / "config.yaml"
    assert found.word == f'model.path="{found.model}"'
    # The checkpoint's folder has the run's template, whose file may be gone; another config's is its own.
    own = "model.chat_template=null"
    assert own in found.overrides and own not in replace(found, is_as_trained=False).overrides


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken_or_refused_by_name(run):
    newest = run / "checkpoints" / "step-000002"
    (newest / "model" / "config.json").write_text("[]")
    told = []
    found = subject(str(run), lambda checkpoint, error: told.append(checkpoint.step))
    assert found.checkpoint is not None and (found.checkpoint.step, told) == (1, [2])
    with pytest.raises(CheckpointError, match="damaged"):
        subject(str(newest), never)


def test_any_other_folder_is_a_model_and_any_other_word_a_name_on_the_hub(run, tmp_path):
    folder = run / "checkpoints" / "step-000001" / "model"
    for name in (str(folder), "org/name", str(tmp_path / "absent")):
        found = subject(name, never)
        assert (found.model, found.checkpoint, found.config) == (name, None, None)


def test_paths_of_a_run_that_was_started_elsewhere_are_named(run, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for name in ("rows.jsonl", "score.py", "here.jinja"):
        (home / name).write_text("")
    eval_data = "{name: table, path: rows.jsonl, prompt: question}"
    (run / "config.yaml").write_text(
        f"data: {{train: {{name: table, path: rows.jsonl}}, eval: {eval_data}, prompt_template: here.jinja}}\n"
        "rewards: [{name: 'score.py:score'}]\nmodel: {path: rows.jsonl}\n"
    )
    (run / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "folder": str(home)}) + "\n")
    away = tmp_path / "away"
    away.mkdir()
    (away / "here.jinja").write_text("")
    monkeypatch.chdir(away)
    found = subject(str(run), never)
    with pytest.raises(ConfigError) as caught, found.explaining(found.overrides):
        raise DataError("there is no such file")
    error = caught.value
    assert error.what.endswith(f"from where it was started, {home}")
    assert error.where == "data.eval.path: rows.jsonl, rewards.0.name: score.py"
    assert error.remedy == f"run this command there (cd {home})"
    with pytest.raises(ConfigError) as caught, found.explaining(["rewards=[]"]):
        raise DataError("there is no such file")
    assert caught.value.remedy == f"run this command there (cd {home}), or add data.eval.path={home / 'rows.jsonl'}"
    with pytest.raises(DataError), found.explaining(["data.eval.path=/x", "rewards=[]"]):
        raise DataError("another fault")
    given = Located.of({"data": {"eval": {"path": "/x"}}, "rewards": []}, "overrides")
    with pytest.raises(DataError), found.explaining([given]):
        raise DataError("another fault")
    with pytest.raises(DataError), replace(found, is_as_trained=False).explaining():
        raise DataError("of another config")
    monkeypatch.chdir(home)
    with pytest.raises(DataError), found.explaining():
        raise DataError("another fault")
