"""Audits a run's own model, sampler and learner in a process of its own, and reports its rows or its failure."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmrl.commands.doctor.finding import REPORT, Finding, ending
from mmrl.commands.doctor.selftest import TAIL_LINES, run
from mmrl.config.sections import Config
from mmrl.engine.device import WAITING

TIMEOUT_S = 3600
"""Seconds; a large model takes minutes to load twice, and a GPU's first start compiles for minutes."""
AUDIT = (sys.executable, "-m", "mmrl.commands.doctor.audited_run")


def audit(config: Config, *, command: Sequence[str] = AUDIT, timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """The audit's rows, and one more for a process that does not end well.

    Args:
        command: Started with a file of the config and the file for its rows.
    """
    with tempfile.TemporaryDirectory(prefix="mmrl-doctor-") as folder:
        rows, log, resolved = Path(folder, "rows"), Path(folder, "log"), Path(folder, "config.json")
        rows.touch()
        resolved.write_text(json.dumps(config.model_dump(mode="json")), "utf-8")
        how = run([*command, str(resolved), str(rows)], {**WAITING, **os.environ}, log, timeout_s)
        yield from (Finding(**json.loads(line)) for line in rows.read_text("utf-8").splitlines())
        if how:
            tail = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
            found = f"the process {how}; its last words: {ending(' | '.join(tail[-TAIL_LINES:]), 1200) or 'none'}"
            yield Finding("engine", "audit: process", "bad", found, REPORT)
