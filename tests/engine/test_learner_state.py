"""What a learner saves, another goes on from: bit for bit, and on other numbers of ranks and ZeRO stages."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import random
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmrl.cluster.process import host_meeting
from mmrl.config.sections import Config
from mmrl.engine import device, learner_state, weights
from mmrl.engine.family import FAMILIES
from mmrl.engine.folder import ModelFolder
from mmrl.engine.learner_state import OptimizerState
from mmrl.engine.policy import load_policy
from mmrl.engine.rank import RankEngine
from mmrl.engine.spec import EngineSpec
from mmrl.errors import ConfigError, NumericsError, ResourceError
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.system import failpoints
from mmrl.types import TrainingRow
from mmrl_algorithms.grpo import GRPO

FULL, SLOW = pytest.mark.full, pytest.mark.slow
LENGTHS = (4, 19, 7, 3, 11, 24, 6)
LEARNER = {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 4, "tokens_per_microbatch": 200}


@pytest.fixture(scope="module")
def rows(vision) -> list[TrainingRow]:
    """Rows that two micro-batches hold."""
    samples = vision.samples(LENGTHS)
    masks, advantages = [sample.mask for sample in samples], [np.full(n, (-1.0) ** n * n / 9) for n in LENGTHS]
    aggregation = Aggregation("token-mean")
    return list(training_rows(samples, masks, advantages, np.arange(7), aggregation, range(7)).values())


@dataclass(frozen=True)
class Shot:
    """All that a learner goes on from: whole tensors by name, and Adam's count of steps."""

    tensors: dict[str, torch.Tensor]
    adam_step: int


def shot(learner: Any) -> Shot:
    state = OptimizerState(learner._engine, learner.policy)
    named = learner.policy.named_weights(learner.policy.model.dtype, tied=False)
    tensors = {name: tensor.clone() for pairs in (named, state.tensors()) for name, tensor in pairs}
    return Shot(tensors, state.adam_step)


def assert_same(one: Shot, other: Shot) -> None:
    assert one.adam_step == other.adam_step and one.tensors.keys() == other.tensors.keys()
    assert [name for name, tensor in one.tensors.items() if not torch.equal(tensor, other.tensors[name])] == []


def take_steps(learner: Any, rows: list[TrainingRow], count: int) -> list[Any]:
    """What updates tell, bit by bit."""
    results = [learner.update(rows) for _ in range(count)]
    return [(r.metrics, np.concatenate(r.logprobs).tobytes()) for r in results]


def pairs(one: str, other: str) -> list[Any]:
    """ZeRO stages with each of two values: in the short tier stage 0 with one and stage 3 with the other."""
    short, slow = {(0, one), (3, other)}, {1, 2}
    marks = {pair: SLOW if pair[0] in slow else FULL for pair in itertools.product(range(4), (one, other))}
    return [pytest.param(*pair, marks=[] if pair in short else mark) for pair, mark in marks.items()]


@pytest.mark.parametrize("steps", [pytest.param(0, marks=SLOW), 2])
@pytest.mark.parametrize(("stage", "dtype"), pairs("float32", "bfloat16"))
def test_a_restored_learner_is_the_unbroken_one_bit_for_bit(stage, dtype, steps, start, rows, tmp_path):
    freeze = ["vision"] if dtype == "float32" else []
    sections = {"learner": LEARNER | {"zero_stage": stage}, "model": {"dtype": dtype, "freeze": freeze}}
    with start(**sections).learning() as learner:
        take_steps(learner, rows, steps)
        learner.save(tmp_path)
        saved, told, end = shot(learner), take_steps(learner, rows, 2), shot(learner)
    with start(**sections, checkpoint=tmp_path).learning() as learner:
        assert learner.weight_version == steps
        assert_same(shot(learner), saved)
        assert take_steps(learner, rows, 2) == told
        assert_same(shot(learner), end)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "offload"),
    [*(pytest.param(stage, "optimizer", marks=SLOW) for stage in (1, 3)), (2, "optimizer"), (3, "parameters")],
)
def test_what_is_offloaded_is_trained_saved_and_restored_as_what_is_not(stage, offload, start, rows, tmp_path):
    def learning(offload: str, checkpoint: Path | None = None) -> Any:
        return start(learner=LEARNER | {"zero_stage": stage, "offload": offload}, checkpoint=checkpoint).learning()

    with learning("none") as learner:
        take_steps(learner, rows, 2)
        expected = shot(learner)
    with learning(offload) as learner:
        take_steps(learner, rows, 2)
        learner.save(tmp_path)
        saved, told, end = shot(learner), take_steps(learner, rows, 2), shot(learner)
        settings = learner.settings["zero_optimization"]
        assert {"offload_optimizer", "offload_param"} & settings.keys() == (
            {"offload_optimizer", "offload_param"} if offload == "parameters" else {"offload_optimizer"}
        )
    for name, tensor in expected.tensors.items():  # another order of sums in the norm that gradients are clipped to
        torch.testing.assert_close(saved.tensors[name], tensor, rtol=1e-4, atol=1e-6)
    with learning(offload, tmp_path) as learner:
        assert_same(shot(learner), saved)
        assert take_steps(learner, rows, 2) == told
        assert_same(shot(learner), end)
    with learning("none", tmp_path) as learner:
        assert_same(shot(learner), saved)


@dataclass(frozen=True)
class Job:
    """What each rank of a group does with a learner of its own.

    Attributes:
        breaks: Rank 1 has a loss that is not finite first.
        steps: Before and after saving.
    """

    config: Config
    checkpoint: Path | None
    saves: Path
    steps: tuple[int, int]
    breaks: bool = False


@dataclass(frozen=True)
class Told:
    """What a rank tells of a job: the learner when it was built, when it was saved and at the end."""

    shots: tuple[Shot, Shot, Shot]
    updates: list[Any]
    drawn: float
    fault: str


def run_rank(rank: int, port: int, jobs: list[Job], folder: str, media: Any, rows: Any, results: Any) -> None:
    os.environ.update(device.environment("cpu"))
    places = {"rank": rank, "node_rank": rank, "world_size": 2, "address": "127.0.0.1", "port": port}
    os.environ.update(device.rank_environment("cpu", **places))
    torch.set_num_threads(1)
    model, algorithm, own = ModelFolder.open(folder), GRPO(GRPO.Config()), rows[rank::2]
    worse = [replace(row, advantages=row.advantages * np.inf) for row in own] if rank else own
    told = []
    for job in jobs:
        random.seed(rank)
        spec = EngineSpec(job.config, model, media, algorithm, 2, with_sampler=False, checkpoint=job.checkpoint)
        with RankEngine(spec, "cpu").learning() as learner:
            drawn, built = random.random(), shot(learner)
            fault = learner.update(worse).fault if job.breaks else ""
            take_steps(learner, own, job.steps[0])
            learner.save(job.saves)
            middle, updates = shot(learner), take_steps(learner, own, job.steps[1])
            told.append(Told((built, middle, shot(learner)), updates, drawn, fault))
    results.put(pickle.dumps((rank, told)))  # as bytes: a queue would share the memory of a process that ends
    torch.distributed.destroy_process_group()


@pytest.fixture
def two_ranks(vision, rows) -> Callable[[list[Job]], list[list[Told]]]:
    """Runs jobs on two ranks; returns what each rank tells of each job."""

    def run(jobs: list[Job]) -> list[list[Told]]:
        context = multiprocessing.get_context("spawn")
        results, bound = context.SimpleQueue(), socket.create_server(("127.0.0.1", 0))
        port, meeting = bound.getsockname()[1], host_meeting(bound)
        arguments = (port, jobs, vision.folder.path, vision.media, rows, results)
        ranks = [context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        told = dict(pickle.loads(results.get()) for _ in ranks)
        for process in ranks:
            process.join()
        del meeting
        return [told[0], told[1]]

    return run


def assert_close(one: Shot, other: Shot) -> None:
    """Weights after the same step from the same state, summed in another order.

    A key's bias has no gradient but for rounding, of which AdamW makes steps of up to 1e-3 of its rate.
    """
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, other.tensors[name], rtol=1e-6, atol=5e-6, msg=name)


def grad_norm(updates: list[Any]) -> float:
    return float(updates[0][0]["policy/grad_norm"])


@pytest.mark.full
@pytest.mark.parametrize(
    "stages",
    [pytest.param((0, 3, 2), id="0-3-2"), *(pytest.param(s, marks=SLOW) for s in [(3, 0, 1), (2, 2, 0), (1, 1, 3)])],
)
def test_one_rank_goes_on_as_two_and_two_as_one_at_any_stage(stages, two_ranks, vision, start, rows, tmp_path):
    """One rank, then two at another stage, twice, then one at a third stage."""
    first, second, third = ({"learner": LEARNER | {"zero_stage": stage}} for stage in stages)
    with start(**first).learning() as learner:
        take_steps(learner, rows, 1)
        learner.save(tmp_path / "one")
        one, told = shot(learner), take_steps(learner, rows, 1)
        after_one = shot(learner)
    config = vision.config(**second)
    jobs = [
        Job(config, tmp_path / "one", tmp_path / "still", (0, 1)),
        Job(config, tmp_path / "one", tmp_path / "two", (1, 1), breaks=True),
        Job(config, tmp_path / "two", tmp_path / "again", (0, 1)),
    ]
    ranks = two_ranks(jobs)
    unbroken, broken, restored = ranks[0]
    assert_same(unbroken.shots[0], one)
    assert grad_norm(unbroken.updates) == pytest.approx(grad_norm(told), rel=1e-5)
    assert_close(unbroken.shots[2], after_one)
    # The other rank's loss was not finite: no rank took the step, and the next one knows nothing of it.
    for rank in ranks:
        assert rank[1].fault.startswith("the loss is not finite: prompt ids ")
    assert_same(broken.shots[1], unbroken.shots[2])
    assert_same(restored.shots[0], broken.shots[1])
    assert_same(restored.shots[2], broken.shots[2])
    assert [rank[2].updates for rank in ranks] == [rank[1].updates for rank in ranks]
    draws = {(rank, number): told.drawn for rank, jobs in enumerate(ranks) for number, told in enumerate(jobs)}
    assert draws[0, 2] != draws[1, 2] and draws[1, 0] == draws[1, 1]  # each rank has its own generators back
    with start(**third, checkpoint=tmp_path / "two").learning() as learner:
        assert learner.weight_version == 2
        assert_same(shot(learner), broken.shots[1])
        told = take_steps(learner, rows, 1)
        assert grad_norm(told) == pytest.approx(grad_norm(broken.updates), rel=1e-5)
        assert_close(shot(learner), broken.shots[2])


@pytest.mark.parametrize(("stage", "where"), pairs("forward", "backward"))
def test_out_of_memory_halves_the_microbatches_once_with_the_same_gradient(stage, where, start, rows):
    settings = LEARNER | {"zero_stage": stage, "share_prefix": "off"}  # else all rows fit into one micro-batch

    def run_out(learner: Any, times: int) -> Any:
        """In that many passes of the language model's first layer, the second of an update."""
        layer, passes = learner.policy.model.base_model.language_model.layers[0], iter(range(99))

        def fail(*_: Any) -> None:
            if 1 <= next(passes) <= times:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        hook = layer.register_forward_hook if where == "forward" else layer.register_full_backward_hook
        return hook(fail)

    with start(learner=settings | {"tokens_per_microbatch": 100}).learning() as learner:
        expected = take_steps(learner, rows, 2)
        end = shot(learner)
    with start(learner=settings).learning() as learner:
        handle = run_out(learner, 1)
        result = learner.update(rows)
        handle.remove()
        assert "learner.tokens_per_microbatch is 100 from now on" in result.notice
        assert result.metrics == expected[0][0]
        assert take_steps(learner, rows, 1) == expected[1:]
        assert_same(shot(learner), end)
        handle = run_out(learner, 9)
        with pytest.raises(ResourceError, match="out of memory in the update: CUDA") as caught:
            learner.update(rows)
        handle.remove()
        for key in ("tokens_per_microbatch", "gradient_checkpointing", "gpu_memory_utilization", "zero_stage"):
            assert key in caught.value.remedy


def test_out_of_memory_with_one_long_sample_is_an_error_at_once(start, rows):
    longest = max(rows, key=lambda row: row.sample.num_tokens)
    budget = longest.sample.num_tokens + 1
    passes = []

    def fail(*_: Any) -> None:
        passes.append(1)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    with start(learner=LEARNER | {"zero_stage": 0, "tokens_per_microbatch": budget}).learning() as learner:
        learner.policy.register_forward_hook(fail)
        with pytest.raises(ResourceError, match="can't allocate memory"):
            learner.update([longest])
    assert len(passes) == 1


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_have_the_names_that_save_pretrained_gives(family, as_on_hub, bench, tmp_path, monkeypatch):
    folder = bench(family, as_on_hub).folder
    policy = load_policy(folder, "cpu", "float32", freeze=(), temperature=1.0)
    policy.model.save_pretrained(tmp_path / "whole")
    monkeypatch.setattr(weights, "SHARD_BYTES", 300_000)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    failures = weights.Failures()
    weights.save_model(policy, folder, tmp_path / "parts", failures)
    assert failures.first is None
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    parts = {name: load_file(tmp_path / "parts" / name) for name in sorted(set(index["weight_map"].values()))}
    assert len(parts) > 3 and next(iter(parts)) == f"model-00001-of-{len(parts):05d}.safetensors"
    assert {name: file for file, part in parts.items() for name in part} == index["weight_map"]
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    found = {name: tensor for part in parts.values() for name, tensor in part.items()}
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    assert {p.name for p in (tmp_path / "parts").glob("model*")} == {*parts, "model.safetensors.index.json"}
    again = load_policy(replace(folder, path=str(tmp_path / "parts")), "cpu", "float32", freeze=(), temperature=1.0)
    assert torch.equal(again.model.get_output_embeddings().weight, policy.model.get_output_embeddings().weight)


def test_saving_holds_no_more_than_a_shard(start, tmp_path, monkeypatch):
    """Counted where a rank would copy: each tensor that is handed over, until it is written."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 200_000)
    held: list[int] = []
    write = weights.write_shards

    def watched(tensors: Iterable[Any], files: Any, write_file: Any, *rest: Any) -> None:
        def weigh(number: int, shard: dict[str, torch.Tensor]) -> None:
            held.append(sum(tensor.nbytes for tensor in shard.values()))
            write_file(number, shard)

        write(tensors, files, weigh, *rest)

    monkeypatch.setattr("mmrl.engine.weights.write_shards", watched)
    monkeypatch.setattr("mmrl.engine.learner_state.write_shards", watched)
    with start(learner={"zero_stage": 3}).learning() as learner:
        largest = max(4 * weights.numel(p) for p in learner.policy.parameters())
        total = sum(4 * weights.numel(p) for p in learner.policy.parameters())
        learner.save(tmp_path)
    assert max(held) <= max(200_000, largest) and sum(held) == total
    assert max(held) < total / 5


def test_a_full_disk_leaves_the_learner_as_it_was(start, rows, tmp_path, monkeypatch):
    reached = ""

    def full(point: str) -> None:
        if point == reached:
            raise OSError(28, "No space left on device", str(tmp_path / "a"))

    with start(learner={"zero_stage": 3} | LEARNER).learning() as learner:
        monkeypatch.setattr(failpoints, "inject", full)
        for reached in ("save.shard", "save.state"):  # noqa: B007 - the hook reads it
            with pytest.raises(ResourceError, match=r"cannot be written: .*No space left on device") as caught:
                learner.save(tmp_path / "a")
            assert caught.value.exit_code == 5 and str(tmp_path) in caught.value.where
        monkeypatch.setattr(failpoints, "inject", None)
        assert not learner.update(rows).fault
        learner.save(tmp_path / "b")
    with start(learner={"zero_stage": 3} | LEARNER, checkpoint=tmp_path / "b").learning() as learner:
        assert learner.weight_version == 1


def test_weights_that_are_not_finite_are_named_and_not_saved(start, rows, tmp_path):
    with start(learner={"zero_stage": 0} | LEARNER).learning() as learner:
        weight = learner.policy.model.model.language_model.norm.weight
        good = weight.detach().clone()
        with torch.no_grad():
            weight[3] = np.nan
        with pytest.raises(NumericsError, match="1 weights are not finite") as caught:
            learner.save(tmp_path)
        assert caught.value.where == "model.language_model.norm.weight" and not (tmp_path / "state").exists()
        with torch.no_grad():
            weight.copy_(good)
        assert not learner.update(rows).fault


def _drop_tensor(state: Path) -> None:
    (path,) = state.glob("optimizer-*")
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (lambda state: (state / "learner.json").write_text("{"), ResourceError, "cannot be read"),
        (lambda state: next(state.glob("optimizer-*")).write_bytes(b"pickle"), ResourceError, "cannot be read"),
        (lambda state: (state / "generators.safetensors").unlink(), ResourceError, "cannot be read"),
        (_drop_tensor, ResourceError, "tensors of the optimizer are there"),
    ],
)
def test_a_damaged_state_is_refused(spoil, kind, said, saved, start):
    spoil(saved / "state")
    with pytest.raises(kind, match=said) as caught:
        start(learner={"zero_stage": 0} | LEARNER, checkpoint=saved)
    assert "state" in caught.value.where and caught.value.remedy


@pytest.fixture
def saved(start, rows, tmp_path) -> Path:
    """A checkpoint after one step, without ZeRO."""
    with start(learner={"zero_stage": 0} | LEARNER).learning() as learner:
        learner.update(rows)
        learner.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("model", "said"), [({"freeze": ["vision"]}, "other trained weights"), ({"dtype": "bfloat16"}, "model.dtype")]
)
def test_a_checkpoint_of_other_settings_is_refused(model, said, saved, start):
    with pytest.raises(ConfigError, match=said):
        start(learner={"zero_stage": 0} | LEARNER, model=model, checkpoint=saved)


def test_ranks_share_a_weight_out_evenly_with_zeros_at_its_end(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    parts = []
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        parts.append(learner_state._part(torch.arange(1.0, 8.0)[:, None], 3).tolist())
    assert parts == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]


def test_no_file_of_the_state_is_a_pickle(saved):
    for path in (saved / "state").iterdir():
        if path.suffix == ".json":
            assert json.loads(path.read_text())["optimizer_steps"] == 1
        else:
            with safe_open(path, "pt") as file:
                assert list(file.keys())
