"""The folder that an evaluation keeps: every completion as soon as it is scored, and the results at the end.

OUT/settings.json       what the completions depend on; another evaluation is refused
OUT/samples.jsonl       a line for each completion, as `mmrl rollouts` reads it; at the end in the order of the prompts
OUT/samples-blank.jsonl the same with blank images
OUT/results.json        what `--json` prints
OUT/media/              images by content
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Self, TextIO

from mmrl.errors import ConfigError, DataError, ResourceError
from mmrl.rollout.records import group_records, read_groups
from mmrl.rollout.rewards.failures import Failure
from mmrl.runs.evaluated import RESULTS, SETTINGS
from mmrl.runs.files import locked, mend, read_records, replace_file, writing
from mmrl.runs.resumption import changed_fingerprints
from mmrl.system.redaction import Redactor
from mmrl.system.signals import defer_signals
from mmrl.types import EncodedPrompt, ScoredGroup


class OutputFolder:
    """A context that keeps other processes out of the folder.

    Raises:
        ConfigError: The folder holds something else.
        ResourceError: It cannot be made or written, or another process uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            others = [each.name for each in self.path.iterdir() if each.name != ".lock"]
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{self.path} is not a folder", where="--output", remedy="choose another") from error
        except OSError as error:
            raise ResourceError(f"cannot make {self.path}: {error.strerror}", where="--output") from error
        if others and SETTINGS not in others and set(others) - {"media"}:
            raise ConfigError(
                f"{self.path} holds something else than an evaluation",
                where=f"--output: {', '.join(sorted(others)[:5])}",
                remedy="choose another folder",
            )
        self._lock: TextIO | None = None

    def __enter__(self) -> Self:
        self._lock = locked(self.path, "--output")
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def media(self) -> Path:
        return self.path / "media"

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Note the completions' settings.

        Raises:
            ConfigError: The folder's completions come from something else.
        """
        path = self.path / SETTINGS
        now = json.loads(json.dumps(Redactor().plain(settings)))
        if path.exists():
            try:
                before = json.loads(path.read_text(encoding="ascii"))
            except ValueError as error:
                raise DataError(f"the settings of the evaluation are no JSON: {error}", where=str(path)) from error
            if changes := changed_fingerprints(before, now):
                raise ConfigError(
                    "the folder holds another evaluation:\n" + "\n".join(f"    {change}" for change in changes),
                    where=f"--output {self.path}",
                    remedy="undo the change, or choose another folder",
                )
        replace_file(path, json.dumps(now, indent=2) + "\n")

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write results.json."""
        replace_file(self.path / RESULTS, json.dumps(Redactor().plain(results), indent=2) + "\n")


class Samples:
    """A file of scored groups, each of them a line per completion.

    An existing file is read, without half a line or half a group at its end; groups in which a reward or an environment
    had failed are sampled and scored again.

    Args:
        prompts: The evaluation's prompts, in order.
        num_samples: Completions of each prompt.
        media: The folder of their images.

    Attributes:
        known: The groups that are there, by prompt id.
    """

    def __init__(self, path: Path, prompts: Sequence[EncodedPrompt], num_samples: int, media: Path) -> None:
        self._path, self._places = path, {prompt.id: place for place, prompt in enumerate(prompts)}
        self._texts: dict[str, str] = {}
        self._redact = Redactor()
        self.known: dict[str, ScoredGroup] = {}
        for name, records in self._whole_groups(num_samples):
            self._texts[name] = "".join(json.dumps(record) + "\n" for record in records)
            (self.known[name],) = read_groups(records, media)
        if path.exists():
            self._replace(self._texts)

    def keep(self, group: ScoredGroup, failures: Sequence[Failure]) -> None:
        """Append a group.

        Raises:
            ResourceError: The file cannot be written.
        """
        name = group.group.prompt.id
        self._texts[name] = self._text(group, failures)
        with defer_signals(), writing(self._path), self._path.open("a+b") as file:
            mend(file)  # cuts a half line off the end
            file.write(self._texts[name].encode("ascii"))

    def finish(self) -> None:
        """Put the groups in the order of their prompts."""
        self._replace(sorted(self._texts, key=self._places.__getitem__))

    def _replace(self, names: Iterable[str]) -> None:
        replace_file(self._path, "".join(self._texts[name] for name in names))

    def _text(self, group: ScoredGroup, failures: Sequence[Failure]) -> str:
        place = self._places[group.group.prompt.id]
        causes = {(failure.rollout.index, failure.reward): failure.cause for failure in failures}
        return "".join(
            json.dumps(self._redact.plain({**record, "group": place, "failed": _of(causes, record["index"])})) + "\n"
            for record in group_records([group])
        )

    def _whole_groups(self, num_samples: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        for name, members in groupby(read_records(self._path), lambda record: record["prompt_id"]):
            records = list(members)
            failed = any(each["failed"] or each.get("failure") for each in records)
            if len(records) == num_samples and name in self._places and not failed:
                yield name, records


def _of(causes: Mapping[tuple[int, str], str], member: int) -> dict[str, str]:
    return {reward: cause for (index, reward), cause in causes.items() if index == member}
