"""The user's commands with a model and a dataset on a hub."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.runs import rollouts

INDEX = "model.safetensors.index.json"
OPEN_THEN_FETCH = """
import sys
from mmrl.engine.network.folder import ModelFolder

folder = ModelFolder.open("org/tiny", "main")
print(folder.commit, flush=True)
sys.stdin.readline()
fetched = folder.fetched()
print(fetched.name, fetched.commit, fetched.path)
"""


@pytest.fixture(scope="module")
def tiny(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a text model in two shards, and its weights once more in another format."""
    from transformers import AutoModelForCausalLM

    folder = models("qwen2")
    sharded = tmp_path_factory.mktemp("sharded")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="1MB")
    names = [path for path in folder.iterdir() if path.suffix != ".safetensors"]
    files = {path.name: path.read_bytes() for path in [*names, *sharded.glob("model*")]}
    assert INDEX in files and sum(name.endswith(".safetensors") for name in files) == 2
    return files | {"pytorch_model.bin": b"the weights once more", "onnx/model.onnx": b"and again"}


@pytest.fixture
def broken(tiny: dict[str, bytes]) -> dict[str, bytes]:
    """The same model with weights that nothing can read."""
    return {name: b"no weights" if name.endswith(".safetensors") else data for name, data in tiny.items()}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config of one step; sections are merged into it."""

    def write(**sections: Mapping[str, Any]) -> Path:
        base: dict[str, Any] = {
            "model": {"path": "org/tiny", "revision": "v1"},
            "data": {"train": {"name": "table", "path": "org/sums", "revision": "v1"}, "max_prompt_tokens": 64},
            "rewards": [{"name": "exact"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"name": "hf", "group_size": 2, "max_new_tokens": 4},
            "learner": {"zero_stage": 0},
            "cluster": {},
            "trainer": {"steps": 1, "prompts_per_step": 2, "run_dir": str(tmp_path / "run")},
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(base | {key: {**base[key], **value} for key, value in sections.items()}))
        return path

    return write


@pytest.fixture
def mmrl(python: Callable[..., Any]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command."""
    return lambda *words, **variables: python("-m", "mmrl", *words, **variables)


def assert_no_token(folder: Path, environment: Mapping[str, str]) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert environment["HF_TOKEN"].encode() not in path.read_bytes(), path


@pytest.mark.full
@pytest.mark.parametrize(
    "cluster",
    [{"name": "local"}, pytest.param({"name": "ray", "ranks": 2}, marks=pytest.mark.slow)],
    ids=["one rank", "two ranks"],
)
def test_a_model_and_a_dataset_on_the_hub_are_trained_on_at_their_revisions(
    cluster: Any,
    mmrl: Any,
    config: Any,
    hub: Any,
    tiny: Any,
    broken: Any,
    sums: Any,
    environment: Any,
    plain: Any,
    tmp_path: Path,
) -> None:
    model, data = hub.repo("models/org/tiny"), hub.repo("datasets/org/sums")
    commit = model.push(tiny, "v1")
    model.push(broken)
    data.push(sums(range(2)), "v1")
    data.push(sums(range(100, 102)))

    done = mmrl("train", config(cluster=cluster))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    engine = json.loads((run / "environment.json").read_text())["engine"]
    assert (engine["model"], engine["model_commit"]) == ("org/tiny", commit)
    assert {each["answer"] for each in rollouts(run, 1)} == {"0", "2"}
    trained = plain(run / "checkpoints/step-000001/model")
    assert trained.logits("what is 1+1?", [], [1, 2]).isfinite().all()
    assert hub.count("GET /cdn/") == 3  # two shards and one table, however many ranks are on the node
    assert hub.count(r"GET .*\.(bin|onnx)") == 0
    assert_no_token(run, environment)

    hub.requests.clear()
    checked = mmrl("check", config(), "--json", HF_HUB_OFFLINE="1")
    assert checked.returncode == 0, checked.stderr
    answer = json.loads(checked.stdout)
    assert answer["notes"] == [] and answer["train"]["prompts"] == 2
    assert hub.requests == []


@pytest.mark.full
def test_main_may_move_between_the_configuration_and_the_weights(
    environment: dict[str, str], hub: Any, tiny: Any, broken: Any
) -> None:
    repo = hub.repo("models/org/tiny")
    commit = repo.push(tiny)
    with subprocess.Popen(
        [sys.executable, "-c", OPEN_THEN_FETCH],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline().strip() == commit
        assert hub.count("GET /cdn/") == 0
        repo.push(broken)
        rest, _ = process.communicate("\n", timeout=60)
    name, fetched, path = rest.split()
    assert (name, fetched) == ("org/tiny", commit)
    shards = set(json.loads(tiny[INDEX])["weight_map"].values())
    for shard in shards:
        assert (Path(path) / shard).read_bytes() == tiny[shard]
    assert hub.count("GET /cdn/") == len(shards)
    assert not list(Path(path).rglob("*.bin")) + list(Path(path).rglob("*.onnx"))


@pytest.mark.full
def test_a_run_whose_weights_do_not_come_ends_with_an_error_and_without_a_token(
    mmrl: Any, config: Any, hub: Any, tiny: Any, sums: Any, environment: Any, tmp_path: Path
) -> None:
    hub.repo("models/org/tiny").push(tiny, "v1")
    hub.repo("datasets/org/sums").push(sums(range(2)), "v1")
    hub.fail(f"GET /cdn/{hashlib.sha256(tiny['model-00002-of-00002.safetensors']).hexdigest()}", 503)
    done = mmrl("train", config())
    assert done.returncode == 3, done.stderr
    assert "model org/tiny cannot be fetched: the hub answers 503" in done.stderr
    (event,) = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    assert event["exit_code"] == 3 and event["message"] in done.stderr
    assert_no_token(tmp_path / "run", environment)


@pytest.mark.full
def test_check_says_what_is_wrong_with_data_when_the_models_hub_is_away(mmrl: Any, config: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    path = config(data={"train": {"name": "table", "path": str(rows)}})
    absent = mmrl("check", path, HF_HUB_OFFLINE="1")
    assert absent.returncode == 3 and str(rows) in absent.stderr
    rows.write_text('{"problem": "what is 1+1?", "answer": "2"}\n')
    there = mmrl("check", path, HF_HUB_OFFLINE="1")
    assert there.returncode == 0, there.stderr
    assert "train      1 row\n" in there.stdout and "model org/tiny is not" in there.stdout
