"""``mmrl train`` in processes of its own: DeepSpeed 0.19 cannot join a second group of ranks in one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

COMMON: Mapping[str, Mapping[str, Any]] = {
    "data": {"max_prompt_tokens": 64, "max_pixels": 50176},
    "sampler": {"name": "hf", "max_new_tokens": 8},
    "learner": {"zero_stage": 0, "tokens_per_microbatch": 16384},
    "trainer": {"save_every": 10**6},
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, and the config that begins it or goes on with it."""

    folder: Path
    config: Path

    @classmethod
    def written(
        cls,
        folder: Path,
        model: Path,
        table: Path,
        split: str,
        sections: Mapping[str, Mapping[str, Any]],
        rewards: Sequence[Mapping[str, Any]] = ({"name": "exact"},),
    ) -> Run:
        """The run's config, on disk.

        Args:
            sections: Settings beside ``COMMON``.
        """
        own: dict[str, Any] = {
            "model": {"path": str(model), "gradient_checkpointing": False},
            "data": {"train": {"name": "table", "path": str(table), "split": split}},
            "rewards": [*rewards],
            "trainer": {"run_dir": str(folder)},
        }
        for part in (COMMON, sections):
            own |= {key: {**own.get(key, {}), **values} for key, values in part.items()}
        config = folder.with_suffix(".yaml")
        config.write_text(json.dumps(own))
        return cls(folder, config)

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        """``mmrl train``, its output in pipes; killed at the end if it still runs."""
        command = [sys.executable, "-m", "mmrl", "train", str(self.config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def ended(self) -> End:
        """How it ends, left alone."""
        with self.started() as process:
            return End.of(process)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def finished(self) -> list[dict[str, Any]]:
        """The metrics, once it has ended well."""
        end = self.ended()
        if end.code:
            raise RuntimeError(f"mmrl train ended with {end.code}: {end.stderr[-500:]}")
        return self.metrics()


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended, and what it said."""

    code: int
    stdout: str
    stderr: str

    @classmethod
    def of(cls, process: subprocess.Popen[str]) -> End:
        """Wait for the process."""
        stdout, stderr = process.communicate()
        return cls(process.returncode, stdout, stderr)


def write_sums(folder: Path, tests: int) -> None:
    """Sums of two digits: all of them to learn from, some of them asked."""
    folder.mkdir()
    rows = [
        {"question": f"what is {a}+{b}?", "answer": str(a + b), "solution": f"\\boxed{{{a + b}}}"}
        for a in range(10)
        for b in range(10)
    ]
    drawn = np.random.default_rng(0).permutation(len(rows))
    splits = {"train": rows, "warmup": rows * 6, "test": [rows[index] for index in drawn[:tests]]}
    for split, some in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
