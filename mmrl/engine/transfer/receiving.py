"""A sampler rank's end of the weights' group: orders a version, and takes it weight by weight."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from mmrl.engine import device
from mmrl.engine.transfer.order import Meeting, Order
from mmrl.engine.transfer.snapshot import Weight, bucket_sizes, checksum, total_checksum, unpacked
from mmrl.engine.transfer.weights_group import WeightsGroup, awaited, client_of, told
from mmrl.errors import MMRLError, NumericsError, RankLostError
from mmrl.system import failpoints


class WeightsReceiver:
    """Receives weights in the process of a rank that samples."""

    def __init__(self, kind: device.DeviceKind, meeting: Meeting) -> None:
        self._kind, self._meeting = kind, meeting
        self._store: Any = None
        self._group: WeightsGroup | None = None

    def weights(self, order: Order) -> Generator[tuple[str, torch.Tensor]]:
        """The weights of a version under their state-dict names, as a sampler loads them.

        All ranks that sample give the same order; the first one of them gives it to the learner.

        Raises:
            RankLostError: They have not come, or not all of them.
            NumericsError: Others have come than were sent.
        """
        with self._told(order):
            answer = self._answer(order)
            weights, sums = [Weight.from_json(each) for each in answer["weights"]], list[int]()
            yield from unpacked(weights, self._buckets(order, weights, sums))
            sent, found = awaited(self._store, order.checksum), total_checksum(sums)
            if sent is None:
                raise TimeoutError("no checksum has come")
        if sent != found:
            raise NumericsError(
                f"other weights of version {order.version} have arrived than were sent",
                where=f"sampler rank {self._meeting.rank}: checksum {found} in place of {sent}",
                remedy="look at the network between the nodes, and at the memory of both machines",
            )

    def _answer(self, order: Order) -> Mapping[str, Any]:
        if self._store is None:
            self._store = client_of(self._meeting.address, self._meeting.port)
        if self._meeting.rank == 0:
            self._store.set(order.key, json.dumps(asdict(order)))
        answer: Mapping[str, Any] | None = awaited(self._store, order.answer)
        if answer is None:
            raise TimeoutError("the learner does not answer")
        if "fault" in answer:
            raise RuntimeError(answer["fault"])
        return answer

    def _buckets(self, order: Order, weights: list[Weight], sums: list[int]) -> Iterator[torch.Tensor]:
        """Buckets as they come; the next one is under way while the caller has one.

        Args:
            sums: Takes the checksum of each.
        """
        group = self._joined(order)
        sizes = bucket_sizes(weights[-1].end if weights else 0)
        empty = (torch.empty(size, dtype=torch.uint8, device=group.torch_device) for size in sizes)
        # Each has memory of its own, since the sampler may keep what it was given for a while.
        coming = [group.broadcast(bucket) for bucket in (next(empty, None),) if bucket is not None]
        while coming:
            failpoints.reach("weights.receive")
            bucket = coming.pop().result()
            if (following := next(empty, None)) is not None:
                coming.append(group.broadcast(following))
            sums.append(checksum(bucket))
            yield bucket

    def _joined(self, order: Order) -> WeightsGroup:
        """The group of the order's generation."""
        if self._group is not None and self._group.generation != order.generation:
            self._leave()
        if self._group is None:
            own = self._meeting
            self._group = WeightsGroup(self._kind, self._store, own.rank + 1, own.size + 1, order.generation)
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    @contextmanager
    def _told(self, order: Order) -> Iterator[None]:
        """Turn what the transfer fails with into an error that says between which sides."""
        try:
            yield
        except GeneratorExit:  # the sampler has given up: what is on its way belongs to no later order
            self._leave()
            raise
        except MMRLError:
            raise
        except (RuntimeError, OSError) as error:
            reason, backend = told(error), device.process_group_backend(self._kind)
            self._leave()
            try:
                if self._store is not None and self._store.check([order.fault]):
                    reason = f"{reason}; the learner's side: {json.loads(self._store.get(order.fault))}"
            except RuntimeError:
                reason = f"{reason}; the learner's rank 0 is gone, or its node cannot be reached"
            raise RankLostError(
                f"the weights of version {order.version} have not arrived: {reason}",
                where=f"from learner rank 0 to sampler rank {self._meeting.rank}, over {backend}",
                remedy="see that both sides run and reach each other",
            ) from error
