"""Runs the trial in a process of its own for each precision, and reports its rows or its failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mmrl.commands.doctor.finding import REPORT, Finding, ending
from mmrl.engine.device import WAITING, DeviceKind

PRECISIONS = ("float32", "bfloat16")
TIMEOUT_S = 900
"""Seconds for one precision; a GPU's first start compiles for minutes."""
TAIL_LINES = 6
TRIAL = (sys.executable, "-m", "mmrl.commands.doctor.trial")


def self_test(
    kind: DeviceKind,
    precisions: Sequence[str] = PRECISIONS,
    *,
    command: Sequence[str] = TRIAL,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Finding]:
    """The trial's rows, and one more for a process that does not end well.

    Args:
        command: Started with the kind of device, a precision and the file for its rows.
    """
    for precision in precisions:
        with tempfile.TemporaryDirectory(prefix="mmrl-doctor-") as folder:
            rows, log = Path(folder, "rows"), Path(folder, "log")
            rows.touch()
            how = run([*command, kind, precision, str(rows)], trial_variables(os.environ, kind), log, timeout_s)
            yield from (Finding(**json.loads(line)) for line in rows.read_text("utf-8").splitlines())
            if how:
                tail = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
                found = f"the process {how}; its last words: {ending(' | '.join(tail[-TAIL_LINES:]), 1200) or 'none'}"
                yield Finding("engine", f"{precision}: process", "bad", found, REPORT)


def trial_variables(environ: Mapping[str, str], kind: DeviceKind) -> dict[str, str]:
    """Environment variables of a trial: this process's, with the GPUs hidden from a trial on the CPU."""
    return {**WAITING, **environ} | ({"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {})


def run(
    command: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """Run a command to its end, its output in a file; returns how it failed, or nothing. Its children end too.

    Args:
        meanwhile: Called every second, and once when it has ended.
    """
    deadline = time.monotonic() + timeout_s
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=dict(variables), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while (status := _status(process, min(1.0, max(deadline - time.monotonic(), 0.0)))) is None:
                if time.monotonic() >= deadline:
                    return f"was still running after {timeout_s:.0f} s"
                meanwhile()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            meanwhile()
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}" if status else ""


def _status(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Its exit status; None if it has not ended in time."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
