"""The folder that a run writes (``RunDirectory`` lists its files).

Files that a reader may open while the run goes on are either appended line by line or replaced in one move, so none
is ever seen half-written. JSON is pure ASCII: model output cannot smuggle control characters into a terminal. JSON
has no NaN or infinity: they are written as null.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from mmrl.errors import ConfigError, ResourceError
from mmrl.rollout.records import EVALUATIONS, PARQUET, evaluation_names
from mmrl.runs.files import (
    LOCK,
    check_records,
    locked,
    making,
    mend,
    read_records,
    read_records_back,
    replace_file,
    replacing,
    writing,
)
from mmrl.runs.history import read_ledger
from mmrl.runs.origins import ORIGINS, merged_origins, read_origins
from mmrl.system import failpoints
from mmrl.system.redaction import Redactor
from mmrl.types import CreditedGroup

_HALF = re.compile(r"\..+\.\d+(-\d+)?")
"""Names of files that are being written: of the file, the process and perhaps the thread."""
_HISTORIES = ("metrics.jsonl", "ledger.jsonl", "events.jsonl", "attempts.jsonl")
_CLAIMS = ("config.yaml", "metrics.jsonl")
"""A folder that has one of these holds a run."""
_RECORDS = ("rollouts", EVALUATIONS)
"""Folders of files of groups."""
_OF_STEP = re.compile(rf"(step|blank)-(?P<step>\d+)\.({PARQUET}|jsonl)")
"""Names of these files."""
_SIGNS = (LOCK, *_HISTORIES, "environment.json", *_RECORDS, "given")
"""A folder that has one of these was a run's, if only of a start that failed."""
_SHOWN = 3
"""Files that a message names."""


class RunDirectory:
    """One run on disk.

    Events and ends of attempts are left out where the disk is full or cannot be written: they must not end a run. Any
    other write that fails raises ResourceError.

    RUN/config.yaml                   resolved, with defaults
    RUN/origins.json                  where each value of the config was written
    RUN/environment.json              versions, plugins, the engine as it really ran
    RUN/metrics.jsonl                 append-only, one object per step: step, attempt, time, metrics; of several of a
                                      step the last one counts
    RUN/rollouts/step-000001.parquet  every rollout, rejected and greedy ones too
    RUN/evaluations/                  the same of each evaluation; see ``write_evaluation``
    RUN/undone/attempt-000001/        both, of steps that were undone when the run went on from an earlier checkpoint
    RUN/events.jsonl                  append-only: faults, dropped samples
    RUN/attempts.jsonl                append-only: where each attempt began, and how it ended
    RUN/engines.log                   standard error of the engines' libraries while they started
    RUN/ledger.jsonl                  append-only: which samples entered which optimizer step; see ``read_ledger``
    RUN/media/, RUN/checkpoints/      written by others
    RUN/given/                        sources and rows that ``mmrl.train`` was given, named by their content

    Attributes:
        attempt: Times that the run was started or went on by itself; 0 before the first.
        resumed_from: The step of the checkpoint that this attempt went on from; None if it began from nothing.
        has_steps: True if metrics.jsonl has a finished step.
    """

    def __init__(self, path: Path, lock: TextIO | None = None) -> None:
        self.path = path
        self._lock_file = lock
        self._redact = Redactor()
        self._lock = threading.Lock()
        if lock is not None:
            _remove_halves(path)
        for name in _HISTORIES:
            with suppress(FileNotFoundError), (path / name).open("r+b") as file:
                mend(file)
        self.attempt = max((record.get("attempt", 0) for record in self._read("attempts.jsonl")), default=0)
        self.resumed_from: int | None = None
        check_records(path / "metrics.jsonl")
        self.has_steps = any(record["step"] > 0 for record in read_records_back(path / "metrics.jsonl"))

    @classmethod
    def create(cls, path: str | Path, *, new: bool = True, begins_from: Path | None = None) -> RunDirectory:
        """The run directory at ``path``, made if needed; leftovers of a start that failed are taken over.

        Args:
            new: True if it must not hold a run yet.
            begins_from: The path of the checkpoint that the run begins from; it may have begun from there already.

        Raises:
            ConfigError: The folder holds a run, or is not a folder.
            ResourceError: It cannot be made or written.
        """
        path = Path(path).expanduser()
        with making(path):
            found = _run_in(path)
            if found and new:
                raise _occupied(path, found)
            check_place(path)
            path.mkdir(parents=True, exist_ok=True)
        lock = locked(path)
        try:
            directory = cls(path, lock)
        except BaseException:
            lock.close()
            raise
        begun_from = directory.begun_from
        if found and begins_from and not (begun_from and begun_from.is_relative_to(begins_from.expanduser().resolve())):
            directory._unlock()
            raise _occupied(path, found)
        return directory

    @property
    def begun_from(self) -> Path | None:
        """The checkpoint of another run that this one began from; None if it began from nothing."""
        begun = [record for record in self._read("attempts.jsonl") if "resumed_from" in record]
        for record in reversed(begun):
            if record["resumed_from"] is None:
                return None
            if record.get("source"):
                return Path(record["source"])
        return None

    @property
    def media(self) -> Path:
        """The folder in which the media store keeps images by content."""
        return self.path / "media"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, which have one folder each."""
        return self.path / "checkpoints"

    def write_config(self, text: str) -> None:
        """Write config.yaml. From then on the folder holds a run: call it once everything has started."""
        replace_file(self.path / "config.yaml", self._redact(text))

    def write_origins(self, origins: Mapping[str, str], changed: Collection[str] = ()) -> None:
        """Write origins.json; ``changed`` names the keys whose values have changed since the checkpoint."""
        merged = merged_origins(origins, read_origins(self.path), self.path, changed)
        replace_file(self.path / ORIGINS, json.dumps(self._redact.plain(merged), indent=2) + "\n")

    def write_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Write environment.json."""
        replace_file(self.path / "environment.json", json.dumps(self._redact.plain(provenance), indent=2) + "\n")

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append one step to metrics.jsonl; ``time`` is in seconds since 1970. Returns the line."""
        line = {"step": step, "attempt": self.attempt, "time": time.time(), **metrics}
        self._append("metrics.jsonl", line)
        self.has_steps |= step > 0
        return line

    def metrics(self, names: Collection[str] | None = None) -> dict[int, dict[str, Any]]:
        """Each step's last record in metrics.jsonl, with these metrics; None is all of them."""
        records = ((record["step"], record) for record in self._read("metrics.jsonl"))
        if names is None:
            return dict(records)
        return {step: {name: record[name] for name in names if name in record} for step, record in records}

    def logged(self, step: int, attempt: int) -> dict[str, Any] | None:
        """A step's last record in metrics.jsonl, if an attempt wrote it or a later one; the file is read from its end.

        Each attempt takes its steps in order.
        """
        for record in read_records_back(self.path / "metrics.jsonl"):
            if record["attempt"] < attempt or (record["attempt"] == attempt and record["step"] < step):
                return None
            if record["step"] == step:
                return record
        return None

    def append_ledger(self, step: int, update: int, samples: Sequence[tuple[int, str, int]]) -> None:
        """Note the (epoch, prompt id, member) of each sample that entered an optimizer step."""
        self._append("ledger.jsonl", {"attempt": self.attempt, "step": step, "update": update, "samples": samples})

    def begin_attempt(self, step: int | None, **fields: Any) -> None:
        """Note that the run begins, or goes on from the checkpoint of a step; later steps are undone.

        Args:
            fields: ``source`` is the checkpoint of another run that it begins from.
        """
        self._set_aside(-1 if step is None else step)
        self.attempt += 1
        self.resumed_from = step
        if step is not None or (self.path / "ledger.jsonl").exists():
            self._append("ledger.jsonl", {"attempt": self.attempt, "resumed_from": step or 0})
        record = {"attempt": self.attempt, "time": time.time(), "resumed_from": step, "pid": os.getpid()}
        record |= {"folder": str(Path.cwd())}
        self._append("attempts.jsonl", {**record, "host": socket.gethostname(), **fields})

    def _set_aside(self, last: int) -> None:
        """Move the rollouts of later steps out of the way; they may tell why the attempt failed."""
        for folder in _record_folders(self.path):
            undone = self.path / "undone" / f"attempt-{self.attempt:06d}" / folder.relative_to(self.path)
            for file in folder.glob("*-*"):
                if (found := _OF_STEP.fullmatch(file.name)) and int(found["step"]) > last:
                    with writing(undone):
                        undone.mkdir(parents=True, exist_ok=True)
                        file.replace(undone / file.name)

    def end_attempt(self, exit_code: int, message: str = "") -> None:
        """Note the end of the attempt, as far as the folder can be written."""
        record = {"attempt": self.attempt, "time": time.time(), "exit_code": exit_code, "message": message}
        with suppress(ResourceError):
            self._append("attempts.jsonl", record)

    def inherit(self, other: Path, step: int) -> None:
        """Take over the metrics and the ledger of another run up to a step."""
        metrics = [record for record in read_records(other / "metrics.jsonl") if record["step"] <= step]
        ledger = [record for record in read_ledger(other) if record["step"] <= step]
        for name, records in {"metrics.jsonl": metrics, "ledger.jsonl": ledger}.items():
            replace_file(self.path / name, "".join(json.dumps(record) + "\n" for record in records))

    def sync(self) -> None:
        """Force appended lines and names of rollouts to the disk, so that a checkpoint finds its history there."""
        for name in _HISTORIES:
            with suppress(FileNotFoundError), (self.path / name).open("rb") as file:
                os.fsync(file.fileno())
        for place in _record_folders(self.path):
            with suppress(FileNotFoundError):
                folder = os.open(place, os.O_RDONLY)
                try:
                    os.fsync(folder)  # the names of its files, whose content is there
                finally:
                    os.close(folder)

    def start_anew(self) -> None:
        """Forget a run that has not finished a step."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        for name in (*_CLAIMS, "ledger.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        self.has_steps = False

    def release(self) -> None:
        """Leave the folder to the next run, unless this one can go on or has finished a step.

        Rollouts stay in any case: they may tell why the first step failed.
        """
        if not self.has_steps and not _has_checkpoints(self.path):
            for name in _CLAIMS:
                (self.path / name).unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()  # the file stays: others may have opened it, and would lock another one

    def write_rollouts(
        self, step: int, groups: Iterable[CreditedGroup], state: Mapping[str, Any] | None = None
    ) -> None:
        """Write the rollouts of one step; an earlier attempt's are replaced.

        Args:
            state: The algorithm's state before the step.
        """
        path = self._write_groups("rollouts", f"step-{step:06d}", groups, state or {})
        with writing(path):
            path.with_suffix(".jsonl").unlink(missing_ok=True)  # of an attempt with an older version

    def write_evaluation(
        self, step: int, groups: Iterable[CreditedGroup], *, name: str = "", blank: bool = False
    ) -> None:
        """Write the groups of an evaluation to ``evaluations/step-000010.parquet``; an earlier attempt's are replaced.

        Args:
            name: The name of one of several sets: ``evaluations/NAME/step-000010.parquet``.
            blank: True for those of prompts whose images were blank: ``evaluations/blank-000010.parquet``.
        """
        self._write_groups(EVALUATIONS, f"{'blank' if blank else 'step'}-{step:06d}", groups, {}, name)

    def _write_groups(
        self, folder: str, name: str, groups: Iterable[CreditedGroup], state: Mapping[str, Any], inner: str = ""
    ) -> Path:
        from mmrl.rollout.records.writing import write_groups

        failpoints.reach(f"{folder}.begin")
        path = self.path / folder / inner / f"{name}.{PARQUET}"
        with writing(path):
            (self.path / folder).mkdir(exist_ok=True)
        with replacing(path, f"{folder}.filled") as file:
            write_groups(file, groups, state, self._redact)
        failpoints.reach(f"{folder}.renamed")
        return path

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to events.jsonl, as far as it can be written; may be called from any thread."""
        with suppress(ResourceError):
            self._append("events.jsonl", {"time": time.time(), "kind": kind, **fields})

    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        return read_records(self.path / name)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps(self._redact.plain(record)) + "\n"
        with self._lock, writing(self.path / name), (self.path / name).open("a+b") as file:
            mend(file)  # one that could not be written whole
            file.write(line.encode("ascii"))


def _remove_halves(path: Path) -> None:
    """Remove the files that a killed process had not written whole; only for the process that holds the lock."""
    for folder in (path, *_record_folders(path), path / "media"):
        for half in folder.glob(".*"):
            if _HALF.fullmatch(half.name):
                with suppress(OSError):
                    half.unlink()


def _record_folders(path: Path) -> list[Path]:
    """The folders of files of groups: of steps, of evaluations, and of each evaluation set that has a name."""
    return [
        *(path / name for name in _RECORDS),
        *(path / EVALUATIONS / name for name in evaluation_names(path) if name),
    ]


def check_place(path: Path) -> None:
    """Check that a run can be in a folder, which may exist or not; makes nothing.

    Raises:
        ConfigError: It, or a folder above it, is a file; or it holds other files.
        ResourceError: It cannot be written.
    """
    where, place = "trainer.run_dir", path.absolute()
    try:
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            made = "" if place == path.absolute() else f"{path} cannot be made: "
            raise ConfigError(f"{made}{place} is not a folder", where=where, remedy="choose another")
        others = sorted(each.name for each in place.iterdir()) if place == path.absolute() else []
    except OSError as error:
        raise ResourceError(f"cannot make {path}: {error.strerror}", where=where) from error
    if not os.access(place, os.W_OK | os.X_OK):
        raise ResourceError(f"cannot write to {place}", where=where, remedy="choose another")
    seen = [name for name in others if not name.startswith(".")]
    if seen and not set(others) & set(_SIGNS) and not _has_checkpoints(path):
        more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
        raise ConfigError(
            f"{path} holds other files, and no run: {', '.join(seen[:_SHOWN])}{more}",
            where=where,
            possible="a new folder, an empty one, or that of a run to go on with",
            remedy=f"choose another, such as {path / 'run'}",
        )


def _run_in(path: Path) -> str | None:
    """The name of the file or folder that makes the folder a run; None if it is no run."""
    for name in _CLAIMS:
        if (path / name).exists():
            return name
    return "checkpoints" if _has_checkpoints(path) else None


def _occupied(path: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{path} already holds a run",
        where=f"trainer.run_dir: {path / found} exists",
        remedy="go on with it (--resume auto), choose another trainer.run_dir, or move the folder away",
    )


def _has_checkpoints(path: Path) -> bool:
    return any((path / "checkpoints").glob("step-*"))
