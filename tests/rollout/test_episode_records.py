"""Records of episodes: random ones, with hostile texts, come back from parquet and from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.commands.cli import main
from mmrl.rollout.records import group_records, read_groups, read_lines, read_rollouts, read_step, recorded_steps
from mmrl.runs.directory import RunDirectory
from mmrl.system.redaction import Redactor
from mmrl.types import (
    Branch,
    Call,
    CreditedGroup,
    EncodedPrompt,
    ImageRef,
    Message,
    PlayedTurn,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Segment,
    Turn,
    policy_turns,
)
from tests.rollout.test_records import ODD, groups, same

TEXTS = ("", "7", ODD, "\0", "\0\0", "<image>", "<|im_end|>", "\udcff\ud800", "a\nb\r\n", "数学 🙂", "\x1b]0;owned\x07")
JSON_VALUES: tuple[Any, ...] = (None, True, 2**70, -0.0, 1e-300, ODD, [], [[1], {"a": None}], {"": {"b": [ODD]}})
MEDIA = "0123456789abcdef" * 4


def some(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[rng.integers(len(values))]


def image(rng: np.random.Generator) -> ImageRef:
    name = "".join(some(rng, MEDIA) for _ in range(64))
    width, height = map(int, rng.integers(28, 280, 2))
    return ImageRef(name, width, height, f"/media/{name}.png", some(rng, (None, (3000, 17))))


def segments_and_turns(rng: np.random.Generator, num_turns: int) -> tuple[list[Segment], list[PlayedTurn]]:
    """Ragged turns, observations with adjacent images, and a last turn that nobody answers."""
    segments, played = list[Segment](), list[PlayedTurn]()
    for index in range(num_turns):
        size, is_last = int(rng.integers(1, 6)), index == num_turns - 1
        logprobs = -rng.random(size).astype(np.float32)
        ids = rng.integers(0, 2**31 - 1, size).astype(np.int32)
        ended = some(rng, ("stop", "length"))
        segments.append(Segment(ids, True, logprobs, some(rng, (None, 0, 7)), finish_reason=ended))
        arguments = some(rng, (None, {}, {"x": some(rng, JSON_VALUES), ODD: [some(rng, JSON_VALUES)]}))
        calls = [Call(some(rng, TEXTS), arguments, some(rng, TEXTS)) for _ in range(rng.integers(3))]
        content = None
        role = some(rng, ("tool", "user"))
        if not is_last or rng.random() < 0.5:
            content = tuple(image(rng) if rng.random() < 0.5 else some(rng, TEXTS) for _ in range(rng.integers(4)))
        played.append(
            PlayedTurn(
                Turn(some(rng, TEXTS), tuple(calls), index, ended, int(rng.integers(0, 99))),
                content,
                role,
                float(rng.normal()),
                done=is_last,
                info={"key": some(rng, JSON_VALUES), ODD: some(rng, JSON_VALUES)},
                began=int(rng.integers(0, 2**40)),
                finished=int(rng.integers(0, 2**40)),
            )
        )
        if not is_last:
            inserted = int(rng.integers(1, 9))
            pictures = tuple(part for part in content or () if isinstance(part, ImageRef))
            ids = rng.integers(0, 2**31 - 1, inserted).astype(np.int32)
            segments.append(Segment(ids, False, np.zeros(inserted, np.float32), None, pictures, role))
    return segments, played


def episodes(seed: int, size: int = 4) -> ScoredGroup:
    """A group of random episodes; the last one has failed before its first turn."""
    rng = np.random.default_rng(seed)
    row = Prompt(id=f"p{seed} {ODD}", messages=(Message("user", "<image>play"),), columns={"level": 3})
    prompt = EncodedPrompt(
        prompt=row, text="play", token_ids=np.arange(4, dtype=np.int32), images=(image(rng),), epoch=1
    )
    rollouts = []
    for index in range(size):
        turns = 0 if index == size - 1 else int(rng.integers(1, 5))
        segments, played = segments_and_turns(rng, turns)
        rollouts.append(
            Rollout(
                prompt=prompt,
                segments=tuple(segments),
                index=index,
                text=played[-1].turn.text if played else "",
                finish_reason=some(rng, ("stop", "length", "turns", "budget", "environment")) if turns else "failed",
                weight_version=7,
                episode=tuple(played),
                components={"goal": float(rng.normal()), f"goal/{ODD}": some(rng, (None, 1.0))} if turns else {},
                failure="" if turns else f"reset: {ODD}",
            )
        )
    values = rng.normal(size=size)
    valid = np.arange(size) != size - 1
    return ScoredGroup(
        RolloutGroup(prompt, tuple(rollouts)), np.where(valid, values, 0.0), valid, {"goal": values}, place=(0, seed)
    )


def in_parts(group: ScoredGroup, seed: int) -> ScoredGroup:
    """The same group with each turn sampled in one to three parts, by weights of rising versions."""
    rng, rollouts = np.random.default_rng(seed), list[Rollout]()
    for rollout in group.rollouts:
        segments, version = list[Segment](), 3
        for segment in rollout.segments:
            cuts = sorted({*rng.integers(1, len(segment.token_ids) + 1, 2).tolist()} | {0, len(segment.token_ids)})
            for first, end in pairwise(cuts if segment.by_policy else ()):
                ids, logprobs = segment.token_ids[first:end], segment.sampler_logprobs[first:end]
                ended = segment.finish_reason if end == cuts[-1] else None
                part = Segment(ids, True, logprobs, version, finish_reason=ended, continues=first > 0)
                version += 1
                segments.append(part)
            segments += [] if segment.by_policy else [segment]
        rollouts.append(replace(rollout, segments=tuple(segments), weight_version=version))
    return replace(group, group=replace(group.group, rollouts=tuple(rollouts)))


def credited(group: ScoredGroup) -> CreditedGroup:
    nothing = [np.zeros(0, np.float32) for _ in group.rollouts]
    advantages = [np.zeros(len(rollout.token_ids)) for rollout in group.rollouts]
    return CreditedGroup(group, advantages, nothing, updates=[[] for _ in group.rollouts])


def write(run: Path, made: Sequence[CreditedGroup]) -> Path:
    RunDirectory(run).write_rollouts(1, made, {})
    return recorded_steps(run)[1]


def test_random_episodes_come_back_from_a_steps_file(tmp_path: Path) -> None:
    made = [credited(episodes(seed)) for seed in range(12)]
    file = write(tmp_path, made)
    same([group.credited for group in read_step(file).groups], made)
    found = [each.rollout for each in read_rollouts(tmp_path)]
    assert [each.turns for each in found] == [each.turns for group in made for each in group.scored.rollouts]
    pictures = [each for rollout in found for each in rollout.all_images]
    assert {each.path for each in pictures} == {str(tmp_path / "media" / f"{each.hash}.png") for each in pictures}
    assert any(len(rollout.all_images) > 2 for rollout in found)


def test_random_episodes_come_back_from_lines_of_checkpoints_and_evaluations(tmp_path: Path) -> None:
    made = [episodes(seed) for seed in range(12)]
    lines = [json.dumps(Redactor().plain(record)) for record in group_records(made)]
    same(read_groups([json.loads(line) for line in lines], tmp_path / "media"), made)


def test_turns_that_were_sampled_in_parts_come_back_and_count_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [episodes(seed) for seed in range(12)]
    made = [in_parts(group, seed) for seed, group in enumerate(whole)]
    same([each.credited for each in read_step(write(tmp_path, [*map(credited, made)])).groups], [*map(credited, made)])
    lines = [json.dumps(Redactor().plain(record)) for record in group_records(made)]
    same(read_groups([json.loads(line) for line in lines], tmp_path / "media"), made)
    both = zip(whole, made, strict=True)
    pairs = [pair for one, other in both for pair in zip(one.rollouts, other.rollouts, strict=True)]
    assert sum(len(cut.segments) - len(plain.segments) for plain, cut in pairs) > 30
    for plain, cut in pairs:
        assert cut.turn_of_token.tolist() == plain.turn_of_token.tolist() and cut.turns == plain.turns
        turns = [np.concatenate([part.token_ids for part in turn]).tolist() for turn in policy_turns(cut.segments)]
        assert turns == [each.token_ids.tolist() for each in plain.segments if each.by_policy]
    rows = [row for group in pq.read_table(recorded_steps(tmp_path)[1]).to_pylist() for row in group["rollouts"]]
    assert [row["turns"] for row in rows if row["turns"]] == [p.turn_of_token.tolist() for p, _ in pairs if p.episode]
    assert main(["rollouts", str(tmp_path)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if ": 3 turns, " in line]
    assert len(shown) == sum(len(plain.episode) == 3 for plain, _ in pairs) > 1


def test_a_file_without_such_turns_has_no_column_for_them(tmp_path: Path) -> None:
    def segment_fields(file: Path) -> set[str]:
        rollout = pq.read_schema(file).field("rollouts").type.value_type
        return {field.name for field in rollout.field("segments").type.value_type}

    plain = segment_fields(write(tmp_path, [credited(episodes(3))]))
    assert segment_fields(write(tmp_path, [credited(in_parts(episodes(3), 3))])) - plain == {"continues"}


def branching(group: ScoredGroup) -> ScoredGroup:
    """The same group, whose second member goes on from the first one."""
    first, second, *others = group.rollouts
    rollouts = (first, replace(second, branch=Branch(0, len(first.episode) - 1)), *others)
    return replace(group, group=replace(group.group, rollouts=rollouts))


def test_episodes_that_go_on_from_others_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [branching(episodes(seed)) for seed in range(6)]
    file = write(tmp_path, [*map(credited, made)])
    same([each.credited for each in read_step(file).groups], [*map(credited, made)])
    found = [rollout.branch for group in read_step(file).groups for rollout in group.rollouts]
    assert found == [rollout.branch for group in made for rollout in group.rollouts] and any(found)
    lines = [json.dumps(Redactor().plain(record)) for record in group_records(made)]
    same(read_groups([json.loads(line) for line in lines], tmp_path / "media"), made)
    assert [json.loads(line).get("branch") for line in lines] == [None if b is None else asdict(b) for b in found]
    of_file = [json.loads(json.dumps(Redactor().plain(each))) for each in read_lines(file)]
    assert [each.get("branch") for each in of_file] == [json.loads(line).get("branch") for line in lines]
    assert main(["rollouts", str(tmp_path)]) == 0
    turns = [len(group.rollouts[0].episode) for group in made]
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if "goes on from" in line]
    assert shown == [f"goes on from rollout 0 before its turn {number}" for number in turns]
    # A file without any has no column for them.
    fields = pq.read_schema(write(tmp_path, [credited(episodes(3))])).field("rollouts").type.value_type
    assert "branch" not in {field.name for field in fields}


def test_lines_of_a_steps_file_are_those_of_its_groups(tmp_path: Path) -> None:
    made = [episodes(seed) for seed in range(4)]
    of_groups = [json.loads(json.dumps(Redactor().plain(record))) for record in group_records(made)]
    of_file = [
        json.loads(json.dumps(Redactor().plain(each))) for each in read_lines(write(tmp_path, [*map(credited, made)]))
    ]
    for one, other in zip(of_groups, of_file, strict=True):
        for name in ("segments", "episode", "components", "failure"):
            assert (name in one, one.get(name)) == (name in other, other.get(name)), name


def test_columns_tell_the_turn_of_each_token_and_each_turns_reward(tmp_path: Path) -> None:
    group = episodes(3)
    rows = pq.read_table(write(tmp_path, [credited(group)])).to_pylist()[0]["rollouts"]
    rollout = group.rollouts[0]
    turns = []
    for segment in rollout.segments:
        turns += [len(turns) and turns[-1] + segment.by_policy] * len(segment.token_ids)
    assert rows[0]["turns"] == turns
    assert rows[0]["turn_rewards"] == [played.reward for played in rollout.episode]
    assert (rows[-1]["turns"], rows[-1]["turn_rewards"], rows[-1]["episode"]) == (None, None, None)


def test_a_run_without_an_environment_fills_none_of_the_columns(tmp_path: Path) -> None:
    rows = pq.read_table(write(tmp_path, groups())).to_pylist()
    names = ("segments", "turns", "turn_rewards", "episode", "components", "failure")
    assert {name: each[name] for row in rows for each in row["rollouts"] for name in names} == dict.fromkeys(names)
    assert not {*names} & {name for record in group_records([group.scored for group in groups()]) for name in record}


def test_a_file_from_before_there_were_episodes_is_read(tmp_path: Path) -> None:
    made = groups()
    file = write(tmp_path, made)
    table = pq.read_table(file)
    rollouts = table.schema.field("rollouts").type.value_type
    older = [field for field in rollouts if field.name not in ("episode", "components", "failure")]
    fields = [
        pa.field("rollouts", pa.list_(pa.struct(older))) if field.name == "rollouts" else field
        for field in table.schema
    ]
    schema = pa.schema(fields, table.schema.metadata)
    before = read_step(file)
    pq.write_table(pa.Table.from_pylist(table.to_pylist(maps_as_pydicts=None), schema), file)
    same([group.credited for group in read_step(file).groups], [group.credited for group in before.groups])


def test_arguments_nested_without_end_cost_no_step(tmp_path: Path) -> None:
    """A model may write ten thousand brackets."""
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    group = episodes(5)
    played = group.rollouts[0].episode[0]
    turn = replace(played.turn, calls=(Call("f", {"x": deep}), Call("g", {"x": [[1]]})))
    odd = replace(group.rollouts[0], episode=(replace(played, turn=turn, info={"x": deep}),))
    made = replace(group, group=RolloutGroup(group.group.prompt, (odd, *group.rollouts[1:])))
    ((first, *_),) = [list(read_rollouts(write(tmp_path, [credited(made)])))]
    (found,) = first.rollout.episode
    assert [call.arguments for call in found.turn.calls] == [None, {"x": [[1]]}] and found.info == {}
    json.dumps(Redactor().plain(group_records([made])))


def test_no_secret_of_an_episode_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct-horse-battery"
    monkeypatch.setenv("MY_API_KEY", secret)
    turn = Turn(secret, (Call(secret, {secret: [secret]}, secret),), 0, "stop", 5)
    played = PlayedTurn(turn, (secret, ImageRef("a" * 64, 2, 2, "x")), info={secret: secret})
    group = episodes(5)
    rollout = replace(group.rollouts[0], episode=(played,), components={secret: 1.0}, failure=secret)
    made = replace(group, group=RolloutGroup(group.group.prompt, (rollout, *group.rollouts[1:])))
    shown = repr(pq.read_table(write(tmp_path, [credited(made)])).to_pylist())
    assert secret not in shown and shown.count("[redacted]") == 10


def test_a_reward_sees_a_recorded_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = episodes(7)
    file = write(tmp_path, [credited(group)])
    reward = tmp_path / "calls.py"
    reward.write_text(
        "def calls(rollouts):\n"
        "    return [sum(len(p.turn.calls) for p in each.episode) + 100 * len(each.turns) for each in rollouts]\n"
    )
    assert main(["rewards", "test", f"{reward}:calls", "--rollouts", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = [sum(len(p.turn.calls) for p in r.episode) + 100 * max(1, len(r.episode)) for r in group.rollouts]
    assert [each["value"] for each in found["samples"]] == wanted


def test_people_get_the_turns_calls_and_observations_of_an_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = episodes(5, size=3)
    picture = ImageRef("0123456789" * 6 + "abcd", 56, 28, "x")
    calls = (Call("crop", {"box": [1, 2], "note": "\x1b[31m"}), Call("", None, "no JSON: {"))
    first = PlayedTurn(Turn("look \x1b]0;owned\x07", calls, 0, "length", 9), ("seen", picture, picture), reward=0.25)
    last = PlayedTurn(Turn("7", (), 1, "stop", 3), None, reward=1.0, done=True)
    rollout = replace(group.rollouts[0], episode=(first, last), finish_reason="environment")
    made = replace(group, group=RolloutGroup(group.group.prompt, (rollout, *group.rollouts[1:])))
    write(tmp_path, [credited(made)])
    assert main(["rollouts", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"rollout 0: 2 turns, {len(rollout.token_ids)} tokens, environment")
    assert lines[2:8] == [
        "    turn 1 (cut): look \\x1b]0;owned\\x07",
        '        calls crop({"box": [1, 2], "note": "\\u001b[31m"})',
        "        calls () is invalid: no JSON: {",
        "        tool (reward 0.25): seen [image 01234567 56x28] [image 01234567 56x28]",
        "    turn 2: 7",
        "        reward 1, done",
    ]
    assert lines[-2] == "    failed: reset: \\ud800 lone, \\x00 nul, \\x1b[31m, \\u202e and 数学 𝔸"
    assert not any("\x1b" in line or "\x07" in line for line in lines)
    assert main(["rollouts", str(tmp_path), "--where", "finish_reason=environment", "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["episode"][0]["content"][1] == {"image": {"hash": picture.hash, "width": 56, "height": 28}}
