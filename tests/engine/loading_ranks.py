"""One of two ranks, in a process of its own, that load a model at ZeRO 3; its place comes from the environment.

    python loading_ranks.py MODEL BROKEN      # a model folder, and one whose files lack a weight

Prints as JSON the bytes of the whole model, of its largest weight, of its buffers and of the rank's part; the resident
bytes that loading took at most and left behind, and those that came to the device; a digest of each gathered weight;
syncs in buckets of several sizes; and what the rank says of the broken folder.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from mmrl.cluster.process import forget_stale_builds
from mmrl.config.load import from_mapping
from mmrl.config.sections import LearnerConfig
from mmrl.data.images import ImageGrid, MediaStore
from mmrl.engine.learner.learner_settings import deepspeed_settings
from mmrl.engine.network import policy as policies
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.placement import place
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.rank import RankEngine
from mmrl.engine.spec import EngineSpec
from mmrl.errors import MMRLError
from mmrl_algorithms.grpo import GRPO

BUCKETS = (0, 25_000_000, 2**28)
"""Bytes: one weight at a time, some, and all of the tests' model."""


OTHER = "cpu:0"
"""To torch another device than "cpu": tensors are copied when they are moved there."""


class Arrivals(TorchDispatchMode):
    """Tensors that are made on ``OTHER``.

    Attributes:
        now: Bytes of those that are left.
        most: Their bytes, at most at a time.
        gathered: Bytes that collectives have gathered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.gathered = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        found = function(*args, **(options or {}))
        if (options or {}).get("device") == torch.device(OTHER):
            storage = found.untyped_storage()
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
        if function is torch.ops.c10d._allgather_base_.default:
            self.gathered += args[0].nbytes
        return found

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def resident(kind: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def loaded(model: str, torch_device: str) -> Policy:
    """A policy of which this rank has its part."""
    folder = ModelFolder.open(model)
    reads = torch.distributed.get_rank() == 0
    policy = load_policy(folder, "cpu", "float32", freeze=(), temperature=1.0, with_weights=reads)
    place(policy, deepspeed_settings(LearnerConfig(), "float32", "cpu"), torch_device)
    return policy


def digests(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: hashlib.sha256(weight.numpy().tobytes()).hexdigest() for name, weight in weights}


def resident_while_loaded(model: str) -> dict[str, Any]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    policy = loaded(model, "cpu")
    gc.collect()
    memory = {"most": resident("VmHWM") - before, "left": resident("VmRSS") - before}
    sizes = [4 * parameter.ds_numel for parameter in policy.parameters()]
    return memory | {
        "whole": sum(sizes),
        "largest": max(sizes),
        "buffers": sum(buffer.nbytes for buffer in policy.buffers()),
        "part": sum(parameter.ds_tensor.nbytes for parameter in policy.parameters()),
        "weights": digests(policy.named_weights(torch.float32, tied=False)),
    }


def on_the_device(model: str) -> dict[str, Any]:
    """Bytes that came to the device: at most while the model was loaded, and for each size of buckets in a sync."""
    accelerator = type(get_accelerator())
    accelerator.device_name = lambda self, index=None: OTHER
    with Arrivals() as arrivals:
        policy = loaded(model, OTHER)
        arrived = arrivals.most
        return {"arrived": arrived, "syncs": [synced(policy, arrivals, size) for size in BUCKETS]}


def synced(policy: Policy, arrivals: Arrivals, bucket_bytes: int) -> dict[str, Any]:
    """Bytes that a sync gathered in all and at most at a time, what it sent, and what one that is given up leaves."""
    policies.GATHERED_BYTES = bucket_bytes
    before, arrivals.most, arrivals.gathered = arrivals.now, arrivals.now, 0
    sent = digests(policy.named_weights(torch.float32))
    found = {"bucket": bucket_bytes, "gathered": arrivals.gathered, "most": arrivals.most - before, "weights": sent}
    given_up = policy.named_weights(torch.float32)
    next(given_up)
    held = whole(policy)
    given_up.close()
    return found | {"held": held, "left": whole(policy)}


def whole(policy: Policy) -> int:
    """Bytes of the weights that are gathered now."""
    return sum(parameter.nbytes for parameter in policy.parameters())


def said_of(model: str) -> str:
    """The text of the error that the engine raises."""
    sections = {
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": {"name": "table"}},
        "algorithm": {"name": "grpo"},
    }
    media = MediaStore(Path("media").absolute(), ImageGrid(28, 3136, 50176))
    try:
        folder, algorithm = ModelFolder.open(model), GRPO(GRPO.Config())
        RankEngine(EngineSpec(from_mapping(sections), folder, media, algorithm, 0, with_sampler=False), "cpu")
    except MMRLError as error:
        return str(error)
    return ""


def main(model: str, broken: str) -> None:
    forget_stale_builds()
    torch.distributed.init_process_group("gloo")
    said = said_of(broken)  # first: it imports what loading needs
    found = resident_while_loaded(model) | on_the_device(model) | {"said": said}
    print("\n" + json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
