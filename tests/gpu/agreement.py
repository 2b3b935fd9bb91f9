"""Two training steps of tiny models at ZeRO 3 with the ``hf`` sampler: ``mmrl doctor``'s trial, sampler = learner."""

from __future__ import annotations

from typing import Any

from tests.gpu.bench import Bench, lacks_image_features
from tests.gpu.row import Row

FAMILIES = {"qwen2": "text", "qwen2_5_vl": "vision"}


def run(bench: Bench) -> None:
    from mmrl.commands.doctor.trial import Trial

    for family, what in FAMILIES.items():
        if what == "vision" and (reason := lacks_image_features()):
            bench.skip("vision: two steps", reason)
            continue

        def emit(finding: Any, what: str = what) -> None:
            bench.emit(row_of(bench, f"{what}: ", finding))

        for precision in ("float32", "bfloat16"):
            folder, options = bench.folder / precision, {"family": family, "sampler": "hf", "is_last": False}
            Trial(precision, bench.kind, folder, emit, **options).run()
            bench.free()


def row_of(bench: Bench, prefix: str, finding: Any) -> Row:
    """A finding of the doctor; a warning is no fault, and says what is unusual."""
    if finding.check.endswith("not run"):
        return Row(bench.area, prefix + finding.check, "skipped", finding.found, "a stage before these is bad")
    return bench.row(prefix + finding.check, finding.found, good=finding.status != "bad", why=finding.remedy)
