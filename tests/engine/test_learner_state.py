"""What a learner saves, another goes on from: bit for bit, and on other numbers of ranks and ZeRO stages."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmrl.config.sections import Config
from mmrl.engine.learner.learner_state import _Piece
from mmrl.engine.learner.optimizer_state import OptimizerState
from mmrl.engine.network import weights
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.policy import load_policy
from mmrl.engine.rank import RankEngine
from mmrl.engine.spec import EngineSpec
from mmrl.errors import ConfigError, DeviceMemoryError, NumericsError, ResourceError
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.system import failpoints
from mmrl.types import TrainingRow
from mmrl_algorithms.grpo import GRPO
from tests.cluster.process_ranks import run_together
from tests.proofs import families

FULL, SLOW = pytest.mark.full, pytest.mark.slow
LENGTHS = (4, 19, 7, 3, 11, 24, 6)
LEARNER = {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 4, "tokens_per_microbatch": 200}


@pytest.fixture(scope="module")
def rows(vision) -> list[TrainingRow]:
    """Rows that two micro-batches hold."""
    samples = vision.samples(LENGTHS)
    masks, advantages = [sample.mask for sample in samples], [np.full(n, (-1.0) ** n * n / 9) for n in LENGTHS]
    aggregation = Aggregation("token-mean")
    return list(training_rows(samples, masks, {"advantages": advantages}, np.arange(7), aggregation, range(7)).values())


@dataclass(frozen=True)
class Shot:
    """All that a learner goes on from: whole tensors by name, and Adam's count of steps."""

    tensors: dict[str, torch.Tensor]
    adam_step: int


def shot(learner: Any) -> Shot:
    """Collective."""
    state = OptimizerState(learner.trained.engine, learner.policy)
    named = learner.policy.named_weights(learner.policy.model.dtype, tied=False)
    found = {name: tensor.clone() for name, tensor in named}
    for name, weight in learner.policy.model.named_parameters():
        for kind in state.kinds(state.adam_step) if weight.requires_grad else ():
            found[f"{kind}/{name}"] = whole(learner, state, name, kind).clone()
    return Shot(found, state.adam_step)


def whole(learner: Any, state: OptimizerState, name: str, kind: str) -> torch.Tensor:
    """A tensor of the optimizer's state; with ZeRO, as DeepSpeed gathers it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    weight = state.weights[name]
    if learner.trained.engine.zero_optimization_stage() == 0:
        return state.get(name, kind, state.held(name)).view(weight.shape)
    return safe_get_full_fp32_param(weight) if kind == "master" else safe_get_full_optimizer_state(weight, kind)


def assert_same(one: Shot, other: Shot) -> None:
    assert one.adam_step == other.adam_step and one.tensors.keys() == other.tensors.keys()
    assert [name for name, tensor in one.tensors.items() if not torch.equal(tensor, other.tensors[name])] == []


def take_steps(learner: Any, rows: list[TrainingRow], count: int) -> list[Any]:
    """Takes optimizer steps; returns their results, bit by bit."""
    results = [learner.network("policy").update(rows) for _ in range(count)]
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
    """The work of each rank of a group with a learner of its own.

    Attributes:
        breaks: Rank 1 has a loss that is not finite first.
        steps: Before and after saving.
        shard_bytes: Most bytes of a file.
        stalls_s: Seconds that rank 1's disk takes for each file.
    """

    config: Config
    checkpoint: Path | None
    saves: Path
    steps: tuple[int, int]
    breaks: bool = False
    shard_bytes: int = weights.SHARD_BYTES
    stalls_s: float = 0.0


@dataclass(frozen=True)
class Told:
    """A rank's report of a job: the learner when it was built, when it was saved and at the end."""

    shots: tuple[Shot, Shot, Shot]
    updates: list[Any]
    drawn: float
    fault: str


def run_rank(_: Any, jobs: list[Job], folder: str, media: Any, rows: Any) -> list[Told]:
    rank = int(os.environ["RANK"])
    model, algorithm, own = ModelFolder.open(folder), GRPO(GRPO.Config()), rows[rank::2]
    worse = (
        [replace(row, columns={**row.columns, "advantages": row.advantages * np.inf}) for row in own] if rank else own
    )
    told = []
    patience = "torch.distributed.distributed_c10d.default_pg_timeout"
    if any(job.stalls_s for job in jobs):  # of every group but that of all ranks
        pytest.MonkeyPatch().setattr(patience, timedelta(seconds=jobs[0].stalls_s / 3))
    for job in jobs:
        random.seed(rank)
        weights.SHARD_BYTES, failpoints.inject = job.shard_bytes, stall(job.stalls_s * rank)
        spec = EngineSpec(job.config, model, media, algorithm, 2, with_sampler=False, checkpoint=job.checkpoint)
        with RankEngine(spec, "cpu").learning() as learner:
            drawn, built = random.random(), shot(learner)
            fault = learner.network("policy").update(worse).fault if job.breaks else ""
            take_steps(learner, own, job.steps[0])
            learner.save(job.saves)
            middle, updates = shot(learner), take_steps(learner, own, job.steps[1])
            told.append(Told((built, middle, shot(learner)), updates, drawn, fault))
    torch.distributed.destroy_process_group()
    return told


def stall(seconds: float) -> Callable[[str], None]:
    return lambda point: time.sleep(seconds if point == "save.shard" else 0)


@pytest.fixture
def two_ranks(vision, rows, warm_engines) -> Callable[[list[Job]], list[list[Told]]]:
    """Runs jobs on two ranks; returns what each rank tells of each job."""
    return lambda jobs: run_together(2, warm_engines, run_rank, jobs, vision.folder.path, vision.media, rows)


def assert_close(one: Shot, other: Shot) -> None:
    """Weights after the same step from the same state, summed in another order.

    A key's bias has no gradient but for rounding, of which AdamW makes steps of up to 1e-3 of its rate.
    """
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, other.tensors[name], rtol=1e-6, atol=5e-6, msg=name)


def assert_averages_close(one: Shot, other: Shot) -> None:
    """Gradients of the same two steps in bfloat16, on other ranks and in other rows.

    AdamW's first step has one size for all elements, those too whose gradient is rounding alone.
    """
    names = [name for name in one.tensors if name.startswith("exp_avg/")]
    both = [torch.cat([shot.tensors[name].flatten() for name in names]) for shot in (one, other)]
    assert float((both[0] - both[1]).norm()) < 0.1 * float(both[1].norm())


def grad_norm(updates: list[Any]) -> float:
    return float(updates[0][0]["policy/grad_norm"])


@pytest.mark.full
@pytest.mark.parametrize(
    "stages",
    [pytest.param((0, 3, 0), id="0-3-0"), *(pytest.param(s, marks=SLOW) for s in [(3, 0, 2), (2, 2, 1), (1, 1, 3)])],
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


YOUNG = "stage 3, adapters, bfloat16"
LORA = {"lora": {"rank": 2, "alpha": 4, "targets": ["language"]}}
VARIANTS: dict[str, dict[str, Any]] = {  # of two ranks
    "stage 3, bfloat16": {"learner": {"zero_stage": 3}, "model": {"dtype": "bfloat16"}},
    "stage 0": {"learner": {"zero_stage": 0}},
    "stage 1, bfloat16": {"learner": {"zero_stage": 1}, "model": {"dtype": "bfloat16"}},
    "stage 2, offload": {"learner": {"zero_stage": 2, "offload": "optimizer"}},
    "stage 3, offload": {"learner": {"zero_stage": 3, "offload": "parameters"}},
    "stage 3, adapters": {"learner": {"zero_stage": 3}, "model": LORA},
    "stage 2, adapters": {"learner": {"zero_stage": 2}, "model": LORA},
    YOUNG: {"learner": {"zero_stage": 3}, "model": LORA | {"dtype": "bfloat16"}},
}


@pytest.mark.full
def test_two_ranks_write_their_parts_in_bounded_files_and_one_rank_goes_on_and_back(
    two_ranks, vision, start, rows, tmp_path
):
    """The bound cuts weights, no partition is a multiple of it, and the ranks' parts differ in size."""
    bound = 30_004  # bytes, and 7,501 elements
    variants = {name: {**values, "learner": LEARNER | values["learner"]} for name, values in VARIANTS.items()}
    jobs = [
        Job(vision.config(**values), None, tmp_path / name, (2, 0), shard_bytes=bound)
        for name, values in variants.items()
    ]
    ranks = two_ranks(jobs)
    back = []
    for told, (name, values) in zip(ranks[0], variants.items(), strict=True):
        state, model = tmp_path / name / "state", values.get("model", {})
        sizes = {path.name: sum(t.nbytes for t in load_file(path).values()) for path in state.glob("optimizer-*")}
        by_rank = [sum(size for file, size in sizes.items() if file.startswith(f"optimizer-{r:05d}-")) for r in (0, 1)]
        assert max(sizes.values()) <= bound and len(sizes) >= 4 and min(by_rank) > 0.4 * sum(sizes.values()), name
        if "lora" not in model:
            index = json.loads((tmp_path / name / "model" / "model.safetensors.index.json").read_text())
            files = {path.name for path in (tmp_path / name / "model").glob("*.safetensors")}
            assert {*index["weight_map"].values()} == files and len(files) > 4
        assert not list((tmp_path / name).rglob(".*"))
        if name == YOUNG:  # merged layers gather the weights of others, forward and backward
            with start(learner=LEARNER | {"zero_stage": 0}, model=model).learning() as learner:
                take_steps(learner, rows, 2)
                assert_averages_close(told.shots[1], shot(learner))
        one = {"learner": LEARNER | {"zero_stage": 0}, "model": model}
        with start(**one, checkpoint=tmp_path / name).learning() as learner:
            assert learner.weight_version == 2
            assert_same(shot(learner), told.shots[1])
            learner.save(tmp_path / f"{name}, one")
        back.append(Job(vision.config(**values), tmp_path / f"{name}, one", tmp_path / f"{name}, back", (0, 0)))
    for told, again in zip(ranks[0], two_ranks(back)[0], strict=True):
        assert_same(again.shots[0], told.shots[1])


@pytest.mark.full
def test_gradients_that_are_reduced_beside_the_backward_pass_are_the_same(two_ranks, vision, tmp_path):
    """Two steps on two ranks, each of two micro-batches; buckets are smaller than some weights."""
    buckets = {"reduce_bucket_size": 6000, "allgather_bucket_size": 6000, "stage3_param_persistence_threshold": 0}
    jobs = []
    for stage, overlaps in itertools.product((1, 2, 3), (False, True)):
        learner = {"zero_stage": stage, "deepspeed": {"zero_optimization": buckets | {"overlap_comm": overlaps}}}
        config = vision.config(learner=LEARNER | learner | {"tokens_per_microbatch": 60})
        jobs.append(Job(config, None, tmp_path / f"{stage}{overlaps}", (2, 0)))
    for told in two_ranks(jobs):
        for one, other in zip(told[::2], told[1::2], strict=True):
            assert_same(one.shots[1], other.shots[1])
            before, after = (one.shots[i].tensors for i in (0, 1))
            assert not all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.full
def test_ranks_wait_for_a_disk_that_is_slower_than_the_patience_of_deepspeeds_group(two_ranks, vision, tmp_path):
    """Rank 1's disk takes 6 s for each of its files, and that group's collectives may take 2 s."""
    config = vision.config(learner=LEARNER | {"zero_stage": 3})
    job = Job(config, None, tmp_path / "saved", (0, 1), shard_bytes=2_000_000, stalls_s=6.0)
    ranks = two_ranks([job])
    assert 1 < len(list((tmp_path / "saved" / "model").glob("*.safetensors"))) < 6
    assert [told.fault for (told,) in ranks] == ["", ""]


def test_a_state_of_whole_tensors_in_rank_0s_files_is_read(start, rows, tmp_path):
    """Version 1."""
    with start(learner={"zero_stage": 0} | LEARNER).learning() as learner:
        take_steps(learner, rows, 2)
        learner.save(tmp_path)
        saved = shot(learner)
    state = tmp_path / "state"
    for path in state.glob("optimizer-*"):
        path.unlink()
    tensors = {name: tensor.contiguous() for name, tensor in saved.tensors.items() if "/" in name}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: tensors[name] for name in part}, state / f"optimizer-{number:05d}-of-00002.safetensors")
    content = json.loads((state / "learner.json").read_text())
    del content["kinds"]
    (state / "learner.json").write_text(json.dumps(content | {"version": 1, "tensors": len(tensors)}))
    for stage in (0, 3):
        with start(learner={"zero_stage": stage} | LEARNER, checkpoint=tmp_path).learning() as learner:
            assert_same(shot(learner), saved)


@pytest.mark.parametrize("shape", [(12,), (4, 3), (2, 3, 2), (1, 12)])
def test_no_more_rows_of_a_whole_tensor_are_read_than_the_elements_need(shape, tmp_path):
    values = torch.arange(12.0)
    save_file({"exp_avg/w": values.view(shape)}, tmp_path / "file")
    asked = []

    class File:
        def __init__(self, file: Any) -> None:
            self._file = file

        def get_slice(self, key: str) -> Any:
            return self

        def __getitem__(self, rows: slice) -> torch.Tensor:
            asked.append(rows.stop - rows.start)
            return self._file.get_slice("exp_avg/w")[rows]

    width = 12 // shape[0]
    with safe_open(tmp_path / "file", "pt") as file:
        piece = _Piece(range(100, 112), tmp_path / "file", "exp_avg/w", shape)
        for first, last in itertools.combinations(range(13), 2):
            found = piece.read(File(file), range(100 + first, 100 + last))
            assert found.tolist() == list(range(first, last))
            assert asked[-1] * width < last - first + 2 * width


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
        result = learner.network("policy").update(rows)
        handle.remove()
        assert "learner.tokens_per_microbatch is 100 from now on" in result.notice
        assert result.metrics == expected[0][0]
        assert take_steps(learner, rows, 1) == expected[1:]
        assert_same(shot(learner), end)
        handle = run_out(learner, 9)
        with pytest.raises(ResourceError, match="out of memory in the update: CUDA") as caught:
            learner.network("policy").update(rows)
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
            learner.network("policy").update([longest])
    assert len(passes) == 1


@pytest.mark.parametrize(("stage", "phase"), pairs("log-probs", "reference log-probs"))
def test_out_of_memory_in_a_forward_phase_halves_the_microbatches_once_with_the_same_numbers(stage, phase, start, rows):
    samples = [row.sample for row in rows]
    settings = LEARNER | {"zero_stage": stage, "share_prefix": "off"}
    kl = {"kl": {"coef": 0.1}} if phase == "reference log-probs" else {}
    with start(algorithm=kl, learner=settings).learning() as learner:
        compute = learner.network("policy" if phase == "log-probs" else "reference").score
        expected, passes = compute(samples), []
        policy = learner.policy if phase == "log-probs" else learner.network("reference").policy
        layer = policy.model.base_model.language_model.layers[0]

        def fail(*_: Any) -> None:
            passes.append(1)
            if len(passes) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        handle = layer.register_forward_hook(fail)
        found = compute(samples)
        assert len(passes) > 2
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
        # These rows lack the reference's log-probs, with which an update would go on.
        notice = learner.trained._batches.budget.take_notice() if kl else learner.network("policy").update(rows).notice
        assert notice.startswith(f"out of memory in {phase} (CUDA") and "is 100 from now on" in notice
        assert learner.trained._batches.budget.take_notice() == ""
        passes.clear()
        with pytest.raises(DeviceMemoryError, match=f"out of memory in {phase}: CUDA") as caught:
            compute(samples)
        handle.remove()
        assert caught.value.exit_code == 5 and "tokens_per_microbatch" in caught.value.remedy


def test_out_of_memory_where_no_microbatch_is_smaller_is_an_error_with_the_phase(start, rows, tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    samples = [row.sample for row in rows]
    with start(learner=LEARNER | {"zero_stage": 0}).learning() as learner:
        handle = learner.policy.register_forward_hook(fail)
        with pytest.raises(DeviceMemoryError, match=r"in log-probs: CUDA error: CUBLAS"):
            learner.network("policy").score(samples, way="single")
        handle.remove()
        monkeypatch.setattr("mmrl.engine.network.plain_model.take_weights", fail)
        with pytest.raises(DeviceMemoryError, match="in the log-probs in a wider type: CUDA") as caught:
            learner.network("policy").score(samples[:1], way="wide")
        assert not caught.value.microbatches_help
        monkeypatch.setattr("mmrl.engine.network.plain_model.empty_model", fail)
        assert learner.network("policy").score(samples[:1], way="wide") == []
        monkeypatch.setattr("mmrl.engine.learner.trained_network.save_model", fail)
        with pytest.raises(DeviceMemoryError, match="in the checkpoint: CUDA"):
            learner.save(tmp_path)


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", families())
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
    for name in filter(folder.family.turned_in_files, whole):  # save_pretrained leaves them as the model has them
        whole[name] = whole[name].transpose(1, 2)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    assert {p.name for p in (tmp_path / "parts").glob("model*")} == {*parts, "model.safetensors.index.json"}
    again = load_policy(replace(folder, path=str(tmp_path / "parts")), "cpu", "float32", freeze=(), temperature=1.0)
    assert torch.equal(again.model.get_output_embeddings().weight, policy.model.get_output_embeddings().weight)


def test_saving_holds_no_more_than_a_shard(start, rows, tmp_path, monkeypatch):
    """Counted where a rank would copy: each tensor that is handed over, until it is written."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 200_000)
    held: list[int] = []
    write = weights.write_shards

    def watched(tensors: Iterable[Any], files: Any, write_file: Any, *rest: Any) -> None:
        def weigh(number: int, shard: dict[str, torch.Tensor]) -> None:
            held.append(sum(tensor.nbytes for tensor in shard.values()))
            write_file(number, shard)

        write(tensors, files, weigh, *rest)

    monkeypatch.setattr("mmrl.engine.network.weights.write_shards", watched)
    with start(learner={"zero_stage": 3} | LEARNER).learning() as learner:
        largest = max(4 * weights.numel(p) for p in learner.policy.parameters())
        total = sum(4 * weights.numel(p) for p in learner.policy.parameters())
        learner.network("policy").update(rows)
        learner.save(tmp_path)
    assert max(held) <= max(200_000, largest) and sum(held) == total
    assert max(held) < total / 5
    parts = {path: sum(t.nbytes for t in load_file(path).values()) for path in (tmp_path / "state").glob("optimizer*")}
    assert max(parts.values()) <= 200_000 and sum(parts.values()) == 2 * total and len(parts) > 9


def test_a_full_disk_leaves_the_learner_as_it_was(start, rows, tmp_path, monkeypatch):
    reached = ""

    def full(point: str) -> None:
        if point == reached:
            raise OSError(28, "No space left on device", str(tmp_path / "a"))

    with start(learner={"zero_stage": 3} | LEARNER).learning() as learner:
        monkeypatch.setattr(failpoints, "inject", full)
        for reached in ("save.shard", "save.part", "save.state"):  # noqa: B007 - the hook reads it
            with pytest.raises(ResourceError, match=r"cannot be written: .*No space left on device") as caught:
                learner.save(tmp_path / "a")
            assert caught.value.exit_code == 5 and str(tmp_path) in caught.value.where
        monkeypatch.setattr(failpoints, "inject", None)
        assert not learner.network("policy").update(rows).fault
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
        assert not learner.network("policy").update(rows).fault


def _drop_tensor(state: Path) -> None:
    (path,) = state.glob("optimizer-*")
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)


def _write_twice(state: Path) -> None:
    (path,) = state.glob("optimizer-*")
    save_file(dict([*load_file(path).items()][:1]), path.with_name("optimizer-00001-00001.safetensors"))


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (lambda state: (state / "learner.json").write_text("{"), ResourceError, "cannot be read"),
        (lambda state: next(state.glob("optimizer-*")).write_bytes(b"pickle"), ResourceError, "cannot be read"),
        (lambda state: (state / "generators.safetensors").unlink(), ResourceError, "cannot be read"),
        (_drop_tensor, ResourceError, "tensors of the optimizer are there, whole and once"),
        (_write_twice, ResourceError, "tensors of the optimizer are there, whole and once"),
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
        learner.network("policy").update(rows)
        learner.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("model", "said"), [({"freeze": ["vision"]}, "other trained weights"), ({"dtype": "bfloat16"}, "model.dtype")]
)
def test_a_checkpoint_of_other_settings_is_refused(model, said, saved, start):
    with pytest.raises(ConfigError, match=said):
        start(learner={"zero_stage": 0} | LEARNER, model=model, checkpoint=saved)


@pytest.mark.parametrize(
    ("stage", "held", "own"),
    [
        (0, [range(7)] * 3, [range(2), range(2, 4), range(4, 7)]),
        (3, [range(3), range(3, 6), range(6, 7)], [range(3), range(3, 6), range(6, 7)]),
    ],
)
def test_ranks_share_out_a_weight_that_does_not_divide_evenly(stage, held, own, monkeypatch):
    """At stage 3 each rank's share has three elements, and the last rank's is filled up."""
    weight = torch.nn.Parameter(torch.zeros(7))
    weight.ds_tensor = torch.zeros(3)
    optimizer = SimpleNamespace(param_groups=[{"params": [weight]}], state={})
    engine = SimpleNamespace(optimizer=optimizer, zero_optimization_stage=lambda: stage)
    policy = SimpleNamespace(model=SimpleNamespace(named_parameters=lambda: [("w", weight)], dtype=torch.float32))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    states = []
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        states.append(OptimizerState(engine, policy))
    assert [state.held("w") for state in states] == held
    assert [state.own("w") for state in states] == own


def test_no_file_of_the_state_is_a_pickle(saved):
    for path in (saved / "state").iterdir():
        if path.suffix == ".json":
            assert json.loads(path.read_text())["optimizer_steps"] == 1
        else:
            with safe_open(path, "pt") as file:
                assert list(file.keys())
