"""NVIDIA's driver, from what nvidia-smi and the kernel say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.engine import device, driver
from mmrl.engine.driver import CudaFacts, Driver, loaded_version, oldest_driver, unused_gpu
from mmrl.errors import ResourceError

OPEN_KERNEL = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
CLOSED_KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12080)."
UNUSED = CudaFacts("2.13.0+cu130", "13.0", TOO_OLD, None, Driver("570.133.20"))
"""A machine whose driver does not know the CUDA that torch is built for."""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (None, Driver()),
        ("echo 580.1; echo 580.1", Driver("580.1")),
        ("echo NVIDIA-SMI has failed; exit 9", Driver(error="NVIDIA-SMI has failed")),
        ("exit 9", Driver(error="exit status 9")),
    ],
)
def test_the_driver_is_what_nvidia_smi_says_or_why_it_fails(script, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(driver, "DEVICES", tmp_path)
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert Driver.here() == expected
    assert Driver.here().has_gpu == (expected.version != "")


@pytest.mark.parametrize(("mode", "opens"), [(0o600, True), (None, False)])
def test_without_nvidia_smi_the_device_files_and_the_kernel_are_asked(mode, opens, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(driver, "DEVICES", tmp_path)
    (tmp_path / "version").write_text(OPEN_KERNEL)
    monkeypatch.setattr(driver, "LOADED", tmp_path / "version")
    if mode is None:
        (tmp_path / "nvidia0").mkdir()  # cannot be opened for writing, whoever asks
    else:
        (tmp_path / "nvidia0").touch(mode)
    (tmp_path / "nvidiactl").touch()  # no GPU's
    assert Driver.here() == Driver("580.65.06" if opens else "", opens=opens)
    assert Driver.here().has_gpu == opens


def test_a_driver_whose_gpus_are_all_kept_from_this_process_has_none():
    assert not Driver("580.1", "No devices were found", opens=True).has_gpu
    assert Driver("", "Failed to initialize NVML: Driver/library version mismatch", opens=True).has_gpu


@pytest.mark.parametrize(
    ("text", "version"), [(OPEN_KERNEL, "580.65.06"), (CLOSED_KERNEL, "535.104.05"), ("", ""), ("gcc 13.3.0", "")]
)
def test_the_kernels_account_holds_the_version(text, version):
    assert loaded_version(text) == version


@pytest.mark.parametrize(("cuda", "oldest"), [("13.0", 580), ("12.8", 525), ("11.8", 450), ("14.0", None), ("", None)])
def test_each_major_version_of_cuda_has_an_oldest_driver(cuda, oldest):
    assert oldest_driver(cuda) == oldest


def test_versions_are_compared_as_numbers():
    assert Driver("99.1").is_older_than(580) and Driver("579.99").is_older_than(580)
    assert not Driver("580.65.06").is_older_than(580) and not Driver("1000.1").is_older_than(580)
    assert not Driver("").is_older_than(580) and not Driver("[N/A]").is_older_than(580)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ["driver 570.133.20 is too old for CUDA 13.0", "torch 2.13.0+cu130", "from 580 on", "update the driver"]),
        ({"visible": "3"}, ["driver 570.133.20 is too old"]),  # as in a rank, which Ray has given a GPU
        ({"torch": "2.13.0+cpu", "cuda": ""}, ["built without CUDA", "driver 570.133.20", "install mmrl-train[gpu]"]),
        ({"driver": Driver("580.95.05"), "visible": "7", "error": ""}, ["does not say why", "DEVICES=7"]),
        (
            {"driver": Driver("580.95.05"), "error": "CUDA unknown error"},
            ["CUDA unknown error", "from 580"],
        ),
        (
            {"driver": Driver("", "Driver/library version mismatch", opens=True)},
            ["unknown version", "fails: Driver"],
        ),
        ({"cuda": "14.1", "driver": Driver("580.95.05")}, ["torch finds none", "built for CUDA 14.1"]),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_no_silent_cpu(changes, parts):
    message = str(unused_gpu(replace(UNUSED, **changes)))
    assert all(part in message for part in parts), message
    assert "CUDA_VISIBLE_DEVICES= mmrl" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"visible": ""},
        {"visible": "-1"},
        {"visible": "NoDevFiles"},
        {"driver": Driver()},
        {"driver": Driver(error="it could not communicate with the driver")},
        {"driver": Driver("580.95.05", "No devices were found", opens=True)},
    ],
)
def test_a_machine_without_a_gpu_or_a_user_who_wants_none_gets_the_cpu(changes):
    assert unused_gpu(replace(UNUSED, **changes)) is None


@pytest.fixture
def gpu_beside_a_cpu_build(tmp_path, monkeypatch):
    """An nvidia-smi that tells of a GPU, on the PATH of this process and of those that it starts."""
    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.95.05\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("gpu_beside_a_cpu_build")
def test_no_engine_starts_on_a_cpu_beside_an_unused_gpu(start, monkeypatch):
    monkeypatch.setattr("mmrl.cluster.local.RankEngine", None)  # it would fail otherwise
    with pytest.raises(ResourceError, match="the installed torch is built without CUDA") as caught:
        start()
    assert "580.95.05" in caught.value.where and torch.__version__ in caught.value.where
    device.check_gpu("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device.check_gpu("cpu")
