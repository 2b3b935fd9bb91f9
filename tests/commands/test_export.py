"""``mmrl export``: what it writes is what it was given, and there is all of it or nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmrl.commands.cli import main
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.reward_model import is_reward_model
from mmrl.engine_api import NetworkFiles
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.runs.checkpoints import Checkpoints, write_json
from mmrl.runs.resumption import plain_config
from tests.engine.test_reward_updates import bradley_terry
from tests.faults.runs import at
from tests.proofs import families

TEXT = "<|im_start|>user\nwhat is 3+4?<|im_end|>\n<|im_start|>assistant\n"
PICTURE = TEXT.replace("what", "<|vision_start|><|image_pad|><|vision_end|>what")
COMPLETION = (60, 70, 80)


@pytest.fixture(scope="module")
def run(start: Callable[..., Any], vision: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in bfloat16, with checkpoints before and after two optimizer steps."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    samples = vision.samples((5, 9, 7))
    masks, advantages = [sample.mask for sample in samples], [np.full(n, 1.0 - n / 4) for n in (5, 9, 7)]
    rows = training_rows(
        samples, masks, {"advantages": advantages}, np.arange(3), Aggregation("token-mean"), range(3)
    ).values()
    config = vision.config(model={"dtype": "bfloat16"}, learner={"lr": 1e-4})
    record = {"mmrl": "0.1.0", "config": plain_config(config), "fingerprints": {"model": "ab" * 32}}
    with start(model={"dtype": "bfloat16"}, learner={"lr": 1e-4}).learning() as learner:
        for step in (0, 2):

            def fill(target: Path) -> None:
                learner.save(target)
                write_json(target / "state" / "run.json", record)

            Checkpoints(folder / "checkpoints").write(step, fill)
            for _ in range(2):
                learner.network("policy").update(list(rows))
    (folder / "checkpoints" / "best").symlink_to("step-000000")
    return folder


@pytest.fixture
def folder(models: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder of one's own to change."""
    return Path(shutil.copytree(models("qwen2"), tmp_path / "source"))


def export(*words: object) -> int:
    return main(["export", *map(str, words)])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def change_weights(path: Path, change: Callable[[torch.Tensor], torch.Tensor], name: str = "") -> None:
    """Change those of that name, or all."""
    weights = load_file(path)
    changed = {key: change(value).contiguous() if name in ("", key) else value for key, value in weights.items()}
    save_file(changed, path, {"format": "pt"})


def leftovers(out: Path) -> list[str]:
    return [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]


@pytest.mark.parametrize(
    ("family", "as_on_hub"),
    [("qwen2_5_vl", False), *(pytest.param(*name, True, marks=marks) for name, marks, _ in families())],
)
def test_every_family_keeps_its_files_and_computes_the_same(family, as_on_hub, models, tmp_path, plain):
    source, out = models(family, as_on_hub), tmp_path / "out"
    assert export(source, out, "--shard-size", "0.0005") == 0
    new, old = ({p.name for p in path.iterdir()} for path in (out, source))
    weights = {name for name in new | old if name.startswith("model")}
    assert new - weights == (old - weights) | {"mmrl.json", "README.md"} and len(list(out.glob("model-0*"))) > 1
    changed = {name for name in old - weights if (out / name).read_bytes() != (source / name).read_bytes()}
    assert changed <= {"config.json"}
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        one, other = plain(source), plain(out)
        assert torch.equal(one.logits(TEXT, [], COMPLETION), other.logits(TEXT, [], COMPLETION))
        if FAMILIES[family].vision:
            from PIL import Image

            places = {"internvl": "<IMG_CONTEXT>\nwhat", "gemma4": "<|image|>what"}
            shown = TEXT.replace("what", places[family]) if family in places else PICTURE
            drawn = [Image.fromarray(np.arange(64 * 96 * 3, dtype=np.uint8).reshape(64, 96, 3))]
            assert torch.equal(one.logits(shown, drawn, COMPLETION), other.logits(shown, drawn, COMPLETION))
    modes = {(out / name).stat().st_mode for name in new}
    assert len(modes) == 1  # whoever may read the config may read the weights


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_and_config_have_the_type_that_is_asked_for(dtype, as_on_hub, models, tmp_path, capsys):
    import transformers

    source, out = models("qwen2_5_vl", as_on_hub), tmp_path / "out"
    assert export(source, out, "--dtype", dtype, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    element = getattr(torch, dtype)
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].to(element), after[name]) for name in before)
    model = transformers.AutoModelForImageTextToText.from_pretrained(out, dtype="auto")
    assert {weight.dtype for weight in model.parameters()} == {element}
    types = re.findall(r'"((?:b?float)\d+)"', (out / "config.json").read_text())
    assert set(types) == {dtype}
    stored = "bfloat16" if as_on_hub else "float32"
    exact = dtype in (stored, "float32")
    assert (answer["dtype"], answer["stored"], answer["is_rounded"]) == (dtype, stored, not exact)
    assert (answer["gap"]["abs_max"] == 0) == exact and answer["samples"] == 4
    assert answer["size_bytes"] == sum(path.stat().st_size for path in out.glob("*.safetensors"))


def test_a_bfloat16_run_gives_the_float32_weights_that_its_optimizer_moves(run, tmp_path, capsys, plain):
    assert export(run, tmp_path / "exact", "--dtype", "float32") == 0
    out = capsys.readouterr().out
    checkpoint = run / "checkpoints" / "step-000002"
    masters = {}
    for path in (checkpoint / "state").glob("optimizer-*"):
        for name, flat in load_file(path).items():
            kind, weight, start = name.split("/")
            assert start == "0"  # one rank has all of a weight
            masters |= {weight: flat} if kind == "master" else {}
    assert f"{len(masters)} in float32, {len(masters)} of them from the optimizer's float32 weights" in out
    found = dict(plain(tmp_path / "exact").model.named_parameters())
    assert masters.keys() == found.keys() and all(torch.equal(masters[name], found[name].view(-1)) for name in masters)
    rounded = tensors(checkpoint / "model")
    assert any(not torch.equal(rounded[name].float(), value) for name, value in tensors(tmp_path / "exact").items())
    assert export(checkpoint / "model", tmp_path / "as it is") == 0
    assert "from the optimizer" not in capsys.readouterr().out
    same = tensors(tmp_path / "as it is")
    assert all(torch.equal(rounded[name], same[name]) and same[name].dtype == torch.bfloat16 for name in rounded)


def test_an_optimizer_that_does_not_belong_to_the_model_is_not_believed(run, tmp_path, capsys):
    copy = Path(shutil.copytree(run / "checkpoints" / "step-000002", tmp_path / "copy"))
    (path,) = (copy / "state").glob("optimizer-*")
    change_weights(path, lambda tensor: tensor * 1.01)
    store = Checkpoints(tmp_path / "checkpoints")
    store.write(2, lambda target: [shutil.copytree(copy / name, target / name) for name in ("model", "state")] and None)
    assert export(tmp_path, tmp_path / "out", "--dtype", "float32") == 6
    assert "does not round to the model's" in capsys.readouterr().err
    assert export(tmp_path, tmp_path / "out") == 0


def test_a_run_means_its_newest_checkpoint_and_best_the_best(run, tmp_path, capsys):
    for index, (path, step) in enumerate([("", 2), ("checkpoints/step-000000", 0), ("checkpoints/best", 0)]):
        assert export(run / path, tmp_path / str(index), "--json") == 0
        assert json.loads(capsys.readouterr().out)["step"] == step


def test_where_it_comes_from_is_told_without_paths_and_secrets(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "first/..abc123")
    assert export(run, tmp_path / "out") == 0
    text = (tmp_path / "out" / "mmrl.json").read_text()
    facts = json.loads(text)
    assert (facts["run"], facts["step"], facts["algorithm"]) == ("first", 2, "grpo")
    assert facts["base_model"] == {"name": "qwen2_5_vl"} and len(facts["config_sha256"]) == 64
    assert {"mmrl", "torch", "transformers"} <= facts["exported_by"].keys()
    assert "/" not in text and "abc123" not in text


@pytest.mark.parametrize("kind", ["file", "not empty", "in a checkpoint", "beside checkpoints", "in the folder"])
def test_a_place_that_cannot_be_taken_is_refused_and_left_as_it_is(kind, run, folder, tmp_path, capsys):
    source, out = folder, tmp_path / "out"
    match kind:
        case "file":
            out.write_text("mine")
        case "not empty":
            out.mkdir()
            (out / "mine").write_text("mine")
        case "in a checkpoint":
            source, out = run, run / "checkpoints" / "step-000002" / "out"
        case "beside checkpoints":
            source, out = run, run / "checkpoints" / "step-000009"
        case "in the folder":
            out = folder / "out"
    before = sorted(path for path in out.parent.rglob("*"))
    assert export(source, out) == 2
    error = capsys.readouterr().err
    assert "OUT is" in error and str(out) in error
    assert sorted(path for path in out.parent.rglob("*")) == before
    assert kind not in ("file", "not empty") or (out if kind == "file" else out / "mine").read_text() == "mine"


def test_an_empty_folder_is_taken_and_its_link_kept(folder, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    assert export(folder, tmp_path / "out") == 0
    assert (tmp_path / "out").is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()


def test_what_is_no_model_is_refused(folder, tmp_path, capsys):
    def refused(source: Path, code: int, *words: object) -> str:
        assert export(source, tmp_path / "out", *words) == code
        assert not (tmp_path / "out").exists() and leftovers(tmp_path / "out") == []
        return capsys.readouterr().err

    assert "there is no folder" in refused(tmp_path / "nowhere", 2)
    (tmp_path / "empty").mkdir()
    assert "there is no checkpoint" in refused(tmp_path / "empty", 3)
    assert "--shard-size is 0.0" in refused(folder, 2, "--shard-size", "0")
    weights = folder / "model.safetensors"
    change_weights(weights, lambda tensor: tensor * 1e30, "model.norm.weight")
    error = refused(folder, 6, "--dtype", "float16")
    assert "model.norm.weight has a value of 1e+30, which float16 cannot hold" in error
    change_weights(weights, lambda tensor: tensor * float("nan"), "model.norm.weight")
    assert "not finite" in refused(folder, 6)
    change_weights(weights, lambda tensor: tensor.to(torch.float8_e4m3fn), "model.norm.weight")
    error = refused(folder, 2)
    assert "model.norm.weight is stored as F8_E4M3" in error and "float32, bfloat16, float16" in error
    assert "there is no adapter to export" in refused(folder, 2, "--adapter")
    (folder / "adapter_config.json").write_text("{}")
    assert "the adapter's config cannot be read: KeyError: 'base_model_name_or_path'" in refused(folder, 2)
    config = {"r": 4, "lora_alpha": 4, "peft_type": "IA3", "base_model_name_or_path": "./gone"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert "no plain LoRA: peft_type is 'IA3'" in refused(folder, 2)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "LORA"}))
    assert "the adapter's weights cannot be read" in refused(folder, 2)
    matrices = {f"base_model.model.x.lora_{letter}.weight": torch.zeros(4, 4) for letter in "AB"}
    save_file(matrices, folder / "adapter_model.safetensors")
    assert "the model that the adapter adapts cannot be opened" in refused(folder, 2)


def test_a_damaged_checkpoint_is_named_and_of_a_run_the_one_before_is_taken(run, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run", symlinks=True))
    weights = copy / "checkpoints" / "step-000002" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(bytes(content))
    assert export(weights.parents[1], tmp_path / "out") == export(weights.parent, tmp_path / "out") == 3
    assert "model.safetensors has other content than was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert export(copy, tmp_path / "out", "--json") == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["step"] == 0 and "model.safetensors has other content" in streams.err


def test_no_size_of_the_rounding_refuses_an_export(models, tmp_path, capsys):
    source = shutil.copytree(models("qwen3"), tmp_path / "model")
    change_weights(source / "model.safetensors", lambda tensor: tensor * 150, "model.norm.weight")  # large logits
    assert export(source, tmp_path / "out", "--dtype", "bfloat16") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("compared"))
    mean = float(re.search(r"mean (\S+),", line)[1])  # type: ignore[index]
    assert mean > 0.06 and "all from rounding to bfloat16" in line  # 0.06 stops a run whose network was not measured


def spoil_weights(hidden: Path) -> None:
    change_weights(hidden / "model.safetensors", lambda tensor: tensor + 0.01, "model.norm.weight")


def spoil_template(hidden: Path) -> None:
    path = hidden / "chat_template.jinja"
    path.write_text(path.read_text().replace("user", "User").replace("assistant", "Assistant"))


@pytest.mark.parametrize(("spoil", "said"), [(spoil_weights, "disagree: mean"), (spoil_template, "as other tokens")])
def test_what_computes_something_else_is_not_exported(spoil, said, folder, tmp_path, capsys):
    out = tmp_path / "out"
    with at("export.filled", act=lambda: spoil(tmp_path / ".out.mmrl-export")):
        assert export(folder, out) == 6
    assert said in capsys.readouterr().err
    assert not out.exists() and leftovers(out) == []


def test_a_full_disk_leaves_nothing(folder, tmp_path, capsys):
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    for point in ("save.shard", "export.filled", "export.forced"):
        with at(point, act=full):
            assert export(folder, tmp_path / "out") == 5
        assert "No space left on device" in capsys.readouterr().err
        assert not (tmp_path / "out").exists() and leftovers(tmp_path / "out") == []


def test_two_exports_do_not_write_to_one_place(folder, tmp_path, capsys):
    (hidden := tmp_path / ".out.mmrl-export").mkdir()
    descriptor = os.open(hidden, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (hidden / "theirs").touch()
    assert export(folder, tmp_path / "out") == 5
    assert "another process exports to the same folder" in capsys.readouterr().err
    assert (hidden / "theirs").exists()
    os.close(descriptor)
    assert export(folder, tmp_path / "out") == 0 and leftovers(tmp_path / "out") == []
    assert not (tmp_path / "out" / "theirs").exists()


def test_what_somebody_writes_meanwhile_is_not_replaced(folder, tmp_path, capsys):
    out = tmp_path / "out"
    with at("export.forced", act=lambda: (out.mkdir(), (out / "theirs").touch())):
        assert export(folder, out) == 2
    assert "meanwhile" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["theirs"] and leftovers(out) == []


KILLS = """
import itertools, os, signal, sys
from pathlib import Path

import mmrl.engine.aids.exporting, mmrl.commands.export.model_folder
from mmrl.system import failpoints
from mmrl.commands.cli import main

source, place = map(Path, sys.argv[1:])
words = ["export", str(source), str(place / "out"), "--shard-size", "0.001", "--json"]
POINTS = [("export.begin", 1), ("save.shard", 1), ("save.shard", 2), ("export.filled", 1), ("export.forced", 1),
          ("export.renamed", 1)]

assert main(words) == 0  # imports what the children need
(place / "out").rename(place.with_name("first"))
for name, count in POINTS:
    if not (child := os.fork()):
        reached = itertools.count(1)

        def inject(point):
            if point == name and next(reached) == count:
                os.kill(os.getpid(), signal.SIGKILL)

        failpoints.inject = inject
        os._exit(main(words))
    status = os.waitpid(child, 0)[1]
    print(name, os.WTERMSIG(status), *sorted(path.name for path in place.iterdir()), flush=True)
(place / "out").rename(place / "killed last")
(place / ".out.mmrl-export").mkdir()
(place / ".out.mmrl-export" / "model-00009-of-00009.safetensors").touch()
assert main(words) == 0
"""


@pytest.mark.full
def test_a_kill_at_any_moment_leaves_nothing_or_all(models, tmp_path):
    source, place = models("qwen2"), tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-c", KILLS, source, place]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " 9 " in line]
    assert lines[:5] == [f"{name} 9 .out.mmrl-export" for name in
                         ("export.begin", "save.shard", "save.shard", "export.filled", "export.forced")]  # fmt: skip
    assert lines[5] == "export.renamed 9 out"
    assert sorted(path.name for path in place.iterdir()) == ["killed last", "out"]
    folders = (tmp_path / "first", place / "killed last", place / "out")
    one, two, three = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == two == three and "model-00002-of-00002.safetensors" in one


def test_files_of_weights_hold_what_is_asked_for(models, tmp_path):
    assert export(models("qwen2"), tmp_path / "out", "--shard-size", "0.001") == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name in set(index["weight_map"].values()):
        with safe_open(tmp_path / "out" / name, "pt") as file:
            size = sum(int(np.prod(file.get_slice(key).get_shape())) * 4 for key in file.keys())  # noqa: SIM118
        assert size <= 1e6


@pytest.fixture
def with_critic(start: Callable[..., Any], vision: Any, tmp_path: Path) -> Path:
    """The folder of a run of ppo with a checkpoint: the policy's folder, and beside it one with a score as a critic."""
    folder, begun = tmp_path / "run", tmp_path / "begun"
    with start(algorithm=bradley_terry()).learning() as learner:
        learner.save(begun)
    config = plain_config(vision.config())
    config |= {"algorithm": {"name": "ppo"}, "critic": {"path": "org/critic"}}
    record = {"mmrl": "0.4.0", "config": config, "fingerprints": {"model": "ab" * 32, "critic.path": "c" * 40}}

    def fill(target: Path) -> dict[str, NetworkFiles]:
        shutil.copytree(vision.folder.path, target / "model")
        shutil.copytree(begun / "reward", target / "critic")
        (target / "state").mkdir()
        write_json(target / "state" / "run.json", record)
        roles = "policy", "critic"
        return {role: NetworkFiles.of(role, optimizer=False) for role in roles}

    Checkpoints(folder / "checkpoints").write(3, fill)
    return folder


def test_a_critic_is_exported_by_its_role_as_a_reward_models_folder(with_critic, tmp_path, capsys):
    assert export(with_critic, tmp_path / "critic", "--role", "critic", "--json") == 0
    capsys.readouterr()
    checkpoint = with_critic / "checkpoints/step-000003"
    written, saved = tensors(tmp_path / "critic"), tensors(checkpoint / "critic/model")
    assert written.keys() == saved.keys() and "score.weight" in written
    assert all(torch.equal(written[name], saved[name]) for name in saved)
    assert is_reward_model(tmp_path / "critic")
    facts = json.loads((tmp_path / "critic/mmrl.json").read_text())
    assert facts["role"] == "critic" and facts["base_model"] == {"name": "org/critic", "commit": "c" * 40}
    card = (tmp_path / "critic/README.md").read_text()
    assert "- ppo\n- critic\n" in card and "\nA critic: its score at a token is the return" in card
    assert "pipeline_tag: text-classification" in card and "base_model: org/critic" in card
    # The folder of the network itself names the same; without a role it is the policy.
    assert export(checkpoint / "critic/model", tmp_path / "again") == 0
    assert "the critic of a checkpoint" in capsys.readouterr().out
    assert tensors(tmp_path / "again").keys() == saved.keys()
    assert export(with_critic, tmp_path / "policy") == 0
    assert "score.weight" not in tensors(tmp_path / "policy")
    assert json.loads((tmp_path / "policy/mmrl.json").read_text())["role"] == "policy"


def test_a_role_that_is_not_there_is_refused(with_critic, folder, tmp_path, capsys):
    assert export(with_critic, tmp_path / "out", "--role", "reward") == 2
    said = capsys.readouterr().err
    assert "the checkpoint has no reward" in said and "critic, policy" in said
    assert export(folder, tmp_path / "out", "--role", "critic") == 2
    assert "no checkpoint with a critic in it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
