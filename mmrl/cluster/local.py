"""The smallest cluster: one rank, in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mmrl.cluster.process import host_meeting, prepare_process
from mmrl.engine import device
from mmrl.engine.machine.interfaces import tell_interface
from mmrl.engine.machine.preconditions import check_process
from mmrl.engine.rank import RankEngine
from mmrl.engine.spec import EngineSpec

_meetings = list[Any]()
"""One for each engine that was started: torch's groups outlive the engine that asked for them."""


def start_engine(
    spec: EngineSpec, progress: Callable[[str], object] = lambda text: None, least_bytes: int = 0
) -> RankEngine:
    """Prepare this process as rank 0 of 1 and build its engine.

    Args:
        least_bytes: Bytes that the smallest setting takes of a GPU.

    Raises:
        ResourceError: There is a GPU, and torch cannot use it or another process fills it; or vLLM would not start.
    """
    kind = prepare_process()
    device.check_gpu(kind)
    check_process(kind, spec.config, samples=spec.with_sampler, least_bytes=least_bytes, tell=progress)
    initial = None if spec.initial is None else spec.initial.fetched()
    teachers = tuple(teacher.fetched() for teacher in spec.teachers)
    critic = None if spec.critic is None else spec.critic.fetched()
    spec = replace(spec, folder=spec.folder.fetched(), initial=initial, teachers=teachers, critic=critic)
    bound = socket.create_server(("127.0.0.1", 0))
    place = {"rank": 0, "node_rank": 0, "world_size": 1}
    os.environ.update(device.rank_variables(kind, **place, address="127.0.0.1", port=bound.getsockname()[1]))
    tell_interface("127.0.0.1")
    _meetings.append(host_meeting(bound))
    return RankEngine(spec, kind, progress)
