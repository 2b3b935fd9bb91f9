"""Two whole training steps of a tiny model, with images where possible, in a process of their own, all compared.

    python -m mmrl.commands.doctor.trial DEVICE PRECISION FILE

Rows are appended to the file as they are known, one JSON object a line: a process that aborts leaves those it had.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmrl.commands.doctor.finding import REPORT, Finding, Status, failure, gibibytes
from mmrl.commands.doctor.tiny_run import GROUP_SIZE, KV_CACHE_BYTES, TEMPERATURE, TinyRun, take_step
from mmrl.engine import device
from mmrl.engine_api import Network, Sampler
from mmrl.errors import NumericsError
from mmrl.ops.parity import LIMITS, Gap
from mmrl.types import FloatArray, Rollout

STEPS = 2
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
Side = Literal["engine", "numbers"]
INEXACT = "TF32 in the sampler may do that, and stop a float32 run at trainer.on_mismatch: train in bfloat16 if you can"
WRONG = f"do not train here: {REPORT}"


class Trial:
    """The stages, in order.

    Args:
        folder: For the model and the images.
        emit: Takes each row as soon as it is known.
        family: See ``TinyRun.start``.
        sampler: See ``TinyRun.start``.
        settings: See there.
        is_last: True if no other trial follows in this process; then it leaves its group of ranks.
    """

    def __init__(
        self,
        precision: str,
        kind: device.DeviceKind,
        folder: Path,
        emit: Callable[[Finding], None],
        *,
        family: str | None = None,
        sampler: str | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        is_last: bool = True,
    ) -> None:
        self._precision, self._kind, self._folder, self._emit = precision, kind, folder, emit
        self._options: dict[str, Any] = {"family": family, "sampler": sampler, "settings": settings}
        self._is_last = is_last
        self._seconds: dict[str, float] = {}
        self._versions: list[int] = []
        self._num_sampled = 0

    def run(self) -> None:
        """Run all stages; one that fails gives a row, and ends those that build on it."""
        self._attempt("attention", self._check_attention)
        chain: list[tuple[str, Callable[[], None]]] = [("engines", self._start), ("sleep and wake", self._check_sleep)]
        chain += [(f"step {step}", partial(self._step, step)) for step in range(1, STEPS + 1)]
        chain += [("after the updates", self._finish), ("speed", self._report_speed)]
        try:
            for done, (name, stage) in enumerate(chain, 1):
                if not self._attempt(name, stage):
                    if left := ", ".join(name for name, _ in chain[done:]):
                        self._row("engine", "not run", "warn", left)
                    return
        finally:
            if self._is_last and hasattr(self, "_run"):
                self._run.engine.close()

    def _attempt(self, name: str, stage: Callable[[], None]) -> bool:
        try:
            stage()
        except Exception as error:
            area: Side = "numbers" if isinstance(error, NumericsError) else "engine"
            self._row(area, name, "bad", failure(error), REPORT)
            return False
        return True

    def _check_attention(self) -> None:
        from mmrl.engine.aids.attention_error import LIMITS, attention_error, tower_error

        limit = LIMITS[self._precision]
        kernel = device.attention(self._kind, self._precision)
        checks: list[tuple[str, Callable[..., float], str]] = [("attention", attention_error, kernel)]
        if (tower := device.tower_attention(self._kind, self._precision)) != "sdpa":  # that one is transformers' own
            checks.append(("vision attention", tower_error, tower))
        for check, measure, kernel in checks:
            error = measure(self._kind, self._precision)
            found = f"{kernel}: relative error {error:.1e} against plain attention, forward and backward"
            good = error <= limit
            self._row("numbers", check, "ok" if good else "bad", f"{found} (limit {limit:g})", "" if good else WRONG)

    def _start(self) -> None:
        with self._timed("start"):
            self._run = TinyRun.start(self._folder, self._kind, self._precision, **self._options)
        engine = self._run.engine.describe()
        names = [str(engine[key]) for key in ("device_name", "sampler", "learner", "attention", "model_type")]
        self._row("engine", "engines", "ok", ", ".join(names))

    def _check_sleep(self) -> None:
        """Compare greedy completions before and after a sleep; the sampler has slept once, when it was built."""
        before, awake = self._greedy()
        asleep = device.free_memory_bytes(self._kind)
        after, _ = self._greedy()
        gap = Gap.between(*until_they_differ(before, after))
        self._compare("before = after sleep", gap, len(before), of_sampler=True)
        if awake is None or asleep is None or not self._run.sleeps:
            self._row("engine", "sleep", "ok", "only vLLM on a GPU sleeps")
            return
        freed, due = asleep[0] - awake[0], KV_CACHE_BYTES / 2
        found = f"free {gibibytes(awake[0])} awake, {gibibytes(asleep[0])} asleep, of {gibibytes(awake[1])}"
        remedy = "" if freed >= due else f"the sampler keeps the learner's memory: {REPORT}"
        self._row("engine", "sleep", "ok" if freed >= due else "bad", found, remedy)

    def _greedy(self) -> tuple[list[Rollout], tuple[int, int] | None]:
        with self._run.engine.sampling() as sampler:
            return self._sample(sampler, temperature=0.0, num_samples=1), device.free_memory_bytes(self._kind)

    def _step(self, step: int) -> None:
        rollouts = self._sample_with_newest_weights(step)
        with self._run.engine.learning() as learner:
            packed = self._compare_learner(learner.network("policy"), rollouts, f"step {step}")
            with self._timed("update"):
                take_step(rollouts, learner)
            moved = Gap.between(packed, learner.network("policy").score(rollouts)).abs_mean
        # Less would hide a sampler that kept the old weights.
        needed = LIMITS[self._precision].mean_stop
        found = f"log-probs by {moved:.3f} nats on average (must exceed {needed:g})"
        good = moved > needed
        self._row("numbers", f"update {step} moved", "ok" if good else "bad", found, "" if good else WRONG)

    def _finish(self) -> None:
        rollouts = self._sample_with_newest_weights(STEPS + 1)
        with self._run.engine.learning() as learner:
            self._compare_learner(learner.network("policy"), rollouts, f"after step {STEPS}")
        good = self._versions == list(range(STEPS + 1))
        found = f"sampled with versions {self._versions} of the weights"
        self._row("numbers", "weight sync", "ok" if good else "bad", found, "" if good else WRONG)

    def _sample_with_newest_weights(self, seed: int) -> list[Rollout]:
        begin = time.perf_counter()
        with self._run.engine.sampling() as sampler:
            self._seconds["wake and sync"] = self._seconds.get("wake and sync", 0.0) + time.perf_counter() - begin
            with self._timed("sample"):
                rollouts = self._sample(sampler, temperature=TEMPERATURE, num_samples=GROUP_SIZE, seed=seed)
        self._num_sampled += sum(len(rollout.token_ids) for rollout in rollouts)
        self._versions += sorted({rollout.weight_version for rollout in rollouts})
        return rollouts

    def _sample(self, sampler: Sampler, *, temperature: float, num_samples: int, seed: int = 0) -> list[Rollout]:
        groups = dict(sampler.generate(self._run.requests(temperature, num_samples, seed)))
        return [rollout for index in sorted(groups) for rollout in groups[index].rollouts]

    def _compare_learner(self, policy: Network, rollouts: Sequence[Rollout], when: str) -> list[FloatArray]:
        """Compare sampler with learner, and packed with one by one; returns the packed log-probs."""
        with self._timed("log-probs"):
            packed = policy.score(rollouts)
        alone = policy.score(rollouts, way="single")
        sampled = [rollout.sampler_logprobs for rollout in rollouts]
        self._compare(f"sampler = learner, {when}", Gap.between(sampled, packed), len(rollouts), of_sampler=True)
        self._compare(f"packed = one by one, {when}", Gap.between(alone, packed), len(rollouts))
        return packed

    def _compare(self, check: str, gap: Gap, count: int, of_sampler: bool = False) -> None:
        # The attention that vLLM 0.32 prefers for float32 on GPUs, in Triton, may multiply in TF32; not measured.
        inexact = of_sampler and (self._kind, self._precision) == ("cuda", "float32")
        status, remedy = judge(gap, self._precision, inexact=inexact)
        found = f"mean {gap.abs_mean:.1e}, p99 {gap.abs_p99:.1e}, max {gap.abs_max:.1e} nats in {count} completions"
        self._row("numbers", check, status, found, remedy)

    def _report_speed(self) -> None:
        seconds = ", ".join(f"{phase} {value:.2f}" for phase, value in self._seconds.items())
        rate = self._num_sampled / self._seconds["sample"]
        peak = gibibytes(self._run.engine.memory_bytes_max())
        self._row("engine", "speed", "ok", f"{rate:.0f} sampled tokens/s; seconds: {seconds}; peak memory {peak}")

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begin

    def _row(self, area: Side, check: str, status: Status, found: str, remedy: str = "") -> None:
        self._emit(Finding(area, f"{SHORT[self._precision]} {check}", status, found, remedy))


def judge(gap: Gap, precision: str, *, inexact: bool = False) -> tuple[Status, str]:
    """The status of a gap, and its remedy; where TF32 may be at work, bfloat16's limits say what is bad."""
    verdict = gap.verdict(LIMITS[precision])
    if verdict == "ok":
        return "ok", ""
    if verdict == "warn":
        return "warn", f"unusually far apart: {REPORT}"
    if inexact and gap.verdict(LIMITS["bfloat16"]) != "stop":
        return "warn", INEXACT
    return "bad", WRONG


def until_they_differ(one: Sequence[Rollout], other: Sequence[Rollout]) -> tuple[list[FloatArray], list[FloatArray]]:
    """Log-probs of greedy completions up to the first different token and including it.

    A tie may be broken differently; then the two tokens have the same log-prob. If they do not, it was no tie.
    """
    pairs = []
    for a, b in zip(one, other, strict=True):
        length = min(len(a.token_ids), len(b.token_ids))
        different = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
        end = int(different[0]) + 1 if len(different) else length
        pairs.append((a.sampler_logprobs[:end], b.sampler_logprobs[:end]))
    return [a for a, _ in pairs], [b for _, b in pairs]


def main(kind: device.DeviceKind, precision: str, path: str) -> None:
    """Run the trial on a kind of device, each row a line of the file at ``path``."""
    from mmrl.cluster.process import prepare_process

    found = prepare_process()
    warnings.simplefilter("ignore")
    with open(path, "a", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:

        def emit(finding: Finding) -> None:
            print(json.dumps(dataclasses.asdict(finding)), file=file, flush=True)

        if found == kind:
            Trial(precision, kind, Path(folder), emit).run()
        else:
            what = f"asked for {kind}, and torch offers {found} in a new process"
            emit(Finding("engine", f"{SHORT[precision]} device", "bad", what, REPORT))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
