"""All checks, one after the other; none keeps the next from being made."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence

from mmrl.cluster.nodes import NodeReport, node_reports
from mmrl.config import Config
from mmrl.doctor.finding import REPORT, Area, Finding, Private, failure
from mmrl.doctor.machine import machine_findings
from mmrl.doctor.nodes import node_findings
from mmrl.doctor.probe import Probe, probe
from mmrl.doctor.selftest import self_test
from mmrl.doctor.settings import setting_findings
from mmrl.doctor.versions import Facts, Installed, version_findings
from mmrl.engine.device import DeviceKind
from mmrl.errors import MMRLError


def examine(config: Config | None = None, self_test_on: DeviceKind | None = None) -> list[Finding]:
    """Every row, fit to be shown.

    Args:
        config: Whose cluster and folders to look at as well.
        self_test_on: Train the tiny model on this kind of device too.
    """
    uses_ray = config is not None and config.cluster.name != "local"
    run_dir = "runs" if config is None else config.trainer.run_dir
    seen = probe()
    facts = Facts(Installed.here(), seen, _driver(), uses_ray)
    has_gpu = bool(facts.driver or seen.gpus)
    checks: list[tuple[Area, Callable[[], Iterable[Finding]]]] = [
        ("versions", lambda: version_findings(facts)),
        ("machine", lambda: machine_findings(seen, os.environ, run_dir, driver=facts.driver, uses_ray=uses_ray)),
        ("settings", lambda: setting_findings(os.environ, has_gpu=has_gpu, uses_ray=uses_ray)),
    ]
    if config is not None:
        checks.append(("nodes", lambda: _nodes(node_reports(config), facts.installed)))
    if self_test_on is not None:
        checks.append(("engine", lambda: _self_test(self_test_on, seen)))
    private = Private()
    return [finding.shown(private) for area, check in checks for finding in _all_of(area, check)]


def _all_of(area: Area, check: Callable[[], Iterable[Finding]]) -> Iterable[Finding]:
    try:
        yield from check()
    except MMRLError as error:
        yield Finding(area, "not checked", "bad", str(error))
    except Exception as error:  # a strange machine is what this command is for
        yield Finding(area, "not checked", "bad", failure(error), REPORT)


def _nodes(nodes: Sequence[NodeReport], installed: Installed) -> Iterable[Finding]:
    return node_findings(nodes, {**installed.versions, "python": platform.python_version()})


def _self_test(kind: DeviceKind, seen: Probe) -> Iterable[Finding]:
    if kind == "cuda" and not seen.gpus:
        remedy = "see the rows about torch and the driver; on purpose without a GPU: mmrl doctor --cpu"
        return [Finding("engine", "self-test", "bad", "torch sees no GPU", remedy)]
    return self_test(kind)


def _driver() -> str:
    """The version of NVIDIA's driver; empty without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""
