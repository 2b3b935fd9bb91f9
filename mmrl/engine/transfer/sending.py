"""The thread of learner rank 0 that sends weights while the learner goes on."""

from __future__ import annotations

import atexit
import json
import threading
from contextlib import suppress
from typing import Any

import torch

from mmrl.engine import device
from mmrl.engine.transfer.order import Order, order_key
from mmrl.engine.transfer.snapshot import Snapshot, Snapshots, as_mapping, checksum, total_checksum
from mmrl.engine.transfer.weights_group import ROOT, WeightsGroup, awaited, client_of, told
from mmrl.system import failpoints

LOOK_S = 0.02
"""Seconds between two looks for an order."""


class WeightsSender:
    """Answers the orders of the ranks that sample, one after the other, from a thread of its own.

    A failure ends the order, and not the thread: the ranks that sample may be started again, as another group.

    Args:
        store: The master's store, which lives as long as this object.
        address: Its address, and ``port`` its port.
        size: The number of ranks that sample.
    """

    def __init__(
        self, kind: device.DeviceKind, snapshots: Snapshots, store: Any, address: str, port: int, size: int
    ) -> None:
        self._kind, self._snapshots, self._size = kind, snapshots, size
        self._master = store
        self._store = client_of(address, port)
        self._group: WeightsGroup | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Answer no more orders."""
        self._ends.set()
        self._thread.join(1.0)

    def _serve(self) -> None:
        number = 0
        while not self._ends.is_set():
            if self._store.check([order_key(number)]):
                self._answer(Order(**awaited(self._store, order_key(number))))
            elif not self._store.check([order_key(number + 1)]):
                self._ends.wait(LOOK_S)
                continue
            number += 1  # a rank may have ended before it gave its order, and the next one has another number

    def _answer(self, order: Order) -> None:
        try:
            snapshot = self._snapshots.of(order.version)
            self._store.set(order.answer, json.dumps(as_mapping(snapshot)))
            self._send(order, snapshot)
        except BaseException as error:
            with suppress(RuntimeError):
                self._store.set(order.fault, json.dumps(told(error)))
                if not self._store.check([order.answer]):
                    self._store.set(order.answer, json.dumps({"fault": told(error)}))
            self._leave()
            return
        self._snapshots.drop_before(order.version)

    def _send(self, order: Order, snapshot: Snapshot) -> None:
        group, sums = self._joined(order), list[int]()
        for bucket in snapshot.sent_buckets():
            failpoints.reach("weights.send")
            moved = bucket.to(group.torch_device, non_blocking=True)
            transfer = group.broadcast(moved)
            sums.append(checksum(moved))
            transfer.result()
        self._store.set(order.checksum, json.dumps(total_checksum(sums)))

    def _joined(self, order: Order) -> WeightsGroup:
        """The group of the order's generation."""
        if self._group is not None and self._group.generation != order.generation:
            self._leave()
        if self._group is None:
            if self._kind == "cuda":
                torch.cuda.set_device(0)  # of this thread
            self._group = WeightsGroup(self._kind, self._store, ROOT, self._size + 1, order.generation)
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
