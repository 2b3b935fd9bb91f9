"""Rates of devices: known by exact name, or measured."""

from __future__ import annotations

import pytest

from mmrl.engine.machine.peak import SHEETS, peak
from mmrl.ops.cost import ModelShape

SHAPE = ModelShape(layers=2, width=128, heads=4, kv_heads=2, head_size=32, mlp_width=256, vocabulary=500)


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
    ],
)
def test_a_gpu_is_known_by_its_exact_name(name, precision, teraflops):
    found = peak("cuda", name, precision, SHAPE)
    assert found is not None and found.flops_per_s == teraflops * 1e12 and found.source == SHEETS[name].source


@pytest.mark.parametrize(
    ("name", "precision"),
    [("NVIDIA H100", "bfloat16"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"), ("Tesla T4", "bfloat16")],
)
def test_another_device_or_precision_has_no_number_rather_than_a_wrong_one(name, precision):
    assert peak("cuda", name, precision, SHAPE) is None


def test_a_cpu_is_measured_and_says_how():
    found = peak("cpu", "cpu", "float32", SHAPE)
    assert found is not None and 1e8 < found.flops_per_s < 1e14
    assert found.source.startswith("measured: ") and "float32" in found.source
