"""The folder that ``mmrl eval --output`` keeps, read back: settings, results and completions. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, DataError
from mmrl.rollout.records import RecordedRollout, read_rollouts
from mmrl.rollout.records.paging import GroupPages
from mmrl.runs.files import is_locked

SETTINGS, RESULTS = "settings.json", "results.json"
SAMPLES, BLANK_SAMPLES = "samples.jsonl", "samples-blank.jsonl"


class RecordedEvaluation:
    """An evaluation's folder. It is read when it is asked for, so that one at work shows what there is.

    Attributes:
        path: OUT.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()

    @property
    def is_live(self) -> bool:
        """True if a process is at work on it."""
        return is_locked(self.path)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Everything that its completions depend on, as plain values.

        Raises:
            DataError: They are no JSON.
        """
        return self._read(SETTINGS)

    @property
    def results(self) -> Mapping[str, Any]:
        """The output of ``mmrl eval --json``; empty before its end.

        Raises:
            DataError: They are no JSON.
        """
        return self._read(RESULTS) if (self.path / RESULTS).exists() else {}

    def rollouts(self, *, blank: bool = False) -> Iterator[RecordedRollout]:
        """Its completions, read one by one; each has ``text``, ``rewards`` and ``images``.

        Args:
            blank: True for those of the prompts whose images were blank.

        Raises:
            DataError: There are none, or something in the file is no record of a rollout.
        """
        return read_rollouts(self._samples(blank))

    def groups(self, *, blank: bool = False) -> GroupPages:
        """Its completions by prompt: an index of chosen fields, and one group's records at a time.

        Raises:
            DataError: There are none.
        """
        return GroupPages(self._samples(blank))

    def _samples(self, blank: bool) -> Path:
        file = self.path / (BLANK_SAMPLES if blank else SAMPLES)
        if not file.is_file():
            what = f"the evaluation has recorded no completions{' with blank images' * blank}"
            raise DataError(what, where=str(self.path), remedy="wait for the first, or evaluate again")
        return file

    def _read(self, name: str) -> Mapping[str, Any]:
        path = self.path / name
        try:
            found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"a file of the evaluation cannot be read: {error}", where=str(path)) from error
        return found


def load_evaluation(path: str | Path) -> RecordedEvaluation:
    """The evaluation that ``mmrl eval --output`` keeps in a folder.

    Raises:
        ConfigError: The folder holds none.
    """
    found = RecordedEvaluation(path)
    if not (found.path / SETTINGS).is_file():
        remedy = "name the folder that `mmrl eval --output` was given"
        raise ConfigError("there is no evaluation", where=str(found.path), remedy=remedy)
    return found
