"""Memory that the learner takes with and without adapters, weights in 4 bits, a reference and bfloat16, on a CPU.

    python tests/benchmarks/learner_memory.py

Trains a text model of 66 M random parameters for two optimizer steps on a few short rows, each setting in a process of
its own; counts what the process holds above what it held before the weights were loaded.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, reference": {"kl": True},
    "float32, LoRA of rank 16": {"lora": {"rank": 16}},
    "float32, LoRA of rank 16, reference": {"lora": {"rank": 16}, "kl": True},
    "float32, QLoRA of rank 16": {"lora": {"rank": 16}, "quantize": "nf4"},
    "float32, QLoRA of rank 16, reference": {"lora": {"rank": 16}, "quantize": "nf4", "kl": True},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, reference": {"dtype": "bfloat16", "kl": True},
    "bfloat16, LoRA of rank 16, reference": {"dtype": "bfloat16", "lora": {"rank": 16}, "kl": True},
    "bfloat16, QLoRA of rank 16, reference": {"dtype": "bfloat16", "lora": {"rank": 16}, "quantize": "nf4", "kl": True},
}


def measure(folder: str, settings: dict[str, Any]) -> None:
    """Print what one setting takes, in bytes: at the end, and at most."""
    import numpy as np
    import psutil

    from mmrl.cluster.local import start_engine
    from mmrl.config.load import from_mapping
    from mmrl.data.images import ImageGrid, MediaStore
    from mmrl.engine.device import used_memory_bytes
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.spec import EngineSpec
    from mmrl.engine.text.encoding import Encoder
    from mmrl.interfaces import Aggregation
    from mmrl.ops.objective import training_rows
    from mmrl.types import Message, Prompt, Sample, Segment
    from mmrl_algorithms.grpo import GRPO

    import deepspeed  # noqa: F401, isort: skip: what it takes is not the learner's

    model = ModelFolder.open(folder)
    config = from_mapping(
        {
            "model": {
                "path": folder,
                "dtype": settings.get("dtype", "float32"),
                "lora": settings.get("lora"),
                "quantize": settings.get("quantize"),
            },
            "data": {"train": {"name": "table"}},
            "algorithm": {"name": "grpo"},
            "learner": {"lr": 1e-4, "zero_stage": 1},
        }
    )
    media = MediaStore(Path(folder, "media"), ImageGrid(28, 3136, 50176))
    prompt = Encoder(model, media).encode(Prompt("p", (Message("user", "what is 3+4?"),)))
    ids = np.arange(20, 36, dtype=np.int32)
    samples = [Sample(prompt, (Segment(ids, True, np.zeros(16, np.float32)),)) for _ in range(4)]
    masks, advantages = [sample.mask for sample in samples], [np.full(16, (-1.0) ** i) for i in range(4)]
    rows = list(
        training_rows(
            samples, masks, {"advantages": advantages}, np.arange(4), Aggregation("token-mean"), range(4)
        ).values()
    )
    algorithm = GRPO(GRPO.Config.model_validate({"kl": {"coef": 0.1}} if settings.get("kl") else {}))
    with redirect_stdout(io.StringIO()):
        before = psutil.Process().memory_info().rss
        engine = start_engine(EngineSpec(config, model, media, algorithm, 0, with_sampler=False))
        with engine.learning() as learner:
            for _ in range(2):
                if settings.get("kl"):
                    known = zip(rows, learner.network("reference").score(samples), strict=True)
                    rows = [
                        replace(row, columns={**row.columns, "reference_logprobs": v}, constants={"kl_coef": 0.1})
                        for row, v in known
                    ]
                learner.network("policy").update(rows)
        after = psutil.Process().memory_info().rss
    print(json.dumps([after - before, used_memory_bytes("cpu") - before]))


def main() -> None:
    from mmrl.engine.aids.tiny_model import SIZES, Size, write_model

    SIZES["wide"] = Size(1024, 2816, 6, 16, 64)
    with tempfile.TemporaryDirectory() as temporary:
        with redirect_stdout(io.StringIO()):
            folder = write_model(Path(temporary, "model"), "qwen2", size="wide")
        weights = (folder / "model.safetensors").stat().st_size / 4
        print(f"{weights / 1e6:.0f} M parameters\n\n| setting | bytes a parameter | at most |\n|---|---|---|")
        for name, settings in SETTINGS.items():
            words = [sys.executable, __file__, str(folder), json.dumps(settings)]
            answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            held, most = json.loads(answer)
            print(f"| {name} | {held / weights:.1f} | {most / weights:.1f} |", flush=True)


if __name__ == "__main__":
    measure(sys.argv[1], json.loads(sys.argv[2])) if sys.argv[1:] else main()
