"""A run's folder as the viewer reads it: what was read is kept as long as its files are the same, in bounded memory."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mmrl.errors import DataError, MMRLError
from mmrl.rollout.records import evaluation_names, recorded_evaluations, recorded_steps
from mmrl.rollout.records.paging import GroupPages
from mmrl.runs.reader import Run, load_run
from mmrl.runs.sweeps import SWEEP, is_sweep, load_sweep
from mmrl.types import ENVIRONMENT
from mmrl.viewer.contained import MAX_IMAGE, open_contained, read_contained, read_object, read_records
from mmrl.viewer.documents import NotThere
from mmrl.viewer.lines import FITS
from mmrl.viewer.tokens import Vocabulary

_T = TypeVar("_T")
KINDS = ("step", "evaluation", "blank")
"""Rollouts of training steps, of evaluations, and of evaluations with blank images; those of an evaluation set that has
a name are of the kind ``evaluation.NAME`` or ``blank.NAME``."""
_KEPT = 64
"""Files of which a thing is kept, by default."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def viewed_runs(paths: Sequence[Path], *, is_sent: bool = False) -> Iterator[ViewedRun]:
    """The runs in these folders, each a run's or a sweep's.

    Raises:
        DataError: A sweep's record is damaged.
    """
    for path in paths:
        if is_sweep(path):
            _, problem = read_object(folder := path.expanduser().absolute(), folder / SWEEP)
            if problem:
                raise DataError(problem, where=str(folder))
            sweep = load_sweep(folder)
            for each in sweep.points:
                point = ViewedPoint(sweep.path, each.values, each.seed)
                yield ViewedRun(each.run.path, is_sent=is_sent, point=point)
        else:
            yield ViewedRun(path, is_sent=is_sent)


@dataclass(frozen=True)
class ViewedPoint:
    """The place of a run in a sweep.

    Attributes:
        sweep: The sweep's folder.
        values: The value of each axis, by dotted key.
    """

    sweep: Path
    values: Mapping[str, Any]
    seed: int


class ViewedRun:
    """A run that is shown.

    Args:
        point: Its place, if it is a sweep's.
        is_sent: True if others get what is shown: rollouts too may then lie in its folder only, and where that is is
            not told.

    Attributes:
        name: Its name in the page, that of its folder unless it is given another.
        lock: Held by whoever reads it: one thread at a time.
    """

    def __init__(self, path: Path, *, is_sent: bool = False, point: ViewedPoint | None = None) -> None:
        self.path, self.is_sent, self.point = path.expanduser().absolute(), is_sent, point
        self.name = self.path.name
        self.lock = threading.Lock()
        self._kept: dict[Any, OrderedDict[Path, tuple[Any, Any]]] = {}

    @property
    def shown_path(self) -> str:
        """Where it is; only its name for those who get a report."""
        return self.name if self.is_sent else str(self.path)

    @property
    def problem(self) -> str | None:
        """The reason why nothing of it can be shown; None if it can."""
        try:
            load_run(self.path)
        except MMRLError as error:
            return str(error) if self.point is None else "this point of the sweep has not begun"
        return None

    @property
    def run(self) -> Run:
        """The run as the folder holds it now.

        Raises:
            ConfigError: It holds no run.
        """
        return load_run(self.path)

    @property
    def sets(self) -> list[str]:
        """The evaluation sets with a name that it has recorded."""
        return [name for name in evaluation_names(self.path) if name]

    @property
    def kinds(self) -> list[str]:
        """``KINDS``, and those of evaluation sets with a name."""
        return [*KINDS, *(f"{kind}.{name}" for name in self.sets for kind in KINDS[1:])]

    def files(self, kind: str) -> dict[int, Path]:
        """The recorded steps of a kind, in order."""
        word, _, name = kind.partition(".")
        return (
            recorded_steps(self.path)
            if word == "step"
            else recorded_evaluations(self.path, name, blank=word == "blank")
        )

    def file(self, kind: str, step: int) -> Path:
        """The file of a step.

        Raises:
            NotThere: It was not recorded.
            DataError: It may not be read.
        """
        if (file := self.files(kind).get(step)) is None:
            what = "step" if kind == "step" else "evaluation"
            raise NotThere(f"there are no rollouts of {what} {step}", where=str(self.path))
        if not file.is_file():  # a pipe would be waited for
            raise DataError("this is no regular file", where=str(file))
        if self.is_sent:
            open_contained(self.path, file).close()
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
        with suppress(OSError, RuntimeError, DataError):  # RuntimeError: links that lead in a circle
            if _SHA256.fullmatch(name) and file.resolve(strict=True).parent == folder.resolve():
                return read_contained(folder, file, MAX_IMAGE)
        raise NotThere("the run has no such image", where=str(folder))

    def judge(self, kind: str) -> str | None:
        """The component that tells right from wrong in records of a kind."""
        evaluated = self.section("data").get("eval")
        own = evaluated.get(kind.partition(".")[2]) if isinstance(evaluated, dict) else None
        named = own.get("metric") if isinstance(own, dict) else None
        return named if isinstance(named, str) else self.accuracy

    @property
    def accuracy(self) -> str | None:
        """The reward component that tells right from wrong; None if the config does not say it."""
        rewards = self.config.get("rewards")
        for reward in rewards[:1] if isinstance(rewards, list) else ():
            named = reward if isinstance(reward, dict) else {}
            own = named.get("label") or str(named.get("name")).rpartition(":")[2]
            return self.section("trainer").get("eval_metric") or own
        own = ENVIRONMENT if self.section("environment") else None
        return self.section("trainer").get("eval_metric") or own

    def section(self, name: str) -> dict[str, Any]:
        """A section of the config; empty if it has none."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

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
        file = self.path / "config.yaml"

        def read() -> tuple[dict[str, Any], str | None]:
            try:
                open_contained(self.path, file).close()
                return self.run.config, None
            except FileNotFoundError:  # the run has only begun
                return {}, None
            except MMRLError as error:
                return {}, str(error)

        return self.kept("config", file, read)

    @property
    def vocabulary(self) -> Vocabulary:
        """The texts of the run's tokens."""
        models = [each.model for each in reversed(self.run.checkpoints)]
        path = self.section("model").get("path")
        return Vocabulary.of([*models, *([self._began_in / path] if isinstance(path, str) else [])])

    @property
    def _began_in(self) -> Path:
        """The folder that the run's relative paths begin at."""
        attempts, _ = self.lines("attempts.jsonl")
        return Path(next((each["folder"] for each in reversed(attempts) if each.get("folder")), "."))

    def lines(self, name: str) -> tuple[list[dict[str, Any]], str]:
        """The lines of a file as a run writes them, and a sentence about the others."""
        file = self.path / name
        return self.kept("lines", file, lambda: read_records(self.path, file, FITS[name]))

    def kept(self, name: Any, file: Path, read: Callable[[], _T], of: int = _KEPT) -> _T:
        """The answer of ``read``, read again only when the file has changed.

        Args:
            of: The most files of which a thing of this name is kept, the least recently used out first.
        """
        try:
            status = file.stat()
            now = (status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError:
            now = (0, 0, 0)
        same = self._kept.setdefault(name, OrderedDict())
        if file in same and same[file][0] == now:
            same.move_to_end(file)
            found: _T = same[file][1]
            return found
        same.pop(file, None)  # before the next one takes its memory
        while len(same) >= of:
            same.popitem(last=False)
        found = read()
        same[file] = (now, found)
        return found
