"""The loop, with an engine of forty lines in place of the real one."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.config.plugin_specs import RewardSpec
from mmrl.data.order import PromptOrder
from mmrl.data.prompts import DatasetRows, PromptSource
from mmrl.engine.sampler.admissions import OneByOneSampler
from mmrl.engine_api import Learner, SamplingRequest, UpdateResult
from mmrl.errors import ConfigError, DataError, DeviceBusyError, NumericsError, PluginError, ResourceError
from mmrl.interfaces import Aggregation, Algorithm, Needs, Refill
from mmrl.ops.alarms import Looked
from mmrl.rollout import batch as rollout_batch
from mmrl.rollout.collector import Collector
from mmrl.rollout.rewards.failures import Failure, Failures, RewardError
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.step.learn import minibatches
from mmrl.step.loop import RunContext, Trainer
from mmrl.system.profiling import Profiler
from mmrl.system.signals import Interruption
from mmrl.system.watchdog import Watchdog
from mmrl.types import (
    Credit,
    CreditedGroup,
    EncodedPrompt,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    ScoredGroup,
    Segment,
    TokenLoss,
)
from mmrl_algorithms.grpo import GRPO
from mmrl_algorithms.sft import SFT

PEAK, FLOPS = 1e9, 12_345


@dataclass
class FakeEngine(OneByOneSampler, Learner):
    """Samples by seed; its learner's log-probs are the sampler's plus ``gap``, and plus ``split`` one by one.

    They grow by ``learns`` with every update. Groups finish in an order of ``finish``'s own.
    """

    algorithm: Any
    gap: float = 0.0
    split: float = 0.0
    drift: float = 0.0
    learns: float = 0.0
    finish: int = 0
    current: list[list[np.ndarray]] = field(default_factory=list)
    verbs: list[str] = field(default_factory=list)
    requests: list[SamplingRequest] = field(default_factory=list)
    updates: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.networks = {"policy": self, "reference": SimpleNamespace(score=self._of_reference)}

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[FakeEngine]:
        self.verbs.append("sampling")
        try:
            yield self
        finally:
            self.leave()

    @contextmanager
    def learning(self) -> Iterator[FakeEngine]:
        self.verbs.append("learning")
        yield self

    def submit(self, requests: Sequence[SamplingRequest]) -> Sequence[int]:
        self.requests += requests
        self._order = np.random.default_rng(self.finish).permutation(len(requests)).tolist()
        return super().submit(requests)

    def _advance(self) -> tuple[Sequence[tuple[int, RolloutGroup]], bool]:
        if len(self._batch) == len(self._order):
            self._batch = deque(self._batch[place] for place in self._order)
        return super()._advance()

    def _group(self, request: SamplingRequest) -> RolloutGroup:
        return RolloutGroup(request.prompt, tuple(self._rollout(request, i) for i in range(request.num_samples)))

    def _rollout(self, request: SamplingRequest, member: int) -> Rollout:
        rng = np.random.default_rng(request.seed + member)
        length = int(rng.integers(1, 6))
        segment = Segment(rng.integers(0, 9, length).astype(np.int32), True, -rng.random(length).astype(np.float32))
        text = "" if request.temperature else "greedy"
        return Rollout(request.prompt, (segment,), index=member, text=text, finish_reason="stop", weight_version=0)

    def score(self, samples: Sequence[Sample], *, way: str = "packed") -> list[np.ndarray]:
        if way == "wide":
            return []
        self.verbs.append("logprobs" if way == "packed" else "logprobs one by one")
        moved = self.gap + self.learns * len(self.updates)
        return [s.sampler_logprobs + moved + (0 if way == "packed" else self.split) for s in samples]

    def _of_reference(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        self.verbs.append("reference_logprobs")
        return [s.sampler_logprobs - 0.1 for s in samples]

    def update(self, rows: Sequence[Any]) -> UpdateResult:
        import torch

        from mmrl.ops.objective import partial_loss, reduce_partials

        self.verbs.append("update")
        moved = self.gap + self.drift + self.learns * len(self.updates)
        self.updates.append(list(rows))
        if not rows:
            return UpdateResult({"lr": 0.1}, [], [])
        logprobs = [row.sample.sampler_logprobs + moved for row in rows]
        self.current.append(logprobs)
        logprobs_T = torch.from_numpy(np.concatenate(logprobs))
        entropies = [np.full_like(values, 2.0) for values in logprobs]
        partial = partial_loss(self.algorithm, rows, logprobs_T, torch.from_numpy(np.concatenate(entropies)))
        rank = {"lr": 0.1, "policy/grad_norm": 1.0}
        return UpdateResult(reduce_partials([partial]) | rank, logprobs, entropies, flops=FLOPS, memory_bytes=77)


def faulty(*which: int) -> Callable[[FakeEngine, Sequence[Any]], UpdateResult]:
    """An ``update`` that comes to nothing the which-th times, counted from 1."""
    plain, count = FakeEngine.update, iter(range(1, 99))

    def update(self: FakeEngine, rows: Sequence[Any]) -> UpdateResult:
        if next(count) not in which:
            return plain(self, rows)
        nothing = [np.full(len(row.mask), np.nan, np.float32) for row in rows]
        return UpdateResult({}, nothing, nothing, "the loss is nan")

    return update


@dataclass
class FakeEncoder:
    """One token per letter; of the broken prompts that is not known before they are encoded."""

    broken: frozenset[str] = frozenset()

    def num_tokens(self, prompt: Prompt) -> int:
        return len(prompt.messages[0].content)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        if prompt.id in self.broken:
            raise DataError("The image cannot be decoded: truncated", where="images[0]")
        ids = np.zeros(self.num_tokens(prompt), np.int32)
        return EncodedPrompt(prompt=prompt, text="", token_ids=ids, images=())

    def demonstrate(self, prompt: EncodedPrompt, *, all_turns: bool = False) -> Sample:
        length = len(str(prompt.prompt.demonstration))
        return Sample(prompt, (Segment(np.ones(length, np.int32), True, np.zeros(length, np.float32)),))


@dataclass
class FakeScorer:
    """Scores by a function of prompt id and member, -1 for a greedy rollout; NaN is None, infinity a failure."""

    score: Callable[[str, int], float]

    def submit(self, group: RolloutGroup, failures: Failures, *, needed: bool = True) -> Future[ScoredGroup]:
        members = [-1 if rollout.text == "greedy" else rollout.index for rollout in group.rollouts]
        values = np.array([self.score(group.prompt.id, member) for member in members], float)
        for place in np.flatnonzero(np.isinf(values)):
            failures.add(Failure("other", group.rollouts[place], "ended its worker (exit code 1)"))
        valid = np.isfinite(values)
        values = np.where(valid, values, np.nan)
        failures.check()
        future: Future[ScoredGroup] = Future()
        future.set_result(ScoredGroup(group, np.where(valid, values, 0), valid, {"right": values, "other": 2 * values}))
        return future


@dataclass
class FakeRecorder:
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    rolled: dict[int, list[CreditedGroup]] = field(default_factory=dict)
    begun: dict[int, Any] = field(default_factory=dict)
    looks: dict[int, Looked] = field(default_factory=dict)
    evaluated: dict[tuple[str, int], list[CreditedGroup]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    ledger: list[tuple[int, int, list[Any]]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def look(self, step: int, values: Any) -> Looked:
        return self.looks.get(step, Looked())

    def log(self, step: int, values: Any) -> None:
        self.logged[step] = dict(values)

    def rollouts(self, step: int, groups: Sequence[CreditedGroup], state: Any) -> None:
        self.rolled[step], self.begun[step] = list(groups), state
        self.order.append(f"rollouts {step}")

    def evaluation(self, step: int, groups: Sequence[CreditedGroup], *, name: str, blank: bool) -> None:
        self.evaluated["blank" if blank else "step", step] = list(groups)

    def wait_for_rollouts(self) -> None:
        self.order.append("wait")

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def progress(self, phase: str, done: int, total: int) -> None:
        assert 0 < done <= total

    def trained(self, step: int, update: int, samples: Any) -> None:
        self.ledger.append((step, update, list(samples)))

    def save(self, learner: Any, step: int, values: Any, state: Any) -> None:
        self.saved.append(step)
        self.order.append(f"save {step}")
        self.states[step] = json.loads(json.dumps(state))


@dataclass
class Run:
    engine: FakeEngine
    recorder: FakeRecorder
    trainer: Trainer

    def fit(self) -> Run:
        self.trainer.fit()
        return self


@pytest.fixture
def run() -> Callable[..., Run]:
    """Builds a run of 5 prompts; options of the config by section, of the fake engine by name."""

    def build(
        *,
        algorithm: Any = None,
        score: Callable[[str, int], float] = lambda prompt, member: float(member % 2),
        evaluate: bool = False,
        precision: str = "float32",
        engine: dict[str, float] | None = None,
        scorer: Any = None,
        broken: frozenset[str] = frozenset(),
        **sections: Any,
    ) -> Run:
        algorithm = algorithm or GRPO(GRPO.Config())
        base = {
            "model": {"path": "m"},
            "data": {"train": {"name": "rows"}, **({"eval": {"name": "rows"}} if evaluate else {})},
            "rewards": [{"name": "right"}, {"name": "other"}],
            "algorithm": {"name": "any"},
            "sampler": {"group_size": 4},
            "trainer": {"steps": 3, "prompts_per_step": 2, **sections.pop("trainer", {})},
        }
        config = from_mapping(base | sections)
        fake, recorder, encoder = FakeEngine(algorithm, **(engine or {})), FakeRecorder(), FakeEncoder(broken)
        rows = [Prompt(f"p{i}", (Message("user", "x" * (i + 1)),), demonstration="y" * (i + 2)) for i in range(5)]
        source = PromptSource([DatasetRows("kit", rows)], encoder, max_prompt_tokens=9, max_bad_rows=0.2)
        source.listen(lambda prompt, reason: recorder.event("dropped", prompt=prompt, reason=reason))
        penalties = frozenset({"other"})
        collector = Collector(
            config, fake, scorer or FakeScorer(score), recorder.progress, penalties, event=recorder.event
        )
        held_out = {"": source} if evaluate else {}
        return Run(
            fake,
            recorder,
            Trainer(
                config,
                algorithm,
                fake,
                encoder,
                collector,
                source,
                held_out,
                RunContext(recorder, Interruption(), Watchdog(None, bool, print), Profiler(fake, Path(), 0, 0, print)),
                precision=precision,
                peak_flops_per_s=PEAK,
            ),
        )

    return build


@pytest.mark.parametrize(("samples", "parts", "epochs"), [(8, 1, 1), (8, 4, 1), (7, 3, 2), (2, 5, 1)])
def test_minibatches_cover_every_sample_once_per_epoch(samples, parts, epochs):
    found = list(minibatches(np.arange(samples), parts, epochs, (0, 1)))
    per_epoch = min(parts, samples)
    assert len(found) == per_epoch * epochs
    for epoch in range(epochs):
        part = found[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(index for indices in part for index in indices) == list(range(samples))
        assert max(map(len, part)) - min(map(len, part)) <= 1


def test_minibatches_are_drawn_anew_each_step_and_epoch_and_repeat_with_the_seed():
    draw = [list(minibatches(np.arange(16), 2, 2, (0, step))) for step in (1, 2, 1)]
    assert draw[0] == draw[2] != draw[1]
    assert draw[0][:2] != draw[0][2:]


def test_groups_stay_whole_in_minibatches_unless_there_are_too_few():
    group_ids = np.array([7, 7, 3, 3, 3, 9, 7])
    members = [{0, 1, 6}, {2, 3, 4}, {5}]
    for part in minibatches(group_ids, 2, 3, (0, 1)):
        assert all(group <= set(part) or not group & set(part) for group in members)
    assert sorted(len(part) for part in minibatches(group_ids, 4, 1, (0, 1))) == [1, 2, 2, 2]
    assert sorted(len(part) for part in minibatches(group_ids, 4, 1, (0, 1), whole=True)) == [1, 3, 3]


def test_the_sampler_of_each_step_is_probed_and_that_of_an_evaluation_is_not(run):
    asked: list[Any] = []

    class Probe:
        def ask_sampler(self, sampler: Any, version: int | None) -> dict[str, float]:
            asked.append((sampler, version))
            return {"mismatch/probe_abs_max": 0.5}

    made = run(evaluate=True, trainer={"steps": 2, "eval_every": 1})
    made.trainer._collector.probe = Probe()
    made.fit()
    assert asked == [(made.engine, None)] * 2 and made.engine.verbs.count("sampling") > 2
    assert [made.recorder.logged[step].get("mismatch/probe_abs_max") for step in range(3)] == [None, 0.5, 0.5]


def test_a_step_samples_checks_itself_and_updates_in_this_order(run):
    done = run(trainer={"steps": 2}).fit()
    first = ["sampling", "learning", "logprobs", "learning", "logprobs one by one"] + ["learning"] * 2 + ["update"]
    assert done.engine.verbs == ["learning", *first, "sampling", "learning", "update", "learning"]  # the ends: saves


@pytest.mark.parametrize("algorithm", [None, SFT(SFT.Config())], ids=["rollouts", "demonstrations"])
def test_a_prompt_that_cannot_be_encoded_is_replaced_by_the_next(algorithm, run):
    expected = [f"p{row}" for _, row in PromptOrder(5, seed=0).take(0, 20)]
    done = run(algorithm=algorithm, broken=frozenset({expected[2]}), trainer={"steps": 4}).fit()
    good = [name for name in expected if name != expected[2]]
    taken = [{row.sample.prompt.id for row in rows} for rows in done.engine.updates]
    assert taken == [set(good[i : i + 2]) for i in (0, 2, 4, 6)]
    consumed = expected[: done.trainer.consumed_prompts]
    assert [name for name in consumed if name != expected[2]] == good[:8] and consumed[-1] == good[7]
    assert [e for e in done.recorder.events if e["kind"] == "dropped"] == [
        {"kind": "dropped", "prompt": expected[2], "reason": "The image cannot be decoded: truncated (images[0])"}
    ]


def test_too_many_prompts_that_cannot_be_encoded_stop_the_run(run):
    with pytest.raises(DataError, match="2 of 5 rows cannot be used"):
        run(broken=frozenset({"p1", "p4"})).fit()


def test_evaluation_leaves_out_what_cannot_be_encoded(run):
    done = run(evaluate=True, broken=frozenset({"p3"}), trainer={"steps": 1}).fit()
    evaluated = [request.prompt.id for request in done.engine.requests if request.num_samples == 1]
    assert evaluated == ["p0", "p1", "p2", "p4"] * 2
    assert done.recorder.logged[0]["eval/accuracy"] == 1


def test_prompts_of_an_evaluation_are_encoded_once_and_those_of_a_step_while_the_one_before_learns(run, monkeypatch):
    encoded: list[tuple[str, bool]] = []
    encode = FakeEncoder.encode

    def noting(self: FakeEncoder, prompt: Prompt) -> EncodedPrompt:
        encoded.append((prompt.id, threading.current_thread() is threading.main_thread()))
        return encode(self, prompt)

    monkeypatch.setattr(FakeEncoder, "encode", noting)
    run(evaluate=True, trainer={"steps": 4, "eval_every": 2}).fit()
    here = [name for name, is_here in encoded if is_here]
    assert sorted(here[:5]) == ["p0", "p1", "p2", "p3", "p4"] and len(here) == 5 + 2  # three evaluations, and step 1
    assert len(encoded) == 5 + 4 * 2 and not [t for t in threading.enumerate() if t.name == "mmrl-prompts"]


@pytest.mark.parametrize(("kept", "times"), [(5, 1), (4, 3)])
def test_an_evaluation_of_more_prompts_than_are_kept_encodes_them_again(kept, times, run, monkeypatch):
    encoded: list[str] = []
    encode = FakeEncoder.encode
    monkeypatch.setattr(
        FakeEncoder, "encode", lambda self, prompt: (encoded.append(prompt.id), encode(self, prompt))[1]
    )
    monkeypatch.setattr("mmrl.step.evaluate.MAX_HELD_OUT", kept)
    done = run(evaluate=True, trainer={"steps": 4, "eval_every": 2})
    done.fit()
    assert len(encoded) == times * 5 + 4 * 2  # three evaluations of five prompts, and four steps of two
    assert [done.recorder.logged[step]["eval/accuracy"] for step in (0, 2, 4)] == [1, 1, 1]


@pytest.mark.parametrize("case", ["plain", "broken", "refill", "demonstrations"])
def test_a_run_is_the_same_whether_its_prompts_were_prepared_or_not(run, monkeypatch, case):
    def trained() -> tuple[Any, ...]:
        options: dict[str, Any] = {"trainer": {"steps": 7, "prompts_per_step": 2, "save_every": 1}}
        if case == "broken":
            options["broken"] = frozenset({"p3"})
        elif case == "refill":
            options["algorithm"] = Picky(lambda group: group.group.prompt.id not in ("p0", "p2"), Refill())
        elif case == "demonstrations":
            options |= {"algorithm": SFT(SFT.Config()), "broken": frozenset({"p1"})}
        done = run(**options).fit()
        kept = {s: {k: v for k, v in m.items() if not k.startswith("perf/")} for s, m in done.recorder.logged.items()}
        return kept, done.recorder.events, done.recorder.ledger, done.recorder.states

    prepared = trained()
    monkeypatch.setattr("mmrl.rollout.prefetch.PromptPrefetcher.prepare", lambda self, count: None)
    assert prepared == trained()


def test_a_step_waits_for_slow_rewards_only_as_long_as_they_take_beyond_generation(run, tmp_path, monkeypatch):
    path = tmp_path / "rewards.py"
    path.write_text("import time\n\ndef slow(rollouts):\n    time.sleep(0.2)\n    return [1.0] * len(rollouts)\n")
    group = FakeEngine._group

    def slowly(self: FakeEngine, request: Any) -> Any:
        time.sleep(0.3)
        return group(self, request)

    monkeypatch.setattr(FakeEngine, "_group", slowly)
    name = f"{path}:slow"
    with Scorer([RewardSpec(name=name)], workers=1) as scorer:
        done = run(scorer=scorer, rewards=[{"name": name}], trainer={"steps": 2, "prompts_per_step": 4}).fit()
    # Four groups take 0.8 s to score one after the other, in which the next ones are generated.
    assert done.recorder.logged[2]["perf/generate_s"] > 1.2 and done.recorder.logged[2]["perf/score_s"] < 0.4


@pytest.mark.parametrize(("needs", "times"), [(Needs(), 3), (Needs(refill=Refill(1)), 6)])
def test_a_steps_groups_are_one_batch_once(needs, times, run, monkeypatch):
    """Twice where some are rejected: metrics are of all groups, credit is for those that are kept."""
    made, plain = [], rollout_batch.batch_of

    def counting(groups, *rest):
        made.append(len(groups))
        return plain(groups, *rest)

    for module in ("step.learn", "rollout.collector"):
        monkeypatch.setattr(f"mmrl.{module}.batch_of", counting)
    monkeypatch.setattr(GRPO, "needs", lambda self: needs)
    monkeypatch.setattr(GRPO, "select", lambda self, groups: [False] + [True] * (len(groups) - 1))
    run().fit()
    assert len(made) == times


def test_one_optimizer_step_needs_no_old_logprobs(run):
    done = run().fit()
    assert all("old_logprobs" not in row.columns for rows in done.engine.updates for row in rows)


@pytest.mark.parametrize("learner", [{"minibatches": 3}, {"epochs": 2}])
def test_several_optimizer_steps_cover_the_batch(run, learner):
    done = run(learner=learner).fit()
    per_step = learner.get("minibatches", 1) * learner.get("epochs", 1)
    assert len(done.engine.updates) == 3 * per_step
    for row in (row for rows in done.engine.updates for row in rows):
        np.testing.assert_array_equal(row.columns["old_logprobs"], row.sample.sampler_logprobs)
    for start in range(0, 3 * per_step, per_step):
        members = [id(row.sample) for rows in done.engine.updates[start : start + per_step] for row in rows]
        assert len(set(members)) == 8 and len(members) == 8 * learner.get("epochs", 1)
        assert sum(row.weight * row.mask.sum() for row in done.engine.updates[start]) == pytest.approx(1)


@pytest.mark.parametrize(("learner", "updates"), [({"minibatches": 2, "epochs": 2}, 4), ({"epochs": 3}, 3)])
def test_old_logprobs_are_frozen_while_the_current_ones_move(run, learner, updates):
    done = run(learner=learner, engine={"learns": 0.25}, trainer={"steps": 1}).fit()
    assert len(done.engine.updates) == updates
    old: dict[int, np.ndarray] = {}
    for number, (rows, current) in enumerate(zip(done.engine.updates, done.engine.current, strict=True)):
        for row, values in zip(rows, current, strict=True):
            first = old.setdefault(id(row.sample), row.columns["old_logprobs"])
            np.testing.assert_array_equal(row.columns["old_logprobs"], first)
            np.testing.assert_array_equal(row.columns["old_logprobs"], row.sample.sampler_logprobs)
            np.testing.assert_allclose(values - row.columns["old_logprobs"], 0.25 * number, atol=1e-6)
    assert len(old) == 8


def test_what_the_algorithm_needs_is_computed(run):
    algorithm = GRPO(GRPO.Config.model_validate({"kl": {"coef": 0.1, "where": "reward"}}))
    done = run(algorithm=algorithm, trainer={"steps": 1}).fit()
    assert done.engine.verbs[-4:] == ["logprobs", "reference_logprobs", "update", "learning"]
    assert done.recorder.logged[1]["kl/reference"] == pytest.approx(0.1)


def test_every_prompt_comes_once_per_epoch_with_a_seed_of_its_own(run):
    done = run(trainer={"steps": 5}).fit()
    ids = [request.prompt.id for request in done.engine.requests]
    assert sorted(ids[:5]) == sorted(ids[5:]) == [f"p{i}" for i in range(5)]
    assert len({request.seed for request in done.engine.requests}) == 10
    assert {(r.num_samples, r.temperature) for r in done.engine.requests} == {(4, 1.0)}


def test_evaluation_before_during_and_after_the_run(run):
    done = run(evaluate=True, score=lambda prompt, member: float(prompt == "p1"), trainer={"steps": 5, "eval_every": 2})
    done.fit()
    assert [s for s, values in done.recorder.logged.items() if "eval/accuracy" in values] == [0, 2, 4, 5]
    assert done.recorder.logged[0]["eval/accuracy"] == pytest.approx(1 / 5)
    assert done.recorder.logged[0]["eval/other_mean"] == pytest.approx(2 / 5)
    greedy = [r for r in done.engine.requests if r.temperature == 0]
    assert len(greedy) == 4 * 5 and {r.num_samples for r in greedy} == {1}
    assert not {r.seed for r in greedy} & {r.seed for r in done.engine.requests if r.temperature}


def test_evaluation_with_several_samples_is_at_the_sampling_temperature(run):
    done = run(evaluate=True, trainer={"steps": 1, "eval_samples": 2, "eval_metric": "other"}).fit()
    logged = done.recorder.logged[0]
    assert logged["eval/other_mean"] == pytest.approx(1.0)  # members 0 and 1, twice 0.5
    assert logged["eval/accuracy"] == 0.5  # of values 0.5 and 1.5
    assert {r.num_samples for r in done.engine.requests[:5]} == {2} and done.engine.requests[0].temperature == 1.0


CONTRACT = {
    "reward/mean", "reward/std", "reward/right_mean", "reward/other_mean", "eval/accuracy", "eval/reward_mean",
    "group/zero_signal_fraction", "advantage/abs_mean", "policy/entropy", "policy/grad_norm",
    "policy/clip_fraction_high", "policy/clip_fraction_low", "kl/reference", "mismatch/logprob_abs_mean",
    "mismatch/logprob_abs_max", "mismatch/kl", "mismatch/token_mult_prob_error", "length/completion_mean",
    "length/truncated_fraction", "loss/policy",
    "lr", "perf/step_s", "perf/sync_s", "perf/generate_s", "perf/score_s", "perf/logprob_s", "perf/update_s",
    "perf/prompts_s", "perf/credit_s", "perf/check_s", "perf/record_s", "perf/other_s", "perf/eval_s", "perf/save_s",
    "perf/tokens_per_s", "perf/generate_tokens_per_s", "perf/update_tokens_per_s", "perf/score_share",
    "perf/mfu", "perf/update_memory_bytes_max", "reward/right_failed_fraction",
    "policy/skipped_updates", "advantage/mean", "advantage/max", "group/all_correct_fraction",
    "group/all_wrong_fraction",
}  # fmt: skip
"""Metrics that every run of rollouts logs, but for perf/memory_bytes_max, which the run adds."""


def test_a_step_logs_every_metric_of_the_contract(run):
    algorithm = GRPO(GRPO.Config.model_validate({"kl": {"coef": 0.1}}))
    done = run(algorithm=algorithm, evaluate=True, trainer={"steps": 1}).fit()
    values = done.recorder.logged[1]
    assert values.keys() >= CONTRACT
    assert all(np.isfinite(value) for value in values.values())
    assert values["reward/mean"] == values["reward/std"] == 0.5
    assert values["advantage/abs_mean"] == pytest.approx(0.866, abs=1e-3)  # 0.5 / std([0, 1, 0, 1], ddof=1)
    assert values["advantage/max"] == pytest.approx(0.866, abs=1e-3) and abs(values["advantage/mean"]) < 0.866
    assert not any(name.startswith("rollout/") or name == "reward/greedy_mean" for name in values)
    assert values["group/zero_signal_fraction"] == 0 and values["mismatch/kl"] == 0
    assert values["mismatch/token_mult_prob_error"] == 1
    completion = sum(len(r.token_ids) for group in done.recorder.rolled[1] for r in group.scored.group.rollouts)
    assert values["perf/generate_tokens_per_s"] == pytest.approx(completion / values["perf/generate_s"])
    assert values["perf/update_tokens_per_s"] == pytest.approx(completion / values["perf/update_s"])
    assert values["perf/mfu"] == pytest.approx(FLOPS / (values["perf/update_s"] * PEAK))
    assert values["perf/update_memory_bytes_max"] == 77
    assert values["perf/score_share"] == pytest.approx(values["perf/score_s"] / values["perf/step_s"])


def test_phases_sum_to_the_step(run):
    class Slow(GRPO):
        def credit(self, batch):
            time.sleep(0.3)
            return super().credit(batch)

    done = run(algorithm=Slow(GRPO.Config()), trainer={"steps": 2}).fit()
    beside = {"perf/step_s", "perf/eval_s", "perf/save_s"}
    for values in (done.recorder.logged[1], done.recorder.logged[2]):
        phases = {k: v for k, v in values.items() if k.startswith("perf/") and k.endswith("_s")}
        phases = {k: v for k, v in phases.items() if "tokens" not in k and k not in beside}
        assert sum(phases.values()) == pytest.approx(values["perf/step_s"])
        assert values["perf/credit_s"] >= 0.3 and min(phases.values()) >= 0
    assert "perf/check_s" not in done.recorder.logged[2]


def test_unscored_rollouts_leave_statistics_and_loss(run):
    def score(prompt, member):
        return np.nan if member == 3 else 2.0 * member

    done = run(score=score, trainer={"steps": 1}).fit()
    values = done.recorder.logged[1]
    assert values["reward/mean"] == pytest.approx(2.0) and values["reward/right_mean"] == pytest.approx(2.0)
    assert values["reward/unscored_fraction"] == 0.25
    (rows,) = done.engine.updates
    assert {row.sample.index for row in rows} == {0, 1, 2}
    assert sum(row.weight * row.mask.sum() for row in rows) == pytest.approx(1)  # weights are of the rows that are left
    groups = done.recorder.rolled[1]
    assert [group.scored.group.prompt.id for group in groups] == [r.prompt.id for r in done.engine.requests]
    assert all(len(group.advantages) == len(group.logprobs) == 4 and len(group.logprobs[3]) == 0 for group in groups)
    assert all((group.advantages[3] == 0).all() and (group.advantages[2] > 0).all() for group in groups)


def test_failures_are_unscored_counted_and_noted_each(run):
    def score(prompt, member):
        return np.inf if (prompt, member) == (failing, 2) else float(member % 2)

    failing = run(trainer={"steps": 1}).fit().engine.requests[0].prompt.id
    many = {"sampler": {"group_size": 10}, "evaluate": True}
    done = run(score=score, trainer={"steps": 1}, **many).fit()
    values = done.recorder.logged[1]
    assert values["reward/other_failed_fraction"] == 1 / 20
    assert values["reward/unscored_fraction"] == pytest.approx(1 / 20)
    assert values["reward/right_failed_fraction"] == 0 == values["eval/other_failed_fraction"]
    (event,) = done.recorder.events
    assert event["kind"] == "reward_failed" and (event["prompt"], event["member"]) == (failing, 2)
    assert event["reward"] == "other" and event["cause"] == "ended its worker (exit code 1)"
    assert f"reward 'other' ended its worker (exit code 1): prompt {failing!r}, rollout 2" in event["message"]


def test_more_failures_than_five_percent_stop_the_step_with_an_event_for_each(run):
    stopped = run(score=lambda prompt, member: np.inf if member == 0 else 1.0, trainer={"steps": 1})
    with pytest.raises(RewardError, match=r"failed on 1 of the step's 8 rollouts: reward 'other' on 1") as caught:
        stopped.fit()
    assert "up to 5% of a step" in str(caught.value) and "mmrl rewards test" in str(caught.value)
    assert [event["member"] for event in stopped.recorder.events] == [0]
    assert stopped.engine.updates == []
    (group,) = stopped.recorder.rolled[1]  # what was sampled by then
    assert len(group.scored.group.rollouts) == 4 and not group.scored.kept
    assert not group.scored.valid.any() and group.scored.components == {}


def test_real_workers_that_die_stop_the_step(run, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("import os\n\ndef dies(rollouts):\n    os._exit(3) if rollouts[0].prompt.id == 'p3' else None\n")
    path.write_text(path.read_text() + "    return [float(r.index % 2) for r in rollouts]\n")
    rewards = [{"name": f"{path}:dies"}]
    with Scorer([RewardSpec(name=f"{path}:dies")], workers=2) as scorer:
        stopped = run(scorer=scorer, rewards=rewards, trainer={"steps": 3, "prompts_per_step": 2})
        with pytest.raises(RewardError, match=r"failed on [1-4] of the step's 8 rollouts: reward 'dies'") as caught:
            stopped.fit()
    assert caught.value.exit_code == 4 and "ended its worker (exit code 3)" in str(caught.value)
    first = stopped.recorder.events[0]
    assert (first["kind"], first["prompt"], first["member"]) == ("reward_failed", "p3", 0)
    assert all(values["reward/dies_failed_fraction"] == 0 for step, values in stopped.recorder.logged.items() if step)


def test_reasons_of_a_reward_for_what_it_leaves_unscored_are_one_event_of_a_step(run, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("from mmrl import Unscored\n\ndef judge(rollouts):\n    return [Unscored('found no verdict')")
    path.write_text(path.read_text() + " if r.index > 1 else None if r.index else 1.0 for r in rollouts]\n")
    rewards = [{"name": f"{path}:judge"}]
    with Scorer([RewardSpec(name=f"{path}:judge")], workers=2) as scorer:
        done = run(scorer=scorer, rewards=rewards, trainer={"steps": 2, "prompts_per_step": 2}).fit()
    events = [each for each in done.recorder.events if each["kind"] == "reward_unscored"]
    assert [(each["reward"], each["count"], each["cause"]) for each in events] == [("judge", 4, "found no verdict")] * 2
    first = events[0]
    assert first["message"].startswith("reward 'judge' left 4 rollouts unscored; of prompt 'p")
    assert first["message"].endswith(" it found no verdict") and first["member"] == 2
    assert done.recorder.logged[1]["reward/unscored_fraction"] == 0.75
    assert done.recorder.logged[1]["reward/judge_failed_fraction"] == 0


def test_an_accuracy_that_scores_no_row_of_the_evaluation_is_no_zero(run, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("def right(rollouts):\n    return [1.0] * len(rollouts)\n")
    rewards = [{"name": f"{path}:right", "sources": ["a"]}, {"name": f"{path}:right", "label": "other"}]
    with (
        Scorer([RewardSpec(**spec) for spec in rewards], workers=1) as scorer,
        pytest.raises(ConfigError, match=r"reward 'right', by which eval/accuracy judges, scores no row of data.eval"),
    ):
        run(scorer=scorer, rewards=rewards, evaluate=True).fit()


def test_a_step_whose_rollouts_are_all_invalid_goes_on(run):
    done = run(score=lambda prompt, member: np.nan).fit()
    assert done.engine.updates == [[], [], []]
    assert done.recorder.logged[3]["reward/unscored_fraction"] == 1.0
    assert all(np.isfinite(value) for value in done.recorder.logged[3].values())


def test_equal_rewards_are_no_signal(run):
    done = run(score=lambda prompt, member: 0.7, trainer={"steps": 1}).fit()
    assert done.recorder.logged[1]["group/zero_signal_fraction"] == 1.0
    assert all((row.advantages == 0).all() for row in done.engine.updates[0])
    assert done.recorder.logged[1]["loss/policy"] == 0.0
    (event,) = done.recorder.events
    assert event["kind"] == "no_signal" and "step 1 taught nothing: every advantage is 0" in event["message"]


def test_a_mismatch_stops_before_the_first_update(run):
    stopped = run(engine={"gap": 0.01})
    with pytest.raises(NumericsError, match="sampler and learner disagree before the first update") as caught:
        stopped.fit()
    assert caught.value.exit_code == 6 and "on_mismatch: warn" in caught.value.remedy
    assert stopped.engine.updates == [] and stopped.recorder.saved == [0]
    assert len(stopped.recorder.rolled[1]) == 2
    assert stopped.recorder.order[-2:] == ["rollouts 1", "wait"]  # on disk before the error leaves the loop
    assert stopped.recorder.events[0]["kind"] == "mismatch" and stopped.recorder.events[0]["verdict"] == "stop"


def test_packed_and_single_logprobs_that_differ_stop_before_the_first_update(run):
    stopped = run(engine={"split": 0.01})
    with pytest.raises(NumericsError, match="packed and one-by-one log-probs disagree"):
        stopped.fit()
    assert stopped.engine.updates == []


def test_a_mismatch_that_appears_later_stops_too(run):
    stopped = run(engine={"drift": 0.01})
    with pytest.raises(NumericsError, match=r"disagree in step 1: mean 1\.00e-02"):
        stopped.fit()
    assert len(stopped.recorder.rolled[1]) == 2  # for whoever looks for the cause
    assert stopped.recorder.order[-2:] == ["rollouts 1", "wait"]


def test_rollouts_are_recorded_also_of_a_step_that_fails_to_learn(run, monkeypatch):
    stopped = run()
    monkeypatch.setattr(FakeEngine, "update", lambda self, rows: (_ for _ in ()).throw(NumericsError("not finite")))
    with pytest.raises(NumericsError, match="not finite"):
        stopped.fit()
    assert [len(group.scored.group.rollouts) for group in stopped.recorder.rolled[1]] == [4, 4]
    assert not any(values.any() for group in stopped.recorder.rolled[1] for values in group.advantages)


def test_a_step_is_logged_although_its_checkpoint_fails(run):
    done = run(trainer={"save_every": 1})

    def fail(*arguments: Any) -> None:
        raise ResourceError("the disk is full")

    done.recorder.save = fail  # type: ignore[method-assign]
    with pytest.raises(ResourceError, match="the disk is full"):  # the last one has to be kept, the others not
        done.fit()
    assert sorted(done.recorder.logged) == [0, 1, 2, 3] and "loss/policy" in done.recorder.logged[3]
    assert [(e["kind"], e["step"]) for e in done.recorder.events] == [("checkpoint_failed", i) for i in range(4)]


def test_a_device_that_is_lost_while_a_checkpoint_is_written_ends_the_run(run):
    stopped = run(trainer={"save_every": 1})

    def fail(*arguments: Any) -> None:
        raise DeviceBusyError("the GPU cannot be used")

    stopped.recorder.save = fail  # type: ignore[method-assign]
    with pytest.raises(DeviceBusyError):
        stopped.fit()
    assert stopped.recorder.events == []


def test_an_optimizer_step_that_comes_to_nothing_is_told_with_what_it_was_made_of(run, monkeypatch):
    monkeypatch.setattr(FakeEngine, "update", faulty(2))
    done = run(learner={"minibatches": 2}, trainer={"steps": 2}).fit()
    assert [done.recorder.logged[step]["policy/skipped_updates"] for step in (1, 2)] == [1, 0]
    assert [(step, update) for step, update, _ in done.recorder.ledger] == [(1, 1), (2, 2), (2, 3)]
    (event,) = done.recorder.events  # and no mismatch: what is not finite is no disagreement
    assert (event["kind"], event["step"], event["in_a_row"]) == ("update_skipped", 1, 1)
    assert "the loss is nan" in event["message"] and json.loads(json.dumps(event)) == event
    trained = {name for _, _, samples in done.recorder.ledger[:1] for name in samples}
    rollouts = [r for group in done.recorder.rolled[1] for r in group.scored.group.rollouts]
    skipped = [r for r in rollouts if (0, r.prompt.id, r.index) not in trained]
    assert event["samples"] == sorted({r.prompt.id for r in skipped}) and len(skipped) == len(event["weights"]) == 4
    assert sorted(event["completion_tokens"]) == sorted(len(r.token_ids) for r in skipped)
    assert event["advantages"]["min"] < 0 < event["advantages"]["max"]
    recorded = [values for group in done.recorder.rolled[1] for values in group.logprobs]
    assert all(len(values) and np.isfinite(values).all() for values in recorded)
    updates = [each for group in done.recorder.rolled[1] for each in group.updates]
    assert {len(each) for each in updates} == {1} and sum(len(each[0].logprobs) == 0 for each in updates) == 4
    assert done.recorder.logged[1]["mismatch/logprob_abs_max"] == 0
    assert all(np.isfinite(value) for value in done.recorder.logged[1].values())


def test_a_step_of_nothing_but_skipped_updates_is_logged_and_the_run_goes_on(run, monkeypatch):
    monkeypatch.setattr(FakeEngine, "update", faulty(1, 2))
    done = run(trainer={"steps": 3}).fit()
    assert [done.recorder.logged[step]["policy/skipped_updates"] for step in (1, 2, 3)] == [1, 1, 0]
    assert "loss/policy" not in done.recorder.logged[1] and "loss/policy" in done.recorder.logged[3]
    assert [event["in_a_row"] for event in done.recorder.events] == [1, 2]
    assert done.trainer.state()["updates"] == 1


@pytest.mark.parametrize("which", [(1, 2, 3), (2, 3, 5, 6, 7)])
def test_three_skipped_updates_in_a_row_end_the_run(run, monkeypatch, which):
    monkeypatch.setattr(FakeEngine, "update", faulty(*which))
    stopped = run(trainer={"steps": 9, "save_every": 1})
    with pytest.raises(NumericsError, match="3 optimizer steps in a row came to nothing: the loss is nan") as caught:
        stopped.fit()
    assert caught.value.exit_code == 6 and "the last checkpoint is good" in caught.value.remedy
    last = which[-1]
    assert stopped.recorder.saved == list(range(last)) and f"step {last}" in caught.value.where
    assert [len(group.advantages) for group in stopped.recorder.rolled[last]] == [4, 4]
    assert stopped.recorder.events[-1]["in_a_row"] == 3


def test_skipped_updates_are_counted_through_a_resume(run, monkeypatch, tmp_path):
    monkeypatch.setattr(FakeEngine, "update", faulty(1, 2, 3))
    first = run(trainer={"steps": 2, "save_every": 1}).fit()
    second = run(trainer={"steps": 3})
    second.trainer.restore(first.recorder.states[2], tmp_path, 2)
    with pytest.raises(NumericsError, match="3 optimizer steps in a row"):
        second.trainer.fit(2)
    assert second.recorder.saved == []


def test_an_update_of_no_rows_may_come_to_nothing_too(run, monkeypatch):
    monkeypatch.setattr(FakeEngine, "update", faulty(1))
    done = run(score=lambda prompt, member: np.nan, trainer={"steps": 1}).fit()
    assert [event["kind"] for event in done.recorder.events[:2]] == ["unscored", "update_skipped"]


def test_warned_of_a_mismatch_the_run_goes_on(run):
    done = run(engine={"gap": 0.01}, trainer={"on_mismatch": "warn"}).fit()
    assert done.recorder.saved == [0, 3]
    assert [event["verdict"] for event in done.recorder.events] == ["stop"] * 4  # the self-check and three steps
    assert done.recorder.logged[2]["mismatch/logprob_abs_max"] == pytest.approx(0.01, rel=1e-3)
    assert done.recorder.logged[2]["mismatch/token_mult_prob_error"] == pytest.approx(np.exp(0.01), rel=1e-5)


def test_the_same_gap_is_fine_in_bfloat16(run):
    done = run(engine={"gap": 0.01}, precision="bfloat16").fit()
    assert [event["kind"] for event in done.recorder.events] == ["numerics"]


def test_demonstrations_are_imitated_without_a_sampler(run):
    done = run(algorithm=SFT(SFT.Config()), engine={"gap": 0.3}).fit()
    assert "sampling" not in done.engine.verbs and done.recorder.events == []
    rows = [row for part in done.engine.updates for row in part]
    assert all((row.advantages == 1).all() for row in rows)
    assert [len(row.mask) for row in rows] == [len(row.sample.prompt.token_ids) + 1 for row in rows]
    assert done.recorder.logged[1]["loss/policy"] == pytest.approx(-0.3)
    assert "reward/mean" not in done.recorder.logged[1]


def test_a_demonstration_is_recorded_as_a_group_of_one_that_nobody_sampled(run):
    """Its sampler's log-probs are zeros: nothing compares them with the learner's, and no reward is logged."""
    done = run(algorithm=SFT(SFT.Config()), engine={"gap": 0.3}, learner={"minibatches": 2}).fit()
    for step, groups in done.recorder.rolled.items():
        assert [(len(group.scored.rollouts), group.trained, group.scored.place) for group in groups] == [
            (1, True, (0, place)) for place in range(2)
        ]
        rollouts = [rollout for group in groups for rollout in group.scored.rollouts]
        assert all(rollout.is_given and group.scored.is_given for group, rollout in zip(groups, rollouts, strict=True))
        assert [rollout.text for rollout in rollouts] == ["y" * len(rollout.token_ids) for rollout in rollouts]
        np.testing.assert_allclose(groups[0].logprobs[0], 0.3)
        assert [len(group.updates[0]) for group in groups] == [1, 1]
        trained = [key for number, _, keys in done.recorder.ledger if number == step for key in keys]
        assert sorted(trained) == sorted(rollout.key for rollout in rollouts)
    assert not any(name.startswith(("mismatch/", "reward/", "group/")) for name in done.recorder.logged[1])


def test_held_out_demonstrations_have_a_loss_where_no_reward_scores(run):
    done = run(algorithm=SFT(SFT.Config()), engine={"gap": 0.3}, evaluate=True, rewards=[]).fit()
    assert {step for step, values in done.recorder.logged.items() if "eval/loss" in values} == {0, 3}
    assert done.recorder.logged[3]["eval/loss"] == pytest.approx(-0.3)
    assert "sampling" not in done.engine.verbs and "eval/accuracy" not in done.recorder.logged[3]
    groups = done.recorder.evaluated["step", 3]
    assert [(group.trained, group.scored.is_given) for group in groups] == [(False, True)] * 5


class Silent(SFT):
    """Its advantages are 0, as of an algorithm whose loss asks for none."""

    def credit(self, batch):
        return Credit(np.zeros(len(batch.rewards)))


def test_advantages_of_0_are_no_news_of_what_nobody_sampled(run):
    done = run(algorithm=Silent(SFT.Config())).fit()
    assert done.recorder.events == [] and done.recorder.logged[1]["advantage/abs_mean"] == 0


def test_demonstrations_are_checked_packed_against_single_too(run):
    with pytest.raises(NumericsError, match="packed and one-by-one"):
        run(algorithm=SFT(SFT.Config()), engine={"split": 0.01}).fit()


def test_weights_are_saved_every_so_often_and_at_the_end(run):
    assert run(trainer={"steps": 5, "save_every": 2}).fit().recorder.saved == [0, 2, 4, 5]


def test_zero_is_never_for_evaluations_and_checkpoints(run):
    done = run(evaluate=True, trainer={"steps": 5, "save_every": 0, "eval_every": 0}).fit()
    assert done.recorder.saved == [0, 5]
    assert not any(name.startswith("eval/") for values in done.recorder.logged.values() for name in values)


def told(done, kind):
    return [event["message"] for event in done.recorder.events if event["kind"] == kind]


@pytest.mark.parametrize(
    ("condition", "trainer", "saved", "last"),
    [
        ("policy/grad_norm >= 1", {"save_every": 9}, [0, 1], 1),
        ("policy/grad_norm>2", {"save_every": 9}, [0, 5], 5),
        ("eval/accuracy >= 0.9", {"save_every": 9}, [0], 0),
        ("length/completion_mean < 99", {"save_every": 1}, [0, 1], 1),
    ],
)
def test_a_run_ends_with_a_checkpoint_after_the_step_that_fulfils_its_condition(condition, trainer, saved, last, run):
    trainer |= {"steps": 5, "stop_when": condition}
    done = run(evaluate=True, score=lambda prompt, member: 1.0, trainer=trainer).fit()
    assert done.recorder.saved == saved and max(done.recorder.logged) == last
    messages = told(done, "stop_when")
    assert len(messages) == (last < 5) and all(f"the run ends after step {last} of 5" in each for each in messages)
    assert told(done, "warning") == []


def test_a_condition_on_a_metric_that_is_not_there_is_told_once(run):
    done = run(trainer={"steps": 3, "stop_when": "policy/grad_nrom >= 1"}).fit()
    assert max(done.recorder.logged) == 3
    (message,) = told(done, "warning")
    assert "policy/grad_nrom is in no step so far" in message and "did you mean policy/grad_norm?" in message


def test_rollouts_are_recorded_with_the_learners_logprobs(run):
    done = run(trainer={"steps": 2}, engine={"gap": 1e-6}).fit()
    for group in (group for groups in done.recorder.rolled.values() for group in groups):
        for rollout, values in zip(group.scored.group.rollouts, group.logprobs, strict=True):
            np.testing.assert_allclose(values, rollout.sampler_logprobs + 1e-6, atol=1e-7)


def test_segments_that_the_policy_did_not_write_are_no_mismatch(run, monkeypatch):
    plain_rollout = FakeEngine._rollout

    def with_tool(self: FakeEngine, request: SamplingRequest, member: int) -> Rollout:
        rollout = plain_rollout(self, request, member)
        tool = Segment(np.ones(2, np.int32), False, np.full(2, -7.0, np.float32))
        return replace(rollout, segments=(*rollout.segments, tool))

    def score(self: FakeEngine, samples: Sequence[Sample], *, way: str = "packed") -> list[np.ndarray]:
        return [np.where(s.mask, s.sampler_logprobs, 0) for s in samples]

    monkeypatch.setattr(FakeEngine, "_rollout", with_tool)
    monkeypatch.setattr(FakeEngine, "score", score)
    done = run(trainer={"steps": 1}).fit()
    assert done.recorder.logged[1]["mismatch/logprob_abs_max"] == 0
    assert all(row.mask.sum() == len(row.mask) - 2 for row in done.engine.updates[0])


class Picky(Algorithm):
    """REINFORCE that keeps the groups that ``keep`` says; remembers what it is shown."""

    aggregation = Aggregation("token-mean")

    def __init__(
        self, keep: Callable[[ScoredGroup], Any] = lambda group: True, refill: Refill | None = None, **needs: Any
    ) -> None:
        super().__init__(self.Config())
        self.keep, self.asked = keep, list[list[ScoredGroup]]()
        self.wants = Needs(refill=refill, **needs)
        self.batches, self.observed = list[Any](), list[Any]()

    def needs(self) -> Needs:
        return self.wants

    def select(self, groups: Sequence[ScoredGroup]) -> Sequence[bool]:
        self.asked.append(list(groups))
        return [self.keep(group) for group in groups]

    def credit(self, batch: Any) -> Credit:
        self.batches.append(batch)
        return Credit(batch.rewards)

    def loss(self, tokens: Any) -> TokenLoss:
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)

    def observe(self, metrics: Any) -> dict[str, float]:
        self.observed.append(metrics)
        return {"own/rewards": metrics["reward/mean"] + 1} if "reward/mean" in metrics else {"own/loss": 7.0}


def one_by_one(*answers: int) -> Callable[[ScoredGroup], bool]:
    """Keeps or rejects by these answers, group by group."""
    rest = iter(answers)
    return lambda group: bool(next(rest))


def prompt_ids(groups: Sequence[ScoredGroup]) -> list[str]:
    return [group.group.prompt.id for group in groups]


def trained_ids(rows: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(row.sample.prompt.id for row in rows))


def is_mixed(group: ScoredGroup) -> bool:
    return bool(np.ptp(group.rewards))


def test_rejected_groups_are_replaced_by_the_next_prompts_of_the_order(run):
    algorithm = Picky(lambda group: group.group.prompt.id not in ("p0", "p3"), Refill())
    done = run(algorithm=algorithm, trainer={"steps": 6}).fit()
    asked = [group for groups in algorithm.asked for group in groups]
    order = [f"p{row}" for _, row in PromptOrder(5, seed=0).take(0, done.trainer.consumed_prompts)]
    assert prompt_ids(asked) == [request.prompt.id for request in done.engine.requests] == order
    kept = [name for name in order if name not in ("p0", "p3")]
    assert [trained_ids(rows) for rows in done.engine.updates] == [kept[i : i + 2] for i in range(0, 12, 2)]
    assert len(asked) > 12 == len(kept)
    assert done.engine.verbs.count("sampling") == 6  # all rounds of a step with one sync
    assert done.recorder.events == []


def test_without_refill_the_algorithm_is_not_asked(run):
    algorithm = Picky(lambda group: False)
    done = run(algorithm=algorithm).fit()
    assert algorithm.asked == [] and len(done.engine.requests) == 6 == done.trainer.consumed_prompts


def test_refilled_batches_do_not_depend_on_the_order_in_which_groups_finish(run):
    def recorded(finish: int) -> list[Any]:
        algorithm = Picky(lambda group: group.group.rollouts[0].token_ids[0] % 2 == 0, Refill())
        done = run(algorithm=algorithm, engine={"finish": finish}, trainer={"steps": 4}).fit()
        rollouts = [
            (row.sample.prompt.id, row.sample.token_ids.tolist()) for part in done.engine.updates for row in part
        ]
        return [rollouts, [request.seed for request in done.engine.requests]]

    first = recorded(0)
    assert first == recorded(1) == recorded(2)
    assert len(first[1]) > 8 and len(set(first[1])) == len(first[1])


def test_what_was_thrown_away_is_logged(run):
    algorithm = Picky(one_by_one(0, 0, 1, 0, 1, 1, 1), Refill())
    done = run(algorithm=algorithm, trainer={"steps": 2}).fit()
    first, second = ({k: v for k, v in done.recorder.logged[s].items() if k.startswith("rollout/")} for s in (1, 2))
    assert first == {
        "rollout/sampled_groups": 5, "rollout/kept_groups": 2, "rollout/acceptance_rate": 0.4, "rollout/rounds": 3,
    }  # fmt: skip
    assert second == {
        "rollout/sampled_groups": 2, "rollout/kept_groups": 2, "rollout/acceptance_rate": 1, "rollout/rounds": 1,
    }  # fmt: skip
    groups = done.recorder.rolled[1]
    assert [group.scored.kept for group in groups] == [True, True, False, False, False]
    assert prompt_ids([group.scored for group in groups[:2]]) == trained_ids(done.engine.updates[0])
    for group in groups[2:]:
        assert all((advantage == 0).all() for advantage in group.advantages)
        assert [len(a) for a in group.advantages] == [len(r.token_ids) for r in group.scored.group.rollouts]
        assert [len(values) for values in group.logprobs] == [0] * 4


def test_metrics_of_rewards_are_of_all_that_was_sampled(run):
    def score(prompt: str, member: int) -> float:
        return {"p0": 1.0, "p1": 1.0, "p2": 0.0, "p3": 0.5}.get(prompt, float(member % 2))

    algorithm = Picky(is_mixed, Refill(max_rounds=0))
    done = run(algorithm=algorithm, score=score, trainer={"steps": 1, "prompts_per_step": 5}).fit()
    values = done.recorder.logged[1]
    assert values["reward/mean"] == values["reward/right_mean"] == pytest.approx((1 + 1 + 0 + 0.5 + 0.5) / 5)
    assert values["group/zero_signal_fraction"] == pytest.approx(4 / 5)
    assert values["group/all_correct_fraction"] == pytest.approx(2 / 5)
    assert values["group/all_wrong_fraction"] == pytest.approx(2 / 5)  # none is right; of p3 each is half right
    assert values["rollout/acceptance_rate"] == pytest.approx(1 / 5)
    assert trained_ids(done.engine.updates[0]) == ["p4"]
    (event,) = done.recorder.events
    assert (event["kind"], event["step"], event["action"]) == ("starved", 1, "train_partial")
    assert event["message"] == "step 1 has 1 of 5 groups: 20.0% of the 5 sampled were kept"


def test_right_and_wrong_are_those_of_the_evaluated_component(run):
    done = run(score=lambda prompt, member: 0.5, evaluate=True, trainer={"steps": 1, "eval_metric": "other"}).fit()
    assert done.recorder.logged[1]["group/all_correct_fraction"] == 1  # 2 * 0.5; of the first component it would be 0


@pytest.mark.parametrize("policy", ["train_partial", "skip"])
def test_a_run_whose_groups_are_all_rejected_ends_without_an_update(run, policy):
    done = run(algorithm=Picky(lambda group: False, Refill(2, policy))).fit()
    assert done.engine.updates == [] and done.trainer.state()["carried_groups"] == []
    assert done.trainer.consumed_prompts == len(done.engine.requests) == 3 * 2 * 3
    assert [event["action"] for event in done.recorder.events if event["kind"] == "starved"] == [policy] * 3
    assert len(done.recorder.events) == 3 and done.recorder.saved == [0, 3]
    assert done.engine.verbs.count("logprobs one by one") == 1  # the self-check, on what was sampled
    for step in (1, 2, 3):
        values = done.recorder.logged[step]
        assert values["rollout/acceptance_rate"] == 0 and values["rollout/sampled_groups"] == 6
        assert values["reward/mean"] == 0.5 and values["length/completion_mean"] >= 1
        assert all(np.isfinite(value) for value in values.values())
        assert [group.scored.kept for group in done.recorder.rolled[step]] == [False] * 6


def test_a_run_that_starves_may_stop(run):
    stopped = run(algorithm=Picky(one_by_one(1, 1, 1, 0, 0), Refill(1, "stop")))
    with pytest.raises(NumericsError, match=r"step 2 has 1 of 2 groups: 33\.3% of the 3 sampled were kept") as caught:
        stopped.fit()
    assert caught.value.exit_code == 6
    assert "after 2 rounds" in caught.value.where and "raise sampler.group_size" in caught.value.remedy
    assert len(stopped.engine.updates) == 1 and list(stopped.recorder.logged) == [0, 1]
    assert [group.scored.kept for group in stopped.recorder.rolled[2]] == [True, False, False]
    assert stopped.recorder.events[-1]["action"] == "stop"


def test_the_self_check_looks_at_rejected_groups_too(run):
    with pytest.raises(NumericsError, match="packed and one-by-one log-probs disagree"):
        run(algorithm=Picky(lambda group: False, Refill(0)), engine={"split": 0.01}).fit()


def test_groups_of_a_skipped_step_are_used_first_in_the_next(run):
    algorithm = Picky(one_by_one(0, 1, 0, 1), Refill(0, "skip"))
    done = run(algorithm=algorithm, trainer={"steps": 3}).fit()
    first, second, third = (prompt_ids(groups) for groups in algorithm.asked)
    assert (len(first), len(second), len(third)) == (2, 1, 1)
    assert [trained_ids(rows) for rows in done.engine.updates] == [[first[1], third[0]]]
    assert [event["step"] for event in done.recorder.events] == [1, 2]
    carried = [[g for g in done.recorder.rolled[step] if g.scored.group.prompt.id == first[1]] for step in (1, 2, 3)]
    assert [len(groups) for groups in carried] == [1, 0, 1]
    assert carried[0][0].scored.kept and all(len(values) == 0 for values in carried[0][0].logprobs)
    assert carried[2][0].scored.kept and all(len(values) > 0 for values in carried[2][0].logprobs)
    assert done.recorder.logged[3]["rollout/kept_groups"] == done.recorder.logged[3]["rollout/sampled_groups"] == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda groups: [True], "2 groups need one bool each, not [True]"),
        (lambda groups: groups, "2 groups need one bool each, not [ScoredGroup"),
        (lambda groups: None, "TypeError"),
        (lambda groups: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_selection_that_is_none_is_the_algorithms_fault(run, monkeypatch, answer, message):
    monkeypatch.setattr(Picky, "select", lambda self, groups: answer(groups))
    with pytest.raises(PluginError, match=r"Picky\.select") as caught:
        run(algorithm=Picky(refill=Refill())).fit()
    assert message in str(caught.value)


def test_greedy_rollouts_are_sampled_along_and_never_trained_on(run):
    def score(prompt: str, member: int) -> float:
        return 0.25 * int(prompt[1]) if member == -1 else float(member % 2)

    algorithm = Picky(greedy_rollout=True)
    sections = {
        "trainer": {"steps": 2, "prompts_per_step": 5},
        "rewards": [{"name": "right"}, {"name": "other", "weight": 0.5}],
    }
    done = run(algorithm=algorithm, score=score, **sections).fit()
    sampled = [request for request in done.engine.requests if request.temperature]
    greedy = [request for request in done.engine.requests if not request.temperature]
    assert [r.prompt.id for r in greedy] == [r.prompt.id for r in sampled] and len(greedy) == 10
    assert {(r.num_samples, r.max_new_tokens) for r in greedy} == {(1, sampled[0].max_new_tokens)}
    assert len({r.seed for r in done.engine.requests}) == 20
    assert done.engine.verbs.count("sampling") == 2
    rows = [row for rows in done.engine.updates for row in rows]
    assert len(rows) == 2 * 5 * 4 and all(row.sample.text != "greedy" for row in rows)
    for batch, groups in zip(algorithm.batches, done.recorder.rolled.values(), strict=True):
        ids = np.repeat([int(group.scored.group.prompt.id[1]) for group in groups], 4)
        np.testing.assert_array_equal(batch.greedy_components["right"], 0.25 * ids)
        np.testing.assert_array_equal(batch.greedy_components["other"], 0.5 * ids)
        assert [group.scored.greedy.group.rollouts[0].text for group in groups] == ["greedy"] * 5
    # right + 0.5 * other = 2 * right, and right is 0, 0.25, ..., 1
    assert done.recorder.logged[1]["reward/greedy_mean"] == pytest.approx(1.0)
    assert done.recorder.logged[1]["reward/mean"] == 0.5


def test_a_group_whose_greedy_rollout_has_no_score_is_left_out(run):
    def score(prompt: str, member: int) -> float:
        return np.nan if (prompt, member) == ("p2", -1) else 1.0

    algorithm = Picky(greedy_rollout=True)
    done = run(algorithm=algorithm, score=score, trainer={"steps": 1, "prompts_per_step": 5}).fit()
    (batch,) = algorithm.batches
    assert sorted(trained_ids(done.engine.updates[0])) == ["p0", "p1", "p3", "p4"]
    assert batch.valid.sum() == 16 and len(done.engine.updates[0]) == 16
    assert (batch.rewards[~batch.valid] == 0).all() and np.isnan(batch.greedy_components["right"][~batch.valid]).all()
    assert done.recorder.logged[1]["reward/greedy_mean"] == pytest.approx(1 + 2)
    assert done.recorder.logged[1]["reward/unscored_fraction"] == pytest.approx(0.2)


def test_weights_and_penalties_reach_the_algorithm(run):
    algorithm = Picky()
    rewards = [{"name": "right", "weight": 2.0}, {"name": "other", "weight": -0.5}]
    run(algorithm=algorithm, rewards=rewards, trainer={"steps": 1}).fit()
    (batch,) = algorithm.batches
    assert batch.weights == {"right": 2.0, "other": -0.5} and batch.penalties == {"other"}
    assert batch.greedy_components is None


def test_the_algorithm_observes_each_steps_metrics_and_adds_its_own(run):
    algorithm = Picky(refill=Refill())
    done = run(algorithm=algorithm, evaluate=True, trainer={"steps": 2}).fit()
    assert len(algorithm.observed) == 2
    for step, seen in enumerate(algorithm.observed, 1):
        assert seen.keys() >= {"reward/mean", "loss/total", "mismatch/kl", "rollout/rounds", "perf/step_s"}
        assert done.recorder.logged[step]["own/rewards"] == 1.5 and seen.items() <= done.recorder.logged[step].items()
    assert "own/rewards" not in done.recorder.logged[0]


def test_algorithms_that_learn_from_demonstrations_observe_too(run, monkeypatch):
    monkeypatch.setattr(Picky, "source", "demonstrations")
    algorithm = Picky()
    assert run(algorithm=algorithm, trainer={"steps": 1}).fit().recorder.logged[1]["own/loss"] == 7.0
    monkeypatch.setattr(Picky, "observe", lambda self, metrics: metrics["no/such"])
    with pytest.raises(PluginError, match=r"Picky\.observe raised KeyError"):
        run(algorithm=algorithm).fit()
