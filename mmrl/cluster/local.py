"""The smallest cluster: one rank, in this process."""

from __future__ import annotations

import os
from pathlib import Path

from mmrl.cluster.process import free_port, prepare_process
from mmrl.config import Config
from mmrl.engine import device
from mmrl.engine.folder import ModelFolder
from mmrl.engine.rank import RankEngine
from mmrl.interfaces import Algorithm
from mmrl.media import MediaStore


def start_engine(
    config: Config,
    folder: ModelFolder,
    media: MediaStore,
    algorithm: Algorithm | None,
    *,
    max_images: int,
    with_sampler: bool,
    checkpoint: Path | None = None,
) -> RankEngine:
    """Prepare this process as rank 0 of 1 and build its engine; see ``RankEngine`` for the arguments."""
    kind = prepare_process()
    folder = folder.fetched()
    os.environ.update(
        device.rank_environment(kind, rank=0, node_rank=0, world_size=1, address="127.0.0.1", port=free_port())
    )
    return RankEngine(
        config,
        folder,
        media,
        algorithm,
        kind,
        max_images=max_images,
        with_sampler=with_sampler,
        checkpoint=checkpoint,
    )
