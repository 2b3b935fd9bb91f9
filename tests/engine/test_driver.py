"""NVIDIA's driver, from what nvidia-smi and the kernel say."""

from __future__ import annotations

import pytest

from mmrl.engine import driver
from mmrl.engine.driver import Driver, loaded_version, oldest_driver

OPEN_KERNEL = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
CLOSED_KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


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
