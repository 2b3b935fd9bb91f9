"""``mmrl export --push``: the hub gets what was exported, with a card; a push that cannot go well says why."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import mmrl
from mmrl.commands.cli import main
from mmrl.commands.export import repository
from mmrl.config.load import load_config
from mmrl.plugin_host.registry import options_class
from mmrl.runs.checkpoints import Checkpoints, write_json
from mmrl.runs.resumption import plain_config
from tests.hub_server import TOKEN, Hub, serving

COMMIT = "c" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub whose user is ``me``, and the folder that commands are typed in."""
    from huggingface_hub import constants, hf_api

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(hf_api.api, "endpoint", server.url)  # of peft
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield server


CONFIG = """\
model: {path: org/base}
data:
  train: {name: table, path: org/sums, split: train}
  eval:
    digits: {name: table, path: /home/someone/rows held out.jsonl}
    letters: {name: table, path: org/letters}
rewards: [{name: exact, weight: 0.5}]
algorithm: {name: grpo}
"""


@pytest.fixture(scope="module")
def run(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a hub's model, with a history, secrets and paths of this machine."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    path = tmp_path_factory.mktemp("config") / "digits.yaml"
    path.write_text(CONFIG)
    config = plain_config(load_config([path], options_class=options_class).config)
    config["rewards"][0] |= {"name": "/home/someone/mine.py:score", "api_key": "key-of-mine-1234"}
    config["rewards"][0]["url"] = "https://judge.org/v1?key=key-of-mine-1234"
    record = {"mmrl": "0.1.0", "config": config, "fingerprints": {"model": COMMIT}}

    def fill(target: Path) -> None:
        shutil.copytree(models("qwen2_5_vl"), target / "model")
        write_json(target / "state" / "run.json", record)

    Checkpoints(folder / "checkpoints").write(20, fill)
    lines = [{"step": step, "attempt": 1, "time": 0, "eval/accuracy": step / 40} for step in range(0, 31, 2)]
    lines[5]["eval/letters/accuracy"] = 0.123
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's export, which nobody has pushed."""
    out = tmp_path_factory.mktemp("exported") / "tiny"
    assert main(["export", str(run), str(out)]) == 0
    return out


@pytest.fixture
def push(run: Path, exported: Path, hub: Hub) -> Callable[..., int]:
    """Pushes the run to ``me/tiny`` or elsewhere, from a copy of its export in ``tiny``."""
    shutil.copytree(exported, "tiny")
    return lambda *words, repo="me/tiny": main(["export", str(run), "tiny", "--push", repo, *map(str, words)])


def metadata(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_a_pushed_model_is_loaded_by_its_name_as_its_card_says_and_has_the_runs_weights(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    hub.repo("models/org/base").push({"README.md": b"---\nlicense: other\nlicense_name: mine\n---\n"}, COMMIT)
    assert main(["export", str(run), "--push", "tiny", "--private", "--json", "--shard-size", "0.0008"]) == 0
    answer = json.loads(capsys.readouterr().out)
    folder, repo = Path("tiny").resolve(), hub.repos["models/me/tiny"]
    assert repo.is_private and len(repo.commits) == 2 and repo.messages == [answer_message(repo)]
    assert (answer["out"], answer["pushed"]["repo"], answer["pushed"]["revision"]) == (str(folder), "me/tiny", "main")
    assert answer["pushed"]["commit"] == repo.refs["main"] and answer["pushed"]["url"] == f"{hub.url}/me/tiny"
    local = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    there = hub.digests("models/me/tiny")
    assert {name: digest for name, digest in there.items() if name != ".gitattributes"} == local
    assert sum(name.endswith(".safetensors") for name in there) > 1 and hub.count("PUT /lfs/[0-9a-f]+/2") > 0

    found = metadata(folder)
    assert (found["base_model"], found["pipeline_tag"], found["datasets"]) == (
        "org/base",
        "image-text-to-text",
        ["org/sums"],
    )
    assert found["library_name"] == "transformers" and {"mmrl", "grpo"} == {*found["tags"]}
    assert (found["license"], found["license_name"]) == ("other", "mine")
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert '"me/tiny"' in code
    Image.new("RGB", (64, 64), "red").save("picture.png")
    shutil.rmtree(folder)  # so only the hub has it
    names: dict[str, Any] = {}
    exec(code.replace("max_new_tokens=256", "max_new_tokens=2"), names)
    saved = tensors(run / "checkpoints/step-000020/model")
    loaded = names["model"].state_dict()
    keys = {weight.data_ptr() for weight in loaded.values()}
    digests = {sha256(weight.numpy().tobytes()).hexdigest() for weight in loaded.values()}
    assert {sha256(weight.numpy().tobytes()).hexdigest() for weight in saved.values()} <= digests and len(keys) > 20


def answer_message(repo: Any) -> str:
    """The message that a push makes."""
    from mmrl.system.version import __version__

    return f"Upload step 20 of digits, exported by mmrl {__version__}"


def test_the_card_says_how_it_was_trained_and_names_no_secret_and_no_place_of_this_machine(exported: Path) -> None:
    text = (exported / "README.md").read_text()
    assert 'from_pretrained("tiny"' in text and "after 20 steps of `grpo` with mmrl 0.1.0" in text
    rows = dict(re.findall(r"^\| ([a-z ]+) \| (.*) \|$", text, re.MULTILINE))
    assert rows["reward"] == "`score` x 0.5" and rows["learned from"].startswith("[org/sums]")
    assert rows["evaluated on digits"] == "`table`, path `rows held out.jsonl`"
    assert rows["evaluated on letters"].startswith("[org/letters]")
    curve = re.findall(r"^\| (\d+) \| (\S*) \| (\S*) ?\|$", text, re.MULTILINE)
    assert curve[0] == ("0", "0", "") and curve[-1] == ("20", "0.5", "") and ("10", "0.25", "0.123") in curve
    assert "eval/letters/accuracy" in text
    (config,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    values = yaml.safe_load(config)
    assert values["rewards"][0]["name"] == "mine.py:score" and values["rewards"][0]["api_key"] == "[redacted]"
    assert values["data"]["train"]["path"] == "org/sums" and "key-of-mine" not in text
    assert not re.search(r"/home|/tmp|someone", text + (exported / "mmrl.json").read_text())


def test_a_folder_that_the_run_read_is_no_dataset_of_the_hub_wherever_the_export_begins(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "began_in/org/sums").mkdir(parents=True)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/attempts.jsonl").write_text(
        json.dumps({"attempt": 1, "folder": str(tmp_path / "began_in")}) + "\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "out"]) == 0
    assert "datasets" not in metadata(Path("out"))
    text = Path("out/README.md").read_text()
    assert "path `org/sums`" in text and "datasets/org/sums" not in text and str(tmp_path) not in text


def test_the_same_command_goes_on_after_a_network_that_fails_in_the_middle(
    push: Callable[..., int], hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"README.md", "mmrl.json"}  # the card, which names the repository from the first push on, and its hash
    before = {path.name: path.stat().st_mtime_ns for path in Path("tiny").iterdir() if path.name not in own}
    hub.fail("POST /api/models/me/tiny/commit", 503)
    assert push() == 3
    error = capsys.readouterr().err
    assert "me/tiny cannot be pushed: the hub answers 503" in error
    assert f"the export is whole in {Path('tiny').resolve()}, and the same command goes on with it" in error
    sent = hub.count("PUT /lfs/")
    assert sent > 0 and {*hub.digests("models/me/tiny")} == {".gitattributes"}
    hub.heal()
    assert push() == 0
    assert hub.count("PUT /lfs/") == sent  # large files had arrived
    assert "model.safetensors" in hub.digests("models/me/tiny")
    assert {name: Path("tiny", name).stat().st_mtime_ns for name in before} == before
    assert "an earlier export of these weights, whole" in capsys.readouterr().out
    assert push() == 0 and len(hub.repos["models/me/tiny"].commits) == 2
    assert "which had every file already" in capsys.readouterr().out


def test_a_commit_whose_answer_is_lost_is_found_by_the_next_push(push: Callable[..., int], hub: Hub) -> None:
    hub.fail("POST /api/models/me/tiny/commit", "lost")
    assert push() == 3
    hub.heal()
    assert push() == 0 and len(hub.repos["models/me/tiny"].messages) == 1


def test_a_hub_that_falls_silent_is_not_waited_for_for_ever(
    push: Callable[..., int], hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "STALL_S", 0.2)
    hub.fail("POST /api/models/me/tiny/commit", "stall")
    assert push() == 3
    assert "me/tiny cannot be pushed: ReadTimeout" in capsys.readouterr().err


def test_what_a_repository_holds_is_told_and_old_weights_do_not_stay_beside_new_ones(
    push: Callable[..., int], hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {
        "model-00001-of-00002.safetensors": b"a",
        "model.safetensors.index.json": b"{}",
        "adapter_config.json": b"{}",
    }
    kept = {"notes.txt": b"mine", "training_args.bin": b"theirs", "config.json": b"old"}
    first = hub.repo("models/me/tiny").push(old | kept)
    assert push("--message", "Mine") == 0
    told = capsys.readouterr().err
    assert "me/tiny holds files already; 1 file replaced" in told and f"{first[:12]} on main keeps them all" in told
    assert f"removed, as old weights: {', '.join(sorted(old))}" in told
    assert "left as they are: notes.txt, training_args.bin" in told
    repo = hub.repos["models/me/tiny"]
    there = repo.commits[repo.refs["main"]]
    assert {*old}.isdisjoint(there) and there["notes.txt"] == b"mine" and there["config.json"] != b"old"
    assert repo.messages == ["Mine"] and repo.commits[first]["config.json"] == b"old"


def test_a_branch_is_made_and_pushed_to_and_main_stays(push: Callable[..., int], hub: Hub) -> None:
    first = hub.repo("models/team/tiny").push({"notes.txt": b"mine"})
    for _ in range(2):
        assert push("--revision", "step-20", repo="team/tiny") == 0
    repo = hub.repos["models/team/tiny"]
    assert repo.refs["main"] == first and "model.safetensors" in repo.commits[repo.refs["step-20"]]
    assert len(repo.messages) == 1


def test_what_somebody_else_pushes_meanwhile_is_not_overwritten(
    push: Callable[..., int], hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.repo("models/me/tiny")
    repo.push({"notes.txt": b"mine"})
    check = repository._check_texts
    monkeypatch.setattr(repository, "_check_texts", lambda folder: (repo.push({"notes.txt": b"new"}), check(folder)))
    assert push() == 3
    assert "somebody has changed me/tiny meanwhile" in capsys.readouterr().err
    assert repo.commits[repo.refs["main"]] == {"notes.txt": b"new"}


@pytest.mark.parametrize(
    ("kind", "code", "said", "do"),
    [
        ("no token", 3, "there is no token to push with", "HF_TOKEN"),
        ("a false token", 3, "the hub does not know the token", "HF_TOKEN"),
        ("a token to read", 3, "the token may read and not write", "HF_TOKEN"),
        ("others", 3, "there is no they/tiny that this token can see", "a repository of your own"),
        ("no right", 3, "the hub refuses it (403)", "a token that may write"),
        ("no name", 2, "is no name of a repository", "correct the name"),
        ("an address", 2, "is no name of a repository", "correct the name"),
        ("a commit", 2, "a push needs a branch", ""),
        ("public", 2, "me/tiny is there already, and is public", "use --public"),
        ("offline", 3, "HF_HUB_OFFLINE is set", "unset it"),
        ("no network", 3, "me/tiny cannot be looked at", "check the network"),
        ("a secret", 2, "a file to push holds what looks like a token", "take it out"),
        ("damage", 2, "model.safetensors is not as the export wrote it", "remove the folder"),
        ("no push", 2, "nothing is pushed, so private has no use", "--push REPO"),
        ("no message", 2, "--message is empty", "write one"),
    ],
)
def test_a_push_that_cannot_go_well_is_refused_and_changes_nothing(
    kind: str, code: int, said: str, do: str,
    push: Callable[..., int], run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    from huggingface_hub import constants

    words, repo = [], "me/tiny"
    match kind:
        case "no token":
            monkeypatch.delenv("HF_TOKEN")
            monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        case "a false token":
            monkeypatch.setenv("HF_TOKEN", "another-token-of-nobody")
        case "a token to read":
            hub.account["auth"]["accessToken"]["role"] = "read"
        case "others":
            repo = "they/tiny"
        case "no right":
            hub.repo("models/they/tiny").push({"notes.txt": b"theirs"})
            hub.repos["models/they/tiny"].takes_pushes, repo = False, "they/tiny"
        case "no name":
            repo = "me/tiny/step"
        case "an address":
            repo = "https://huggingface.co/me/tiny"
        case "a commit":
            words = ["--revision", COMMIT]
        case "public":
            hub.repo("models/me/tiny").push({"notes.txt": b"mine"})
            words = ["--private"]
        case "offline":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        case "no network":
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        case "a secret":
            with open("tiny/README.md", "a") as card:
                card.write(f"mine: hf_{'a1' * 12}\n")
        case "damage":
            with open("tiny/model.safetensors", "ab") as weights:
                weights.write(b"x")
        case "no message":
            words = ["--message", " "]
    refs = {name: {**each.refs} for name, each in hub.repos.items()}
    if kind == "no push":
        assert main(["export", str(run), "new", "--private"]) == code
    else:
        assert push(*words, repo=repo) == code
    error = capsys.readouterr().err
    assert said in error and do in error and "where: " in error and TOKEN not in error
    assert {name: each.refs for name, each in hub.repos.items()} == refs
    assert Path("tiny/config.json").is_file()


def test_a_card_that_its_user_has_written_is_pushed_as_it_is(push: Callable[..., int], hub: Hub) -> None:
    text = Path("tiny/README.md").read_text() + "\nTrained on a Sunday.\n"
    Path("tiny/README.md").write_text(text)
    assert push() == 0
    repo = hub.repos["models/me/tiny"]
    assert repo.commits[repo.refs["main"]]["README.md"].decode() == text


def test_a_card_that_nobody_has_edited_names_each_repository_that_it_is_pushed_to(
    push: Callable[..., int], hub: Hub
) -> None:
    assert push(repo="me/first") == push(repo="me/second") == 0
    for name in ("first", "second"):
        repo = hub.repos[f"models/me/{name}"]
        card = repo.commits[repo.refs["main"]]["README.md"].decode()
        assert f'from_pretrained("me/{name}"' in card and card.count("me/") == card.count(f"me/{name}") > 0


def test_another_export_in_the_place_is_not_taken_for_this_one(
    push: Callable[..., int], hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push("--dtype", "bfloat16") == 2
    assert "OUT is not empty" in capsys.readouterr().err and hub.repos == {}


def test_an_adapter_is_pushed_with_the_name_of_a_base_that_others_can_load(
    models: Callable[[str], Path], hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = models("qwen2")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    torch.nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    adapted.save_pretrained("adapter")
    Path("adapter/README.md").unlink()  # peft's own
    assert main(["export", "adapter", "out", "--adapter", "--push", "me/lora"]) == 2
    error = capsys.readouterr().err
    assert "adapts a folder of this machine, qwen2, which nobody can load" in error and "--base OWNER/NAME" in error
    assert hub.repos == {} and not Path("out").exists()

    files = {path.name: path.read_bytes() for path in base.iterdir()}
    hub.repo("models/org/tiny").push(files)
    assert main(["export", "adapter", "out", "--adapter", "--base", "org/tiny", "--push", "me/lora"]) == 0
    assert PeftConfig.from_pretrained("me/lora").base_model_name_or_path == "org/tiny"
    found = metadata(Path("out"))
    assert (found["base_model"], found["base_model_relation"]) == ("org/tiny", "adapter")
    assert found["library_name"] == "peft" and "lora" in found["tags"]
    shutil.rmtree("adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("org/tiny"), "me/lora")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in adapted.state_dict().items())
    (code,) = re.findall(r"```python\n(.*?)```", Path("out/README.md").read_text(), re.DOTALL)
    exec(code.replace("max_new_tokens=256", "max_new_tokens=2"), {})


@pytest.mark.full
def test_the_python_door_pushes_too(
    push: Callable[..., int], run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    answer = mmrl.export(run, "tiny", push="me/tiny", private=True, message="From Python")
    assert answer.data["pushed"]["repo"] == "me/tiny" and hub.repos["models/me/tiny"].messages == ["From Python"]
    assert hub.repos["models/me/tiny"].is_private and "pushed    " in answer.text
    with pytest.raises(mmrl.HubError, match="no they/tiny that this token can see"):
        mmrl.export(run, "tiny", push="they/tiny")
    with pytest.raises(mmrl.ConfigError, match="so private has no use"):
        mmrl.export(run, "new", private=True)


def test_a_hub_that_knows_no_newer_storage_says_so(
    push: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    assert push() == 3
    assert "HF_HUB_DISABLE_XET=1" in capsys.readouterr().err
