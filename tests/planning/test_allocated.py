"""The plan's bytes by kind against what the real learner allocates, on one rank and on two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrl.engine.tiny_model import SIZES, Size, write_model
from mmrl.ops.memory import Zero, states

BUCKET = {"zero_optimization": {"reduce_bucket_size": 2 * 10**6}}
KINDS = ("weights", "master", "optimizer", "gradients", "buckets", "gathered", "reference")


def learner(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_stage": stage, "tokens_per_microbatch": 128, "deepspeed": BUCKET} | options


BF16 = {"dtype": "bfloat16"}
ONE_RANK: list[dict[str, Any]] = [
    {"learner": learner(0)},
    {"model": BF16, "learner": learner(0)},
    {"model": BF16, "learner": learner(2)},
    {"learner": learner(3)},
    {"model": BF16 | {"lora": {"rank": 64}}, "learner": learner(1)},
]
TWO_RANKS: list[dict[str, Any]] = [
    {"model": BF16, "learner": learner(1)},
    {"learner": learner(2)},
    {"model": BF16, "learner": learner(3), "kl": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model of 6.5 million parameters."""
    SIZES["wide"] = Size(384, 1024, 4, 6, 64)
    return write_model(tmp_path_factory.mktemp("allocated") / "model", "qwen2", size="wide")


def run(ranks: int, folder: Path, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What rank 0 of so many tells of each setting."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    script = Path(__file__).with_name("allocated.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), port, folder, json.dumps(settings)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-3000:]
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.parametrize(("ranks", "settings"), [(1, ONE_RANK), (2, TWO_RANKS)], ids=["one rank", "two ranks"])
def test_bytes_by_kind_are_those_that_deepspeed_allocates(ranks, settings, folder):
    for sections, found in zip(settings, run(ranks, folder, settings), strict=True):
        stage = sections["learner"]["zero_stage"]
        place = None if "kl" not in sections else "sharded" if stage == 3 else "device"
        zero = Zero.of(found["settings"], ranks)
        width = 2 if sections.get("model", {}).get("dtype") == "bfloat16" else 4
        sizes = (found["trained"], found["frozen"])
        expected = states(*sizes, width=width, zero=zero, largest=found["largest"], reference=place)
        for kind in KINDS:
            assert found["most"].get(kind, 0) == pytest.approx(getattr(expected, kind), rel=0.1), (sections, kind)
        resident = {kind: count for kind, count in found["resident"].items() if count}
        persistent = resident.pop("gathered", 0)  # small weights, which stage 3 keeps whole
        assert persistent < 0.01 * 4 * sum(sizes)
        assert resident == pytest.approx(expected.kept, rel=0.1), sections
        during = found["stepping"]["gradients"]
        assert during <= 1.1 * (expected.gradients + expected.step), sections
