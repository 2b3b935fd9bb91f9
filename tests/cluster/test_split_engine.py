"""An engine whose sampler has ranks of its own, on forks: its weights, its audit, and ranks that hang."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.spec import EngineSpec
from mmrl.engine.transfer import weights_group
from mmrl.engine.transfer.snapshot import BUCKET_BYTES
from mmrl.engine_api import Engine, SamplingRequest
from mmrl.errors import RankLostError, SamplersRestarted
from mmrl.types import TrainingRow
from mmrl_algorithms.grpo import GRPO
from tests.cluster.process_ranks import ProcessRanks

pytestmark = pytest.mark.full
VOCABULARY = 151_936


@pytest.fixture
def start(start_ranks: Callable[[EngineSpec], Any]) -> Iterator[Callable[..., Any]]:
    """Starts an engine of ranks apart for a bench."""
    engines: list[Any] = []

    def build(bench: Any, samplers: int, learners: int, **sections: Any) -> Any:
        cluster = {"name": "ray", "sampler_ranks": samplers, "learner_ranks": learners}
        config = bench.config(cluster=cluster, **sections)
        folder = ModelFolder.open(config.model.path)
        engines.append(start_ranks(EngineSpec(config, folder, bench.media, GRPO(GRPO.Config()), 2, with_sampler=True)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def sampled(engine: Engine, bench: Any, version: int | None = None) -> list[Any]:
    """A short completion of each prompt, with the version of its weights."""
    requests = [SamplingRequest(prompt, 1, 1.0, 4, seed=i) for i, prompt in enumerate(bench.prompts)]
    with engine.sampling(version) as sampler:
        found = dict(sampler.generate(requests))
    return [found[index].rollouts[0] for index in range(len(requests))]


def learned(engine: Engine, bench: Any) -> None:
    """One optimizer step."""
    samples = bench.samples([5, 7, 3, 6])
    rows = [
        TrainingRow(s, 1 / 4, s.mask, {"advantages": np.where(s.mask, i - 1.5, 0.0)}) for i, s in enumerate(samples)
    ]
    with engine.learning() as learner:
        learner.network("policy").update(rows)


def versions(worker: Any) -> list[int]:
    return list(worker._engine._snapshots.versions)


def of_side(engine: Any, side: str, function: Callable[..., Any]) -> list[Any]:
    group = {"sampler": engine._samplers, "learner": engine._learners}[side]
    return [group._ranks.call(rank, function).result() for rank in range(len(group.nodes))]


def test_every_rank_holds_the_learners_weights_after_each_sync_and_sees_its_images(vision: Any, start: Any) -> None:
    """Three samplers, two learners: each weight of the learner is looked up in each sampler by hashes of its rows."""
    engine = start(vision, 3, 2, sampler={"name": "hf"}, learner={"lr": 1e-2, "zero_stage": 3})
    reports = []
    for step in range(2):
        found = engine.inspect(vision.prompts)
        assert found.weights.missing == () and found.weights.versions == (step, step)
        assert [image.same_pixels for image in found.images] == [True, True]
        assert all(image.sampler_features == image.learner_features == image.image_tokens for image in found.images)
        reports.append(found.weights.total)
        learned(engine, vision)
    assert len(set(reports)) == 1 and reports[0] > 20
    held = engine._samplers.all("inspect_sampler", [], [])  # of the step before: the hashes tell other weights apart
    compared = engine._learners.all("compare_weights", each=[[held[0][0]], []])
    assert len(compared[0][0].missing) > 20


def test_versions_are_sampled_with_as_asked_and_kept_as_long(bench: Any, start: Any) -> None:
    text = bench("qwen2")
    own = {"sampler": {"name": "hf"}, "learner": {"lr": 1e-2, "zero_stage": 0}, "trainer": {"staleness": 2}}
    engine = start(text, 1, 1, **own)
    firsts, published = [], [engine.publish()]
    for _ in range(2):
        firsts.append([rollout.token_ids.tolist() for rollout in sampled(engine, text, published[-1])])
        learned(engine, text)
        published.append(engine.publish())
    assert published == [0, 1, 2] and engine.publish() == 2
    assert of_side(engine, "learner", versions) == [[1, 2]]  # what is sampled with, and what was not taken yet
    learned(engine, text)
    assert engine.publish() == 3 and of_side(engine, "learner", versions) == [[1, 2, 3]]
    for version, kept in [(1, [1, 2, 3]), (2, [2, 3]), (3, [3])]:
        assert {rollout.weight_version for rollout in sampled(engine, text, version)} == {version}
        assert of_side(engine, "learner", versions) == [kept]
    assert sampled(engine, text)[0].weight_version == 3
    with engine.sampling(3) as sampler, engine.learning() as learner:  # both at once, each with what it needs
        assert list(sampler.generate([])) == [] and "policy" in learner.networks


def test_a_vocabulary_of_real_size_crosses_buckets_to_uneven_ranks(
    bench: Any, models: Callable[[str], Path], start: Any, tmp_path: Path
) -> None:
    import transformers

    text, folder = bench("qwen2"), tmp_path / "model"
    shutil.copytree(models("qwen2"), folder)
    config = transformers.AutoConfig.from_pretrained(folder, vocab_size=VOCABULARY, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    size = sum(weight.numel() for weight in model.parameters()) * 4
    own = {"sampler": {"name": "hf"}, "learner": {"lr": 1e-2, "zero_stage": 3}}
    engine = start(text, 1, 2, model={"path": str(folder), "dtype": "float32"}, **own)
    learned(engine, text)
    assert engine.inspect(text.prompts[:1]).weights.missing == ()
    sent = of_side(engine, "learner", sent_bytes)
    assert sent[1] == (0, 0) and sent[0][0] == -(-sent[0][1] // BUCKET_BYTES) > 1 and 0 <= sent[0][1] - size < 2000


def sent_bytes(worker: Any) -> tuple[int, int]:
    snapshots = worker._engine._snapshots
    newest = snapshots.of(max(snapshots.versions))
    return len(newest.buckets), newest.num_bytes


def lose_patience(worker: Any) -> None:
    weights_group.WAIT_S = 3.0


def test_a_sampler_that_hangs_in_a_sync_is_told_by_name_and_started_again(bench: Any, start: Any) -> None:
    text, told = bench("qwen2"), list[str]()
    engine = start(text, 2, 1, sampler={"name": "hf"}, learner={"lr": 1e-2, "zero_stage": 0})
    engine._progress = told.append
    for side in ("sampler", "learner"):
        of_side(engine, side, lose_patience)
    sampled(engine, text)
    pids = [rank["pid"] for rank in engine.describe()["ranks"] if rank["side"] == "sampler"]
    learned(engine, text)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(SamplersRestarted, match=r"^sampler rank 1 did not take version 1 of the weights"):
        sampled(engine, text)
    assert len(told) == 1 and "starts again, and the learner goes on" in told[0]
    assert {rollout.weight_version for rollout in sampled(engine, text)} == {1}
    after = [rank["pid"] for rank in engine.describe()["ranks"] if rank["side"] == "sampler"]
    assert after[0] == pids[0] and after[1] != pids[1]
    assert engine.inspect(text.prompts).weights.missing == ()


def test_a_sampler_that_ends_while_it_has_nothing_to_do_is_there_for_the_next_step(bench: Any, start: Any) -> None:
    text = bench("qwen2")
    engine = start(text, 1, 1, sampler={"name": "hf"}, learner={"lr": 1e-2, "zero_stage": 0})
    expected = [rollout.token_ids.tolist() for rollout in sampled(engine, text)]
    ranks: ProcessRanks = engine._ranks
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    while not engine._samplers.failed:
        time.sleep(0.05)
    learned_before = engine.publish()  # the learner notices nothing
    with pytest.raises(SamplersRestarted, match="sampler rank 0 is gone"):
        sampled(engine, text)
    assert [rollout.token_ids.tolist() for rollout in sampled(engine, text, learned_before)] == expected


def test_an_abandoned_engine_names_the_side_that_is_late(bench: Any, start: Any) -> None:
    text = bench("qwen2")
    engine = start(text, 1, 1, sampler={"name": "hf"}, learner={"lr": 1e-2, "zero_stage": 0})
    pid = next(rank["pid"] for rank in engine.describe()["ranks"] if rank["side"] == "learner")
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(1, engine.abandon, [RankLostError("the step takes too long", where="step 3")])
    timer.start()
    with pytest.raises(RankLostError, match="the step takes too long") as caught:
        learned(engine, text)
    assert "step 3; no answer from learner rank 0 on host (`" in caught.value.where
    assert "sampler" not in caught.value.where
    with pytest.raises(RankLostError, match="the step takes too long"):  # the whole attempt is over
        sampled(engine, text)
