"""Runs that are killed or signalled at a moment of choice.

A nursery is a process that has imported everything heavy and forks itself for each run, so that a run starts in a
fraction of a second. It is the reaper of all that its runs leave behind, so that no orphan escapes it.

    python -m tests.faults.harness nursery MODEL [real]    takes requests, one line of JSON each, and answers them
    python -m tests.faults.harness run '<request>'         does what one asks for, as a fresh interpreter
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tests.cluster.process_ranks import ranks_forked_from
from tests.warm_workers import MODULES, Template, forked_from, freeze

ROOT = Path(__file__).parents[2]
MODULE = (sys.executable, "-m", "tests.faults.harness")
TRACED = tuple(f"{os.sep}mmrl{os.sep}{name}.py".replace("/", os.sep) for name in (
    "commands/train", "rollout/collector", "runs/checkpoints", "runs/directory", "runs/disk", "runs/files",
    "runs/session", "runs/start", "system/signals", "step/check", "step/loop", "step/updates",
    "step/learn", "step/queue",
))  # fmt: skip
"""The files whose lines are places for a blow."""
PACKAGES = (
    "psutil", "mmrl.commands.train", "mmrl.runs.session", "mmrl.step.loop", "mmrl.rollout.collector",
    "mmrl.cluster.launch", "mmrl.cluster.ray_ranks", "mmrl.rollout.records.writing", "torch.utils.tensorboard",
    "pandas", *MODULES,
)  # fmt: skip
PLUGINS = (
    *(("algorithm", name) for name in ("grpo", "dapo", "remax", "dpo", "mpo")),
    ("dataset", "table"),
    ("tracker", "tensorboard"),
)
REAL = (
    "vllm", "vllm.v1.engine.llm_engine", "deepspeed", "mmrl.engine.rank", "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner", "vllm.model_executor.model_loader", "vllm.model_executor.models.qwen2_5_vl",
    "transformers.tokenization_mistral_common", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2.modeling_qwen2", "deepspeed.runtime.engine", "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer", "torch.utils.serialization", "mmrl.step.audit",
)  # fmt: skip
"""What real runs import sooner or later; each of them, as a fork, would need two seconds for what is missing here."""
ORPHANS_MAY_LIVE_S = 5.0
COMMANDS_MAY_TAKE_S = 300.0
Request = dict[str, Any]


@dataclass(frozen=True)
class Blow:
    """Something that happens to a run.

    Attributes:
        number: Of the signal.
        at: ``("s", seconds)`` after its start; ``("handler", seconds)`` after it has taken the signals over;
            ``("point", name, n)`` at the n-th reach of a point of ``system.failpoints``, ``("line", n)`` before the
            n-th line that it executes of TRACED.
        again: Seconds until the same signal comes once more.
        group: Whether the signal goes to its process group, as Ctrl-C in a terminal does.
    """

    number: signal.Signals = signal.SIGKILL
    at: tuple[Any, ...] = ("s", 0.0)
    again: float | None = None
    group: bool = False

    def __str__(self) -> str:
        place = " ".join(f"{part:.3f}" if isinstance(part, float) else str(part) for part in self.at)
        return f"{self.number.name} at {place}{'' if self.again is None else f', again after {self.again:.3f}'}"


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        status: The exit code, or the negative number of the signal.
        seconds: It took.
        after: Seconds from its (last) signal to its end; None if there was none.
        handled: Whether it had a handler for signals when the first one came.
        orphans: Command lines of what it left running.
        memory: Names that it left in shared memory.
        log: What it printed.
    """

    status: int
    seconds: float
    after: float | None
    handled: bool
    orphans: Sequence[str]
    memory: Sequence[str]
    log: str


class Nursery:
    """The nursery, seen from the tests.

    Args:
        folder: For logs.
        model: The runs' model, which is opened there to have everything imported that this needs.
        real: Whether vLLM and DeepSpeed are imported there too, and its runs are real.
        template: A process that has imported all of that; the nursery is a fork of it.
    """

    def __init__(self, folder: Path, model: Path, *, real: bool = False, template: Template | None = None) -> None:
        self._folder, self._real = folder, real
        self._runs = 0
        path = [str(ROOT), *(each or os.getcwd() for each in sys.path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self._requests, self._answers = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        if template is None:
            command = [*MODULE, "nursery", str(model), *(["real"] if real else [])]
            process = subprocess.Popen(command, stdin=theirs_in, stdout=theirs_out, env=environment)
            self._wait: Callable[[], object] = process.wait
        else:
            assert real
            environment["NURSERY_MODEL"] = str(model)
            request = {"module": __name__, "path": path, "environment": environment, "folder": os.getcwd()}
            self._wait = partial(os.waitpid, template.start(request, [theirs_in, theirs_out, 2]), 0)
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.close()
        self._answers.close()
        self._wait()

    def train(
        self, argv: Sequence[str], blow: Blow | None = None, *, cold: bool = False, record: Path | None = None
    ) -> End:
        """``mmrl train`` with these arguments, to its end.

        Args:
            cold: Whether it is a fresh interpreter.
            record: A file to write the names of the points to that it reaches, and ``lines N`` at its end;
                real runs are not slowed down by counting lines.
        """
        log = self._new_log()
        before = _shared_memory()
        answer = self._ask(
            argv=["train", *argv],
            log=str(log),
            errors=str(log),
            cold=cold,
            folder="",
            record=str(record or ""),
            blow=None if blow is None else [int(blow.number), blow.at, blow.again, blow.group],
        )
        # Of another worker's tests, which kill processes too, nobody can tell whose it was.
        alone = "PYTEST_XDIST_WORKER" not in os.environ
        left = [name for name in _shared_memory() - before if alone and not is_held(name)]
        if left:  # other programs make and remove theirs meanwhile
            time.sleep(0.5)
            left = [name for name in left if name in _shared_memory() and not is_held(name)]
        return End(**answer, memory=left, log=log.read_text(errors="replace"))

    def command(
        self, *words: object, folder: Path | None = None, site: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """``mmrl`` with these words, to its end, as ``subprocess.run`` would tell of it.

        Ranks of a cluster are forks too, in the place of Ray's actors.

        Args:
            folder: Where it runs; None for where the nursery does.
            site: A folder of further installed packages.
            environment: Variables that it has beside those of the nursery.
        """
        log, argv = self._new_log(), [*map(str, words)]
        errors, places = log.with_suffix(".err"), {"folder": str(folder or ""), "site": str(site or "")}
        request = {"cold": False, "record": "", "blow": None, "environment": environment, **places}
        answer = self._ask(argv=argv, log=str(log), errors=str(errors), **request)
        assert not answer["orphans"], answer["orphans"]
        return subprocess.CompletedProcess(argv, answer["status"], log.read_text(), errors.read_text())

    def _new_log(self) -> Path:
        self._runs += 1
        log = self._folder / f"run-{self._runs:04d}.log"
        log.touch()
        return log

    def _ask(self, **request: Any) -> Request:
        print(json.dumps(request | {"real": self._real}), file=self._requests, flush=True)
        answer: Request = json.loads(self._answers.readline())
        return answer


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid()}


def is_held(name: str) -> bool:
    """True if a living process has mapped it or has it open: then it is another run's."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"/dev/shm/{name}" in (process / "maps").read_text():
                return True
            if any(os.readlink(file) == f"/dev/shm/{name}" for file in (process / "fd").iterdir()):
                return True
    return False


# In the nursery


def serve() -> None:
    """Be a nursery of real runs, in a fork of a template."""
    nurse(os.environ.pop("NURSERY_MODEL"), real=True)
    os._exit(0)


def nurse(model: str, *, real: bool) -> None:
    """Answer requests until there are no more."""
    warm(REAL if real else (), model)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a run leaves behind becomes this process's child
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in requests:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            os.setsid()
            for descriptor, name in ((1, "log"), (2, "errors")):
                os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
            _begin(request, line)
        print(json.dumps(_attend(pid, request["blow"])), file=answers, flush=True)


def warm(packages: Sequence[str], model: str = "") -> None:
    """Import everything; start no thread."""
    from mmrl.cluster.process import prepare_process

    prepare_process()
    import torch

    torch.set_num_threads(1)
    # A fork replaces torch's thread pool at its first use. Two threads that do so at once, as transformers' when they
    # read weights, find none ("Invalid thread pool"). So the fork's first thread does it.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    for name in (*PACKAGES, *packages):
        importlib.import_module(name)
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.plugin_host import registry

    if model:
        ModelFolder.open(model)
    monitors = [("monitor", info.name) for info in registry.list_plugins() if info.kind == "monitor"]
    for kind, name in (*PLUGINS, *monitors):
        registry.options_class(kind, name)
    freeze()


def _begin(request: Request, line: str) -> None:
    """Become the run; one that hangs says where before it is ended."""
    faulthandler.dump_traceback_later(COMMANDS_MAY_TAKE_S - 5)
    try:
        if request["cold"]:
            is_plain = request["real"] and (request["blow"] or [0, ["s"]])[1][0] in ("s", "handler")
            words = [sys.executable, "-m", "mmrl", *request["argv"]] if is_plain else [*MODULE, "run", line]
            os.execv(sys.executable, words)
        code = run(request)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)


def _attend(pid: int, blow: Sequence[Any] | None) -> Request:
    """Deal the blows that come from outside, and reap."""
    began, struck, times, handled = time.monotonic(), None, 0, False
    number, at, again, group = blow or (0, ("never",), None, False)
    due = began + at[1] if at[0] == "s" else None
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if ended == pid:
            break
        if at[0] == "handler" and due is None and struck is None and _has_handler(pid):
            due = now + at[1]
        if now - began > COMMANDS_MAY_TAKE_S:
            os.killpg(pid, signal.SIGKILL)
        if due is not None and now >= due:
            handled |= not times and _has_handler(pid)
            os.killpg(pid, number) if group else os.kill(pid, number)
            struck, times = now, times + 1
            due = now + again if again is not None and times == 1 else None
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(status)
    return {
        "status": code,
        "seconds": now - began,
        "after": None if struck is None else now - struck,
        "handled": handled or at[0] in ("line", "point"),
        "orphans": _orphans(),
    }


def _has_handler(pid: int) -> bool:
    """True if the process has a handler for SIGTERM."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _orphans() -> list[str]:
    """Command lines of the children that still run after a while; they are killed then."""
    import psutil

    deadline = time.monotonic() + ORPHANS_MAY_LIVE_S
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = psutil.Process().children(recursive=True)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    names = []
    for child in left:
        with suppress(psutil.Error):
            names.append(" ".join(child.cmdline())[:200])
            child.kill()
    return names


# In the run


def run(request: Request) -> int:
    """Train, with blows from inside; returns the exit code."""
    from mmrl.commands import cli
    from mmrl.system import failpoints

    if not request["real"]:
        from mmrl.cluster import launch
        from tests.faults import fake_engine

        launch.start_engine = fake_engine.start_engine  # type: ignore[assignment]
    if request.get("folder"):
        os.chdir(request["folder"])
    os.environ.update(request.get("environment", {}))
    if request.get("site"):
        sys.path.insert(0, request["site"])
    with ExitStack() as forks:
        if not request["cold"]:
            template = Template(fork=True)
            forks.enter_context(forked_from(template))
            if request["real"]:
                forks.enter_context(ranks_forked_from(template))
        strike = _Striker(request)
        failpoints.inject = strike.at_point
        if strike.counts_lines:
            sys.settrace(strike.trace)
        try:
            return cli.main(request["argv"])
        finally:
            sys.settrace(None)
            if request["record"]:
                Path(request["record"]).write_text("\n".join([*strike.points, f"lines {strike.lines}"]))


class _Striker:
    """Deals a blow at a point or a line, and takes notes."""

    def __init__(self, request: Request) -> None:
        self._number, self._at = (request["blow"] or [0, ["never"]])[:2]
        self.counts_lines = self._at[0] == "line" or bool(request["record"] and not request["real"])
        self.points: list[str] = []
        self.lines = 0

    def at_point(self, name: str) -> None:
        self.points.append(name)
        if self._at[0] == "point" and self._at[1] == name and self.points.count(name) == self._at[2]:
            os.kill(os.getpid(), self._number)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._trace_line if frame.f_code.co_filename.endswith(TRACED) else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self._at[0] == "line" and self.lines == self._at[1]:
                os.kill(os.getpid(), self._number)
        return self._trace_line


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        nurse(sys.argv[2], real="real" in sys.argv[3:])
    else:
        sys.exit(run(json.loads(sys.argv[2])))
