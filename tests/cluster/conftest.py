"""Two Ray nodes of which the second sees none of the driver's files, as its own mounts hide them; ranks as threads."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from mmrl.data.images import ImageGrid, MediaStore
from mmrl_datasets.digits import write_digits

if TYPE_CHECKING:
    from mmrl.cluster.group import RankGroup
    from tests.cluster.scripted_ranks import ScriptedRanks

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
REWARD = """\
def even(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]
"""


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


@pytest.fixture(scope="session")
def hiding() -> list[str]:
    """The beginning of a command that has mounts of its own."""
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("no user namespaces: files cannot be hidden from the second node")
    return command


@pytest.fixture
def start_cluster(hiding: list[str], household: Any, work: Path, tmp_path: Path) -> Callable[[int, int], str]:
    """Starts two nodes with so many processors each; returns the cluster's address.

    The second runs in another folder, and has an empty one over the driver's.
    """

    def start(first_cpus: int, second_cpus: int) -> str:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        common = ["--block", "--disable-usage-stats", "--object-store-memory", str(2**27)]
        head = [*RAY, "start", "--head", "--port", port, "--include-dashboard", "false"]
        second = [*hiding, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(work), *RAY, "start"]
        head += ["--node-ip-address", "127.0.0.1", "--num-cpus", str(first_cpus), *common]
        second += ["--address", f"127.0.0.1:{port}", "--num-cpus", str(second_cpus), *common]
        for number, command in enumerate((head, second), 1):
            log = (tmp_path / f"node{number}.log").open("w")
            household.start(*command, cwd=tmp_path, stdout=log, stderr=log)
            wait_for(household, f"127.0.0.1:{port}", number)
        return f"127.0.0.1:{port}"

    return start


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


@pytest.fixture
def group_of(tmp_path: Path) -> Iterator[Callable[..., tuple[RankGroup, ScriptedRanks]]]:
    """Makes a group of ranks that are threads, so many or on these nodes, each ``size`` of which sample together."""
    from mmrl.cluster.group import RankGroup
    from tests.cluster.scripted_ranks import ScriptedRanks

    groups: list[RankGroup] = []

    def build(ranks: int | Sequence[str], size: int = 1) -> tuple[RankGroup, ScriptedRanks]:
        workers = ScriptedRanks(["a"] * ranks if isinstance(ranks, int) else ranks, size)
        media = MediaStore(tmp_path / "media", ImageGrid(28, 3136, 50176))
        groups.append(RankGroup(workers, media, lambda unit, prompt: unit.tokens, ranks_together=size))
        return groups[-1], workers

    yield build
    for group in groups:
        group.close()
