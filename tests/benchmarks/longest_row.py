"""The longest packed row that fits into a limit of memory on one, two and four ranks that share it, and the plan's.

    python tests/benchmarks/longest_row.py [MEGABYTES]

A row is a prompt with images and two completions that share it, of a model of 8 layers and 256 columns, without and
with gradient checkpointing. Each rank is a process that takes an update of a short row and then of longer ones. The
kernel tells by how much each one raises what the process holds; weights, gradients and averages are added to that.
Gradients are there from the start, as an earlier micro-batch of the same optimizer step leaves them. Memory grows with
the row almost in a straight line: two lengths give the longest one, which is then tried and gives a better line. The
plan's is found likewise, by `mmrl plan` of such rows.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

SIDE, IMAGE_TOKENS = 224, 64
"""Pixels of each side of an image, and its tokens."""
SIZES = (1, 2, 4)
LENGTHS = (1024, 2048)
"""Tokens for each rank of the two rows that give a line."""
STEP = 64
"""Multiple of tokens to which lengths are rounded."""
MOST = 2**17
"""Tokens of a row that the model takes."""


def parts(tokens: int) -> tuple[int, int, int]:
    """Images, other tokens of the prompt and tokens of each completion of a row: a quarter is of completions, and
    about three eighths are of images."""
    completion = tokens // 8
    images = tokens * 3 // 8 // IMAGE_TOKENS
    return images, tokens - 2 * completion - images * IMAGE_TOKENS, completion


def sections(folder: Path, tokens: int, size: int, checkpointing: bool) -> dict[str, Any]:
    """The config of a run of one such row a micro-batch."""
    completion = parts(tokens)[2]
    return {
        "model": {"path": str(folder / "model"), "gradient_checkpointing": checkpointing},
        "data": {
            "train": {"name": "table", "path": str(folder / f"{tokens}.jsonl")},
            "max_prompt_tokens": tokens,
            "max_pixels": SIDE * SIDE,
        },
        "rewards": [{"name": "exact"}],
        "algorithm": {"name": "grpo"},
        "sampler": {"name": "hf", "group_size": 2, "max_new_tokens": completion},
        "learner": {"zero_stage": 0, "tokens_per_microbatch": -(-tokens // size) + 1, "sequence_parallel_size": size},
        "trainer": {"prompts_per_step": 1, "steps": 1},
        "cluster": {"name": "ray", "ranks": size} if size > 1 else {},
    }


def write_rows(folder: Path, tokens: int) -> None:
    """Write the dataset of one prompt with its images; its text has as many tokens as it takes, of two letters each."""
    from PIL import Image

    images, text, _ = parts(tokens)
    names = [f"{number}.png" for number in range(images)]
    for number, name in enumerate(names):
        Image.new("RGB", (SIDE, SIDE), (number, 0, 0)).save(folder / name)
    row = {"problem": "<image>" * images + "7" * (text - 2 * images - 10), "answer": "1", "images": names}
    (folder / f"{tokens}.jsonl").write_text(json.dumps(row) + "\n")


def measure(folder: Path, limit: int, size: int, checkpointing: bool) -> None:
    """Print the longest row, and the bytes of the rank that holds most in its update."""
    import numpy as np
    import torch

    import deepspeed  # noqa: F401, isort: skip: what it takes is not the learner's

    from mmrl.cluster.process import prepare_process
    from mmrl.config.load import from_mapping
    from mmrl.engine.rank import RankEngine
    from mmrl.engine.spec import EngineSpec
    from mmrl.interfaces import Aggregation
    from mmrl.ops.objective import training_rows
    from mmrl.runs.setup import RunSetup
    from mmrl.types import Sample, Segment

    prepare_process()
    own = folder / f"rank-{os.environ['RANK']}"
    own.mkdir(exist_ok=True)
    (own / "model").symlink_to(folder / "model")

    def setup_of(tokens: int) -> RunSetup:
        write_rows(own, tokens)
        made = sections(own, tokens, size, checkpointing)
        made["learner"]["tokens_per_microbatch"] = MOST  # no row is divided
        return RunSetup(from_mapping(made), own / "media")

    setup = setup_of(size * LENGTHS[1])

    def rows(tokens: int, completion: int) -> list[Any]:
        prompt = setup.encoder.encode(setup_of(tokens).prompts[0])
        ids = np.full(completion, 30, np.int32)
        samples = [Sample(prompt, (Segment(ids, True, np.zeros(completion, np.float32)),)) for _ in range(2)]
        columns = {"advantages": [np.full(completion, (-1.0) ** i) for i in range(2)]}
        masks = [sample.mask for sample in samples]
        made = training_rows(samples, masks, columns, np.zeros(2, int), Aggregation("token-mean"), range(2))
        return list(made.values())

    engine = RankEngine(EngineSpec(setup.config, setup.folder, setup.media, setup.algorithm, 64, False, None), "cpu")
    with engine.learning() as learner:
        policy = learner.network("policy")
        policy.update(rows(size * STEP * 4, STEP))  # the optimizer makes its states

        def take(tokens: int) -> int:
            made = rows(tokens, parts(tokens)[2])
            policy._inputs([row.sample for row in made])  # patches of images are kept in the host's memory
            kept = 0
            for parameter in learner.policy.parameters():
                parameter.grad = torch.empty_like(parameter).zero_()
                kept += 4 * parameter.nbytes
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the highest mark
            policy.update(made)
            most = torch.tensor(resident("VmHWM") - before + kept)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            print(tokens, int(most), file=sys.stderr, flush=True)
            return int(most)

        found = longest(take, limit, size)
        print(json.dumps([found, take(found)]), flush=True)


def resident(name: str) -> int:
    """Bytes of this process's memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(folder: Path, limit: int, size: int, checkpointing: bool) -> tuple[int, int]:
    """The longest row, and bytes of the rank that holds most in its update."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        (Path(temporary) / "model").symlink_to(folder / "model")
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", temporary, str(limit), str(size), str(int(checkpointing))],
                env=environment(rank, size, port),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            answers = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert not any(process.returncode for process in processes), "a rank has failed"
    found, most = json.loads(answers[0].splitlines()[-1])
    return found, most


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """A rank's variables. Each large tensor has pages of its own, which go back to the kernel with it."""
    from mmrl.engine import device
    from mmrl.engine.machine.interfaces import interface_of

    place = {"rank": rank, "node_rank": rank, "world_size": size, "address": "127.0.0.1", "port": port}
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": str(max(2 // size, 1))}
    own |= {"MALLOC_MMAP_THRESHOLD_": str(2**16), "GLOO_SOCKET_IFNAME": interface_of("127.0.0.1") or "lo"}
    return {**os.environ, **device.rank_variables("cpu", **place), **own}


def planned(folder: Path, tokens: int, size: int, checkpointing: bool) -> int:
    """Bytes of a rank in the update of such a row, by `mmrl plan`."""
    from mmrl.commands.plan.forecast import Assumptions, forecast
    from mmrl.config.load import from_mapping

    write_rows(folder, tokens)
    config = from_mapping(sections(folder, tokens, size, checkpointing))
    with tempfile.TemporaryDirectory() as media:
        return int(forecast(config, Path(media), Assumptions()).data["learner"]["peak"])


def longest(take: Callable[[int], int], limit: int, size: int) -> int:
    """The longest row of which a rank holds at most ``limit`` bytes.

    A line through two lengths gives one, and with that a better line.
    """
    held = {length: take(length) for length in (size * each for each in LENGTHS)}
    for _ in range(2):
        (short, low), (long, high) = [*held.items()][-2:]
        found = int(long + (limit - high) * (long - short) / (high - low)) // STEP * STEP
        if found in held:
            break
        held[found] = take(found)
    return found


def main(limit: int) -> None:
    from mmrl.engine.aids import tiny_model

    tiny_model.SIZES["deep"] = tiny_model.Size(256, 704, 8, 8, 64)
    tiny_model.TEXT["max_position_embeddings"] = MOST
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with redirect_stdout(sys.stderr):
            tiny_model.write_model(folder / "model", "qwen2_5_vl", size="deep")
        print("| checkpointing | ranks | longest row, measured | MB: measured, planned | by the plan | difference |")
        print("|---|---|---|---|---|---|", flush=True)
        for checkpointing, size in itertools.product((False, True), SIZES):
            found, held = measured(folder, limit, size, checkpointing)
            plan = partial(planned, folder, size=size, checkpointing=checkpointing)
            own = longest(plan, limit, size)
            memory = f"{held / 1e6:.1f}, {plan(found) / 1e6:.1f}"
            setting = "on" if checkpointing else "off"
            print(f"| {setting} | {size} | {found} | {memory} | {own} | {own / found - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure(Path(sys.argv[2]), *map(int, sys.argv[3:5]), checkpointing=sys.argv[5] == "1")
    else:
        main(int(float(sys.argv[1]) * 1e6) if sys.argv[1:] else 250_000_000)
