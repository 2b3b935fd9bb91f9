"""``mmrl doctor``'s trial with vLLM, in each precision, each in a process of its own."""

from __future__ import annotations

from tests.gpu.agreement import row_of
from tests.gpu.bench import Bench


def run(bench: Bench) -> None:
    from mmrl.commands.doctor.selftest import PRECISIONS, self_test
    from mmrl.commands.doctor.versions import Installed

    if Installed.here().vllm_is_for_cpu != (bench.kind == "cpu"):
        bench.skip("trial", f"the installed vLLM was built for another device than {bench.kind}")
        return
    for finding in self_test(bench.kind, PRECISIONS[bench.small :]):
        bench.emit(row_of(bench, "", finding))
