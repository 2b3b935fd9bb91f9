"""The loss of reward models: the rules of algorithms, hand calculations, and what cannot be asked of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config.plugin_specs import PluginSpec
from mmrl.errors import ConfigError, DataError, PluginError
from mmrl.interfaces import Needs, served_needs
from mmrl.plugin_host import registry
from mmrl.testing import check_algorithm, replay
from mmrl.types import TokenLoss
from mmrl_algorithms.bradley_terry import BradleyTerry
from mmrl_algorithms.dpo import DPO

GRADED = {"group_ids": [4, 4, 4, 7, 7], "rewards": [0.5, 2.0, 0.0, 1.0, 0.0], "scores": [1.0, 0.4, -0.2, 0.3, 0.3]}
"""A prompt of three grades, of which one pair of three is in the wrong order, and a pair that the model cannot tell."""


def loss_of(*differences: float) -> float:
    """The mean of ``-log sigma(d)``."""
    return sum(math.log1p(math.exp(-d)) for d in differences) / len(differences)


@pytest.mark.parametrize("options", [{}, {"margin": True}, {"centre": 0.0}])
def test_it_keeps_the_rules_of_algorithms(options):
    check_algorithm(BradleyTerry, options=options)


def test_the_installed_name_trains_a_reward_model_alone_from_comparisons():
    found = registry.create("algorithm", PluginSpec(name="bradley_terry"))
    assert type(found) is BradleyTerry
    assert (found.source, found.network) == ("comparisons", "reward")
    assert served_needs(found) == Needs(min_group_size=2, whole_groups=True, last_state=True)
    assert found.config.margin is False and found.config.centre == 0.01


def test_the_loss_is_a_mean_over_a_prompts_pairs_and_then_over_prompts():
    """Pairs of the first prompt: (0.4, 1.0), (0.4, -0.2) and (1.0, -0.2); its share is a half, as the second's."""
    result = replay(BradleyTerry, GRADED, options={"centre": 0.0})
    assert result.loss == pytest.approx((loss_of(-0.6, 0.6, 1.2) + math.log(2)) / 2)
    assert result.metrics["preference/accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert result.metrics["preference/margin"] == pytest.approx((-0.6 + 0.6 + 1.2) / 3 / 2)
    assert result.metrics["preference/score_chosen"] == pytest.approx(((0.4 + 0.4 + 1.0) / 3 + 0.3) / 2)
    assert result.metrics["preference/score_rejected"] == pytest.approx(((1.0 - 0.2 - 0.2) / 3 + 0.3) / 2)
    slopes = {d: -1 / (1 + math.exp(d)) / 6 for d in (-0.6, 0.6, 1.2)}
    expected = [slopes[1.2] - slopes[-0.6], slopes[-0.6] + slopes[0.6], -slopes[0.6] - slopes[1.2], -0.25, 0.25]
    np.testing.assert_allclose(result.grad_scores, expected)


def test_the_margin_is_the_difference_of_the_datasets_scores():
    """1.5, 2.0 and 0.5 of the first prompt, 1 of the second."""
    result = replay(BradleyTerry, GRADED, options={"margin": True, "centre": 0.0})
    assert result.loss == pytest.approx((loss_of(-0.6 - 1.5, 0.6 - 2.0, 1.2 - 0.5) + loss_of(-1.0)) / 2)


def test_centring_squares_the_sum_of_a_pair():
    plain, centred = (replay(BradleyTerry, GRADED, options={"centre": weight}) for weight in (0.0, 0.1))
    squares = ((1.4**2 + 0.2**2 + 0.8**2) / 3 + 0.6**2) / 2
    assert centred.metrics["loss/centre"] == pytest.approx(0.1 * squares)
    assert centred.loss == pytest.approx(plain.loss + 0.1 * squares)
    assert "loss/centre" not in plain.metrics
    opposite = {"group_ids": [1, 1], "rewards": [1, 0], "scores": [3.0, -3.0]}
    assert replay(BradleyTerry, opposite).loss == pytest.approx(loss_of(6.0))  # and not 0.01 (9 + 9) more


def test_equal_grades_are_no_pair_and_a_prompt_without_an_order_is_left_out_and_counted():
    batch = {"group_ids": [1, 1, 1, 2, 2, 3], "rewards": [1, 0, 0, 1, 1, 5], "scores": [0.2, 0.9, 0.1, 7.0, -7.0, 9.0]}
    result = replay(BradleyTerry, batch, options={"centre": 0.0})
    assert result.loss == pytest.approx(loss_of(-0.7, 0.1))
    assert result.metrics["preference/ties"] == 2
    np.testing.assert_array_equal(result.sequence_weights > 0, [True, True, True, False, False, False])
    np.testing.assert_array_equal(result.grad_scores[3:], 0)
    assert result.advantages.tolist() == [1, -1, 0, 0, 0, 0]


def test_lengths_change_no_weight_and_are_told_by_side():
    masks = np.arange(4) < np.array([[1], [4], [2], [3], [3]])
    result = replay(BradleyTerry, {**GRADED, "response_mask": masks})
    assert result.loss == pytest.approx(replay(BradleyTerry, GRADED).loss)
    assert result.metrics["preference/length_chosen"] == pytest.approx(((4 + 4 + 1) / 3 + 3) / 2)
    assert result.metrics["preference/length_rejected"] == pytest.approx(((1 + 2 + 2) / 3 + 3) / 2)


def test_a_completion_that_is_not_in_the_loss_is_in_no_pair():
    masks = np.array([[1], [1], [0], [1], [1]])
    result = replay(BradleyTerry, {**GRADED, "response_mask": masks, "scores": [1.0, 0.4, np.nan, 0.3, 0.3]})
    assert result.metrics["preference/margin"] == pytest.approx(-0.6 / 2)
    assert np.isfinite(result.grad_scores).all()


@pytest.mark.parametrize("far", [90.0, 1e4])
def test_scores_that_are_far_apart_have_a_loss_and_a_gradient(far):
    batch = {"group_ids": [1, 1], "rewards": [1, 0], "scores": [-far, far]}
    for dtype in ("float32", "float64"):
        result = replay(BradleyTerry, batch, options={"centre": 0.0}, dtype=dtype)
        assert result.loss == pytest.approx(2 * far)
        np.testing.assert_allclose(result.grad_scores, [-1, 1])


def test_what_a_batch_of_a_reward_model_lacks_or_gets_wrong_is_named():
    for key in ("scores", "group_ids", "rewards"):
        with pytest.raises(DataError, match=f"the batch lacks {key}"):
            replay(BradleyTerry, {name: values for name, values in GRADED.items() if name != key})
    with pytest.raises(DataError, match=r"scores have shape \(1, 5\), and not \(B,\)"):
        replay(BradleyTerry, {**GRADED, "scores": [GRADED["scores"]]})
    with pytest.raises(DataError, match=r"rewards has shape \(4,\)"):
        replay(BradleyTerry, {**GRADED, "rewards": [1, 0, 1, 0]})
    with pytest.raises(DataError, match="the batch lacks log_probs, rollout_log_probs"):
        replay(DPO, {**GRADED, "response_mask": np.ones((5, 1))})


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"centre should be greater than or equal to 0, not -0.1"):
        replay(BradleyTerry, GRADED, options={"centre": -0.1})
    with pytest.raises(ConfigError, match="unknown key center"):
        replay(BradleyTerry, GRADED, options={"center": 0.1})


NEEDS = Needs(min_group_size=2, whole_groups=True, last_state=True)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"source": "rollouts"}, "trains a reward model on something else than whole conversations to compare"),
        ({"network": "critic"}, "trains a network 'critic'"),
        (
            {"needs": lambda self: Needs(whole_groups=True)},
            "trains a reward model on something else than whole conversations to compare",
        ),
        (
            {"needs": lambda self: Needs(last_state=True, reference_logprobs=True, mismatched=True)},
            "asks for reference_logprobs, mismatched, which a reward model has not",
        ),
    ],
)
def test_an_algorithm_that_a_reward_model_cannot_serve_is_refused(attributes, message):
    with pytest.raises(PluginError, match=message):
        check_algorithm(type("Odd", (BradleyTerry,), attributes))


def fault(loss: Any) -> type[BradleyTerry]:
    return type("Fault", (BradleyTerry,), {"loss": loss})


def test_the_kit_finds_what_is_wrong_with_a_loss_of_scores():
    def detached(self, tokens):
        return TokenLoss(torch.zeros_like(tokens.logprobs_T))

    def overflowing(self, tokens):
        scores_N, (chosen_M, rejected_M) = tokens.final_values_N, tokens.pairs()
        each_M = (1 + (scores_N[rejected_M] - scores_N[chosen_M]).exp()).log()
        on_N = scores_N.new_zeros(tokens.num_sequences).index_add(0, chosen_M, each_M)
        return TokenLoss(on_N[tokens.sequence_T])

    def of_the_batch(self, tokens):
        loss = BradleyTerry.loss(self, tokens)
        return TokenLoss(loss.loss_T * tokens.num_sequences)

    def of_logprobs(self, tokens):
        return TokenLoss(tokens.logprobs_T * tokens.reference_logprobs_T)

    with pytest.raises(PluginError, match=r"depend on tokens\.final_values_N without detaching it"):
        check_algorithm(fault(detached))
    with pytest.raises(PluginError, match="is finite"):
        check_algorithm(fault(overflowing))
    with pytest.raises(PluginError, match="a split into 1 ranks with 4 micro-batches"):
        check_algorithm(fault(of_the_batch))
    with pytest.raises(PluginError, match="reference_logprobs_T"):
        check_algorithm(fault(of_logprobs))
