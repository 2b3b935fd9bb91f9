"""The folder that a run writes (the contract of what is where is in ``RunDirectory``).

Files that a reader may open while the run goes on are either appended line by line or replaced in one move, so none
is ever seen half-written. JSON is pure ASCII: model output cannot smuggle control characters into a terminal. JSON
has no NaN or infinity: they are written as null.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from mmrl.errors import ConfigError, ResourceError
from mmrl.redaction import Redactor

_LOCK = ".lock"
_CLAIMS = ("config.yaml", "metrics.jsonl")
"""A folder that has one of these holds a run."""


class RunDirectory:
    """One run on disk.

    RUN/config.yaml                 resolved, with defaults; it makes the folder a run
    RUN/environment.json            versions, plugins, what really ran
    RUN/metrics.jsonl               append-only, one object per step: step, attempt, time, metrics
    RUN/rollouts/step-000001.jsonl  every rollout, rejected and greedy ones too
    RUN/events.jsonl                append-only: faults, dropped samples
    RUN/media/, RUN/checkpoints/    written by others
    """

    def __init__(self, path: Path, lock: TextIO | None = None) -> None:
        self.path = path
        self._lock_file = lock
        self._redact = Redactor()
        self._lock = threading.Lock()
        self._has_steps = False

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        """The run directory at ``path``, made if needed; leftovers of a start that failed are taken over.

        Raises:
            ConfigError: The folder holds a run, or is not a folder.
            ResourceError: It cannot be made or written.
        """
        path = Path(path).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
            found = _run_in(path)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{path} is not a folder", where="trainer.run_dir", remedy="choose another") from error
        except OSError as error:
            raise ResourceError(f"cannot make {path}: {error.strerror}", where="trainer.run_dir") from error
        if found:
            raise ConfigError(
                f"{path} already holds a run",
                where=f"trainer.run_dir: {path / found} exists",
                remedy="choose another trainer.run_dir (also to run its config.yaml again), or move the folder away",
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise ResourceError(f"cannot write to {path}", where="trainer.run_dir", remedy="choose another")
        return cls(path, _locked(path))

    @property
    def media(self) -> Path:
        """Where the media store keeps images by content."""
        return self.path / "media"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go, one folder each."""
        return self.path / "checkpoints"

    def write_config(self, text: str) -> None:
        """Write config.yaml. From then on the folder holds a run: call it once everything has started."""
        _replace(self.path / "config.yaml", self._redact(text))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write environment.json."""
        _replace(self.path / "environment.json", json.dumps(self._redact.plain(environment), indent=2) + "\n")

    def append_metrics(self, step: int, metrics: Mapping[str, float], attempt: int = 1) -> None:
        """Append one step to metrics.jsonl; ``time`` is in seconds since 1970."""
        self._append("metrics.jsonl", {"step": step, "attempt": attempt, "time": time.time(), **metrics})
        self._has_steps |= step > 0

    def release(self) -> None:
        """Leave the folder to the next run, unless this one has finished a step: then its numbers are kept.

        Rollouts stay in any case: they may tell why the first step failed.
        """
        if not self._has_steps:
            for name in _CLAIMS:
                (self.path / name).unlink(missing_ok=True)
        if self._lock_file is not None:
            self._lock_file.close()  # the file stays: one who waits for it must not hold another than the next one

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the rollouts of one step, one line each; an earlier attempt's are replaced."""
        text = "".join(json.dumps(self._redact.plain(record)) + "\n" for record in records)
        _replace(self.path / "rollouts" / f"step-{step:06d}.jsonl", text)

    def event(self, kind: str, **fields: Any) -> None:
        """Append what happened to events.jsonl; may be called from any thread."""
        self._append("events.jsonl", {"time": time.time(), "kind": kind, **fields})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps(self._redact.plain(record)) + "\n"
        with self._lock, (self.path / name).open("a", encoding="ascii") as file:
            file.write(line)


def _locked(path: Path) -> TextIO:
    """A lock on the folder, held until the file is closed or the process ends.

    Raises:
        ResourceError: Another process holds it.
    """
    file = (path / _LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ResourceError(
            f"another process is using {path}", where="trainer.run_dir", remedy="choose another trainer.run_dir"
        ) from None
    return file


def _run_in(path: Path) -> str | None:
    """What makes the folder a run, if it is one."""
    for name in _CLAIMS:
        if (path / name).exists():
            return name
    return "checkpoints" if any((path / "checkpoints").glob("[!.]*")) else None


def _replace(path: Path, text: str) -> None:
    """Write a whole file in one move: readers see the old one or the new one, also after a crash."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
