"""What `--model` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.checkpoints import Checkpoint, CheckpointError, Checkpoints
from mmrl.evaluating.subject import subject


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
    assert found.overrides[0] == f'model.path="{found.model}"'


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
