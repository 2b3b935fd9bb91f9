"""Makes all checks in turn, even if one of them fails."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import TypeVar

from mmrl.cluster.survey import node_reports
from mmrl.commands.doctor.audit import audit
from mmrl.commands.doctor.finding import REPORT, Area, Finding, Private, failure
from mmrl.commands.doctor.machine import machine_findings
from mmrl.commands.doctor.nodes import node_findings
from mmrl.commands.doctor.probe import Probe, probe
from mmrl.commands.doctor.selftest import PRECISIONS, self_test
from mmrl.commands.doctor.settings import setting_findings
from mmrl.commands.doctor.versions import Facts, Installed, version_findings
from mmrl.config.cluster import ClusterConfig
from mmrl.config.sections import Config
from mmrl.engine.device import DeviceKind
from mmrl.engine.driver import Driver
from mmrl.errors import MMRLError

T = TypeVar("T")


def examine(
    config: Config | None = None, self_test_on: DeviceKind | None = None, *, audits: bool = False
) -> list[Finding]:
    """All rows, fit to be shown.

    Args:
        config: Examine its cluster and folders too.
        self_test_on: Train the tiny model on this kind of device too.
        audits: True to audit the config's model, sampler and learner.
    """
    private = Private()
    return [finding.shown(private) for finding in _rows(config, self_test_on, audits)]


def _rows(config: Config | None, self_test_on: DeviceKind | None, audits: bool) -> Iterator[Finding]:
    cluster = ClusterConfig() if config is None else config.cluster
    run_dir = "runs" if config is None else config.trainer.run_dir
    seen = yield from _asked("torch", probe, Probe("not known"))
    installed = yield from _asked("packages", Installed.here, Installed({}, {}))
    driver = yield from _asked("driver", Driver.here, Driver())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    facts = Facts(installed, seen, driver, visible, uses_ray=cluster.name == "ray")
    has_gpu = driver.has_gpu or bool(seen.gpus)
    yield from _all_of("versions", lambda: version_findings(facts))
    yield from _all_of("machine", lambda: machine_findings(seen, os.environ, run_dir, cluster, driver.version))
    yield from _all_of("settings", lambda: setting_findings(os.environ, cluster, has_gpu=has_gpu))
    if config is not None:
        versions = {**installed.versions, "python": platform.python_version()}
        yield from _all_of("nodes", lambda: node_findings(node_reports(config), versions))
    if self_test_on is not None:
        yield from _all_of("engine", partial(_self_test, self_test_on, seen))
    if config is not None and audits:
        yield from _all_of("engine", partial(audit, config))


def _asked(check: str, question: Callable[[], T], unknown: T) -> Generator[Finding, None, T]:
    """The answer; if there is none, a row and ``unknown``."""
    try:
        return question()
    except Exception as error:  # a strange machine is what this command is for
        yield Finding("versions", check, "bad", failure(error), REPORT)
        return unknown


def _all_of(area: Area, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except MMRLError as error:
        yield Finding(area, "not checked", "bad", str(error))
    except Exception as error:
        yield Finding(area, "not checked", "bad", failure(error), REPORT)


def _self_test(kind: DeviceKind, seen: Probe) -> Iterable[Finding]:
    if kind == "cpu":
        return self_test(kind)
    if not seen.gpus:
        reason = seen.error or seen.cuda_error or f"{seen.torch} is a build for CPUs"
        remedy = "see the rows above; on purpose without a GPU: mmrl doctor --cpu"
        return [Finding("engine", "self-test", "bad", f"torch sees no GPU: {reason}", remedy)]
    return self_test(kind, PRECISIONS if all(gpu.bf16 for gpu in seen.gpus) else PRECISIONS[:1])
