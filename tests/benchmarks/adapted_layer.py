"""Processor seconds of an adapted layer in bfloat16: as two products beside its own, and with the merged weight.

    python -m tests.benchmarks.adapted_layer [--tokens 2048 4096 16384] [--rank 32]

Layers have the widths of Qwen2.5-3B's. A pass is what gradient checkpointing makes of it: forward, forward again,
backward. The best of three is shown, of the process's seconds, as the machine may be busy.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import peft
import torch

from mmrl.engine.network.merged_linear import MergedLinear

SHAPES = ((2048, 2048), (2048, 256), (2048, 11008), (11008, 2048))
"""(in, out) of the layers for queries, keys, what the MLP opens and what it closes."""


class One(torch.nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, out, bias=False, dtype=torch.bfloat16)


def seconds(layer: Any, rows: torch.Tensor, gradient: torch.Tensor) -> float:
    """Processor seconds of a forward pass, another one, and the backward pass."""
    start = time.process_time()
    with torch.no_grad():
        layer(rows)
    layer(rows).backward(gradient)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 16384])
    parser.add_argument("--rank", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for width, out in SHAPES:
        model = One(width, out)
        lora = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=["layer"])
        peft.inject_adapter_in_model(lora, model)
        for name, parameter in model.to(torch.bfloat16).named_parameters():
            parameter.requires_grad_("lora_" in name)
        merging = MergedLinear(model.layer)
        for tokens in options.tokens:
            rows = torch.randn(tokens, width, dtype=torch.bfloat16).requires_grad_()
            gradient = torch.randn(tokens, out, dtype=torch.bfloat16)
            found = [[seconds(layer, rows, gradient) for layer in (model.layer, merging)] for _ in range(3)]
            beside, merged = (min(each) for each in zip(*found, strict=True))
            more = merged / beside - 1
            print(f"{width} to {out}, {tokens} tokens: {beside:.2f} s, merged {merged:.2f} s ({more:+.0%})", flush=True)


if __name__ == "__main__":
    main()
