"""Workers of rewards and environments as forks of a process that has imported what they need, in the tests.

A fresh interpreter takes half a second of a processor for numpy, pydantic and mmrl before it answers, and the tests
start hundreds of them. A template imports these once. Each worker is a fork of it, but a child of the process that asks
(``CLONE_PARENT``): it has a session of its own, is waited for, is killed and ends with its parent like a fresh one.

What is about the processes themselves keeps fresh ones: ``pytestmark = pytest.mark.fresh_workers`` in a module.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mmrl.system import worker_process

ROOT = str(Path(__file__).parents[1])
MODULES = ("mmrl.rollout.rewards.worker", "mmrl.rollout.episodes.worker")
SLOW = ("math_verify",)
"""What the reward of most tests imports, in two thirds of a second."""
CLONE = {"x86_64": 56, "aarch64": 220}
"""The number of the system call, by machine."""
CLONE_PARENT = 0x8000
BEGINNING = (
    "import sys; n = int(sys.argv[2]) + 3; sys.path[:] = sys.argv[n:];"
    "from tests import warm_workers as w; w.serve(int(sys.argv[1]), sys.argv[3:n])"
)


class Template:
    """The template, seen from the process whose workers are its forks.

    Make it in the main thread: workers end with the thread that did.

    Args:
        packages: Imported there beside MODULES.
        fork: Whether it is a fork of this process, which has imported MODULES and has no other thread.
    """

    def __init__(self, packages: Sequence[str] = SLOW, *, fork: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        if not fork:
            path = [ROOT, *(entry or os.getcwd() for entry in sys.path)]
            counted = [str(len(packages)), *packages]
            command = [sys.executable, "-c", BEGINNING, str(theirs.fileno()), *counted, *path]
            environment = os.environ | {"PYTHONHASHSEED": "0"}
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()]
            )
        elif not os.fork():
            self._socket.close()
            try:
                serve(theirs.detach())
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        theirs.close()

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The id of a new worker, which has begun its session."""
        here, there = socket.socketpair()
        with here, there:
            socket.send_fds(self._socket, [b"."], [*streams, there.fileno()])
            there.close()
            here.sendall(pickle.dumps(dict(request)))
            here.shutdown(socket.SHUT_WR)
            return int(here.recv(16))


class Worker:
    """A worker as ``subprocess.Popen`` would show it, as far as ``WorkerProcess`` and ``ChildCommand`` ask."""

    def __init__(self, template: Template, command: Sequence[str], environment: Mapping[str, str]) -> None:
        module, *path = command[3:]
        request = {"module": module, "path": path, "environment": dict(environment), "folder": os.getcwd()}
        pairs = [os.pipe() for _ in range(3)]
        theirs, ours = [pairs[0][0], pairs[1][1], pairs[2][1]], [pairs[0][1], pairs[1][0], pairs[2][0]]
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(descriptor, mode, buffering=0) for descriptor, mode in zip(ours, ("wb", "rb", "rb"), strict=True)
        )
        self.returncode: int | None = None
        self.pid = template.start(request, theirs)
        for descriptor in theirs:
            os.close(descriptor)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@contextmanager
def forked_from(
    template: Template, modules: Sequence[str] = MODULES, starter: ModuleType = worker_process
) -> Iterator[None]:
    """Make the processes that a module of ours starts forks of a template, as far as they are of these modules."""

    def popen(command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        if command[3] in modules:
            return Worker(template, command, os.environ if env is None else env)
        return subprocess.Popen(command, env=env, **options)

    before = starter.subprocess
    starter.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": popen})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        starter.subprocess = before  # type: ignore[attr-defined]


# In the template


def serve(descriptor: int, packages: Sequence[str] = ()) -> None:
    """Fork a worker for each request, until there are no more; returns in a worker when it has nothing left to do."""
    requests, is_warm = socket.socket(fileno=descriptor), False
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1, 4)
        if not message:
            os._exit(0)  # packages would take seconds to leave
        if not is_warm:  # now: not all tests have workers
            for module in (*MODULES, *packages):
                importlib.import_module(module)
            freeze()
            is_warm = True
        if not _sibling():
            requests.close()
            _become(*descriptors)
            return
        for each in descriptors:
            os.close(each)


def freeze() -> None:
    """Keep what is imported out of later collections: with torch each takes half a second, and DeepSpeed asks for many.

    Forks do not copy the pages of what no collection looks at.
    """
    gc.collect()
    gc.freeze()


def _sibling() -> int:
    """Fork a process whose parent is this one's; 0 in the new one."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid: int = ctypes.PyDLL(None).syscall(CLONE[os.uname().machine], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (api.PyOS_AfterFork_Parent if pid else api.PyOS_AfterFork_Child)()
    return pid


def _become(*descriptors: int) -> None:
    """Be the worker of a request: what a fresh interpreter would do."""
    os.setsid()
    with socket.socket(fileno=descriptors[3]) as caller:
        request = pickle.loads(b"".join(iter(lambda: caller.recv(2**16), b"")))
        caller.sendall(str(os.getpid()).encode())
    for stream, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    sys.argv[:] = ["-c", request["module"], *request["path"]]
    importlib.import_module(request["module"]).serve()
