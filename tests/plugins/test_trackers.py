import json
import math
import socket
import sys
import threading
import time

import pytest
from pydantic import ValidationError

from mmrl_trackers.swanlab import SwanLab
from mmrl_trackers.tensorboard import TensorBoard

METRICS = {"reward/mean": 0.5, "kl/reference": math.nan}


def run(tracker, folder, steps=range(3)):
    tracker.start(folder, {"learner": {"lr": 0.1}})
    for step in steps:
        tracker.log(step, METRICS | {"lr": float(step)})
    tracker.finish()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"connects to {args[1:]}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)


def test_tensorboard_writes_finite_scalars_that_tensorboard_reads(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoard(TensorBoard.Config()), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = {tag for kind in events.Tags().values() if isinstance(kind, list) for tag in kind}
    assert tags == {"reward/mean", "lr"}
    assert [(each.step, each.value) for each in events.Scalars("lr")] == [(0, 0), (1, 1), (2, 2)]


def test_a_run_that_goes_on_is_one_curve_in_tensorboard_without_what_is_undone(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as Shown

    for steps in (range(5), range(3, 6), range(5, 7)):  # from the checkpoint of step 2, and then of step 4
        run(TensorBoard(TensorBoard.Config()), tmp_path, steps)
        time.sleep(1.1)  # files are read in the order of their names, which have whole seconds
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3
    events, shown = EventAccumulator(str(tmp_path / "tensorboard")), Shown(str(tmp_path / "tensorboard"))
    events.Reload()
    shown.Reload()
    assert [each.step for each in events.Scalars("lr")] == list(range(7))
    assert [each.step for each in shown.Tensors("lr")] == list(range(7))


def test_swanlab_goes_on_with_the_id_that_the_run_had(tmp_path, no_network):
    first = SwanLab(SwanLab.Config())
    assert first.state() == {}
    run(first, tmp_path)
    state = json.loads(json.dumps(first.state()))
    second = SwanLab(SwanLab.Config())
    second.restore(state)
    run(second, tmp_path, range(3, 5))
    assert second.state() == state
    folders = sorted((tmp_path / "swanlog").glob("run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(state["id"]) for folder in folders)
    third = SwanLab(SwanLab.Config())
    run(third, tmp_path)
    assert third.state()["id"] != state["id"]


@pytest.mark.parametrize("before", [None, "abc123"])
def test_swanlab_in_the_cloud_is_asked_for_the_same_experiment(tmp_path, monkeypatch, before):
    import swanlab

    asked = {}

    class Experiment:
        id = before or "new1"

    monkeypatch.setattr(swanlab, "init", lambda **arguments: asked.update(arguments) or Experiment())
    tracker = SwanLab(SwanLab.Config(mode="cloud"))
    if before:
        tracker.restore({"id": before})
    tracker.start(tmp_path, {})
    assert (asked["id"], asked["resume"], asked["mode"]) == (before, "allow" if before else "never", "cloud")
    assert tracker.state() == {"id": before or "new1"}


def test_swanlab_writes_the_run_offline_without_a_connection_or_a_secret(tmp_path, monkeypatch, no_network, capfd):
    monkeypatch.setenv("SWANLAB_API_KEY", "correct-horse-battery")
    hook, errors = sys.excepthook, []

    def work():
        try:
            run(SwanLab(SwanLab.Config()), tmp_path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert errors == []
    assert sys.excepthook is hook
    assert capfd.readouterr().err == ""  # where the run is, and how to upload it, goes to stdout
    files = [path for path in (tmp_path / "swanlog").rglob("*") if path.is_file()]
    written = b"".join(path.read_bytes() for path in files)
    assert b"reward/mean" in written
    assert b"kl/reference" not in written
    assert b"lr" in written
    assert b"correct-horse-battery" not in written


def test_swanlab_refuses_a_mode_that_it_does_not_have():
    with pytest.raises(ValidationError, match="mode"):
        SwanLab.Config(mode="online")
