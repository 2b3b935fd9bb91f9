"""The plan's bytes by kind against what the real learner allocates, on one rank and on two."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.ops.memory import FrozenSize, Zero, states

pytestmark = pytest.mark.full

BUCKET = {"zero_optimization": {"reduce_bucket_size": 2 * 10**6}}
KINDS = ("weights", "master", "optimizer", "gradients", "buckets", "gathered", "reference")


def learner(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_stage": stage, "tokens_per_microbatch": 128, "deepspeed": BUCKET} | options


BF16 = {"dtype": "bfloat16"}
TWO_RANKS: list[dict[str, Any]] = [
    {"learner": learner(0)},
    {"model": BF16, "learner": learner(1)},
    {"learner": learner(2)},
    {"model": BF16, "learner": learner(3), "kl": True},
    {"model": BF16 | {"lora": {"rank": 64}}, "learner": learner(3), "kl": True, "teacher": True},
    {"model": BF16 | {"lora": {"rank": 64}, "quantize": "nf4"}, "learner": learner(3)},
    {"model": BF16, "learner": learner(2), "critic": True},
    {"model": BF16, "learner": learner(3), "critic": True},
    {"model": BF16 | {"lora": {"rank": 64}}, "learner": learner(1), "critic": True},
]
ONE_RANK: list[dict[str, Any]] = [
    {"model": BF16, "learner": learner(0)},
    {"model": BF16, "learner": learner(2)},
    {"learner": learner(3)},
    {"model": BF16 | {"lora": {"rank": 64}}, "learner": learner(1)},
    {"model": BF16, "learner": learner(1), "kl": True, "teacher": True},
    {"model": BF16 | {"lora": {"rank": 64}, "quantize": "nf4"}, "learner": learner(1)},
    {"learner": learner(0), "critic": True},
    {"model": BF16 | {"lora": {"rank": 64}}, "learner": learner(3), "critic": True},
]


@pytest.fixture(scope="module")
def folder(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model of 6.5 million parameters; beside it a teacher of 25 million."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = tmp_path_factory.mktemp("allocated") / "model"
    shutil.copytree(models("qwen2"), target)
    for name, width in (("model", 384), ("teacher", 768)):
        place = target.with_name(name)
        if name != "model":
            shutil.copytree(models("qwen2"), place)
        wide = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_attention_heads": 6}
        config = AutoConfig.from_pretrained(place, **wide, num_hidden_layers=4, layer_types=["full_attention"] * 4)
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return target


def run(ranks: int, folder: Path, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bytes by kind that rank 0 of so many ranks tells of each setting."""
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
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-3000:]
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [pytest.param(2, TWO_RANKS, id="two"), pytest.param(1, ONE_RANK, id="one", marks=pytest.mark.slow)],
)
def test_bytes_by_kind_are_those_that_deepspeed_allocates(ranks, settings, folder):
    for sections, found in zip(settings, run(ranks, folder, settings), strict=True):
        stage = sections["learner"]["zero_stage"]
        place = None if "kl" not in sections else "sharded" if stage == 3 else "device"
        zero = Zero.of(found["settings"], ranks)
        width = 2 if sections.get("model", {}).get("dtype") == "bfloat16" else 4
        sizes = (found["trained"], found["frozen"])
        options = {"largest": found["largest"], "reference": place, "quantized": found["quantized"]}
        if teacher := found["teacher"]:
            options["references"] = [FrozenSize(sum(teacher), max(teacher))]
        expected = states(*sizes, width=width, zero=zero, **options)
        if sections.get("critic"):
            expected = expected.beside(states(*found["critic"], width=width, zero=zero, largest=found["largest"]))
        for kind in KINDS:
            assert found["most"].get(kind, 0) == pytest.approx(getattr(expected, kind), rel=0.1), (sections, kind)
        resident = {kind: count for kind, count in found["resident"].items() if count}
        small = found["small"] * (stage == 3 and ranks > 1)  # what stage 3 never gives up again
        assert resident.pop("gathered", 0) == pytest.approx(small, rel=0.1)
        assert resident == pytest.approx(expected.kept, rel=0.1), sections
        if sections is settings[0]:  # before learners of the other settings have left something behind
            assert found["unknown"] < 0.05 * sum(found["resident"].values())
        during = found["stepping"]["gradients"]
        assert during <= 1.1 * (expected.gradients + expected.step), sections
