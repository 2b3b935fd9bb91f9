"""Runs for the tests of sweeps: their processes and folders are real, and what they learn is made up in no time.

The accuracy after a step is ``10 * learner.lr + trainer.seed / 100 + step / 1000``. A learning rate of 0.5 is an error
after the first step. While there is a file ``hold`` two folders above a run, the run waits after its first step; with a
file ``deaf`` beside it also when it is to stop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.commands import child_command, child_tasks
from mmrl.errors import MMRLError, NumericsError
from mmrl.runs.directory import RunDirectory
from mmrl.system.signals import Interruption, Stopped

BAD_LR = 0.5


def serve() -> None:
    child_tasks.TASKS |= {"train": _train}
    child_command.MODULE = __name__  # of the runs of a sweep that was called from Python
    child_tasks.serve()


def _train(request: Mapping[str, Any], interruption: Interruption) -> dict[str, Any]:
    config = request["config"]
    path = Path(config["trainer"]["run_dir"])
    directory = RunDirectory.create(path, new=False)
    last = max(directory.metrics(), default=None)
    print(f"{path.name} begins after step {last}", flush=True)
    directory.begin_attempt(last)
    directory.write_config("{}")
    code, message = 1, ""
    try:
        with interruption.deferred():
            for step in range((last or 0) + 1, config["trainer"]["steps"] + 1):
                _take(step, config, directory, interruption)
        code = 0
    except (MMRLError, Stopped) as error:
        code, message = error.exit_code, str(error)
        raise
    finally:
        directory.end_attempt(code, message)
        directory.release()
    return {}


def _take(step: int, config: Mapping[str, Any], directory: RunDirectory, interruption: Interruption) -> None:
    lr, seed = config["learner"]["lr"], config["trainer"]["seed"]
    directory.append_metrics(step, {"eval/accuracy": 10 * lr + seed / 100 + step / 1000, "loss/total": lr})
    if lr == BAD_LR:
        raise NumericsError("the weights are not finite", where=f"step {step}")
    place = directory.path.parents[1]
    while (place / "hold").exists() and (interruption.stopped is None or (place / "deaf").exists()):
        time.sleep(0.01)
    interruption.check()
