"""The golden vectors: numbers computed in float64 from the formulas, by somebody else."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config.plugin_specs import PluginSpec
from mmrl.interfaces import CORRECTION_BOUNDS, Aggregation, Algorithm
from mmrl.ops import credit
from mmrl.ops.aggregation import sequence_weights
from mmrl.ops.correction import correction_metrics, correction_weights
from mmrl.ops.credit import group_advantages
from mmrl.ops.kl import adapted_coefficient, kl_per_token
from mmrl.ops.logprobs import token_logprobs
from mmrl.plugin_host import registry
from mmrl.testing import Replay, replay
from mmrl.types import Credit, PackedTokens
from mmrl_algorithms.gspo_token import GSPOToken
from mmrl_algorithms.ppo import PPO

RTOL = {"float64": 1e-6, "float32": 1e-4}
ATOL = {"float64": 1e-9, "float32": 1e-6}


@functools.cache
def golden() -> dict[str, Any]:
    return json.loads((Path(__file__).parents[1] / "golden_vectors.json").read_text())


def entries(section: str, **wanted: Any) -> list[Any]:
    found = [e for e in golden()[section] if all(e[key] in values for key, values in wanted.items())]
    assert found, f"no golden entries for {section} {wanted}"
    return [pytest.param(e, id=e["id"]) for e in found]


NO_KL = {"kl": {"coef": 0.0}}
TOKEN_MEAN = {"aggregation": "token-mean"}
IN_REWARD = {"estimator": "k1", "where": "reward"}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"kl": {"coef": 0.04, "estimator": "k3", "where": "loss"}}),
    "grpo_nokl": ("grpo", NO_KL),
    "dr_grpo": ("dr_grpo", {}),  # and length_norm: the batch's max_len
    "dapo": ("dapo", {}),
    "dapo_prompt_mean": ("dapo", {"aggregation": "prompt-mean-token-mean"}),
    "gspo": ("gspo", {}),
    "gspo_wide": ("gspo", {"clip_low": 0.1, "clip_high": 0.15}),
    "gspo_token": ("gspo_token", {}),
    "gspo_token_wide": ("gspo_token", {"clip_low": 0.1, "clip_high": 0.15}),
    "rloo": ("rloo", {"kl": {"coef": 0.05, **IN_REWARD}}),
    "rloo_tokenclip": ("rloo", {**NO_KL, "loss": "ppo_clip", **TOKEN_MEAN}),
    "rloo_seqclip": (
        "rloo",
        {"kl": {"coef": 0.05, **IN_REWARD}, "loss": "sequence_clip", "aggregation": "seq-mean-token-mean"},
    ),
    "remax": ("remax", NO_KL),
    "remax_kl_tokenmean": ("remax", {"kl": {"coef": 0.01, **IN_REWARD}, **TOKEN_MEAN}),
    "reinforce_pp": ("reinforce_pp", {"kl": {"coef": 0.01, **IN_REWARD}}),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {"kl": {"coef": 0.001, "estimator": "k2", "where": "loss"}}),
    "cispo": ("cispo", {"ratio_max": 5.0}),
    "cispo_1.28": ("cispo", {"ratio_max": 1.28}),
    "gmpo": ("gmpo", {}),
    "gmpo_narrow": ("gmpo", {"clip_low": 0.12, "clip_high": 0.12}),
    "sapo": ("sapo", {}),
    "grpo_dual_clip": ("grpo", {**NO_KL, **TOKEN_MEAN, "dual_clip": 3.0}),
    "grpo_dual_clip_1.5": ("grpo", {**NO_KL, **TOKEN_MEAN, "dual_clip": 1.5}),
    "ppo": ("ppo", {}),
    "ppo_dual_clip": ("ppo", {"dual_clip": 3.0}),
    "raft": ("raft", {}),
    "raft_pp": ("raft_pp", {}),
    "reinforce_rej": ("reinforce_rej", {}),
    "dapo_tis": ("dapo", {"correction": {"mode": "token-truncate"}}),
    "dapo_icepop": ("dapo", {"correction": {"mode": "token-mask", "low": 0.5, "high": 5.0}}),
    "dapo_seq_mask": ("dapo", {"correction": {"mode": "seq-mask"}}),
}
"""Algorithm and options of every golden recipe but one."""

WITH_TOKEN_ADVANTAGES = "gspo_token_tokenadv"
CLIP_METRICS = {
    "clipfrac_high": "policy/clip_fraction_high",
    "clipfrac_low": "policy/clip_fraction_low",
    "clipfrac_dual": "policy/clip_fraction_dual",
    "ppo_kl": "policy/ppo_kl",
}


def run_recipe(entry: dict[str, Any], batch: dict[str, Any] | None = None, **how: Any) -> Replay:
    batch = batch or golden()["batches"][entry["batch"]]
    return replay(algorithm(entry["recipe"], batch["max_len"]), batch, **how)


@functools.cache
def algorithm(recipe: str, max_len: int) -> Algorithm:
    name, options = RECIPES[recipe]
    length_norm = {"length_norm": max_len} if name == "dr_grpo" else {}
    return registry.create("algorithm", PluginSpec.model_validate({"name": name, **options, **length_norm}))


def golden_advantages(entry: dict[str, Any]) -> np.ndarray:
    name, batch = entry["config"]["advantage"], golden()["batches"][entry["batch"]]
    if name == "rewards":
        return np.where(batch["reward_valid"], batch["rewards"], 0.0)
    (found,) = [e["expected"] for e in golden()["advantages"] if (e["name"], e["batch"]) == (name, entry["batch"])]
    return np.array(found)


def test_no_recipe_is_left_out():
    assert {e["recipe"] for e in golden()["policy"]} == set(RECIPES) | {WITH_TOKEN_ADVANTAGES}


@pytest.mark.parametrize("entry", entries("policy", recipe=(WITH_TOKEN_ADVANTAGES,)))
def test_an_advantage_per_token_is_golden(entry):
    """Where the sequence's ratio with a gradient per token differs from the one without."""

    class Given(GSPOToken):
        def advantages(self, batch, rewards, kl):
            return Credit(list(golden_advantages(entry)))

    options = {"clip_low": 0.1, "clip_high": 0.15}
    result = replay(Given(Given.Config.model_validate(options)), golden()["batches"][entry["batch"]], microbatches=3)
    np.testing.assert_allclose(result.loss, entry["expected"]["loss"], rtol=1e-6)
    np.testing.assert_allclose(result.grad_log_probs, entry["expected"]["grad_log_probs"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("entry", entries("policy", recipe=tuple(RECIPES)))
def test_a_recipe_is_golden_however_it_is_split(entry, dtype):
    expected = entry["expected"]
    close = functools.partial(np.testing.assert_allclose, rtol=RTOL[dtype], atol=ATOL[dtype])
    mask = np.array(golden()["batches"][entry["batch"]]["response_mask"], bool)
    kept = np.array(expected["seq_weights"]) > 0
    for ranks, microbatches in [(1, 1), (1, 4), (2, 2), (3, 1)]:
        result = run_recipe(entry, ranks=ranks, microbatches=microbatches, dtype=dtype)
        close(result.sequence_weights, expected["seq_weights"])
        close(result.loss, expected["loss"])
        close(result.grad_log_probs, expected["grad_log_probs"])
        close(result.metrics["loss/policy"], expected["pg_loss"])
        advantages = golden_advantages(entry)
        if result.advantages.ndim == advantages.ndim == 1:
            close(result.advantages, advantages)
        else:  # one of them per token: equal where there is a token in the loss
            wide = [a[:, None] if a.ndim == 1 else a for a in (result.advantages, advantages)]
            close(*(np.broadcast_to(a, mask.shape)[mask & kept[:, None]] for a in wide))
        for name, value in expected.get("metrics", {}).items():
            close(result.metrics[CLIP_METRICS[name]], value)
        if "kl_loss" in expected:
            close(result.metrics["loss/kl"], entry["config"]["kl_loss"]["coef"] * expected["kl_loss"])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("entry", golden()["value_loss"], ids=lambda entry: entry["id"])
def test_the_critics_loss_and_gradient_are_golden_however_they_are_split(entry, dtype):
    """The clipped share is that of gradients of 0: the vectors' own counts a token within the clip, by rounding."""
    batch, expected = golden()["batches"][entry["batch"]], entry["expected"]
    close = functools.partial(np.testing.assert_allclose, rtol=RTOL[dtype], atol=ATOL[dtype])
    valid_B1 = np.array(batch["reward_valid"], bool)[:, None]
    mask_BT = np.array(batch["response_mask"], bool) & valid_B1
    returns_BT = golden_advantages({"config": {"advantage": entry["returns"]}, "batch": entry["batch"]})
    change_BT = np.abs(np.array(batch["vpreds"]) - np.array(batch["values"]))
    at_the_bound = np.abs(change_BT - (entry["clip"] or 0)) < 1e-6 if dtype == "float32" else np.zeros_like(mask_BT)
    clipped = np.mean(np.array(expected["grad_vpreds"])[mask_BT] == 0)
    for ranks, microbatches in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 1)]:
        options = {"value_clip": entry["clip"]}
        found = replay(PPO, batch, options=options, ranks=ranks, microbatches=microbatches, dtype=dtype)
        close(found.returns[mask_BT], returns_BT[mask_BT])
        assert not found.returns[~mask_BT].any()
        close(found.value_loss, expected["loss"])
        assert found.metrics["critic/loss"] == found.value_loss
        close(np.where(at_the_bound, 0, found.grad_values), np.where(at_the_bound, 0, expected["grad_vpreds"]))
        if not at_the_bound[mask_BT].any():
            close(found.metrics["critic/clip_fraction"], clipped)


@pytest.mark.parametrize("entry", entries("policy", recipe=tuple(RECIPES), batch=("r2", "r3")))
def test_what_is_masked_or_invalid_changes_nothing(entry):
    clean = golden()["batches"][entry["batch"]]
    mask = np.array(clean["response_mask"], bool)
    dirty = dict(clean)
    for name in ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "vpreds"):
        dirty[name] = np.where(mask, np.array(clean[name]), np.nan)
    dirty["rewards"] = np.where(clean["reward_valid"], clean["rewards"], np.nan)
    one, other = run_recipe(entry, clean), run_recipe(entry, dirty)
    assert one.loss == other.loss
    np.testing.assert_array_equal(one.grad_log_probs, other.grad_log_probs)
    np.testing.assert_array_equal(one.advantages, other.advantages)
    assert dict(one.metrics) == dict(other.metrics)


@pytest.mark.parametrize("entry", entries("policy", recipe=tuple(RECIPES), batch=("r2", "r4")))
def test_permuting_rows_permutes_results(entry):
    batch = golden()["batches"][entry["batch"]]
    order = np.random.default_rng(0).permutation(len(batch["rewards"]))
    names = [name for name, value in batch.items() if isinstance(value, list)]
    shuffled = {**batch, **{name: [batch[name][i] for i in order] for name in names}}
    one, other = run_recipe(entry), run_recipe(entry, shuffled)
    np.testing.assert_allclose(other.loss, one.loss, rtol=1e-12)
    np.testing.assert_allclose(other.advantages, one.advantages[order], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(other.grad_log_probs, one.grad_log_probs[order], rtol=1e-12, atol=1e-15)


RELATIVE = ["grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "rloo", "cispo", "gmpo", "sapo"]


@pytest.mark.parametrize("name", RELATIVE)
def test_an_all_equal_group_gives_exactly_nothing(name):
    rng = np.random.default_rng(0)
    logprobs = {key: -rng.random((7, 3)) for key in ("log_probs", "old_log_probs", "ref_log_probs")}
    batch = {
        "rewards": np.full(7, 0.7, np.float32),
        "group_ids": np.zeros(7, int),
        "response_mask": np.ones((7, 3), int),
        "rollout_log_probs": logprobs["old_log_probs"],
        "max_len": 3,
        **logprobs,
    }
    result = replay(name, batch, options={**NO_KL, **({"std_eps": 1e-9} if name == "grpo" else {})}, dtype="float32")
    assert result.loss == 0
    assert not result.advantages.any() and not result.grad_log_probs.any()


ADVANTAGES = {
    "grpo": {},
    "grpo_population_std": {"ddof": 0},
    "grpo_eps1e-4": {"eps": 1e-4},
    "dr_grpo": {"scale": "none"},
    "group_mean_batch_std": {"scale": "batch"},
}


@pytest.mark.parametrize("entry", entries("advantages", name=tuple(ADVANTAGES)))
def test_group_advantages_are_golden(entry):
    batch = golden()["batches"][entry["batch"]]
    advantages = group_advantages(
        np.array(batch["rewards"]),
        np.array(batch["group_ids"]),
        np.array(batch["reward_valid"], bool),
        **ADVANTAGES[entry["name"]],
    )
    np.testing.assert_allclose(advantages, entry["expected"], rtol=1e-6, atol=1e-9)


class Arrays:
    """A golden batch for the functions of whole batches."""

    def __init__(self, batch_id: str, beta: float = 0.0) -> None:
        batch = golden()["batches"][batch_id]
        self.rewards, self.greedy = np.array(batch["rewards"]), np.array(batch["greedy_rewards"])
        self.groups, self.valid = np.array(batch["group_ids"]), np.array(batch["reward_valid"], bool)
        masks = np.array(batch["response_mask"], bool)
        self.masks = [mask & valid for mask, valid in zip(masks, self.valid, strict=True)]
        kl = credit.token_kl(np.array(batch["old_log_probs"]), np.array(batch["ref_log_probs"]), self.masks)
        self.kl = [beta * kl_T for kl_T in kl]
        self.tokens = credit.token_rewards(self.rewards, self.masks, self.kl)

        self.values = list(np.array(batch["values"]))

    def returns(self, gamma: float = 1.0) -> list[np.ndarray]:
        return credit.reward_to_go(self.tokens, self.masks, gamma=gamma)

    def gae(self, params: dict[str, Any]) -> list[np.ndarray]:
        return credit.gae(self.tokens, self.values, self.masks, gamma=params["gamma"], lam=params["lam"])

    def learned(self, params: dict[str, Any]) -> list[np.ndarray]:
        return [(a + v) * m for a, v, m in zip(self.gae(params), self.values, self.masks, strict=True)]


ESTIMATORS: dict[str, Callable[[Arrays, dict[str, Any]], Any]] = {
    "rloo": lambda a, p: credit.leave_one_out(a.rewards, a.groups, a.valid),
    "rloo_kl_in_reward": lambda a, p: credit.leave_one_out(credit.less_sequence_kl(a.rewards, a.kl), a.groups, a.valid),
    "token_rewards": lambda a, p: a.tokens,
    "token_rewards_kl0.01": lambda a, p: a.tokens,
    "gae_g1_l0.95_raw": lambda a, p: a.gae(p),
    "gae_g0.99_l0.9_raw": lambda a, p: a.gae(p),
    "gae_g1_l0.95_returns": lambda a, p: a.learned(p),
    "gae_g0.99_l0.9_returns": lambda a, p: a.learned(p),
    "gae_g1_l0.95_whitened": lambda a, p: credit.whiten(a.gae(p), a.masks),
    "returns_gamma1": lambda a, p: a.returns(),
    "returns_gamma0.9": lambda a, p: a.returns(0.9),
    "reinforce_pp": lambda a, p: credit.whiten(a.returns(), a.masks),
    "reinforce_pp_gamma0.9": lambda a, p: credit.whiten(a.returns(0.9), a.masks),
    "raft": lambda a, p: credit.best_of_group(a.rewards, a.groups, a.valid, threshold=p["threshold"]),
    "reinforce_rej_keep": lambda a, p: credit.mixed_groups(a.rewards, a.groups, a.valid),
}


@pytest.mark.parametrize("entry", entries("advantages", name=tuple(ESTIMATORS)))
def test_estimators_are_golden(entry):
    params = entry["params"]
    arrays = Arrays(entry["batch"], params.get("beta", 0.0))
    found, expected = ESTIMATORS[entry["name"]](arrays, params), np.array(entry["expected"], float)
    if expected.ndim == 2:  # a row that is invalid has nothing to be credited with
        expected = expected * np.array(arrays.masks)
        found = np.stack(found)
    else:
        expected = expected * arrays.valid
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("entry", entries("advantages", name=("reinforce_pp_baseline_sample",)))
def test_whitening_by_sample_is_golden(entry):
    options = {"level": "sample", **NO_KL}
    batch = golden()["batches"][entry["batch"]]
    result = replay("reinforce_pp_baseline", batch, options=options)
    mask = np.array(batch["response_mask"], bool)
    wide = np.where(mask, result.advantages[:, None], 0.0)
    np.testing.assert_allclose(wide, np.where(mask, entry["expected"], 0.0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", golden()["dynamic_sampling"])
def test_groups_are_kept_by_the_range_of_their_rewards(case):
    groups = np.array(case["group_ids"])
    mixed = credit.mixed_groups(np.array(case["metric"]), groups, np.ones(len(groups), bool))
    assert {str(g): bool(mixed[groups == g].any()) for g in groups} == case["expected_keep"]


@pytest.mark.parametrize("case", golden()["kl_controller"])
def test_the_kl_coefficient_is_steered_as_in_the_vectors(case):
    coef, found = case["init"], []
    for kl in case["kls"]:
        coef = adapted_coefficient(
            coef, kl, target=case["target"], horizon=case["horizon"], num_sequences=case["n_steps"]
        )
        found.append(coef)
    np.testing.assert_allclose(found, case["expected_coef"], rtol=1e-9)


@pytest.mark.parametrize("entry", entries("rollout_correction"))
def test_correction_weights_and_metrics_are_golden(entry):
    batch, expected = golden()["batches"][entry["batch"]], entry["expected"]
    mask = torch.tensor(batch["response_mask"], dtype=torch.bool)
    rows, length = mask.shape

    def flat(name: str) -> torch.Tensor:
        return torch.where(mask, torch.tensor(batch[name], dtype=torch.float64), 0.0).flatten()

    tokens = PackedTokens(
        logprobs_T=flat("log_probs").requires_grad_(),
        old_logprobs_T=flat("old_log_probs"),
        sampler_logprobs_T=flat("rollout_log_probs"),
        reference_logprobs_T=None,
        advantages_T=torch.ones(rows * length),
        mask_T=mask.flatten(),
        sequence_T=torch.arange(rows).repeat_interleave(length),
        num_sequences=rows,
        entropy_T=torch.zeros(rows * length),
    )
    low, high = entry["c_min"], entry["c_max"]
    weight_T, raw_T = correction_weights(tokens, entry["mode"], low=low, high=high)
    if CORRECTION_BOUNDS[entry["mode"]] == (low, high):
        assert torch.equal(correction_weights(tokens, entry["mode"])[0], weight_T)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
    for values_T, wanted in ((weight_T, expected["weights"]), (raw_T, expected["raw"])):
        close(torch.where(mask, values_T.view(rows, length), 0.0), np.where(mask, wanted, 0.0))
    means = {
        name: float(values_T[tokens.mask_T].mean())
        for name, values_T in correction_metrics(tokens, weight_T, raw_T).items()
    }
    square = means["correction/weight_square_mean"]
    close(means["correction/weight_mean"], expected["metrics"]["mean_weight"])
    close(means["correction/weight_mean"] ** 2 / square if square else 0.0, expected["metrics"]["ess"])
    close(means["correction/changed_fraction"], expected["metrics"]["frac_changed"])
    close(means["correction/kl_k1"], expected["metrics"]["kl_rollout_old_k1"])
    close(means["correction/kl_k3"], expected["metrics"]["kl_rollout_old_k3"])


@pytest.mark.parametrize("entry", [p for p in entries("aggregation") if not p.values[0]["count_empty"]])
def test_aggregation_weights_and_partial_sums_are_golden(entry):
    batch = golden()["batches"][entry["batch"]]
    masks = [np.array(row, bool) for row in batch["response_mask"]]
    losses = np.array(entry["loss_mat"])
    weights = sequence_weights(Aggregation(entry["mode"], entry["const"]), masks, np.array(batch["group_ids"]))
    np.testing.assert_allclose(weights, entry["expected"]["seq_weights"], rtol=1e-6)
    row_losses = np.array([weights[i] * losses[i][mask].sum() for i, mask in enumerate(masks)])
    np.testing.assert_allclose(row_losses.sum(), entry["expected"]["value"], rtol=1e-6)
    partition = entry["partition"]
    parts = [[row_losses[rows].sum() for rows in rank] for rank in partition["rank_micro_rows"]]
    flat = [value for rank in partition["partial_losses"] for value in rank]
    np.testing.assert_allclose([partition["dp_size"] * v for rank in parts for v in rank], flat, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("entry", entries("kl"))
def test_kl_estimators_are_golden_in_value_and_gradient(entry):
    batch, expected = golden()["batches"][entry["batch"]], entry["expected"]
    mask = torch.tensor(batch["response_mask"], dtype=torch.bool)
    tensors = {n: torch.tensor(batch[n], dtype=torch.float64) for n in ("log_probs", "ref_log_probs", "old_log_probs")}
    logprobs = tensors["log_probs"].requires_grad_()
    kl = kl_per_token(entry["estimator"], logprobs, tensors["ref_log_probs"], tensors["old_log_probs"])
    kl = torch.where(mask, kl, torch.zeros_like(kl))
    mean = kl.sum() / mask.sum()
    mean.backward()
    np.testing.assert_allclose(kl.detach(), expected["per_token"], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(mean.item(), expected["token_mean"], rtol=1e-6)
    np.testing.assert_allclose(logprobs.grad, expected["grad_log_probs"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("entry", entries("kl_full_and_entropy"))
def test_entropies_and_their_gradients_are_golden(entry):
    expected, mask = entry["expected"], torch.tensor(entry["response_mask"], dtype=torch.bool)
    logits = torch.tensor(entry["logits"], dtype=torch.float64, requires_grad=True)
    targets, banned = torch.zeros(mask.numel(), dtype=torch.int64), torch.zeros(logits.shape[-1], dtype=torch.bool)
    _, entropy = token_logprobs(logits.flatten(0, 1), targets, banned, 1.0, entropy_gradient=True)
    entropy = torch.where(mask, entropy.view(mask.shape), 0.0)
    mean = entropy.sum() / mask.sum()
    mean.backward()
    np.testing.assert_allclose(entropy.detach(), expected["entropy"], rtol=1e-6)
    np.testing.assert_allclose(mean.item(), expected["entropy_token_mean"], rtol=1e-6)
    np.testing.assert_allclose(logits.grad, expected["grad_entropy_logits"], rtol=1e-6, atol=1e-9)


def pairs_batch(entry: dict[str, Any], chosen: Any = 1.0) -> dict[str, Any]:
    """The pairs of a golden entry as rows: all chosen ones, then all rejected ones in another order."""
    count = len(entry["chosen_mask"])
    order = np.concatenate([np.arange(count), count + np.arange(count)[::-1]])

    def rows(*names: str) -> np.ndarray:
        return np.concatenate([entry[name] for name in names])[order]

    logprobs = rows("chosen_logps", "rejected_logps")
    return {
        "group_ids": (7 * np.tile(np.arange(count), 2))[order],
        "rewards": np.concatenate([np.broadcast_to(chosen, count), np.zeros(count)])[order],
        "response_mask": rows("chosen_mask", "rejected_mask"),
        "log_probs": logprobs,
        "rollout_log_probs": np.zeros_like(logprobs),
        "ref_log_probs": rows("ref_chosen_logps", "ref_rejected_logps"),
    }


PAIR_CASES = [
    pytest.param(entry, case, id=f"{entry['id']}-{case['loss_type']}-{place}")
    for entry in golden()["preference"]
    for place, case in enumerate(entry["expected"])
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("entry", "case"), PAIR_CASES)
def test_a_preference_is_golden_however_it_is_split(entry, case, dtype):
    name, options, count = case["loss_type"], dict(case["params"]), len(entry["chosen_mask"])
    chosen = np.exp(options.pop("offset", 0.0))  # odpo's offset is the logarithm of the difference of scores
    if name not in ("simpo", "orpo"):
        name, options["variant"] = "dpo", {"dpo": "sigmoid"}.get(name, name)
    batch = pairs_batch(entry, chosen)
    gradient = np.concatenate([case["grad_sum_logp_chosen"], case["grad_sum_logp_rejected"][::-1]])
    close = functools.partial(np.testing.assert_allclose, rtol=RTOL[dtype], atol=ATOL[dtype])
    for ranks, microbatches in [(1, 1), (2, 2), (1, 4)]:
        result = replay(name, batch, options=options, ranks=ranks, microbatches=microbatches, dtype=dtype)
        close(result.loss, case["loss"])
        close(result.grad_log_probs, gradient[:, None] * batch["response_mask"])
        close(result.metrics["preference/logprob_chosen"], np.mean(entry["sums"]["pc"]))
        close(result.metrics["preference/logprob_rejected"], np.mean(entry["sums"]["pr"]))
        close(result.sequence_weights, 0.5 / count / np.sum(batch["response_mask"], 1))
        if name == "dpo":
            sums = {side: np.array(entry["sums"][side]) for side in ("pc", "rc", "pr", "rr")}
            rewards = [options.get("beta", 0.1) * (sums[p] - sums[r]) for p, r in (("pc", "rc"), ("pr", "rr"))]
            close(result.metrics["preference/reward_chosen"], rewards[0].mean())
            close(result.metrics["preference/reward_rejected"], rewards[1].mean())
            close(result.metrics["preference/margin"], (rewards[0] - rewards[1]).mean())
            close(result.metrics["preference/accuracy"], (rewards[0] > rewards[1]).mean())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("entry", entries("kto"))
def test_kto_is_golden_however_it_is_split(entry, dtype):
    """The vectors give sums over completions: each is halved over two tokens."""
    policy, reference = (np.array(entry[key])[:, None].repeat(2, 1) / 2 for key in ("policy_logp", "ref_logp"))
    batch = {
        "group_ids": np.arange(len(policy))[::-1],
        "rewards": entry["label"],
        "response_mask": np.ones_like(policy),
        "log_probs": policy,
        "rollout_log_probs": np.zeros_like(policy),
        "ref_log_probs": reference,
        "mismatched_log_probs": entry["kl_policy_logp"],
        "mismatched_ref_log_probs": entry["kl_ref_logp"],
    }
    expected, close = (
        entry["expected"],
        functools.partial(np.testing.assert_allclose, rtol=RTOL[dtype], atol=ATOL[dtype]),
    )
    for ranks, microbatches in [(1, 1), (2, 2), (1, 4)]:
        result = replay("kto", batch, options=entry["params"], ranks=ranks, microbatches=microbatches, dtype=dtype)
        close(result.metrics["preference/z0"], expected["z0"])
        close(result.loss, expected["loss"])
        close(result.grad_log_probs, np.array(expected["grad_policy_logp"])[:, None].repeat(2, 1))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("entry", [e for e in entries("reward_model") if "chosen" in e.values[0]])
def test_a_reward_model_is_golden_however_it_is_split(entry, dtype):
    """The rejected members come after all chosen ones, in the other order. A margin of 0 still has an order."""
    count, margin = len(entry["chosen"]), entry["margin"]
    batch = {
        "group_ids": 7 * np.concatenate([np.arange(count), np.arange(count)[::-1]]),
        "rewards": np.concatenate([np.ones(count) if margin is None else np.maximum(margin, 1e-12), np.zeros(count)]),
        "scores": np.concatenate([entry["chosen"], entry["rejected"][::-1]]),
        "response_mask": np.arange(4) < (1 + np.arange(2 * count) % 4)[:, None],
    }
    expected, options = entry["expected"], {"margin": margin is not None, "centre": entry["center"]}
    gradient = np.concatenate([expected["grad_chosen"], expected["grad_rejected"][::-1]])
    close = functools.partial(np.testing.assert_allclose, rtol=RTOL[dtype], atol=ATOL[dtype])
    for ranks, microbatches in [(1, 1), (2, 2), (1, 4)]:
        result = replay("bradley_terry", batch, options=options, ranks=ranks, microbatches=microbatches, dtype=dtype)
        close(result.loss, expected["loss"])
        close(result.grad_scores, gradient)
        close(result.metrics["preference/accuracy"], expected["accuracy"])
        close(result.metrics["preference/score_chosen"], np.mean(entry["chosen"]))
        close(result.metrics["preference/score_rejected"], np.mean(entry["rejected"]))
        close(result.metrics["preference/margin"], np.mean(entry["chosen"]) - np.mean(entry["rejected"]))
        assert not result.grad_log_probs.any()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_graded_sets_are_golden_each_prompt_once(dtype):
    """All sets of the vectors are prompts of one step, so the loss is their mean, and each gradient is a third."""
    sets = [each.values[0] for each in entries("reward_model") if "ranks" in each.values[0]]
    assert len(sets) == 3
    batch = {
        "group_ids": np.repeat([5, 1, 9], [len(each["scores"]) for each in sets]),
        "rewards": -np.concatenate([each["ranks"] for each in sets]),
        "scores": np.concatenate([each["scores"] for each in sets]),
    }
    batch["response_mask"] = np.arange(3) < (1 + np.arange(len(batch["scores"])) % 3)[:, None]
    close = functools.partial(np.testing.assert_allclose, rtol=RTOL[dtype], atol=ATOL[dtype])
    for ranks, microbatches in [(1, 1), (2, 2), (1, 4)]:
        result = replay(
            "bradley_terry", batch, options={"centre": 0.0}, ranks=ranks, microbatches=microbatches, dtype=dtype
        )
        close(result.loss, np.mean([each["expected"]["loss"] for each in sets]))
        close(result.grad_scores, np.concatenate([each["expected"]["grad_scores"] for each in sets]) / 3)
