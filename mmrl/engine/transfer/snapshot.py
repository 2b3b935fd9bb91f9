"""The weights of one version in the host's memory, as one row of bytes in buckets of equal size."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.errors import ResourceError

BUCKET_BYTES = 2**26
"""Bytes of a bucket, all of which travel in one broadcast. Only the last one of a version has fewer."""
ALIGNED = 16
"""Each weight begins at a multiple of so many bytes, so that a view of a bucket can have its type."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight's place in the row of bytes.

    Attributes:
        names: Its state-dict names: several, if it is tied.
        begin: Its first byte.
        dtype: Name of torch's element type.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    begin: int

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.begin + math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def as_json(self) -> list[Any]:
        return [self.names, self.shape, self.dtype, self.begin]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> Weight:
        names, shape, dtype, begin = found
        return cls(tuple(names), tuple(shape), dtype, begin)


@dataclass(slots=True)
class Snapshot:
    """All weights of a version.

    Attributes:
        weights: In the order in which they are sent.
        buckets: (BUCKET_BYTES,) uint8 each, in the host's memory; page-locked beside a GPU.
    """

    version: int
    weights: list[Weight] = field(default_factory=list)
    buckets: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        return self.weights[-1].end if self.weights else 0

    def sent_buckets(self) -> Iterator[torch.Tensor]:
        """The buckets without what lies behind the last weight."""
        for bucket, size in zip(self.buckets, bucket_sizes(self.num_bytes), strict=True):
            yield bucket[:size]

    def fill(self, named: Iterable[tuple[str, torch.Tensor]], spare: list[torch.Tensor]) -> None:
        """Copy weights in; a tied one comes under each of its names, one directly after the other.

        Args:
            spare: Buckets to use before new memory is taken.
        """
        last: torch.Tensor | None = None
        for name, weight in named:
            if weight is last:
                tied = self.weights.pop()
                self.weights.append(Weight((*tied.names, name), tied.shape, tied.dtype, tied.begin))
                continue
            last = weight
            begin = -(-self.num_bytes // ALIGNED) * ALIGNED
            self.weights.append(Weight((name,), tuple(weight.shape), str(weight.dtype).removeprefix("torch."), begin))
            self._write(weight.contiguous().reshape(-1).view(torch.uint8), begin, spare)

    def _write(self, data: torch.Tensor, begin: int, spare: list[torch.Tensor]) -> None:
        done = 0
        while done < len(data):
            number, offset = divmod(begin + done, BUCKET_BYTES)
            if number == len(self.buckets):
                locked = data.device.type == "cuda"
                new = spare.pop() if spare else torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=locked)
                self.buckets.append(new)
            part = data[done : done + BUCKET_BYTES - offset]
            self.buckets[number][offset : offset + len(part)].copy_(part)
            done += len(part)


class Snapshots:
    """The versions that a rank keeps for the sampler; used by the thread that makes them and the one that sends them.

    The memory of a version that is dropped is used for the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, Snapshot] = {}
        self._spare: list[torch.Tensor] = []

    @property
    def versions(self) -> list[int]:
        """Those that are kept, in ascending order."""
        with self._lock:
            return sorted(self._kept)

    def take(self, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep a copy of weights as this version."""
        made = Snapshot(version)
        made.fill(named, self._spare)
        with self._lock:
            self._kept[version] = made

    def of(self, version: int) -> Snapshot:
        """The snapshot of a version.

        Raises:
            ResourceError: It is not kept.
        """
        with self._lock:
            if version not in self._kept:
                kept = ", ".join(map(str, sorted(self._kept))) or "none"
                raise ResourceError(
                    f"the learner does not keep version {version} of the weights", where=f"kept versions: {kept}"
                )
            return self._kept[version]

    def drop_before(self, version: int) -> None:
        """Drop all versions before this one."""
        with self._lock:
            for old in [each for each in self._kept if each < version]:
                self._spare += self._kept.pop(old).buckets


def bucket_sizes(num_bytes: int) -> list[int]:
    """The bytes of each bucket of so many bytes in all."""
    whole, rest = divmod(num_bytes, BUCKET_BYTES)
    return [BUCKET_BYTES] * whole + [rest] * bool(rest)


def unpacked(weights: Sequence[Weight], buckets: Iterator[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of buckets that come one by one, each under all of its names.

    A weight within a bucket is a view of it, and one that reaches over several has memory of its own.
    """
    number, bucket = -1, torch.empty(0, dtype=torch.uint8)
    for weight in weights:
        pieces, place = list[torch.Tensor](), weight.begin
        while place < weight.end:
            if place // BUCKET_BYTES != number:
                number, bucket = number + 1, next(buckets)
            offset = place - number * BUCKET_BYTES
            pieces.append(bucket[offset : offset + weight.end - place])
            place += len(pieces[-1])
        data = pieces[0] if len(pieces) == 1 else torch.cat([bucket[:0], *pieces])
        tensor = data.view(dtype_of(weight.dtype)).view(weight.shape)
        for name in weight.names:
            yield name, tensor


def checksum(bucket: torch.Tensor) -> int:
    """A number that changes with any byte of a bucket and with its place, made on the device where the bucket is.

    Both ends have the same kind of device. A CPU's way is ten times faster there than the other one.
    """
    return zlib.crc32(bucket.numpy().data) if bucket.device.type == "cpu" else weighted_sum(bucket)


def weighted_sum(bucket: torch.Tensor) -> int:
    """The sum of a bucket's 64-bit words, each times an odd number that tells its place; it wraps around."""
    padding = -len(bucket) % 8
    words = torch.nn.functional.pad(bucket, (0, padding)).view(torch.int64)
    places = torch.arange(1, 2 * len(words), 2, device=words.device)
    return int((words * places).sum())


def total_checksum(sums: Iterable[int]) -> int:
    """One number of the buckets' checksums, in order."""
    total = 0
    for each in sums:
        total = (total * 0x9E3779B97F4A7C15 + each) % 2**64
    return total


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def as_mapping(snapshot: Snapshot) -> Mapping[str, Any]:
    """The version and its weights' places, which a receiver has to know before the buckets, as JSON can hold them."""
    return {"version": snapshot.version, "weights": [weight.as_json() for weight in snapshot.weights]}
