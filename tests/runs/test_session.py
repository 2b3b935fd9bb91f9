"""Steps that hang, devices that are full and ranks that are lost, in whole runs with the fake engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mmrl.engine.machine.full_device import out_of_memory
from mmrl.errors import DeviceBusyError, DeviceMemoryError, MMRLError, ResourceError
from tests.faults.fake_engine import FakeEngine
from tests.faults.runs import Runs, at, events, outcome, records

HANGING = """\
import sys, time
from pathlib import Path
from mmrl.runs.directory import RunDirectory
from tests.faults.fake_engine import FakeEngine
from tests.faults.runs import fake

folder, model, config, holding = *map(Path, sys.argv[1:4]), sys.argv[4]
submit, group, steps = FakeEngine.submit, FakeEngine._group, []

def submit_and_count(self, requests):
    steps.append([])
    return submit(self, requests)

def group_or_hang(self, request):
    if len(steps) == 2 and len(steps[1]) == 2:
        if holding == "lock":  # as if a write to a dead file system held it
            RunDirectory._append = lambda *args: time.sleep(90)
        time.sleep(90)
    steps[-1].append(request)
    return group(self, request)

FakeEngine.submit, FakeEngine._group = submit_and_count, group_or_hang
with fake(folder, model) as runs:
    runs.train(config)
"""


@pytest.mark.full
@pytest.mark.parametrize("holding", ["nothing", "lock"])
def test_a_step_that_hangs_in_this_process_ends_it(holding, fake_runs: Runs):
    config, run = fake_runs.config(trainer={"step_timeout_s": 4.0}), fake_runs.folder / "run"
    root = Path(__file__).parents[2]
    words = [str(fake_runs.folder), str(fake_runs.model), str(config), holding]
    done = subprocess.run(
        [sys.executable, "-c", HANGING, *words],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=70,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert "step 2 has taken more than 4 s" in done.stderr and "the last prompts sampled: r" in done.stderr
    if holding == "nothing":
        (error,) = events(run, "error")
        assert error["exit_code"] == 5 and error["message"].startswith("step 2 has taken")
        assert records(run / "attempts.jsonl")[-1]["exit_code"] == 5


class Abandoned(FakeEngine):
    """Its calls raise what it is abandoned with, as those of ranks do."""

    error: MMRLError | None = None
    called = threading.Event()

    def abandon(self, error: MMRLError) -> bool:
        Abandoned.error = error
        self.called.set()
        return True


def hang() -> None:
    Abandoned.called.clear()
    assert Abandoned.called.wait(30)
    assert Abandoned.error is not None
    raise Abandoned.error


@pytest.fixture
def abandoned(fake_runs: Runs, monkeypatch) -> Runs:
    monkeypatch.setattr("tests.faults.fake_engine.FakeEngine", Abandoned)
    return fake_runs


def test_ranks_that_hang_are_started_again(abandoned: Runs):
    assert abandoned.train(abandoned.config("plain")) == 0
    config, run = abandoned.config(trainer={"step_timeout_s": 2.0}), abandoned.folder / "run"
    with at("fake.generate", 3, hang):
        assert abandoned.train(config) == 0
    (restart,) = events(run, "restart")
    assert restart["message"].startswith("step 3 has taken more than 2 s") and restart["restarts_left"] == 2
    assert outcome(run) == outcome(abandoned.folder / "plain")


@pytest.mark.full
def test_ranks_that_hang_too_often_end_the_run(abandoned: Runs, capsys):
    config, run = abandoned.config(trainer={"step_timeout_s": 1.5, "max_restarts": 1}), abandoned.folder / "run"
    with at("fake.generate", 2, hang), at("fake.generate", 2, hang):
        assert abandoned.train(config) == 5
    assert len(events(run, "restart")) == 1
    assert "step 2 has taken more than 1.5 s" in capsys.readouterr().err


def fill() -> None:
    raise DeviceMemoryError("out of memory")


@pytest.mark.parametrize("phase", ["update", "logprobs"])
def test_a_full_device_of_one_of_several_ranks_halves_the_microbatches_once(phase, fake_runs: Runs):
    """Which is no restart for a lost rank."""
    sections = {
        "cluster": {"name": "ray", "ranks": 2},
        "learner": {"lr": 1e-2, "tokens_per_microbatch": 512},
        "trainer": {"max_restarts": 0},
    }
    assert fake_runs.train(fake_runs.config("plain", **sections)) == 0
    run = fake_runs.folder / "run"
    with at(f"fake.{phase}", 2, fill):
        assert fake_runs.train(fake_runs.config(**sections)) == 0
    (adapted,) = events(run, "adapted")
    assert "learner.tokens_per_microbatch is 256" in adapted["message"]
    assert "tokens_per_microbatch: 256" in (run / "config.yaml").read_text()
    assert outcome(run) == outcome(fake_runs.folder / "plain")
    again = fake_runs.folder / "again"
    with at(f"fake.{phase}", 2, fill), at("fake.update", 3, fill):
        assert fake_runs.train(fake_runs.config("again", **sections)) == 5
    assert len(events(again, "adapted")) == 1


def test_a_device_that_others_fill_uses_up_restarts(fake_runs: Runs, monkeypatch, capsys):
    """Not in this process itself, where the engine that did not start has left memory of its own."""
    from mmrl.cluster import launch

    start, left = launch.start_engine, [2]

    def busy(*arguments: object, **options: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise DeviceBusyError("another process holds memory of the device that vLLM wants")
        return start(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "start_engine", busy)
    ranks = {"name": "ray", "ranks": 2}
    assert fake_runs.train(fake_runs.config(cluster=ranks)) == 0
    assert [event["restarts_left"] for event in events(fake_runs.folder / "run", "restart")] == [2, 1]
    left[0] = 2
    assert fake_runs.train(fake_runs.config("few", cluster=ranks, trainer={"max_restarts": 1})) == 5
    left[0] = 1
    assert fake_runs.train(fake_runs.config("alone")) == 5
    assert not events(fake_runs.folder / "alone", "restart")
    assert capsys.readouterr().err.count("another process holds memory of the device") >= 2


@pytest.mark.parametrize("point", ["fake.generate", "save.shard"])
def test_a_full_device_ends_the_run_at_once_where_no_smaller_microbatch_helps(point, fake_runs: Runs, capsys):
    """The sampler's, or that of a rank which gathers weights for a checkpoint while others wait."""

    def fill_for_good() -> None:
        raise out_of_memory("sampling" if point == "fake.generate" else "the checkpoint", "CUDA out of memory")

    run = fake_runs.folder / "run"
    with at(point, 2, fill_for_good):
        assert fake_runs.train(fake_runs.config(cluster={"name": "ray", "ranks": 2}, trainer={"save_every": 1})) == 5
    assert not events(run, "adapted") and not events(run, "restart")
    assert "CUDA out of memory" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("gloo: Connection closed by peer"), 10),
        (MMRLError("a reward's worker is gone"), 10),
        (ResourceError("the disk is full"), 5),
    ],
)
def test_what_fails_after_a_signal_to_the_whole_job_is_no_fault(error, code, fake_runs: Runs):
    def end() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise error

    config, run = fake_runs.config(), fake_runs.folder / "run"
    with at("fake.update", 2, end):
        assert fake_runs.train(config) == code
    assert records(run / "attempts.jsonl")[-1]["exit_code"] == code
    assert (str(error) in str(events(run, "warning"))) == (code == 10)
    assert fake_runs.train(config) == 0


def test_a_second_signal_ends_the_process_though_nobody_can_be_told():
    script = (
        "import os, signal, sys\n"
        "from mmrl.system.signals import Interruption\n"
        "with Interruption() as i, i.deferred():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    sys.stderr = open(os.devnull)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == 10


def test_a_signal_while_a_run_that_is_done_is_taken_down_breaks_nothing(fake_runs: Runs, monkeypatch, capsys):
    closed: list[str] = []

    def close(engine: FakeEngine) -> None:
        signal.raise_signal(signal.SIGTERM)
        closed.append("whole")

    monkeypatch.setattr(FakeEngine, "close", close)
    assert fake_runs.train(fake_runs.config(trainer={"steps": 2})) == 0
    assert closed == ["whole"] and records(fake_runs.folder / "run" / "attempts.jsonl")[-1]["exit_code"] == 0
    assert "SIGTERM" in capsys.readouterr().err
