"""The attention kernel in use against plain attention in float64: values, gradients, time, memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.gpu.bench import Bench, gigabytes, milliseconds
from tests.gpu.row import Row

HEADS, KEY_HEADS, HEAD_SIZE = 28, 4, 128
"""Of Qwen2.5-VL-7B."""
PROMPT, GROUP = 2048, 16


def run(bench: Bench) -> None:
    for precision in ("bfloat16", "float32"):
        bench.attempt(f"{precision}, tiny", partial(_error, bench, precision=precision))
    shared, repeated = _spans(bench)
    large = {"heads": HEADS, "key_heads": KEY_HEADS, "head_size": HEAD_SIZE}
    # In float64, the scores of many long spans would need more memory than there is.
    for what, spans in (("shared", shared), ("repeated", repeated[:2])):
        measure = partial(_error, bench, precision="bfloat16", **large, spans=spans)
        bench.attempt(f"bfloat16, 28/4 heads of 128, prompt {what}", measure)
    for what, spans in (("shared", shared), ("repeated", repeated)):
        bench.attempt(f"time, prompt {what}", partial(_time, bench, spans))


def _spans(bench: Bench) -> tuple[list[Any], list[Any]]:
    """A prompt that a group shares, and the same completions each with its own."""
    from mmrl.ops.packing import Span, Unit

    prompt, group = bench.pick(PROMPT, 24), bench.pick(GROUP, 3)
    completions = tuple(bench.pick(96, 4) + 8 * number for number in range(group))
    shared = Unit((), prompt, completions).spans(0)
    repeated, start = list[Span](), 0
    for length in completions:
        repeated.append(Span(start, prompt + length))
        start += prompt + length
    return [*shared], repeated


def _error(bench: Bench, name: str, precision: str, **sizes: Any) -> Row:
    from mmrl.engine import device
    from mmrl.engine.aids.attention_error import LIMITS, attention_error

    error, limit = attention_error(bench.kind, precision, **sizes), LIMITS[precision]
    found = f"{device.attention(bench.kind, precision)}: relative error {error:.1e}, values and gradients"
    return bench.row(name, found, good=error <= limit, why=f"limit {limit:g}")


def _time(bench: Bench, spans: Sequence[Any], name: str) -> Row:
    """Forward and backward, by the kernel in use and by the loop over torch's own attention."""
    import torch

    from mmrl.engine import device
    from mmrl.engine.network import attention
    from mmrl.engine.network.layout import PackedLayout

    tokens = sum(span.length for span in spans)
    shapes = [(1, heads, tokens, HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    inputs = [torch.randn(s, device=bench.device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    upstream = torch.randn(1, tokens, HEADS, HEAD_SIZE, device=bench.device, dtype=torch.bfloat16)
    layout = PackedLayout(spans, bench.device, torch.bfloat16)
    found = []
    for kernel_name in dict.fromkeys((device.attention(bench.kind, "bfloat16"), "mmrl_packed_sdpa")):
        kernel = attention.KERNELS[kernel_name]

        def forward(kernel: Any = kernel) -> Any:
            return kernel(torch.nn.Module(), *inputs, None, layout=layout, scaling=HEAD_SIZE**-0.5)[0]

        def both(forward: Any = forward) -> None:
            torch.autograd.grad(forward(), inputs, upstream)

        with torch.no_grad():
            once = bench.seconds(forward)
        twice, peak = bench.seconds(both), bench.peak_bytes(both)
        found.append(
            f"{kernel_name.removeprefix('mmrl_packed_')} {milliseconds(once)} forward, {milliseconds(twice)} with "
            f"backward, peak {gigabytes(peak)}"
        )
    return bench.row(name, f"{tokens} tokens: {'; '.join(found)}")
