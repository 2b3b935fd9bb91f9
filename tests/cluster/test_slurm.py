"""``examples/cluster.sbatch`` on a real Slurm of two nodes, which are two daemons on this machine (``slurm.py``)."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.slurm import GPU_NODES, NODES, PROGRAMS
from tests.faults.comparison import metrics
from tests.faults.runs import outcome, records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SCRIPT = Path(__file__).parents[2] / "examples" / "cluster.sbatch"
WAIT_S = 900
"""Seconds for anything that is waited for; the machine may be busy."""
RAY = """\
#!{python}
import os, socket, sys, time
node, devices = os.environ["SLURMD_NODENAME"], os.environ.get("CUDA_VISIBLE_DEVICES", "none")
print("ray", *sys.argv[1:], "on", node, "with", devices, len(os.sched_getaffinity(0)), flush=True)
if "--head" in sys.argv:
    word = {{each.partition("=")[0]: each.partition("=")[2] for each in sys.argv}}
    server = socket.create_server((word["--node-ip-address"], int(word["--port"])))
time.sleep(3600)
"""
"""Stands in for Ray: says how it was called, and its head listens."""


class Job:
    """A job of ``cluster.sbatch``.

    Attributes:
        run: Its run folder.
    """

    def __init__(self, cluster: Cluster, number: str, log: Path, run: Path) -> None:
        self._cluster, self.number, self.log, self.run = cluster, number, log, run

    def state(self, name: str = "JobState") -> str:
        """A field of what Slurm tells of the job."""
        told = self._cluster.ask("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.split("=", 1) for word in told.split() if "=" in word)[name]

    def until(self, what: str, holds: Callable[[], Any]) -> None:
        """Wait until it is so.

        Raises:
            TimeoutError: It has not come to be.
        """
        deadline = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}\n{self.state()}\n{self.said()[-8000:]}")
            time.sleep(0.5)

    def until_step(self, step: int) -> None:
        """Wait until the run has taken this step."""
        self.until(f"step {step}", lambda: step in [each["step"] for each in records(self.run / "metrics.jsonl")])

    def until_attempt(self, number: int) -> None:
        """Wait until Slurm has started it that many times."""
        self.until(f"attempt {number}", lambda: self.state("Restarts") == str(number - 1))
        self.until("running", lambda: self.state() != "PENDING")

    def end(self) -> tuple[str, str]:
        """Wait for its end; returns its state, and its exit code with its signal."""
        self.until("end", lambda: self.state() not in ("PENDING", "RUNNING", "COMPLETING"))
        self.until("the nodes are free", lambda: self._cluster.ask("squeue", "-h", "-j", self.number) == "")
        return self.state(), self.state("ExitCode")

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, name: str) -> None:
        """Send a signal to the job's script alone."""
        self._cluster.ask("scancel", "--batch", f"--signal={name}", self.number)


class Cluster:
    """The Slurm, and what jobs find in place of a virtual environment.

    Args:
        process: ``slurm.py``, which has said that it is ready.
        folder: For environments and logs.
    """

    def __init__(self, process: subprocess.Popen[str], conf: Path, folder: Path) -> None:
        self._process, self._folder = process, folder
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        self._environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": path}
        del self._environment["RAY_AUTH_MODE"]  # the script has a token

    def tell(self, *words: str) -> None:
        """A command of ``slurm.py``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, *words: str) -> str:
        """Run a command of Slurm's; returns what it prints."""
        answer = subprocess.run(words, env=self._environment, capture_output=True, text=True, check=False)
        assert not answer.returncode, answer.stderr
        return answer.stdout.strip()

    def submit(
        self, work: Path, name: str, *words: str, options: Sequence[str] = (), programs: Mapping[str, str] | None = None
    ) -> Job:
        """Submit the script.

        Args:
            work: Where it runs.
            name: Of its run folder there.
            words: The config and settings.
            options: Of ``sbatch``.
            programs: Scripts that its environment has in place of the real programs.
        """
        folder = self._folder / name
        (folder / "bin").mkdir(parents=True)
        for program, text in (programs or {}).items():
            (folder / "bin" / program).write_text(text)
            (folder / "bin" / program).chmod(0o755)
        places = [str(folder / "bin"), str(Path(sys.executable).parent)]
        activate = f'export PATH="{os.pathsep.join(places)}:$PATH" PYTHONPATH="{os.pathsep.join(map(str, sys.path))}"\n'
        (folder / "bin" / "activate").write_text(activate)
        log = folder / "job.log"
        sbatch = ["sbatch", "--parsable", f"--chdir={work}", f"--output={log}"]
        self._environment["MMRL_VENV"] = str(folder)
        number = self.ask(
            *sbatch, "--gpus-per-node=0", "--cpus-per-task=1", *options, str(SCRIPT), *words, f"trainer.run_dir={name}"
        )
        return Job(self, number, log, work / name)


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """The Slurm with all its nodes; no job of a test is left to the next one."""
    yield slurm
    slurm.ask("scancel", "--user", getpass.getuser())
    for node in NODES:
        slurm.tell("start", node)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    if missing := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        pytest.skip(f"no {missing[0]}: apt-get install slurm-wlm munge")
    folder = Path("/tmp", f"mmrl-slurm-{secrets.token_hex(4)}")
    command = [sys.executable, str(Path(__file__).with_name("slurm.py")), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield Cluster(process, folder / "slurm.conf", tmp_path_factory.mktemp("jobs"))
        finally:
            process.stdin.close()
            process.wait()
    assert not folder.exists()
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if str(folder).encode() in readable(path)]
    assert not left, [path.with_name("cmdline").read_bytes() for path in left]


def readable(path: Path) -> bytes:
    """The bytes of a file; none if it cannot be read, or is this process's own."""
    try:
        return b"" if path.parent.name == str(os.getpid()) else path.read_bytes()
    except OSError:
        return b""


def stand_in(*lines: str) -> dict[str, str]:
    """Programs in place of Ray and of mmrl; the latter is a shell script of these lines."""
    return {"ray": RAY.format(python=sys.executable), "mmrl": "\n".join(["#!/bin/bash", "echo mmrl $*", *lines, ""])}


# What the script does, with stand-ins for Ray and mmrl


def test_the_nodes_are_started_as_slurm_gives_them_and_the_code_of_a_config_error_ends_the_job(
    cluster: Cluster, work: Path
) -> None:
    job = cluster.submit(work, "wrong", "config.yaml", "learner.lr=-1", programs={"ray": stand_in()["ray"]})
    assert job.end() == ("FAILED", "2:0")
    assert job.state("Restarts") == "0"
    said = job.said()
    assert "learner.lr" in said
    assert "mmrl has ended with exit code 2" in said
    for node in NODES:
        (line,) = [line for line in said.splitlines() if f" on {node} " in line]
        assert ("--head" in line) == (node == "n1")
        assert "--num-cpus=1 --num-gpus=0" in line


def test_a_loss_of_ranks_on_nodes_that_answer_ends_the_job_with_its_code(cluster: Cluster, tmp_path: Path) -> None:
    """The nodes have two GPUs each, which are pretended."""
    options = ("--partition=gpus", "--gpus-per-node=2", "--cpus-per-task=2")
    job = cluster.submit(tmp_path, "healthy", options=options, programs=stand_in("exit 5"))
    assert job.end() == ("FAILED", "5:0")
    assert job.state("Restarts") == "0"
    assert "cluster.ranks=4" in job.said()
    for node in GPU_NODES:
        (line,) = [line for line in job.said().splitlines() if f" on {node} " in line]
        assert "--num-cpus=2 --num-gpus=2" in line
        assert line.endswith("with 0,1 2")


def test_a_node_that_does_not_answer_queues_the_job_again_before_slurm_calls_it_down(
    cluster: Cluster, tmp_path: Path
) -> None:
    again = "[[ ${SLURM_RESTART_COUNT:-0} == 1 ]] && exit 0"
    job = cluster.submit(
        tmp_path, "silent", programs=stand_in(again, "while [[ ! -e go ]]; do sleep 0.2; done; exit 5")
    )
    job.until("mmrl", lambda: "mmrl train" in job.said())
    cluster.tell("stop", "n2")
    (tmp_path / "go").touch()
    job.until("queued again", lambda: job.state("Restarts") == "1")
    cluster.tell("start", "n2")
    assert job.end() == ("COMPLETED", "0:0")
    assert "n2 does not answer" in job.said()


def test_before_its_time_is_over_the_job_is_queued_again(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm's clock for this is a minute wide: the signal comes in the first minute."""
    again = "[[ ${SLURM_RESTART_COUNT:-0} == 1 ]] && exit 0"
    programs = stand_in(again, "trap 'exit 10' USR1", "while true; do sleep 0.2; done")
    job = cluster.submit(tmp_path, "late", options=("--time=2", "--signal=B:USR1@60"), programs=programs)
    assert job.end() == ("COMPLETED", "0:0")
    assert job.state("Restarts") == "1"
    assert "mmrl has ended with exit code 10" in job.said()


def test_a_signal_before_mmrl_has_started_counts(cluster: Cluster, tmp_path: Path) -> None:
    again = "[[ ${SLURM_RESTART_COUNT:-0} == 1 ]] && exit 0"
    programs = stand_in(again, "while true; do sleep 0.2; done")
    slow = programs["ray"].replace('if "--head"', 'time.sleep(10)\nif "--head"')
    job = cluster.submit(tmp_path, "early", programs=programs | {"ray": slow})
    job.until("Ray", lambda: "ray start --head" in job.said())
    job.signal("USR1")
    assert job.end() == ("COMPLETED", "0:0")
    assert job.state("Restarts") == "1"


@pytest.mark.parametrize("signal", ["TERM", None])
def test_a_job_that_its_user_ends_is_not_queued_again(signal: str | None, cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(
        tmp_path, f"ended-{signal}", programs=stand_in("trap 'exit 10' TERM", "while true; do sleep 0.2; done")
    )
    job.until("mmrl", lambda: "mmrl train" in job.said())
    if signal:
        job.signal(signal)
        assert job.end() == ("FAILED", "10:0")
    else:
        cluster.ask("scancel", job.number)
        assert job.end()[0] == "CANCELLED"
    time.sleep(15)  # a job that is queued again starts after cred_expire, 10 s
    assert (job.state("Restarts"), cluster.ask("squeue", "-h")) == ("0", "")


# Runs


def test_a_run_that_loses_a_node_and_is_queued_again_is_the_unbroken_one(cluster: Cluster, work: Path) -> None:
    """vLLM and DeepSpeed on two nodes of one rank; then a signal before the time is over."""
    settings = ["config.yaml", "trainer.steps=12", "trainer.save_every=1"]
    unbroken = cluster.submit(work, "unbroken", *settings)
    assert unbroken.end() == ("COMPLETED", "0:0"), unbroken.said()
    job = cluster.submit(work, "broken", *settings)
    job.until_step(2)
    cluster.tell("kill", "n2")
    job.until("queued again", lambda: job.state("Restarts") == "1")
    cluster.tell("start", "n2")
    reached = max(each["step"] for each in records(job.run / "metrics.jsonl"))
    job.until_step(reached + 1)
    job.signal("USR1")
    assert job.end() == ("COMPLETED", "0:0"), job.said()
    assert job.state("Restarts") == "2"
    codes = [each["exit_code"] for each in records(job.run / "attempts.jsonl") if "exit_code" in each]
    assert codes[-2:] == [10, 0]
    assert len(metrics(job.run)) == 13
    found, expected = outcome(job.run), outcome(unbroken.run)
    assert all(found[name] == expected[name] for name in expected), [n for n in expected if found[n] != expected[n]]


def test_the_loss_of_the_first_node_queues_the_job_again_and_a_signal_ends_it_with_a_checkpoint(
    cluster: Cluster, work: Path
) -> None:
    settings = ["config.yaml", "sampler.name=hf", "trainer.steps=1000", "trainer.save_every=3"]
    job = cluster.submit(work, "headless", *settings)
    job.until_step(4)
    cluster.tell("kill", "n1")
    cluster.tell("start", "n1")  # it has come back without the job
    job.until("queued again", lambda: job.state("Restarts") == "1")
    job.until("resumed", lambda: any("exit_code" not in each and each["resumed_from"] for each in attempts(job.run)))
    resumed = attempts(job.run)[-1]["resumed_from"]
    job.until_step(resumed + 2)
    job.signal("TERM")
    assert job.end() == ("FAILED", "10:0"), job.said()
    last = records(job.run / "metrics.jsonl")[-1]["step"]
    assert max((job.run / "checkpoints").glob("step-*")).name == f"step-{last:06d}"


def attempts(run: Path) -> list[dict[str, Any]]:
    return records(run / "attempts.jsonl")
