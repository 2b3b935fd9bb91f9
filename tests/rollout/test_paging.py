"""A file of rollouts by group: the index and single groups are what a reading of the whole file gives."""

from __future__ import annotations

import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.errors import DataError
from mmrl.rollout.records import read_lines, read_rollouts, recorded_steps, writing
from mmrl.rollout.records.lines import plain_record
from mmrl.rollout.records.paging import GroupPages
from mmrl.runs.reader import Run
from tests.rollout.test_episode_records import credited, episodes
from tests.rollout.test_records import SCHEMA_1, groups, same, write

OF_GROUP = ("group", "epoch", "prompt_id", "source", "kept", "trained", "prompt", "messages", "answer", "images")
OF_ROLLOUTS = ("index", "greedy", "completion", "reward", "rewards", "answers", "valid", "finish_reason")


def by_group(file: Path) -> list[list[dict[str, Any]]]:
    """The file's records as a reading of the whole gives them."""
    return [list(members) for _, members in groupby(read_lines(file), key=lambda record: record["group"])]


def without_state(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "algorithm_state"}


@pytest.fixture(params=["parquet", "parquet in row groups", "lines"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "lines":
        (tmp_path / "rollouts").mkdir()
        return Path(shutil.copy(SCHEMA_1, tmp_path / "rollouts" / "step-000001.jsonl"))
    if request.param == "parquet in row groups":
        monkeypatch.setattr(writing, "ROW_GROUP_TOKENS", 14)
    return write(tmp_path, [*groups() * 3, credited(episodes(5))])


def test_the_index_has_the_chosen_fields_of_each_group(file: Path) -> None:
    whole = by_group(file)
    index = list(GroupPages(file).index(OF_GROUP, OF_ROLLOUTS))
    assert len(index) == len(whole)
    for found, members in zip(index, whole, strict=True):
        same(dict(found.of_group), {name: members[0][name] for name in OF_GROUP})
        same(dict(found.of_rollouts), {name: [each[name] for each in members] for name in OF_ROLLOUTS})


def test_one_group_is_read_as_the_whole_file_has_it(file: Path) -> None:
    pages = GroupPages(file)
    places = [found.place for found in pages.index(("group",), ("index",))]
    for place, members in reversed(list(zip(places, by_group(file), strict=True))):
        same([without_state(plain_record(each)) for each in pages.records(place)], list(map(without_state, members)))


def test_chosen_fields_and_rollouts_of_one_group_are_those_of_the_whole_file(file: Path) -> None:
    pages, index, whole = GroupPages(file), list(GroupPages(file).index(OF_GROUP, OF_ROLLOUTS)), read_rollouts(file)
    rollouts = [pages.rollouts(found.place) for found in index]
    for found, members in reversed(list(zip(index, rollouts, strict=True))):
        same(pages.fields(found.place, OF_GROUP, OF_ROLLOUTS), found)
        same(pages.fields(found.place, ("epoch",), ()).of_group, {"epoch": found.of_group["epoch"]})
        assert [each.greedy for each in members] == found.of_rollouts["greedy"]
    read = [each for members in rollouts for each in members]
    for one, other in zip(read, whole, strict=True):
        assert [str(image) for image in one.images] == [str(image) for image in other.images]
        assert (one.text, one.rewards, one.rollout.key) == (other.text, other.rewards, other.rollout.key)
        assert np.array_equal(one.rollout.token_ids, other.rollout.token_ids)


def test_lengths_and_turns_are_counted(tmp_path: Path) -> None:
    group = episodes(5)
    (tmp_path / "lines").mkdir()
    file = write(tmp_path, [*groups(), credited(group)])
    first, second, third = GroupPages(file).index(("group",), ("mask", "turn_rewards"))
    assert first.of_rollouts["mask"] == [3, 3, 1, 3]  # 2 and 1 of 6 tokens are the policy's
    assert first.of_rollouts["turn_rewards"] == [None] * 4 and second.of_rollouts["mask"] == [1, 3]
    assert third.of_rollouts["mask"] == [int(each.mask.sum()) for each in group.rollouts]
    assert third.of_rollouts["turn_rewards"] == [*(len(each.episode) for each in group.rollouts[:3]), None]
    (old, _) = GroupPages(SCHEMA_1).index(("group",), ("mask", "turn_rewards"))
    assert old.of_rollouts == first.of_rollouts


def test_an_index_may_be_of_groups_alone(file: Path) -> None:
    found = list(GroupPages(file).index(("prompt_id",), ()))
    assert [each.of_group["prompt_id"] for each in found][:2] == ["train/9", "7"]
    assert all(each.of_rollouts == {} for each in found)


def test_half_a_line_at_the_end_is_not_there_yet(tmp_path: Path) -> None:
    file = tmp_path / "growing.jsonl"
    lines = SCHEMA_1.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    (first, second) = GroupPages(file).index(("group",), ("index",))
    assert len(first.of_rollouts["index"]) == 4 and len(second.of_rollouts["index"]) == len(lines) - 5


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, groups())
    place = next(GroupPages(file).index(("group",), ("index",))).place
    data = bytearray(file.read_bytes())
    for damaged in (data[: len(data) // 2], b"no parquet", b"".join([data[:200], b"\xff" * 400, data[600:]])):
        file.write_bytes(damaged)
        for read in (
            lambda: list(GroupPages(file).index(OF_GROUP, OF_ROLLOUTS)),
            lambda: GroupPages(file).records(place),
        ):
            with pytest.raises(DataError) as caught:
                read()
            assert str(file) in caught.value.where
    file.unlink()
    with pytest.raises(DataError, match="cannot read recorded rollouts"):
        GroupPages(file).records(place)


def test_a_run_gives_the_groups_of_its_steps(tmp_path: Path) -> None:
    write(tmp_path, groups(), step=3)
    assert [each.of_group["group"] for each in Run(tmp_path).groups(3).index(("group",), ())] == [0, 1]
    with pytest.raises(DataError, match="no record of step 4") as caught:
        Run(tmp_path).groups(4)
    assert caught.value.possible == "3" and recorded_steps(tmp_path)[3].exists()


def test_sums_of_token_columns_are_over_what_the_policy_wrote(file: Path) -> None:
    names = ("sampler_logprobs", "learner_logprobs", "reference_logprobs")
    found = list(GroupPages(file).sums(names))
    whole = by_group(file)
    assert len(found) == len(whole)
    for sums, members in zip(found, whole, strict=True):
        for name in names:
            for value, each in zip(sums[name], members, strict=True):
                mask, numbers = each["mask"], each[name]
                known = any(mask) and len(numbers) == len(mask)
                expected = sum(number for number, own in zip(numbers, mask, strict=True) if own) if known else None
                assert value == (None if expected is None else pytest.approx(expected)), name
    assert any(value is not None for sums in found for value in sums["learner_logprobs"])
    assert any(None in sums["learner_logprobs"] for sums in found), "of what was in no loss"
