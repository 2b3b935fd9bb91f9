import errno
import fcntl
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import ConfigError, DataError, ResourceError
from mmrl.rollout.records import group_records, read_groups, read_lines, read_rollouts, read_step
from mmrl.runs.directory import RunDirectory, check_place
from mmrl.runs.history import read_ledger, read_metrics
from mmrl.system.redaction import Redactor
from mmrl.types import (
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


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scored_group():
    row = Prompt(
        id="p7",
        messages=(Message("user", "<image>what?"),),
        answer=["7", 7.5],
        columns={"unit": "cm", "box": np.array([1, 2]), "seen": date(2026, 1, 2)},
        demonstration="it is 7",
        source="shapes",
        choices=("7", "8"),
    )
    prompt = EncodedPrompt(
        prompt=row,
        text="<image>what?",
        token_ids=np.array([1, 2, 3], np.int32),
        images=(ImageRef("abc", 56, 28, "x"),),
    )
    segments = (
        Segment(np.array([5, 6], np.int32), True, np.array([-0.1, -0.2], np.float32)),
        Segment(np.array([9], np.int32), False, np.zeros(1, np.float32)),
    )
    rollouts = tuple(Rollout(prompt, segments, i, f"text {i}", "stop", 4) for i in range(2))
    components = {"a": np.array([1.0, np.nan]), "b": np.array([0.5, 0.25])}
    scores = np.array([2.0, 0.0]), np.array([True, False]), components
    return ScoredGroup(RolloutGroup(prompt, rollouts), *scores, answers={"a": ["ab", None]})


def credited_group(**fields):
    """A group that no step has learned from."""
    return CreditedGroup(replace(scored_group(), **fields), [np.zeros(3)] * 2, [np.zeros(0)] * 2)


def test_a_new_or_empty_folder_becomes_a_run_directory(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "first")
    assert run.path.is_dir()
    assert run.media == run.path / "media"
    assert run.checkpoints == run.path / "checkpoints"


def test_what_a_killed_process_had_half_written_is_removed_and_nothing_else(tmp_path):
    halves = (".config.yaml.123", "rollouts/.step-000001.parquet.77", "media/.0a1b.png.12-139")
    others = (".gitignore", ".nfs000001", "notes.1", "rollouts/step-000001.parquet")
    for name in (*halves, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    RunDirectory.create(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*others, ".lock"}


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints/step-000010"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="already holds a run") as caught:
        RunDirectory.create(tmp_path)
    assert str(tmp_path / name.split("/")[0]) in str(caught.value)
    assert "choose another trainer.run_dir" in str(caught.value)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / ".gitignore").write_text("*")
    check_place(tmp_path)
    for name in ("a.txt", "b", "c", "d", "e"):
        (tmp_path / name).write_text("")
    for look in (check_place, RunDirectory.create):
        with pytest.raises(ConfigError) as caught:
            look(tmp_path)
        text = str(caught.value)
        assert "holds other files, and no run: a.txt, b, c and 2 more" in text
        assert f"choose another, such as {tmp_path / 'run'}" in text
    assert not (tmp_path / ".lock").exists()
    (tmp_path / "config.yaml").write_text("one's own, which a run would replace")
    with pytest.raises(ConfigError, match="holds other files"):
        RunDirectory.create(tmp_path, new=False)


def test_a_folder_below_a_file_is_refused_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/x", "file/x/y"):
        with pytest.raises(ConfigError, match=f"{tmp_path / 'file'} is not a folder"):
            check_place(tmp_path / path)
    check_place(tmp_path / "new" / "run")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_a_failed_start_leaves_can_be_started_in_again(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.media.mkdir()
    run.checkpoints.mkdir()
    run.write_provenance({"python": "3"})
    run.event("fault", message="no model")
    run.write_rollouts(1, [credited_group()])
    run.release()
    assert (tmp_path / "rollouts" / "step-000001.parquet").exists()  # it may tell why
    again = RunDirectory.create(tmp_path)
    again.write_config("model: {}\n")
    assert (tmp_path / "config.yaml").read_text() == "model: {}\n"
    with pytest.raises(ConfigError):
        RunDirectory.create(tmp_path)


def test_a_folder_is_one_runs_until_it_is_released(tmp_path):
    first = RunDirectory.create(tmp_path)
    with pytest.raises(ResourceError, match="another process is using"):
        RunDirectory.create(tmp_path)
    first.write_config("model: {}\n")
    first.append_metrics(1, {})
    first.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml", "metrics.jsonl"]


def test_a_folder_with_finished_steps_is_not_given_up_by_who_adds_none(tmp_path):
    first = RunDirectory.create(tmp_path)
    first.write_config("model: {}\n")
    first.append_metrics(0, {})
    first.append_metrics(1, {})
    first.release()
    second = RunDirectory.create(tmp_path, new=False)
    assert second.has_steps
    second.release()
    assert (tmp_path / "config.yaml").exists() and len(lines(tmp_path / "metrics.jsonl")) == 2


def test_who_opened_the_lock_before_it_was_released_does_not_hold_another_than_the_next(tmp_path):
    first = RunDirectory.create(tmp_path)
    with (tmp_path / ".lock").open() as waiting:  # a second process, between opening the file and locking it
        first.release()
        third = RunDirectory.create(tmp_path)
        with pytest.raises(BlockingIOError):
            fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
        third.release()
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ResourceError, match=r"(?s)cannot be locked.*choose a trainer\.run_dir"):
        RunDirectory.create(tmp_path)


FULL = """
import os, sys
from pathlib import Path
from mmrl.errors import ResourceError
from mmrl.runs.directory import RunDirectory

disk = Path(sys.argv[1])
run = RunDirectory.create(disk / "run")
run.begin_attempt(None)
run.append_metrics(1, {"lr": 1.0})
filler = (disk / "filler").open("wb", buffering=0)
for size in (65536, 1):
    try:
        while filler.write(bytes(size)) == size:
            pass
    except OSError:
        pass
length = (run.path / "metrics.jsonl").stat().st_size
writers = {
    "metrics": lambda: run.append_metrics(2, {f"name {i}": 0.5 for i in range(1000)}),
    "ledger": lambda: run.append_ledger(2, 2, [(0, f"prompt {i}", i) for i in range(1000)]),
    "rollouts": lambda: run.write_rollouts(2, [], {"text": "x" * 10000}),
}
for name, write in writers.items():
    try:
        write()
    except ResourceError as error:
        assert "the folder cannot be written: No space left on device" in error.what, error
    else:
        print("there was room for", name)
assert (run.path / "metrics.jsonl").stat().st_size > length  # half a line
for _ in range(100):
    run.event("told", message="x" * 1000)
    run.end_attempt(5, "x" * 1000)
filler.truncate(0)
run.append_metrics(3, {"lr": 1.0})
run.event("last")
assert sorted(run.metrics()) == [1, 3], run.metrics()
print((run.path / "events.jsonl").read_text().splitlines()[-1][-7:])
"""


def test_a_full_disk_stops_no_event_and_no_half_line_is_written_on(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1000k tmpfs {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    (tmp_path / "full.py").write_text(FULL)
    command = f"{mount} && exec {sys.executable} {tmp_path / 'full.py'} {disk}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ('"last"}\n', 0), done.stdout + done.stderr


def refuse_to_write(monkeypatch, path, number=errno.EROFS):
    """As root nothing is read-only by its mode, so opening says what a read-only file system does."""
    opened = Path.open

    def refuse(self, mode="r", *arguments, **options):
        if self.is_relative_to(path) and set(mode) & set("wa+"):
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)


def test_a_folder_that_becomes_read_only_stops_no_event(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path)
    run.begin_attempt(None)
    refuse_to_write(monkeypatch, tmp_path)
    run.event("checkpoint_failed", message="read-only")
    run.end_attempt(5)
    for write in (
        lambda: run.append_metrics(1, {}),
        lambda: run.append_ledger(1, 1, []),
        lambda: run.write_rollouts(1, []),
        lambda: run.write_config(""),
    ):
        with pytest.raises(ResourceError, match="the folder cannot be written: Read-only file system"):
            write()
    assert len(lines(tmp_path / "attempts.jsonl")) == 1 and not (tmp_path / "events.jsonl").exists()


def test_a_file_in_the_way_and_a_folder_that_cannot_be_made_are_told_apart(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        RunDirectory.create(tmp_path / "file")
    with pytest.raises(ConfigError, match="is not a folder"):
        RunDirectory.create(tmp_path / "file" / "below")
    with pytest.raises(ResourceError, match="cannot make"):
        RunDirectory.create(tmp_path / ("x" * 300))


def test_metrics_are_appended_with_full_precision_and_null_for_what_is_not_finite(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.begin_attempt(None)
    exact = float(np.float32(0.1))
    run.append_metrics(0, {"reward/mean": exact, "kl/reference": math.nan, "lr": np.float32(0.1)})
    run.begin_attempt(0)
    run.append_metrics(1, {"reward/mean": math.inf})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert list(first)[:3] == ["step", "attempt", "time"]
    assert (first["step"], first["attempt"]) == (0, 1)
    assert first["reward/mean"] == exact == first["lr"]
    assert first["kl/reference"] is None
    assert (second["step"], second["attempt"], second["reward/mean"]) == (1, 2, None)
    assert second["time"] >= first["time"] > 1.6e9


def test_every_rollout_is_written_with_all_that_is_known_of_it(tmp_path):
    run, learner = RunDirectory.create(tmp_path), np.array([-0.3, -0.4, 0.0], np.float32)
    advantages = [np.array([1.5, 1.5, 0.0]), np.zeros(3)]
    later, entropy = np.array([-0.25, -0.125, 0.0], np.float32), np.array([1 / 3, 2e-9, 0.0], np.float32)
    updates = [
        PreUpdateStatistics(learner, entropy),
        PreUpdateStatistics(later, entropy),
        PreUpdateStatistics(learner[:0], learner[:0]),
    ]
    group = CreditedGroup(
        replace(scored_group(), place=(1, 5)), advantages, [learner, learner[:0]], True, [later, later], [updates, []]
    )
    run.write_rollouts(1, [group], {"coefficient": 0.5})
    file = tmp_path / "rollouts" / "step-000001.parquet"
    first, second = Redactor().plain(list(read_lines(file)))
    assert first == {
        "algorithm_state": {"coefficient": 0.5},
        "group": 0,
        "place": [1, 5],
        "trained": True,
        "prompt_id": "p7",
        "epoch": 0,
        "index": 0,
        "source": "shapes",
        "messages": [{"role": "user", "content": "<image>what?"}],
        "prompt": "<image>what?",
        "prompt_token_ids": [1, 2, 3],
        "images": [{"hash": "abc", "width": 56, "height": 28}],
        "answer": ["7", 7.5],
        "choices": ["7", "8"],
        "columns": {"unit": "cm", "box": [1, 2]},
        "columns_as_text": {"seen": "datetime.date(2026, 1, 2)"},
        "demonstration": "it is 7",
        "completion": "text 0",
        "token_ids": [5, 6, 9],
        "mask": [True, True, False],
        "finish_reason": "stop",
        "weight_version": 4,
        "rewards": {"a": 1.0, "b": 0.5},
        "reward": 2.0,
        "answers": {"a": "ab"},
        "valid": True,
        "kept": True,
        "greedy": False,
        "advantage": [1.5, 1.5, 0.0],
        "sampler_logprobs": [-0.100000001, -0.200000003, 0.0],
        "learner_logprobs": [-0.300000012, -0.400000006, 0.0],
        "reference_logprobs": [-0.25, -0.125, 0.0],
        "update_logprobs": [[-0.300000012, -0.400000006, 0.0], [-0.25, -0.125, 0.0], []],
        "update_entropy": [[0.333333343, 1.99999994e-09, 0.0]] * 2 + [[]],
    }
    assert second["rewards"] == {"a": None, "b": 0.25} and second["answers"] == {"a": None}
    assert second["valid"] is False
    assert second["advantage"] == [0, 0, 0] and second["learner_logprobs"] == [] == second["update_entropy"]
    assert "algorithm_state" not in second
    read = read_step(file)
    assert read.state == {"coefficient": 0.5} and read.is_complete and read.groups[0].lost_columns == ("seen",)
    found = read.groups[0].credited
    assert (found.trained, found.scored.place, found.scored.kept) == (True, (1, 5), True)
    pairs = [(a, b) for name in ("advantages", "logprobs", "reference_logprobs")
             for a, b in zip(getattr(found, name), getattr(group, name), strict=True)]  # fmt: skip
    pairs += [(getattr(a, name), getattr(b, name)) for name in ("logprobs", "entropy")
              for a, b in zip(found.updates[0], updates, strict=True)]  # fmt: skip
    for one, other in pairs:  # to the last bit of float32
        np.testing.assert_array_equal(one, other)


def test_rollouts_can_be_read_again_as_their_rewards_saw_them(tmp_path):
    run, written = RunDirectory.create(tmp_path), scored_group()
    for step in (1, 2):
        run.write_rollouts(step, [credited_group()])
    file = tmp_path / "rollouts" / "step-000001.parquet"
    assert [len(list(read_rollouts(path))) for path in (tmp_path, tmp_path / "rollouts", file)] == [4, 4, 2]
    first, second = read_rollouts(file)
    assert first.rewards == {"a": 1.0, "b": 0.5} and second.rewards == {"a": None, "b": 0.25}
    assert (first.valid, second.valid, first.greedy, first.where) == (True, False, False, f"{file}:1")
    rollout, original = first.rollout, written.group.rollouts[0]
    for name in ("text", "index", "finish_reason", "weight_version", "answer", "messages", "source", "choices"):
        assert getattr(rollout, name) == getattr(original, name)
    assert rollout.columns == {"unit": "cm", "box": [1, 2]}
    assert rollout.prompt.prompt.demonstration == "it is 7" and rollout.prompt.text == "<image>what?"
    assert rollout.images == (ImageRef("abc", 56, 28, str(tmp_path / "media" / "abc.png")),)
    for name in ("token_ids", "mask", "sampler_logprobs"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(original, name))
        assert getattr(rollout, name).dtype == getattr(original, name).dtype
    assert [segment.by_policy for segment in rollout.segments] == [True, False]
    np.testing.assert_array_equal(rollout.prompt.token_ids, original.prompt.token_ids)


def test_rollouts_of_steps_that_are_undone_leave_the_run_and_are_kept(tmp_path):
    names = [f"rollouts/step-{step:06d}.parquet" for step in (1, 2, 3)] + ["rollouts/step-000003.jsonl"]
    names += [f"evaluations/{kind}-{step:06d}.parquet" for kind in ("step", "blank") for step in (0, 2)]
    directory = RunDirectory.create(tmp_path)
    directory.begin_attempt(None)
    for name in (*names, "rollouts/notes-7.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    directory.begin_attempt(1)
    kept = {name for name in names if name.endswith(("000000.parquet", "000001.parquet"))}
    assert {name for name in names if (tmp_path / name).exists()} == kept
    moved = {str(path.relative_to(tmp_path / "undone/attempt-000001")) for path in tmp_path.glob("undone/*/*/*")}
    assert moved == set(names) - kept and (tmp_path / "rollouts/notes-7.txt").exists()
    (tmp_path / "rollouts/step-000001.parquet").write_text("again")
    directory.begin_attempt(None)
    assert (tmp_path / "undone/attempt-000002/rollouts/step-000001.parquet").read_text() == "again"


def test_a_metrics_line_of_another_form_is_named(tmp_path):
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 1, "time": 1.0, "resumed_from": null}\n')
    for line in ('{"foo": 1}', '{"step": "x"}', "[1]"):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "attempt": 1}}\n{line}\n')
        with pytest.raises(DataError, match=r"as a run writes it|no JSON") as caught:
            read_metrics(tmp_path)
        assert "metrics.jsonl" in caught.value.where


def test_the_ledger_keeps_the_step_that_a_run_went_on_from(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.begin_attempt(None)
    for step in (1, 2):
        run.append_ledger(step, step, [(0, "p", 0)])
    run.begin_attempt(1)
    run.append_ledger(2, 2, [(0, "p", 0)])
    assert [(record["step"], record["attempt"]) for record in read_ledger(tmp_path)] == [(1, 1), (2, 2)]


def test_a_step_of_the_ledger_is_read_from_its_end(tmp_path):
    """Two updates a step; attempts go on from steps 3, 5 and 2, the last one past what they had undone."""
    run = RunDirectory.create(tmp_path)
    for begin, end in ((None, 6), (3, 7), (5, 5), (2, 4)):
        run.begin_attempt(begin)
        for step in range((begin or 0) + 1, end + 1):
            for update in (2 * step - 1, 2 * step):
                run.append_ledger(step, update, [(0, "prompt", number) for number in range(200)])
    everything = read_ledger(tmp_path)
    assert [record["attempt"] for record in everything] == [1, 1, 1, 1, 4, 4, 4, 4]
    for step in range(9):
        assert read_ledger(tmp_path, step) == [record for record in everything if record["step"] == step]
    path = tmp_path / "ledger.jsonl"
    path.write_text("no JSON\n" + path.read_text())
    assert len(read_ledger(tmp_path, 2)) == 2, "what is before the step is not read"


def test_groups_of_one_prompt_in_two_epochs_are_told_apart_in_their_records(tmp_path):
    written = scored_group()
    prompt = replace(written.group.prompt, epoch=3)
    rollouts = tuple(replace(rollout, prompt=prompt) for rollout in written.group.rollouts)
    records = group_records([written, replace(written, group=RolloutGroup(prompt, rollouts))])
    assert [record["epoch"] for record in records] == [0, 0, 3, 3]
    assert [group.group.prompt.epoch for group in read_groups(records, tmp_path)] == [0, 3]


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "p"}', '{"images": 3}', '{"images": [1]}', "\x80"])
def test_a_line_that_is_no_rollout_is_named(tmp_path, line):
    (tmp_path / "odd.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=r"odd\.jsonl"):
        list(read_rollouts(tmp_path))
    with pytest.raises(DataError, match="there are no recorded rollouts"):
        list(read_rollouts(tmp_path / "nowhere"))


def test_rejected_groups_are_marked_and_the_greedy_rollout_comes_last_without_credit(tmp_path):
    greedy = scored_group()
    alone = RolloutGroup(greedy.group.prompt, greedy.group.rollouts[:1])
    greedy = replace(greedy, group=alone, rewards=np.array([0.75]), valid=np.array([True]))
    RunDirectory.create(tmp_path).write_rollouts(1, [credited_group(greedy=greedy, kept=False)])
    records = list(read_lines(tmp_path / "rollouts" / "step-000001.parquet"))
    assert [record["kept"] for record in records] == [False] * 3
    assert [record["greedy"] for record in records] == [False, False, True]
    last = records[-1]
    assert (last["reward"], last["advantage"], last["learner_logprobs"]) == (0.75, [], [])
    assert len(last["sampler_logprobs"]) == 3


def test_a_file_that_fails_while_it_is_written_leaves_the_old_one_and_nothing_else(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.write_rollouts(1, [credited_group()])
    file = tmp_path / "rollouts" / "step-000001.parquet"
    old = file.read_bytes()

    def broken():
        yield credited_group(kept=False)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run.write_rollouts(1, broken())
    assert file.read_bytes() == old
    assert len(list((tmp_path / "rollouts").iterdir())) == 1


def test_secrets_reach_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("FEW_TOKENS", "short")
    run = RunDirectory.create(tmp_path)
    hub, other = "hf_" + "a1B2" * 8, "sk-proj-" + "a1B2" * 8
    run.write_config(f"path: {hub}\n")
    run.write_provenance({"argv": ["--key", "correct-horse-battery"]})
    run.event("fault", message=f"401 for {other}", where={"header correct-horse-battery": 1})
    run.append_metrics(1, {f"my key is {hub}, short": 1.0})
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert written.count("[redacted]") == 5
    for secret in (hub, other, "correct-horse-battery"):
        assert secret not in written
    assert "short" in written


def test_hostile_text_and_odd_values_are_written_as_plain_ascii_json(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.event(
        "odd", text="\x1b[31m\u202e\x9b\ud800", path=tmp_path, set={1}, array=np.array([1, 2]), flag=np.bool_(True)
    )
    raw = (tmp_path / "events.jsonl").read_bytes()
    assert all(32 <= byte < 127 or byte == 10 for byte in raw)
    record = json.loads(raw)
    assert record["text"] == "\x1b[31m\u202e\x9b\ud800"
    assert (record["path"], record["set"], record["array"], record["flag"]) == (str(tmp_path), [1], [1, 2], True)
