"""Hashes by which weights are found again in another engine, whatever it has fused, split or packed.

A weight matrix is hashed row by row: engines stack matrices (q, k and v; gate and up; experts) and reorder their rows,
and the rows stay. Tensor-parallel ranks that split rows hold whole parts of them, which are hashed too. A kernel that
packs the elements of a tensor in another order keeps their sum, which is the third hash. Sums of 64-bit integers wrap
around, so they are exact in any order. Vectors, such as biases, are few and are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.engine.network import adapters, quantization
from mmrl.engine.network.policy import Policy, gathered

ROWS_AT_ONCE = 2**22
"""Elements that are hashed at a time; they take eight bytes each."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class WeightHashes:
    """Hashes of all weights that a model computes with.

    Attributes:
        rows: Hashes of each row of each weight.
        sums: Hashes of each matrix as a whole, whatever the order of its elements; zeros do not count.
        vectors: The bytes of each weight of one dimension.
    """

    rows: set[int] = field(default_factory=set)
    sums: set[int] = field(default_factory=set)
    vectors: set[bytes] = field(default_factory=set)

    @classmethod
    def of(cls, model: torch.nn.Module, dtype: torch.dtype) -> WeightHashes:
        """The hashes of a model of transformers' or vLLM's."""
        found = cls()
        for weight in held_weights(model):
            if weight.dim() < 2:
                found.vectors.add(_bytes(weight, dtype))
            else:
                found.rows.update(row_hashes(weight, dtype))
                found.sums.add(sum_hash(weight, dtype))
        return found

    def add(self, other: WeightHashes) -> None:
        """Take over what another rank holds."""
        self.rows |= other.rows
        self.sums |= other.sums
        self.vectors |= other.vectors

    def holds(self, weight: torch.Tensor, dtype: torch.dtype, parts: int) -> bool:
        """True if the weight is here.

        Args:
            parts: Ranks of which each may hold a part of it.
        """
        width = weight.shape[-1] if weight.dim() else 1
        ways = [[weight], list(weight.chunk(parts, -1)) if parts > 1 and width % parts == 0 else []]
        if weight.dim() == 1 and parts > 1 and width % (3 * parts) == 0:  # q, k and v in one, each of them in parts
            ways.append(list(weight.chunk(3 * parts)))
        if weight.dim() == 3:  # experts, turned
            turned = weight.transpose(1, 2)
            ways += [[turned], list(turned.chunk(parts, -1)) if parts > 1 and turned.shape[-1] % parts == 0 else []]
        if any(way and all(self._has(part, dtype) for part in way) for way in ways):
            return True
        sums = [[sum_hash(weight, dtype)]] if weight.dim() > 1 else []
        sums += split_sums(weight, dtype, parts) if weight.dim() == 3 and parts > 1 else []
        return any(self.sums.issuperset(way) for way in sums)

    def _has(self, weight: torch.Tensor, dtype: torch.dtype) -> bool:
        if weight.dim() > 1:
            return self.rows.issuperset(row_hashes(weight, dtype))
        sought = _bytes(weight, dtype)
        return any(sought in vector for vector in self.vectors)


def held_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Each weight of a model, as its layers compute with it.

    vLLM packs linear layers for a CPU and drops their matrices. The layer itself gives the matrix back: its answer to
    the unit matrix is the transposed one, exactly.
    """
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if (weight := own.get("weight")) is not None and weight.numel() == 0:
            del own["weight"]
            yield _read_back(module)
        yield from (parameter.detach() for parameter in own.values() if parameter.numel())


@torch.no_grad()
def _read_back(layer: Any) -> torch.Tensor:
    """(out, in) weights of a linear layer of vLLM's."""
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    weight = layer.weight
    unit = torch.eye(width, dtype=weight.dtype, device=weight.device)
    return torch.cat([layer.quant_method.apply(layer, part, None) for part in unit.split(256)]).T


def learner_weights(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight that rows reach, by each of its names, one at a time, as the sampler must have it; collective.

    This goes over the model itself, and not over what a weight sync sends.
    """
    adapted = {id(adapter.weight): adapter for adapter in policy.adapted}
    packed = {id(layer.weight): layer for layer in quantization.packed_layers(policy.model)}
    factors = {id(factor) for adapter in policy.adapted for factor in adapter.factors.values()}
    for name, parameter in policy.model.named_parameters(remove_duplicate=False):
        if id(parameter) in factors or not policy.family.uses(name):
            continue
        adapter: adapters.Adapter | None = adapted.get(id(parameter))
        with gathered(parameter, *(adapter.factors.values() if adapter else ())):
            if adapter is not None:
                weight = adapter.merged(dtype)
            elif layer := packed.get(id(parameter)):
                weight = layer.unpacked().to(dtype)
            else:
                weight = parameter.detach().to(dtype)
            yield name.replace(".base_layer.", "."), weight


def as_rows(weight: torch.Tensor) -> torch.Tensor:
    """A weight as a matrix: of experts all rows, of a convolution one row for each of its outputs."""
    return weight.flatten(0, 1) if weight.dim() == 3 else weight.flatten(1)


def row_hashes(weight: torch.Tensor, dtype: torch.dtype) -> list[int]:
    """A hash of each row, by the bits of its elements in a type."""
    matrix = as_rows(weight)
    places = torch.arange(matrix.shape[1], device=matrix.device) * 2 + 1
    factors = _mixed(places)
    found = list[int]()
    for part in matrix.split(max(ROWS_AT_ONCE // max(matrix.shape[1], 1), 1)):
        found += (_mixed(_bits(part, dtype)) * factors).sum(1).tolist()
    return found


def sum_hash(weight: torch.Tensor, dtype: torch.dtype) -> int:
    """A hash of all elements in any order, of which zeros are no part."""
    return sum(int(_mixed(_bits(part, dtype)).sum()) for part in weight.flatten().split(ROWS_AT_ONCE)) % 2**64


def split_sums(experts: torch.Tensor, dtype: torch.dtype, parts: int) -> list[list[int]]:
    """Hashes as of ``sum_hash`` of the parts of experts that ranks hold, of each way in which they may be split: along
    either side, one piece each, or two where gates lie before the rest."""
    found = list[list[int]]()
    for side, pieces in ((side, pieces) for side in (1, 2) for pieces in (1, 2)):
        if experts.shape[side] % (parts * pieces) == 0:
            sums = [sum_hash(each, dtype) for each in experts.chunk(parts * pieces, side)]
            found.append([sum(sums[rank::parts]) % 2**64 for rank in range(parts)])
    return found


def _bytes(vector: torch.Tensor, dtype: torch.dtype) -> bytes:
    return _bits(vector.reshape(-1), dtype).to(_BITS[dtype.itemsize]).cpu().numpy().tobytes()


def _bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of elements as integers; both zeros are 0."""
    values = values.to(dtype) + 0.0
    return values.contiguous().view(_BITS[dtype.itemsize]).to(torch.int64)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Integers spread over 64 bits; 0 stays 0."""
    values = values * _ODD
    values = (values ^ (values >> 29)) * _ODD
    return values ^ (values >> 32)
