"""Two Ray nodes of which the second sees none of the driver's files: its own mounts hide them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl_datasets.digits import write_digits

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
HIDING = ["unshare", "--user", "--map-root-user", "--mount"]
REWARD = """\
def even(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]
"""


needs_two_nodes = pytest.mark.skipif(
    subprocess.run([*HIDING, "true"], check=False).returncode != 0 if shutil.which("unshare") else True,
    reason="no user namespaces: files cannot be hidden from the second node",
)


@pytest.fixture(scope="module")
def work(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's folder: model, images, a file reward, a template, all named relative to it."""
    folder = tmp_path_factory.mktemp("driver")
    shutil.copytree(models("qwen2_5_vl"), folder / "model")
    write_digits(folder / "digits", train=6, test=4, warmup=2, pairs=0.3)
    (folder / "reward.py").write_text(REWARD)
    (folder / "ask.jinja").write_text("{{ prompt }} Answer in a box.")
    digits = {"name": "table", "path": "digits"}
    data = {"train": {**digits, "split": "train"}, "eval": {**digits, "split": "test"}, "max_prompt_tokens": 96}
    config = {
        "model": {"path": "model"},
        "data": data | {"prompt_template": "ask.jinja"},
        "rewards": [{"name": "reward.py:even"}],
        "algorithm": {"name": "grpo"},
        "sampler": {"group_size": 2, "max_new_tokens": 8},
        "learner": {"lr": 1e-3},
        "trainer": {"steps": 2, "prompts_per_step": 3},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def start_cluster(household: Any, work: Path, elsewhere: Path, cpus: tuple[int, int]) -> str:
    """The address of a cluster whose second node runs in another folder, with an empty one over the driver's."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    common = ["--block", "--disable-usage-stats", "--object-store-memory", str(2**27)]
    head = [*RAY, "start", "--head", "--port", port, "--include-dashboard", "false"]
    second = [*HIDING, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(work), *RAY, "start"]
    head += ["--node-ip-address", "127.0.0.1", "--num-cpus", str(cpus[0]), *common]
    second += ["--address", f"127.0.0.1:{port}", "--num-cpus", str(cpus[1]), *common]
    for number, command in enumerate((head, second), 1):
        log = (elsewhere / f"node{number}.log").open("w")
        household.start(*command, cwd=elsewhere, stdout=log, stderr=log)
        wait_for(household, f"127.0.0.1:{port}", number)
    return f"127.0.0.1:{port}"


def wait_for(household: Any, address: str, nodes: int) -> None:
    """Return when the cluster has that many nodes."""
    count = f"import ray; ray.init({address!r}, logging_level=50); print(sum(n['Alive'] for n in ray.nodes()))"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        command = [sys.executable, "-c", count]
        env = household.environment
        answer = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == str(nodes):
            return
    raise TimeoutError(answer.stderr)


@needs_two_nodes
@pytest.mark.parametrize(
    ("cpus", "sampler"),
    [
        pytest.param((1, 1), "vllm", id="one rank on each node"),
        pytest.param((0, 2), "hf", id="both ranks on the second", marks=pytest.mark.slow),
    ],
)
def test_a_node_without_the_drivers_files_trains(cpus, sampler, work, tmp_path, household):
    run = f"run-{cpus[0]}"
    address = start_cluster(household, work, tmp_path, cpus)
    overrides = [f"trainer.run_dir={run}", "cluster.name=ray", "cluster.ranks=2", f"cluster.address={address}"]
    overrides += [f"sampler.name={sampler}"]
    before = set(Path("/tmp").glob("mmrl-node-*"))
    result = household.run("train", "config.yaml", *overrides, folder=work)
    assert result.returncode == 0, result.stderr
    seen = household.run("doctor", "config.yaml", "--json", *overrides, folder=work)
    nodes = [row["found"] for row in json.loads(seen.stdout)["findings"] if row["area"] == "nodes"]
    assert sorted("run folder private, model private" in found for found in nodes) == [False, True], nodes
    path = work / run
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert all(m["mismatch/logprob_abs_max"] < 1e-4 for m in metrics[1:])
    environment: dict[str, Any] = json.loads((path / "environment.json").read_text())
    shares = [rank["shares_files"] for rank in environment["engine"]["ranks"]]
    assert shares == [rank < cpus[0] for rank in range(2)]
    rollouts = [json.loads(line) for line in (path / "rollouts" / "step-000002.jsonl").read_text().splitlines()]
    assert len(rollouts) == 6
    assert {file.name for file in (path / "checkpoints" / "step-000002" / "model").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json",
    }  # fmt: skip
    assert set(Path("/tmp").glob("mmrl-node-*")) == before  # what was sent is removed
