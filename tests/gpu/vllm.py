"""``mmrl doctor``'s trial with vLLM, bfloat16 first: GPUs train in that. Each precision has a process of its own."""

from __future__ import annotations

from tests.gpu.agreement import row_of
from tests.gpu.bench import Bench

TIMEOUT_S = 290
"""For one precision, so that both, and what is known of one that hangs, fit into the section's seconds."""


def run(bench: Bench) -> None:
    from mmrl.commands.doctor.selftest import PRECISIONS, self_test

    if reason := built_for_another(bench):
        bench.skip("trial", reason)
        return
    precisions = PRECISIONS[::-1]
    for finding in self_test(bench.kind, precisions[: bench.pick(2, 1)], timeout_s=TIMEOUT_S):
        bench.emit(row_of(bench, "", finding))


def built_for_another(bench: Bench) -> str:
    """Why the installed vLLM cannot run on this kind of device; empty if it can."""
    from mmrl.commands.doctor.versions import Installed

    if Installed.here().vllm_is_for_cpu == (bench.kind == "cpu"):
        return ""
    return f"the installed vLLM was built for another device than {bench.kind}"
