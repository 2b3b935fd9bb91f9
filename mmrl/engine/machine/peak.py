"""The peak rate of a device in operations a second: a GPU's from its maker's data sheet, a CPU's measured.

A GPU whose exact name is not in the table has no number: a wrong one would be worse.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mmrl.engine.device import DeviceKind
from mmrl.ops.cost import ModelShape

T = 10**12
MEASURED_S = 0.05
"""Seconds for which each product is repeated on a CPU; the fastest counts."""
SQUARE = 768
"""Side of matrices that are too large for a core's own cache, and that it multiplies in some ten milliseconds."""
ROWS = 512
"""Rows of a product of the model's own widths."""


@dataclass(frozen=True, slots=True)
class Peak:
    """A rate.

    Attributes:
        flops_per_s: Floating-point operations a second of one rank's device, dense.
        source: Origin of the number.
    """

    flops_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A data sheet's operations a second without sparsity, accumulated in float32.

    Attributes:
        bfloat16: Rate of tensor cores; None where none computes it.
        float32: Rate of the plain units: torch does not round float32 to TF32 unless told to.
    """

    bfloat16: float | None
    float32: float
    source: str


_A100 = _Sheet(312 * T, 19.5 * T, "NVIDIA A100 Tensor Core GPU data sheet, 2021")
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, 2023-24 (bfloat16 without sparsity: half of what it prints)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, 2024 (bfloat16 without sparsity: half of what it prints)"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet, 2020"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper, 2021"

SHEETS: Mapping[str, _Sheet] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-PCIE-80GB",
                "NVIDIA A100 80GB PCIe",
            ),
            _A100,
        ),
        "NVIDIA H100 80GB HBM3": _Sheet(989.5 * T, 67 * T, _H100),
        "NVIDIA H100 PCIe": _Sheet(756.5 * T, 51 * T, _H100),
        "NVIDIA H100 NVL": _Sheet(835.5 * T, 60 * T, _H100),
        "NVIDIA H200": _Sheet(989.5 * T, 67 * T, _H200),
        "NVIDIA H200 NVL": _Sheet(835.5 * T, 60 * T, _H200),
        "NVIDIA L4": _Sheet(121 * T, 30.3 * T, "NVIDIA L4 data sheet, 2023 (without sparsity)"),
        "NVIDIA L40S": _Sheet(362.05 * T, 91.6 * T, "NVIDIA L40S data sheet, 2023"),
        "NVIDIA L40": _Sheet(181.05 * T, 90.5 * T, "NVIDIA L40 data sheet, 2022"),
        "NVIDIA A10": _Sheet(125 * T, 31.2 * T, "NVIDIA A10 data sheet, 2021"),
        "NVIDIA A30": _Sheet(165 * T, 10.3 * T, "NVIDIA A30 data sheet, 2021"),
        "NVIDIA A40": _Sheet(149.7 * T, 37.4 * T, "NVIDIA A40 data sheet, 2021"),
        "NVIDIA RTX A6000": _Sheet(154.8 * T, 38.7 * T, _AMPERE),
        "NVIDIA GeForce RTX 3090": _Sheet(71 * T, 35.6 * T, _AMPERE),
        "NVIDIA GeForce RTX 4090": _Sheet(
            165.2 * T, 82.6 * T, "NVIDIA Ada GPU architecture white paper, 2022 (float32 accumulation)"
        ),
        **dict.fromkeys(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), _Sheet(None, 15.7 * T, _V100)),
        **dict.fromkeys(("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"), _Sheet(None, 14 * T, _V100)),
        "Tesla T4": _Sheet(None, 8.1 * T, "NVIDIA T4 data sheet, 2019"),
    }
)  # fmt: skip
"""Data sheets by the name that ``torch.cuda.get_device_name`` gives."""


def peak(kind: DeviceKind, name: str, precision: str, shape: ModelShape) -> Peak | None:
    """The peak of this rank's device; None if it is not known.

    Args:
        name: The device's name.
        precision: ``float32`` or ``bfloat16``.
        shape: The model's shape; a CPU is measured with products of its widths too.
    """
    if kind == "cpu":
        return _measured(precision, shape)
    sheet = SHEETS.get(name)
    rate = None if sheet is None else getattr(sheet, precision)
    return None if sheet is None or rate is None else Peak(rate, sheet.source)


def _measured(precision: str, shape: ModelShape) -> Peak:
    """The best of a large square product and of one as in the model's MLPs, with this process's threads."""
    import torch

    best = Peak(0.0, "")
    columns_of_mlp = shape.mlp_width or (shape.mixture.width if shape.mixture is not None else SQUARE)
    for rows, inner, columns in ((SQUARE, SQUARE, SQUARE), (ROWS, shape.width, columns_of_mlp)):
        a, b = (torch.ones(size, dtype=getattr(torch, precision)) for size in ((rows, inner), (inner, columns)))
        _ = a @ b  # the first one prepares the library
        fastest, end = float("inf"), time.perf_counter() + MEASURED_S
        while (start := time.perf_counter()) < end:
            _ = a @ b
            fastest = min(fastest, time.perf_counter() - start)
        rate = 2 * rows * inner * columns / fastest
        if rate > best.flops_per_s:
            threads = torch.get_num_threads()
            best = Peak(rate, f"measured: {rows} x {inner} x {columns} in {precision}, {threads} threads")
    return best
