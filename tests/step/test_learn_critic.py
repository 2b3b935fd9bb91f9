"""A critic in a step's learning: its order, its rows, what it is asked, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine_api import Network, UpdateResult
from mmrl.errors import NumericsError
from mmrl.ops.objective import reduce_partials, value_loss, weighed_loss
from mmrl.step.learn import LearnSettings, Update, finished, learn
from mmrl.step.updates import UpdateLog
from mmrl.types import FloatArray, Rollout, RolloutGroup, ScoredGroup, Segment
from mmrl_algorithms.ppo import PPO
from tests.cluster.test_group import prompt
from tests.step.test_loop import FakeEngine, FakeRecorder

PLAIN: dict[str, Any] = {"kl": {"coef": 0.0}, "whiten": False}


@dataclass
class FakeCritic(Network):
    """The values of a row are 0.1, 0.2, ... times the number of its tokens; verbs are noted beside the policy's."""

    algorithm: PPO
    verbs: list[str]
    asked: list[Any] = field(default_factory=list)
    faults: int = 0

    def score(self, samples: Any, *, way: str = "packed") -> list[FloatArray]:
        self.verbs.append("values")
        return [np.arange(1, len(s.token_ids) + 1, dtype=np.float32) / 10 for s in samples]

    def final_values(self, samples: Any) -> FloatArray:
        self.asked.append([s.key for s in samples])
        return np.full(len(samples), 0.5, np.float32)

    def update(self, rows: Sequence[Any]) -> UpdateResult:
        self.verbs.append("critic's update")
        self.asked.append(rows)
        nothing = [np.zeros(0, np.float32) for _ in rows]
        if self.faults:
            self.faults -= 1
            return UpdateResult({}, nothing, nothing, "the loss is nan")
        if not rows:
            return UpdateResult({}, [], [])
        values = [row.columns["values"] for row in rows]
        loss = weighed_loss(rows, *value_loss(self.algorithm, rows, torch.from_numpy(np.concatenate(values))))
        return UpdateResult(reduce_partials([loss]), nothing, nothing, vpreds=values)


def engine_of(**options: Any) -> tuple[PPO, FakeEngine, FakeCritic]:
    algorithm = PPO(PPO.Config.model_validate({**PLAIN, **options}))
    engine = FakeEngine(algorithm)
    critic = FakeCritic(algorithm, engine.verbs)
    engine.networks = {**engine.networks, "critic": critic}
    return algorithm, engine, critic


def group(name: str, *lengths: int, valid: Sequence[bool] = (), cut: Sequence[bool] = ()) -> ScoredGroup:
    """Completions of these many tokens, the last one right; one in the middle is a tool's."""
    asked, rollouts = prompt(name), []
    for place, length in enumerate(lengths):
        segments = tuple(
            Segment(np.full(1, 3 + t, np.int32), t != 1, np.full(1, -1.0, np.float32)) for t in range(length)
        )
        end: Any = "length" if any(cut[place : place + 1]) else "stop"
        rollouts.append(Rollout(asked, segments, place, "", end, 0))
    rewards = np.eye(len(lengths))[-1]
    is_valid = np.array(valid or [True] * len(lengths))
    return ScoredGroup(RolloutGroup(asked, tuple(rollouts)), rewards, is_valid, {"right": rewards})


def test_in_each_minibatch_the_critic_learns_before_the_policy() -> None:
    algorithm, engine, _ = engine_of()
    told = [
        (update.phase, update.network, update.done, len(update.samples))
        for update in learn([group("a", 1), group("b", 3)], algorithm, engine, LearnSettings(minibatches=2, epochs=2))
    ]
    assert engine.verbs == ["logprobs", "values", *["critic's update", "update"] * 4]
    assert told[2:] == [(("update", role, number, role == "policy")) for number in (1, 2, 3, 4)
                        for role in ("critic", "policy")]  # fmt: skip


def test_rows_of_each_network_carry_their_own_columns() -> None:
    algorithm, engine, critic = engine_of()
    finished(learn([group("a", 2, 3)], algorithm, engine, LearnSettings(epochs=2)))
    assert {name for row in critic.asked[0] for name in row.columns} == {"values", "returns"}
    assert {name for row in engine.updates[0] for name in row.columns} == {"advantages", "old_logprobs"}
    weights = [row.weight for row in critic.asked[0]]
    assert weights == pytest.approx([1 / 3, 1 / 3])  # 1 and 2 tokens that the policy wrote


def test_valid_rows_are_learned_whatever_the_policy_keeps_and_no_others() -> None:
    algorithm, engine, critic = engine_of(mask_truncated=True)
    groups = [group("a", 2, 4, 3, valid=[True, True, False], cut=[False, True, False])]
    result = finished(learn(groups, algorithm, engine, LearnSettings()))
    assert [row.sample.index for row in critic.asked[0]] == [0, 1]
    assert [row.sample.index for row in engine.updates[0]] == [0]
    (credited,) = result.groups
    assert [len(found) for found in credited.critic_updates] == [1, 1, 0]
    assert [len(found) for found in credited.updates] == [1, 0, 0]
    assert not credited.returns[2].any() and credited.returns[1][1] == 0  # a tool's token


def test_a_value_after_the_end_is_asked_of_completions_that_a_limit_ended_alone() -> None:
    algorithm, engine, critic = engine_of(bootstrap=True, lam=1.0)
    groups = [group("a", 2, 3, cut=[False, True])]
    result = finished(learn(groups, algorithm, engine, LearnSettings()))
    assert critic.asked[0] == [groups[0].rollouts[1].key]
    assert result.groups[0].final_values.tolist() == [0.0, 0.5]
    assert result.groups[0].returns[1].tolist() == pytest.approx([1.5, 0.0, 1.5])
    none_cut = finished(learn([group("a", 2, 3)], *engine_of(bootstrap=True)[:2], LearnSettings()))
    assert none_cut.groups[0].final_values.tolist() == [0.0, 0.0]


def test_metrics_before_the_step_by_hand() -> None:
    """Values 0.1 and 0.3 of the row of reward 1, and 0.1 of the other; the token between is not the policy's."""
    algorithm, engine, _ = engine_of(lam=1.0)
    found = finished(learn([group("a", 1, 3)], algorithm, engine, LearnSettings())).metrics
    returns, values = np.array([0.0, 1.0, 1.0]), np.array([0.1, 0.1, 0.3])
    assert found["critic/explained_variance"] == pytest.approx(1 - np.var(returns - values) / np.var(returns))
    assert found["critic/value_mean"] == pytest.approx(values.mean())
    assert found["critic/return_mean"] == pytest.approx(2 / 3)
    assert found["critic/loss"] == pytest.approx(0.5 * np.mean((returns - values) ** 2))
    assert found["critic/skipped_updates"] == found["policy/skipped_updates"] == 0


def test_in_pretraining_the_policy_is_not_asked_for_an_optimizer_step() -> None:
    algorithm, engine, critic = engine_of()
    result = finished(learn([group("a", 1, 3)], algorithm, engine, LearnSettings(epochs=2, pretrains=True)))
    assert "update" not in engine.verbs and engine.verbs.count("critic's update") == 2
    assert result.groups[0].updates == [[], []] and result.groups[0].trained
    assert result.groups[0].returns[1].tolist() == [1.0, 0.0, 1.0]
    assert critic.asked and "advantage/abs_mean" not in result.metrics


def test_an_episode_without_tokens_and_a_step_without_a_valid_row_are_no_failure() -> None:
    algorithm, engine, critic = engine_of(bootstrap=True)
    result = finished(
        learn([group("a", 0, 3, valid=[False, True], cut=[True, False])], algorithm, engine, LearnSettings())
    )
    assert [len(values) for values in result.groups[0].values] == [0, 3]
    nothing = finished(learn([group("a", 2, 3, valid=[False, False])], algorithm, engine, LearnSettings()))
    assert critic.asked[-1] == [] and nothing.metrics["critic/explained_variance"] == 0


def test_a_step_of_the_critic_that_comes_to_nothing_keeps_the_policy_from_nothing() -> None:
    algorithm, engine, critic = engine_of()
    critic.faults = 1
    result = finished(learn([group("a", 1, 3)], algorithm, engine, LearnSettings(epochs=2)))
    assert (result.metrics["critic/skipped_updates"], result.metrics["policy/skipped_updates"]) == (1, 0)
    assert [[len(each.vpreds) for each in found] for found in result.groups[0].critic_updates] == [[0, 1], [0, 3]]
    assert engine.verbs.count("update") == 2


def test_faults_of_each_network_count_apart() -> None:
    """A policy that learns does not make up for a critic that does not."""
    recorder = FakeRecorder()
    log = UpdateLog(recorder)  # type: ignore[arg-type]
    algorithm, engine, critic = engine_of()
    critic.faults = 9
    learning = learn([group("a", 1, 3)], algorithm, engine, LearnSettings(epochs=4))
    with pytest.raises(NumericsError, match="3 optimizer steps of the critic in a row came to nothing: the loss"):
        finished(learning, lambda update: log.note(1, update, 4) if update.phase == "update" else None)
    assert log.faults_in_a_row == {"critic": 3, "policy": 0} and log.updates == len(recorder.ledger) == 2
    assert recorder.events[0]["returns"] == {"min": 0.0, "max": pytest.approx(1.0, abs=0.1)}
    assert replace(Update("update"), network="critic").samples == []
