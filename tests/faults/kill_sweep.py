"""Kill runs with -9 everywhere, resume them, and compare them with runs that were left alone.

    python -m tests.faults.kill_sweep [--random 100] [--lines 60] [--signals 90] [--cold 6] [--real 10] [--seed 0]

Most runs have the fake engine (``fake_engine.py``) and everything else as it is; those of ``--real`` have vLLM and
DeepSpeed with a tiny model. Prints a line for each chain of blows and a summary; the exit code tells of failures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.faults.comparison import Watch, check_ledger, compare
from tests.faults.harness import Blow, End, Nursery

REWARDS = Path(__file__).with_name("letters.py")
ENVIRONMENT = Path(__file__).with_name("slow_tools.py")
ROWS = 10
"""Rows of data; no multiple of the prompts of a step, so that epochs begin within steps."""
KEEP = 2
FAKE: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "learner": {"minibatches": 2},
        "trainer": {"save_every": 1, "best_metric": "eval/letters_mean", "eval_samples": 4},
        "trackers": [{"name": "tensorboard"}],
    },
    "dapo": {  # many groups have no signal, and some steps starve: groups are carried over
        "algorithm": {"name": "dapo", "dynamic_sampling": {"max_rounds": 2, "on_starvation": "skip"}},
        "rewards": [{"name": f"{REWARDS}:early"}],
        "sampler": {"group_size": 2},
        "trainer": {"save_every": 2, "save_optimizer": "last"},
    },
    "remax": {  # the best checkpoint is the first one, which stays
        "algorithm": {"name": "remax"},
        "trainer": {"save_every": 3, "best_metric": "eval/letters_mean", "best_is": "min", "eval_samples": 4},
    },
    "ppo": {  # two networks, of which the critic alone learns in the first steps
        "algorithm": {"name": "ppo", "bootstrap": True, "kl": {"coef": 0.05}},
        "critic": {"lr": 0.05, "pretrain_steps": 3},
        "learner": {"minibatches": 2},
        "trainer": {"save_every": 1},
    },
}
_APART = {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}
BEHIND: Mapping[str, Mapping[str, Any]] = {
    "behind": {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "cluster": _APART,
        "learner": {"minibatches": 2},
        "trainer": {"save_every": 1, "staleness": 2, "on_mismatch": "warn"},
    },
    "behind_dapo": {
        **FAKE["dapo"],
        "cluster": _APART,
        "trainer": {**FAKE["dapo"]["trainer"], "eval_every": 3, "staleness": 1, "on_mismatch": "warn"},
    },
}
"""Runs whose sampler is behind its learner: their checkpoints hold batches."""
SLOW_TOOLS = {  # a tool takes up to 0.3 s, in each run another time
    "environment": {
        "name": f"{ENVIRONMENT}:SlowTools",
        "longest_s": 0.3,
        "max_turns": 3,
        "max_turn_tokens": 4,
        "max_observation_tokens": 80,
        "latency_steps": 3,
        "workers": 2,
    },
    "sampler": {"group_size": 2, "max_new_tokens": 12},
    "learner": {"minibatches": 2},
    "trainer": {"steps": 3, "save_every": 1, "eval_every": 3},
}
EPISODES: Mapping[str, Mapping[str, Any]] = {
    "episodes": {**SLOW_TOOLS, "algorithm": {"name": "grpo", "kl": {"coef": 0.05}}},
    "refilled": {  # a round follows another one, at a step that must not depend on the tool
        **SLOW_TOOLS,
        "algorithm": {"name": "dapo", "dynamic_sampling": {"max_rounds": 2}},
        "environment": {**SLOW_TOOLS["environment"], "weights": {"environment": 0, "reached": 0}},
        "rewards": [{"name": f"{REWARDS}:early"}],
        "trainer": {**SLOW_TOOLS["trainer"], "prompts_per_step": 2},
    },
}
"""Runs of many turns, which take longer: their tools sleep."""
_IN_PARTS = {"engine_steps": 16, "in_flight": 2}
PARTS: Mapping[str, Mapping[str, Any]] = {
    "parts": {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "sampler": {"max_new_tokens": 90, "partial": _IN_PARTS},
        "learner": {"minibatches": 2},
        "trainer": {"save_every": 1},
    },
    "episodes_in_parts": {
        **SLOW_TOOLS,
        "algorithm": {"name": "grpo"},
        "environment": {**SLOW_TOOLS["environment"], "max_turn_tokens": 30, "longest_s": 0.05},
        "sampler": {"group_size": 2, "max_new_tokens": 90, "partial": _IN_PARTS},
        "trainer": {"steps": 5, "save_every": 1, "eval_every": 3},
    },
}
"""Runs whose rollouts are sampled in parts: their checkpoints hold unfinished ones."""
COMPARED: Mapping[str, Mapping[str, Any]] = {
    "dpo": {
        "algorithm": {"name": "dpo"},
        "learner": {"minibatches": 2},
        "trainer": {"steps": 5, "save_every": 1, "best_metric": "eval/accuracy"},
    },
    "mpo": {
        "algorithm": {"name": "mpo"},
        "trainer": {"steps": 5, "save_every": 1},
    },  # its mean over earlier steps is state
}
"""Runs on the rows' own candidates."""
REAL = {
    "algorithm": {"name": "grpo"},
    "rewards": [{"name": f"{REWARDS}:even"}],
    "sampler": {"engine": {"kv_cache_memory_bytes": 2**26}},
    "learner": {"zero_stage": 1, "minibatches": 2, "schedule": "cosine"},
    "trainer": {"save_every": 1},
}
REAL_BEHIND = {
    **REAL,
    "cluster": _APART,
    "trainer": {"save_every": 2, "steps": 6, "staleness": 1, "on_mismatch": "warn"},
}
"""A real run whose sampler is a step behind."""
REAL_PARTS = {
    **REAL,
    "sampler": {**REAL["sampler"], "group_size": 3, "max_new_tokens": 60, "partial": _IN_PARTS},
    "trainer": {"steps": 4, "save_every": 2, "eval_every": 100},
}
"""A real run whose rollouts are sampled in parts."""

SCORED: Mapping[str, Mapping[str, Any]] = {
    name: {
        **COMPARED["dpo"],
        "algorithm": {"name": "bradley_terry"},
        "model": model,
        "learner": {**COMPARED["dpo"]["learner"], **learner, "schedule": "cosine"},
    }
    for name, model, learner in (
        ("scored", {}, {"zero_stage": 1}),
        ("scored_lora", {"lora": {"rank": 4, "targets": ["language"]}}, {"zero_stage": 3}),
    )
}
"""Real runs of a reward model on the rows' own candidates."""
RESET: Mapping[str, Mapping[str, Any]] = {
    name: {
        **REAL,
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
        "reference": {"reset_every": 2},
        "model": model,
        "learner": {**REAL["learner"], **learner},
        "trainer": {"steps": 7, "save_every": 3, "eval_every": 100},
    }
    for name, model, learner in (
        ("reset", {}, {}),
        ("reset_lora", {"lora": {"rank": 4, "targets": ["language"]}}, {"zero_stage": 0}),
    )
}
"""Real runs whose reference becomes the policy after steps 2, 4 and 6; checkpoints come after steps 3 and 6."""

CRITICS: Mapping[str, Mapping[str, Any]] = {
    name: {
        **REAL,
        "algorithm": {"name": "ppo", "bootstrap": True},
        "critic": {"lr": 0.02, "pretrain_steps": 2},
        "model": model,
        "learner": {**REAL["learner"], **learner},
        "trainer": {"steps": 5, "save_every": 1, "eval_every": 100},
    }
    for name, model, learner in (
        ("critic", {}, {}),
        ("critic_lora", {"lora": {"rank": 4, "targets": ["language"]}}, {"zero_stage": 0}),
    )
}
"""Real runs of two networks, of which the critic alone learns in the first two steps."""


def answers(number: int) -> dict[str, Any]:
    """Two to four answers of a row with their scores."""
    texts = [f"{'ab'[number % 2] * (1 + place)} {number + place}" for place in range(2 + number % 3)]
    return {"candidates": texts, "scores": [(place * 2 + number) % 5 for place in range(len(texts))]}


def write_config(folder: Path, model: Path, name: str, sections: Mapping[str, Any]) -> Path:
    """Data and a config of eight steps, which is a little more than three epochs."""
    rows = [{"id": f"row-{i:0{1 + i % 3}}", "prompt": f"one plus {i}", "answer": str(i + 1)} for i in range(ROWS)]
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "rewards": [{"name": f"{REWARDS}:letters", "workers": 1}],
        "sampler": {"group_size": 3, "max_new_tokens": 6},
        "learner": {"lr": 0.02, "zero_stage": 0},
        "trainer": {"steps": 8, "prompts_per_step": 4, "eval_every": 2, "keep_checkpoints": KEEP},
    }
    compares = name in COMPARED or name in SCORED
    if compares:
        rows = [{"id": row["id"], "prompt": row["prompt"], **answers(i)} for i, row in enumerate(rows)]
        config |= {"rewards": [], "sampler": {"max_new_tokens": 40}}
    data = folder / ("answers.jsonl" if compares else "rows.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"] = {split: {"name": "table", "path": str(data)} for split in ("train", "eval")}
    for key, value in sections.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class Sweep:
    """Runs of one config.

    Attributes:
        unbroken: The folder of a run that nothing happened to.
        seconds: It took.
        points: Names of the points that it reached, in order.
        lines: How many lines it executed; see ``harness.TRACED``.
        failures: What was found.
        counts: Blows that struck, by kind.
    """

    nursery: Nursery
    config: Path
    unbroken: Path = Path()
    seconds: float = 0.0
    points: Sequence[str] = ()
    lines: int = 0
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def begin(self, *, is_slow: bool = False) -> None:
        """Train without a break."""
        self.unbroken = self.config.with_suffix("")
        record = self.config.with_suffix(".points")
        words = [str(self.config), f"trainer.run_dir={self.unbroken}"]
        end = self.nursery.train(words, record=record)
        self._note("unbroken", end, [0])
        *self.points, last = record.read_text().splitlines()
        self.lines = int(last.split()[1])
        self.failures += check_ledger(self.unbroken)
        self.seconds = end.seconds
        if not is_slow:  # without a trace of its lines
            again = self.config.with_name(f"{self.config.stem}-again")
            end = self.nursery.train([str(self.config), f"trainer.run_dir={again}"])
            self.failures += compare(again, self.unbroken)
            self.seconds = end.seconds

    def chain(self, blows: Sequence[Blow], *, cold: bool = False) -> int:
        """One run that gets these blows, one in each attempt, and is then left to its end; returns how many struck."""
        path = self.config.with_name(f"{self.config.stem}-{sum(self.counts.values())}-broken")
        words = [str(self.config), f"trainer.run_dir={path}"]
        watch = Watch(path, KEEP)
        before, began, struck = len(self.failures), time.monotonic(), 0
        for blow in [*blows, None]:
            end = self.nursery.train(words, blow, cold=cold)
            self._note(f"{blow}", end, [0] if blow is None else allowed(blow, end, path))
            if blow is not None:
                self.failures += [f"{blow}: {problem}" for problem in after_blow(blow, end, path)]
            self.failures += [f"{blow}: {problem}" for problem in watch.look()]
            if blow is not None and end.status != 0:
                struck += 1
                self.counts[blow.number.name + (" cold" if cold else "")] += 1
        if len(self.failures) == before:
            killed = all(blow.number == signal.SIGKILL for blow in blows)
            problems = compare(path, self.unbroken, same_checkpoints=killed) + check_ledger(path)
            self.failures += [f"at the end: {problem}" for problem in problems]
        bad = self.failures[before:]
        print(
            f"{self.config.stem:6} {'FAIL' if bad else 'ok':4} {time.monotonic() - began:6.1f} s  "
            + "; ".join(map(str, blows)),
            *bad,
            sep="\n    ",
            flush=True,
        )
        if bad:
            print(f"    kept: {path}")
        else:
            shutil.rmtree(path)
        return struck

    def _note(self, what: str, end: End, allowed: Sequence[int]) -> None:
        """Note what is wrong with an end."""
        if end.status not in allowed:
            self.failures.append(f"{what}: ended with {end.status} instead of {allowed}:\n{end.log[-3000:]}")
        self.failures += [f"{what}: still running: {orphan}" for orphan in end.orphans]
        self.failures += [f"{what}: left in shared memory: {name}" for name in end.memory]


def allowed(blow: Blow, end: End, path: Path) -> Sequence[int]:
    """Statuses that a run may end with after a blow."""
    if blow.number == signal.SIGKILL:
        return [0, -signal.SIGKILL]
    attempts = path / "attempts.jsonl"
    was_done = attempts.exists() and json.loads(attempts.read_text().splitlines()[-1]).get("exit_code") == 0
    code = 130 if blow.number == signal.SIGINT else 10
    return [0] * (was_done or not end.handled) + [code] * end.handled


def after_blow(blow: Blow, end: End, path: Path) -> Iterator[str]:
    """Yields what is wrong after a signal that a run can answer."""
    if blow.number == signal.SIGKILL:
        return
    if "Traceback" in end.log:
        yield f"there is a traceback:\n{end.log[-3000:]}"
    started = (path / "metrics.jsonl").exists()
    if started and not any((path / "checkpoints").glob("step-*")):
        yield "steps were done, and there is no checkpoint"
    if blow.again is not None and end.after is not None and end.after > 2:
        yield f"the second signal took {end.after:.1f} s to end it"


def each_point(sweep: Sweep) -> Iterator[list[Blow]]:
    """Every point at its first, second, middle and last reach."""
    for name, count in Counter(sweep.points).items():
        for nth in sorted({1, 2, (count + 1) // 2, count}):
            if nth <= count:
                yield [Blow(at=("point", name, nth))]


def random_kills(sweep: Sweep, rng: np.random.Generator) -> list[Blow]:
    """Up to four kills in a row."""
    return [Blow(at=("s", float(rng.uniform(0, 1.05 * sweep.seconds)))) for _ in range(rng.integers(1, 5))]


def random_signal(sweep: Sweep, rng: np.random.Generator, turn: int) -> Blow:
    number = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)[turn % 5]
    at: tuple[Any, ...] = ("handler", float(rng.uniform(0, sweep.seconds)))
    if turn % 2:
        at = ("line", int(rng.integers(sweep.lines * 0.1, sweep.lines)))
    again = float(rng.uniform(0.0, 0.3)) if turn % 8 == 6 else None
    return Blow(number, at, again, group=number == signal.SIGINT and at[0] != "line")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--random", type=int, default=100, help="kills at random moments")
    parser.add_argument("--lines", type=int, default=60, help="kills before random lines of the core")
    parser.add_argument("--signals", type=int, default=90, help="SIGTERM, SIGUSR1 and Ctrl-C at random moments")
    parser.add_argument("--cold", type=int, default=6, help="signals to fresh interpreters, imports included")
    parser.add_argument("--real", type=int, default=10, help="kills of runs with vLLM and DeepSpeed")
    parser.add_argument("--real-signals", type=int, default=4, help="signals to them")
    parser.add_argument("--no-points", action="store_true", help="leave out the named points")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the runs; by default a temporary one, removed at the end")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        sweeps = sweep_all(arguments, folder, np.random.default_rng(arguments.seed))
    failures = sum(len(sweep.failures) for sweep in sweeps)
    for sweep in sweeps:
        print(f"{sweep.config.stem}: {dict(sweep.counts)}, unbroken {sweep.seconds:.1f} s")
    counts = sum((sweep.counts for sweep in sweeps), Counter[str]())
    what = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{what}: {failures} failures in {(time.monotonic() - began) / 60:.1f} min")
    return 1 if failures else 0


def sweep_all(arguments: argparse.Namespace, folder: Path, rng: np.random.Generator) -> list[Sweep]:
    model = write_model_in(folder)
    sweeps = []
    with Nursery(folder, model) as nursery:
        fake = arguments.random or arguments.lines or arguments.signals or arguments.cold or not arguments.no_points
        for name, sections in {**FAKE, **BEHIND, **COMPARED, **EPISODES}.items() if fake else ():
            sweeps.append(Sweep(nursery, write_config(folder, model, name, sections)))
            sweeps[-1].begin()
        for sweep in sweeps if not arguments.no_points else ():
            for blows in each_point(sweep):
                sweep.chain(blows)
        turns, left = itertools.count(), arguments.random
        while left > 0:
            sweep = sweeps[next(turns) % len(sweeps)]
            left -= sweep.chain(random_kills(sweep, rng)[:left])
        for turn in range(arguments.lines):
            sweep = sweeps[turn % len(sweeps)]
            sweep.chain([Blow(at=("line", int(rng.integers(1, sweep.lines + 1))))])
        for turn in range(arguments.signals):
            sweep = sweeps[turn % len(sweeps)]
            sweep.chain([random_signal(sweep, rng, turn)])
        for turn in range(arguments.cold):
            sweep = sweeps[turn % len(sweeps)]
            sweep.chain([Blow(signal.SIGTERM, ("handler", float(rng.uniform(0, 6))))], cold=True)
    if arguments.real or arguments.real_signals:
        sweeps.append(sweep_real(arguments, folder, model, rng))
    return sweeps


def sweep_real(arguments: argparse.Namespace, folder: Path, model: Path, rng: np.random.Generator) -> Sweep:
    """Half of the kills at points of saving, half at random moments; one in five of a fresh interpreter."""
    with Nursery(folder, model, real=True) as nursery:
        sweep = Sweep(nursery, write_config(folder, model, "real", REAL))
        sweep.begin(is_slow=True)
        counts, turn, left = Counter(sweep.points), 0, arguments.real
        while left > 0:
            name, count = list(counts.items())[turn % len(counts)]
            blows = [
                Blow(at=("point", name, int(rng.integers(1, max(count // 2, 2))))),
                Blow(at=("s", float(rng.uniform(0.3, 1.0) * sweep.seconds))),
            ]
            left -= sweep.chain(blows[:left], cold=turn % 5 == 4)
            turn += 1
        for turn in range(arguments.real_signals):
            number = (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)[turn % 4]
            at = ("handler", float(rng.uniform(0, sweep.seconds)))
            sweep.chain([Blow(number, at, group=number == signal.SIGINT)], cold=turn % 2 == 0)
    return sweep


def write_model_in(folder: Path) -> Path:
    from mmrl.engine.aids.tiny_model import write_model

    return write_model(folder / "model", "qwen2")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
