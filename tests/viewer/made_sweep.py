"""Sweeps made by hand: folders of runs with a config, metrics and attempts, and no rollouts.

python -m tests.viewer.made_sweep FOLDER [POINTS]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.runs.directory import RunDirectory
from mmrl.runs.sweeps import SCHEMA, SWEEP
from tests.viewer.made_run import CONFIG, HOSTILE

RATES = (0.001, 0.01)
SEEDS = (0, 1, 2)
STEPS = 8


def make_plain_run(
    folder: Path, *, rate: float = 0.001, seed: int = 0, steps: int = STEPS, more: Mapping[str, Any] | None = None,
    end: tuple[int, str] | None = (0, ""),
) -> Path:  # fmt: skip
    """Make a run of so many steps, whose accuracy at the last is ``rate * 10 + seed / 10`` more than at the first.

    Args:
        more: Metrics of each step.
        end: The exit code and message of its attempt; None leaves it without an end.
    """
    directory = RunDirectory.create(folder)
    config = CONFIG.replace("lr: 0.001", f"lr: {rate}").replace("seed: 0", f"seed: {seed}, run_dir: {folder}")
    directory.write_config(config.replace("steps: 2", f"steps: {STEPS}"))
    directory.begin_attempt(None)
    for step in range(steps + 1):
        metrics = {"loss/total": (1 + seed) / (step + 1), "reward/mean": 0.1 * step + seed / 10} if step else {}
        if step % 2 == 0:
            metrics["eval/accuracy"] = 0.2 + (rate * 10 + seed / 10) * step / STEPS
        directory.append_metrics(step, {**metrics, **(more or {})})
    if end is not None:
        directory.end_attempt(*end)
    directory.release()
    return folder


def write_sweep(folder: Path, axes: Mapping[str, Sequence[Any]], points: Sequence[tuple[str, Any, int]]) -> Path:
    """Write the record of a sweep, whose points are a folder's name, values and a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": SCHEMA,
        "config": CONFIG,
        "axes": axes,
        "seeds": sorted({seed for *_, seed in points}),
        "points": [{"folder": name, "values": values, "seed": seed} for name, values, seed in points],
    }
    (folder / SWEEP).write_text(json.dumps(record))
    return folder


def make_sweep(folder: Path) -> Path:
    """Make a sweep of two rates and three seeds, of which one has failed at step 4 and one has not begun."""
    points = [(f"lr{rate}-s{seed}", {"learner.lr": rate}, seed) for rate in RATES for seed in SEEDS]
    write_sweep(folder, {"learner.lr": RATES}, points)
    for name, values, seed in points:
        rate = values["learner.lr"]
        if (rate, seed) == (0.01, 2):
            continue
        is_failed = (rate, seed) == (0.01, 1)
        more = {"policy/entropy": math.nan} if is_failed else None
        steps, end = (4, (4, f"the loss is not finite {HOSTILE}")) if is_failed else (STEPS, (0, ""))
        make_plain_run(folder / name, rate=rate, seed=seed, steps=steps, more=more, end=end)
    return folder


def make_large_sweep(folder: Path, settings: int, steps: int, metrics: int = 40) -> Path:
    """Make a sweep of many settings with three seeds each, and many metrics."""
    values = [{"learner.lr": 10.0**-number} for number in range(settings)]
    points = [(f"p{number}-s{seed}", each, seed) for number, each in enumerate(values) for seed in SEEDS]
    write_sweep(folder, {"learner.lr": [each["learner.lr"] for each in values]}, points)
    for place, (name, each, seed) in enumerate(points):
        directory = RunDirectory.create(folder / name)
        directory.append_metrics(steps, {})  # it has finished a step
        rate = f"{each['learner.lr']:.30f}"
        directory.write_config(CONFIG.replace("lr: 0.001", f"lr: {rate}").replace("seed: 0", f"seed: {seed}"))
        directory.begin_attempt(None)
        lines = []
        for step in range(steps + 1):
            found: dict[str, Any] = {"step": step, "attempt": 1, "time": 5.0 + step}
            found |= {f"loss/metric_{number}": math.sin(step / 9 + place + number) for number in range(metrics)}
            found |= {"eval/accuracy": place / len(points) * step / steps} if step % 10 == 0 else {}
            lines.append(json.dumps(found) + "\n")
        (directory.path / "metrics.jsonl").write_text("".join(lines))
        directory.end_attempt(0)
        directory.release()
    return folder


if __name__ == "__main__":
    to, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(make_large_sweep(to, count // len(SEEDS), 300) if count else make_sweep(to))
