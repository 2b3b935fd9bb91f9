"""What is not trusted cannot do harm: hostile model folders, templates and rows, and secrets that must not show.

Each attack would leave a mark, a canary; where a canary could be dead, another test or key shows that it works.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from mmrl.cluster.process import host_meeting
from mmrl.data.templates import MAX_CHARACTERS, PromptTemplate
from mmrl.engine.network.folder import ModelFolder
from mmrl.errors import ConfigError, DataError
from mmrl.system.console import Console, visible
from mmrl.system.redaction import Redactor, remember_secrets
from mmrl_datasets import images
from tests.canary import Canary
from tests.faults.runs import rollouts

REPOSITORY = Path(__file__).parents[1]
REMOTE_CODE = {
    "config": ("config.json", "AutoConfig", "Qwen2_5_VLConfig"),
    "model": ("config.json", "AutoModelForImageTextToText", "Qwen2_5_VLForConditionalGeneration"),
    "tokenizer": ("tokenizer_config.json", "AutoTokenizer", "PreTrainedTokenizerFast"),
    "image_processor": ("preprocessor_config.json", "AutoImageProcessor", "Qwen2VLImageProcessor"),
    "processor": ("processor_config.json", "AutoProcessor", "Qwen2_5_VLProcessor"),
}
"""Every place where a model folder can name Python code: file, key of its auto_map, class to derive from."""
PICKLES = (
    "pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "model.pt", "consolidated.00.pth", "weights.pkl",
    "training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth",
    "rng_state_0.pth", "adapter_model.bin", "tokenizer.pkl", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
)  # fmt: skip
SECRETS = {
    name: f"canary{index}-{name.lower()}"
    for index, name in enumerate(
        ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "SWANLAB_API_KEY", "DB_PASSWORD")
    )
}


def poison(folder: Path, marks: Path) -> Path:
    """Put code and pickles into every place of a Qwen2.5-VL folder from which something might run them."""
    marks.mkdir()
    for name, (file, auto, base) in REMOTE_CODE.items():
        (folder / f"canary_{name}.py").write_text(
            f"from pathlib import Path\nfrom transformers import {base}\n"
            f"Path({str(marks / name)!r}).touch()\nclass Canary({base}): pass\n"
        )
        path = folder / file
        found = json.loads(path.read_text()) if path.exists() else {"processor_class": "Qwen2_5_VLProcessor"}
        code = f"canary_{name}.Canary"
        found.setdefault("auto_map", {})[auto] = [code, code] if auto == "AutoTokenizer" else code
        path.write_text(json.dumps(found))
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Canary(marks / name)))
    return folder


@pytest.fixture
def hostile(models: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A poisoned model folder, and the folder of the marks."""
    folder = shutil.copytree(models("qwen2_5_vl"), tmp_path / "hostile")
    return poison(folder, tmp_path / "marks"), tmp_path / "marks"


LOAD = """
import sys
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.sampler.hf_sampler import HFSampler
from mmrl.engine.network.policy import load_policy
folder = ModelFolder.open(sys.argv[1], trust_remote_code=sys.argv[2] == "True").fetched()
for with_weights in (True, False):
    load_policy(folder, "cpu", "float32", freeze=(), temperature=1.0, with_weights=with_weights)
HFSampler(folder, None, device="cpu", dtype="float32")
"""


@pytest.mark.parametrize("trust", [False, pytest.param(True, marks=pytest.mark.full)])
def test_code_of_a_model_folder_runs_only_with_the_key(
    trust: bool, hostile: tuple[Path, Path], household: Any, tmp_path: Path
) -> None:
    folder, marks = hostile
    done = household.call("-c", LOAD, str(folder), str(trust), folder=tmp_path, HF_MODULES_CACHE=str(tmp_path / "m"))
    ran = {mark.name for mark in marks.iterdir()}
    if not trust:
        assert done.returncode == 0, done.stderr
        assert ran == set()
    else:  # the canaries work; no key makes a pickle run
        assert {"config", "tokenizer", "image_processor"} <= ran <= REMOTE_CODE.keys(), done.stderr


def test_the_pickles_work_when_they_are_read(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Canary(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("content", ["pickle", "torch", "empty", "cut", "absent"])
def test_weights_that_are_no_safetensors_are_a_config_error(
    content: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    import torch

    folder = shutil.copytree(models("qwen2"), tmp_path / "model")
    weights, mark = folder / "model.safetensors", tmp_path / "mark"
    (folder / "other.safetensors").write_bytes(weights.read_bytes())
    if content == "torch":
        torch.save({"w": Canary(mark)}, weights)
    elif content == "absent":
        weights.unlink()
    else:
        whole = {"pickle": pickle.dumps(Canary(mark)), "empty": b"", "cut": weights.read_bytes()[:-100]}
        weights.write_bytes(whole[content])
    with pytest.raises(ConfigError, match="weights cannot be read") as caught:
        ModelFolder.open(str(folder))
    assert caught.value.where == str(weights) and "safetensors" in caught.value.possible
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../secret.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_of_weights_names_safetensors_of_its_folder_only(
    name: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(models("qwen2"), tmp_path / "model")
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "mark")))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ConfigError, match="index of the model's weights names") as caught:
        ModelFolder.open(str(folder))
    assert "convert" in caught.value.remedy and not (tmp_path / "mark").exists()


def test_a_folder_of_pickles_alone_is_no_model_folder(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(models("qwen2"), tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no model folder at"):
        ModelFolder.open(str(folder))


def test_a_chat_template_that_fails_is_a_row_error_and_one_that_never_ends_the_models(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    from mmrl.data.images import ImageGrid, MediaStore
    from mmrl.engine.text.encoding import Encoder
    from mmrl.types import Message, Prompt

    folder = shutil.copytree(models("qwen2"), tmp_path / "model")
    media = MediaStore(tmp_path / "media", ImageGrid(28, 3136, 50176))
    for attack, where in (
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", str(folder)),
        ("{{ messages.__class__.__mro__ }}", "p1"),
        ("{{ raise_exception('roles must alternate') }}", "p1"),
    ):
        (folder / "chat_template.jinja").write_text(attack)
        start = time.monotonic()
        with pytest.raises(DataError, match="the model's chat template fails") as caught:
            Encoder(ModelFolder.open(str(folder)), media).num_tokens(Prompt("p1", (Message("user", "hi"),)))
        assert caught.value.where == where and time.monotonic() - start < 60


ALLOWED = {
    ("mmrl/api/capture.py", "exec"): "the source of what this process itself has defined and given to mmrl.train",
    ("mmrl/system/worker_process.py", "pickle.load"): "requests that the parent process made itself",
    ("mmrl/rollout/rewards/worker.py", "pickle.loads"): "rollouts that the parent process made itself",
}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Calls that run what they are given, or shell commands."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, given = ast.unparse(call.func), {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in {"eval", "exec"} or name in {"os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}:
            yield name
        if re.fullmatch(r"(c?pickle|dill|cloudpickle|joblib|marshal|shelve)\.(load|loads|open|Unpickler)", name):
            yield name
        if name == "torch.load" and given.get("weights_only") != "True":
            yield name
        if name.endswith("np.load") and given.get("allow_pickle", "False") != "False":
            yield name
        if given.get("shell", "False") != "False":
            yield f"{name}(shell=...)"
        if given.get("trust_remote_code") == "True":
            yield f"{name}(trust_remote_code=True)"


def test_nothing_calls_what_runs_other_peoples_data() -> None:
    found = {}
    for folder in ("mmrl", "plugins", "datasets", "examples"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            place = path.relative_to(REPOSITORY).as_posix()
            found |= {(place, name): place for name in dangers(ast.parse(path.read_text(encoding="utf-8")))}
    assert found.keys() == ALLOWED.keys()


@pytest.mark.parametrize(
    "code",
    [
        "eval(text)", "exec(text)", "os.system('ls')", "pickle.load(file)", "yaml.load(text, yaml.Loader)",
        "torch.load(path)", "torch.load(path, weights_only=False)", "subprocess.run('ls', shell=True)",
        "np.load(path, allow_pickle=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_search_for_dangerous_calls_finds_them(code: str) -> None:
    assert list(dangers(ast.parse(code)))
    assert not list(dangers(ast.parse("torch.load(p, weights_only=True); model.eval(); yaml.safe_load(t)")))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('touch MARK') }}", "unsafe"),
        ("{{ prompt|attr('__class__') }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(prompt) }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}{{ os.system('touch MARK') }}", "no loader"),
        ("{{ 'a' * 10**9 }}", "more than 4194304 characters"),
        ("{{ [1] * 10**9 }}", "more than 4194304 characters"),
        ("{{ 10 ** (10 ** 10) }}", "more than 4194304 characters or bits"),
        ("{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "bits"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1000000 steps"),
        ("{% for i in range(99999) %}{{ prompt * 99 }}{% endfor %}", "writes more than 4194304"),
        ("{{ lipsum(n=10**7) }}", "1000000 steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_neither_escapes_nor_runs_away(
    template: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracing, start = sys.gettrace(), time.monotonic()
    with pytest.raises(DataError, match=message):
        PromptTemplate(template, "data.prompt_template").fill("a", {"unit": "cm"}, "row 0")
    assert time.monotonic() - start < 60 and sys.gettrace() is tracing
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["{{ 1 + 1 }}", "{% for i in range(9) %}x{% endfor %}", "{{ prompt.__class__ }}", "{#"]
)
def test_text_of_a_dataset_is_a_value_and_never_a_template(text: str) -> None:
    template = PromptTemplate("{{ prompt }}|{{ row.note }}|{{ row.note|upper|lower }}", "data.prompt_template")
    assert template.fill(text, {"note": text}, "row 0") == f"{text}|{text}|{text.lower()}"
    assert len(template.fill("x" * (MAX_CHARACTERS // 2), {"note": ""}, "row 0")) == MAX_CHARACTERS // 2 + 2


HOSTILE_TEXT = "\x1b[31mred\x1b]0;title\x07\r\u202egnp.exe\u2066\u200b\x9b2J\u2028[bold]rich[/bold]\x00"


def test_model_output_is_shown_and_not_obeyed_by_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Console(1).line(HOSTILE_TEXT)
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1 and shown.rstrip("\n").isprintable()
    assert "\\x1b[31mred" in shown and "\\u202egnp.exe" in shown and "[bold]rich[/bold]" in shown
    assert visible(HOSTILE_TEXT, keep="\n") == shown.rstrip("\n")


def test_secrets_in_options_of_a_config_are_known_by_their_names() -> None:
    options = {"api_key": "canary-one", "password": "canary-two", "hub_token": "canary-three", "token": "canary-four"}
    plain = {"stop_token": "<|im_end|>", "answer_key": "the_answer", "max_new_tokens": 4096, "secret": "short"}
    remember_secrets({"trackers": [{"name": "x", **options, "nested": [{"MY_API_KEY": "canary-five"}]}], "a": plain})
    text = " ".join([*options.values(), "canary-five", *map(str, plain.values())])
    assert Redactor({})(text) == " ".join(["[redacted]"] * 5 + [str(value) for value in plain.values()])


REWARD = """\
import json, os, pathlib

def nosy(rollouts, api_key="", service=""):
    pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(dict(os.environ)))
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]
"""
BROKEN = """\
class Broken:
    def __init__(self, config): pass
    def start(self, run_dir, config):
        (run_dir / "told.json").write_text(repr(config))
        raise RuntimeError(f"cannot log in with {config['rewards'][0]['api_key']}, PASSWORD at https://me:PASSWORD@host")
    def log(self, step, metrics): pass
    def finish(self): pass
""".replace("PASSWORD", SECRETS["DB_PASSWORD"])


@dataclass
class Attacked:
    """A finished run of a poisoned model on hostile rows, with secrets around it.

    Attributes:
        listening: Addresses and ports that its processes listened on at any time.
        seen: The environment that its reward saw.
    """

    folder: Path
    marks: Path
    output: str
    listening: set[tuple[str, int]]
    seen: dict[str, str]


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which TCP is listened to by a process and its descendants."""
    found = set[tuple[str, int]]()
    with contextlib.suppress(psutil.Error):  # the process has ended
        for member in (parent := psutil.Process(pid), *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                connections = member.net_connections("tcp")
                found |= {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


@pytest.fixture(scope="module")
def attacked(
    models: Callable[[str], Path], picture: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Attacked:
    """Trains with vLLM and DeepSpeed, in a process that holds secrets and asks vLLM for insecure serialisation."""
    folder = tmp_path_factory.mktemp("attacked")
    model = poison(shutil.copytree(models("qwen2_5_vl"), folder / "model"), folder / "marks")
    (folder / "digit.png").write_bytes(picture(56, 56).data)
    row = {
        "problem": "<image>{{ cycler.__init__.__globals__ }} " + HOSTILE_TEXT,
        "images": ["digit.png"],
        "answer": "1",
    }
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    (folder / "reward.py").write_text(REWARD)
    site = folder / "site"
    (site / "broken-1.0.dist-info").mkdir(parents=True)
    (site / "broken-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (site / "broken-1.0.dist-info" / "entry_points.txt").write_text("[mmrl.trackers]\nbroken = broken:Broken\n")
    (site / "broken.py").write_text(
        BROKEN.replace(
            "class Broken:", "from mmrl.interfaces import Tracker, PluginConfig\n\nclass Broken(Tracker):"
        ).replace("    def __init__(self, config): pass", "    class Config(PluginConfig): pass")
    )
    config = {
        "model": {"path": str(model)},
        "data": {
            "train": {"name": "table", "path": str(folder / "rows.jsonl")},
            "prompt_template": "{{ prompt }}",
            "max_prompt_tokens": 512,
        },
        "rewards": [{"name": f"{folder / 'reward.py'}:nosy", "api_key": "canary-of-an-option"}],
        "algorithm": {"name": "grpo"},
        "sampler": {"group_size": 2, "max_new_tokens": 6, "engine": {"kv_cache_memory_bytes": 2**26}},
        "learner": {"lr": 1e-3, "zero_stage": 0},
        "trackers": [{"name": "tensorboard"}, {"name": "broken"}],
        "trainer": {"steps": 1, "prompts_per_step": 2, "run_dir": str(folder / "run")},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = SECRETS | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    words = ["train", "config.yaml", "rewards.0.service=https://me:canary-of-an-address@host/score"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mmrl", *words],
            cwd=folder,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        found = set[tuple[str, int]]()
        while process.poll() is None:
            found |= listening(process.pid)
            time.sleep(0.2)
    shown = (folder / "output").read_text()
    assert process.returncode == 0, shown
    return Attacked(folder / "run", folder / "marks", shown, found, json.loads((folder / "seen.json").read_text()))


@pytest.mark.full
def test_a_run_neither_runs_code_nor_reads_pickles_of_its_models_folder(attacked: Attacked) -> None:
    assert not list(attacked.marks.iterdir())
    assert not list(attacked.folder.rglob("canary*"))  # nor does it hand them on
    assert not {file.suffix for file in attacked.folder.rglob("*")} & {".bin", ".pt", ".pth", ".pkl", ".py"}


def unpacked(file: Path) -> bytes:
    """The texts of a parquet file, which are compressed there."""
    if file.suffix != ".parquet":
        return b""
    table = pq.read_table(file)
    return repr([table.schema.metadata, table.to_pylist()]).encode()


@pytest.mark.full
def test_no_secret_is_left_by_a_run(attacked: Attacked) -> None:
    secrets = [*SECRETS.values(), "canary-of-an-option", "canary-of-an-address"]
    files = [path for path in attacked.folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "environment.json", "events.jsonl", "metrics.jsonl", "told.json"} <= {f.name for f in files}
    assert any("tfevents" in file.name for file in files) and any("step-" in str(file) for file in files)
    leaks = {(str(f), secret) for f in files for secret in secrets if secret.encode() in f.read_bytes() + unpacked(f)}
    assert leaks == set()
    (recorded,) = attacked.folder.glob("rollouts/step-*")
    assert b"cycler.__init__" in unpacked(recorded)
    assert not [secret for secret in secrets if secret in attacked.output]
    assert "https://[redacted]@host/score" in (attacked.folder / "environment.json").read_text()
    assert "cannot log in with [redacted], [redacted] at" in (attacked.folder / "events.jsonl").read_text()


@pytest.mark.full
def test_a_tracker_that_fails_costs_no_metric(attacked: Attacked) -> None:
    lines = (attacked.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


@pytest.mark.full
def test_a_reward_does_not_see_the_users_secrets(attacked: Attacked) -> None:
    assert "PATH" in attacked.seen
    assert not SECRETS.keys() & attacked.seen.keys()
    assert not [name for name, value in attacked.seen.items() if value in SECRETS.values()]


@pytest.mark.full
def test_a_run_listens_on_loopback_only(attacked: Attacked) -> None:
    assert [place for place in attacked.listening if not loopback(place[0])] == []


RANKS = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from mmrl.cluster.ray_ranks import RayRanks
from mmrl.config.cluster import ClusterConfig
from tests.test_trust import listening
import os
ranks = RayRanks(ClusterConfig(name="ray", ranks=2))
port = ranks.call(0, "reserve_port", ranks.locations[0].address).result()
print(json.dumps([ranks.locations[0].address, port, sorted(listening(os.getpid()))]))
ranks.close({}, wait=False)
"""


@pytest.mark.full
def test_the_ray_of_a_run_alone_listens_on_loopback_only(household: Any, tmp_path: Path) -> None:
    done = household.call("-c", RANKS, str(REPOSITORY), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    address, _, places = json.loads(done.stdout)
    assert address == "127.0.0.1"
    assert len(places) > 3 and [place for place in places if not loopback(place[0])] == []


def test_ranks_meet_at_the_address_that_they_were_given_and_at_no_other() -> None:
    from torch.distributed import TCPStore

    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    store = host_meeting(bound)
    assert {place for place in listening(os.getpid()) if place[1] == port} == {("127.0.0.1", port)}
    store.set("rank", "0")
    assert TCPStore("127.0.0.1", port, is_master=False).get("rank") == b"0"


@pytest.mark.full
def test_hostile_text_leaves_only_plain_characters_in_what_a_run_writes(attacked: Attacked) -> None:
    assert all(line.isprintable() for line in attacked.output.splitlines())
    for name in ("metrics.jsonl", "events.jsonl"):
        assert re.fullmatch(rb"[\x20-\x7e\n]*", (attacked.folder / name).read_bytes())
    record = rollouts(attacked.folder, 1)[0]
    assert "{{ cycler.__init__.__globals__ }}" in record["prompt"] and HOSTILE_TEXT.strip() in record["prompt"]


@pytest.mark.full
def test_vllm_is_not_allowed_insecure_serialisation(
    models: Callable[[str], Path], household: Any, tmp_path: Path
) -> None:
    code = (
        "from mmrl.cluster.process import prepare_process; prepare_process()\n"
        "import vllm.envs; print(vllm.envs.VLLM_ALLOW_INSECURE_SERIALIZATION)"
    )
    done = household.call("-c", code, folder=tmp_path, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    assert done.stdout.split() == ["False"], done.stderr


@pytest.mark.parametrize("text", ["data:image/png;base64,", "DATA:image/jpeg;base64,"])
def test_a_data_uri_is_too_large_before_it_is_decoded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 3000)
    monkeypatch.setattr(images.base64, "b64decode", lambda *args, **options: pytest.fail("was decoded"))
    with pytest.raises(DataError, match="too large") as caught:
        images.read_image(text + "A" * 4004, None, "row 3, images[0]")
    assert caught.value.where == "row 3, images[0]" and "3000 bytes" in caught.value.possible
