"""The driver's side of a group of ranks, on ranks that are threads and sample nothing."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmrl.cluster import guard
from mmrl.cluster.failures import DeadRankError
from mmrl.cluster.files import Node
from mmrl.cluster.group import RankGroup
from mmrl.cluster.jobs import Installation, Rendezvous
from mmrl.cluster.launch import check_installations, check_sets, find_shared_files, send_checkpoint, send_model
from mmrl.cluster.nodes import fingerprints, installed_versions
from mmrl.cluster.process import forget_shared_memory, forget_stale_builds
from mmrl.cluster.ranks import RankLocation
from mmrl.cluster.ray_ranks import too_few_devices
from mmrl.cluster.worker import RankWorker
from mmrl.config.cluster import ClusterConfig
from mmrl.data.images import ImageGrid, MediaStore
from mmrl.engine.machine.full_device import out_of_memory
from mmrl.engine_api import Finished, Learner, Polled, SamplingRequest, UpdateResult, Way
from mmrl.errors import (
    ConfigError,
    DataError,
    DeviceMemoryError,
    NumericsError,
    PluginError,
    RankLostError,
    ResourceError,
)
from mmrl.system.signals import Interruption, Stopped
from mmrl.system.version import DISTRIBUTION, __version__
from mmrl.types import EncodedPrompt, Prompt, Rollout, RolloutGroup, Sample, Segment, TrainingRow


class FakeWorker:
    """Answers as a rank would; ``faults`` names the methods in which it raises."""

    def __init__(self, rank: int, faults: dict[str, Callable[[], Any]]) -> None:
        self.rank, self.faults = rank, faults
        self.calls: list[tuple[Any, ...]] = []
        self.seen: list[SamplingRequest] = []
        self.submitted = 0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: None

    def receive(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if method in self.faults:
            return self.faults[method]()
        return getattr(self, method)(*args)

    def submit(self, requests: Sequence[SamplingRequest]) -> None:
        first = self.submitted
        self.seen, self.submitted = list(requests), first + len(requests)
        self.order = iter([(first + i, requests[i]) for i in reversed(range(len(requests)))])  # the last is first

    def advance(self, answer: bool) -> Any:
        ticket, request = next(self.order)
        segment = Segment(np.array([request.seed], np.int32), True, np.zeros(1, np.float32))
        rollouts = tuple(Rollout(request.prompt, (segment,), i, "", "stop", 7) for i in range(request.num_samples))
        return Polled([Finished(ticket, 0, 0, RolloutGroup(request.prompt, rollouts))]) if answer else None

    def score(self, samples: Sequence[Sample], role: str, way: Way) -> list[Any]:
        return [sample.token_ids * 10.0 + (way == "packed") for sample in samples]

    def score_sampled(self, samples: Sequence[Sample], temperature: float) -> list[list[Any]]:
        return [[sample.token_ids * temperature + self.rank for sample in samples]]

    def final_values(self, samples: Sequence[Sample], role: str) -> np.ndarray:
        return np.array([sample.token_ids[-1] + 0.5 for sample in samples], np.float32)

    def update(self, rows: Sequence[TrainingRow], role: str) -> UpdateResult:
        ids = [row.sample.token_ids for row in rows]
        values = [each * 1.0 for each in ids], [each * 2.0 for each in ids]
        return UpdateResult({"rank": float(self.rank)}, *values, flops=10**self.rank, memory_bytes=50 - self.rank)

    def memory_bytes_max(self) -> int:
        return 100 + self.rank


class FakeRanks:
    """Implements ``group.Ranks`` with a thread per rank."""

    def __init__(self, nodes: Sequence[str], faults: dict[int, dict[str, Callable[[], Any]]] | None = None) -> None:
        self.locations = [RankLocation(node, f"host-{node}", "127.0.0.1", guard.Process.own()) for node in nodes]
        self.names = [f"rank {rank}" for rank in range(len(nodes))]
        self.words = ""
        self.workers = [FakeWorker(rank, (faults or {}).get(rank, {})) for rank in range(len(nodes))]
        self._threads = [ThreadPoolExecutor(1) for _ in nodes]

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self._threads[rank].submit(self.workers[rank].receive, method, *args)

    def watch(self, lost: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        self.lose = lost

    def restart(self, ranks: Sequence[int]) -> None:
        raise AssertionError("these ranks end with their group")

    def last_words(self, rank: int) -> str:
        return self.words

    def close(self, folders: Any, *, wait: bool) -> None:
        self.removed, self.waited = folders, wait
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    def methods(self, rank: int) -> list[str]:
        return [call[0] for call in self.workers[rank].calls]


@pytest.fixture
def group_of(tmp_path) -> Callable[..., RankGroup]:
    def build(ranks: FakeRanks, ranks_together: int = 1) -> RankGroup:
        media = MediaStore(tmp_path / "media", ImageGrid(28, 3136, 50176))
        cost = lambda unit, prompt: unit.tokens  # noqa: E731
        return RankGroup(ranks, media, cost, ranks_together=ranks_together)

    return build


def prompt(name: str, length: int = 4, images: Sequence[Any] = ()) -> EncodedPrompt:
    ids = np.full(length, sum(name.encode()), np.int32)
    row = Prompt(name, (), answer="reference", columns={"large": "column"})
    return EncodedPrompt(prompt=row, text="", token_ids=ids, images=tuple(images))


def sample(name: str, token: int, length: int = 1) -> Sample:
    ids = np.full(length, token, np.int32)
    return Sample(prompt(name), (Segment(ids, True, np.zeros(length, np.float32)),))


def request(number: int) -> SamplingRequest:
    return SamplingRequest(prompt(f"p{number}"), 2, 1.0, 8, seed=number)


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (3, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("prompts", [0, 1, 7])
def test_every_request_is_answered_once_with_the_drivers_own_prompt(ranks, size, prompts, group_of):
    requests = [request(number) for number in range(prompts)]
    fakes = FakeRanks(["a"] * ranks)
    with group_of(fakes, size).sampling() as sampler:
        found = dict(sampler.generate(requests))
    assert sorted(found) == list(range(prompts))
    for index, group in found.items():
        assert group.prompt is requests[index].prompt
        assert all(r.prompt is requests[index].prompt and r.token_ids[0] == index for r in group.rollouts)
    for first in range(0, ranks, size):  # the same requests in the same order, and as many steps, on a set of ranks
        seen = [[r.seed for r in fakes.workers[first + member].seen] for member in range(size)]
        steps = [fakes.methods(first + member).count("advance") for member in range(size)]
        assert all(seeds == seen[0] for seeds in seen) and set(steps) == {len(seen[0])}
    counts = [len(fakes.workers[first].seen) for first in range(0, ranks, size)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (3, 1), (4, 2)])
def test_one_sampling_may_generate_several_times(ranks, size, group_of):
    fakes = FakeRanks(["a"] * ranks)
    with group_of(fakes, size).sampling() as sampler:
        rounds = [
            dict(sampler.generate([request(number) for number in numbers])) for numbers in ([0, 1, 2], [3], [4, 5])
        ]
    tokens = [[found[index].rollouts[0].token_ids[0] for index in sorted(found)] for found in rounds]
    assert tokens == [[0, 1, 2], [3], [4, 5]]
    assert all(fakes.methods(rank).count("enter") == 1 for rank in range(ranks))


def test_groups_and_single_greedy_rollouts_are_spread_by_what_they_cost(group_of):
    many = [SamplingRequest(prompt(f"p{i}"), 8, 1.0, 100, seed=i) for i in range(4)]
    one = [SamplingRequest(prompt(f"p{i}"), 1, 0.0, 100, seed=9) for i in range(4)]
    fakes = FakeRanks(["a"] * 2)
    with group_of(fakes).sampling() as sampler:
        list(sampler.generate([*many, *one]))
    assert [sum(r.num_samples for r in worker.seen) for worker in fakes.workers] == [18, 18]


def test_columns_and_answers_stay_with_the_driver(group_of):
    fakes = FakeRanks(["a"])
    with group_of(fakes).sampling() as sampler:
        list(sampler.generate([request(0)]))
    (seen,) = fakes.workers[0].seen
    assert seen.prompt.prompt.columns == {} and seen.prompt.prompt.answer is None


def test_samples_of_a_prompt_stay_together_and_answers_keep_their_order(group_of):
    samples = [sample(name, token, length) for token, (name, length) in enumerate(
        [("a", 9), ("b", 1), ("a", 9), ("c", 5), ("b", 1), ("d", 30)])]  # fmt: skip
    fakes = FakeRanks(["x", "x", "x"])
    with group_of(fakes).learning() as learner:
        values = learner.network("policy").score(samples, way="single")
        result = learner.network("policy").update(
            [TrainingRow(s, 1.0, s.mask, {"advantages": s.token_ids * 1.0}) for s in samples]
        )
    assert [int(v[0]) for v in values] == [0, 10, 20, 30, 40, 50]
    assert [int(v[0]) for v in result.logprobs] == [0, 1, 2, 3, 4, 5]
    assert result.metrics == {"rank": 0.0}
    assert (result.flops, result.memory_bytes) == (111, 50)  # of all ranks, and of the one that took most
    shares = [[s.prompt.id for s in call[1]] for w in fakes.workers for call in w.calls if call[0] == "score"]
    assert sorted(map(sorted, shares)) == [["a", "a"], ["b", "b", "c"], ["d"]]


def test_ranks_that_hold_rows_together_get_the_same_samples_and_count_once(group_of):
    samples = [sample(name, token, 4) for token, name in enumerate("abcd")]
    fakes = FakeRanks(["x"] * 4)
    group = group_of(fakes)
    group.ranks_of_a_row = 2
    with group.learning() as learner:
        network = learner.network("policy")
        scores, ends = network.score(samples), network.final_values(samples)
        result = network.update([TrainingRow(s, 1.0, s.mask, {"advantages": s.token_ids * 1.0}) for s in samples])
        wide = network.score(samples, way="wide")
    assert [int(v[0]) for v in scores] == [1, 11, 21, 31] and ends.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert [int(v[0]) for v in result.logprobs] == [0, 1, 2, 3] and len(wide) == 4
    assert result.flops == 10**0 + 10**2  # of the first rank of each two
    assert result.memory_bytes == 50
    shares = [[s.prompt.id for s in call[1]] for w in fakes.workers for call in w.calls if call[0] == "score"]
    packed = shares[::2]  # each rank has been asked twice
    assert packed[0] == packed[1] and packed[2] == packed[3] and sorted(packed[0] + packed[2]) == ["a", "b", "c", "d"]
    assert shares[1::2] == [["a", "b", "c", "d"], [], [], []]  # one rank goes the wide way, with the whole model


def test_the_experts_that_a_sample_knows_reach_its_rank(group_of):
    known = np.arange(5 * 2 * 3, dtype=np.int32).reshape(5, 2, 3)
    samples = [replace(sample("a", 1, 2), experts=known), sample("b", 2, 2)]
    fakes = FakeRanks(["x"])
    with group_of(fakes).learning() as learner:
        policy = learner.network("policy")
        policy.score(samples)
        policy.update([TrainingRow(each, 1.0, each.mask, {"advantages": np.ones(2)}) for each in samples])
    sent = [call[1] for call in fakes.workers[0].calls if call[0] in ("score", "update")]
    scored, rows = pickle.loads(pickle.dumps(sent))
    for first, second in (scored, [row.sample for row in rows]):
        np.testing.assert_array_equal(first.experts, known)
        assert second.experts is None


class Knows(Learner):
    def __init__(self, *roles: str) -> None:
        self.networks = dict.fromkeys(roles, SimpleNamespace())


@pytest.mark.parametrize("verb", ["score", "update"])
def test_a_role_that_the_run_does_not_have_is_named_with_those_that_there_are(verb, group_of):
    """By the driver before it asks a rank; by the ranks, if the driver believes in a role that they do not have."""
    fakes = FakeRanks(["a", "a"])
    group = group_of(fakes)
    with group.learning() as learner, pytest.raises(ConfigError, match="'critic'") as caught:
        getattr(learner.network("critic"), verb)([])
    assert caught.value.possible == "policy" and set(fakes.methods(0)) <= {"enter", "leave"}
    for fake in fakes.workers:
        worker = RankWorker()
        worker._engine, worker._owner = SimpleNamespace(span=nullcontext), Knows("policy", "reference")
        setattr(fake, verb, getattr(worker, verb))
    group.roles = ["policy", "critic"]
    began = time.monotonic()
    with pytest.raises(ConfigError, match="'critic'") as caught, group.learning() as learner:
        getattr(learner.network("critic"), verb)([])
    assert caught.value.possible == "policy, reference" and time.monotonic() - began < 30


def fail(error: Exception, after: float = 0.0) -> Callable[[], Any]:
    def raise_it() -> Any:
        time.sleep(after)
        raise error

    return raise_it


def test_a_rank_that_raises_is_shown_while_the_others_wait_for_it(group_of):
    fakes = FakeRanks(["a", "a"], {0: {"update": lambda: time.sleep(9)}, 1: {"update": fail(NumericsError("not so"))}})
    group, start = group_of(fakes), time.monotonic()
    with pytest.raises(NumericsError, match="not so"), group.learning() as learner:
        learner.network("policy").update([])
    assert time.monotonic() - start < 6
    assert "leave" not in fakes.methods(0)  # it would wait for ever


CLOSED = RuntimeError(
    "rank 0 failed:\n  ...\nRuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:9"
)


@pytest.mark.parametrize("is_idle", [False, True])
def test_the_guards_report_explains_the_survivors_error_that_came_before_it(is_idle, group_of, monkeypatch):
    """Also if the lost rank had answered, so that no call of its own fails."""
    released = threading.Event()
    other = {} if is_idle else {1: {"update": released.wait}}
    fakes = FakeRanks(["a", "b"], {0: {"update": fail(CLOSED)}, **other})
    threading.Timer(0.5, lambda: fakes.lose(1)).start()
    with pytest.raises(DeadRankError, match="rank 1 is gone"), group_of(fakes).learning() as learner:
        learner.network("policy").update([])
    released.set()


@pytest.mark.parametrize(
    ("faults", "shown"),
    [
        ({0: fail(RuntimeError("peer gone")), 1: fail(RankLostError("rank 1 is gone"), 0.5)}, "rank 1 is gone"),
        ({0: fail(DataError("follows from it")), 1: fail(RankLostError("rank 1 is gone"), 0.3)}, "rank 1 is gone"),
        ({0: fail(CLOSED), 1: fail(DeviceMemoryError("out of memory"), 0.3)}, "out of memory"),
        ({0: fail(DataError("came first")), 1: fail(DataError("came later"), 0.3)}, "came first"),
        ({0: fail(RuntimeError("peer gone")), 1: fail(DataError("bad image"), 0.5)}, "bad image"),
        ({0: fail(ValueError("a bug"))}, "a bug"),
        ({0: fail(CLOSED), 1: fail(DataError("follows from it"))}, "a rank has lost another one"),
        ({0: fail(CLOSED, 0.3), 1: fail(DataError("follows from it"))}, "a rank has lost another one"),
        ({0: fail(RuntimeError("nccl: invalid usage"))}, "invalid usage"),
    ],
)
def test_of_several_failures_the_cause_is_shown(faults, shown, group_of, monkeypatch):
    monkeypatch.setattr("mmrl.cluster.calls.CAUSE_S", 1.5)
    fakes = FakeRanks(["a", "a"], {rank: {"submit": fault} for rank, fault in faults.items()})
    with pytest.raises(Exception, match=shown), group_of(fakes).sampling() as sampler:
        list(sampler.generate([request(0), request(1)]))


@pytest.mark.parametrize("verb", ["start", "enter", "advance", "score", "update", "save"])
def test_a_full_device_of_one_rank_ends_a_call_though_the_others_wait_for_it(verb, group_of, monkeypatch, tmp_path):
    monkeypatch.setattr("mmrl.cluster.calls.CAUSE_S", 0.1)
    released = threading.Event()
    full = fail(out_of_memory("learning", "CUDA out of memory"))
    fakes = FakeRanks(["a", "b"], {0: {verb: released.wait}, 1: {verb: full}})
    group, began = group_of(fakes), time.monotonic()

    def call() -> None:
        if verb == "start":
            group.start(["", ""])
        elif verb in ("enter", "advance"):
            with group.sampling() as sampler:
                list(sampler.generate([request(0), request(1)]))
        else:
            with group.learning() as learner:
                learner.save(tmp_path) if verb == "save" else getattr(learner.network("policy"), verb)([])

    with pytest.raises(DeviceMemoryError, match="out of memory in learning: CUDA"):
        call()
    assert group.failed and time.monotonic() - began < 30
    released.set()


@pytest.mark.parametrize("method", ["advance", "answer"])
def test_an_error_after_the_last_news_is_raised_too(method, group_of):
    """Rank 0 tells the driver of the set's only request, and rank 1 fails later in the same step, or with the end."""
    fakes = FakeRanks(["a", "a"], {1: {method: fail(ValueError("a bug"), 0.3)}})
    group = group_of(fakes, 2)

    def sample_one() -> None:
        with group.sampling() as sampler:
            (ticket,) = sampler.submit([replace(request(0), answered_after=1)])
            assert [each.ticket for each in sampler.poll().finished] == [ticket]
            sampler.answer(ticket, None)

    with pytest.raises(ValueError, match="a bug"):
        sample_one()
    assert [fakes.methods(rank)[-1] for rank in (0, 1)] == ["leave", "leave"]


def test_an_error_of_the_drivers_hands_the_device_back(group_of):
    fakes = FakeRanks(["a", "a"])
    group = group_of(fakes)

    def interrupted() -> None:
        with group.sampling() as sampler:
            next(sampler.generate([request(number) for number in range(9)]))
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert [fakes.methods(rank)[-1] for rank in (0, 1)] == ["leave", "leave"]
    assert all(fakes.methods(rank).count("advance") < 5 for rank in (0, 1))
    with group.learning():
        assert group.memory_bytes_max() == 101


def test_images_go_once_to_each_node_that_cannot_see_them(group_of, picture):
    fakes = FakeRanks(["here", "there", "there"], {rank: {"holds": lambda: False} for rank in (1, 2)})
    fakes.workers[0].faults["holds"] = lambda: True
    fakes.workers[1].faults["make_folder"] = lambda: "/tmp/there"
    group = group_of(fakes)
    find_shared_files(group, group.media.folder)
    assert [node.shares_files for node in group.nodes] == [True, False, False]
    assert list(group.media.folder.iterdir()) == []  # the probe is gone
    refs = [group.media.add(picture(56, 56, seed)) for seed in range(3)]
    samples = [Sample(prompt(f"p{i}", images=[ref]), sample("", i).segments) for i, ref in enumerate(refs)]
    with group.learning() as learner:
        learner.network("policy").score(samples)
        learner.network("policy").score(samples)
    sent = [name for call in fakes.workers[1].calls if call[0] == "receive_images" for name in call[1]]
    assert len(sent) == len(set(sent)) == 2 and set(sent) < {ref.hash for ref in refs}
    assert all("receive_images" not in fakes.methods(rank) for rank in (0, 2))
    group.close()
    assert fakes.removed == {"there": "/tmp/there"}


def test_every_rank_that_samples_scores_all_samples_whose_images_its_node_is_sent(group_of, picture):
    fakes = FakeRanks(["here", "there", "there"], {rank: {"holds": lambda: False} for rank in (1, 2)})
    fakes.workers[0].faults["holds"] = lambda: True
    fakes.workers[1].faults["make_folder"] = lambda: "/tmp/there"
    group = group_of(fakes)
    find_shared_files(group, group.media.folder)
    refs = [group.media.add(picture(56, 56, seed)) for seed in range(2)]
    samples = [Sample(prompt(f"p{i}", images=[ref]), sample("", 10 * i, 2).segments) for i, ref in enumerate(refs)]
    with group.sampling() as sampler:
        found = sampler.score(samples, 0.5)
    assert [[values.tolist() for values in of_rank] for of_rank in found] == [
        [[0.0, 0.0], [5.0, 5.0]],
        [[1.0, 1.0], [6.0, 6.0]],
        [[2.0, 2.0], [7.0, 7.0]],
    ]
    sent = [name for call in fakes.workers[1].calls if call[0] == "receive_images" for name in call[1]]
    assert sorted(sent) == sorted(ref.hash for ref in refs)
    told = next(call[1] for call in fakes.workers[2].calls if call[0] == "score_sampled")
    assert all(not each.prompt.prompt.columns for each in told)  # rows stay on the driver


def test_a_model_is_sent_file_by_file_to_a_node_without_it(group_of, tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.cluster.files.PART_BYTES", 1000)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").touch()
    (folder / "model.safetensors").write_bytes(bytes(range(250)) * 10)
    names = ["config.json", "empty.txt", "model.safetensors"]
    fakes = FakeRanks(["here", "there"])
    fakes.workers[0].faults["fingerprints"] = lambda: fingerprints(str(folder), names)
    fakes.workers[1].faults["fingerprints"] = lambda: ["", "", "2500 of another step"]
    fakes.workers[1].faults["make_folder"] = lambda: "/tmp/there"
    model = SimpleNamespace(path=str(folder), commit=None, files=lambda: names)
    assert send_model(group_of(fakes), model) == {0: str(folder), 1: "/tmp/there/model"}
    parts = [call[1:] for call in fakes.workers[1].calls if call[0] == "write_part"]
    assert {path for path, _, _ in parts} == {f"/tmp/there/model/{name}" for name in names}
    weights = [(offset, data) for path, offset, data in parts if path.endswith("safetensors")]
    assert [offset for offset, _ in weights] == [0, 0, 1000, 2000]
    assert b"".join(data for _, data in weights) == bytes(range(250)) * 10


def test_other_versions_on_a_node_are_named(group_of, vision):
    def answers(versions: dict[str, str], plugin: str) -> dict[str, Callable[[], Any]]:
        plugins = {(kind, spec.name): plugin for _, kind, spec in vision.config().plugins()}
        return {"installation": lambda: Installation(versions, plugins)}

    here = installed_versions(["torch", "transformers", "deepspeed", DISTRIBUTION])
    same = answers(here, f"{DISTRIBUTION} {__version__}")
    check_installations(group_of(FakeRanks(["a", "b"], {0: same, 1: same})), vision.config())
    other = answers({**here, "torch": "2.11"}, f"{DISTRIBUTION} {__version__}")
    with pytest.raises(ResourceError, match="node host-b has another version of torch than host-a") as caught:
        check_installations(group_of(FakeRanks(["a", "b"], {0: same, 1: other})), vision.config())
    assert caught.value.where == f"2.11 and {here['torch']}"
    with pytest.raises(ResourceError, match="node host-a has another version of torch"):  # than the driver
        check_installations(group_of(FakeRanks(["a", "b"], {0: other, 1: other})), vision.config())
    old = answers(here, f"{DISTRIBUTION} 0.0.1")
    with pytest.raises(PluginError, match=r"node host-b has another \w+ plugin"):
        check_installations(group_of(FakeRanks(["a", "b"], {0: same, 1: old})), vision.config())


def test_another_file_of_the_algorithm_on_a_node_is_named(group_of, vision, tmp_path):
    (tmp_path / "rule.py").write_text("class Rule: ...")
    config = vision.config(algorithm={"name": f"{tmp_path}/rule.py:Rule"})
    here = installed_versions(["torch", "transformers", "deepspeed", DISTRIBUTION])

    def answers(version: str) -> dict[str, Callable[[], Any]]:
        plugins = {
            (kind, spec.name): version if kind == "algorithm" else f"{DISTRIBUTION} {__version__}"
            for _, kind, spec in config.plugins()
        }
        return {"installation": lambda: Installation(here, plugins)}

    same = answers(f"file {hashlib.sha256(b'class Rule: ...').hexdigest()[:12]}")
    check_installations(group_of(FakeRanks(["a", "b"], {0: same, 1: same})), config)
    with pytest.raises(PluginError, match=r"node host-b has another algorithm plugin '.*rule.py:Rule'"):
        check_installations(group_of(FakeRanks(["a", "b"], {0: same, 1: answers("file 0")})), config)


def test_a_port_stays_reserved_until_the_ranks_meet():
    worker = RankWorker()
    port = worker.reserve_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_ranks_that_sample_together_must_be_on_one_node(group_of):
    with pytest.raises(ResourceError, match="ranks 2 to 3 would sample together, and are on host-a, host-b"):
        check_sets(group_of(FakeRanks(["a", "a", "a", "b"])).nodes, 2)
    check_sets(group_of(FakeRanks(["a", "a", "b", "b"])).nodes, 2)


@pytest.mark.parametrize("ranks", [{"sampler_ranks": 1, "learner_ranks": 1}, {"ranks": 2}])
def test_one_gpu_for_both_sides_is_refused_with_the_keys_that_count_ranks(ranks):
    error = too_few_devices(ClusterConfig(name="ray", **ranks), "GPU", "host-a: 1 GPU")
    keys = ", ".join(f"cluster.{key}" for key in ranks)
    assert error.what.startswith("2 ranks, each with a GPU of its own") and error.where == keys
    assert error.possible.endswith("host-a: 1 GPU") and error.remedy.startswith(f"lower {keys}, end")
    assert ("cluster.ranks in their place" in error.remedy) == (len(ranks) == 2)


def test_a_rank_that_sees_other_ranks_gpus_is_refused(monkeypatch):
    worker = RankWorker()
    monkeypatch.setattr(worker, "_kind", "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(ResourceError, match="rank 3 sees 8 GPUs"):
        worker._take(Rendezvous(3, 3, 8, "127.0.0.1", 1, None, None))


def test_only_the_own_stale_shared_memory_is_forgotten(monkeypatch):
    stale, other = Path("/dev/shm/mmrl-test-cpushm_0"), Path("/dev/shm/mmrl-test-other")
    for path in (stale, other):
        path.touch()
    with monkeypatch.context() as patch:
        patch.setattr("os.getuid", lambda: 12345)
        forget_shared_memory()
        assert stale.exists()  # another user's
    forget_shared_memory()
    assert not stale.exists() and other.exists()
    other.unlink()


def test_files_travel_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.cluster.files.PART_BYTES", 1000)
    worker, there = RankWorker(), tmp_path / "there"
    (there / "saved" / "deeper").mkdir(parents=True)
    (there / "saved" / "weights").write_bytes(bytes(range(250)) * 10)
    (there / "saved" / "deeper" / "empty").touch()
    node = Node("id", "host", 0, shares_files=False, folder=str(there))

    def ask(rank: int, method: str, *args: Any) -> Any:
        return getattr(worker, method)(*args)

    node.fetch(ask, node.path("saved"), tmp_path / "here")
    assert (tmp_path / "here" / "weights").read_bytes() == bytes(range(250)) * 10
    assert (tmp_path / "here" / "deeper" / "empty").read_bytes() == b""
    node.send(ask, tmp_path / "here", ["weights"], node.path("model"))
    assert (there / "model" / "weights").read_bytes() == bytes(range(250)) * 10


def write_tree(folder: Path, **files: bytes) -> Path:
    """A checkpoint's folder; ``__`` in a name stands for a slash."""
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_a_checkpoint_is_sent_to_the_nodes_that_do_not_see_it(group_of, tmp_path, monkeypatch):
    """A model and a state of each network, whatever the run's own folder is; not another's files that look alike."""
    monkeypatch.setattr("mmrl.cluster.files.PART_BYTES", 1000)
    files = {"model__config_json": b"{}", "state__optimizer__a": bytes(2500), "critic__state__a": b"c"}
    files |= {"manifest": b"sealed", "reward__model__a": b"of no network"}
    checkpoint = write_tree(tmp_path / "step-000004", **files)
    other = write_tree(tmp_path / "other", **{**files, "state__optimizer__a": bytes(2499) + b"x"})
    fakes = FakeRanks(["here", "there", "there"])
    workers = [RankWorker(), RankWorker()]
    fakes.workers[0].fingerprints = workers[0].fingerprints
    fakes.workers[1].fingerprints = lambda _, names: fingerprints(str(other), names)
    fakes.workers[1].make_folder = lambda: str(tmp_path / "there")
    fakes.workers[1].write_part = workers[1].write_part
    group = group_of(fakes)
    group.roles = ["policy", "critic", "reference"]
    sent = str(tmp_path / "there" / "checkpoint")
    assert send_checkpoint(group, checkpoint, group.roles) == {0: str(checkpoint), 1: sent, 2: sent}
    found = {str(p.relative_to(sent)): p.read_bytes() for p in Path(sent).rglob("*") if p.is_file()}
    assert found == {"model/config_json": b"{}", "state/optimizer/a": bytes(2500), "critic/state/a": b"c"}
    assert send_checkpoint(group, None, group.roles) == {}
    group.close()
    assert fakes.removed == {"there": str(tmp_path / "there")}


@pytest.fixture
def saving(group_of, tmp_path) -> Callable[..., tuple[RankGroup, FakeRanks]]:
    """Two ranks, on one node that shares nothing, whose rank 0 writes and may fail."""

    def build(failure: Exception | None = None) -> tuple[RankGroup, FakeRanks]:
        fakes, there = FakeRanks(["there", "there"]), tmp_path / "there"
        worker = RankWorker()

        def save(folder: Path) -> None:
            write_tree(folder, model__weights=b"w" * 2500, state__deep__deeper__file=b"s")
            if failure:
                raise failure

        worker._owner = SimpleNamespace(save=save)
        for method in ("save", "files", "read_part", "remove_folder"):
            setattr(fakes.workers[0], method, getattr(worker, method))
        group = group_of(fakes)
        for node in group.nodes:
            node.shares_files, node.folder = False, str(there)
        return group, fakes

    return build


def assert_goes_on(group: RankGroup, fakes: FakeRanks, there: Path) -> None:
    assert not group.failed and not (there / "saved").exists()
    with group.learning():
        assert group.memory_bytes_max() == 101
    assert fakes.methods(1)[-1] == "leave"
    group.close()
    assert fakes.waited


def test_what_each_node_saved_is_fetched_from_those_that_do_not_see_the_folder(group_of, tmp_path):
    """Ranks 0 and 1 see it, 2 and 3 are on a node that does not, and 4 is on another."""
    hosts = ["here", "here", "there", "there", "yonder"]
    fakes = FakeRanks(hosts)
    for rank in range(5):
        worker = RankWorker()

        def save(folder: Path, rank: int = rank) -> None:
            write_tree(folder, **{f"model__{rank}": b"w" * rank, f"state__{rank}": b"s"})

        worker._owner = SimpleNamespace(save=save)
        for method in ("save", "files", "read_part", "remove_folder"):
            setattr(fakes.workers[rank], method, getattr(worker, method))
    group = group_of(fakes)
    for node in dict.fromkeys(group.nodes):
        node.shares_files, node.folder = node.host == "host-here", str(tmp_path / node.host)
    with group.learning() as learner:
        learner.save(tmp_path / "saved")
    names = {str(path.relative_to(tmp_path / "saved")) for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert names == {f"{part}/{rank}" for part in ("model", "state") for rank in range(5)}
    assert not list(tmp_path.glob("host-*/saved"))
    group.close()


def test_what_rank_0_saved_is_fetched_and_removed_there(saving, tmp_path):
    group, fakes = saving()
    with group.learning() as learner:
        learner.save(tmp_path / "here")
    found = {
        str(p.relative_to(tmp_path / "here")): p.read_bytes() for p in (tmp_path / "here").rglob("*") if p.is_file()
    }
    assert found == {"model/weights": b"w" * 2500, "state/deep/deeper/file": b"s"}
    assert_goes_on(group, fakes, tmp_path / "there")


@pytest.mark.parametrize("failure", [ResourceError("the disk is full"), NumericsError("a weight is not finite")])
def test_a_save_that_fails_on_the_rank_leaves_the_group_usable(failure, saving, tmp_path):
    group, fakes = saving(failure)
    with group.learning() as learner, pytest.raises(type(failure), match=failure.what):
        learner.save(tmp_path / "here")
    assert_goes_on(group, fakes, tmp_path / "there")


@pytest.mark.parametrize("place", ["here", "there"])
def test_a_save_that_cannot_be_fetched_leaves_the_group_usable(place, saving, tmp_path, monkeypatch):
    group, fakes = saving()
    if place == "here":
        (tmp_path / "here").touch()  # a file where a folder must be
        what = "cannot write what node host-there saved"
    else:
        files = fakes.workers[0].files
        fakes.workers[0].files = lambda folder: [*files(folder), "lost"]
        what = "cannot read or write a file: No such file"
    with group.learning() as learner, pytest.raises(ResourceError, match=what):
        learner.save(tmp_path / "here")
    assert_goes_on(group, fakes, tmp_path / "there")


def test_an_abandoned_group_raises_at_once_in_what_it_does(group_of):
    """Also in the next call, though the ranks hang on; who has not answered can be asked before."""
    released = threading.Event()
    fakes = FakeRanks(["a", "a", "a"], {rank: {"update": released.wait} for rank in (0, 2)})
    group, error = group_of(fakes), ResourceError("the step takes too long")
    seen: list[Any] = []

    def give_up() -> None:
        seen.append((group.waiting(), group.abandon(error), time.monotonic()))

    threading.Timer(0.5, give_up).start()
    with pytest.raises(ResourceError) as caught, group.learning() as learner:
        learner.network("policy").update([])
    ((waiting, stopped, moment),) = seen
    assert caught.value is error and stopped and time.monotonic() - moment < 20
    assert waiting == {0: "update", 2: "update"} and group.waiting() == {}
    assert error.where == "no answer from rank 0 on host-a (`update`), rank 2 on host-a (`update`)"
    with pytest.raises(ResourceError, match="too long"):
        group.ask(1, "score", [], "policy", "packed")
    group.close()
    assert group.failed and not fakes.waited  # what hangs is not waited for
    released.set()  # answers that come now are nobody's


def test_the_memory_of_a_failed_group_is_what_was_known_last(group_of):
    fakes = FakeRanks(["a", "a"])
    group = group_of(fakes)
    assert group.memory_bytes_max() == 101
    group.abandon(ResourceError("too long"))
    assert group.memory_bytes_max() == 101 and fakes.methods(0).count("memory_bytes_max") == 1


@pytest.mark.parametrize("method", ["enter", "submit", "update", "leave"])
@pytest.mark.parametrize("place", ["before rank 1 is asked", "while the ranks do it"])
def test_a_signal_leaves_no_rank_behind(method, place, group_of):
    """Every rank gets every call, and the next owner finds the device free."""

    class Ranks(FakeRanks):
        def call(self, rank: int, name: str, *args: Any) -> Future[Any]:
            if (rank, name, place) == (1, method, "before rank 1 is asked") and not interruption.stopped:
                signal.raise_signal(signal.SIGTERM)
            return super().call(rank, name, *args)

    def slowly() -> None:
        if place == "while the ranks do it" and not interruption.stopped:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    fakes = Ranks(["a", "a"], {0: {method: slowly}})
    group = group_of(fakes)
    with Interruption() as interruption:
        with pytest.raises(Stopped), group.sampling() if method == "submit" else group.learning() as owner:
            list(owner.generate([])) if method == "submit" else owner.network("policy").update([])
        with interruption.deferred(), group.learning():
            pass
    first, second = fakes.methods(0), fakes.methods(1)
    assert first == second and method in first
    assert [name for name in first if name in ("enter", "leave")] == ["enter", "leave"] * 2


def test_a_signal_that_ends_ranks_too_stays_the_reason(group_of):
    fakes = FakeRanks(["a", "a"], {1: {"leave": fail(DeadRankError(1, "host-a", "leave", "it got SIGTERM"))}})
    group = group_of(fakes)
    with Interruption(), pytest.raises(Stopped), group.learning():
        signal.raise_signal(signal.SIGTERM)
    assert group.failed


def test_in_generation_too(group_of):
    released = threading.Event()
    fakes = FakeRanks(["a", "a"], {1: {"advance": released.wait}})
    group = group_of(fakes)
    threading.Timer(0.5, lambda: (seen.append(group.waiting()), group.abandon(ResourceError("too long")))).start()
    seen: list[dict[int, str]] = []
    with pytest.raises(ResourceError, match="too long"), group.sampling() as sampler:
        list(sampler.generate([request(number) for number in range(6)]))
    assert seen == [{1: "generate"}]
    released.set()


def test_the_end_of_an_idle_rank_stops_the_others(group_of):
    """Rank 1 has done its share; rank 0 would go on for long."""
    released = threading.Event()
    fakes = FakeRanks(["a", "b"], {0: {"update": released.wait}})
    group = group_of(fakes)
    threading.Timer(0.5, lambda: fakes.lose(1)).start()
    with pytest.raises(RankLostError, match="rank 1 is gone") as caught, group.learning() as learner:
        learner.network("policy").update([])
    assert caught.value.where == "host-b, while it had nothing to do"
    released.set()


@pytest.mark.parametrize("words", ["", "the kernel ended 1 process for want of memory on host-a"])
def test_memory_that_ran_out_is_named_with_the_settings_that_lower_it(words, group_of):
    fakes = FakeRanks(["a", "a"], {1: {"update": fail(DeadRankError(1, "host-a", "update", "End of file."))}})
    fakes.words = words
    with pytest.raises(RankLostError) as caught, group_of(fakes).learning() as learner:
        learner.network("policy").update([])
    assert caught.value.what == "rank 1 is gone: End of file." + bool(words) * f"; {words}"
    assert caught.value.where == "host-a, while it did `update`"
    assert ("learner.zero_stage" in caught.value.remedy) == bool(words)


def test_a_node_tells_which_rank_has_ended_and_that_memory_ran_out(monkeypatch, tmp_path):
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 9\noom_kill 3\noom_kill_other 8\n")
    assert guard.oom_kills(counters) == 3
    counts = iter([3, 3, 4])
    monkeypatch.setattr(guard, "oom_kills", lambda: next(counts, 4))
    monkeypatch.setattr(guard, "POLL_S", 0.1)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks = {4: guard.Process.own(), 5: guard.Process(child.pid, int(guard._stat(child.pid)[19]))}
    threading.Timer(0.5, lambda: os.kill(child.pid, signal.SIGKILL)).start()
    assert guard.watch(ranks) == guard.Death(5, 1)  # though nobody has waited for it
    child.wait()


def test_what_hangs_is_killed_and_its_folder_removed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = guard.Process(child.pid, int(guard._stat(child.pid)[19]))
    os.kill(child.pid, signal.SIGSTOP)
    (tmp_path / "sent").mkdir()
    later = guard.Process(os.getpid(), 1)  # the same id, another process
    assert guard.clear([process, later], str(tmp_path / "sent")) == [] and not (tmp_path / "sent").exists()
    assert child.wait() == -signal.SIGKILL


def test_the_lock_of_a_compilation_that_was_killed_is_taken_away(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    stale, fresh, held = (tmp_path / name / "lock" for name in ("stale", "fresh", "held"))
    for path in (stale, fresh, held):
        path.parent.mkdir()
        path.touch()
    for path, age in ((stale, 100), (fresh, 29), (held, 100)):
        os.utime(path, (time.time() - age,) * 2)
    start = time.monotonic()
    with held.open():
        forget_stale_builds()
    assert 0.5 < time.monotonic() - start < 25  # another machine's process may hold the fresh one
    assert [path.exists() for path in (stale, fresh, held)] == [False, False, True]
