"""Weights travel whole between threads that are the learner and its samplers, or an error says why they do not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mmrl.cluster.process import host_meeting
from mmrl.engine.transfer import receiving, snapshot, weights_group
from mmrl.engine.transfer.order import Meeting, Order
from mmrl.engine.transfer.receiving import WeightsReceiver
from mmrl.engine.transfer.sending import WeightsSender
from mmrl.engine.transfer.snapshot import Snapshot, Snapshots, checksum, weighted_sum
from mmrl.errors import NumericsError, RankLostError
from mmrl.system import failpoints

Named = list[tuple[str, torch.Tensor]]
BUCKET = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a page, and short patience."""
    monkeypatch.setattr(snapshot, "BUCKET_BYTES", BUCKET)
    monkeypatch.setattr(weights_group, "WAIT_S", 3.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def weights(seed: int) -> Named:
    """Weights of several types and sizes, with a tied one; some reach over buckets, one over three of them."""
    torch.manual_seed(seed)
    tied = torch.randn(30, 7)
    return [
        ("embed", tied),
        ("head", tied),
        ("empty", torch.zeros(0, 3)),
        ("odd", torch.randn(5, dtype=torch.bfloat16)),
        ("long", torch.randn(50, 51)),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("turned", torch.randn(40, 13, dtype=torch.bfloat16).T),
        ("exact", torch.randn(BUCKET // 4)),
        ("last", torch.randn(3)),
    ]


class Line:
    """A sender and its receivers, each in a thread."""

    def __init__(self, size: int) -> None:
        bound = socket.create_server(("127.0.0.1", 0))
        self.snapshots, self.size, self.port = Snapshots(), size, bound.getsockname()[1]
        self.sender = WeightsSender("cpu", self.snapshots, host_meeting(bound), "127.0.0.1", self.port, size)
        self.receivers = [WeightsReceiver("cpu", Meeting("127.0.0.1", self.port, rank, size)) for rank in range(size)]
        self.threads = ThreadPoolExecutor(size)
        self.number = 0

    def begin(self, version: int, generation: int = 0, taken: Callable[[int], Any] = list) -> list[Future[Any]]:
        """All receivers order a version; ``taken`` makes something of what comes, by receiver."""
        order = Order(self.number, generation, version)
        self.number += 1
        return [
            self.threads.submit(lambda own=own, rank=rank: taken(rank, own.weights(order)))  # type: ignore[misc]
            for rank, own in enumerate(self.receivers)
        ]

    def take(self, version: int, generation: int = 0) -> list[Named]:
        calls = self.begin(version, generation, lambda rank, coming: list(coming))  # type: ignore[call-arg, misc]
        return [call.result(timeout=60) for call in calls]

    def started_again(self, rank: int) -> None:
        self.receivers[rank] = WeightsReceiver("cpu", Meeting("127.0.0.1", self.port, rank, self.size))


@pytest.fixture
def line() -> Iterator[Callable[[int], Line]]:
    lines: list[Line] = []

    def make(size: int) -> Line:
        lines.append(Line(size))
        return lines[-1]

    yield make
    for each in lines:
        each.sender.stop()
        each.threads.shutdown(wait=False)


@pytest.fixture
def break_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls a function when a failpoint is reached for the n-th time."""

    def arm(point: str, count: int, then: Callable[[], None]) -> None:
        left, lock = [count], threading.Lock()

        def inject(name: str) -> None:
            with lock:
                left[0] -= name == point
                is_due = name == point and left[0] == 0
            if is_due:
                then()

        monkeypatch.setattr(failpoints, "inject", inject)

    return arm


def equal(found: Named, sent: Named) -> bool:
    return [name for name, _ in found] == [name for name, _ in sent] and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for (_, a), (_, b) in zip(found, sent, strict=True)
    )


@pytest.mark.parametrize("size", [1, 3])
def test_weights_of_every_size_arrive_bit_for_bit(size: int, line: Callable[[int], Line]) -> None:
    own = line(size)
    for version in range(3):
        own.snapshots.take(version, weights(version))
        found = own.take(version)
        assert len(found) == size and all(equal(each, weights(version)) for each in found)
    snapshot_ = own.snapshots.of(2)
    assert len(snapshot_.buckets) == -(-snapshot_.num_bytes // BUCKET) == 4
    assert snapshot_.weights[0].names == ("embed", "head")  # sent once


def test_a_version_is_kept_until_a_later_one_has_arrived(line: Callable[[int], Line]) -> None:
    """With a slow sampler, which takes versions long after they are there, and with a fast one."""
    own = line(1)
    for version in range(3):
        own.snapshots.take(version, weights(version))
    for version, kept in [(0, [0, 1, 2]), (1, [1, 2]), (2, [2])]:
        assert equal(own.take(version)[0], weights(version))
        deadline = time.monotonic() + 10
        while own.snapshots.versions != kept and time.monotonic() < deadline:
            time.sleep(0.01)
        assert own.snapshots.versions == kept
    memory = {bucket.data_ptr() for bucket in own.snapshots._spare}
    own.snapshots.take(3, weights(3))
    assert {bucket.data_ptr() for bucket in own.snapshots.of(3).buckets} <= memory  # of the versions that were dropped
    assert equal(own.take(3)[0], weights(3))


def test_a_snapshot_does_not_move_with_the_weights() -> None:
    sent = weights(0)
    made = Snapshot(0)
    made.fill(sent, [])
    sums = [checksum(bucket) for bucket in made.sent_buckets()]
    for _, weight in sent:
        weight.zero_()
    assert [checksum(bucket) for bucket in made.sent_buckets()] == sums


def test_a_version_that_is_not_kept_is_refused_and_the_next_order_is_served(line: Callable[[int], Line]) -> None:
    own = line(2)
    own.snapshots.take(4, weights(4))
    for call in own.begin(3, taken=lambda rank, coming: list(coming)):  # type: ignore[call-arg, misc]
        with pytest.raises(RankLostError, match=r"version 3 .*does not keep version 3"):
            call.result(timeout=60)
    assert all(equal(found, weights(4)) for found in own.take(4))


def test_an_order_that_was_never_given_holds_no_later_one_up(line: Callable[[int], Line]) -> None:
    own = line(1)
    own.snapshots.take(0, weights(0))
    own.number = 1  # the rank that was to give order 0 has ended
    assert equal(own.take(0)[0], weights(0))


def test_a_sampler_that_never_takes_is_an_error_for_all_and_a_new_group_works(line: Callable[[int], Line]) -> None:
    own = line(2)
    own.snapshots.take(0, weights(0))
    assert all(equal(found, weights(0)) for found in own.take(0))
    own.snapshots.take(1, [("large", torch.randn(2**22))])
    released = threading.Event()

    def taken(rank: int, coming: Iterator[Any]) -> Any:
        if rank == 1:
            released.wait(30)
            return None
        return list(coming)

    began = time.monotonic()
    first, second = own.begin(1, taken=taken)  # type: ignore[arg-type]
    with pytest.raises(RankLostError, match="version 1 have not arrived") as caught:
        first.result(timeout=60)
    assert "from learner rank 0 to sampler rank 0, over gloo" in caught.value.where
    assert time.monotonic() - began < 30
    released.set()
    second.result(timeout=60)
    own.started_again(1)
    found = own.take(1, generation=1)
    assert all(torch.equal(each[0][1], own_weight) for each in found for own_weight in [found[0][0][1]])


def test_a_sender_that_fails_in_the_middle_tells_why(line: Callable[[int], Line], break_at: Any) -> None:
    own = line(2)
    own.snapshots.take(0, weights(0))

    def fail() -> None:
        raise MemoryError("no room for a bucket")

    break_at("weights.send", 3, fail)
    for call in own.begin(0, taken=lambda rank, coming: list(coming)):  # type: ignore[call-arg, misc]
        with pytest.raises(RankLostError, match="version 0 have not arrived") as caught:
            call.result(timeout=60)
        assert "the learner's side: MemoryError: no room for a bucket" in str(caught.value)
    assert all(equal(found, weights(0)) for found in own.take(0, generation=1))


def test_a_sampler_that_gives_up_in_the_middle_leaves_nothing_for_the_next_version(
    line: Callable[[int], Line],
) -> None:
    own = line(1)
    own.snapshots.take(0, weights(0))

    def taken(rank: int, coming: Any) -> None:
        next(coming)
        coming.close()

    own.begin(0, taken=taken)[0].result(timeout=60)  # type: ignore[arg-type]
    own.snapshots.take(1, weights(1))
    assert equal(own.take(1, generation=1)[0], weights(1))


def test_other_weights_than_were_sent_are_found(line: Callable[[int], Line], monkeypatch: pytest.MonkeyPatch) -> None:
    own = line(1)
    own.snapshots.take(0, weights(0))

    def spoiled(bucket: torch.Tensor) -> int:
        bucket[7] ^= 1
        return checksum(bucket)

    monkeypatch.setattr(receiving, "checksum", spoiled)
    (call,) = own.begin(0, taken=lambda rank, coming: list(coming))  # type: ignore[call-arg, misc]
    with pytest.raises(NumericsError, match="other weights of version 0"):
        call.result(timeout=60)


@pytest.mark.parametrize("checksum", [checksum, weighted_sum])
def test_a_checksum_sees_a_swap_and_a_bit(checksum: Callable[[torch.Tensor], int]) -> None:
    data = torch.arange(64, dtype=torch.uint8)
    swapped, flipped = data.clone(), data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    flipped[63] ^= 128
    assert len({checksum(each) for each in (data, swapped, flipped)}) == 3
    assert checksum(data[:61]) == checksum(data[:61].clone()) != checksum(data[1:62])
