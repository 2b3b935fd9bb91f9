"""How runs end: left alone, killed and gone on, and with a rank killed, each ``mmrl train`` in a process of its own.

On a GPU memory comes back some time after its process has gone, and libraries that leave a process may say or do more.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.gpu.bench import Bench, gigabytes
from tests.gpu.row import Row
from tests.gpu.runs import End, Run, write_sums

STEPS, KILLED_AFTER = 4, 2
PATIENCE_S = 240
"""Seconds for a run to save its second checkpoint."""
REWARD = """
def score(rollouts):
    return [float((rollout.token_ids % 2).mean()) for rollout in rollouts]
"""
"""The share of odd tokens: no two completions of random weights have the same."""
FAULT = re.compile(r"error|exception|traceback|abort|terminate|\bfault", re.IGNORECASE)
"""A line of stderr in which a user would see one."""
NORM_LIMIT = {"cpu": 0.05, "cuda": 1.0}
"""Relative difference of the last gradients' norms of a run that was killed and of one that was not. Kernels of a GPU
add in no fixed order, and a rounding may sample another token."""


def run(bench: Bench) -> None:
    from mmrl.engine.aids.tiny_model import write_model

    sampler = "vllm" if bench.area.startswith("vllm") else "hf"
    write_sums(bench.folder / "data", 4)
    reward = bench.folder / "reward.py"
    reward.write_text(REWARD)
    model = write_model(bench.folder / "model", "qwen2")

    def made(name: str, **sections: Mapping[str, Any]) -> Run:
        base: dict[str, Mapping[str, Any]] = {
            "algorithm": {"name": "grpo"},
            "sampler": {"name": sampler, "group_size": 4, **_small(sampler)},
            "learner": {"lr": 1e-3},
            "trainer": {"steps": STEPS, "prompts_per_step": 4, "save_every": 1, "keep_checkpoints": STEPS},
        }
        sections = {key: {**base.get(key, {}), **values} for key, values in sections.items()}
        folder = bench.folder / name
        sections["trainer"] = {**base["trainer"], **sections.get("trainer", {}), "run_dir": str(folder)}
        rewards = [{"name": f"{reward}:score"}]
        return Run.written(folder, model, bench.folder / "data", "train", base | sections, rewards)

    unbroken = made("unbroken")
    bench.attempt("a finished run", partial(_finish, bench, unbroken))
    bench.attempt("a killed run goes on", partial(_go_on, bench, made("killed"), unbroken))
    name = "a killed rank is started again"
    if importlib.util.find_spec("ray") is None:
        bench.skip(name, "not installed: ray")
        return
    on_ray = made("lost", cluster={"name": "ray", "ranks": 1}, trainer={"max_restarts": 1})
    bench.attempt(name, partial(_restart, bench, on_ray, unbroken))


def _small(sampler: str) -> dict[str, Any]:
    """Settings under which vLLM starts soon."""
    if sampler == "hf":
        return {}
    return {"gpu_memory_utilization": 0.1, "engine": {"kv_cache_memory_bytes": 2**27, "enforce_eager": True}}


def _finish(bench: Bench, run: Run, name: str) -> Row:
    value, good, why = judged(run.ended())
    return bench.row(name, value, good=good, why=why)


def judged(end: End) -> tuple[str, bool, str]:
    """What is to be told of a run that should have ended well, if it did, and why not."""
    said = [line for line in end.stderr.splitlines() if line.strip()]
    faults = [line for line in said if FAULT.search(line)]
    value = f"exit code {end.code}, {len(said)} lines on stderr"
    return value, not (end.code or faults), " / ".join(faults[:4])[:600] or " / ".join(said[-4:])[:600]


def _go_on(bench: Bench, run: Run, unbroken: Run, name: str) -> Row:
    """Kill a run that has saved, and begin it again with the same command at once."""
    from mmrl.engine import device

    before = device.free_memory_bytes(bench.kind)
    with run.started() as process:
        _wait_for_checkpoint(run, process)
        process.kill()
        process.wait()
        free = device.free_memory_bytes(bench.kind)
        end = run.ended()
    value, good, why = judged(end)
    if before is not None and free is not None:
        value += f"; {gigabytes(max(before[0] - free[0], 0))} were not back when its process was gone"
    return _compared(bench, name, run, unbroken, value, good, why)


def _restart(bench: Bench, run: Run, unbroken: Run, name: str) -> Row:
    """Kill the rank's process, and let the run start it again."""
    import psutil

    with run.started() as process:
        _wait_for_checkpoint(run, process)
        ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if "RayWorker" in each.name()]
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        end = End.of(process)
    value, good, why = judged(end)
    codes = [attempt["exit_code"] for attempt in _attempts(run) if "exit_code" in attempt]
    return _compared(bench, name, run, unbroken, f"{value}; attempts ended with {codes}", good and codes == [5, 0], why)


def _compared(bench: Bench, name: str, run: Run, unbroken: Run, value: str, good: bool, why: str) -> Row:
    """The row of a run that was cut: it has every step once, and the last one's gradient."""
    one, other = (
        {line["step"]: line["policy/grad_norm"] for line in each.metrics() if "policy/grad_norm" in line}
        for each in (run, unbroken)
    )
    went_on = [attempt["resumed_from"] for attempt in _attempts(run) if attempt.get("resumed_from")]
    far = abs(one.get(STEPS, math.nan) / other.get(STEPS, math.nan) - 1)
    value += f"; went on after step {went_on}, the last gradient {far:.1%} from that of a run left alone"
    limit = NORM_LIMIT[bench.kind]
    good = good and sorted(one) == list(range(1, STEPS + 1)) and bool(went_on) and far <= limit
    return bench.row(name, value, good=good, why=why or f"limit {limit:.0%}")


def _attempts(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "attempts.jsonl").read_text().splitlines()]


def _wait_for_checkpoint(run: Run, process: subprocess.Popen[str]) -> None:
    """Raises RuntimeError if the run ends, or takes too long, before it has saved that step."""
    deadline, wanted = time.monotonic() + PATIENCE_S, run.folder / "checkpoints" / f"step-{KILLED_AFTER:06d}"
    while not wanted.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            end = End.of(process)
            raise RuntimeError(f"it saved no step {KILLED_AFTER}; it ended with {end.code}: {end.stderr[-500:]}")
        time.sleep(0.02)
