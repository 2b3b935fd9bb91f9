"""Replay: several rewards, what it refuses, and whose loss it is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from mmrl.errors import DataError
from mmrl.interfaces import Aggregation, Algorithm, Needs
from mmrl.testing import replay
from mmrl.types import Credit, TokenLoss

BATCH: dict[str, Any] = {
    "group_ids": [0, 0, 1],
    "rewards": [1.0, 0.0, 0.5],
    "response_mask": [[1, 1], [1, 0], [1, 1]],
    "log_probs": [[-1.0, -2.0], [-1.0, 0.0], [-1.0, -1.0]],
    "rollout_log_probs": [[-1.0, -2.0], [-1.0, 0.0], [-1.0, -1.0]],
}
SEVERAL = {"right": [1.0, 0.0, np.nan], "brief": [-2.0, 0.0, -1.0]}


class Shows(Algorithm):
    """Its metrics are the batch that it sees."""

    needed = Needs()

    def needs(self):
        return self.needed

    @property
    def aggregation(self):
        return Aggregation("token-mean")

    def credit(self, batch):
        metrics = {f"weight/{name}": weight for name, weight in batch.weights.items()}
        metrics |= {f"first/{name}": values_B[0] for name, values_B in batch.components.items()}
        metrics |= {f"greedy/{name}": values_B[0] for name, values_B in (batch.greedy_components or {}).items()}
        metrics |= {f"penalty/{name}": 1.0 for name in batch.penalties}
        return Credit(np.where(batch.valid, batch.rewards, 0.0), metrics=metrics, constants={"calls": 0.0})

    def loss(self, tokens):
        self.calls = getattr(self, "calls", 0) + 1
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)

    def observe(self, metrics):
        self.steps = getattr(self, "steps", 0) + 1
        return {"calls": getattr(self, "calls", 0), "steps": self.steps}


def seen(**changes: Any) -> dict[str, float]:
    batch = {key: value for key, value in {**BATCH, **changes}.items() if value is not None}
    return dict(replay(Shows, batch).metrics)


def test_one_reward_is_called_reward() -> None:
    metrics = seen(greedy_rewards=[0.5, 0.5, 0.0])
    assert (metrics["first/reward"], metrics["weight/reward"], metrics["greedy/reward"]) == (1.0, 1.0, 0.5)
    assert not [name for name in metrics if name.startswith("penalty/")]


def test_several_rewards_are_weighed_summed_and_valid_where_all_are() -> None:
    several = {**BATCH, "components": SEVERAL, "weights": {"brief": 0.25}, "penalties": ["brief"]}
    several["greedy_components"] = {"right": [1.0, 1.0, 0.0], "brief": [-3.0, -3.0, 0.0]}
    del several["rewards"]
    result = replay(Shows, several)
    np.testing.assert_allclose(result.advantages, [1 - 0.25 * 2, 0.0, 0.0])
    np.testing.assert_array_equal(result.sequence_weights > 0, [True, True, False])
    expected = {"weight/right": 1.0, "weight/brief": 0.25, "first/brief": -2.0, "greedy/brief": -3.0}
    assert expected.items() <= result.metrics.items()
    assert result.metrics["penalty/brief"] == 1.0 and "penalty/right" not in result.metrics


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"old_logprobs": BATCH["log_probs"]}, "replay knows no 'old_logprobs'", "did you mean old_log_probs?"),
        ({"reference_log_probs": BATCH["log_probs"]}, "knows no 'reference_log_probs'", "did you mean ref_log_probs?"),
        ({"valid": [1, 1, 0]}, "knows no 'valid'", "did you mean reward_valid?"),
        ({"response_mask": None}, "the batch lacks response_mask", "add it"),
        ({"rewards": None}, "the batch lacks rewards", "or components"),
        ({"group_ids": [0, 0]}, "group_ids has shape (2,), and not (B,) = (3,)", "those of log_probs"),
        ({"rollout_log_probs": [[0.0], [0.0], [0.0]]}, "rollout_log_probs has shape (3, 1)", "pad rows"),
        ({"log_probs": [[-1.0, -2.0], [-1.0], [-1.0]]}, "log_probs is no array of float64", "padded to the longest"),
        ({"log_probs": [-1.0, -2.0, -1.0]}, "log_probs has shape (3,), and not (B, T)", "pad rows"),
        ({"group_ids": ["a", "a", "b"]}, "group_ids is no array of int64", "one number for each row"),
        ({"components": SEVERAL}, "rewards are not the weighted sum", "leave rewards out"),
        ({"weights": {"rigth": 1.0}}, "weights does not fit the components: rigth", "possible: reward"),
        ({"penalties": ["right"]}, "penalties does not fit the components: right", "possible: reward"),
        (
            {"greedy_components": {"right": [0, 0, 0]}},
            "greedy_components does not fit the components: reward, right",
            "possible: reward",
        ),
    ],
)
def test_a_batch_that_would_be_taken_for_another_is_refused(changes, message, remedy) -> None:
    with pytest.raises(DataError) as caught:
        seen(**changes)
    assert message in str(caught.value) and remedy in str(caught.value)


@pytest.mark.parametrize(
    ("needs", "key"),
    [
        (Needs(reference_logprobs=True), "ref_log_probs"),
        (Needs(old_logprobs=True), "old_log_probs"),
        (Needs(greedy_rollout=True), "greedy_rewards"),
    ],
)
def test_what_the_algorithm_needs_is_asked_for(needs, key) -> None:
    demanding = type("Demanding", (Shows,), {"needed": needs})
    with pytest.raises(DataError, match=f"the batch lacks {key}\n") as caught:
        replay(demanding, BATCH)
    assert "needs() ask for it" in caught.value.remedy
    replay(demanding, {**BATCH, key: BATCH["log_probs"] if "log" in key else BATCH["rewards"]})


def test_other_keys_mean_nothing() -> None:
    assert seen(values=[1.0], vpreds=1, desc="a batch") == seen()


def test_the_loss_is_of_an_instance_apart_and_the_drivers_goes_on() -> None:
    algorithm = Shows(Shows.Config())
    before = copy.deepcopy(BATCH)
    for step in (1, 2):
        metrics = replay(algorithm, BATCH, microbatches=3).metrics
        assert (metrics["calls"], metrics["steps"]) == (0, step)
    assert before == BATCH
