"""Ranks that do not come, or are not reached, and the interface that Gloo and NCCL are told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmrl.cluster.jobs import Rendezvous
from mmrl.cluster.process import host_meeting
from mmrl.cluster.worker import RankWorker
from mmrl.engine.machine import interfaces, meeting
from mmrl.engine.machine.interfaces import check_interfaces, interface_of, tell_interface
from mmrl.errors import DeviceMemoryError, ResourceError

ABSENT = """\
import faulthandler, os, sys, torch
from mmrl.engine.machine import meeting
faulthandler.dump_traceback_later(45, exit=True)  # the test then says where a rank waits
if os.environ["RANK"] == "0":
    try:
        meeting.join_group("cpu", come_s=40.0, reach_s=2.0)
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
    os._exit(1)  # at the interpreter's end, Gloo may wait for the sum that does not come
meeting.await_ranks(1, 2, 40.0)
torch.distributed.init_process_group("gloo")
sys.stdin.read()
"""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0's store, on a port of its own."""
    bound = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(bound.getsockname()[1]))
    return host_meeting(bound)


def test_ranks_that_do_not_come_are_named(store):
    store.set("mmrl/rank 2", "")
    with pytest.raises(ResourceError, match=r"do not find each other: rank 1, rank 3 did not come within 0.2 s") as e:
        meeting.await_ranks(0, 4, 0.2)
    assert e.value.exit_code == 5 and os.environ["MASTER_PORT"] in e.value.where


def test_ranks_that_come_find_each_other(store):
    other = threading.Thread(target=meeting.await_ranks, args=(1, 2, 20.0))
    other.start()
    meeting.await_ranks(0, 2, 20.0)
    other.join()


@pytest.mark.parametrize("fault", ["hangs", "raises"])
def test_a_rank_that_is_not_reached_is_an_error_with_the_interface(fault, monkeypatch):
    released = threading.Event()

    def sum_up(tensor: torch.Tensor) -> None:
        if fault == "raises":
            raise torch.distributed.DistBackendError("NCCL error: ncclSystemError, no route to host\nmore")
        released.wait()

    monkeypatch.setattr(torch.distributed, "all_reduce", sum_up)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=docker0")
    reason = "no answer within 0.1 s" if fault == "hangs" else "DistBackendError: NCCL error: .*, no route to host more"
    with pytest.raises(ResourceError, match=f"do not reach each other over nccl: {reason}\n") as caught:
        meeting.reach_ranks("cpu", 0.1)
    released.set()
    assert "NCCL_SOCKET_IFNAME==docker0" in caught.value.where and "lo" in caught.value.possible.split(", ")
    assert "set both variables" in caught.value.remedy


@pytest.mark.parametrize(
    ("error", "kind", "remedy"),
    [
        (
            torch.distributed.DistBackendError(
                "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, NCCL version 2.27.5\n"
                "Last error:\nError while creating shared memory segment /dev/shm/nccl-x (9637888), error: No space"
            ),
            ResourceError,
            "--ipc=host",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), DeviceMemoryError, "learner.offload"),
    ],
)
def test_a_first_sum_that_fails_for_another_reason_is_told_by_that(error, kind, remedy, monkeypatch):
    def fail(tensor: torch.Tensor) -> None:
        raise error

    monkeypatch.setattr(torch.distributed, "all_reduce", fail)
    with pytest.raises(kind) as caught:
        meeting.reach_ranks("cpu", 5)
    assert remedy in caught.value.remedy and "SOCKET_IFNAME" not in caught.value.remedy


@pytest.mark.full
def test_a_rank_that_joins_and_does_not_answer_ends_the_others_start(household, store):
    """Two processes with Gloo."""
    names = "MASTER_ADDR", "MASTER_PORT"
    shared = {name: os.environ[name] for name in names} | {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    place = {**household.environment, **shared, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, "-c", ABSENT], env={**place, "RANK": rank}, **pipes) for rank in ("0", "1")
    ]
    _, told = ranks[0].communicate(timeout=60)
    ranks[1].kill()  # it waits for its input
    told_by_other = ranks[1].communicate(timeout=60)[1]
    assert "do not reach each other over gloo: no answer within 2 s" in told, told + told_by_other
    assert "GLOO_SOCKET_IFNAME=lo" in told


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the variables, restored afterwards."""
    for name in interfaces.VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("named")
def test_gloo_and_nccl_are_told_one_interface_unless_the_user_has_named_another(monkeypatch):
    worker = SimpleNamespace(_kind="cpu")
    own = Rendezvous(1, 0, 2, "127.0.0.1", 29500, own_address="127.0.0.1", threads=None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    RankWorker._take(worker, own)  # type: ignore[arg-type]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"] = "eth1", "ib"
    tell_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1" and os.environ["NCCL_SOCKET_IFNAME"] == "ib"


@pytest.mark.parametrize(
    ("variable", "value", "is_there"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth7,ib0", True),
        ("NCCL_SOCKET_IFNAME", "enp", False),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "", True),
    ],
)
def test_an_interface_that_does_not_exist_is_refused_by_name(variable, value, is_there):
    if is_there:
        check_interfaces({variable: value}, ["eth0", "ib0", "lo"], "cuda")
        return
    with pytest.raises(ResourceError, match=f"{variable} names a network interface that .* does not have: ") as caught:
        check_interfaces({variable: value}, ["eth0", "ib0", "lo"], "cuda")
    assert caught.value.possible == "eth0, ib0, lo" and caught.value.exit_code == 5
    if variable.startswith("NCCL"):  # which no CPU uses
        check_interfaces({variable: value}, ["eth0", "ib0", "lo"], "cpu")
