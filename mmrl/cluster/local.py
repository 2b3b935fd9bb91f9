"""The smallest cluster: one rank, in this process."""

from __future__ import annotations

import os
import socket

from mmrl.config import Config
from mmrl.engine import device
from mmrl.engine.folder import ModelFolder
from mmrl.engine.rank import RankEngine
from mmrl.interfaces import Algorithm
from mmrl.media import MediaStore


def prepare_process() -> device.DeviceKind:
    """Set what transformers, vLLM and DeepSpeed read from the environment when they are imported; tell the device."""
    kind = device.detect()
    os.environ.update(device.environment(kind))
    os.environ.update({name: value for name, value in device.QUIET.items() if name not in os.environ})
    return kind


def start_engine(
    config: Config,
    folder: ModelFolder,
    media: MediaStore,
    algorithm: Algorithm | None,
    *,
    max_images: int,
    with_sampler: bool,
) -> RankEngine:
    """Prepare this process as rank 0 of 1 and build its engine; see ``RankEngine`` for the arguments."""
    kind = prepare_process()
    folder = folder.fetched()
    os.environ.update(
        device.rank_environment(rank=0, local_rank=0, world_size=1, address="127.0.0.1", port=_free_port())
    )
    return RankEngine(config, folder, media, algorithm, kind, max_images=max_images, with_sampler=with_sampler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
