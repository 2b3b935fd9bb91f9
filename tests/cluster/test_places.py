"""Runs of a sweep that are at work at once, in places of a Ray cluster.

A worker of the full tier is large by the time it comes here, and could neither start Ray nor be sure to connect. So
``test_ray.py`` runs this file in a process of its own.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mmrl.cluster.places import Places
from mmrl.commands import child_command
from mmrl.commands.child_command import Ended
from mmrl.commands.cli import main
from mmrl.commands.sweep.machines import Cluster, Errand, PlacedRun, PointProcess
from mmrl.errors import ResourceError
from mmrl.runs.reader import Run
from mmrl.runs.sweeps import load_sweep
from tests.commands.test_sweep import ROOT, signals, when
from tests.faults.comparison import metrics
from tests.faults.runs import Runs, records

__all__ = ["signals"]
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
pytestmark = [pytest.mark.full, pytest.mark.skipif(IS_WORKER, reason="run in a process of its own by test_ray.py")]


def errand(folder: Path, devices: int = 1, *, reserves: bool = False, run: str = "run") -> Errand:
    config = {"trainer": {"run_dir": str(folder / "runs" / run), "steps": 2, "seed": 1}, "learner": {"lr": 0.001}}
    return Errand({"config": config}, folder / f"{run}.log", devices, reserves, str(folder), "tests.faults.quick_runs")


@pytest.mark.usefixtures("signals")
def test_two_runs_at_once_are_stopped_and_go_on_to_the_metrics_of_unbroken_ones(
    fake_runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a cluster of the sweep's own, with processes that have the fake engine."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(child_command, "MODULE", "tests.faults.errands")
    trainer = {"steps": 80, "prompts_per_step": 3, "save_every": 40, "run_dir": str(fake_runs.folder / "run")}
    config = fake_runs.config(trainer=trainer)
    words = ["sweep", str(config), "learner.lr=1e-2,2e-2", "--parallel", "2"]
    path = fake_runs.folder / "run-sweep"
    points = [path / "lr-0.01_seed-0", path / "lr-0.02_seed-0"]
    curves = [point / "metrics.jsonl" for point in points]
    when(lambda: all(len(records(each)) > 2 for each in curves), lambda: os.kill(os.getpid(), signal.SIGINT))
    assert main(words) == 130, capsys.readouterr()
    captured = capsys.readouterr()
    assert "2 runs at once through Ray" in captured.out and "lr-0.02_seed-0  stopped by SIGINT" in captured.out
    assert [point.state for point in load_sweep(path).points] == ["stopped", "stopped"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "lr-0.01_seed-0  goes on after step" in told, told
    assert fake_runs.train(config, "learner.lr=2e-2") == 0
    assert metrics(points[1]) == metrics(fake_runs.folder / "run")
    first, second = (records(point / "attempts.jsonl") for point in points)
    assert max(first[0]["time"], second[0]["time"]) < min(first[1]["time"], second[1]["time"])  # both at once


def test_runs_wait_for_devices_of_a_cluster_and_too_many_are_refused(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster has two CPUs."""
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ResourceError, match="3 ranks, each with a CPU of its own, and no node has so many") as caught:
        Cluster(ray_address, 4, [errand(tmp_path, 3)], tmp_path)
    assert caught.value.possible.endswith(": 2 CPUs")
    with pytest.raises(ResourceError, match="the cluster has so many"):
        Cluster(ray_address, 4, [errand(tmp_path, 9, reserves=True)], tmp_path)
    cluster = Cluster(ray_address, 4, [errand(tmp_path, 2)], tmp_path)
    try:
        whole = cluster.start(errand(tmp_path, 2, reserves=True))
        assert whole is not None and cluster.start(errand(tmp_path, 1, reserves=True, run="other")) is None
        ended(whole)
        (tmp_path / "hold").touch()
        first, second = (cluster.start(errand(tmp_path, 2, run=name)) for name in ("first", "second"))
        assert first is not None and second is not None
        when((tmp_path / "runs" / "first" / "metrics.jsonl").exists, lambda: None).join()
        assert second.host is None and second.ended is None
        first.call("stop", "by a test")
        assert ended(first) == (10, "stopped by a test")
        (tmp_path / "hold").unlink()
        first.close()
        assert ended(second) == (0, "")
    finally:
        cluster.close()


def ended(run: PlacedRun) -> Ended:
    when(lambda: run.ended is not None, lambda: None).join()
    assert run.ended is not None
    return run.ended


@pytest.mark.slow
def test_the_loss_of_the_process_beside_a_run_is_told(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    (tmp_path / "hold").touch()
    cluster = Cluster(ray_address, 2, [errand(tmp_path)], tmp_path)
    try:
        run = cluster.start(errand(tmp_path))
        assert run is not None
        when((tmp_path / "runs" / "run" / "metrics.jsonl").exists, lambda: None).join()
        run.close()  # Ray ends the process, and the run with it
        code, message = ended(run)
        assert code == 5 and message.startswith("the process beside the run was lost")
        saved = Run(tmp_path / "runs" / "run")
        when(lambda: not saved.is_live, lambda: None).join()
        assert saved.state == "stopped"
    finally:
        cluster.close()


def test_a_node_that_does_not_see_the_folder_is_named(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.cluster.places.holds", _sees_nothing)
    places = Places(ray_address, 1)
    try:
        with pytest.raises(ResourceError, match=r"node \S+ does not see"):
            places.check_folder(tmp_path)
    finally:
        places.close()
    assert PointProcess.__module__ == "mmrl.commands.sweep.machines"  # by name for other nodes


def _sees_nothing(path: str, content: bytes) -> bool:
    return False
