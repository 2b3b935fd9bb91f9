"""The golden vectors: numbers computed in float64 from the formulas, by somebody else."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.interfaces import Aggregation
from mmrl.ops.aggregation import sequence_weights
from mmrl.ops.credit import group_advantages
from mmrl.ops.kl import kl_per_token
from mmrl.ops.logprobs import token_logprobs
from mmrl.testing import replay

RTOL = {"float64": 1e-6, "float32": 1e-4}
ATOL = {"float64": 1e-9, "float32": 1e-6}


@functools.cache
def golden() -> dict[str, Any]:
    return json.loads((Path(__file__).parents[1] / "golden_vectors.json").read_text())


def entries(section: str, **wanted: Any) -> list[Any]:
    found = [e for e in golden()[section] if all(e[key] in values for key, values in wanted.items())]
    assert found, f"no golden entries for {section} {wanted}"
    return [pytest.param(e, id=e["id"]) for e in found]


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    kl = config["kl_loss"]
    return {
        "clip_low": config["loss_params"]["eps_low"],
        "clip_high": config["loss_params"]["eps_high"],
        "aggregation": config["agg"],
        **({"kl": {"coef": kl["coef"], "estimator": kl["estimator"]}} if kl else {}),
    }


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("entry", entries("policy", recipe=("grpo", "grpo_nokl")))
def test_grpo_gives_the_golden_loss_gradient_and_weights(entry, ranks, microbatches, dtype):
    batch, expected = golden()["batches"][entry["batch"]], entry["expected"]
    result = replay(
        "grpo", batch, options=options_of(entry["config"]), ranks=ranks, microbatches=microbatches, dtype=dtype
    )
    close = functools.partial(np.testing.assert_allclose, rtol=RTOL[dtype], atol=ATOL[dtype])
    close(result.loss, expected["loss"])
    close(result.metrics["loss/policy"], expected["pg_loss"])
    close(result.grad_log_probs, expected["grad_log_probs"])
    close(result.sequence_weights, expected["seq_weights"])
    close(result.metrics["policy/clip_fraction_high"], expected["metrics"]["clipfrac_high"])
    close(result.metrics["policy/clip_fraction_low"], expected["metrics"]["clipfrac_low"])
    if "kl_loss" in expected:
        coef = entry["config"]["kl_loss"]["coef"]
        close(result.metrics["loss/kl"], coef * expected["kl_loss"])


@pytest.mark.parametrize("entry", entries("policy", recipe=("grpo",)))
def test_what_is_masked_or_invalid_changes_nothing(entry):
    clean = golden()["batches"][entry["batch"]]
    mask = np.array(clean["response_mask"], bool)
    dirty = dict(clean)
    for name in ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
        dirty[name] = np.where(mask, np.array(clean[name]), np.nan)
    dirty["rewards"] = np.where(clean["reward_valid"], clean["rewards"], np.nan)
    options = options_of(entry["config"])
    one, other = replay("grpo", clean, options=options), replay("grpo", dirty, options=options)
    assert one.loss == other.loss
    np.testing.assert_array_equal(one.grad_log_probs, other.grad_log_probs)
    assert dict(one.metrics) == dict(other.metrics)


@pytest.mark.parametrize("batch_id", ["hand", "r1", "r2", "r3", "r4"])
def test_permuting_rows_permutes_results(batch_id):
    batch = golden()["batches"][batch_id]
    order = np.random.default_rng(0).permutation(len(batch["rewards"]))
    names = [name for name, value in batch.items() if isinstance(value, list)]
    shuffled = {name: [batch[name][i] for i in order] for name in names}
    one, other = replay("grpo", batch), replay("grpo", shuffled)
    np.testing.assert_allclose(other.loss, one.loss, rtol=1e-12)
    np.testing.assert_allclose(other.advantages, one.advantages[order], rtol=1e-12)
    np.testing.assert_allclose(other.grad_log_probs, one.grad_log_probs[order], rtol=1e-12)


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


def test_equal_rewards_in_float32_get_exactly_zero():
    rewards = np.full(7, 0.7, np.float32)
    advantages = group_advantages(rewards, np.zeros(7, int), np.ones(7, bool), eps=1e-9)
    assert (advantages == 0).all()


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
