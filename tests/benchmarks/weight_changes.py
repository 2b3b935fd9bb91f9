"""The share of a model's bfloat16 weights, and of their bytes, that an optimizer step changes.

    python tests/benchmarks/weight_changes.py FOLDER [--lr 1e-6 1e-5] [--steps 8]

Weights are kept in float32, as DeepSpeed's optimizer keeps them, and compared as the bfloat16 numbers that a sampler
gets. Gradients are those of a policy-gradient loss on random completions with random advantages; AdamW with the
learner's betas (0.9 and 0.999) makes steps of nearly the learning rate of them whatever their size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

LENGTH, SAMPLES = 48, 6


def shares(folder: str, rate: float, steps: int) -> Iterator[dict[str, float]]:
    """For each step, the shares of elements and of bytes that differ from those before it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()  # a checkpoint in bfloat16
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
    before = [parameter.detach().bfloat16() for parameter in own]
    total = sum(each.numel() for each in own)
    for step in range(1, steps + 1):
        ids_RS = torch.randint(0, model.config.vocab_size, (SAMPLES, LENGTH))
        logprobs_RST = model(input_ids=ids_RS).logits[:, :-1].log_softmax(-1)
        chosen_RS = logprobs_RST.gather(2, ids_RS[:, 1:, None])[..., 0]
        advantages_R1 = torch.randn(SAMPLES, 1)
        loss = -(advantages_R1 * chosen_RS).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        after = [parameter.detach().bfloat16() for parameter in own]
        elements = changed = 0
        for old, new in zip(before, after, strict=True):
            elements += int((old.view(torch.int16) != new.view(torch.int16)).sum())
            changed += int((old.flatten().view(torch.uint8) != new.flatten().view(torch.uint8)).sum())
        yield {"lr": rate, "step": step, "elements": elements / total, "bytes": changed / (2 * total)}
        before = after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    for rate in arguments.lr:
        for row in shares(arguments.folder, rate, arguments.steps):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
