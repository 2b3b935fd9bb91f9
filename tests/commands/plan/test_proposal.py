"""Settings that fit: each proposal is planned again, and the examples are, for the GPUs that their heads name."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from PIL import Image

from mmrl.commands.cli import main
from mmrl.commands.plan.proposal import fits, propose
from mmrl.config.load import from_mapping
from mmrl.data.images import MediaStore
from mmrl.engine.footprint import Footprint
from mmrl.engine.machine.host_memory import check_hosts
from mmrl.engine.memory_needs import changed, host_memory
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.spec import EngineSpec
from mmrl.errors import ResourceError
from mmrl.ops.cost import ModelShape
from mmrl.ops.memory import Zero, states
from mmrl_algorithms.grpo import GRPO

EXAMPLES = Path(__file__).parents[3] / "examples"
HEAD = re.compile(r"`mmrl plan --gpus (\d+) --memory (\d+)`: at\s+(?:# )?most ([\d.]+) GB")
HOST = re.compile(r"([\d.]+) GB of\s(?:# )?the host's")
GB = 10**9


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a published model without its weights."""
    written, root, module = dict[str, Path](), tmp_path_factory.mktemp("published"), load("published")

    def write(name: str) -> Path:
        if name not in written:
            written[name] = module.write_published(root / name.replace("/", "-"), name)
        return written[name]

    return write


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Three prompts each: with an image of up to a megapixel, and of text alone. Each has two answers, of some 100
    and 300 tokens."""
    root = tmp_path_factory.mktemp("tables")
    found = {}
    for vision in (False, True):
        pair = {"chosen": "1 + " * 50, "rejected": "1 + " * 150}
        rows = [{"problem": "find x in the figure " * (10 + 30 * i), "answer": "1", **pair} for i in range(3)]
        if vision:
            for i, size in enumerate([(400, 300), (1000, 1000), (1000, 1000)]):
                Image.new("RGB", size, (i, i, i)).save(root / f"{i}.png")
            rows = [
                {**row, "problem": "<image>" + row["problem"], "images": [f"{i}.png"]} for i, row in enumerate(rows)
            ]
        found[vision] = root / f"{vision}.jsonl"
        found[vision].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@pytest.fixture
def plan(
    published: Callable[[str], Path], tables: dict[bool, Path], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Exit code, answer and stderr of ``mmrl plan --json`` on an example."""

    def run(example: str | Path, *words: str) -> tuple[int, dict[str, Any], str]:
        path = EXAMPLES / example
        written = yaml.safe_load(path.read_text())
        name, teacher = written["model"]["path"], written.get("reference", {}).get("path")
        changes = [f"model.path={published(name)}", f"data.train={{name: table, path: {tables['VL' in name]}}}"]
        changes += [f"reference.path={published(teacher)}"] if teacher else []
        overrides = [*changes, "data.eval=null", "trainer.eval_every=10", "trainer.blank_every=0"]
        code = main(["plan", str(path), *overrides, "--json", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


MEANT_FOR_GPUS = sorted(path.name for path in EXAMPLES.glob("*.yaml") if HEAD.search(path.read_text()))


def test_examples_are_there_for_small_and_large_machines():
    found = {tuple(map(int, HEAD.search((EXAMPLES / name).read_text()).groups()[:2])) for name in MEANT_FOR_GPUS}  # type: ignore[union-attr]
    assert found >= {(1, 16), (1, 24), (1, 80), (4, 80), (8, 80), (16, 80)} and len(MEANT_FOR_GPUS) == 16


@pytest.mark.parametrize("name", MEANT_FOR_GPUS)
def test_an_example_fits_its_gpus_and_says_what_it_takes(name, plan):
    head = HEAD.search((EXAMPLES / name).read_text())
    assert head is not None
    gpus, memory, stated = int(head[1]), int(head[2]), float(head[3])
    code, found, err = plan(name, "--gpus", str(gpus), "--memory", str(memory))
    assert code == 0, err
    config = yaml.safe_load((EXAMPLES / name).read_text())
    assert config.get("cluster", {}).get("ranks", 1) == gpus
    assert found["proposal"] == {}  # nothing need change
    assert stated == pytest.approx(found["memory"]["most"] / GB, rel=0.05)
    merges = config["model"].get("lora") is not None
    assert merges == ("layer" in found["memory"]["phases"]["update"]), found["memory"]
    stated_host = HOST.search((EXAMPLES / name).read_text())
    if config["algorithm"]["name"] == "dpo":  # on pairs of the data: nothing is sampled
        assert not found.keys() & {"sampler", "host"} and stated_host is None
        return
    assert found["sampler"]["sequences"] >= 8
    assert stated_host is not None and float(stated_host[1]) == pytest.approx(found["host"]["needed"] / GB, rel=0.05)


@pytest.mark.parametrize(
    ("name", "weights", "locked"),
    [
        ("geometry3k_qwen2_5_vl_3b_qlora_grpo.yaml", 7.51, 12.2),
        ("geometry3k_qwen2_5_vl_7b_qlora_grpo.yaml", 16.6, 31.5),
        ("geometry3k_qwen2_5_vl_32b_grpo.yaml", 16.7, 31.4),
    ],
)
def test_a_vllm_that_backs_up_its_weights_locks_almost_twice_their_bytes(name, weights, locked, plan, monkeypatch):
    new = plan(name, "--gpus", "16" if "32b" in name else "1", "--memory", "80")[1]
    monkeypatch.setattr("mmrl.engine.footprint.discards_weights", lambda config: False)
    old = plan(name, "--gpus", "16" if "32b" in name else "1", "--memory", "80")[1]
    assert old["sampler"]["weights"] / GB == pytest.approx(weights, rel=0.01)
    assert old["host"]["sampler"] / GB == pytest.approx(locked, rel=0.01) and not old["host"]["discards"]
    assert new["host"]["sampler"] < 10**9 and new["host"]["discards"]
    assert new["host"]["learner"] == old["host"]["learner"]


def test_a_machine_of_32_gb_is_refused_7b_qlora_if_vllm_backs_up_its_weights(published, tables, tmp_path, monkeypatch):
    example = yaml.safe_load((EXAMPLES / "geometry3k_qwen2_5_vl_7b_qlora_grpo.yaml").read_text())
    example["model"]["path"] = str(published(example["model"]["path"]))
    example["trainer"]["eval_every"] = 0
    example["data"] |= {"train": {"name": "table", "path": str(tables[True])}, "eval": None}
    config = from_mapping(example)
    folder = ModelFolder.open(config.model.path, with_weights=False)
    media = MediaStore(tmp_path, folder.image_sizes(3136, 10**6))
    spec = EngineSpec(config, folder, media, GRPO(GRPO.Config()), max_images=1, with_sampler=True)
    machine = [("here", 32 * 2**30)]
    check_hosts(machine, host_memory(spec, "cuda"))
    monkeypatch.setattr("mmrl.engine.footprint.discards_weights", lambda config: False)
    with pytest.raises(ResourceError, match=r"here has 34\.4 GB .* 1 rank .* 49\.\d GB: 15\.\d GB are") as caught:
        check_hosts(machine, host_memory(spec, "cuda"))
    assert "vLLM's while it sleeps 31.4 GB" in str(caught.value.where) and "install.sh" in str(caught.value.remedy)
    assert host_memory(spec, "cpu").kept == host_memory(spec, "cpu").learner  # offloaded, and nothing sleeps


def test_a_reference_in_the_hosts_memory_is_counted_in_the_pieces_that_are_page_locked(plan):
    _, found, _ = plan("geometry3k_qwen2_5_vl_7b_grpo.yaml", "learner.zero_stage=2", "--gpus", "8", "--memory", "141")
    assert 16.6 * GB < found["host"]["reference"] < 25 * GB


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "gpus", "memory", "expected"),
    [
        ("geometry3k_qwen2_5_vl_3b_lora_grpo.yaml", 1, 21.8, {"sampler.gpu_memory_utilization"}),
        ("geometry3k_qwen2_5_vl_3b_grpo.yaml", 1, 48, {"learner.offload", "learner.zero_stage"}),
        ("geometry3k_qwen2_5_vl_7b_grpo.yaml", 2, 80, {"learner.offload"}),
        ("geometry3k_qwen2_5_vl_32b_grpo.yaml", 8, 80, {"learner.offload"}),
    ],
)
def test_what_is_proposed_fits_when_it_is_planned(name, gpus, memory, expected, plan):
    words = ("--gpus", str(gpus), "--memory", str(memory))
    code, found, err = plan(name, *words)
    proposal = found["proposal"]
    assert code == 5 and expected & proposal.keys(), proposal
    assert all(f"{key}=" in err for key in proposal)
    overrides = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in proposal.items()]
    code, found, err = plan(name, *overrides, *words)
    assert code == 0, err
    assert found["memory"]["most"] <= memory * GB and found["sampler"]["sequences"] >= 1
    assert found["proposal"].keys() <= {"cluster.name", "cluster.ranks"}


def test_where_nothing_fits_the_missing_bytes_are_told(plan):
    code, found, err = plan("geometry3k_qwen2_5_vl_7b_grpo.yaml", "--gpus", "1", "--memory", "16")
    assert code == 5 and "proposal" not in found
    said = re.search(
        r"the smallest setting needs ([\d.]+) GB of each GPU, which has 16 GB: ([\d.]+) GB are missing", err
    )
    assert said is not None, err
    needed, missing = map(float, said.groups())
    assert missing == pytest.approx(needed - 16, abs=0.15)
    # The sampler's weights, 8.3 G in bfloat16, with what vLLM and CUDA take, cannot be less.
    assert needed > 8.29 * 2 + 4.5
    assert "model.lora" in err and "cluster.ranks" in err


def footprint(activations_per_token: int = 0) -> Callable[[Any], Footprint]:
    """The footprint of a model of a billion parameters whose sampler takes 2 GB and 1 GB a sequence."""

    def take(config: Any) -> Footprint:
        learner = config.learner
        zero = Zero(learner.zero_stage, config.cluster.ranks, learner.offload, reduce_bucket=0, float32_sums=True)
        held = states(GB, 0, width=2, zero=zero)
        activations = activations_per_token * learner.tokens_per_microbatch
        return Footprint(held, activations, 0, 0, 0, 0, 2 * GB, 0, GB // 8)

    return take


SHAPE = ModelShape(layers=1, width=8, heads=4, kv_heads=4, head_size=2, mlp_width=8, vocabulary=9)


def small(**sections: Any) -> Any:
    base = {"model": {"path": "m"}, "data": {"train": {"name": "table"}}, "algorithm": {"name": "grpo"}}
    learner = {"zero_stage": 2, "tokens_per_microbatch": 8000} | sections.pop("learner", {})
    return from_mapping(base | {"learner": learner} | sections)


@pytest.mark.parametrize(
    ("memory", "fraction", "per_token", "expected"),
    [
        # It keeps 14 GB, 18 with gradients: half of 30 GB fit neither; what is left fits.
        (30, 0.4, 0, {}),
        (30, 0.6, 0, {"sampler.gpu_memory_utilization": 0.53}),
        (30, 0.05, 0, {"sampler.gpu_memory_utilization": 0.1}),
        # 18 GB and a GB for each thousand tokens.
        (30, 0.4, 10**6, {}),
        (25, 0.2, 10**6, {"learner.tokens_per_microbatch": 4000}),
        (12, 0.4, 0, {"learner.offload": "optimizer"}),
    ],
)
def test_the_smallest_change_is_proposed(memory, fraction, per_token, expected):
    config = small(sampler={"gpu_memory_utilization": fraction})
    found = propose(config, SHAPE, footprint(per_token), memory * GB, samples=True, smallest=1000)
    assert found.changes == expected
    with_them = changed(config, found.changes)
    assert fits(with_them, footprint(per_token)(with_them), memory * GB)
    assert footprint(per_token)(with_them).peak <= memory * GB


def test_nothing_below_the_sampler_and_the_weights_is_proposed():
    with pytest.raises(ResourceError, match=r"needs 2\.1\d GB of each GPU, which has 2 GB: \d+ MB are missing"):
        propose(small(), SHAPE, footprint(), 2 * GB, samples=True, smallest=1000)
