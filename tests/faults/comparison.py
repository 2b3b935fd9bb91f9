"""What must hold of runs that were killed or signalled, and where they may differ from runs that were left alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mmrl.rollout.records import read_lines
from mmrl.runs.checkpoints import CheckpointError, Checkpoints
from mmrl.runs.history import read_ledger
from mmrl.system.redaction import Redactor


@dataclass
class Watch:
    """Notes the checkpoints that a run has acknowledged so far, from one blow to the next.

    Attributes:
        newest: Step of the newest checkpoint that was seen; -1 before there was one.
        seen: Steps of all that were there at the last look.
    """

    path: Path
    keep: int
    newest: int = -1
    seen: set[int] = field(default_factory=set)

    def look(self) -> list[str]:
        """Sentences about faults of the checkpoints, to be asked for just after an end."""
        problems = []
        found = Checkpoints(self.path / "checkpoints").all()
        for checkpoint in found:
            try:
                checkpoint.verify()
            except CheckpointError as error:
                problems.append(str(error))
        steps = {checkpoint.step for checkpoint in found}
        if self.newest > max(steps, default=-1):
            problems.append(f"the checkpoint of step {self.newest} was lost, the newest is {max(steps, default=None)}")
        problems += [
            f"the checkpoint of step {lost} was removed too early: {sorted(steps)} are left"
            for lost in self.seen - steps
            if sum(step > lost for step in steps) < self.keep
        ]
        self.newest, self.seen = max(steps, default=-1), steps
        return problems


def compare(run: Path, unbroken: Path, *, same_checkpoints: bool = True) -> list[str]:
    """Sentences about differences of a run that was broken from one that was not, and about faults of the former.

    Args:
        same_checkpoints: Whether they must have kept the same ones; a run that was stopped wrote some in between.
    """
    problems = []
    if same_checkpoints:
        problems += _difference("checkpoints", _checkpoints(run), _checkpoints(unbroken))
    problems += _difference("final step", _final(run).name, _final(unbroken).name)
    for name in _arrays(unbroken):
        problems += _difference(f"bytes of {name}", _arrays(run).get(name), _arrays(unbroken)[name])
    problems += _difference("names of weights and state", sorted(_arrays(run)), sorted(_arrays(unbroken)))
    problems += _difference("trainer's state", _trainer_state(run), _trainer_state(unbroken))
    problems += _difference("metrics", metrics(run), metrics(unbroken))
    problems += _difference("rollouts", _rollouts(run), _rollouts(unbroken))
    problems += _difference("evaluations", _evaluations(run), _evaluations(unbroken))
    problems += _difference("ledger", ledger(run), ledger(unbroken))
    problems += [f"left over: {path}" for path in run.rglob(".*") if path.name != ".lock"]
    problems += [f"left over: {path}" for path in (run / "checkpoints").glob("damaged-*")]
    return problems


def check_ledger(run: Path) -> list[str]:
    """Sentences about faults of the ledger in itself."""
    records = ledger(run)
    problems = _difference("optimizer steps", [update for _, update, _ in records], list(range(1, len(records) + 1)))
    steps = [step for step, _, _ in records]
    problems += _difference("order of steps", steps, sorted(steps))
    counts = Counter(tuple(sample) for _, _, samples in records for sample in samples)
    problems += [f"{sample} was learned from {count} times" for sample, count in counts.items() if count > 1]
    return problems


def ledger(run: Path) -> list[tuple[int, int, list[Any]]]:
    """(step, optimizer step, samples) of each optimizer step."""
    return [(each["step"], each["update"], each["samples"]) for each in read_ledger(run)]


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each step, those of its last attempt, without clocks."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {k: v for k, v in line.items() if k not in ("time", "attempt") and not k.startswith("perf/")}
        for line in lines
    }


def _checkpoints(run: Path) -> list[str]:
    """The names in the folder of checkpoints, and the target of the best."""
    best = run / "checkpoints" / "best"
    return [*sorted(path.name for path in best.parent.iterdir()), str(best.is_symlink() and best.readlink())]


def _final(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def _arrays(run: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of each tensor of the final checkpoint, by file and name."""
    return {
        f"{path.relative_to(_final(run))}: {name}": (
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.contiguous().reshape(-1).view(dtype=torch.uint8).numpy().tobytes(),
        )
        for path in sorted(_final(run).rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _trainer_state(run: Path) -> Any:
    return json.loads((_final(run) / "state" / "run.json").read_text())["trainer"]


def _rollouts(run: Path) -> dict[str, list[Any]]:
    files = sorted((run / "rollouts").glob("[!.]*"))
    return {path.name: Redactor().plain(list(read_lines(path))) for path in files}


def _evaluations(run: Path) -> dict[str, bytes]:
    """The bytes of each file."""
    return {path.name: path.read_bytes() for path in sorted((run / "evaluations").glob("[!.]*"))}


def _difference(what: str, found: Any, expected: Any) -> list[str]:
    if found == expected:
        return []
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        keys = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
        if isinstance(found.get(keys[0]), Mapping) and isinstance(expected.get(keys[0]), Mapping):
            return _difference(f"{what} of {keys[0]}", found[keys[0]], expected[keys[0]])
        return [f"{what} differ at {keys}: {found.get(keys[0])!r:.300} instead of {expected.get(keys[0])!r:.300}"]
    return [f"{what}: {found!r:.300} instead of {expected!r:.300}"]
