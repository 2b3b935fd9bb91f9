"""The collectives of a sequence group, as ranks call them in forks."""

from __future__ import annotations

from typing import Any

import torch

FEATURES = 3


def row(tokens: int, width: int, offset: float) -> torch.Tensor:
    """(S, width): numbers that tell token and column."""
    return offset + torch.arange(tokens)[:, None] + torch.arange(width) / 100


def exchange(worker: Any, size: int, tokens: int) -> dict[str, Any]:
    """The values that a rank of a group gets; their whole numbers and fractions tell where each came from."""
    from mmrl.engine.machine.meeting import join_group
    from mmrl.engine.network.sequence import SequenceGroup

    join_group("cpu")
    group = SequenceGroup.joined(size)
    number = torch.distributed.get_rank() // size
    whole = row(tokens, size * FEATURES, 1000 * number)
    own = whole[group.own(tokens)].clone().requires_grad_()
    parts = group.to_parts(own.unflatten(1, (size, FEATURES)).transpose(0, 1), tokens)
    # Each rank weighs its part by its own number; the product goes back to the tokens.
    back = group.to_tokens(parts * (group.rank + 1))
    back.transpose(0, 1).flatten(1).mul(row(tokens, size * FEATURES, 0)[group.own(tokens)]).sum().backward()
    added = torch.full((2,), 10.0**group.rank, requires_grad=True)
    summed = group.summed(added)
    (summed * (group.rank + 1)).sum().backward()
    given = torch.full((2,), 10.0**group.rank, requires_grad=True)
    shared = group.shared(given)
    (shared * (group.rank + 1)).sum().backward()
    return {
        "place": (number, group.rank, group.size),
        "bounds": group.bounds(tokens),
        "parts": parts.detach(),
        "back": back.detach(),
        "gradient": own.grad,
        "summed": (summed.detach(), added.grad),
        "shared": (shared.detach(), given.grad),
    }
