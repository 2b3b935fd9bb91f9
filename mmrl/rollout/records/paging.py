"""A file of rollouts by group: an index of chosen columns, and the records of one group at a time; no file is held."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import DataError
from mmrl.rollout.records.pairs import own_sum
from mmrl.rollout.records.reading import PARQUET, RecordedRollout, damage, media_of, parsed

if TYPE_CHECKING:
    import pyarrow as pa

Place = tuple[int, int]
"""(row group, row) of a group in a parquet file; (offset, lines) in a file of JSON lines."""


@dataclass(frozen=True, slots=True)
class IndexedGroup:
    """Chosen fields of a group.

    Attributes:
        of_group: Its own fields, by name.
        of_rollouts: A list for each field of its rollouts, the greedy one last. ``mask`` is the number of tokens that
            the policy wrote, ``turn_rewards`` the number of turns; None where the file has no such field.
    """

    place: Place
    of_group: Mapping[str, Any]
    of_rollouts: Mapping[str, Sequence[Any]]


class GroupPages:
    """The groups of a file, of either schema.

    The file is opened for each question and the row group that was read last is kept, some 5 MB: make a new object
    when the file was replaced.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._kept: tuple[tuple[int, Sequence[str] | None], pa.Table] | None = None

    def index(self, of_group: Sequence[str], of_rollouts: Sequence[str]) -> Iterator[IndexedGroup]:
        """The groups in the order of the file, with these fields; no other column of a parquet file is read.

        Raises:
            DataError: The file cannot be read, or something in it is no record of a rollout.
        """
        with self._reading():
            if self._file.suffix == f".{PARQUET}":
                yield from self._indexed_columns(of_group, of_rollouts)
            else:
                yield from self._indexed_lines(of_group, of_rollouts)

    def fields(self, place: Place, of_group: Sequence[str], of_rollouts: Sequence[str]) -> IndexedGroup:
        """The entry of the group at this place in an ``index`` of these fields.

        Raises:
            DataError: It cannot be read.
        """
        if self._file.suffix != f".{PARQUET}":
            return _of_lines(place[0], self.records(place), of_group, of_rollouts)
        from mmrl.rollout.records.columns import row_of

        with self._reading():
            table = row_of(self._row_group(place[0], _columns(of_group, of_rollouts)), place[1])
            return next(_indexed(table, place, of_group, of_rollouts))
        raise AssertionError("an error is raised anew")

    def rollouts(self, place: Place) -> list[RecordedRollout]:
        """The rollouts of the group at this place, as ``read_rollouts`` has them.

        Raises:
            DataError: They cannot be read.
        """
        records = self.records(place)
        with damage(str(self._file)):
            return [parsed(record, media_of(self._file), str(self._file)) for record in records]

    def sums(self, columns: Sequence[str]) -> Iterator[Mapping[str, Sequence[float | None]]]:
        """The sums of token columns over the tokens that the policy wrote, of each rollout, group by group.

        None where a rollout has no such numbers.

        Args:
            columns: With one number for each token, such as ``learner_logprobs``.

        Raises:
            DataError: As ``index``.
        """
        with self._reading():
            is_parquet = self._file.suffix == f".{PARQUET}"
            yield from self._summed_columns(columns) if is_parquet else self._summed_lines(columns)

    def records(self, place: Place) -> list[dict[str, Any]]:
        """The records of the group at this place, as ``read_lines`` has them but with arrays.

        Raises:
            DataError: They cannot be read.
        """
        from mmrl.rollout.records.columns import known_part, row_of, table_records

        with self._reading():
            if self._file.suffix == f".{PARQUET}":
                return list(table_records(row_of(self._row_group(place[0]), place[1])))
            with self._file.open("rb") as lines:
                lines.seek(place[0])
                return [known_part(json.loads(next(lines)), self._file) for _ in range(place[1])]
        raise AssertionError("an error is raised anew")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with damage(str(self._file)):
                yield
        except OSError as error:
            raise DataError(f"cannot read recorded rollouts: {error}", where=str(self._file)) from error

    def _row_group(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        from mmrl.rollout.records.columns import opened

        if self._kept is None or self._kept[0] != (number, columns):
            self._kept = None  # before the next one takes its memory
            with opened(self._file) as parquet:
                table = parquet.read_row_group(number, columns=columns, use_threads=False)
                self._kept = ((number, columns), table)
        return self._kept[1]

    def _indexed_columns(self, of_group: Sequence[str], of_rollouts: Sequence[str]) -> Iterator[IndexedGroup]:
        from mmrl.rollout.records.columns import opened

        columns = _columns(of_group, of_rollouts)
        with opened(self._file) as parquet:
            for number in range(parquet.num_row_groups):
                table = parquet.read_row_group(number, columns=columns, use_threads=False)
                yield from _indexed(table, (number, 0), of_group, of_rollouts)

    def _summed_columns(self, names: Sequence[str]) -> Iterator[Mapping[str, Sequence[float | None]]]:
        from mmrl.rollout.records.columns import opened, rollout_sums

        columns = [f"rollouts.list.element.{name}" for name in ("mask", *names)]
        with opened(self._file) as parquet:
            for number in range(parquet.num_row_groups):
                table = parquet.read_row_group(number, columns=columns, use_threads=False)
                offsets, sums = rollout_sums(table, names)
                for first, end in pairwise(offsets):
                    yield {name: values[first:end] for name, values in sums.items()}

    def _indexed_lines(self, of_group: Sequence[str], of_rollouts: Sequence[str]) -> Iterator[IndexedGroup]:
        for start, members in self._line_groups():
            yield _of_lines(start, members, of_group, of_rollouts)

    def _summed_lines(self, names: Sequence[str]) -> Iterator[Mapping[str, Sequence[float | None]]]:
        for _, members in self._line_groups():
            masks = [np.asarray(each["mask"], np.bool_) for each in members]
            yield {
                name: [own_sum(each.get(name), mask) for each, mask in zip(members, masks, strict=True)]
                for name in names
            }

    def _line_groups(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Where each group of a file of lines begins, and its records."""
        from mmrl.rollout.records.columns import known_part

        start = offset = 0
        members = list[dict[str, Any]]()
        with self._file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # half a line, of a process that writes
                record = known_part(json.loads(line), self._file)
                if members and record.get("group") != members[0].get("group"):
                    yield start, members
                    start, members = offset, []
                members.append(record)
                offset += len(line)
        if members:
            yield start, members


def _columns(of_group: Sequence[str], of_rollouts: Sequence[str]) -> list[str]:
    return [*of_group, *(f"rollouts.list.element.{name}" for name in of_rollouts)]


def _indexed(
    table: pa.Table, first: Place, of_group: Sequence[str], of_rollouts: Sequence[str]
) -> Iterator[IndexedGroup]:
    """The groups of a part of a row group, which begins at this place."""
    from mmrl.rollout.records.columns import group_fields, rollout_fields

    groups = group_fields(table.select(of_group))
    offsets, members = rollout_fields(table, of_rollouts) if of_rollouts else ([0] * (len(groups) + 1), {})
    for row, (group, (begin, end)) in enumerate(zip(groups, pairwise(offsets), strict=True), first[1]):
        yield IndexedGroup((first[0], row), group, {name: values[begin:end] for name, values in members.items()})


def _of_lines(
    start: int, members: Sequence[Mapping[str, Any]], of_group: Sequence[str], of_rollouts: Sequence[str]
) -> IndexedGroup:
    first = members[0]
    return IndexedGroup(
        (start, len(members)),
        {name: first.get(name) for name in of_group},
        {name: [_counted(name, member) for member in members] for name in of_rollouts},
    )


def _counted(name: str, record: Mapping[str, Any]) -> Any:
    if name == "mask":
        return int(np.count_nonzero(record["mask"]))
    if name == "turn_rewards":
        return len(record["episode"]) if "episode" in record else None
    return record.get(name)
