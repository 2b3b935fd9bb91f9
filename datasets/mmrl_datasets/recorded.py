"""Reads the completions that a run or an evaluation has recorded, as answers to imitate or to compare.

With ``keep`` a row is a completion worth imitating (rejection sampling). Without it a row is a prompt with its
completions as candidates, whose scores are their rewards. The README of datasets/ has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError, DataError, plural
from mmrl.interfaces import DatasetLoader, SampledRow
from mmrl.types import Candidate, Message, Prompt, RawImage
from mmrl_datasets.completions import SEVERAL_TURNS, Choice, RecordedOptions, Recording, Row

if TYPE_CHECKING:
    from mmrl import RecordedEvaluation, Rollout, Run

_ROW = ("prompt_id", "messages", "images", "source", "answer", "choices", "columns")
_LOOKED_AT = 32
"""Rows that are compared with what this run's model makes of them, evenly spread."""
_OPEN_FILES = 8
"""Files of which a part is kept in memory."""


class Recorded(DatasetLoader):
    """Rows made of a run's own rollouts, or of an evaluation's."""

    class Config(RecordedOptions):
        """All options."""

    config: Config

    def load(self) -> Sequence[Prompt]:
        """The rows, in the order in which they were recorded.

        Raises:
            ConfigError: Options do not go with what the folder holds.
            DataError: It holds no records, lacks a step, a set or a reward, or no completion can be used.
        """
        self._source = Source.of(self.config)
        recordings = self._source.recordings(self.config)
        self._chosen = choice = Choice(self.config)
        for number, recording in enumerate(recordings):
            choice.add(number, recording)
        if not choice.rows:
            raise choice.nothing(self.config)
        self._rows = RecordedRows(recordings, choice.rows, self._source.media, imitates=self.config.keep is not None)
        return self._rows

    def describe(self) -> Mapping[str, str]:
        """The folder, the rows, and counts of what was left out."""
        return {"path": self.config.path, "recorded": self._source.told, **self._chosen.described()}

    def notes(self) -> Sequence[str]:
        """A run that is at work, whose later records are not read; and episodes, which are not."""
        found = list[str]()
        if self._source.is_live:
            what = (
                f"{self.config.path} is at work: what it records from now on is not read, and a run that goes on later"
            )
            found.append(f"{what} finds other rows, and is refused; name steps (steps: {{last: N}}) to have the same")
        if turns := self._chosen.left_out[SEVERAL_TURNS]:
            what = "which this version cannot give as an answer"
            found.append(f"{plural(turns, 'completion')} left out that are episodes of several turns, {what}")
        return found

    def fingerprint(self) -> str:
        """A hash of the rows' ids, prompts, images, texts and values."""
        return self._chosen.fingerprint()

    def sampled(self) -> Sequence[SampledRow]:
        """Some rows as they were sampled, evenly spread, but those that cannot be read: they are told when they are."""
        most, by, found = min(_LOOKED_AT, len(self._rows)), self._source.model, list[SampledRow]()
        places = [place * (len(self._rows) - 1) // max(1, most - 1) for place in range(most)]
        for place in places:
            with suppress(DataError):
                found.append(SampledRow(self._rows[place], self._rows.rollout(place), by))
        return found


class RecordedRows(Sequence[Prompt]):
    """Rows as prompts, read from the records when they are asked for."""

    def __init__(self, recordings: Sequence[Recording], rows: Sequence[Row], media: Path, *, imitates: bool) -> None:
        self._rows, self._media, self._imitates = rows, media, imitates
        self._pages = lru_cache(_OPEN_FILES)(lambda number: recordings[number].open())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
        group = self._pages(row.recording).fields(row.group, _ROW, ("completion",))
        of_prompt, texts = group.of_group, [group.of_rollouts["completion"][place] for place in row.places]
        candidates = tuple(Candidate(text, value) for text, value in zip(texts, row.values, strict=True))
        return Prompt(
            row.id,
            tuple(Message(each["role"], each["content"]) for each in of_prompt["messages"]),
            tuple(self._image(row.id, *each) for each in enumerate(of_prompt["images"])),
            of_prompt["answer"],
            of_prompt["columns"],
            texts[0] if self._imitates else None,
            of_prompt["source"],
            tuple(of_prompt["choices"]),
            () if self._imitates else candidates,
        )

    def rollout(self, index: int) -> Rollout:
        """The first completion of a row, as it was sampled."""
        row = self._rows[index]
        return self._pages(row.recording).rollouts(row.group)[row.places[0]].rollout

    def _image(self, row: str, number: int, image: Mapping[str, Any]) -> RawImage:
        path = self._media / f"{image['hash']}.png"
        try:
            return RawImage(path.read_bytes(), f"{row}, image {number}: {path}")
        except OSError as error:
            remedy = "copy the folder media/ along with the records"
            raise DataError(
                f"A recorded image cannot be read: {error.strerror}", where=f"{row}: {path}", remedy=remedy
            ) from error


@dataclass(frozen=True)
class Source:
    """A folder with records.

    Attributes:
        model: The model that sampled them, for people.
        is_live: True if a process is at work on it.
        told: Its kind and state, for people.
    """

    found: Run | RecordedEvaluation
    model: str
    is_live: bool
    told: str

    @classmethod
    def of(cls, config: RecordedOptions) -> Source:
        """The run or the evaluation in a folder.

        Raises:
            ConfigError: The options are about runs, and it is an evaluation's.
            DataError: It holds neither.
        """
        from mmrl import load_evaluation, load_run

        path = Path(config.path).expanduser()
        try:
            run = load_run(path)
        except ConfigError:
            pass
        else:
            return cls(run, _model_of(run), run.is_live, f"a run, {run.state}")
        try:
            found = load_evaluation(path)
        except ConfigError as error:
            what = "The folder holds neither a run nor an evaluation" if path.is_dir() else "There is no such folder"
            possible = "trainer.run_dir of a run, or the folder of `mmrl eval --output`"
            remedy = f"check the path, from {Path.cwd()}"
            raise DataError(what, where=config.path, possible=possible, remedy=remedy) from error
        defaults = {key: field.default for key, field in type(config).model_fields.items()}
        # Not by the fields that were set: a run has all options in its config.
        if of_runs := [key for key in ("rollouts", "steps", "sets") if getattr(config, key) != defaults[key]]:
            what = f"an evaluation's folder has no steps and no sets, and {' and '.join(of_runs)} choose among a run's"
            raise ConfigError(what, where=config.path, remedy=f"leave out {', '.join(of_runs)}")
        model = str(found.results.get("model") or f"the model of {config.path}")
        return cls(found, model, found.is_live, "an evaluation")

    @property
    def media(self) -> Path:
        return self.found.path / "media"

    def recordings(self, config: RecordedOptions) -> list[Recording]:
        """The files that the options choose, training first.

        Raises:
            DataError: There are none, or a step or a set is not there.
        """
        from mmrl import Run

        if not isinstance(self.found, Run):
            self.found.groups()  # raises if there is no completion
            return [Recording("", "", None, self.found.groups)]
        training = _training(self.found) if config.rollouts != "evaluations" else []
        evaluations = _evaluations(self.found, config) if config.rollouts != "training" else []
        recordings = [*training, *evaluations]
        known = sorted({each.step for each in recordings if each.step is not None})
        if not recordings:
            what = {"training": "no rollouts", "evaluations": "no evaluations"}.get(config.rollouts, "nothing")
            where = f"{config.path} (the run is {self.found.state})"
            raise DataError(
                f"The run has recorded {what} so far", where=where, remedy="read another run, or rollouts: both"
            )
        return [each for each in recordings if each.step in _asked(config, known)]


def _model_of(run: Run) -> str:
    """The model that a run began from, for people; of a folder without a config it is not known."""
    try:
        return str(run.config["model"]["path"])
    except (ConfigError, KeyError):
        return f"the model of {run.path}"


def _training(run: Run) -> list[Recording]:
    return [Recording(f"step-{step}", "training", step, partial(run.groups, step)) for step in run.rollout_steps]


def _evaluations(run: Run, config: RecordedOptions) -> list[Recording]:
    """The evaluations of the sets that are asked for, by step."""
    names = run.evaluation_names
    if unknown := [name for name in config.sets or () if name not in names]:
        possible = ", ".join(filter(None, names)) or "none: leave sets out"
        raise DataError(f"The run has recorded no evaluation set {unknown[0]!r}", where=config.path, possible=possible)
    found = list[Recording]()
    for step in run.evaluation_steps:
        for name in config.sets or names:
            scope = f"evaluation/{name}".rstrip("/")
            pages = partial(run.evaluation_groups, step, name)
            found += [Recording(f"{scope}-{step}", scope, step, pages)] if step in run.evaluation_steps_of(name) else []
    return found


def _asked(config: RecordedOptions, known: Sequence[int]) -> frozenset[int]:
    """The steps that the options choose among these.

    Raises:
        DataError: A step was not recorded, or none lies in the range.
    """
    steps, shown = config.steps, _ranges(known)
    if isinstance(steps, list):
        if unknown := [step for step in steps if step not in known]:
            where, kind = config.path, "evaluation after" if config.rollouts == "evaluations" else "record of"
            raise DataError(f"There is no {kind} step {unknown[0]}", where=where, possible=shown)
        return frozenset(steps)
    first, last = (None, None) if steps is None else (steps.first, steps.last)
    found = [step for step in known if (first is None or step >= first) and (last is None or step <= last)]
    if not found:
        told = ", ".join(f"{key}: {value}" for key, value in (("first", first), ("last", last)) if value is not None)
        raise DataError(f"No step is recorded within steps: {{{told}}}", where=config.path, possible=shown)
    return frozenset(found)


def _ranges(steps: Sequence[int]) -> str:
    """Steps for people: 1 to 130, or 0, 26, 52."""
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))
