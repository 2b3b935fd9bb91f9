"""The options of the first-party algorithms: what each does to the numbers, and what does not go together."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config.plugin_specs import PluginSpec
from mmrl.errors import ConfigError
from mmrl.interfaces import Needs, Refill, RunFacts
from mmrl.ops.kl import adapted_coefficient
from mmrl.ops.metrics import reward_metrics
from mmrl.plugin_host import registry
from mmrl.testing import Replay, replay
from mmrl.testing.rollouts import scored_groups
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss
from mmrl_algorithms.grpo import GRPO

ALL = [
    "cispo", "dapo", "dr_grpo", "gmpo", "grpo", "gspo", "gspo_token", "raft", "raft_pp", "reinforce_pp",
    "reinforce_pp_baseline", "reinforce_rej", "remax", "rloo", "sapo",
]  # fmt: skip
RUN = RunFacts(
    group_size=8,
    prompts_per_step=4,
    max_new_tokens=16,
    updates_per_batch=1,
    rewards=("right", "brief"),
    accuracy="right",
)
NO_KL = {"kl": {"coef": 0.0}}


def create(name: str, **options: Any) -> Any:
    return registry.create("algorithm", PluginSpec.model_validate({"name": name, **options}))


def batch(seed: int = 0, rows: int = 9, length: int = 6, holes: bool = True) -> dict[str, Any]:
    """Three prompts of three completions, ragged, with holes, rewards of 0 or 1."""
    rng = np.random.default_rng(seed)
    mask = np.arange(length) < rng.integers(2, length + 1, (rows, 1))
    if holes:
        mask &= rng.random((rows, length)) < 0.8
    old = -rng.random((rows, length)) - 0.1
    return {
        "group_ids": np.arange(rows) % 3,
        "rewards": (np.arange(rows) // 3 + np.arange(rows) % 3 > 1).astype(float),
        "greedy_rewards": np.arange(rows) % 3 / 2,
        "response_mask": mask,
        "old_log_probs": old,
        "log_probs": old + rng.normal(0, 0.3, old.shape),
        "rollout_log_probs": old + rng.normal(0, 0.3, old.shape),
        "ref_log_probs": old + rng.normal(0, 0.3, old.shape),
        "entropy": rng.random(old.shape),
        "max_len": length,
    }


def tokens_of(numbers: Any, result: Replay, data: dict[str, Any]) -> np.ndarray:
    """The values of tokens in the loss, in order."""
    weight = result.sequence_weights > 0
    return np.asarray(numbers)[np.asarray(data["response_mask"]) & weight[:, None]]


@pytest.mark.parametrize("name", ALL)
def test_options_that_all_share_act_alike(name: str) -> None:
    data = batch()
    plain = replay(name, data, options=NO_KL)
    with_entropy = replay(name, data, options={**NO_KL, "entropy_coef": 0.1})
    bonus = plain.sequence_weights[:, None] * data["entropy"] * data["response_mask"]
    assert with_entropy.loss == pytest.approx(plain.loss - 0.1 * bonus.sum())
    assert with_entropy.metrics["loss/entropy"] == pytest.approx(-0.1 * bonus.sum())
    assert create(name, entropy_coef=0.1).needs().entropy_gradient and not create(name).needs().entropy_gradient

    truncated = np.arange(9) % 4 == 0
    filtered = replay(name, {**data, "truncated": truncated}, options={**NO_KL, "mask_truncated": True})
    assert not filtered.sequence_weights[truncated].any()
    kept = plain.sequence_weights > 0
    np.testing.assert_array_equal(filtered.sequence_weights > 0, kept & ~truncated)
    np.testing.assert_allclose(  # they stay in the baseline
        tokens_of(np.broadcast_to(per_token(filtered), (9, 6)), filtered, data),
        tokens_of(np.broadcast_to(per_token(plain), (9, 6)), filtered, data),
    )

    correction = {"correction": {"mode": "token-truncate", "high": 1.2}}
    corrected = replay(name, data, options={**NO_KL, **correction})
    weights = np.exp(data["old_log_probs"] - data["rollout_log_probs"]).clip(max=1.2)
    per_sequence = name in ("gspo", "gmpo")  # whose loss, and weight, every token of a sequence shares
    means = (weights * data["response_mask"]).sum(1) / data["response_mask"].sum(1)
    factor = means[:, None] if per_sequence else weights
    np.testing.assert_allclose(corrected.grad_log_probs, factor * plain.grad_log_probs, atol=1e-12)
    seen = tokens_of(weights, plain, data)
    assert corrected.metrics["correction/weight_mean"] == pytest.approx(seen.mean())
    assert corrected.metrics["correction/ess"] == pytest.approx(seen.sum() ** 2 / (len(seen) * (seen**2).sum()))

    in_loss = replay(name, data, options={"kl": {"coef": 0.5, "where": "loss", "estimator": "k2"}})
    x = data["log_probs"] - data["ref_log_probs"]
    kl = (plain.sequence_weights[:, None] * data["response_mask"] * x**2 / 2).sum()
    assert in_loss.loss == pytest.approx(plain.loss + 0.5 * kl)
    assert in_loss.metrics["kl/coef"] == 0.5
    assert in_loss.metrics["kl/reference"] == pytest.approx(tokens_of(x**2 / 2, plain, data).mean())


def per_token(result: Replay) -> np.ndarray:
    return result.advantages if result.advantages.ndim == 2 else result.advantages[:, None]


@pytest.mark.parametrize("name", ALL)
def test_holes_are_as_if_their_tokens_were_not_there(name: str) -> None:
    """The same numbers with the tokens of others taken out, wherever a completion had them."""
    data = batch()
    mask = data["response_mask"]
    closed = dict(data)
    order = np.argsort(~mask, axis=1, kind="stable")  # tokens in the loss first
    for key, value in data.items():
        if np.ndim(value) == 2:
            closed[key] = np.take_along_axis(value, order, axis=1)
    one, other = replay(name, data), replay(name, closed)
    assert other.loss == pytest.approx(one.loss, rel=1e-12)
    np.testing.assert_allclose(other.grad_log_probs, np.take_along_axis(one.grad_log_probs, order, 1), atol=1e-15)


def test_the_order_of_shaping() -> None:
    """Normalise, sum, clip, penalise, KL, baseline: a hand calculation in which every other order differs."""
    rewards = {"right": np.array([0.0, 4.0, 1.0, 1.0]), "brief": np.array([-1.0, 0.0, 0.0, -2.0])}
    common = {
        "group_ids": np.array([0, 0, 1, 1]),
        "masks": [np.ones(2, bool)] * 4,
        "truncated": np.zeros(4, bool),
        "components": rewards,
        "weights": {"right": 2.0, "brief": 0.5},
        "penalties": frozenset({"brief"}),
        "rewards": 2 * rewards["right"] + 0.5 * rewards["brief"],
        "valid": np.ones(4, bool),
        "sampler_logprobs": [np.zeros(2)] * 4,
    }
    old, reference = [np.array([-1.0, -1.0])] * 4, [np.array([-1.5, -0.5]), np.zeros(2), np.zeros(2), np.zeros(2)]
    given = Batch(**common, old_logprobs=old, reference_logprobs=reference)
    clipped = create("dr_grpo", reward_clip=[-1.0, 3.0], kl={"coef": 0.25, "where": "reward"})
    # right: 0, 8, 2, 2 -> clip 0, 3, 2, 2 -> brief -0.5, 0, 0, -1 -> KL 0, -2, -2, -2, times 0.25, off the reward
    shaped = np.array([0 - 0.5 - 0, 3 + 0 + 0.5, 2 + 0.5, 2 - 1 + 0.5])
    expected = shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2)
    np.testing.assert_allclose(clipped.credit(given).advantages, expected)

    normalised = create("dr_grpo", reward_norm="group", reward_clip=[-1.0, 3.0])
    half = np.sqrt(0.5) * 2.8284271247461903 / (2.8284271247461903 + 1e-6)  # (4 - 2) / (std + eps)
    shaped = np.array([max(-2 * half, -1) - 0.5, min(2 * half, 3), 0.0, -1.0])
    expected = shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2)
    np.testing.assert_allclose(normalised.credit(given).advantages, expected, rtol=1e-6)


def routed(**fields: Any) -> Batch:
    """Two groups of two: ``right`` and ``brief`` score the first, ``count`` and ``brief`` the second."""
    nan, base = np.nan, {"valid": np.ones(4, bool), "sampler_logprobs": [np.zeros(2)] * 4}
    components = {
        "right": np.array([0.0, 1.0, nan, nan]),
        "count": np.array([nan, nan, 3.0, 5.0]),
        "brief": np.array([-1.0, 0.0, 0.0, -1.0]),
    }
    weights = {"right": 1.0, "count": 2.0, "brief": 0.5}
    rewards = np.array([-0.5, 1.0, 6.0, 9.5])
    base |= {"group_ids": np.array([0, 0, 1, 1]), "masks": [np.ones(2, bool)] * 4, "truncated": np.zeros(4, bool)}
    base |= {"components": components, "weights": weights, "rewards": rewards, "penalties": frozenset({"brief"})}
    return Batch(**base | {"old_logprobs": None, "reference_logprobs": None} | fields)


def test_a_reward_that_does_not_score_a_source_is_left_out_of_its_rows_sum() -> None:
    clipped = create("dr_grpo", reward_clip=[0.5, 8.0], **NO_KL).credit(routed()).advantages
    shaped = np.array([0.5 - 0.5, 1.0, 6.0, 8.0 - 0.5])
    np.testing.assert_allclose(clipped, shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2))

    half = np.sqrt(0.5)
    normalised = create("dr_grpo", reward_norm="group", **NO_KL).credit(routed()).advantages
    shaped = np.array([-half - 0.5, half, -2 * half, 2 * half - 0.5])
    np.testing.assert_allclose(normalised, shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2), rtol=1e-5)

    greedy = {
        "right": np.array([1.0, 1.0, np.nan, np.nan]),
        "count": np.array([np.nan, np.nan, 4.0, 4.0]),
        "brief": np.zeros(4),
    }
    remax = create("remax", reward_clip=[-10.0, 10.0], **NO_KL).credit(routed(greedy_components=greedy)).advantages
    np.testing.assert_allclose([each[0] for each in remax], [-0.5 - 1, 1 - 1, 6 - 8, 9.5 - 8])


def test_metrics_of_a_component_are_over_the_rows_that_it_scores() -> None:
    greedy = {"right": np.array([1.0, 1.0, np.nan, np.nan]), "count": np.array([np.nan, np.nan, 4.0, 4.0])}
    batch = routed(greedy_components=greedy, valid=np.array([True, True, True, False]))
    values = reward_metrics(batch, "right")
    assert values["reward/right_mean"] == 0.5 and values["reward/count_mean"] == 3.0
    assert values["reward/unscored_fraction"] == 0.25 and values["reward/mean"] == pytest.approx(6.5 / 3)
    assert values["group/all_correct_fraction"] == values["group/all_wrong_fraction"] == 0.0
    assert values["reward/greedy_mean"] == pytest.approx((1 + 8) / 2)
    first = reward_metrics(routed(valid=np.array([True, True, False, False])), "right")
    assert first["reward/right_mean"] == 0.5 and "reward/count_mean" not in first
    right = {"right": np.array([1.0, 1.0, np.nan, np.nan])}
    assert reward_metrics(routed(components=right), "right")["group/all_correct_fraction"] == 1.0


@pytest.mark.parametrize(("metric", "kept"), [(None, [True, True, False]), ("count", [True, True, False])])
def test_groups_are_selected_by_a_reward_that_scores_them(metric: str | None, kept: list[bool]) -> None:
    (template,) = [group for group in scored_groups(with_greedy=False) if group.rewards.tolist() == [0.25, 0.5]]
    nan, absent = np.nan, np.full(2, np.nan)
    components = [
        {"right": np.array([0.0, 1.0]), "count": absent},
        {"right": absent, "count": np.array([0.0, 1.0])},
        {"right": absent, "count": np.array([1.0, nan])},
    ]
    valid = [np.ones(2, bool), np.ones(2, bool), np.array([True, False])]
    groups = [replace(template, components=each, valid=ok) for each, ok in zip(components, valid, strict=True)]
    assert create("dapo", dynamic_sampling={"metric": metric}).select(groups) == kept


def test_the_greedy_reward_is_clipped_and_penalised_like_the_others() -> None:
    given = Batch(
        rewards=np.array([9.0, 1.0]),
        valid=np.ones(2, bool),
        group_ids=np.zeros(2, int),
        masks=[np.ones(1, bool)] * 2,
        truncated=np.zeros(2, bool),
        components={"right": np.array([9.0, 1.0]), "brief": np.array([0.0, 0.0])},
        weights={"right": 1.0, "brief": 1.0},
        penalties=frozenset({"brief"}),
        greedy_components={"right": np.array([7.0, 7.0]), "brief": np.array([-1.0, -1.0])},
        old_logprobs=None,
        reference_logprobs=None,
        sampler_logprobs=[np.zeros(1)] * 2,
    )
    values = create("remax", reward_clip=[-5.0, 5.0], **NO_KL).credit(given).advantages
    np.testing.assert_allclose(np.concatenate(values), [5 - (5 - 1), 1 - (5 - 1)])


@pytest.mark.parametrize(
    ("where", "unit", "truncated"),
    [("loss", "token", 0), ("loss", "sequence", 0), ("loss", "sequence", 4), ("reward", "token", 0),
     ("reward", "sequence", 4)],
)  # fmt: skip
def test_the_kl_coefficient_adapts_between_steps(where: str, unit: str, truncated: int) -> None:
    """By the KL that is penalised: of the rows in the loss, or in the reward of all that are valid."""
    data = batch()
    data["truncated"] = np.arange(9) < truncated
    mask, x = data["response_mask"], data["log_probs"] - data["ref_log_probs"]
    kl_BT = np.exp(-x) - 1 + x if where == "loss" else data["old_log_probs"] - data["ref_log_probs"]
    rows = ~data["truncated"] if where == "loss" else np.ones(9, bool)
    total = (kl_BT * mask)[rows].sum()
    measured = total / (mask[rows].sum() if unit == "token" else rows.sum())
    target = abs(measured) / 1.1  # within what is clipped
    kl = {"coef": 0.5, "where": where, "target": target, "unit": unit, "horizon": 90.0}
    algorithm = create("grpo", kl=kl, mask_truncated=True)
    first, second = replay(algorithm, data), replay(algorithm, data)
    assert first.metrics["kl/coef"] == 0.5
    assert first.metrics["kl/reference"] == pytest.approx(total / mask[rows].sum())
    error = max(measured / target - 1, -0.2)
    assert second.metrics["kl/coef"] == pytest.approx(0.5 * (1 + error * rows.sum() / 90))
    if where == "loss":
        assert second.metrics["loss/kl"] == pytest.approx(first.metrics["loss/kl"] * second.metrics["kl/coef"] / 0.5)
    else:
        assert not np.allclose(second.advantages, first.advantages)


def test_a_batch_larger_than_the_horizon_changes_the_coefficient_by_a_fifth_at_most() -> None:
    coef = adapted_coefficient(0.5, 0.0, target=1.0, horizon=1.0, num_sequences=1000)
    assert coef == pytest.approx(0.4)


def test_correction_that_leaves_nothing_has_no_effective_sample() -> None:
    data = batch() | {"rollout_log_probs": batch()["old_log_probs"] - 9}
    result = replay("grpo", data, options={"correction": {"mode": "token-mask"}})
    assert result.metrics["correction/ess"] == 0 and not result.grad_log_probs.any()


def test_constants_of_a_subclass_reach_its_loss() -> None:
    class Tempered(GRPO):
        def advantages(self, batch: Batch, rewards: Any, kl: Any) -> Credit:
            return replace(super().advantages(batch, rewards, kl), constants={"tau": 3.0})

        def surrogate(self, tokens: PackedTokens) -> TokenLoss:
            loss = super().surrogate(tokens)
            return replace(loss, loss_T=tokens.constants["tau"] * loss.loss_T)

    options = {"kl": {"coef": 0.1}}
    plain = replay("grpo", batch(), options=options)
    tempered = replay(Tempered(Tempered.Config.model_validate(options)), batch())
    assert tempered.metrics["loss/policy"] == pytest.approx(3 * plain.metrics["loss/policy"])
    assert tempered.metrics["loss/kl"] == pytest.approx(plain.metrics["loss/kl"])


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("grpo", {}, Needs(min_group_size=2)),
        ("dapo", {}, Needs(min_group_size=2, refill=Refill())),
        ("dapo", {"dynamic_sampling": None}, Needs(min_group_size=2)),
        ("remax", NO_KL, Needs(greedy_rollout=True)),
        ("remax", {}, Needs(greedy_rollout=True, reference_logprobs=True, old_logprobs=True)),
        ("reinforce_pp", NO_KL, Needs()),
        ("reinforce_pp", {**NO_KL, "dynamic_sampling": {"max_rounds": 3, "on_starvation": "stop"}},
         Needs(min_group_size=2, refill=Refill(3, "stop"))),
        ("reinforce_pp", {**NO_KL, "reward_norm": "group"}, Needs(min_group_size=2)),
        ("reinforce_pp_baseline", {}, Needs(min_group_size=2, reference_logprobs=True)),
        ("rloo", {"kl": {"coef": 0.1}}, Needs(min_group_size=2, reference_logprobs=True, old_logprobs=True)),
    ],
)  # fmt: skip
def test_what_an_algorithm_needs_follows_from_its_options(name: str, options: dict[str, Any], needs: Needs) -> None:
    assert create(name, **options).needs() == needs


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"dual_clip": 1.1}, r"dual_clip must be greater than 1 \+ clip_high"),
        ("grpo", {"length_norm": 5.0}, "length_norm goes with aggregation: seq-mean-token-sum-norm"),
        ("grpo", {"kl": {"coef": 0.1, "estimator": "k1"}}, "zero expected gradient"),
        ("grpo", {"kl": {"coef": 0.1, "where": "reward", "estimator": "k3"}}, "biased"),
        ("grpo", {"kl": {"target": 0.1}}, "target has nothing to steer"),
        ("grpo", {"reward_clip": [1.0, 1.0]}, "low less than high"),
        ("grpo", {"correction": {"mode": "token-mask", "low": 3.0, "high": 2.0}}, "low must be less than high"),
        ("grpo", {"correction": {"mode": "token-mask", "low": 6.0}}, r"they are 6\.0, 5\.0"),
        ("grpo", {"correction": {"mode": "seq-geo-reject", "high": 0.995}}, "need no correction"),
        ("grpo", {"kl": {"coef": 0.1, "unit": "sequence"}}, "unit and horizon go with target"),
        ("raft_pp", {"reward_norm": "group"}, "reward_norm cannot be 'group'"),
        ("reinforce_rej", {"reward_norm": "group"}, "reward_norm cannot be 'group'"),
        ("grpo", {"correction": {"mode": "tis"}}, "correction.mode cannot be 'tis'"),
        ("gspo", {"aggregation": "token-mean"}, "aggregation cannot be 'token-mean'"),
        ("gspo_token", {"aggregation": "token-mean"}, "aggregation cannot be 'token-mean'"),
        ("gmpo", {"aggregation": "token-mean"}, "aggregation cannot be 'token-mean'"),
        ("gspo", {"dual_clip": 3.0}, "unknown key dual_clip"),
        ("cispo", {"ratio_max": 0.2}, "ratio_max"),
        ("cispo", {"clip_high": 0.2}, "unknown key clip_high"),
        ("rloo", {"clip_high": 0.3}, "clip_high and loss: reinforce, which has no clip"),
        ("rloo", {"loss": "sequence_clip"}, "needs aggregation: seq-mean-token-mean"),
        ("rloo", {"loss": "sequence_clip", "aggregation": "seq-mean-token-mean", "dual_clip": 3.0}, "not defined"),
        ("remax", {"reward_norm": "group"}, "reward_norm cannot be 'group'"),
        ("raft", {"kl": {"coef": 0.1, "where": "reward"}}, "where cannot be 'reward'"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(name, **options)


def test_a_run_that_an_algorithm_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"dynamic_sampling\.metric is 'left', and the rewards are right, brief"):
        create("dapo", dynamic_sampling={"metric": "left"}).check(RUN)
    assert create("dapo").check(RUN) == create("grpo").check(RUN) == ()
    (warning,) = create("dapo", dynamic_sampling={"metric": "brief"}).check(RUN)
    assert "selects by 'brief', and accuracy is 'right'" in warning
    assert create("dapo").check(replace(RUN, accuracy="brief"))
    several = replace(RUN, updates_per_batch=2)
    for name in ("rloo", "remax", "raft"):
        (warning,) = create(name).check(several)
        assert "no ratio" in warning and not create(name).check(RUN)
    assert not [w for name in ("raft_pp", "grpo", "reinforce_pp") for w in create(name).check(several)]
    assert not create("rloo", loss="ppo_clip").check(several)
    assert "hardly ever reached" in create("gspo", clip_high=0.2).check(RUN)[0] and not create("gspo").check(RUN)


def test_options_given_in_part_keep_the_algorithms_other_defaults() -> None:
    assert create("rloo", kl={"coef": 0.2}).config.kl.where == "reward"
    assert create("grpo", kl={"coef": 0.2}).config.kl.loss_estimator == "k3"
    assert create("dapo", dynamic_sampling={"max_rounds": 2}).config.dynamic_sampling.on_starvation == "train_partial"


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_on_the_page_of_algorithms(name: str) -> None:
    page = (Path(__file__).parents[2] / "plugins" / "README.md").read_text()
    documented = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    fields = registry.options_class("algorithm", name).model_fields
    nested = [field.annotation for field in fields.values() if hasattr(field.annotation, "model_fields")]
    assert {*fields, *(key for each in nested for key in each.model_fields)} <= documented
    assert f"| `{name}` |" in page
