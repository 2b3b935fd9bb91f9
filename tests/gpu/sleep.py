"""vLLM under Qwen2.5-VL-3B's shapes beside a learner: what it takes awake, what it keeps asleep, and the same answers.

Each case is a process of its own: as mmrl starts vLLM, with the memory of CUDA graphs given back as well, and with
torch's expandable segments, which a user may have set.

    python -m tests.gpu.sleep CASE KIND SIZE MODEL FILE
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.bench import Bench, gigabytes, lacks_image_features
from tests.gpu.published import QWEN_3B, TRY, Load, Training, write, write_prompts
from tests.gpu.row import Row, append, read
from tests.gpu.vllm import built_for_another

LOAD = Load(prompts=4, prompt_tokens=400, group=4, completion=64, budget=8000, image=None)
SMALL = replace(TRY, heads=2, kv_heads=1, tower_heads=2)
"""vLLM's kernels for a CPU have no smaller heads."""
KV_CACHE_BYTES = {"whole": 4 * 2**30, "small": 2**27}
KEPT_LIMIT = 1.2
"""vLLM may keep this many times what is planned while it sleeps, of the device and of the host's memory."""


@dataclass(frozen=True, slots=True)
class Case:
    """What differs from how mmrl starts vLLM.

    Attributes:
        seconds: It may take so many on a GPU.
    """

    seconds: int = 90
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "as started": Case(140),  # vLLM compiles, and keeps that for the others
    "CUDA graphs given back": Case(engine={"sleep_mode_offload_cudagraph": True}),
    "expandable segments": Case(environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
}


def run(bench: Bench) -> None:
    from mmrl.commands.doctor.selftest import run as run_process
    from mmrl.engine.sampler.vllm_arguments import written_arguments

    if reason := built_for_another(bench):
        bench.skip("all of it", reason)
        return
    model = write(bench, bench.folder / "model", bench.pick(QWEN_3B, SMALL), vision=not lacks_image_features())
    for name, case in CASES.items():
        if absent := case.engine.keys() - written_arguments():
            bench.skip(name, f"this vLLM has no argument {', '.join(sorted(absent))}")
            continue
        if bench.kind == "cpu" and (case.engine or case.environment):
            bench.skip(name, "only vLLM on a GPU sleeps")
            continue
        rows, log = bench.folder / f"{name}.jsonl", bench.folder / f"{name}.log"
        rows.touch()
        size = bench.pick("whole", "small")
        command = [sys.executable, "-m", "tests.gpu.sleep", name, bench.kind, size, str(model), str(rows)]
        how = run_process(command, {**os.environ, **case.environment}, log, bench.pick(1, 10) * case.seconds)
        for row in read(rows):
            bench.emit(row)
        if how:
            last = " / ".join(line.strip() for line in log.read_text(errors="replace").splitlines()[-6:])
            bench.emit(bench.row(f"{name}: process", good=False, why=f"it {how}; its last words: {last[-600:]}"))


def main(name: str, kind: Any, size: str, model: str, path: str) -> None:
    """One case; its rows are appended to a file."""
    from mmrl.cluster.process import prepare_process

    prepare_process()
    with tempfile.TemporaryDirectory(prefix="mmrl-proof-") as folder:
        bench = Bench("sleep", kind, size == "small", Path(folder), partial(append, Path(path)))
        Nap(bench, name, Path(model)).take()


class Nap:
    """An engine whose sampler sleeps while the learner works."""

    def __init__(self, bench: Bench, name: str, model: Path) -> None:
        self._bench, self._name = bench, name
        self._training = Training(bench, model, write_prompts(bench.folder / "data", LOAD), LOAD)
        sampler = {
            "name": "vllm",
            "gpu_memory_utilization": 0.3,
            "engine": {"kv_cache_memory_bytes": KV_CACHE_BYTES[bench.pick("whole", "small")], **CASES[name].engine},
        }
        self._config = self._training.config(
            model={"lora": {"rank": 8}}, sampler=sampler, learner={"lr": 1e-4, "zero_stage": 1}
        )

    def take(self) -> None:
        """The rows of this case."""
        self._bench.attempt(f"{self._name}: asleep", self._start)
        if hasattr(self, "_engine"):
            self._bench.attempt(f"{self._name}: awake", self._wake)
            self._bench.attempt(f"{self._name}: before = after", self._compare)
            self._bench.attempt(f"{self._name}: sampler = learner", self._learn)
            self._engine.close()  # vLLM sleeps: its own end would write lines of errors

    def _start(self, name: str) -> Row:
        """Start vLLM, which sleeps at once, and look at the memory before the learner is built."""
        import psutil

        from mmrl.cluster.local import start_engine
        from mmrl.engine import device
        from mmrl.runs.setup import RunSetup

        self._setup = RunSetup(self._config, self._bench.folder / "media")
        kind, seen = self._bench.kind, dict[str, Any]()
        before, available = device.free_memory_bytes(kind), psutil.virtual_memory().available

        def look(what: str) -> None:
            seen[what] = time.perf_counter(), device.free_memory_bytes(kind), psutil.virtual_memory().available

        begin = time.perf_counter()
        engine = start_engine(self._setup.engine_spec(self._setup.algorithm, None), look)
        moment, asleep, then = seen["the learner starts"]
        self._engine = engine
        value = f"vLLM has started and sleeps after {moment - begin:.0f} s"
        if before is None or asleep is None:
            return self._bench.row(name, value)
        kept, allowed = before[0] - asleep[0], device.ASLEEP_BYTES[kind]
        locked = self._training.forecast(self._config, "host").get("sampler", 0)
        value += f"; it keeps {gigabytes(kept)} of the device, and {gigabytes(available - then)} of the host's memory"
        value += ", weights " + ("backed up" if engine.describe()["sleep_backs_up_weights"] else "dropped")
        good = kept <= KEPT_LIMIT * allowed and available - then <= KEPT_LIMIT * locked + device.RANK_BYTES
        planned = (
            f"planned: {gigabytes(allowed)} of the device, {gigabytes(locked)} of the host's memory, and the process"
        )
        return self._bench.row(name, value, good=good, why=planned)

    def _wake(self, name: str) -> Row:
        """Wake with new weights, sample, sleep; what is used awake, the cache that sampling leaves included."""
        from mmrl.engine import device

        kind = self._bench.kind
        asleep, begin = device.free_memory_bytes(kind), time.perf_counter()
        self._first, woken, used = self._sampled()
        ended = time.perf_counter()
        again = device.free_memory_bytes(kind)
        value = f"awake with new weights after {woken - begin:.2f} s, sampled and asleep {ended - woken:.2f} s later"
        if asleep is None or again is None:
            return self._bench.row(name, value)
        taken, lost = used - (asleep[1] - asleep[0]), asleep[0] - again[0]
        value += f"; {gigabytes(taken)} more in use, of which {gigabytes(lost)} stay"
        weights = self._training.forecast(self._config, "sampler")["weights"]
        held = f"{gigabytes(weights)} are weights, {gigabytes(KV_CACHE_BYTES['whole'])} the KV cache"
        return self._bench.row(name, value, why=f"{held}; the plan allows what it counts for a step beside them")

    def _sampled(self) -> tuple[list[Any], float, int]:
        """Greedy rollouts, the moment of waking, and the memory in use."""
        from mmrl.engine import device
        from mmrl.engine_api import SamplingRequest

        prompts = self._setup.training.each(self._setup.encoder.encode, LOAD.prompts)
        requests = [SamplingRequest(prompt, 1, 0.0, LOAD.completion, 0) for prompt in prompts]
        with self._engine.sampling() as sampler:
            woken = time.perf_counter()
            groups = dict(sampler.generate(requests))
            used = device.used_memory_bytes(self._bench.kind)
        return [rollout for index in sorted(groups) for rollout in groups[index].rollouts], woken, used

    def _compare(self, name: str) -> Row:
        """The same weights answer the same after a sleep."""
        from mmrl.commands.doctor.trial import until_they_differ
        from mmrl.ops.parity import LIMITS, Gap

        begin = time.perf_counter()
        again, woken, _ = self._sampled()
        gap = Gap.between(*until_they_differ(self._first, again))
        value = f"mean {gap.abs_mean:.1e}, max {gap.abs_max:.1e} nats, awake with the same weights after "
        good = gap.verdict(LIMITS["bfloat16"]) == "ok"
        return self._bench.row(name, f"{value}{woken - begin:.2f} s", good=good)

    def _learn(self, name: str) -> Row:
        """An update, and samples of the new weights, which the learner reads as the sampler did."""
        from mmrl.ops.parity import LIMITS, Gap
        from tests.gpu.published import rows_of

        with self._engine.learning() as learner:
            learner.network("policy").update(rows_of(self._setup, LOAD))
        rollouts, _, _ = self._sampled()
        with self._engine.learning() as learner:
            gap = Gap.between([each.sampler_logprobs for each in rollouts], learner.network("policy").score(rollouts))
        value = f"after an update: mean {gap.abs_mean:.1e}, p99 {gap.abs_p99:.1e}, max {gap.abs_max:.1e} nats"
        return self._bench.row(name, value, good=gap.verdict(LIMITS["bfloat16"]) != "stop")


if __name__ == "__main__":
    main(*sys.argv[1:])
