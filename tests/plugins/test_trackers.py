import json
import math
import socket
import sys
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from mmrl.commands.cli import main
from mmrl.errors import PluginError
from mmrl.interfaces import ShownRollout
from mmrl.types import ImageRef, Message
from mmrl_trackers import services
from mmrl_trackers.mlflow import MLflow, params_of
from mmrl_trackers.swanlab import SwanLab
from mmrl_trackers.tensorboard import TensorBoard
from mmrl_trackers.wandb import WandB

METRICS = {"reward/mean": 0.5, "kl/reference": math.nan}


def run(tracker, folder, steps=range(3)):
    tracker.start(folder, {"learner": {"lr": 0.1}})
    for step in steps:
        tracker.log(step, METRICS | {"lr": float(step)})
    tracker.finish()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"connects to {args[1:]}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)


def test_tensorboard_writes_finite_scalars_that_tensorboard_reads(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoard(TensorBoard.Config()), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = {tag for kind in events.Tags().values() if isinstance(kind, list) for tag in kind}
    assert tags == {"reward/mean", "lr"}
    assert [(each.step, each.value) for each in events.Scalars("lr")] == [(0, 0), (1, 1), (2, 2)]


def test_a_run_that_goes_on_is_one_curve_in_tensorboard_without_what_is_undone(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as Shown

    for steps in (range(5), range(3, 6), range(5, 7)):  # from the checkpoint of step 2, and then of step 4
        run(TensorBoard(TensorBoard.Config()), tmp_path, steps)
        time.sleep(1.1)  # files are read in the order of their names, which have whole seconds
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3
    events, shown = EventAccumulator(str(tmp_path / "tensorboard")), Shown(str(tmp_path / "tensorboard"))
    events.Reload()
    shown.Reload()
    assert [each.step for each in events.Scalars("lr")] == list(range(7))
    assert [each.step for each in shown.Tensors("lr")] == list(range(7))


def test_an_alarm_is_text_in_tensorboard_also_before_the_first_step_is_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(TensorBoard.Config())
    tracker.start(tmp_path, {})
    tracker.alarm(7, "dead_groups", "nothing is learned")
    tracker.log(7, METRICS)
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("alarm/dead_groups/text_summary")
    assert event.step == 7 and event.tensor_proto.string_val == [b"nothing is learned"]
    assert [each.step for each in events.Scalars("reward/mean")] == [7]


def test_an_alarm_is_text_in_swanlab(tmp_path, no_network):
    tracker = SwanLab(SwanLab.Config())
    tracker.start(tmp_path, {})
    tracker.alarm(2, "dead_groups", "nothing is learned")
    tracker.log(2, METRICS)
    tracker.finish()
    written = b"".join(path.read_bytes() for path in (tmp_path / "swanlog").rglob("*") if path.is_file())
    assert b"alarm/dead_groups" in written and b"nothing is learned" in written and b"reward/mean" in written


CONVERSATION = "reward 1, answer 7\n[user] Which digit? <image>\n[assistant] *7* <b>"
HISTOGRAMS = {"eval/reward": np.array([0.0, 1.0, 1.0]), "eval/length": np.arange(40.0), "rollouts/reward": np.zeros(0)}


def show(tracker, folder):
    """An evaluation of two prompts, one with two pictures, and the step that it belongs to."""
    refs = []
    for name, size in {"large": (1024, 28), "small": (28, 28)}.items():
        Image.new("RGB", size, (255, 0, 0)).save(folder / f"{name}.png")
        refs.append(ImageRef(name, *size, str(folder / f"{name}.png")))
    messages = Message("user", "Which digit? <image>"), Message("assistant", "*7* <b>")
    tracker.start(folder, {})
    tracker.alarm(3, "dead_groups", "nothing is learned")
    tracker.evaluation(
        3, [ShownRollout(messages, tuple(refs), "7", 1.0), ShownRollout(messages[:1], (), "", math.nan)], HISTOGRAMS
    )
    tracker.log(3, METRICS)
    tracker.finish()


def test_no_more_than_the_first_pictures_of_a_rollout_are_shown(tmp_path):
    refs = []
    for number in range(services.MOST_PICTURES + 1):
        Image.new("RGB", (28 + number, 28)).save(tmp_path / f"{number}.png")
        refs.append(ImageRef(str(number), 28 + number, 28, str(tmp_path / f"{number}.png")))
    found = services.pictures_of(ShownRollout((), tuple(refs), "", 0.0))
    assert [picture.width for picture in found] == [28 + number for number in range(services.MOST_PICTURES)]


def test_an_evaluation_is_texts_pictures_and_histograms_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show(TensorBoard(TensorBoard.Config()), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert set(tags["histograms"]) == {"histogram/eval/reward", "histogram/eval/length"}
    found = events.Histograms("histogram/eval/reward")[0]
    assert (found.step, found.histogram_value.num, found.histogram_value.sum) == (3, 3, 2)
    images = {tag: events.Images(tag)[0] for tag in tags["images"]}
    assert {tag: (each.width, each.height) for tag, each in images.items()} == {
        "rollout_1/image_1": (512, 14),
        "rollout_1/image_2": (28, 28),
    }
    (text,) = events.Tensors("rollout_1/text_summary")
    literal = "".join(f"    {line}\n" for line in CONVERSATION.splitlines())  # Markdown shows it as it is
    assert (text.step, text.tensor_proto.string_val) == (3, [literal.rstrip("\n").encode()])
    (text,) = events.Tensors("rollout_2/text_summary")
    assert text.tensor_proto.string_val[0].startswith(b"    reward nan, answer unknown\n")


def test_an_evaluation_is_texts_pictures_and_bars_in_swanlab(tmp_path, no_network):
    show(SwanLab(SwanLab.Config()), tmp_path)
    files = {path: path.read_bytes() for path in (tmp_path / "swanlog").rglob("*") if path.is_file()}
    written = b"".join(files.values())
    names = [f"rollout_{number}/text" for number in (1, 2)] + [
        "rollout_1/images",
        *(f"histogram/{n}" for n in HISTOGRAMS),
    ]
    assert [name for name in names if name.encode() not in written] == ["histogram/rollouts/reward"]
    assert CONVERSATION.encode() in files.values() and b"reward/mean" in written
    pictures = [Image.open(path).size for path in files if path.suffix == ".png"]
    assert sorted(pictures) == [(28, 28), (512, 14)]
    bars = [json.loads(content) for path, content in files.items() if path.suffix == ".json" and b"series" in content]
    counts = [[each["value"] if isinstance(each, dict) else each for each in bar["series"][0]["data"]] for bar in bars]
    assert sorted(map(sum, counts)) == [3, 40] and [1, 2] in counts


def test_swanlab_goes_on_with_the_id_that_the_run_had(tmp_path, no_network):
    first = SwanLab(SwanLab.Config())
    assert first.state() == {}
    run(first, tmp_path)
    state = json.loads(json.dumps(first.state()))
    second = SwanLab(SwanLab.Config())
    second.restore(state)
    run(second, tmp_path, range(3, 5))
    assert second.state() == state
    folders = sorted((tmp_path / "swanlog").glob("run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(state["id"]) for folder in folders)
    third = SwanLab(SwanLab.Config())
    run(third, tmp_path)
    assert third.state()["id"] != state["id"]


@pytest.mark.parametrize("before", [None, "abc123"])
def test_swanlab_in_the_cloud_is_asked_for_the_same_experiment(tmp_path, monkeypatch, before):
    import swanlab

    asked = {}

    class Experiment:
        id = before or "new1"

    monkeypatch.setattr(swanlab, "init", lambda **arguments: asked.update(arguments) or Experiment())
    tracker = SwanLab(SwanLab.Config(mode="cloud"))
    if before:
        tracker.restore({"id": before})
    tracker.start(tmp_path, {})
    assert (asked["id"], asked["resume"], asked["mode"]) == (before, "allow" if before else "never", "cloud")
    assert tracker.state() == {"id": before or "new1"}


@pytest.mark.parametrize("verbose", [False, True])
def test_swanlab_writes_the_run_offline_without_a_connection_or_a_secret(
    tmp_path, monkeypatch, no_network, capfd, verbose
):
    monkeypatch.setenv("SWANLAB_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("MMRL_VERBOSE", str(int(verbose)))
    hook, errors = sys.excepthook, []

    def work():
        try:
            run(SwanLab(SwanLab.Config()), tmp_path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert errors == []
    assert sys.excepthook is hook
    shown = capfd.readouterr()
    assert shown.err == ""
    notices = shown.out if verbose else (tmp_path / "swanlog" / "notices.txt").read_text()
    assert notices.count("swanlab sync") == 2  # at the start and at the end
    assert verbose or shown.out == ""
    files = [path for path in (tmp_path / "swanlog").rglob("*") if path.is_file()]
    written = b"".join(path.read_bytes() for path in files)
    assert b"reward/mean" in written
    assert b"kl/reference" not in written
    assert b"lr" in written
    assert b"correct-horse-battery" not in written


def test_swanlab_refuses_a_mode_that_it_does_not_have():
    with pytest.raises(ValidationError, match="mode"):
        SwanLab.Config(mode="online")


def needs(module):
    return pytest.mark.skipif(
        find_spec(module) is None, reason=f"{module} is not installed: an extra, not in the locks"
    )


needs_wandb, needs_mlflow = needs("wandb"), needs("mlflow")
EXTRAS = [pytest.param(WandB, marks=needs_wandb), pytest.param(MLflow, marks=needs_mlflow)]
SECRET = "correct-horse-battery"


@pytest.fixture
def local_only(monkeypatch):
    """W&B talks to a process of its own by a socket in a folder; no address of a network may be asked for anything."""

    def guarded(call):
        def guard(sock, *arguments):
            assert sock.family == socket.AF_UNIX, f"connects to {arguments}"
            return call(sock, *arguments)

        return guard

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))
    for variable in ("PYTEST_CURRENT_TEST", "CI"):  # MLflow tells its authors nothing where it sees one
        monkeypatch.delenv(variable, raising=False)
    yield
    if "wandb" in sys.modules:  # it remembers what it has read from the environment
        sys.modules["wandb"].teardown()


def curve(folder, name="lr"):
    """Steps and values of a metric that MLflow has, of each run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlruns/mlflow.db")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return {r.info.run_id: [(m.step, m.value) for m in client.get_metric_history(r.info.run_id, name)] for r in runs}


@pytest.mark.parametrize("kind", EXTRAS)
def test_offline_nothing_is_asked_for_and_no_secret_is_written(kind, tmp_path, monkeypatch, local_only, capfd):
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    hook, errors = sys.excepthook, []

    def work():
        try:
            run(kind(kind.Config()), tmp_path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and errors == [] and sys.excepthook is hook
    streams = capfd.readouterr()
    assert streams.out == streams.err == ""
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"reward/mean" in written and b"kl/reference" not in written
    for text in (SECRET, socket.gethostname(), sys.argv[0]):
        assert text.encode() not in written


@pytest.mark.parametrize("kind", EXTRAS)
def test_a_run_that_goes_on_keeps_its_id_and_another_gets_one(kind, tmp_path, local_only):
    first, second, third = kind(kind.Config()), kind(kind.Config()), kind(kind.Config())
    assert first.state() == {}
    run(first, tmp_path)
    state = json.loads(json.dumps(first.state()))
    second.restore(state)
    run(second, tmp_path, range(2, 5))
    assert second.state() == state
    run(third, tmp_path)
    assert third.state()["id"] != state["id"]
    if kind is MLflow:
        again = [(2, 2.0)]
        assert curve(tmp_path)[state["id"]] == [(0, 0.0), (1, 1.0), (2, 2.0), *again, (3, 3.0), (4, 4.0)]
        assert curve(tmp_path)[third.state()["id"]] == [(0, 0.0), (1, 1.0), (2, 2.0)]
        assert not any(curve(tmp_path, "kl/reference").values())
    else:
        folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
        assert len(folders) == 3 and sum(state["id"] in name for name in folders) == 2


@needs_wandb
def test_an_evaluation_is_a_table_and_histograms_in_wandb(tmp_path, local_only):
    show(WandB(WandB.Config()), tmp_path)
    folder = next((tmp_path / "wandb").glob("offline-run-*/files/media"))
    (table,) = (json.loads(path.read_text()) for path in folder.rglob("*.table.json"))
    assert [row[2] for row in table["data"]] == [
        CONVERSATION,
        "reward nan, answer unknown\n[user] Which digit? <image>",
    ]
    assert len(list(folder.rglob("*.png"))) == 2
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*.wandb"))
    assert b"histogram/eval/reward" in written and b"histogram/rollouts/reward" not in written
    assert b"dead_groups, step 3" in written and b"nothing is learned" in written


@needs_mlflow
def test_an_evaluation_is_texts_and_pictures_in_mlflow(tmp_path, local_only):
    from mlflow.tracking import MlflowClient

    show(MLflow(MLflow.Config()), tmp_path)
    (folder,) = tmp_path.rglob("step_000003")
    assert {path.name for path in folder.iterdir()} == {"1.txt", "2.txt", "1_image_1.png", "1_image_2.png"}
    assert (folder / "1.txt").read_text() == CONVERSATION
    (found,) = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlruns/mlflow.db").search_runs(["1"])
    assert found.data.tags["alarm/000003/dead_groups"] == "nothing is learned"
    assert Image.open(folder / "1_image_1.png").size == (512, 14)


@needs_mlflow
def test_mlflow_begins_anew_where_it_does_not_know_the_run_and_keeps_the_config(tmp_path):
    from mlflow.tracking import MlflowClient

    tracker = MLflow(MLflow.Config(run="mine"))
    tracker.restore({"id": "0" * 32})
    tracker.start(tmp_path, {"rewards": [{"name": "a b*.py:f", "weight": None}], "long": "x" * 9000})
    tracker.finish()
    found = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlruns/mlflow.db").get_run(tracker.state()["id"])
    assert found.data.params == {"rewards.0.name": "a b*.py:f", "rewards.0.weight": "None", "long": "x" * 6000}
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")


def test_params_of_mlflow_are_told_apart_and_of_its_characters():
    long = "k" * 260
    config = {
        "a//b": 1,
        "a/b": 2,
        "a#": 3,
        "a?": 4,
        "../x": 5,
        "..x": 6,
        "é?": 0,
        long + "1": 7,
        long + "2": 8,
        "//": 9,
        "c": {},
    }
    assert params_of(config) == {
        "a/b": "1",
        "a/b_2": "2",
        "a_": "3",
        "a__2": "4",
        "x": "5",
        "x_2": "6",
        "é_": "0",
        "k" * 250: "7",
        "k" * 248 + "_2": "8",
        "_": "9",
    }


@needs_mlflow
def test_params_that_mlflow_refuses_cost_no_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl_trackers.mlflow.params_of", lambda config: {"a//b": "1"})
    tracker = MLflow(MLflow.Config())
    with pytest.warns(UserWarning, match="MLflow has not taken the config"):
        run(tracker, tmp_path)
    assert curve(tmp_path)[tracker.state()["id"]] == [(0, 0.0), (1, 1.0), (2, 2.0)]


@needs_wandb
def test_wandb_shares_no_id_and_reads_the_project(tmp_path, monkeypatch):
    import wandb

    asked = []
    monkeypatch.setenv("WANDB_RUN_ID", "shared")
    monkeypatch.setattr(wandb, "init", lambda **arguments: asked.append(arguments) or SimpleNamespace(**arguments))
    for options, variable in (({}, None), ({}, "theirs"), ({"project": "mine"}, "theirs")):
        monkeypatch.setenv("WANDB_PROJECT", variable) if variable else monkeypatch.delenv("WANDB_PROJECT", False)
        tracker = WandB(WandB.Config(**options))
        tracker.start(tmp_path, {})
        assert tracker.state()["id"] == asked[-1]["id"] != "shared"
    assert [each["project"] for each in asked] == ["mmrl", "theirs", "mine"]
    assert len({each["id"] for each in asked}) == 3


@needs_wandb
def test_wandb_online_without_a_login_is_an_error_and_no_question(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(PluginError, match="W&B has no login"):
        WandB(WandB.Config(mode="online")).start(tmp_path, {})


@pytest.mark.parametrize(
    ("name", "missing"), [("swanlab", "swanlab"), ("wandb", "wandb"), ("mlflow", "mlflow.tracking")]
)
def test_a_missing_package_is_said_with_its_extra_before_anything_starts(name, missing, fake_runs, monkeypatch, capsys):
    monkeypatch.setattr(services, "find_spec", lambda module: None if module == missing else True)
    config = fake_runs.config(trackers=[{"name": f"mmrl-train:{name}"}])
    for command in (["check", str(config)], ["train", str(config)]):
        assert main(command) == 4
        error = capsys.readouterr().err
        assert f"the tracker {name} needs a package that is not installed: {missing}" in error
        assert f'pip install "mmrl-train[{name}]"' in error and "Traceback" not in error
    assert not (fake_runs.folder / "run" / "metrics.jsonl").exists()
