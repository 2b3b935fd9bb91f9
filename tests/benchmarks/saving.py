"""Seconds to save and to restore a learner on one and two ranks, of this code and of an earlier one, in one run.

    python -m tests.benchmarks.saving BEFORE [--layers 7] [--rounds 3]

BEFORE is a folder with the earlier code, such as a git worktree. The model is a random Qwen2 with the widths of
Qwen2.5-0.5B, in float32: 7 layers have 0.1 billion parameters, 33 have half a billion. It is learned at ZeRO 3, with
gloo. A save is everything that the ranks do, up to the last rank's return; a restore is what reads ``state/``. Files
stay in the page cache. Codes take turns, and the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmrl.cluster.process import prepare_process

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
"""Of Qwen2.5-0.5B."""
MOST_S = 1800


def write_model(folder: Path, layers: int) -> int:
    """A random model's folder; returns its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from mmrl.engine.aids.tiny_model import write_tokenizer

    tokenizer = write_tokenizer(folder, vision=False)
    torch.manual_seed(0)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    vocabulary = {"vocab_size": len(tokenizer) + 6, "tie_word_embeddings": True, "eos_token_id": end}
    model = Qwen2ForCausalLM(
        Qwen2Config(num_hidden_layers=layers, max_position_embeddings=4096, **WIDTHS, **vocabulary)
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def one_rank(model: Path, saved: Path, rounds: int) -> None:
    """Save and restore; rank 0 prints the seconds of each round."""
    import torch

    from mmrl.config.load import from_mapping
    from mmrl.data.images import ImageGrid, MediaStore
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.rank import RankEngine
    from mmrl.engine.spec import EngineSpec
    from mmrl_algorithms.grpo import GRPO

    torch.set_num_threads(1)
    plain = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": {"name": "table"}},
        "algorithm": {"name": "grpo"},
        "learner": {"zero_stage": 3},
    }
    media = MediaStore(saved / "media", ImageGrid(28, 3136, 50176))
    spec = EngineSpec(from_mapping(plain), ModelFolder.open(str(model)), media, GRPO(GRPO.Config()), 0, False)
    found: dict[str, list[float]] = {"save": [], "restore": []}
    with RankEngine(spec, "cpu").learning() as learner:
        own: Any = learner.network("policy")
        own._step_without_effect(1.0)  # makes the optimizer's state
        for number in range(rounds):
            target = saved / str(number)
            found["save"].append(seconds(lambda target=target: own.save(target)))
            found["restore"].append(seconds(lambda target=target: own.restore(target)))
            if torch.distributed.get_rank() == 0:
                shutil.rmtree(target)
    if torch.distributed.get_rank() == 0:
        print("\n" + json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


def seconds(work: Callable[[], object]) -> float:
    """Seconds from the moment at which all ranks begin until all have ended."""
    import torch

    torch.distributed.barrier()
    begin = time.perf_counter()
    work()
    torch.distributed.barrier()
    return time.perf_counter() - begin


def measure(code: Path, model: Path, saved: Path, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Rounds of one code, in processes of its own; this file is the script of both."""
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
        paths = os.pathsep.join(map(str, (code, code / "plugins", code / "datasets")))
        environment = os.environ | place | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        command = [sys.executable, __file__, "--rank", str(model), str(saved), "--rounds", str(rounds)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=saved))
    try:
        told = [process.communicate(timeout=MOST_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    del meeting
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank of {code} failed")
    found: dict[str, list[float]] = json.loads(told[0].splitlines()[-1])
    return found


def table(found: Mapping[tuple[str, int, str], list[float]]) -> list[str]:
    """Lines of a page."""
    lines = ["| ranks | | before | since | ratio |", "|---|---|---|---|---|"]
    for ranks in sorted({ranks for _, ranks, _ in found}):
        for verb in ("save", "restore"):
            before, since = (statistics.median(found[code, ranks, verb]) for code in ("before", "since"))
            lines.append(f"| {ranks} | {verb} | {before:.2f} s | {since:.2f} s | {since / before:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, nargs="?", help="a folder with the earlier code")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    prepare_process()
    if arguments.rank:
        one_rank(*arguments.rank, arguments.rounds)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = write_model(folder / "model", arguments.layers)
        (folder / "saved").mkdir()
        found: dict[tuple[str, int, str], list[float]] = {}
        for ranks in (1, 2):
            for code, root in (("before", arguments.before), ("since", ROOT)) * 2:
                times = measure(root.resolve(), folder / "model", folder / "saved", ranks, arguments.rounds)
                for verb, values in times.items():
                    found.setdefault((code, ranks, verb), []).extend(values)
                print(code, ranks, {verb: [round(value, 2) for value in values] for verb, values in times.items()})
    print(f"{parameters / 1e9:.2f} B parameters", *table(found), sep="\n")


if __name__ == "__main__":
    main()
