"""Records of rollouts: schema 2 to the last bit, schema 1 as older versions wrote it, and what both have in common."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.commands.cli import main
from mmrl.errors import DataError
from mmrl.rollout.records import (
    RecordedStep,
    columns,
    group_records,
    lines,
    read_groups,
    read_lines,
    read_rollouts,
    read_step,
    reading,
    recorded_files,
    recorded_steps,
    schema,
    unknown,
    writing,
)
from mmrl.rollout.records.paging import GroupPages
from mmrl.runs.directory import RunDirectory
from mmrl.runs.reader import Run
from mmrl.system.redaction import Redactor
from mmrl.token_columns import COLUMNS, Known, TokenColumn
from mmrl.types import (
    GIVEN,
    Candidate,
    CreditedGroup,
    EncodedPrompt,
    ImageRef,
    Message,
    PreUpdateStatistics,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Segment,
)
from mmrl.viewer import groups as viewed_groups
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.groups import group_document

FIELDS = [field.name for field in dataclasses.fields(CreditedGroup)]
SCHEMA_1 = Path(__file__).with_name("step-schema-1.jsonl")
"""``groups()`` with the state ``STATE``, as version 0.2.0 wrote them."""
STATE = {"coefficient": 0.5, "seen": {"train/9": [1, 2.5]}}
ODD = "\ud800 lone, \0 nul, \x1b[31m, \u202e and 数学 𝔸"


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def written(values: Sequence[float], *, by_policy: bool = True, version: int | None = None) -> Segment:
    """A segment with these log-probs."""
    return Segment(np.arange(3, 3 + len(values), dtype=np.int32), by_policy, floats(*values), version)


def scored(prompt: EncodedPrompt, *completions: Sequence[Segment], greedy: bool = False, **fields: Any) -> ScoredGroup:
    count = len(completions)
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            segments=tuple(each),
            index=i,
            text=f"text {i} {ODD}",
            finish_reason="length" if i % 2 else "stop",
            weight_version=7,
            greedy=greedy,
        )
        for i, each in enumerate(completions)
    )
    components = {"exact": np.linspace(0, 1, count), "exact/part": np.full(count, np.nan), ODD: np.full(count, 1 / 3)}
    return ScoredGroup(
        RolloutGroup(prompt, rollouts),
        np.linspace(-0.1, 0.7, count),
        np.arange(count) != 1,
        components,
        answers={"exact": ["7", None, ODD][:count]},
        **fields,
    )


def groups() -> list[CreditedGroup]:
    """A group that was trained on twice, with a greedy rollout, and one that was rejected."""
    row = Prompt(
        id="train/9",
        messages=(Message("system", ODD), Message("user", "<image>what?")),
        answer={"value": [7, 7.5, None], "text": ODD},
        columns={
            "unit": "cm",
            "box": [1, 2.5],
            "none": None,
            "seen": date(2026, 1, 2),
            "big": 2**70,
            ODD: {"a": [ODD]},
        },
        demonstration="it is 7",
        source="shapes",
        choices=("7", ODD),
    )
    first = EncodedPrompt(
        prompt=row,
        text=f"<image>what? {ODD}",
        token_ids=ids(1, 2, 150_000),
        images=(ImageRef("abc", 56, 28, "x"),),
        epoch=2,
    )
    second = EncodedPrompt(prompt=Prompt(id="7", messages=()), text="", token_ids=ids(4), images=())
    turns = (written([-0.1, -2e-9]), written([0, 0, 0], by_policy=False), written([-1 / 3]))
    one, short = (written([-0.5, -0.0, -17.25]),), (written([-1.5]),)
    advantages = [np.array([1 / 3, 1 / 3, 0, 0, 0, 0.1]), np.full(3, -1 / 3), np.zeros(1)]
    learner = [floats(-0.11, -2e-9, 0, 0, 0, -1 / 3), floats(), floats(-1.25)]
    entropy = [floats(*np.linspace(0.1, 9, len(each))) for each in learner]
    updates = [
        [PreUpdateStatistics(a, b), PreUpdateStatistics(a - floats(0.125), b), PreUpdateStatistics(a[:0], b[:0])]
        for a, b in zip(learner, entropy, strict=True)
    ]
    trained = scored(first, turns, one, short, greedy=False, place=(1, 5))
    trained = replace(trained, greedy=scored(first, one, greedy=True))
    return [
        CreditedGroup(
            trained,
            advantages,
            learner,
            True,
            [floats(*range(6)), floats(*range(3)), floats(2)],
            [updates[0], [], updates[2][:1]],
        ),
        CreditedGroup(scored(second, short, one, kept=False), [np.zeros(1), np.zeros(3)], [floats(), floats()]),
    ]


def write(run: Path, made: Sequence[CreditedGroup], state: Mapping[str, Any] = STATE, step: int = 1) -> Path:
    RunDirectory(run).write_rollouts(step, made, state)
    return recorded_steps(run)[step]


def same(one: Any, other: Any, where: str = "") -> None:
    """Assert that two values are the same to the last bit; ``where`` of records may differ."""
    assert type(one) is type(other) or {type(one), type(other)} <= {list, tuple}, (where, one, other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), (where, one, other)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            if field.name not in ("where", "path"):
                same(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}")
    elif isinstance(one, Mapping):
        assert list(one) == list(other), where
        for key in one:
            same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}[{i}]")
    else:
        assert one == other or (one != one and other != other), (where, one, other)


def expected(made: Sequence[CreditedGroup]) -> list[CreditedGroup]:
    """The groups as readers give them: without columns that JSON cannot hold, and with all lists of updates."""

    def plain(group: ScoredGroup | None) -> ScoredGroup | None:
        if group is None:
            return None
        prompt = group.group.prompt
        columns = {name: value for name, value in prompt.prompt.columns.items() if not isinstance(value, date)}
        row = replace(prompt.prompt, columns=columns)
        views = {name: replace(view, prompt=row) for name, view in prompt.views.items()}
        prompt = replace(prompt, prompt=row, views=views)
        rollouts = tuple(replace(rollout, prompt=prompt) for rollout in group.rollouts)
        return replace(group, group=RolloutGroup(prompt, rollouts), greedy=plain(group.greedy))

    found = []
    for group in made:
        updates = group.updates or [[] for _ in group.advantages]
        found.append(replace(group, scored=plain(group.scored), updates=updates))  # type: ignore[arg-type]
    return found


def test_every_field_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    made = groups()
    step = read_step(write(tmp_path, made))
    same([group.credited for group in step.groups], expected(made))
    assert step.state == STATE and step.is_complete
    assert [group.lost_columns for group in step.groups] == [("seen",), ()]
    assert [group.where.rpartition(":")[2] for group in step.groups] == ["1", "5"]


def groups_with_views() -> list[CreditedGroup]:
    """The groups, of which the first one's prompt has a view that is scored, and one of other tokens to sample from."""
    trained, rejected = groups()
    whole = trained.scored
    prompt = whole.group.prompt
    masked = replace(prompt, images=(ImageRef("def", 56, 28, "x", (60, 30)),))
    small = replace(prompt, images=(ImageRef("fed", 28, 28, "x"),), token_ids=ids(1, 150_000))
    prompt = replace(prompt, views={"masked": masked, "small": small})
    first, *others = (replace(rollout, prompt=prompt) for rollout in whole.rollouts)
    rollouts = (first, *(replace(each, view="small") for each in others))
    greedy = whole.greedy
    assert greedy is not None
    alone = tuple(replace(each, prompt=prompt) for each in greedy.rollouts)
    scored = replace(
        whole,
        group=RolloutGroup(prompt, rollouts),
        greedy=replace(greedy, group=RolloutGroup(prompt, alone)),
    )

    def seen(update: PreUpdateStatistics, by: float) -> PreUpdateStatistics:
        views = {"masked": PreUpdateStatistics(update.logprobs - floats(by), update.entropy + floats(by))}
        return replace(update, views=views)

    updates = [[seen(update, 0.3 + i) for i, update in enumerate(each)] for each in trained.updates]
    return [replace(trained, scored=scored, updates=updates), rejected]


def test_views_and_what_the_policy_makes_of_them_come_back_to_the_last_bit(tmp_path: Path) -> None:
    made = groups_with_views()
    step = read_step(write(tmp_path, made))
    same([group.credited for group in step.groups], expected(made))
    first = step.groups[0].rollouts
    assert [rollout.view for rollout in first] == ["", "small", "small"]
    assert Path(first[0].prompt.views["masked"].images[0].path) == tmp_path / "media" / "def.png"
    (record, *_) = read_lines(recorded_steps(tmp_path)[1])
    assert json.loads(json.dumps(record))["views"][1]["prompt_token_ids"] == [1, 150_000]
    assert len(record["update_logprobs_of_views"]["masked"]) == 3


def groups_of_hooks() -> list[CreditedGroup]:
    """The groups, of which the first was sampled once more, with values of parts of texts, a rollout of an earlier step
    and a demonstration; the second one has none of that."""
    trained, rejected = groups()
    whole = trained.scored
    prompt = replace(whole.group.prompt, prompt=replace(whole.group.prompt.prompt, retries=2))
    first, second, third = (replace(rollout, prompt=prompt) for rollout in whole.rollouts)
    members = (first, replace(second, weight_version=3, recalled=True), replace(third, weight_version=GIVEN))
    values = [np.linspace(0, 1 / 3, len(rollout.token_ids)) for rollout in members]
    greedy = whole.greedy
    assert greedy is not None
    alone = RolloutGroup(prompt, tuple(replace(each, prompt=prompt) for each in greedy.rollouts))
    greedy = replace(greedy, group=alone, token_rewards=[np.full(len(alone.rollouts[0].token_ids), -0.1)])
    scored = replace(whole, group=RolloutGroup(prompt, members), token_rewards=values, greedy=greedy)
    return [replace(trained, scored=scored), rejected]


def test_what_hooks_make_of_a_group_comes_back_to_the_last_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = groups_of_hooks()
    step = read_step(write(tmp_path, made))
    same([group.credited for group in step.groups], expected(made))
    assert step.groups[0].credited.key == (2, "train/9 (retry 2)")
    assert main(["rollouts", str(tmp_path), "--where", "recalled=true"]) == 0
    (first, *_, last) = capsys.readouterr().out.splitlines()
    assert first.endswith("recalled from an earlier step") and last == "1 of 6 rollouts"
    scored = [group.scored for group in made]
    same(read_groups(json.loads(json.dumps(group_records(scored))), tmp_path), [e.scored for e in expected(made)])
    plain = {
        field.name for field in pq.read_schema(write(tmp_path, groups(), step=2)).field("rollouts").type.value_type
    }
    assert not plain & {"token_rewards", "recalled"}


def test_the_viewer_has_the_images_of_views_and_the_view_of_each_member(tmp_path: Path) -> None:
    write(tmp_path, groups_with_views())
    (tmp_path / "metrics.jsonl").touch()
    document = group_document(ViewedRun(tmp_path), "step", 1, 0)
    assert [(view["name"], view["images"][0]["hash"]) for view in document["views"]] == [
        ("masked", "def"),
        ("small", "fed"),
    ]
    assert [member.get("view") for member in document["members"]] == [None, "small", "small", None]
    assert "views" not in group_document(ViewedRun(tmp_path), "step", 1, 1)


def test_groups_with_views_wait_in_a_checkpoint_for_the_next_step(tmp_path: Path) -> None:
    made = [group.scored for group in groups_with_views()]
    records = json.loads(json.dumps(group_records(made)))
    same(read_groups(records, tmp_path), [group.scored for group in expected(groups_with_views())])


def test_a_run_without_views_has_files_without_them(tmp_path: Path) -> None:
    names = []
    for step, made in enumerate((groups(), groups_with_views())):
        schema = pq.read_schema(write(tmp_path, made, step=step))
        names.append({*schema.names, *(field.name for field in schema.field("rollouts").type.value_type)})
    assert names[1] - names[0] == {"views", "view", "update_logprobs_of_views", "update_entropy_of_views"}


def test_bits_that_json_has_no_word_for_come_back_too(tmp_path: Path) -> None:
    odd = np.array([0x7FC00001, 0xFFC00000, 0x7F800000, 0xFF800000, 0x80000000, 1], np.uint32).view(np.float32)
    (group, _) = groups()
    greedy = replace(group.scored, greedy=None)
    prompt = replace(
        greedy.group.prompt,
        prompt=replace(greedy.group.prompt.prompt, candidates=(Candidate(ODD, 0.5), Candidate("", None))),
    )
    empty = scored(
        prompt, (Segment(ids(*range(6)), True, odd),), (), (written([], version=3), written([-1.0], version=4))
    )
    advantages = [odd.astype(np.float64), np.zeros(0), np.array([np.nan])]
    made = CreditedGroup(
        empty,
        advantages,
        [odd, floats(), floats(0.0)],
        True,
        [odd, floats(), floats(-0.0)],
        [
            [PreUpdateStatistics(odd, odd)],
            [PreUpdateStatistics(floats(), floats())],
            [PreUpdateStatistics(floats(-0.0), odd[:1])],
        ],
    )
    (found,) = read_step(write(tmp_path, [made])).groups
    same(found.credited, *expected([made]))
    table = pq.read_table(recorded_steps(tmp_path)[1]).to_pylist()
    assert [len(each["update_logprobs"]) for each in table[0]["rollouts"]] == [0, 0, 1]  # -0.0 is not 0.0


def test_a_group_without_a_reference_policy_is_told_from_one_of_empty_completions(tmp_path: Path) -> None:
    for reference in ((), [floats()]):
        alone = scored(EncodedPrompt(prompt=Prompt(id="p", messages=()), text="", token_ids=ids(), images=()), ())
        made = CreditedGroup(alone, [np.zeros(0)], [floats()], True, reference, [[]])
        (found,) = read_step(write(tmp_path, [made])).groups
        same(found.credited.reference_logprobs, reference)


def test_a_file_of_an_older_version_is_read_by_every_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "rollouts").mkdir(parents=True)
    shutil.copy(SCHEMA_1, old / "rollouts" / "step-000001.jsonl")
    new.mkdir()
    write(new, groups())
    steps = [read_step(recorded_steps(run)[1]) for run in (old, new)]
    assert isinstance(steps[0], RecordedStep)
    same(*steps)
    same(*(list(read_rollouts(run)) for run in (old, new)))
    same(*(list(read_rollouts(file)) for run in (old, new) for file in recorded_files(run)))
    same(*(list(Run(run).rollouts(step=1)) for run in (old, new)))
    assert Run(old).rollout_steps == Run(new).rollout_steps == [1]
    same(*(Redactor().plain(list(read_lines(recorded_steps(run)[1]))) for run in (old, new)))
    printed = []
    for run in (old, new):
        for words in ([], ["--json"], ["--where", "reward<0.5", "--where", "kept=true", "--step", "1", "--json"]):
            assert main(["rollouts", str(run), *words]) == 0
            printed.append(capsys.readouterr().out)
    assert printed[:3] == printed[3:]
    of_schema_1 = [json.loads(line) for line in SCHEMA_1.read_text().splitlines()]
    assert [json.loads(line) for line in printed[1].splitlines()] == [{"step": 1, **each} for each in of_schema_1]


def test_the_size_of_an_images_file_is_recorded_and_unknown_where_an_older_version_wrote(tmp_path, monkeypatch):
    (made, *_) = groups()
    prompt = made.scored.group.prompt
    prompt = replace(prompt, images=(replace(prompt.images[0], file_size=(1600, 1200)), *prompt.images))
    rollouts = tuple(replace(each, prompt=prompt) for each in made.scored.rollouts)
    made = replace(made, scored=replace(made.scored, group=RolloutGroup(prompt, rollouts)))
    sizes = [[ref.file_size for ref in each.rollout.images] for each in read_rollouts(write(tmp_path, [made]))]
    assert sizes == [[(1600, 1200), None]] * len(sizes) and sizes
    (read, *_) = read_groups(json.loads(json.dumps(group_records([made.scored]))), tmp_path)
    assert [ref.file_size for ref in read.group.prompt.images] == [(1600, 1200), None]
    image = pa.struct({"hash": pa.string(), "width": pa.int32(), "height": pa.int32()})
    place = schema.GROUP.get_field_index("images")
    monkeypatch.setattr(schema, "GROUP", schema.GROUP.set(place, pa.field("images", pa.list_(image))))
    older = [[ref.file_size for ref in each.rollout.images] for each in read_rollouts(write(tmp_path, [made]))]
    assert older == [[None, None]] * len(sizes)


def test_a_step_that_is_taken_again_replaces_an_older_versions_file(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    old = tmp_path / "rollouts" / "step-000001.jsonl"
    shutil.copy(SCHEMA_1, old)
    shutil.copy(SCHEMA_1, old.with_name("step-000002.jsonl"))
    (tmp_path / "rollouts" / "step-000001.parquet").write_text("of a run that was killed before it removed the other")
    assert [file.name for file in recorded_files(tmp_path)] == ["step-000001.parquet", "step-000002.jsonl"]
    write(tmp_path, groups())
    assert [file.name for file in recorded_files(tmp_path)] == ["step-000001.parquet", "step-000002.jsonl"]
    assert not old.exists() and len(list(read_rollouts(tmp_path))) == 12


def test_row_groups_are_bounded_and_read_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = groups() * 3
    monkeypatch.setattr(writing, "ROW_GROUP_TOKENS", 14)  # the first two groups have 13 and 5 tokens
    file = write(tmp_path, made)
    with pq.ParquetFile(file) as parquet:
        assert [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)] == [2, 2, 2]
    same([group.credited for group in read_step(file).groups], expected(made))
    assert [record["group"] for record in read_lines(file)] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5]
    assert ["algorithm_state" in record for record in read_lines(file)] == [True] + [False] * 17


def test_no_secret_is_in_any_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct-horse-battery"
    monkeypatch.setenv("MY_API_KEY", secret)
    row = Prompt(
        id=f"id {secret}",
        messages=(Message("user", f"said {secret}"),),
        answer=[{"a": secret, secret: 1}],
        columns={"one": [secret], secret: {secret: 1}, "odd": {date(2026, 1, 2): secret}},
        demonstration=secret,
        source=secret,
        choices=(secret, "b"),
        candidates=(Candidate(secret),),
    )
    prompt = EncodedPrompt(prompt=row, text=f"\ud800 {secret}", token_ids=ids(1), images=(ImageRef(secret, 1, 1, "x"),))
    rollout = Rollout(
        prompt=prompt,
        segments=(written([-1.0]),),
        index=0,
        text=secret,
        finish_reason=secret,
        weight_version=0,  # type: ignore[arg-type]
    )
    made = ScoredGroup(
        RolloutGroup(prompt, (rollout,)),
        np.ones(1),
        np.ones(1, np.bool_),
        {secret: np.ones(1)},
        answers={f"{secret} again": [secret]},
    )
    file = write(tmp_path, [CreditedGroup(made, [np.zeros(1)], [floats()])], {"note": secret})
    table = pq.read_table(file)
    shown = repr([table.schema.metadata, table.to_pylist()])
    assert secret not in shown and shown.count("[redacted]") == 20
    ((found,),) = [read_lines(file)]
    assert found["algorithm_state"] == {"note": "[redacted]"} and found["prompt"] == "\ud800 [redacted]"
    assert found["columns"] == {"one": ["[redacted]"], "[redacted]": {"[redacted]": 1}}


def add_fields(file: Path) -> None:
    """Give each group and each rollout of a file a field that this version does not know."""
    if file.suffix == ".jsonl":
        lines = [{**json.loads(line), "mood": 1, "teacher_logprobs": []} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    table = pq.read_table(file)
    rollouts = table["rollouts"].combine_chunks()
    members = rollouts.values
    teacher = pa.array([[-1.0]] * len(members), pa.list_(pa.float32()))
    fields = [*members.type, pa.field("teacher_logprobs", teacher.type)]
    made = pa.StructArray.from_arrays([*members.flatten(), teacher], fields=fields)
    place = table.schema.get_field_index("rollouts")
    table = table.set_column(place, "rollouts", pa.ListArray.from_arrays(rollouts.offsets, made))
    table = table.append_column("mood", pa.array([1] * len(table)))
    pq.write_table(table.replace_schema_metadata(pq.read_schema(file).metadata), file)


@pytest.mark.parametrize("known", get_args(Known))
def test_a_file_that_was_written_before_the_table_had_a_column_is_read_by_every_reader(
    known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_network = {"role": "teacher", "need": "values"} if known == "before the step" else {}
    added = TokenColumn("mood", known, "mood", "moods", **of_network)
    file = write(tmp_path, groups())
    (tmp_path / "metrics.jsonl").touch()

    def read() -> list[Any]:
        return [list(read_lines(file)), read_step(file), group_document(ViewedRun(tmp_path), "step", 1, 0)]

    records, step, document = read()
    credited = dataclasses.make_dataclass("Credited", [("mood", Any, ())], bases=(CreditedGroup,), frozen=True)
    monkeypatch.setattr(reading, "CreditedGroup", credited)
    monkeypatch.setattr(columns, "OF_ROLLOUT", (*columns.OF_ROLLOUT, "mood"))
    for module in (columns, lines, reading, viewed_groups):
        monkeypatch.setattr(module, "COLUMNS", (*COLUMNS, added))
    found, again, shown = read()
    assert [each.pop("mood") for each in found] == [[]] * len(records)
    same([found, shown], [records, document])
    assert [each["mood"] for each in GroupPages(file).records((0, 0))] == [None] * 4
    for one, other in zip(again.groups, step.groups, strict=True):
        same([getattr(one.credited, name) for name in FIELDS], [getattr(other.credited, name) for name in FIELDS])
        assert all(len(each) == 0 for each in one.credited.mood)  # type: ignore[attr-defined]


@pytest.mark.parametrize("schema", [1, 2])
def test_a_record_of_a_later_version_is_read_without_the_fields_that_it_adds(
    schema: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "_TOLD", set())
    file = write(tmp_path, groups())
    if schema == 1:
        file = Path(shutil.copy(SCHEMA_1, tmp_path / "other.jsonl"))

    def read() -> list[Any]:
        pages = GroupPages(file)
        index = pages.index(["kept"], ["reward"])
        found = [(each.of_group, each.of_rollouts, pages.records(each.place)) for each in index]
        return [read_step(file), list(read_lines(file)), found]

    expected = read()
    assert main(["rollouts", str(file), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    add_fields(file)
    same(read(), expected)
    assert main(["rollouts", str(file), "--json"]) == 0
    found = capsys.readouterr()
    what = f"{file} has fields of a later version of mmrl, and is read without them"
    assert (found.out, found.err) == (shown.out, f"mmrl: warning: {what}: mood, teacher_logprobs\n")


def test_a_loaders_odd_values_are_recorded_as_texts(tmp_path: Path) -> None:
    """Nobody has checked the types of a row before; a finished step must not be lost for them."""
    (made, _) = groups()
    prompt = made.scored.group.prompt
    row = replace(
        prompt.prompt,
        choices=(1, 2.5),  # type: ignore[arg-type]
        demonstration=7,  # type: ignore[arg-type]
        columns={3: date(2026, 1, 2), 4: "plain"},  # type: ignore[dict-item]
    )
    odd = replace(made, scored=scored(replace(prompt, prompt=row), (written([-1.0]),)), advantages=[np.zeros(1)])
    (found, *_) = read_lines(write(tmp_path, [replace(odd, logprobs=[floats()], reference_logprobs=(), updates=())]))
    assert found["choices"] == ["1", "2.5"] and found["demonstration"] == "7"
    assert found["columns"] == {"4": "plain"} and found["columns_as_text"] == {"3": "datetime.date(2026, 1, 2)"}


def realistic(
    num_groups: int = 16, size: int = 5, length: int = 2048, prompt_tokens: int = 1000
) -> list[CreditedGroup]:
    """Log-probs of tokens that are drawn from random logits, and of a learner that rounds otherwise; words for ids."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(chr(97 + i) for i in rng.integers(0, 26, rng.integers(1, 7))) for _ in range(20_000)])
    found = []
    for index in range(num_groups):
        tokens = rng.zipf(1.2, (size + 1, length)) % len(words)
        prompt = EncodedPrompt(
            prompt=Prompt(
                id=f"train/{index}", messages=(Message("user", " ".join(words[tokens[-1, :prompt_tokens]])),)
            ),
            text=" ".join(words[tokens[-1, :prompt_tokens]]),
            token_ids=tokens[-1, :prompt_tokens].astype(np.int32),
            images=(),
        )
        rollouts, learner, updates = [], [], []
        for member in range(size):
            logits = rng.normal(scale=3, size=(length, 64)).astype(np.float32)
            table = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            drawn = (table + rng.gumbel(size=table.shape)).argmax(1)
            logprobs = table[np.arange(length), drawn].astype(np.float32)
            entropy = -(np.exp(table) * table).sum(1).astype(np.float32)
            segment = Segment(tokens[member].astype(np.int32), True, logprobs)
            text = " ".join(words[tokens[member]])
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    segments=(segment,),
                    index=member,
                    text=text,
                    finish_reason="length",
                    weight_version=0,
                )
            )
            learner.append(logprobs + rng.normal(scale=1e-3, size=length).astype(np.float32))
            updates.append([PreUpdateStatistics(learner[-1], entropy)])
        rewards = rng.integers(0, 2, size).astype(np.float64)
        group = ScoredGroup(RolloutGroup(prompt, tuple(rollouts)), rewards, np.ones(size, np.bool_), {"exact": rewards})
        advantages = [np.full(length, each) for each in rewards - rewards.mean()]
        found.append(CreditedGroup(group, advantages, learner, True, (), updates))
    return found


def bytes_per_token(file: Path | io.BytesIO, tokens: int) -> dict[str, float]:
    """By column, the largest first."""
    metadata, sizes = pq.ParquetFile(file).metadata, dict[str, int]()
    for row_group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            found = metadata.row_group(row_group).column(column)
            sizes[found.path_in_schema] = sizes.get(found.path_in_schema, 0) + found.total_compressed_size
    return {name: size / tokens for name, size in sorted(sizes.items(), key=lambda item: -item[1])}


def test_a_small_file_has_a_small_head_and_one_with_a_larger_head_is_read_alike(tmp_path: Path) -> None:
    """Files had statistics of each column, and the schema in Arrow's form too."""
    file = write(tmp_path, realistic(1, 1, 8, 9))
    assert file.stat().st_size < 16_000
    older = tmp_path / "old" / "rollouts" / file.name
    older.parent.mkdir(parents=True)
    metadata = pq.ParquetFile(file).metadata.metadata
    pq.write_table(
        pq.ParquetFile(file).read().cast(schema.GROUP).replace_schema_metadata(metadata), older, compression="zstd"
    )
    assert older.stat().st_size > 25_000 and b"ARROW:schema" in pq.ParquetFile(older).metadata.metadata
    assert list(read_lines(older)) == list(read_lines(file))
    same(read_step(older).groups[0].credited, read_step(file).groups[0].credited)


def test_a_token_takes_at_most_14_bytes_with_one_update() -> None:
    made, file = realistic(), io.BytesIO()
    writing.write_groups(file, made, {}, Redactor())
    tokens = 16 * 5 * 2048
    by_column = bytes_per_token(file, tokens)
    assert len(file.getvalue()) / tokens < 14, by_column
    floats_ = [
        name for name in by_column if name.endswith(("logprobs.list.element", "entropy.list.element.list.element"))
    ]
    assert all(by_column[name] < 4 for name in floats_)


@pytest.mark.parametrize("damage", ["cut", "byte", "empty", "text", "other", "newer", "column"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, groups())
    content = bytearray(file.read_bytes())
    table = pq.read_table(file)
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "byte":
        content[200] ^= 1
        file.write_bytes(content)
    elif damage in ("empty", "text"):
        file.write_text("" if damage == "empty" else "a line of text\n" * 99)
    elif damage == "other":
        pq.write_table(pa.table({"a": [1]}), file)
    elif damage == "newer":
        pq.write_table(table.replace_schema_metadata({"schema": "3", "algorithm_state": "{}"}), file)
    else:
        pq.write_table(table.drop_columns(["prompt"]), file)
    for read in (read_step, lambda path: list(read_rollouts(path)), lambda path: list(read_lines(path))):
        with pytest.raises(DataError) as caught:
            read(file)
        assert str(file) in str(caught.value)
        if damage == "newer":
            assert "another version of mmrl wrote this record: its schema is 3, and this mmrl reads 2" in str(
                caught.value
            )
            assert caught.value.remedy.startswith("read it with the mmrl that wrote it")
    assert main(["rollouts", str(tmp_path)]) == 3
    assert str(file) in capsys.readouterr().err


def test_what_is_printed_can_be_filtered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, groups())
    write(tmp_path, groups()[1:], step=2)

    def printed(*conditions: str, step: str = "") -> list[tuple[int, str, int]]:
        words = [word for condition in conditions for word in ("--where", condition)]
        assert main(["rollouts", str(tmp_path), *words, *(["--step", step] if step else []), "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(record["step"], record["prompt_id"], -1 if record["greedy"] else record["index"]) for record in found]

    everything = [(1, "train/9", 0), (1, "train/9", 1), (1, "train/9", 2), (1, "train/9", -1)]
    everything += [(step, "7", member) for step in (1, 2) for member in (0, 1)]
    assert printed() == everything
    assert printed(step="2") == everything[6:] and printed(step="1-2") == everything
    assert printed("prompt_id=7", "finish_reason=length") == [(1, "7", 1), (2, "7", 1)]
    assert printed("prompt_id != 7") == everything[:4]
    assert printed("reward<0.5", "greedy=false", step="1") == [everything[i] for i in (0, 1, 4)]
    assert printed("reward>=0.7", "valid=true") == [(1, "train/9", 2)]
    assert printed("rewards.exact=1", step="1") == [(1, "train/9", 2), (1, "7", 1)]
    assert printed("rewards.exact/part=null") == everything and printed("rewards.exact/part>0") == []
    assert printed("columns.unit=cm", "epoch==2") == everything[:4]
    assert printed("step=2") == printed("step>1") == everything[6:]
    assert printed("failure!=null") == printed("components.goal<1") == [] and printed("failure=null") == everything


def test_a_number_that_is_not_finite_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, made) = groups()
    odd = replace(made, scored=replace(made.scored, rewards=np.array([np.nan, 1.0])))
    write(tmp_path, [odd])
    for condition, indices in (("reward=null", [0]), ("reward!=null", [1]), ("reward<2", [1])):
        assert main(["rollouts", str(tmp_path), "--where", condition, "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(each["index"], each["reward"]) for each in found] == [(i, None if i == 0 else 1.0) for i in indices]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("reward", "'reward' is no condition"),
        ("<3", "'<3' is no condition"),
        ("rewrad<3", "no rollout has a field 'rewrad'"),
        ("reward<abc", "reward is a number, and 'abc' is none"),
        ("greedy=1", "greedy is true or false"),
        ("prompt_id<3", "prompt_id is a text"),
        ("token_ids=3", "token_ids is no single value"),
        ("__import__('os').abort()=1", "no rollout has a field"),
    ],
)
def test_a_condition_that_means_nothing_is_refused(
    condition: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, groups())
    assert main(["rollouts", str(tmp_path), "--where", condition]) == 2
    assert message in capsys.readouterr().err


def test_people_get_a_few_lines_of_each_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, groups())
    (tmp_path / "not-sampled-yet").mkdir()
    (tmp_path / "not-sampled-yet" / "attempts.jsonl").write_text('{"attempt": 1}\n')
    assert main(["rollouts", str(tmp_path), "--where", "index=1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "step 1, epoch 2, train/9, rollout 1: 3 tokens, length, unscored",
        "    reward 0.3 (exact 0.5, exact/part none, \\ud800 lone, \\x00 nul, \\x1b[31m, \\u202e and 数学 𝔸 0.333333)",
        "    text 1 \\ud800 lone, \\x00 nul, \\x1b[31m, \\u202e and 数学 𝔸",
        "step 1, epoch 0, 7, rollout 1: 3 tokens, length, unscored, rejected",
        "    reward 0.7 (exact 1, exact/part none, \\ud800 lone, \\x00 nul, \\x1b[31m, \\u202e and 数学 𝔸 0.333333)",
        "    text 1 \\ud800 lone, \\x00 nul, \\x1b[31m, \\u202e and 数学 𝔸",
        "2 of 6 rollouts",
    ]
    assert main(["rollouts", str(tmp_path), "--step", "3"]) == 2
    assert "no record of step 3" in capsys.readouterr().err
    for name in ("nowhere", "not-sampled-yet"):
        assert main(["rollouts", str(tmp_path / name)]) == 3
        assert "there are no recorded rollouts" in capsys.readouterr().err
