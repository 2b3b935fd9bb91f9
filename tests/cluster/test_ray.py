"""Runs on two ranks, of a Ray cluster of their own or forks in its place: what they compute, and how they fail."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.numpy import load_file

from mmrl.cluster.launch import start_engine
from mmrl.cluster.ray_ranks import RayRanks
from mmrl.commands.cli import main
from mmrl.config.cluster import ClusterConfig
from mmrl.engine.spec import EngineSpec
from mmrl.errors import ResourceError
from mmrl.types import RawImage
from mmrl_algorithms.grpo import GRPO
from mmrl_datasets.digits import write_digits
from tests.conftest import Household
from tests.faults.harness import is_held
from tests.faults.runs import rollouts

QUICKSTART = str(Path(__file__).resolve().parents[2] / "examples" / "digits_grpo.yaml")
FAULTY = '''
import os
import signal
import time

import torch

from mmrl_algorithms.grpo import GRPO


class Faulty(GRPO):
    """GRPO that fails on rank 1, in the place that its option names."""

    class Config(GRPO.Config):
        fault: str

    def __init__(self, config):
        super().__init__(config)
        self.here = os.environ.get("RANK") == "1" and config.fault
        if self.here == "start":
            raise ValueError("broken at the start")
        if self.here == "generation":
            from mmrl.engine.sampler.vllm_sampler import VLLMSampler

            group, groups = VLLMSampler._group, []

            def broken(sampler, request, output):
                if len(groups) == 4:  # rank 0 tells of the last group before
                    time.sleep(0.5)
                    raise ValueError("broken in generation")
                groups.append(request)
                return group(sampler, request, output)

            VLLMSampler._group = broken

    def loss(self, tokens):
        if self.here == "update":
            raise ValueError("broken in the update")
        if self.here == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        if self.here == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(tokens)
'''
LOST_RANKS = str(Path(__file__).with_name("lost_ranks.py"))
REWARD = """\
def even(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]

def broken(rollouts):
    raise ValueError("broken in scoring")
"""


def write_mixed(folder: Path, picture: Callable[..., RawImage]) -> None:
    """Rows of no, one and three images of several sizes; the file of the last row's image ends too early."""
    folder.mkdir()
    sizes = [(56, 56), (90, 60), (60, 120), (112, 84), (28, 90), (84, 84)]
    for index, (width, height) in enumerate(sizes):
        (folder / f"{index}.png").write_bytes(picture(width, height).data)
    (folder / "cut.png").write_bytes(picture(84, 56, 1).data[:-400])
    counts = [0, 0, 0, 1, 1, 1, 3, 3, 3]
    images = [[f"{(row + i) % len(sizes)}.png" for i in range(count)] for row, count in enumerate(counts)]
    rows = [{"problem": "<image>" * len(names) + "what?", "images": names} for names in [*images, ["cut.png"]]]
    (folder / "train.jsonl").write_text("".join(json.dumps(row | {"answer": "7"}) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(
    models: Callable[[str], Path], picture: Callable[..., RawImage], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Configs, data, rewards, and an installed package with an algorithm that fails."""
    folder = tmp_path_factory.mktemp("ray")
    write_digits(folder / "digits", train=8, test=3, warmup=2, pairs=0.4)
    (folder / "sums.jsonl").write_text(
        "".join(json.dumps({"problem": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(6))
    )
    (folder / "reward.py").write_text(REWARD)
    write_mixed(folder / "mixed", picture)
    info = folder / "site" / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mmrl.algorithms]\nfaulty = faulty:Faulty\n")
    (folder / "site" / "faulty.py").write_text(FAULTY)
    digits = {"name": "table", "path": "digits"}
    train = {"name": "table", "path": "mixed", "split": "train"}
    data = {"train": train, "eval": {**digits, "split": "test"}, "max_prompt_tokens": 96, "max_bad_rows": 0.1}
    images: dict[str, Any] = {
        "model": {"path": str(models("qwen2_5_vl"))},
        "data": data,
        "rewards": [{"name": "reward.py:even"}],
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "sampler": {"group_size": 3, "max_new_tokens": 10, "engine": {"kv_cache_memory_bytes": 2**26}},
        "learner": {"lr": 1e-3, "tokens_per_microbatch": 150, "zero_stage": 0},
        "trainer": {"steps": 2, "prompts_per_step": 5},
        "trackers": [],
    }
    text = images | {
        "model": {"path": str(models("qwen2"))},
        "data": {"train": {"name": "table", "path": "sums.jsonl"}, "max_prompt_tokens": 64},
        "sampler": {"name": "hf", "group_size": 3, "max_new_tokens": 10},
    }
    for name, config in {"images": images, "text": text}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_every_image_can_be_seen(run: Path) -> None:
    """Text, one image and three of different sizes were trained on; each is in the run's media, pixel by pixel."""
    records = [record for step in (1, 2) for record in rollouts(run, step)]
    assert {len(record["images"]) for record in records} == {0, 1, 3}
    assert len({(image["width"], image["height"]) for record in records for image in record["images"]}) > 3
    for record in records:
        assert record["prompt"].count("<|image_pad|>") == len(record["images"])
        for image in record["images"]:
            with Image.open(run / "media" / f"{image['hash']}.png") as shown:
                pixels = f"{shown.width}x{shown.height}".encode() + shown.convert("RGB").tobytes()
            assert hashlib.sha256(pixels).hexdigest() == image["hash"]
            assert (shown.width, shown.height) == (image["width"], image["height"])


def shared_memory() -> set[str]:
    """Names of what vLLM's ranks share and no living process holds, as those of other tests are held."""
    names = {path.name for path in Path("/dev/shm").iterdir() if re.match(r"psm_|.*cpushm", path.name)}
    return {name for name in names if not is_held(name)}


TWO = ("cluster.name=ray", "cluster.ranks=2")
LAYOUTS = {
    "one": (),
    "two": TWO,
    "shared": (*TWO, "sampler.tensor_parallel_size=2", "learner.zero_stage=3"),
    "stages": (*TWO, "sampler.pipeline_parallel_size=2", "learner.zero_stage=2"),
}
"""One rank, two with a sampler each, two with ZeRO 3 that share a sampler's layers, and two with a half of its layers
each."""
UNDER_RAY = ("two", "shared")
"""The ranks of the others are forks, which start in a fraction of the time and compute the same."""
DRIVER = (
    "import sys; from mmrl.commands.cli import main; code = main(sys.argv[1:]);"
    "print(sorted({'deepspeed', 'vllm'} & set(sys.modules))); sys.exit(code)"
)
"""A command that tells at its end which engines its process has imported."""


@pytest.fixture(scope="module")
def trained(folder: Path, warm_mmrl: Callable[..., Any]) -> Iterator[Callable[[str], Path]]:
    """The quickstart's run in a layout, carried out when it is first asked for; it leaves no process and no memory.

    Under Ray the driver imports no engine: it may be where there is no accelerator, which DeepSpeed would look for. And
    the run has a cluster of its own, whatever the environment names.
    """
    household = Household()

    @functools.cache
    def train(name: str) -> Path:
        before = shared_memory()
        words = ("train", QUICKSTART, "images.yaml", f"trainer.run_dir={name}", *LAYOUTS[name])
        if name in UNDER_RAY:
            result = household.call("-c", DRIVER, *words, folder=folder, RAY_ADDRESS="127.0.0.1:1")
        else:
            result = warm_mmrl(*words, folder=folder)
        assert result.returncode == 0, result.stderr
        assert name not in UNDER_RAY or result.stdout.splitlines()[-1] == "[]", result.stdout
        assert household.members_after(10) == {} and shared_memory() == before
        return folder / name

    yield train
    household.kill()


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "checkpoints" / "step-000002" / "model" / "model.safetensors")


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("two", marks=pytest.mark.slow),  # the others have two ranks and more in common with real runs
        pytest.param("shared", marks=pytest.mark.proves("tensor_parallel", "zero_3", family="qwen2_5_vl")),
        "stages",
    ],
)
def test_two_ranks_train_as_one_does(name, trained):
    one, run = trained("one"), trained(name)
    alone, together = metrics(one), metrics(run)
    for step, (expected, found) in enumerate(zip(alone, together, strict=True)):
        assert {k for k in expected if k[:4] != "perf"} == {k for k in found if k[:4] != "perf"}
        if step:
            assert found["mismatch/logprob_abs_max"] < 1e-4
    assert alone[1]["policy/grad_norm"] == pytest.approx(together[1]["policy/grad_norm"], rel=1e-3)
    for step in (1, 2):
        pairs = zip(rollouts(one, step), rollouts(run, step), strict=True)
        assert all(a["prompt_id"] == b["prompt_id"] for a, b in pairs)
    same = [a["token_ids"] == b["token_ids"] for a, b in zip(rollouts(one, 1), rollouts(run, 1), strict=True)]
    assert np.mean(same) > 0.9  # sums in another order may tip a sample
    shapes = [{key: tensor.shape for key, tensor in weights(path).items()} for path in (one, run)]
    assert shapes[0] == shapes[1]


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each == "two")) for each in LAYOUTS])
def test_every_layout_trains_on_every_image_and_drops_the_broken_one(name, trained):
    run = trained(name)
    assert_every_image_can_be_seen(run)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] != "numerics"]
    assert (event["kind"], event["prompt"]) == ("dropped", "train/9") and "truncated" in event["reason"]


@pytest.mark.full
def test_two_ranks_share_a_sampler_and_the_weights(trained):
    engine = json.loads((trained("shared") / "environment.json").read_text())["engine"]
    assert engine["sampler_arguments"]["tensor_parallel_size"] == 2
    assert engine["learner_settings"]["zero_optimization"]["stage"] == 3
    assert len({rank["pid"] for rank in engine["ranks"]}) == 2


@pytest.mark.full
def test_two_ranks_sample_with_a_half_of_the_layers_each(trained):
    engine = json.loads((trained("stages") / "environment.json").read_text())["engine"]
    assert engine["sampler_arguments"]["pipeline_parallel_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
def test_sets_of_ranks_that_share_a_sampler_sample_beside_each_other(sizes, folder, household):
    run = f"sets-{sizes[0]}-{sizes[1]}"
    overrides = ["sampler.name=vllm", "sampler.engine={kv_cache_memory_bytes: 33554432}", "trainer.steps=1"]
    overrides += ["cluster.name=ray", "cluster.ranks=4", f"trainer.run_dir={run}"]
    overrides += [f"sampler.{kind}_parallel_size={n}" for kind, n in zip(("tensor", "pipeline"), sizes, strict=True)]
    result = household.run("train", "text.yaml", *overrides, folder=folder)
    assert result.returncode == 0, result.stderr
    (numbers,) = (m for m in metrics(folder / run) if m["step"] == 1)
    assert numbers["mismatch/logprob_abs_max"] < 1e-4
    assert len(rollouts(folder / run, 1)) == 15


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "config", "code", "message"),
    [
        pytest.param("start", "text", 4, "broken at the start", marks=pytest.mark.slow),
        ("generation", "images", 1, "broken in generation"),
        ("update", "text", 4, "broken in the update"),
        ("death", "text", 5, "rank 1 is gone"),
        pytest.param("memory", "text", 5, "out of memory in the update: CUDA", marks=pytest.mark.slow),
        pytest.param("scoring", "text", 4, "broken in scoring", marks=pytest.mark.slow),
    ],
)
def test_a_fault_ends_the_run_with_its_message(fault, config, code, message, folder, household, warm_mmrl):
    """Under Ray with an installed package; those of the full tier in forks with a file."""
    forks = fault in ("generation", "update", "death")
    overrides = ["cluster.name=ray", "cluster.ranks=2", f"trainer.run_dir={fault}", "learner.zero_stage=3"]
    if fault == "death":
        overrides += ["trainer.max_restarts=1"]
    if fault == "scoring":
        overrides += ["rewards=[{name: reward.py:broken}]"]
    else:
        overrides += [f"algorithm={{name: {'site/faulty.py:Faulty' if forks else 'faulty'}, fault: {fault}}}"]
    if fault == "generation":
        overrides += ["sampler.tensor_parallel_size=2", "data.eval=null"]
    before, environment = shared_memory(), {} if forks else {"PYTHONPATH": str(folder / "site")}
    train = warm_mmrl if forks else household.run
    result = train("train", f"{config}.yaml", *overrides, folder=folder, **environment)
    assert result.returncode == code, result.stderr
    assert message in result.stderr and ("rank 1" in result.stderr) == (fault != "scoring")
    assert ("Traceback" in result.stderr) == (fault == "generation")  # a bug keeps its traceback
    assert result.stderr.count("mmrl: ") == (fault != "generation")
    if fault == "memory":  # the other rank does not wait, and all are started again once with smaller micro-batches
        events = [json.loads(line)["kind"] for line in (folder / fault / "events.jsonl").read_text().splitlines()]
        assert (events.count("adapted"), events.count("restart")) == (1, 1)
    assert household.members_after(10) == {} and shared_memory() == before


def assert_lost_and_replaced(result: Any, scenarios: list[str]) -> list[dict[str, Any]]:
    """Each was noticed in time and named, and left nothing; the next one took the steps that it would have taken."""
    assert result.returncode == 0, result.stderr
    groups: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(groups) == len(scenarios)
    doing = {"generation": "generate", "update": "update", "save": "save"}
    for scenario, group in zip(scenarios, groups, strict=True):
        if scenario != "none":
            assert group["noticed_s"] < 10, group
            expected = "the step takes too long" if scenario == "hang" else "rank 1 is gone: "
            assert group["what"].startswith(expected), group
            assert f"`{doing[scenario]}`" in group["where"] if scenario in doing else "rank 1" in str(group), group
        assert group["close_s"] < 10 and group["left"] == [], group
    for before, after in itertools.pairwise(groups):
        np.testing.assert_allclose(after["steps"][:2], before["steps"][1:], rtol=1e-5)
        assert not np.allclose(after["steps"][:2], before["steps"][:2], rtol=1e-3)
    return groups


@pytest.mark.slow  # test_lost_ranks.py has a whole run that loses one
def test_ranks_that_die_or_hang_are_replaced_in_the_same_process(folder, models, household, tmp_path):
    """The same samples after a restart have the log-probs and the step of the group that was not lost."""
    before, scenarios = shared_memory(), ["update", "hang"]
    result = household.call(LOST_RANKS, str(models("qwen2")), "", *scenarios, folder=tmp_path)
    groups = assert_lost_and_replaced(result, scenarios)
    assert "no answer from" in groups[1]["where"] and "rank 1 on " in groups[1]["where"]
    assert household.members_after(10) == {} and shared_memory() == before


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["generation", "save", "idle", "out of memory"])
def test_wherever_a_rank_dies(scenario, models, ray_address, household, tmp_path):
    """In an existing cluster, which has the two processors for the next group again."""
    if scenario == "out of memory" and not os.access("/sys/fs/cgroup/memory", os.W_OK):
        pytest.skip("no control group can be made")
    scenarios = [scenario, "none"]
    result = household.call(LOST_RANKS, str(models("qwen2")), ray_address, *scenarios, folder=tmp_path)
    lost, _ = assert_lost_and_replaced(result, scenarios)
    if scenario == "out of memory":
        assert "; the kernel ended 1 process for want of memory on " in lost["what"]
        assert "learner.zero_stage: 3" in lost["remedy"]
    if scenario == "idle":
        assert lost["where"].endswith("while it had nothing to do")


@pytest.mark.slow
def test_a_rank_that_ray_ends_for_its_memory_is_told_from_others(models, household, tmp_path):
    low = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
    result = household.call(LOST_RANKS, str(models("qwen2")), "", "none", folder=tmp_path, **low)
    assert "is gone: " in result.stderr and "running low on memory" in result.stderr
    assert "learner.zero_stage: 3" in result.stderr
    assert household.members_after(10) == {}


@pytest.mark.parametrize(("mode", "reason"), [("silent", "timed out"), ("http", "not Ray"), ("deaf", "refused")])
def test_what_is_not_ray_is_told_from_it_in_seconds(mode, reason, monkeypatch):
    """Ray itself would try for minutes; so it does where something listens that is not Ray."""
    monkeypatch.setattr("mmrl.cluster.ray_cluster.KNOCK_S", 1)
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1] if mode != 'deaf' else 1}"

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        if mode == "http":
            threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ResourceError, match=reason) as caught:
            RayRanks(ClusterConfig(name="ray", ranks=1, address=address))
    assert caught.value.where == f"cluster.address: {address}"
    assert time.monotonic() - start < 60  # the import of Ray included


@pytest.mark.full
def test_a_session_that_auto_finds_dead_is_told_within_a_minute(monkeypatch):
    monkeypatch.setattr("mmrl.cluster.ray_cluster.CLUSTER_S", 4)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # as from a stale file, but whatever else runs on this machine
    with pytest.raises(ResourceError, match="no cluster has answered within 4 s"):
        RayRanks(ClusterConfig(name="ray", ranks=1, address="auto"))


@pytest.mark.parametrize(
    ("tier", "count"),
    [pytest.param("not slow", 3, marks=pytest.mark.full), pytest.param("slow", 1, marks=pytest.mark.slow)],
)
def test_runs_of_a_sweep_are_at_work_at_once(tier, count, tmp_path):
    folder, log = Path(__file__).parent, tmp_path / "log"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", tier, str(folder / "test_places.py")]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with log.open("wb") as output:  # a pipe would have no end while a process of Ray holds it
        done = subprocess.run(words, cwd=folder.parents[1], env=variables, stdout=output, stderr=output, timeout=500)
    text = log.read_text()
    assert done.returncode == 0 and f"{count} passed" in text, text[-4000:]


@pytest.mark.full
def test_too_few_devices_are_shown_by_node(ray_address, monkeypatch):
    monkeypatch.setattr("mmrl.cluster.ray_ranks.WAIT_S", 2)
    with pytest.raises(ResourceError, match="9 ranks, each with a CPU of its own") as caught:
        RayRanks(ClusterConfig(name="ray", ranks=9, address=ray_address))
    assert re.search(r"\(\S+\): 2 CPUs\n    free: 2", caught.value.possible)


@pytest.mark.full
def test_messages_too_large_to_travel_in_rays_calls_arrive_whole(vision, ray_address):
    """Ray puts arguments and answers of 100 kB and more into its object store."""
    import ray

    samples = vision.samples([1100, 40, 560] * 24)
    assert len(ray.cloudpickle.dumps(samples)) > 220_000 and 4 * 1700 * 24 > 105_000
    config = vision.config(cluster={"name": "ray", "ranks": 1, "address": ray_address}, learner={"zero_stage": 0})
    group = start_engine(EngineSpec(config, vision.folder, vision.media, GRPO(GRPO.Config()), 2, with_sampler=False))
    try:
        with group.learning() as learner:
            whole = learner.network("policy").score(samples)
            parts = [learner.network("policy").score(samples[start : start + 3]) for start in (0, 69)]
    finally:
        group.close()
    assert [len(values) for values in whole] == [len(sample.mask) for sample in samples]
    for start, part in zip((0, 69), parts, strict=True):
        for one, other in zip(whole[start : start + 3], part, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.full
def test_a_rank_with_a_gpu_that_torch_cannot_use_is_refused(folder, warm_mmrl, tmp_path):
    """In a fork."""
    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.95.05\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    words = ["train", "text.yaml", "trainer.run_dir=unused", "cluster.name=ray", "cluster.ranks=1"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    result = warm_mmrl(*words, folder=folder, PATH=path)
    assert result.returncode == 5, result.stderr
    assert "built without CUDA" in result.stderr and "580.95.05" in result.stderr and "(rank 0)" in result.stderr


def test_an_address_that_nobody_answers_is_an_error_of_resources(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    code = main(["train", "text.yaml", "cluster.name=ray", "cluster.address=127.0.0.1:1", "trainer.run_dir=nobody"])
    assert code == 5
    assert "cluster.address: 127.0.0.1:1" in capsys.readouterr().err
