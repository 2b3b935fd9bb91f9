"""The loop, with an engine of forty lines in place of the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mmrl.collection import Collector
from mmrl.config import from_mapping
from mmrl.errors import NumericsError
from mmrl.interfaces import SamplingRequest, UpdateResult
from mmrl.prompts import PromptSource
from mmrl.trainer import Trainer, minibatches
from mmrl.types import (
    CreditedGroup,
    EncodedPrompt,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    ScoredGroup,
    Segment,
)
from mmrl_algorithms.grpo import GRPO
from mmrl_algorithms.sft import SFT


@dataclass
class FakeEngine:
    """Samples by seed; its learner's log-probs are the sampler's plus ``gap``, and plus ``split`` one by one."""

    algorithm: Any
    gap: float = 0.0
    split: float = 0.0
    drift: float = 0.0
    verbs: list[str] = field(default_factory=list)
    requests: list[SamplingRequest] = field(default_factory=list)
    updates: list[list[Any]] = field(default_factory=list)

    @contextmanager
    def sampling(self) -> Iterator[FakeEngine]:
        self.verbs.append("sampling")
        yield self

    @contextmanager
    def learning(self) -> Iterator[FakeEngine]:
        self.verbs.append("learning")
        yield self

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        self.requests += requests
        for index in reversed(range(len(requests))):  # groups finish in any order
            members = range(requests[index].num_samples)
            yield index, RolloutGroup(requests[index].prompt, tuple(self._rollout(requests[index], i) for i in members))

    def _rollout(self, request: SamplingRequest, member: int) -> Rollout:
        rng = np.random.default_rng(request.seed + member)
        length = int(rng.integers(1, 6))
        segment = Segment(rng.integers(0, 9, length).astype(np.int32), True, -rng.random(length).astype(np.float32))
        return Rollout(request.prompt, (segment,), index=member, text="", finish_reason="stop", weight_version=0)

    def logprobs(self, samples: Sequence[Sample], *, packed: bool = True) -> list[np.ndarray]:
        self.verbs.append("logprobs" if packed else "logprobs one by one")
        return [s.sampler_logprobs + self.gap + (0 if packed else self.split) for s in samples]

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        self.verbs.append("reference_logprobs")
        return [s.sampler_logprobs - 0.1 for s in samples]

    def update(self, rows: Sequence[Any]) -> UpdateResult:
        import torch

        from mmrl.ops.objective import partial_loss, reduce_partials

        self.verbs.append("update")
        self.updates.append(list(rows))
        if not rows:
            return UpdateResult({"lr": 0.1}, [])
        logprobs = [row.sample.sampler_logprobs + self.gap + self.drift for row in rows]
        logprobs_T = torch.from_numpy(np.concatenate(logprobs))
        partial = partial_loss(self.algorithm, rows, logprobs_T, torch.full_like(logprobs_T, 2.0))
        rank = {"lr": 0.1, "policy/grad_norm": 1.0}
        return UpdateResult(reduce_partials([partial]) | rank, logprobs)


class FakeEncoder:
    """One token per letter."""

    def num_tokens(self, prompt: Prompt) -> int:
        return len(prompt.messages[0].content)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        ids = np.zeros(self.num_tokens(prompt), np.int32)
        return EncodedPrompt(prompt.id, prompt.messages, prompt.answer, {}, prompt.demonstration, "", ids, ())

    def demonstrate(self, prompt: EncodedPrompt) -> Sample:
        length = len(str(prompt.demonstration))
        return Sample(prompt, (Segment(np.ones(length, np.int32), True, np.zeros(length, np.float32)),))


@dataclass
class FakeScorer:
    """Scores by a function of prompt id and member; NaN is None."""

    score: Callable[[str, int], float]

    def submit(self, group: RolloutGroup) -> Future[ScoredGroup]:
        values = np.array([self.score(group.prompt.id, rollout.index) for rollout in group.rollouts], float)
        valid = ~np.isnan(values)
        future: Future[ScoredGroup] = Future()
        future.set_result(ScoredGroup(group, np.where(valid, values, 0), valid, {"right": values, "other": 2 * values}))
        return future


@dataclass
class FakeRecorder:
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    rolled: dict[int, list[CreditedGroup]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    def log(self, step: int, values: Any) -> None:
        self.logged[step] = dict(values)

    def rollouts(self, step: int, groups: Sequence[CreditedGroup]) -> None:
        self.rolled[step] = list(groups)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def progress(self, phase: str, done: int, total: int) -> None:
        assert 0 < done <= total


@dataclass
class Run:
    engine: FakeEngine
    recorder: FakeRecorder
    trainer: Trainer

    def fit(self) -> Run:
        self.trainer.fit(lambda learner, step: self.recorder.saved.append(step))
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
        fake, recorder, encoder = FakeEngine(algorithm, **(engine or {})), FakeRecorder(), FakeEncoder()
        rows = [Prompt(f"p{i}", (Message("user", "x" * (i + 1)),), demonstration="y" * (i + 2)) for i in range(5)]
        source = PromptSource(rows, encoder, max_prompt_tokens=9)
        collector = Collector(config, fake, encoder, FakeScorer(score), recorder.progress)
        held_out = source if evaluate else None
        return Run(
            fake,
            recorder,
            Trainer(config, algorithm, fake, encoder, collector, source, held_out, recorder, precision=precision),
        )

    return build


@pytest.mark.parametrize(("samples", "parts", "epochs"), [(8, 1, 1), (8, 4, 1), (7, 3, 2), (2, 5, 1)])
def test_minibatches_cover_every_sample_once_per_epoch(samples, parts, epochs):
    found = list(minibatches(samples, parts, epochs, (0, 1)))
    per_epoch = min(parts, samples)
    assert len(found) == per_epoch * epochs
    for epoch in range(epochs):
        part = found[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(index for indices in part for index in indices) == list(range(samples))
        assert max(map(len, part)) - min(map(len, part)) <= 1


def test_minibatches_are_drawn_anew_each_step_and_epoch_and_repeat_with_the_seed():
    draw = [list(minibatches(16, 2, 2, (0, step))) for step in (1, 2, 1)]
    assert draw[0] == draw[2] != draw[1]
    assert draw[0][:2] != draw[0][2:]


def test_a_step_samples_checks_itself_and_updates_in_this_order(run):
    done = run(trainer={"steps": 2}).fit()
    first = ["sampling", "learning", "logprobs", "logprobs one by one", "update"]
    assert done.engine.verbs == [*first, "sampling", "learning", "update", "learning"]


def test_one_optimizer_step_needs_no_old_logprobs(run):
    done = run().fit()
    assert all(row.old_logprobs is None for rows in done.engine.updates for row in rows)


@pytest.mark.parametrize("learner", [{"minibatches": 3}, {"epochs": 2}])
def test_several_optimizer_steps_keep_the_logprobs_from_before_the_first(run, learner):
    done = run(learner=learner, engine={"drift": 0.0}).fit()
    per_step = learner.get("minibatches", 1) * learner.get("epochs", 1)
    assert len(done.engine.updates) == 3 * per_step
    for row in (row for rows in done.engine.updates for row in rows):
        np.testing.assert_array_equal(row.old_logprobs, row.sample.sampler_logprobs)
    for start in range(0, 3 * per_step, per_step):
        members = [id(row.sample) for rows in done.engine.updates[start : start + per_step] for row in rows]
        assert len(set(members)) == 8 and len(members) == 8 * learner.get("epochs", 1)
        assert sum(row.weight * row.mask.sum() for row in done.engine.updates[start]) == pytest.approx(1)


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
    assert done.recorder.logged[0]["eval/accuracy"] == pytest.approx(1.0)  # members 0 and 1, twice 0.5
    assert {r.num_samples for r in done.engine.requests[:5]} == {2} and done.engine.requests[0].temperature == 1.0


CONTRACT = {
    "reward/mean", "reward/std", "reward/right_mean", "reward/other_mean", "eval/accuracy", "eval/reward_mean",
    "group/zero_signal_fraction", "advantage/abs_mean", "policy/entropy", "policy/grad_norm",
    "policy/clip_fraction_high", "policy/clip_fraction_low", "kl/reference", "mismatch/logprob_abs_mean",
    "mismatch/logprob_abs_max", "mismatch/kl", "length/completion_mean", "length/truncated_fraction", "loss/policy",
    "lr", "perf/step_s", "perf/sync_s", "perf/generate_s", "perf/score_s", "perf/logprob_s", "perf/update_s",
    "perf/tokens_per_s",
}  # fmt: skip
"""Names in the design's list; perf/memory_bytes_max is the run's, perf/mfu comes later."""


def test_a_step_logs_every_metric_of_the_contract(run):
    algorithm = GRPO(GRPO.Config.model_validate({"kl": {"coef": 0.1}}))
    done = run(algorithm=algorithm, evaluate=True, trainer={"steps": 1}).fit()
    values = done.recorder.logged[1]
    assert values.keys() >= CONTRACT
    assert all(np.isfinite(value) for value in values.values())
    assert values["reward/mean"] == values["reward/std"] == 0.5
    assert values["advantage/abs_mean"] == pytest.approx(0.866, abs=1e-3)  # 0.5 / std([0, 1, 0, 1], ddof=1)
    assert values["group/zero_signal_fraction"] == 0 and values["mismatch/kl"] == 0


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


def test_a_step_whose_rollouts_are_all_invalid_goes_on(run):
    done = run(score=lambda prompt, member: np.nan).fit()
    assert done.engine.updates == [[], [], []]
    assert done.recorder.logged[3]["reward/unscored_fraction"] == 1.0
    assert all(np.isfinite(value) for value in done.recorder.logged[3].values())


def test_equal_rewards_are_no_signal(run):
    done = run(score=lambda prompt, member: 0.7, trainer={"steps": 1}).fit()
    assert done.recorder.logged[1]["group/zero_signal_fraction"] == 1.0
    assert all((row.advantages == 0).all() for row in done.engine.updates[0])


def test_a_mismatch_stops_before_the_first_update(run):
    stopped = run(engine={"gap": 0.01})
    with pytest.raises(NumericsError, match="sampler and learner disagree before the first update") as caught:
        stopped.fit()
    assert caught.value.exit_code == 6 and "on_mismatch: warn" in caught.value.remedy
    assert stopped.engine.updates == [] and stopped.recorder.saved == []
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


def test_warned_of_a_mismatch_the_run_goes_on(run):
    done = run(engine={"gap": 0.01}, trainer={"on_mismatch": "warn"}).fit()
    assert done.recorder.saved == [3]
    assert [event["verdict"] for event in done.recorder.events] == ["stop"] * 4  # the self-check and three steps
    assert done.recorder.logged[2]["mismatch/logprob_abs_max"] == pytest.approx(0.01, rel=1e-3)


def test_the_same_gap_is_fine_in_bfloat16(run):
    done = run(engine={"gap": 0.01}, precision="bfloat16").fit()
    assert done.recorder.events == []


def test_demonstrations_are_imitated_without_a_sampler(run):
    done = run(algorithm=SFT(SFT.Config()), engine={"gap": 0.3}).fit()
    assert "sampling" not in done.engine.verbs and done.recorder.rolled == {} and done.recorder.events == []
    rows = [row for part in done.engine.updates for row in part]
    assert all((row.advantages == 1).all() for row in rows)
    assert [len(row.mask) for row in rows] == [len(row.sample.prompt.token_ids) + 1 for row in rows]
    assert done.recorder.logged[1]["loss/policy"] == pytest.approx(-0.3)
    assert "reward/mean" not in done.recorder.logged[1]


def test_demonstrations_are_checked_packed_against_single_too(run):
    with pytest.raises(NumericsError, match="packed and one-by-one"):
        run(algorithm=SFT(SFT.Config()), engine={"split": 0.01}).fit()


def test_weights_are_saved_every_so_often_and_at_the_end(run):
    assert run(trainer={"steps": 5, "save_every": 2}).fit().recorder.saved == [2, 4, 5]


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

    def logprobs(self: FakeEngine, samples: Sequence[Sample], *, packed: bool = True) -> list[np.ndarray]:
        return [np.where(s.mask, s.sampler_logprobs, 0) for s in samples]

    monkeypatch.setattr(FakeEngine, "_rollout", with_tool)
    monkeypatch.setattr(FakeEngine, "logprobs", logprobs)
    done = run(trainer={"steps": 1}).fit()
    assert done.recorder.logged[1]["mismatch/logprob_abs_max"] == 0
    assert all(row.mask.sum() == len(row.mask) - 2 for row in done.engine.updates[0])
