"""A run's folder as the viewer reads it: what was read is kept as long as its files are the same, in bounded memory."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mmrl.errors import MMRLError
from mmrl.rollout.records import recorded_in
from mmrl.rollout.records.paging import GroupPages
from mmrl.runs.reader import Run, load_run
from mmrl.viewer.documents import NotThere
from mmrl.viewer.tokens import Vocabulary

_T = TypeVar("_T")
KINDS = ("step", "evaluation", "blank")
"""Rollouts of training steps, of evaluations, and of evaluations with blank images."""
_KEPT = 64
"""Things read from files that are kept, the least recently used out first."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ViewedRun:
    """A run that is shown.

    Attributes:
        lock: Held by whoever reads it: one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.lock = threading.Lock()
        self._kept: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def problem(self) -> str | None:
        """The reason why nothing of it can be shown; None if it can."""
        try:
            load_run(self.path)
        except MMRLError as error:
            return str(error)
        return None

    @property
    def run(self) -> Run:
        """What the folder holds now.

        Raises:
            ConfigError: It holds no run.
        """
        return load_run(self.path)

    def files(self, kind: str) -> dict[int, Path]:
        """The recorded steps of a kind, in order."""
        if kind == "step":
            return recorded_in(self.path / "rollouts", "step")
        return recorded_in(self.path / "evaluations", "step" if kind == "evaluation" else "blank")

    def file(self, kind: str, step: int) -> Path:
        """The file of a step.

        Raises:
            NotThere: It was not recorded.
        """
        if (file := self.files(kind).get(step)) is None:
            what = "step" if kind == "step" else "evaluation"
            raise NotThere(f"there are no rollouts of {what} {step}", where=str(self.path))
        return file

    def pages(self, kind: str, step: int) -> GroupPages:
        """The groups of a step."""
        file = self.file(kind, step)
        return self.kept("pages", file, lambda: GroupPages(file), of=1)

    def image(self, name: str) -> bytes:
        """The PNG file of an image, by its hash.

        Raises:
            NotThere: It is not in the run's media folder; also if a link leads out of it.
        """
        folder = self.path / "media"
        file = folder / f"{name}.png"
        with suppress(OSError):
            if _SHA256.fullmatch(name) and file.resolve(strict=True).parent == folder.resolve():
                return file.read_bytes()
        raise NotThere("the run has no such image", where=str(folder))

    @property
    def accuracy(self) -> str | None:
        """The reward component that tells right from wrong; None if the config does not say it."""
        config = self.config
        rewards = config.get("rewards") or []
        first = [each.get("label") or str(each.get("name")).rpartition(":")[2] for each in rewards[:1]]
        own = [*first, *(["environment"] if config.get("environment") else []), None][0]
        return (config.get("trainer") or {}).get("eval_metric") or own

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config; empty if it cannot be read."""
        return self._config[0]

    @property
    def config_problem(self) -> str | None:
        """The reason why the config cannot be read; None if it can."""
        return self._config[1]

    @property
    def _config(self) -> tuple[dict[str, Any], str | None]:
        def read() -> tuple[dict[str, Any], str | None]:
            try:
                return self.run.config, None
            except MMRLError as error:
                return {}, str(error)

        return self.kept("config", self.path / "config.yaml", read)

    @property
    def vocabulary(self) -> Vocabulary:
        """The texts of the run's tokens."""
        models = [each.path / "model" for each in reversed(self.run.checkpoints)]
        path = (self.config.get("model") or {}).get("path")
        return Vocabulary.of([*models, *([Path(path)] if path else [])])

    def kept(self, name: Any, file: Path, read: Callable[[], _T], of: int | None = None) -> _T:
        """What ``read`` answers, read again only when the file has changed.

        Args:
            of: The most things of this name to keep.
        """
        try:
            status = file.stat()
            now = (status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError:
            now = (0, 0, 0)
        key = (name, file)
        if key in self._kept and self._kept[key][0] == now:
            self._kept.move_to_end(key)
            found: _T = self._kept[key][1]
            return found
        found = read()
        self._kept[key] = (now, found)
        same = [other for other in self._kept if other[0] == name]
        for other in same[: len(same) - of] if of else []:
            del self._kept[other]
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return found
