"""ppo: advantages, returns and both losses by hand, and what they must not depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mmrl.errors import ConfigError, DataError, PluginError
from mmrl.interfaces import Needs
from mmrl.policy_gradient import PolicyGradient
from mmrl.testing import Replay, check_algorithm, replay
from mmrl.testing.batches import polluted, random_batch, reordered
from mmrl_algorithms.ppo import PPO

PLAIN: dict[str, Any] = {"whiten": False, "kl": {"coef": 0.0}, "value_clip": None}
VAPO: dict[str, Any] = {"lam": {"adaptive": 0.05}, "lam_returns": 1.0, "positive_nll": 0.1, "kl": {"coef": 0}}
NAN = np.nan


def batch_of(values: list[list[float]], rewards: list[float], **others: Any) -> dict[str, Any]:
    """Rows whose places with NaN are holes; all log-probs are -1."""
    values_BT = np.array(values)
    ones_BT = np.ones_like(values_BT)
    return {
        "group_ids": np.arange(len(rewards)),
        "rewards": np.array(rewards),
        "response_mask": ~np.isnan(values_BT),
        "log_probs": -ones_BT,
        "old_log_probs": -ones_BT,
        "rollout_log_probs": -ones_BT,
        "values": values_BT,
        "vpreds": values_BT,
        **others,
    }


def run(batch: dict[str, Any], **options: Any) -> Replay:
    return replay(PPO, batch, options={**PLAIN, **options})


@pytest.mark.parametrize("options", [{}, {"bootstrap": True}, VAPO, {**PLAIN, "gamma": 0.9, "mask_truncated": True}])
def test_the_rules_of_algorithms_hold(options: dict[str, Any]) -> None:
    check_algorithm("ppo", options=options)


def test_advantages_and_returns_by_hand() -> None:
    found = run(batch_of([[0.2, 0.4, 0.5]], [1.0]), gamma=0.5, lam=0.5)
    last = 1.0 - 0.5
    middle = 0.5 * 0.5 - 0.4 + 0.25 * last
    first = 0.5 * 0.4 - 0.2 + 0.25 * middle
    assert_allclose(found.advantages, [[first, middle, last]])
    assert_allclose(found.returns, [[first + 0.2, middle + 0.4, 1.0]])


def test_values_go_on_across_holes_and_turns() -> None:
    """Tokens of a tool or a user between two of the policy change neither advantages nor returns."""
    whole = run(batch_of([[0.2, 0.4, 0.5, 0.1]], [1.0]), gamma=0.9, lam=0.8)
    holed = run(batch_of([[0.2, NAN, NAN, 0.4, 0.5, NAN, 0.1, NAN]], [1.0]), gamma=0.9, lam=0.8)
    places = [0, 3, 4, 6]
    assert_allclose(holed.advantages[:, places], whole.advantages)
    assert_allclose(holed.returns[:, places], whole.returns)
    assert not np.delete(holed.advantages, places).any() and not np.delete(holed.returns, places).any()


def test_a_lambda_of_one_makes_returns_of_what_was_earned() -> None:
    found = run(batch_of([[0.2, -3.0, 0.5], [7.0, NAN, 1.0]], [1.0, -0.5]), lam=0.3, lam_returns=1.0)
    assert_allclose(found.returns, [[1.0, 1.0, 1.0], [-0.5, 0.0, -0.5]])
    other = run(batch_of([[0.2, -3.0, 0.5], [7.0, NAN, 1.0]], [1.0, -0.5]), lam=0.3)
    assert_allclose(found.advantages, other.advantages)
    assert not np.allclose(found.returns, other.returns)


def test_in_pretraining_returns_are_what_was_earned_and_the_policy_has_no_loss() -> None:
    batch = batch_of([[0.2, 0.4, 0.5]], [1.0], pretrains=True)
    found = run(batch, lam=0.3, lam_returns=0.5)
    assert_allclose(found.returns, [[1.0, 1.0, 1.0]])
    assert found.loss == 0 and not found.grad_log_probs.any() and not found.sequence_weights.any()
    assert_allclose(found.grad_values, [[-0.8 / 3, -0.6 / 3, -0.5 / 3]])
    assert not [name for name in found.metrics if name.startswith(("loss/", "advantage/"))]


def test_an_adaptive_lambda_follows_the_tokens_that_the_policy_wrote() -> None:
    """alpha 0.5: 0 for two tokens, 1/2 for four, whatever holes lie between."""
    batch = batch_of([[0.2, 0.4, NAN, NAN, NAN, NAN], [0.2, NAN, 0.4, 0.5, NAN, 0.1]], [1.0, 1.0])
    found = run(batch, lam={"adaptive": 0.5}).advantages
    assert_allclose(found[0, :2], [0.4 - 0.2, 1.0 - 0.4])
    last, third = 0.9, 0.1 - 0.5 + 0.45
    second = 0.5 - 0.4 + third / 2
    assert_allclose(found[1, [0, 2, 3, 5]], [0.4 - 0.2 + second / 2, second, third, last])
    assert_allclose(run(batch, lam={"adaptive": 0.01}).advantages, run(batch, lam=0.0).advantages)  # never below 0


def test_a_value_after_the_last_token_counts_where_a_limit_ended_the_row() -> None:
    ends = {"truncated": np.array([True, False]), "final_values": np.array([0.7, 123.0])}
    batch = batch_of([[0.2, 0.4], [0.2, 0.4]], [0.0, 0.0], **ends)
    found = run(batch, bootstrap=True, gamma=0.5, lam=0.0)
    assert_allclose(found.advantages, [[0.5 * 0.4 - 0.2, 0.5 * 0.7 - 0.4], [0.5 * 0.4 - 0.2, -0.4]])
    assert_allclose(run(batch, gamma=0.5, lam=0.0).advantages[0, 1], -0.4)
    with pytest.raises(DataError, match="lacks final_values"):
        run({key: value for key, value in batch.items() if key != "final_values"}, bootstrap=True)


def test_the_critic_learns_rows_that_the_policy_does_not() -> None:
    """``keep`` is about the policy's loss; a row that is not valid teaches neither."""
    rows = {"truncated": np.array([True, False, False]), "reward_valid": np.array([True, True, False])}
    batch = batch_of([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [1.0, 1.0, 1.0], **rows)
    found = run(batch, mask_truncated=True, lam=1.0)
    assert (found.grad_log_probs != 0).any(1).tolist() == [False, True, False]
    assert_allclose(found.grad_values, [[-0.25, -0.25], [-0.25, -0.25], [0, 0]])
    assert_allclose(found.value_loss, 0.5)
    assert not found.returns[2].any()


def test_the_critics_loss_is_a_mean_over_tokens_whatever_the_policys() -> None:
    batch = batch_of([[0.0, 0.0, 0.0], [0.0, NAN, NAN]], [1.0, 3.0])
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        assert_allclose(run(batch, aggregation=aggregation, lam=1.0).value_loss, 0.5 * (3 * 1 + 9) / 4)


def test_a_value_beyond_its_clip_learns_only_if_it_went_the_wrong_way() -> None:
    """Return 1, values before 0: beyond 0.5 on the way to 1 nothing is learned, on the way from it everything is."""
    batch = batch_of([[0.0, 0.0, 0.0, 0.0]], [1.0], vpreds=np.array([[0.4, 0.6, -0.4, -0.6]]))
    found = run(batch, value_clip=0.5, lam=1.0)
    assert_allclose(found.grad_values, [[-0.6 / 4, 0.0, -1.4 / 4, -1.6 / 4]])
    assert_allclose(found.value_loss, 0.5 * (0.6**2 + 0.5**2 + 1.4**2 + 1.6**2) / 4)
    assert found.metrics["critic/clip_fraction"] == 0.25


def test_likelihood_is_raised_on_tokens_of_right_rows_alone() -> None:
    """mu times their mean -log pi; a row of 0.99 is not right, one of 1 - 1e-9 is."""
    values = [[0.0, 0.0, 0.0], [0.0, 0.0, NAN], [0.0, NAN, NAN]]
    batch = batch_of(values, [1.0 - 1e-9, 0.99, 2.0])
    plain, found = run(batch), run(batch, positive_nll=0.1)
    assert_allclose(found.metrics["loss/positive_nll"], 0.1 * 1.0)  # all log-probs are -1
    assert_allclose(found.loss, plain.loss + 0.1)
    expected = np.array([[-0.1 / 4] * 3, [0, 0, 0], [-0.1 / 4, 0, 0]])
    assert_allclose(found.grad_log_probs - plain.grad_log_probs, expected)
    assert run(batch, positive_nll=0.1, positive_reward=3.0).metrics["loss/positive_nll"] == 0
    for parts in (2, 3):
        split = replay(PPO, batch, options={**PLAIN, "positive_nll": 0.1}, microbatches=parts)
        assert_allclose(split.grad_log_probs, found.grad_log_probs)


def test_needs_follow_from_options() -> None:
    def needs(**options: Any) -> Needs:
        return PPO(PPO.Config.model_validate(options)).needs()

    assert needs() == Needs(reference_logprobs=True, old_logprobs=True, values=True)
    assert needs(kl={"coef": 0}) == Needs(values=True)
    assert needs(kl={"coef": 0}, bootstrap=True) == Needs(values=True, last_state=True)
    assert needs().roles == ("policy", "reference", "critic")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 1.5}, "lam"),
        ({"lam": {"adaptive": 0}}, "adaptive"),
        ({"lam": {"alpha": 0.05}}, "alpha"),
        ({"gamma": -0.1}, "gamma"),
        ({"value_clip": 0}, "value_clip"),
        ({"positive_nll": 0.1, "aggregation": "seq-mean-token-mean"}, "positive_nll is a mean over tokens"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay("ppo", batch_of([[0.0]], [1.0]), options=options)


def test_a_batch_without_the_critics_numbers_is_refused_by_name() -> None:
    batch = batch_of([[0.0]], [1.0])
    for key in ("values", "vpreds"):
        with pytest.raises(DataError, match=f"the batch lacks {key}"):
            run({name: each for name, each in batch.items() if name != key})


class NoReturns(PPO):
    def credit(self, batch):
        credit = super().credit(batch)
        return type(credit)(credit.advantages, credit.keep, credit.metrics, credit.constants)


class OnlyKept(PPO):
    """Returns of rows that the policy learns, and NaN for others."""

    def credit(self, batch):
        credit = super().credit(batch)
        returns = [r if keep else np.full_like(r, np.nan) for r, keep in zip(credit.returns, batch.valid, strict=True)]
        returns[np.flatnonzero(batch.valid)[0]] = np.full_like(returns[np.flatnonzero(batch.valid)[0]], np.nan)
        return type(credit)(credit.advantages, credit.keep, credit.metrics, credit.constants, returns)


class Reduced(PPO):
    def value_loss(self, tokens):
        result = super().value_loss(tokens)
        return type(result)(result.loss_T.mean())


class Detached(PPO):
    def value_loss(self, tokens):
        result = super().value_loss(tokens)
        return type(result)(result.loss_T.detach())


class OfTheMicrobatch(PPO):
    """A loss that depends on what it is packed with."""

    def value_loss(self, tokens):
        result = super().value_loss(tokens)
        return type(result)(result.loss_T / tokens.num_sequences)


class NoValueLoss(PPO):
    value_loss = PolicyGradient.value_loss


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (NoReturns, "gave returns of NoneType"),
        (OnlyKept, "a return that is not finite"),
        (Reduced, "value_loss gave loss_T as"),
        (Detached, "value_loss gave a loss_T without a gradient"),
        (OfTheMicrobatch, "a split into 1 ranks with 4 micro-batches each changes nothing"),
        (NoValueLoss, "asks for values and has no value_loss"),
    ],
)
def test_an_algorithm_whose_critic_is_wrong_is_found(fault: type[PPO], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        check_algorithm(fault, options={"kl": {"coef": 0.0}})


def test_garbage_and_the_order_of_rows_change_nothing() -> None:
    options = {**VAPO, "bootstrap": True}
    needs = PPO(PPO.Config.model_validate(options)).needs()
    batch = random_batch(needs, binary_rewards=True, seed=3)
    expected = replay(PPO, batch, options=options)
    order = np.random.default_rng(1).permutation(len(batch["group_ids"]))
    for changed, places in ((polluted(batch, np.nan), slice(None)), (reordered(batch, order), order)):
        found = replay(PPO, changed, options=options, ranks=2, microbatches=2)
        for name in ("advantages", "returns", "grad_values", "grad_log_probs"):
            assert_allclose(getattr(found, name), getattr(expected, name)[places], rtol=1e-9, atol=1e-12, err_msg=name)
        assert_allclose(found.value_loss, expected.value_loss, rtol=1e-9)
