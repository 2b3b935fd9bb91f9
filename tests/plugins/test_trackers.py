import math
import socket
import sys
import threading

import pytest
from pydantic import ValidationError

from mmrl_trackers.swanlab import SwanLab
from mmrl_trackers.tensorboard import TensorBoard

METRICS = {"reward/mean": 0.5, "kl/reference": math.nan}


def run(tracker, folder):
    tracker.start(folder, {"learner": {"lr": 0.1}})
    for step in range(3):
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
    values = events.Tensors("lr")
    assert [value.step for value in values] == [0, 1, 2]
    assert [value.tensor_proto.float_val[0] for value in values] == [0, 1, 2]


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
