"""Losses of preferences: the rules of algorithms, hand calculations, and what the options refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config.plugin_specs import PluginSpec
from mmrl.errors import ConfigError, DataError
from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig, RunFacts
from mmrl.ops.credit import best_and_worst
from mmrl.plugin_host import registry
from mmrl.testing import check_algorithm, replay
from mmrl.types import Batch, Candidate, Credit, Message, PackedTokens, Prompt, TokenLoss
from mmrl_algorithms import preference
from mmrl_algorithms.dpo import DPO
from mmrl_algorithms.kto import KTO
from mmrl_algorithms.mpo import MPO
from mmrl_algorithms.orpo import ORPO
from mmrl_algorithms.simpo import SimPO
from tests.faults.runs import Runs, records

VARIANTS = ["sigmoid", "cdpo", "robust", "ipo", "ipo_sum", "hinge", "dpop", "odpo"]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def created(kind: Any, **options: Any) -> Any:
    return kind(kind.Config.model_validate(options))


def rows(scores: list[float], groups: list[int], logprobs: list[list[float]], reference: Any = None) -> dict[str, Any]:
    """A batch of ragged rows; the reference has -1 for each token where none is given."""
    longest = max(map(len, logprobs))

    def wide(values: Any, fill: float) -> np.ndarray:
        return np.array([[*each, *[fill] * (longest - len(each))] for each in values])

    reference = [[-1.0] * len(each) for each in logprobs] if reference is None else reference
    return {
        "group_ids": groups,
        "rewards": scores,
        "response_mask": wide([[1] * len(each) for each in logprobs], 0),
        "log_probs": wide(logprobs, 0.0),
        "rollout_log_probs": wide(logprobs, 0.0),
        "ref_log_probs": wide(reference, 0.0),
    }


PAIR = rows([1, 0], [3, 3], [[-1.5, -1.0], [-0.25, -0.5, -0.75]])
"""The log-ratios are -0.5 of the chosen and 1.5 of the rejected, the margin is -2."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((DPO, {"variant": variant}) for variant in VARIANTS),
        (DPO, {"nll": 0.5, "data": "sampled"}),
        (SimPO, {}),
        (ORPO, {"data": "sampled"}),
        (KTO, {"lam_u": 1.5}),
        (MPO, {}),
    ],
)
def test_algorithms_of_preferences_keep_the_rules(kind, options):
    check_algorithm(kind, options=options)


def test_installed_names_are_these_classes():
    for name, kind in {"dpo": DPO, "simpo": SimPO, "orpo": ORPO, "kto": KTO, "mpo": MPO}.items():
        assert type(registry.create("algorithm", PluginSpec(name=name))) is kind


def test_the_source_follows_from_the_data():
    for kind, has_reference in ((DPO, True), (SimPO, False), (ORPO, False)):
        given, sampled = created(kind), created(kind, data="sampled")
        assert (given.source, sampled.source) == ("comparisons", "rollouts")
        needs = Needs(reference_logprobs=has_reference, min_group_size=2, whole_groups=True)
        assert given.needs() == sampled.needs() == needs


def test_dpop_is_as_calculated_by_hand():
    """The chosen's log-ratio is -0.5: with lam 4 the argument is 0.1 (-2 - 4 * 0.5) = -0.4."""
    result = replay(DPO, PAIR, options={"variant": "dpop", "lam": 4.0})
    assert result.loss == pytest.approx(-math.log(sigmoid(-0.4)))
    slope = 0.1 * sigmoid(0.4)
    np.testing.assert_allclose(result.grad_log_probs[0, :2], -slope * (1 + 4))
    np.testing.assert_allclose(result.grad_log_probs[1], slope)
    above = rows([1, 0], [3, 3], [[-0.5, -0.5], [-1.0]])  # 1 and 0: no penalty
    assert replay(DPO, above, options={"variant": "dpop"}).loss == pytest.approx(-math.log(sigmoid(0.1)))


def test_nll_adds_the_chosens_mean_negative_logprob():
    """0.2 times 2.5 / 2."""
    plain, more = replay(DPO, PAIR), replay(DPO, PAIR, options={"nll": 0.2})
    assert plain.loss == pytest.approx(-math.log(sigmoid(-0.2)))
    assert more.loss == pytest.approx(plain.loss + 0.25)
    assert more.metrics["loss/nll"] == pytest.approx(0.25)
    assert more.metrics["loss/preference"] == pytest.approx(plain.loss)
    np.testing.assert_allclose(more.grad_log_probs - plain.grad_log_probs, [[-0.1, -0.1, 0], [0, 0, 0]], atol=1e-15)


class CreditForm(Algorithm):
    """DPO's gradient as credit: the factor of both completions' log-probs is known before the update."""

    class Config(PluginConfig):
        beta: float = 0.1

    source, aggregation, config = "comparisons", Aggregation("seq-mean-token-sum"), Config()

    def needs(self) -> Needs:
        return Needs(old_logprobs=True, reference_logprobs=True, min_group_size=2)

    def credit(self, batch: Batch) -> Credit:
        pairs = zip(batch.old_logprobs, batch.reference_logprobs, batch.masks, strict=True)
        ratios_B = np.array([(old - frozen)[mask].sum() for old, frozen, mask in pairs])
        best_M, worst_M = best_and_worst(batch.rewards, batch.group_ids, batch.valid)
        advantages_B, beta = np.zeros(len(ratios_B)), self.config.beta
        slope_M = 2 * beta / (1 + np.exp(beta * (ratios_B[best_M] - ratios_B[worst_M])))
        advantages_B[best_M], advantages_B[worst_M] = slope_M, -slope_M
        return Credit(advantages_B, keep=advantages_B != 0)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)


@pytest.mark.parametrize("is_first", [True, False])
def test_pairs_have_the_gradient_of_the_credit_form_at_the_first_update(is_first):
    """With the policy at its reference, and away from it; groups of two to five, one of them without an order."""
    draw = np.random.default_rng(4)
    groups = np.repeat([3, 9, 4, 0, 7], [2, 5, 3, 4, 2])
    logprobs = [draw.uniform(-5, -0.1, draw.integers(1, 9)).tolist() for _ in groups]
    scores = [*draw.permutation(14).tolist(), 1, 1]
    reference = logprobs if is_first else [(np.array(row) + draw.normal(0, 2, len(row))).tolist() for row in logprobs]
    batch = rows(scores, groups.tolist(), logprobs, reference)
    batch["old_log_probs"] = batch["log_probs"]
    pairs, credited = replay(DPO, batch), replay(CreditForm, batch)
    assert pairs.loss == pytest.approx(math.log(2)) if is_first else abs(pairs.loss - math.log(2)) > 0.01
    assert np.count_nonzero(pairs.grad_log_probs.any(-1)) == 8
    np.testing.assert_allclose(credited.grad_log_probs, pairs.grad_log_probs, rtol=1e-6, atol=1e-12)


def test_of_a_group_the_first_best_and_the_first_worst_are_compared():
    batch = rows(
        [0.5, 2.0, 0.0, 2.0, 0.0, 9.0, 1.0, 1.0, 4.0],
        [8, 8, 8, 8, 8, 8, 5, 5, 2],
        [[-0.5]] * 9,
    )
    batch["reward_valid"] = [True] * 5 + [False] + [True] * 3
    result = replay(DPO, batch)
    assert result.advantages.tolist() == [0, 1, -1, 0, 0, 0, 0, 0, 0]
    assert result.sequence_weights.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert result.metrics["preference/ties"] == 2  # the group of equals, and the one alone


def test_scores_that_only_float64_tells_apart_are_a_tie():
    batch = rows([0.1 + 0.2, 0.3], [1, 1], [[-0.5], [-0.7]])
    assert replay(DPO, batch).metrics["preference/ties"] == 1


def test_a_row_without_a_token_in_the_loss_is_no_part_of_a_pair():
    batch = rows([1, 0.5, 0], [1, 1, 1], [[-0.5], [-0.7], [-0.6]])
    batch["response_mask"] = np.array([[0], [1], [1]])
    assert replay(DPO, batch).advantages.tolist() == [0, 1, -1]


def test_a_margin_of_nothing_is_half_right():
    batch = rows([1, 0, 1, 0, 1, 0], [1, 1, 2, 2, 3, 3], [[-0.5], [-0.5], [-0.4], [-0.9], [-0.4], [-0.9]])
    metrics = replay(DPO, batch, microbatches=2).metrics
    assert metrics["preference/accuracy"] == pytest.approx(2.5 / 3)
    assert metrics["preference/margin"] == pytest.approx(0.1 * 2 * 0.5 / 3)
    assert metrics["preference/length_chosen"] == metrics["preference/length_rejected"] == 1


def test_means_are_over_pairs_and_lengths_are_told_apart():
    metrics = replay(DPO, PAIR).metrics
    assert (metrics["preference/length_chosen"], metrics["preference/length_rejected"]) == (2, 3)
    assert metrics["preference/reward_chosen"] == pytest.approx(-0.05)
    assert metrics["preference/reward_rejected"] == pytest.approx(0.15)
    assert metrics["preference/accuracy"] == 0


def test_odpo_refuses_a_difference_that_is_not_above_0():
    margins = torch.zeros(3)
    with pytest.raises(ValueError, match=r"difference of scores is -0\.5"):
        preference.odpo(margins, torch.tensor([1.0, -0.5, 0.0]), beta=0.1, alpha=1.0)
    found = preference.odpo(margins, torch.tensor([1.0, 2.0, 0.5]), beta=0.1, alpha=2.0)
    np.testing.assert_allclose(found, [math.log(1 + d**2) for d in (1.0, 2.0, 0.5)], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 0.2}, "label_smoothing goes with variant cdpo or robust"),
        ({"variant": "robust", "label_smoothing": 0.5}, "less than 0.5"),
        ({"variant": "cdpo", "tau": 0.2}, "tau goes with variant ipo or ipo_sum"),
        ({"alpha": 2.0}, "alpha goes with variant odpo"),
        ({"lam": 5.0}, "lam goes with variant dpop"),
        ({"beta": 0}, "greater than 0"),
        ({"data": "rollouts"}, "given"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        replay(DPO, PAIR, options=options)


def test_a_pair_without_a_reference_is_refused_by_name():
    with pytest.raises(DataError, match="ref_log_probs"):
        replay(DPO, {key: values for key, values in PAIR.items() if key != "ref_log_probs"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log1mexp_is_exact_on_both_sides_and_so_is_its_gradient(dtype):
    values = torch.tensor([-1e-6, -1e-3, -0.5, -0.7, -5.0, -80.0], dtype=dtype, requires_grad=True)
    found = preference.log1mexp(values)
    found.sum().backward()
    exact = [float(x) for x in values.detach().double()]
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    expected = [math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x)) for x in exact]
    np.testing.assert_allclose(found.detach().double(), expected, rtol=tolerance)
    np.testing.assert_allclose(values.grad.double(), [-1 / math.expm1(-x) for x in exact], rtol=tolerance)


def test_a_certain_completion_has_bounded_odds():
    certain = torch.tensor([0.0, -1e-9], requires_grad=True)
    loss = preference.odds_ratio(certain, torch.tensor([-1.0, -1.0]))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.equal(certain.grad, torch.zeros(2))


def mpo_loss(shift: float) -> float:
    """MPO's loss of ``PAIR`` by hand.

    There beta x is -0.05 of the chosen and 0.15 of the rejected, and the chosen's mean log-prob is -1.25.
    """
    quality = -math.log(sigmoid(-0.05 - shift)) - math.log(sigmoid(shift - 0.15))
    return -0.8 * math.log(sigmoid(-0.2)) + 0.2 * quality + 1.25


def test_the_shift_of_mpo_is_the_mean_of_the_rewards_of_earlier_steps():
    """The first step's mean is 0.05; the second has two pairs, with rewards of 0.05, 0, 0.05 and 0."""
    algorithm = created(MPO)
    first = replay(algorithm, PAIR)
    assert first.loss == pytest.approx(mpo_loss(0.0)) and first.metrics["preference/reward_shift"] == 0
    assert first.metrics["loss/nll"] == pytest.approx(1.25)
    assert first.metrics["loss/preference"] == pytest.approx(-0.8 * math.log(sigmoid(-0.2)))
    two = rows([1, 0, 1, 0], [1, 1, 2, 2], [[-0.5], [-1.0], [-0.5], [-1.0]])
    second = replay(algorithm, two, microbatches=2)
    assert second.metrics["preference/reward_shift"] == pytest.approx(0.05)
    third = replay(algorithm, PAIR, ranks=2)
    shift = (0.05 * 1 + 0.025 * 2) / 3
    assert third.metrics["preference/reward_shift"] == pytest.approx(shift)
    assert third.loss == pytest.approx(mpo_loss(shift))
    again = created(MPO)
    again.restore({"mean": shift, "pairs": 3})
    assert replay(again, PAIR).loss == pytest.approx(third.loss)


def test_a_step_without_pairs_leaves_the_shift_as_it_is():
    algorithm = created(MPO)
    replay(algorithm, PAIR)
    state = dict(algorithm.state())
    replay(algorithm, rows([1, 1], [1, 1], [[-0.5], [-1.0]]))
    assert algorithm.state() == state != {} and created(MPO).state() == {}


UNPAIRED = rows([1, 0, 1], [4, 2, 9], [[-0.5, -0.5], [-2.0], [-1.5]])
"""The log-ratios are 1, -1 and -0.5."""


def kto_loss(z0: float) -> float:
    return (sigmoid(-0.1 * (1 - z0)) + 1.5 * sigmoid(0.1 * (-1 - z0)) + sigmoid(-0.1 * (-0.5 - z0))) / 3


@pytest.mark.parametrize(
    ("policy", "reference", "z0"),
    [
        ([-1.0, -2.0, -3.0], [-2.0, -3.0, -4.5], 3.5 / 3),
        ([-1.0, math.nan, -3.0], [-2.0, math.nan, -4.5], 1.25),  # the second row has no partner
        ([[-0.5, -0.5], [-2.0, math.nan], [-1.0, -2.0]], [[-1.0, -1.0], [-3.0, math.nan], [-4.0, -0.5]], 3.5 / 3),
        ([-2.0, -2.0, -2.0], [-1.0, -1.0, -1.0], 0.0),  # a mean below 0
        ([math.nan] * 3, [math.nan] * 3, 0.0),
    ],
)
def test_z0_is_a_mean_over_the_rows_that_have_a_partner(policy, reference, z0):
    batch = {**UNPAIRED, "mismatched_log_probs": policy, "mismatched_ref_log_probs": reference}
    for ranks in (1, 2):
        result = replay(KTO, batch, options={"lam_u": 1.5}, ranks=ranks)
        assert result.metrics["preference/z0"] == pytest.approx(z0)
        assert result.loss == pytest.approx(kto_loss(z0))
    assert result.metrics["preference/reward_chosen"] == pytest.approx(0.025)
    assert result.metrics["preference/reward_rejected"] == pytest.approx(-0.1)
    assert result.metrics["preference/margin"] == pytest.approx(0.125)
    assert result.metrics["preference/logprob_chosen"] == pytest.approx(-1.25)
    assert result.metrics["preference/desirable_fraction"] == pytest.approx(2 / 3)


def test_kto_learns_from_one_side_alone():
    batch = {**UNPAIRED, "rewards": [1, 1, 1], "mismatched_log_probs": np.zeros(3)}
    batch["mismatched_ref_log_probs"] = np.zeros(3)
    result = replay(KTO, batch)
    assert result.loss == pytest.approx((sigmoid(-0.1) + sigmoid(0.1) + sigmoid(0.05)) / 3)
    assert not {"preference/reward_rejected", "preference/margin"} & result.metrics.keys()


def judged(*scores: float) -> list[Prompt]:
    candidates = [(Candidate("x", score),) for score in scores]
    return [Prompt(str(place), (Message("user", "?"),), candidates=own) for place, own in enumerate(candidates)]


def test_kto_reads_rows_until_it_knows_both_kinds_and_refuses_one_alone():
    """Scores of 0 and less are undesirable, whatever the scale."""
    read = iter(judged(1, -1, 1))
    assert created(KTO).check_rows(read) == () and len(list(read)) == 1
    with pytest.raises(ValueError, match=r"every completion is desirable.*data\.train\.desirable"):
        created(KTO).check_rows(judged(1, 0.5))
    with pytest.raises(ValueError, match="every completion is undesirable"):
        created(KTO).check_rows(judged(0, -3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mismatched_log_probs": None}, "the batch lacks mismatched_log_probs"),
        ({"mismatched_ref_log_probs": None}, "the batch lacks mismatched_ref_log_probs"),
        (
            {"mismatched_log_probs": [0.0, 0.0]},
            r"mismatched_log_probs has shape \(2,\), and not \(B,\) or \(B, T'\) with B = 3",
        ),
    ],
)
def test_mismatched_logprobs_that_do_not_fit_are_refused(changes, message):
    batch = {**UNPAIRED, "mismatched_log_probs": np.zeros(3), "mismatched_ref_log_probs": np.zeros(3), **changes}
    with pytest.raises(DataError, match=message):
        replay(KTO, {key: values for key, values in batch.items() if values is not None})


@pytest.mark.parametrize("kind", [KTO, MPO])
def test_several_updates_on_a_batch_are_refused(kind):
    run = RunFacts(group_size=1, prompts_per_step=8, max_new_tokens=16, updates_per_batch=2, rewards=())
    with pytest.raises(ValueError, match=r"2 updates per batch.*set learner\.minibatches: 1 and learner\.epochs: 1"):
        created(kind).check(run)


def test_iterative_dpo_compares_with_the_policy_of_the_last_reset(fake_runs: Runs) -> None:
    """The first of two optimizer steps after a reset finds no margin, and each later one finds some."""
    config = fake_runs.config(
        algorithm={"name": "dpo", "data": "sampled"}, reference={"reset_every": 2}, trainer={"steps": 5}
    )
    assert fake_runs.train(config) == 0
    lines = [line for line in records(fake_runs.folder / "run" / "metrics.jsonl") if line["step"]]
    margins = {line["step"]: line["preference/margin"] for line in lines}
    assert [abs(margins[step]) < 1e-6 for step in (1, 2, 3, 4, 5)] == [True, False, True, False, True]
    kept = fake_runs.folder / "run" / "checkpoints" / "step-000005"
    assert (kept / "reference" / "model").is_dir() and fake_runs.replay(fake_runs.folder / "run") == 0
