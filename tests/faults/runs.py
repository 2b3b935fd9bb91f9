"""Runs with the fake engine in this process, which cost tenths of a second each, and what they leave behind."""

from __future__ import annotations

import functools
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mmrl.commands.cli import main
from mmrl.rollout.records import read_lines, recorded_steps
from mmrl.runs.history import read_ledger
from mmrl.system import failpoints
from mmrl.system.redaction import Redactor
from tests.faults.comparison import metrics

REWARDS = Path(__file__).with_name("letters.py")


class Killed(BaseException):
    """Ends a run where it is, as far as a process can do that to itself; nobody catches it."""


def kill() -> None:
    raise Killed


def stop() -> None:
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def at(point: str, count: int = 1, act: Callable[[], Any] = kill) -> Iterator[None]:
    """Call ``act`` when a point is reached for the ``count``-th time, as it has to be; can be nested."""
    reached = itertools.count(1)
    done = []

    def inject(name: str) -> None:
        if before is not None:
            before(name)
        if name == point and next(reached) == count:
            done.append(name)
            act()

    before, failpoints.inject = failpoints.inject, inject
    try:
        yield
    finally:
        failpoints.inject = before
    if not done:
        raise LookupError(f"{point} was not reached {count} times")


@dataclass
class Runs:
    """Configs for runs of a policy that learns to write early letters, and the command that trains it.

    Attributes:
        rows: The training rows' file; eight rows.
    """

    folder: Path
    model: Path

    def __post_init__(self) -> None:
        self.rows = self.folder / "rows.jsonl"
        self.write_rows(range(8))

    def write_rows(self, numbers: Any) -> None:
        rows = [
            {"id": f"r{n}", "prompt": "one plus " * (n + 1), "answer": str(n), "written": f"it is {n}"} for n in numbers
        ]
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, name: str = "run", **sections: Any) -> Path:
        """A config whose run goes to ``folder/name``; sections are merged over the usual ones."""
        base: dict[str, Any] = {
            "model": {"path": str(self.model)},
            "data": {"train": {"name": "table", "path": str(self.rows)}},
            "rewards": [{"name": f"{REWARDS}:letters"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"group_size": 4, "max_new_tokens": 8},
            "learner": {"lr": 1e-2},
            "trainer": {"steps": 4, "prompts_per_step": 3, "save_every": 1, "run_dir": str(self.folder / name)},
        }
        merged = {
            key: base[key] | sections[key] if isinstance(base.get(key), dict) else sections[key] for key in sections
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(base | merged))  # which is YAML
        return path

    def train(self, config: Path, *words: object) -> int:
        """The exit code of ``mmrl train``; ``Killed`` passes."""
        return main(["train", str(config), *map(str, words)])

    def replay(self, run: Path) -> int:
        """The exit code of ``mmrl replay``."""
        return main(["replay", str(run)])

    def killed(self, config: Path, point: str, count: int = 1, *words: object) -> None:
        with at(point, count), pytest.raises(Killed):
            self.train(config, *words)


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """The record of a step, as `mmrl rollouts --json` prints it."""
    found: list[dict[str, Any]] = Redactor().plain(list(read_lines(recorded_steps(run)[step])))
    return found


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in records(run / "events.jsonl") if event["kind"] == kind]


def steps(run: Path) -> list[str]:
    """Names of the checkpoints, hidden and damaged ones too."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def outcome(run: Path) -> dict[str, Any]:
    """Everything that two runs may be compared by, to the last bit: times and attempts are left out."""
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "run.json")
    }
    return {
        "checkpoint": checkpoint.name,
        "state": state,
        "trainer": json.loads((checkpoint / "state" / "run.json").read_text())["trainer"],
        "metrics": metrics(run),
        "rollouts": {path.name: path.read_bytes() for path in sorted((run / "rollouts").glob("*"))},
        "evaluations": {
            str(path.relative_to(run)): path.read_bytes() for path in sorted((run / "evaluations").rglob("*.*"))
        },
        "ledger": [{k: v for k, v in record.items() if k != "attempt"} for record in read_ledger(run)],
    }


@contextmanager
def fake(folder: Path, model: Path) -> Iterator[Runs]:
    """The fake engine in place of the real one; rewards' workers are those of the first run."""
    from mmrl.cluster import launch
    from mmrl.commands.replay import replay
    from mmrl.rollout.rewards.scorer import Scorer
    from mmrl.runs import session as training
    from tests.faults import fake_engine

    with pytest.MonkeyPatch.context() as patch, ExitStack() as workers:
        scorer = functools.cache(
            lambda rewards, last_tokens: workers.enter_context(Scorer(rewards, last_tokens=last_tokens))
        )
        for module in (training, replay):
            patch.setattr(module, "Scorer", lambda rewards, last_tokens=None: nullcontext(scorer(rewards, last_tokens)))
        patch.setattr(launch, "start_engine", fake_engine.start_engine)
        yield Runs(folder, model)
