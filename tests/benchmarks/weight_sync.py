"""Seconds and memory of a weight sync: the learner's weights, gathered at ZeRO 3, into a receiver.

    python tests/benchmarks/weight_sync.py [--folder FOLDER] [--ranks 1 2] [--mib 0 256] [--rounds 3]

The model has the shape of Qwen2.5-1.5B with random bfloat16 weights. The receiver copies each weight, as a sampler
does. The same processes gather in buckets of each size by turns; 0 is one weight at a time, as in version 0.2.0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
}


def receive(policy: Any, bucket_bytes: int) -> dict[str, float]:
    """Send every weight once into memory of the receiver's own; memory is counted above what is resident before."""
    import torch
    from stopwatch import peak_memory

    from mmrl.engine.network import policy as engine

    engine.GATHERED_BYTES = bucket_bytes
    largest = max(parameter.ds_numel for parameter in policy.parameters())
    memory: dict[str, int] = {}
    taken = torch.ones(largest, dtype=torch.bfloat16)  # as a sampler's memory, it is there before the sync
    torch.distributed.barrier()
    with peak_memory(memory):
        start, size = time.perf_counter(), 0
        for _, weight in policy.named_weights(torch.bfloat16):
            taken[: weight.numel()].copy_(weight.flatten())
            size += weight.nbytes
        seconds = time.perf_counter() - start
    return {"s": seconds, "s_per_gb": seconds / size * 1e9, "extra_gb": (memory["peak"] - memory["before"]) / 1e9}


def one_rank(folder: str, mib: Sequence[int], rounds: int) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch

    from mmrl.config.sections import LearnerConfig
    from mmrl.engine.learner.learner_settings import deepspeed_settings
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.network.placement import place
    from mmrl.engine.network.policy import load_policy

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    policy = load_policy(
        ModelFolder.open(folder), "cpu", "bfloat16", freeze=(), temperature=1.0, with_weights=rank == 0
    )
    place(policy, deepspeed_settings(LearnerConfig(), "bfloat16", "cpu"), "cpu")
    receive(policy, 0)  # the first of all fetches memory from the machine
    for _ in range(rounds):
        for size in mib:
            found = receive(policy, size * 2**20)
            if rank == 0:
                print(json.dumps({"mib": size, **found}), flush=True)
    torch.distributed.destroy_process_group()


def measure(folder: Path, ranks: int, mib: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The rows that rank 0 prints."""
    import socket

    from mmrl.cluster.process import host_meeting
    from mmrl.engine import device

    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    meeting = host_meeting(bound)
    processes = []
    for rank in range(ranks):
        place = device.rank_variables(
            "cpu", rank=rank, node_rank=rank, world_size=ranks, address="127.0.0.1", port=port
        )
        environment = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--folder", str(folder), "--rounds", str(rounds), "--rank"]
        command += ["--mib", *map(str, mib)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    printed = processes[0].communicate()[0]
    if any(process.wait() for process in processes):
        raise SystemExit("a rank failed")
    del meeting  # ranks met there
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="of the model, written there if it is not; otherwise a temporary one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 256], help="most MiB of a bucket")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        one_rank(arguments.folder, arguments.mib, arguments.rounds)
        return
    from published import CONFIGS, write_model

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        write_model(folder, CONFIGS["Qwen2.5-0.5B-Instruct"] | SHAPE, dtype="bfloat16", mean_length=64)
        for ranks in arguments.ranks:
            found = measure(folder, ranks, arguments.mib, arguments.rounds)
            for size in arguments.mib:
                rounds = sorted((each for each in found if each["mib"] == size), key=lambda each: each["s"])
                median = rounds[len(rounds) // 2]
                print(
                    f"{ranks} ranks, {size} MiB: {median['s']:.2f} s, {median['s_per_gb']:.2f} s a GB",
                    f"({rounds[0]['s_per_gb']:.2f} to {rounds[-1]['s_per_gb']:.2f}),",
                    f"{max(each['extra_gb'] for each in rounds):.2f} GB beside the model",
                    flush=True,
                )


if __name__ == "__main__":
    main()
