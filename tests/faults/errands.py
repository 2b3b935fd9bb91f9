"""What ``mmrl.commands.child_tasks`` does in its process, with the fake engine; and errands that take no time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.commands import child_tasks
from mmrl.errors import ConfigError
from mmrl.system.signals import Interruption


def serve() -> None:
    """The tasks ``train`` and ``evaluate`` have the fake engine; ``stub`` does what its request says."""
    child_tasks.TASKS |= {
        "stub": _stub,
        **{name: _with_fake_engine(child_tasks.TASKS[name]) for name in ("train", "evaluate")},
    }
    child_tasks.serve()


def _with_fake_engine(task: Any) -> Any:
    def run(request: Mapping[str, Any], interruption: Interruption) -> Any:
        import torch

        torch.set_num_threads(1)
        from mmrl.cluster import launch
        from tests.faults import fake_engine

        launch.start_engine = fake_engine.start_engine  # type: ignore[assignment]
        return task(request, interruption)

    return run


def _stub(request: Mapping[str, Any], interruption: Interruption) -> dict[str, Any]:
    match request["do"]:
        case "print":
            print("out é")
            print("err", file=sys.stderr)
        case "fail":
            raise ConfigError("it is wrong", where="here", possible="this", remedy="that")
        case "bug":
            raise ZeroDivisionError("by nothing")
        case "kill":
            os.kill(os.getpid(), 9)
        case "exit":
            os._exit(5)
        case "wait":  # in a file, how often it was told to stop
            with interruption.deferred():
                Path(request["file"]).write_text(str(os.getpid()))
                while interruption.stopped is None:
                    time.sleep(0.01)
                time.sleep(request["after"])
                Path(request["file"]).write_text(f"saved, {interruption.stopped}")
            interruption.check()
    return {"data": request["do"], "text": ""}
