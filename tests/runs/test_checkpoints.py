"""Checkpoints on disk: nothing that happens to one goes unseen, and writing one harms no other."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.engine_api import NetworkFiles
from mmrl.errors import NumericsError, ResourceError
from mmrl.runs import checkpoints as module
from mmrl.runs.checkpoints import Checkpoint, CheckpointError, Checkpoints, find
from mmrl.runs.directory import RunDirectory
from mmrl.runs.manifest import Manifest
from mmrl.system import failpoints
from tests.canary import Canary
from tests.faults.runs import Runs, at, events, outcome, records, steps, stop


def fill(*, seed: int = 0) -> Callable[[Path], None]:
    """Writes some files, others for each seed, of the same sizes."""

    def write(folder: Path) -> None:
        for name, size in {"model/a.safetensors": 3000, "model/config.json": 50, "state/run.json": 20}.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes((i * 7 + seed) % 256 for i in range(size)))

    return write


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    """Two checkpoints, of steps 2 and 4."""
    store = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 4):
        store.write(step, fill(seed=step))
    return store


def newest(store: Checkpoints) -> tuple[int | None, list[str]]:
    """The step of the newest good one, and what was said of the damaged ones."""
    said: list[str] = []
    try:
        found = store.newest(lambda checkpoint, error: said.append(str(error)))
    except CheckpointError:
        return None, said
    return None if found is None else found.step, said


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(bytes(content))


def damages(path: Path, others: list[Path]) -> dict[str, Callable[[], None]]:
    """What may happen to a file; ``others`` are files that it may be swapped with."""

    def replace_by_link() -> None:
        copy = path.parents[3] / f"copy-of-{path.name}"
        shutil.copy(path, copy)
        path.unlink()
        path.symlink_to(copy)

    def replace_by_folder() -> None:
        content = path.read_bytes()
        path.unlink()
        path.mkdir()
        (path / path.name).write_bytes(content)

    def swap(other: Path) -> Callable[[], None]:
        def act() -> None:
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs)
            other.write_bytes(mine)

        return act

    size = path.stat().st_size
    return {
        **{f"flip {place}": lambda place=place: flip(path, place) for place in {0, size // 3, size // 2, size - 1}},
        "truncate by one": lambda: os.truncate(path, size - 1),
        "truncate to nothing": lambda: os.truncate(path, 0),
        "append": lambda: path.write_bytes(path.read_bytes() + b"\0"),
        "delete": path.unlink,
        "link": replace_by_link,
        "folder": replace_by_folder,
        **{f"swap with {other}": swap(other) for other in others},
    }


def check_all_damages(store: Checkpoints, newer: Checkpoint, older: Checkpoint) -> int:
    """Damage every file of the newer one in every way, one at a time; returns how many damages there were."""
    pristine, count = newer.path.parents[1] / "pristine", 0
    shutil.copytree(newer.path.parent, pristine)
    names = sorted(str(p.relative_to(newer.path)) for p in newer.path.rglob("*") if p.is_file())
    for name in names:
        path = newer.path / name
        twin = [p for p in [older.path / name] if p.exists() and p.read_bytes() != path.read_bytes()]
        beside = [p for p in (newer.path / each for each in names) if p.read_bytes() != path.read_bytes()][:1]
        for what, damage in damages(path, twin + beside).items():
            damage()
            step, said = newest(store)
            if what.startswith("swap") and twin and str(twin[0]) in what:  # the older one is damaged too
                assert step is None, (name, what)
            else:
                assert step == older.step, (name, what)
            assert said and str(newer.path) in said[0], (name, what)
            named = {path.name, *(p.name for p in beside if what.startswith("swap"))}
            assert any(f"a checkpoint is damaged: {each} " in said[0] for each in named), (name, what, said)
            shutil.rmtree(newer.path.parent)
            shutil.copytree(pristine, newer.path.parent, symlinks=True)
            count += 1
    assert newest(store) == (newer.step, [])
    return count


def test_whatever_happens_to_a_file_is_seen_and_named_and_the_one_before_is_used(store):
    older, newer = store.all()
    assert check_all_damages(store, newer, older) >= 4 * 11


def test_every_byte_of_the_manifest_counts(store):
    newer = store.all()[1]
    manifest = newer.path / "manifest.json"
    good = manifest.read_bytes()
    for place in range(len(good)):
        flip(manifest, place)
        with pytest.raises(CheckpointError, match=r"a checkpoint is damaged: manifest\.json"):
            newer.verify()
        manifest.write_bytes(good)
    for changed_text in (b"", b"{}", b"[]", b"null", b"[" * 100_000, good + good, good[:-1], b"\xff\xfe"):
        manifest.write_bytes(changed_text)
        with pytest.raises(CheckpointError, match=r"a checkpoint is damaged: manifest\.json"):
            newer.verify()
    manifest.write_bytes(good)
    newer.verify()


def test_a_manifest_that_was_made_for_another_step_is_refused(store):
    older, newer = store.all()
    shutil.rmtree(newer.path)
    shutil.copytree(older.path, newer.path)
    assert newest(store)[0] == 2
    with pytest.raises(CheckpointError, match="not the one that was written with this checkpoint"):
        newer.verify()


@pytest.mark.parametrize("name", ["canary.pkl", "model/pytorch_model.bin", "state/canary.pt", "model/deep/er/.x.pkl"])
def test_a_file_too_many_is_named_and_not_read(store, tmp_path, name):
    newer = store.all()[1]
    trace, path = tmp_path / "trace", newer.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(Canary(trace)))
    step, (said,) = newest(store)
    assert step == 2 and f"{path.name} was not written with the checkpoint" in said
    assert not trace.exists()


@pytest.mark.parametrize("name", ["model", "state", "manifest.json"])
def test_a_part_that_is_a_link_to_the_very_same_is_not_believed(store, tmp_path, name):
    newer = store.all()[1]
    (newer.path / name).rename(tmp_path / "elsewhere")
    (newer.path / name).symlink_to(tmp_path / "elsewhere")
    step, (said,) = newest(store)
    assert step == 2 and "a checkpoint is damaged" in said


def test_a_file_that_the_disk_does_not_give_back_is_damage(store, monkeypatch):
    broken = store.all()[1].path / "model" / "a.safetensors"
    hashed = module.sha256

    def fail(path: Path) -> str:
        if path == broken:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return hashed(path)

    monkeypatch.setattr(module, "sha256", fail)
    step, (said,) = newest(store)
    assert step == 2 and "a.safetensors cannot be read" in said and "Input/output error" in said


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("name", ["manifest.json", "model/a.safetensors", "model", "checkpoints"])
def test_a_file_that_cannot_be_read_now_is_no_damage(store, monkeypatch, name, number):
    newer = store.all()[1]
    broken = newer.path.parent if name == "checkpoints" else newer.path / name

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(path: Any, *arguments: Any, **options: Any) -> Any:
            if Path(path) == broken:
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *arguments, **options)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(module, "sha256", failing(module.sha256))
        patch.setattr(Path, "read_text", failing(Path.read_text))
        for call in ("listdir", "scandir"):
            patch.setattr(os, call, failing(getattr(os, call)))
        with pytest.raises(ResourceError, match="the checkpoints cannot be read") as caught:
            store.newest(lambda checkpoint, error: pytest.fail(str(error)))
    assert caught.value.exit_code == 5 and str(broken) in str(caught.value)
    assert newest(store) == (4, [])


@pytest.mark.parametrize("name", ["manifest.json", "model/a.safetensors", "state/other"])
def test_a_pipe_in_place_of_a_file_is_damage_and_not_waited_for(store, name):
    path = store.all()[1].path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    step, (said,) = newest(store)
    assert step == 2 and f"a checkpoint is damaged: {path.name} " in said


def test_nothing_is_hashed_of_a_checkpoint_whose_sizes_are_wrong(store, monkeypatch):
    newer = store.all()[1]
    os.truncate(newer.path / "state" / "run.json", 3)  # the last by name
    monkeypatch.setattr(module, "sha256", lambda path: pytest.fail("was read"))
    with pytest.raises(CheckpointError, match=r"run\.json is not the file of 20 bytes"):
        newer.verify()


def test_its_networks_are_those_that_were_saved_and_each_has_an_optimizer_to_drop(store):
    def save(folder: Path) -> dict[str, NetworkFiles]:
        roles = {role: NetworkFiles.of(role) for role in ("policy", "critic")}
        for role, files in roles.items():
            for path in (folder / files.model / "a", folder / files.state / "optimizer-0", folder / files.state / "b"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(role)
        return roles

    written = store.write(6, save)
    manifest = Manifest.read((written.path / "manifest.json").read_text())
    assert manifest.roles == {"policy": NetworkFiles(), "critic": NetworkFiles("critic/model", "critic/state")}
    written.drop_optimizer()
    written.verify()
    kept = {"critic/model/a", "critic/state/b", "manifest.json", "model/a", "state/b"}
    assert {str(path.relative_to(written.path)) for path in written.path.rglob("*") if path.is_file()} == kept


def test_files_are_hashed_side_by_side(store, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    meeting, hashed = threading.Barrier(3, timeout=30), module.sha256

    def meet(path: Path) -> str:
        meeting.wait()
        return hashed(path)

    monkeypatch.setattr(module, "sha256", meet)
    store.write(6, fill()).verify()


@pytest.mark.full
def test_a_checkpoint_of_the_real_learner_is_guarded_as_well(start, tmp_path):
    store = Checkpoints(tmp_path / "run" / "checkpoints")
    store.write(0, fill())
    with start(learner={"zero_stage": 0}).learning() as learner:
        written = store.write(1, learner.save)
    names = {path.name for path in written.path.rglob("*") if path.is_file()}
    assert {"model.safetensors", "config.json", "manifest.json"} < names
    assert not any(name.endswith((".pt", ".bin", ".pkl", ".pickle")) for name in names)
    assert check_all_damages(store, written, store.all()[0]) > 8 * len(names)


def test_only_the_newest_and_the_best_are_kept(tmp_path):
    store = Checkpoints(tmp_path)
    for step in range(6):
        store.write(step, fill(seed=step))
        store.prune(2, best=1 if step else None)
    assert [c.step for c in store.all()] == [1, 4, 5]
    assert os.readlink(tmp_path / "best") == "step-000001"
    store.prune(2, best=5)
    assert [c.step for c in store.all()] == [4, 5] and os.readlink(tmp_path / "best") == "step-000005"
    assert find(tmp_path / "best", pytest.fail).step == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-000004", "step-000005"]


def test_all_of_a_checkpoint_is_forced_to_the_disk_before_it_has_its_name(store, tmp_path, monkeypatch):
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(os.fstat(descriptor).st_ino))
    hidden = tmp_path / "checkpoints" / ".step-000006"

    def look() -> None:
        assert {path.stat().st_ino for path in (hidden, *hidden.rglob("*"))} == {*forced}

    with at("checkpoint.sealed", act=look):
        store.write(6, fill())
    assert forced[-1] == (tmp_path / "checkpoints").stat().st_ino  # which holds the name


@pytest.mark.parametrize("point", ["checkpoint.begin", "checkpoint.filled", "checkpoint.sealed"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), NumericsError("not finite")])
def test_an_error_while_writing_leaves_the_others_and_no_trace(store, point, error):
    before = {path: path.stat().st_mtime_ns for path in store.all()[0].path.parent.rglob("*")}

    def fail() -> None:
        raise error

    kind, message = (NumericsError, "not finite") if isinstance(error, NumericsError) else (ResourceError, "No space")
    with at(point, act=fail), pytest.raises(kind, match=message):
        store.write(6, fill())
    assert sorted(path.name for path in store.all()[0].path.parent.iterdir()) == ["step-000002", "step-000004"]
    after = {path: path.stat().st_mtime_ns for path in store.all()[0].path.parent.rglob("*")}
    assert {path: time for path, time in after.items() if path in before} == before
    assert newest(store) == (4, [])


FULL = """
import errno, sys
from pathlib import Path
from mmrl.runs.checkpoints import Checkpoints
from mmrl.errors import ResourceError

store = Checkpoints(Path(sys.argv[1]) / "checkpoints")
store.write(1, lambda folder: (folder / "weights").write_bytes(bytes(600_000)) and None)
for size in (600_000, 1_020_000 - 600_000):  # no room for the weights; for no more than the weights
    try:
        store.write(2, lambda folder: (folder / "weights").write_bytes(bytes(size)) and None)
    except ResourceError as error:
        assert "No space left on device" in error.what and error.exit_code == 5, error
    else:
        print("there was room for", size)
names = [path.name for path in (Path(sys.argv[1]) / "checkpoints").iterdir()]
assert names == ["step-000001"], names
store.all()[0].verify()
print("kept")
"""


def test_a_disk_that_is_really_full_harms_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1000k tmpfs {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    script = tmp_path / "full.py"
    script.write_text(FULL)
    command = f"{mount} && exec {sys.executable} {script} {disk}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("kept\n", 0), done.stderr


def test_a_read_only_folder_is_said(store, monkeypatch):
    """As root nothing is read-only by its mode, so the system call says what a read-only file system does."""

    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(ResourceError, match="step 6 cannot be written: Read-only file system") as caught:
            store.write(6, fill())
    assert caught.value.exit_code == 5 and newest(store) == (4, [])


def test_leftovers_of_a_killed_process_are_cleaned_up_and_never_believed(store, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    fill()(folder / ".step-000006") if (folder / ".step-000006").mkdir() is None else None
    (folder / ".best").symlink_to("step-000002")
    (folder / ".removed-step-000000").mkdir()
    (folder / ".nfs0001").touch()
    remove = Path.unlink

    def busy(self: Path, *arguments: Any, **options: Any) -> None:
        if self.name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))
        remove(self, *arguments, **options)

    monkeypatch.setattr(Path, "unlink", busy)
    assert newest(store) == (4, [])
    store.clean()
    assert sorted(path.name for path in folder.iterdir()) == [".nfs0001", "step-000002", "step-000004"]


def test_a_path_means_a_checkpoint_or_the_newest_of_a_run(store, tmp_path):
    for path, step in {"": 4, "checkpoints": 4, "checkpoints/step-000002": 2}.items():
        assert find(tmp_path / path, pytest.fail).step == step
    flip(tmp_path / "checkpoints" / "step-000004" / "state" / "run.json", 3)
    said: list[str] = []
    assert find(tmp_path, lambda checkpoint, error: said.append(str(error))).step == 2 and len(said) == 1
    for path, message in {
        "checkpoints/step-000004": "run.json has other content than was written",
        "nowhere": "there is no checkpoint",
        "checkpoints/step-000002/model": "there is no checkpoint",
        "checkpoints/step-000009": "there is no checkpoint",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            find(tmp_path / path, pytest.fail)
    (tmp_path / "checkpoints" / "step-000002").rename(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="the folder's name is not that of a checkpoint"):
        find(tmp_path / "mine", pytest.fail)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(fake_runs: Runs, capsys):
    config, run = fake_runs.config(), fake_runs.folder / "run"
    assert fake_runs.train(config) == 0
    expected = outcome(run)
    damaged = run / "checkpoints" / "step-000004"
    flip(damaged / "model" / "model.safetensors", 77)
    capsys.readouterr()
    assert fake_runs.train(config, "--strict-resume") == 3
    error = capsys.readouterr().err
    assert "model.safetensors has other content than was written" in error and str(damaged) in error
    assert "leave out --strict-resume" in error and steps(run)[-1] == "step-000004"
    assert fake_runs.train(config) == 0
    assert "checkpoint_damaged" in capsys.readouterr().out
    (event,) = events(run, "checkpoint_damaged")
    assert event["step"] == 4 and "model.safetensors" in event["message"] and str(damaged) in event["message"]
    assert [e["step"] for e in events(run, "resumed")] == [3]
    assert outcome(run) == expected
    assert "damaged-step-000004" in steps(run)


def test_a_run_whose_checkpoints_are_all_damaged_ends(fake_runs: Runs, capsys):
    config, run = fake_runs.config(), fake_runs.folder / "run"
    assert fake_runs.train(config) == 0
    for folder in (run / "checkpoints").iterdir():
        (folder / "state" / "learner.json").unlink()
    before = records(run / "metrics.jsonl")
    capsys.readouterr()
    assert fake_runs.train(config) == 3
    error = capsys.readouterr().err
    assert "learner.json is missing" in error and "choose another trainer.run_dir" in error
    assert "Traceback" not in error and records(run / "metrics.jsonl") == before
    assert {e["step"] for e in events(run, "checkpoint_damaged")} == {2, 3, 4}


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


@pytest.mark.full
@pytest.mark.parametrize("point", ["save.shard", "checkpoint.filled", "checkpoint.sealed"])
def test_a_full_disk_at_a_checkpoint_is_told_and_training_goes_on(fake_runs: Runs, point):
    assert fake_runs.train(fake_runs.config("plain")) == 0
    with at(point, 3, full):
        assert fake_runs.train(fake_runs.config()) == 0
    run = fake_runs.folder / "run"
    (event,) = events(run, "checkpoint_failed")
    assert event["step"] == 2 and "No space left on device" in event["message"] and "make room" in event["message"]
    assert steps(run) == ["step-000001", "step-000003", "step-000004"]
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_a_full_disk_at_the_last_checkpoint_ends_the_run_which_can_go_on(fake_runs: Runs, capsys):
    assert fake_runs.train(fake_runs.config("plain")) == 0
    config, run = fake_runs.config(), fake_runs.folder / "run"
    with at("save.state", 5, full):
        assert fake_runs.train(config) == 5
    error = capsys.readouterr().err
    assert "the checkpoint of step 4 cannot be written: No space left on device" in error and "Traceback" not in error
    assert steps(run) == ["step-000001", "step-000002", "step-000003"]
    assert fake_runs.train(config) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_weights_that_are_not_finite_are_in_no_checkpoint(fake_runs: Runs, capsys):
    def refuse() -> None:
        raise NumericsError("3 weights are not finite")

    with at("save.shard", 3, refuse):
        assert fake_runs.train(fake_runs.config()) == 6
    assert "3 weights are not finite" in capsys.readouterr().err
    run = fake_runs.folder / "run"
    assert steps(run) == ["step-000000", "step-000001"]
    assert [record["step"] for record in records(run / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(("best_is", "choose"), [("max", max), ("min", min)])
def test_the_checkpoint_with_the_best_metric_is_kept_the_earliest_of_equals(fake_runs: Runs, best_is, choose):
    trainer = {"steps": 6, "keep_checkpoints": 1, "best_metric": "reward/mean", "best_is": best_is}
    assert fake_runs.train(fake_runs.config(trainer=trainer)) == 0
    run = fake_runs.folder / "run"
    logged = {record["step"]: record["reward/mean"] for record in records(run / "metrics.jsonl") if record["step"]}
    best = choose(logged, key=lambda step: logged[step])
    assert os.readlink(run / "checkpoints" / "best") == f"step-{best:06d}"
    assert steps(run) == sorted({"best", f"step-{best:06d}", "step-000006"})


def test_of_equally_good_checkpoints_the_earliest_is_the_best(fake_runs: Runs):
    trainer = {"keep_checkpoints": 1, "best_metric": "lr"}
    assert fake_runs.train(fake_runs.config(trainer=trainer)) == 0
    assert steps(fake_runs.folder / "run") == ["best", "step-000001", "step-000004"]


def test_the_last_evaluation_may_make_the_last_checkpoint_the_best(fake_runs: Runs):
    data = {"train": {"name": "table", "path": str(fake_runs.rows)}}
    trainer = {"best_metric": "eval/reward_mean", "steps": 5, "eval_every": 1, "keep_checkpoints": 1}
    learner = {"lr": 0.3}
    data["eval"] = data["train"]
    assert fake_runs.train(fake_runs.config(trainer=trainer, data=data, learner=learner)) == 0
    run = fake_runs.folder / "run"
    logged = {record["step"]: record["eval/reward_mean"] for record in records(run / "metrics.jsonl")}
    best = max(logged, key=lambda step: logged[step])
    assert best == 5, logged
    assert os.readlink(run / "checkpoints" / "best") == "step-000005"
    assert steps(run) == ["best", "step-000005"]


def test_values_of_steps_that_were_undone_make_no_checkpoint_the_best(fake_runs: Runs):
    trainer = {"keep_checkpoints": 1, "best_metric": "reward/mean"}
    run = fake_runs.folder / "run"
    fake_runs.killed(fake_runs.config(trainer={**trainer, "save_every": 2}), "fake.update", 4)
    logged = records(run / "metrics.jsonl")
    assert [record["step"] for record in logged] == [0, 1, 2, 3] and steps(run)[-1] == "step-000002"
    changed = {2: {"reward/mean": 50.0}, 3: {"reward/mean": 99.0}}  # the latter is undone
    lines = [json.dumps(record | changed.get(record["step"], {})) + "\n" for record in logged]
    (run / "metrics.jsonl").write_text("".join(lines))
    assert fake_runs.train(fake_runs.config(trainer={**trainer, "save_every": 1})) == 0
    assert steps(run) == ["best", "step-000002", "step-000004"]


def test_the_history_is_not_read_again_at_every_step(fake_runs: Runs, monkeypatch):
    read, calls = RunDirectory.metrics, []
    monkeypatch.setattr(RunDirectory, "metrics", lambda self, *names: calls.append(self) or read(self, *names))
    trainer = {"steps": 12, "keep_checkpoints": 1, "best_metric": "reward/mean"}
    assert fake_runs.train(fake_runs.config(trainer=trainer)) == 0
    assert len(calls) <= 3  # when the folder is opened, for the scores, and to tell how the run went


@pytest.mark.full
@pytest.mark.parametrize(("name", "count"), [("reward/men", 1), ("reward/mean", 0), ("eval/accuracy", 0)])
def test_a_best_metric_that_no_step_has_is_told_once(fake_runs: Runs, name, count):
    rows = {"name": "table", "path": str(fake_runs.rows)}
    trainer = {"best_metric": name, "eval_every": 4}
    assert fake_runs.train(fake_runs.config(trainer=trainer, data={"train": rows, "eval": dict(rows)})) == 0
    warnings = [event for event in events(fake_runs.folder / "run", "warning") if "best_metric" in event["message"]]
    warnings = [event for event in warnings if "is the share of completions" not in event["message"]]  # a graded reward
    assert len(warnings) == count and all(name in event["message"] for event in warnings)


def with_optimizer(run: Path) -> list[str]:
    """Checkpoints that a run can go on from, all of them verified."""
    found = Checkpoints(run / "checkpoints").all()
    for checkpoint in found:
        checkpoint.verify()
        files = list(checkpoint.state.glob("optimizer*"))
        assert bool(files) == checkpoint.has_optimizer
    return [checkpoint.path.name for checkpoint in found if checkpoint.has_optimizer]


def test_the_optimizers_state_stays_in_the_newest_checkpoint_alone_and_the_run_goes_on_from_it(fake_runs: Runs):
    run = fake_runs.folder / "run"
    assert fake_runs.train(fake_runs.config("plain")) == 0
    config = fake_runs.config(trainer={"save_optimizer": "last"})
    fake_runs.killed(config, "fake.update", 3)
    assert with_optimizer(run) == ["step-000002"] and len(steps(run)) == 3
    assert fake_runs.train(config) == 0
    assert with_optimizer(run) == ["step-000004"] and len(steps(run)) == 3
    assert outcome(run) == outcome(fake_runs.folder / "plain")
    thin = json.loads((run / "checkpoints" / "step-000003" / "manifest.json").read_text())
    assert thin["roles"] == {"policy": {"model": "model", "state": "state", "optimizer": False}}
    assert fake_runs.train(fake_runs.config(trainer={"save_optimizer": "last", "steps": 5})) == 0


@pytest.mark.parametrize("point", ["checkpoint.thinning", "checkpoint.thinned"])
def test_a_kill_while_an_optimizers_state_is_removed_leaves_good_checkpoints(fake_runs: Runs, point):
    assert fake_runs.train(fake_runs.config("plain")) == 0
    config, run = fake_runs.config(trainer={"save_optimizer": "last"}), fake_runs.folder / "run"
    fake_runs.killed(config, point, 2)
    for checkpoint in Checkpoints(run / "checkpoints").all():
        checkpoint.verify()
    assert (run / "checkpoints" / "step-000001" / "state" / "optimizer.safetensors").exists()
    assert fake_runs.train(config) == 0
    assert with_optimizer(run) == ["step-000004"] and not list((run / "checkpoints").glob(".*"))
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_a_run_without_the_optimizers_state_is_evaluated_and_not_continued(fake_runs: Runs, capsys):
    config, run = fake_runs.config(trainer={"save_optimizer": "none"}), fake_runs.folder / "run"
    assert fake_runs.train(config) == 0 and with_optimizer(run) == []
    assert fake_runs.train(config) == 0  # it is finished
    assert "is finished" in capsys.readouterr().out
    newest = run / "checkpoints" / "step-000004"
    longer, other = {"steps": 5, "save_optimizer": "none"}, {"run_dir": str(fake_runs.folder / "other")}
    for words in ((fake_runs.config(trainer=longer),), (fake_runs.config("b", trainer=other), "--resume", newest)):
        assert fake_runs.train(*words) == 2
        error = capsys.readouterr().err
        assert "the checkpoint has no optimizer state" in error and f"model.path={newest / 'model'}" in error
        assert "another trainer.run_dir" in error and "Traceback" not in error
    assert len(steps(run)) == 3


def test_a_run_that_saves_no_optimizers_state_any_more_keeps_those_that_it_has(fake_runs: Runs, capsys):
    fake_runs.killed(fake_runs.config(), "fake.update", 3)
    with at("fake.update", 1, stop):
        assert fake_runs.train(fake_runs.config(trainer={"save_optimizer": "none"})) == 10
    assert "stopped by SIGTERM; the run cannot go on" in capsys.readouterr().err
    assert with_optimizer(fake_runs.folder / "run") == ["step-000001", "step-000002"]


def test_a_run_that_saves_no_optimizers_state_begins_anew_before_its_first_step(fake_runs: Runs):
    config, run = fake_runs.config(trainer={"save_optimizer": "none"}), fake_runs.folder / "run"
    fake_runs.killed(config, "fake.update", 1)
    assert steps(run) == ["step-000000"]
    assert fake_runs.train(config) == 0
    assert [event["message"] for event in events(run, "start_anew")] == [
        "the checkpoint has no optimizer state, and no step was finished yet"
    ]


def test_the_one_before_a_damaged_checkpoint_may_lack_the_optimizers_state(fake_runs: Runs, capsys):
    config, run = fake_runs.config(trainer={"save_optimizer": "last"}), fake_runs.folder / "run"
    fake_runs.killed(config, "fake.update", 4)
    flip(run / "checkpoints" / "step-000003" / "model" / "model.safetensors", 100)
    assert fake_runs.train(config) == 2
    assert "the checkpoint has no optimizer state" in capsys.readouterr().err


def test_a_checkpoint_of_version_1_is_believed_continued_and_thinned(fake_runs: Runs):
    """Its manifest has no roles."""
    assert fake_runs.train(fake_runs.config("plain")) == 0
    run = fake_runs.folder / "run"
    fake_runs.killed(fake_runs.config(), "fake.update", 4)
    for path in (run / "checkpoints").glob("step-*/manifest.json"):
        new = json.loads(path.read_text())
        body = {"version": 1, "step": new["step"], "files": new["files"]}
        seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**body, "seal": seal}, indent=1, sort_keys=True) + "\n")
    before = with_optimizer(run)
    assert before == ["step-000001", "step-000002", "step-000003"]
    assert fake_runs.train(fake_runs.config(trainer={"save_optimizer": "last"})) == 0
    assert [event["step"] for event in events(run, "resumed")] == [3]
    assert with_optimizer(run) == ["step-000004"]
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_a_checkpoint_of_a_later_version_is_refused_and_not_set_aside(fake_runs: Runs, capsys):
    run = fake_runs.folder / "run"
    fake_runs.killed(fake_runs.config(), "fake.update", 3)
    path = run / "checkpoints" / "step-000002" / "manifest.json"
    body = json.loads(path.read_text()) | {"version": 3, "more": 1}
    del body["seal"]
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "seal": seal}))
    before = steps(run)
    assert fake_runs.train(fake_runs.config()) == 5
    error = capsys.readouterr().err
    assert "a later version of mmrl wrote the checkpoint: it has version 3, and this mmrl reads 1 and 2" in error
    assert steps(run) == before and not events(run, "checkpoint_damaged")
    path.write_text(json.dumps({**body, "seal": seal.upper()}))
    assert fake_runs.train(fake_runs.config()) == 0
    assert [event["step"] for event in events(run, "checkpoint_damaged")] == [2]


def test_points_do_nothing_unless_a_test_asks():
    assert failpoints.inject is None
    failpoints.reach("checkpoint.begin")
