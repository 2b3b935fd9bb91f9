"""Sequence parallelism: neighbouring ranks that hold the tokens of one packed row together.

Layers that compute each token by itself work on a rank's own tokens. A layer in which tokens see each other divides its
heads instead: one exchange gives each rank all tokens of its own heads, and another one gives the outputs back
(DeepSpeed Ulysses; Jacobs et al., 2023, arXiv:2309.14509, section 3.1).

Each rank takes the gradient of its own tokens alone, and the sum over the ranks is the row's.

Letters: ``S`` tokens of the row, ``O`` those that this rank holds, ``R`` ranks of the group, ``F`` numbers that a rank
gets of each token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks of a row, as one of them sees it. Its ranks make the same calls in the same order, with one row.

    Attributes:
        rank: This rank's place in the group.
        size: Ranks of the group; 1 for a rank that holds whole rows, and then nothing is exchanged.
        ranks: The process group; None for a group of one.
    """

    rank: int = 0
    size: int = 1
    ranks: Any = None

    @classmethod
    def joined(cls, size: int) -> SequenceGroup:
        """This rank's group: neighbouring ranks of the world, ``size`` each; all ranks of the world call it together.

        Args:
            size: Divides the number of ranks.
        """
        if size == 1:
            return ALONE
        world, own = dist.get_world_size(), dist.get_rank()
        assert world % size == 0, f"{size} does not divide {world} ranks"
        groups = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
        return cls(own % size, size, groups[own // size])

    def bounds(self, tokens: int) -> list[int]:
        """The first token of each rank in a row of so many tokens, and the row's end: rank i holds tokens ``i S // R``
        to ``(i + 1) S // R``. A cut may go through an image or a completion."""
        return [rank * tokens // self.size for rank in range(self.size + 1)]

    def own(self, tokens: int) -> slice:
        """The tokens that this rank holds of a row of so many."""
        return slice(*self.bounds(tokens)[self.rank : self.rank + 2])

    def part(self, count: int) -> slice:
        """This rank's part of so many neighbours, such as heads, which the group's size divides."""
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def to_parts(self, own_ROF: torch.Tensor, tokens: int) -> torch.Tensor:
        """(S, F): this rank's part of all tokens, of ``own_ROF``, each rank's part of own tokens; with gradient.

        Args:
            tokens: Tokens of the row.
        """
        return cast(torch.Tensor, _ToParts.apply(own_ROF, self.bounds(tokens), self))  # type: ignore[no-untyped-call]

    def to_tokens(self, part_SF: torch.Tensor) -> torch.Tensor:
        """(R, O, F): each rank's part of this rank's tokens, of ``part_SF``, this rank's part of all; with gradient."""
        bounds = self.bounds(len(part_SF))
        return cast(torch.Tensor, _ToTokens.apply(part_SF, bounds, self))  # type: ignore[no-untyped-call]

    def summed(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, whose gradient each rank passes on as it is.

        So a loss that all ranks compute of the sum gives each rank the gradient of what it has added.
        """
        return own if self.size == 1 else cast(torch.Tensor, _Summed.apply(own, self))  # type: ignore[no-untyped-call]

    def shared(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, whose gradient is the sum of the ranks' gradients.

        So what one rank has computed for all of them gets the gradient of all uses.
        """
        return own if self.size == 1 else cast(torch.Tensor, _Shared.apply(own, self))  # type: ignore[no-untyped-call]


ALONE = SequenceGroup()
"""A rank that holds whole rows."""


def divide_rows(model: Any) -> None:
    """Let a transformers model compute this rank's tokens of a row alone, from its text decoder on.

    Image features are in their places then, so a cut may go through an image.
    """
    model.get_decoder().register_forward_pre_hook(_own_inputs, with_kwargs=True)


TOKEN_AXES = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "per_layer_inputs": 1, "visual_pos_masks": 1}
"""The axis of a decoder's inputs along which tokens lie."""


def _own_inputs(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A decoder's arguments for this rank's tokens."""
    layout = named.get("layout")
    if layout is None or layout.group.size == 1:
        return None
    own = layout.group.own(layout.tokens)
    found = dict(named)
    if (mask_1S := named.get("visual_pos_masks")) is not None and named.get("deepstack_visual_embeds"):
        first, count = (int(mask_1S[:, part].sum()) for part in (slice(own.start), own))
        found["deepstack_visual_embeds"] = [x[first : first + count] for x in named["deepstack_visual_embeds"]]
    for name, axis in TOKEN_AXES.items():
        if (value := named.get(name)) is not None:
            # A copy, which does not keep the whole row in memory.
            found[name] = value.narrow(axis, own.start, own.stop - own.start).clone()
    return args, found


class _ToParts(torch.autograd.Function):
    """``SequenceGroup.to_parts``; its gradient is the other exchange."""

    @staticmethod
    def forward(ctx: Any, own_ROF: torch.Tensor, bounds: list[int], group: SequenceGroup) -> torch.Tensor:
        ctx.bounds, ctx.group = bounds, group
        return _to_parts(own_ROF, bounds, group)

    @staticmethod
    def backward(ctx: Any, gradient_SF: torch.Tensor) -> Any:
        return _to_tokens(gradient_SF, ctx.bounds, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    """``SequenceGroup.to_tokens``; its gradient is the other exchange."""

    @staticmethod
    def forward(ctx: Any, part_SF: torch.Tensor, bounds: list[int], group: SequenceGroup) -> torch.Tensor:
        ctx.bounds, ctx.group = bounds, group
        return _to_tokens(part_SF, bounds, group)

    @staticmethod
    def backward(ctx: Any, gradient_ROF: torch.Tensor) -> Any:
        return _to_parts(gradient_ROF, ctx.bounds, ctx.group), None, None


class _Summed(torch.autograd.Function):
    """``SequenceGroup.summed``."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        return _sum(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Shared(torch.autograd.Function):
    """``SequenceGroup.shared``."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return _sum(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _sum(gradient, ctx.group), None


def _to_parts(own_ROF: torch.Tensor, bounds: list[int], group: SequenceGroup) -> torch.Tensor:
    R, own, width = own_ROF.shape
    found_SF = own_ROF.new_empty(bounds[-1], width)
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    dist.all_to_all_single(found_SF, own_ROF.contiguous().flatten(0, 1), lengths, [own] * R, group=group.ranks)
    return found_SF


def _to_tokens(part_SF: torch.Tensor, bounds: list[int], group: SequenceGroup) -> torch.Tensor:
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    own = lengths[group.rank]
    found = part_SF.new_empty(group.size * own, part_SF.shape[1])
    dist.all_to_all_single(found, part_SF.contiguous(), [own] * group.size, lengths, group=group.ranks)
    return found.view(group.size, own, part_SF.shape[1])  # which -1 could not be of a rank without tokens


def _sum(own: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    total = own.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.ranks)
    return total
