"""Chooses among recorded completions: those to imitate, or those of a prompt to compare."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from mmrl.errors import DataError, plural
from mmrl.interfaces import PluginConfig
from mmrl.types import GIVEN, TRUNCATED

if TYPE_CHECKING:
    from mmrl import GroupPages

_OF_PROMPT = ("prompt_id", "epoch", "prompt", "images")
_OF_COMPLETION = (
    "completion", "index", "greedy", "reward", "rewards", "valid", "finish_reason", "weight_version", "turn_rewards",
)  # fmt: skip
SEVERAL_TURNS = "of several turns"
"""The cause of episodes, which are left out."""


class Keep(PluginConfig):
    """The completions of a prompt that are imitated."""

    above: float | None = None
    """Those whose value is greater than this; null takes any."""
    most: int | None = Field(default=None, ge=1)
    """As many of each group, the best first; null takes all."""


class Steps(PluginConfig):
    """A range of steps, both ends included."""

    first: int | None = Field(default=None, ge=0)
    """The first step; null is the first that was recorded."""
    last: int | None = Field(default=None, ge=0)
    """The last step; null is the last that was recorded."""


class RecordedOptions(PluginConfig):
    """A folder, what is read of it, and what becomes of it."""

    path: str
    """A run's folder, or the folder of `mmrl eval --output`."""
    rollouts: Literal["training", "evaluations", "both"] = "training"
    """Those of a run that are read: of training steps, of evaluations, or both."""
    steps: list[int] | Steps | None = None
    """Steps of a run: a list, or {first: 100, last: 200}; null reads all."""
    sets: list[str] | None = Field(default=None, min_length=1)
    """Names of evaluation sets; null reads all."""
    keep: Literal["best"] | Keep | None = None
    """Completions to imitate: best, {above: 0.5}, or {above: 0.5, most: 1}; null compares completions."""
    candidates: Literal["all", "pair", "single"] = "all"
    """Completions to compare: all of a group, its best and its worst, or each as a row of its own."""
    reward: str | None = Field(default=None, min_length=1)
    """The reward that is a completion's value; null takes the weighted sum."""
    truncated: bool = False
    """Take completions that a limit cut off, too."""
    duplicates: bool = False
    """Take rows that say the same of the same prompt as an earlier one, too."""

    @model_validator(mode="after")
    def _check(self) -> RecordedOptions:
        if self.keep is not None and self.candidates != "all":
            raise ValueError("candidates is about what is compared, and keep chooses what is imitated: leave one out")
        if self.sets is not None and self.rollouts == "training":
            raise ValueError("sets names evaluation sets: set rollouts to evaluations or both")
        return self


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of groups: a step's, or an evaluation's.

    Attributes:
        name: Begins the ids of its rows, such as ``step-12``; empty in an evaluation's folder.
        scope: The same for all files whose prompts are of one dataset, so that equal ids mean equal prompts.
        step: The run's step; None in an evaluation's folder.
        open: Opens it.
    """

    name: str
    scope: str
    step: int | None
    open: Callable[[], GroupPages]


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion that can be used.

    Attributes:
        place: Its place in its group's records.
        index: Its number in the group; -1 for a greedy one beside it.
        value: Its reward, or the component that is asked for.
    """

    place: int
    index: int
    text: str
    value: float


@dataclass(frozen=True, slots=True)
class Row:
    """A row's place in the records.

    Attributes:
        recording: The number of its file.
        places: Places of its completions in the group's records.
    """

    id: str
    recording: int
    group: tuple[int, int]
    places: tuple[int, ...]
    values: tuple[float, ...]


class Choice:
    """The rows that the options choose.

    Attributes:
        left_out: Counts of completions and groups that were not taken, by cause.
    """

    def __init__(self, config: RecordedOptions) -> None:
        self._config = config
        self._keep = Keep(most=1) if config.keep == "best" else config.keep
        self.rows: list[Row] = []
        self.left_out: Counter[str] = Counter()
        self._completions = self._groups = 0
        self._seen: set[bytes] = set()
        self._digest = hashlib.sha256()

    def add(self, number: int, recording: Recording) -> None:
        """Choose among the groups of a file.

        Raises:
            DataError: It cannot be read, or its completions lack the reward that is asked for.
        """
        for group in recording.open().index(_OF_PROMPT, _OF_COMPLETION):
            self._groups += 1
            usable = list(self._usable(group.of_rollouts, recording))
            told = (
                recording.scope,
                *(group.of_group[name] for name in ("prompt_id", "prompt")),
                group.of_group["images"],
            )
            parts = [recording.name, f"epoch-{group.of_group['epoch']}" if recording.step is not None else ""]
            name = "/".join([*filter(None, parts), group.of_group["prompt_id"]])
            for members in self._chosen(usable):
                said = sorted((each.text, each.value) for each in members)
                if not self._is_new(repr((told, said))):
                    self.left_out["equal rows"] += 1
                    continue
                whole = (
                    name if self._keep is None and self._config.candidates != "single" else f"{name}/{members[0].index}"
                )
                self._digest.update(_bytes(repr((whole, told, [(each.text, each.value) for each in members]))))
                places, values = (tuple(getattr(each, key) for each in members) for key in ("place", "value"))
                self.rows.append(Row(whole, number, group.place, places, values))

    def described(self) -> dict[str, str]:
        """The rows and what was left out, for people."""
        values = [value for row in self.rows for value in row.values]
        made = {
            "rows": f"{len(self.rows)} of {plural(self._groups, 'group')} ({plural(self._completions, 'completion')})",
            "answers": self._told(),
            "values": f"{self._config.reward or 'reward'} {min(values):g} to {max(values):g}, "
            f"{sum(values) / len(values):.3g} in the mean",
        }
        return made | ({"left out": self._causes()} if self.left_out.total() else {})

    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def nothing(self, config: RecordedOptions) -> DataError:
        """The error of records of which nothing can be used."""
        name, above = config.reward or "reward", self._keep.above if self._keep is not None else None
        what = "No recorded completion can be used"
        if above is not None:
            what = f"No recorded completion has a {name} above {above:g}"
        elif self._keep is None and config.candidates != "single":
            what = f"No recorded group has completions of different {name}"
        remedy = "look at `mmrl rollouts`, read other steps, or change keep, reward or truncated"
        return DataError(what, where=f"{config.path}: left out: {self._causes()}", remedy=remedy)

    def _causes(self) -> str:
        return ", ".join(f"{cause} {count}" for cause, count in self.left_out.most_common() if count) or "nothing"

    def _usable(self, fields: Mapping[str, Sequence[Any]], recording: Recording) -> Iterator[Completion]:
        """The completions of a group that can be answers, each text once for each value."""
        seen = set[tuple[str, float]]()
        for place, text in enumerate(fields["completion"]):
            self._completions += 1
            of_one = {name: values[place] for name, values in fields.items()}
            value = self._value(of_one, recording)
            if cause := self._cause(of_one, value):
                self.left_out[cause] += 1
            elif (text, value) in seen:
                self.left_out["equal to another one of their group"] += 1
            elif value is not None:
                seen.add((text, value))
                yield Completion(place, -1 if of_one["greedy"] else of_one["index"], text, value)

    def _value(self, fields: Mapping[str, Any], recording: Recording) -> float | None:
        """The completion's value; None if it was not scored."""
        if not fields["valid"]:
            return None
        if (name := self._config.reward) is None:
            return float(fields["reward"])
        rewards: Mapping[str, float | None] = fields["rewards"]
        if name not in rewards:
            where, possible = recording.name or self._config.path, ", ".join(rewards) or "none"
            raise DataError(f"There is no reward {name!r} in the records", where=where, possible=possible)
        return rewards[name]

    def _cause(self, fields: Mapping[str, Any], value: float | None) -> str:
        """The reason why a completion is left out; empty if it is not."""
        if fields["weight_version"] == GIVEN:
            return "the dataset's own, which nobody sampled"
        if (fields["turn_rewards"] or 1) > 1:
            return SEVERAL_TURNS
        if value is None:
            return "without a valid reward"
        if fields["finish_reason"] in TRUNCATED and not self._config.truncated:
            return "cut off by a limit"
        if not fields["completion"].strip():
            return "empty"
        return ""

    def _chosen(self, usable: Sequence[Completion]) -> Iterator[Sequence[Completion]]:
        """The completions of each row of a group."""
        by_value = sorted(usable, key=lambda each: -each.value)
        if self._keep is not None:
            above = self._keep.above
            good = [each for each in by_value if above is None or each.value > above]
            taken = good[: self._keep.most]
            self.left_out["not good enough"] += len(by_value) - len(taken)
            yield from ([each] for each in taken)
        elif self._config.candidates == "single":
            yield from ([each] for each in usable)
        elif len({each.value for each in usable}) < 2:
            self.left_out["groups without an order"] += 1
        elif self._config.candidates == "pair":
            worst = min(usable, key=lambda each: each.value)
            yield [by_value[0], worst]
        else:
            yield usable

    def _is_new(self, said: str) -> bool:
        """True if no earlier row said the same, or if that does not matter."""
        key = hashlib.blake2b(_bytes(said), digest_size=16).digest()
        is_new = self._config.duplicates or key not in self._seen
        self._seen.add(key)
        return is_new

    def _told(self) -> str:
        if self._keep is not None:
            above = "" if self._keep.above is None else f" above {self._keep.above:g}"
            most = "" if self._keep.most is None else f", {self._keep.most} of a group at most"
            return f"to imitate: the best{above}{most}"
        sizes = [len(row.places) for row in self.rows]
        least, most_ = min(sizes), max(sizes)
        return f"to compare: {least if least == most_ else f'{least} to {most_}'} of a row"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
