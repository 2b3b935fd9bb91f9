"""Mixtures of experts: their routers in float32, and their experts as products of groups of tokens.

Letters: ``S`` tokens of the row, ``E`` experts of a layer, ``K`` of them that a token goes to, ``L`` layers with
experts, ``N`` samples of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mmrl.config.sections import Config
from mmrl.engine.device import DeviceKind, expert_columns, returns_experts
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.layout import rows_at
from mmrl.engine.network.packed_inputs import OWN, PackedInputs
from mmrl.engine.network.shape import model_shape
from mmrl.errors import ConfigError
from mmrl.ops.objective import PartialLoss
from mmrl.types import BoolArray

KERNEL = "mmrl_grouped"
"""The name of ``grouped`` in transformers."""


class Router(torch.nn.Module):
    """A layer's router in float32, with the parameter of the one that it stands for.

    transformers rounds logits and weights to the model's type; in bfloat16 that alone lets tokens go to other experts.

    Args:
        router: transformers' router.

    Attributes:
        routing: The wishes of the next row.
        layer: The router's place among the model's routers.
        imbalance_N: Each sample's, if the row has asked; see ``imbalances``.
        differs_S: True for tokens with other experts than recorded, if experts were.
    """

    def __init__(self, router: Any, layer: int) -> None:
        super().__init__()
        self.routing, self.layer = OWN, layer
        self.imbalance_N: torch.Tensor | None = None
        self.differs_S: torch.Tensor | None = None
        self.weight = router.weight
        self._top_k = int(router.top_k)
        self._normalised = bool(getattr(router, "norm_topk_prob", True))

    def forward(self, hidden_SH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(S, E) logits; (S, K) weights, and the experts that they are for."""
        logits_SE = F.linear(hidden_SH.float(), self.weight.float())
        probabilities_SE = logits_SE.softmax(-1)
        chosen_SK = self._chosen(probabilities_SE.topk(self._top_k).indices)
        if self.routing.members_NS is not None and torch.is_grad_enabled():
            self.imbalance_N = _imbalance(probabilities_SE, chosen_SK, self.routing.members_NS)
        weights_SK = probabilities_SE.gather(-1, chosen_SK)
        if self._normalised:
            weights_SK = weights_SK / weights_SK.sum(-1, keepdim=True)
        return logits_SE, weights_SK, chosen_SK

    def _chosen(self, own_SK: torch.Tensor) -> torch.Tensor:
        """The experts to use."""
        if self.routing.recorded_SLK is None:
            return own_SK
        recorded_SK = self.routing.recorded_SLK[:, self.layer]
        known_SK = recorded_SK >= 0
        self.differs_S = ((own_SK.sort(-1).values != recorded_SK.sort(-1).values) & known_SK).any(-1)
        return torch.where(known_SK, recorded_SK, own_SK) if self.routing.replays else own_SK


def _imbalance(probabilities_SE: torch.Tensor, chosen_SK: torch.Tensor, members_NS: torch.Tensor) -> torch.Tensor:
    """(N,) ``E sum_e f_e p_e``, for the number f of a token's experts that are expert e, and the probability p of e,
    both means over a sample's tokens.

    It is least, K, where each expert gets as many tokens as the others.
    """
    counts_SE = F.one_hot(chosen_SK, probabilities_SE.shape[1]).sum(1).to(probabilities_SE.dtype)
    lengths_N = members_NS.sum(1)
    products_NE = (members_NS @ counts_SE) * (members_NS @ probabilities_SE)
    return probabilities_SE.shape[1] * products_NE.sum(1) / lengths_N.square()


def imbalances(routers: Sequence[Router]) -> torch.Tensor:
    """(N,) means over the layers of what ``_imbalance`` says of the last row's samples, with gradient.

    For a sample and a layer it is the load-balancing loss of transformers. It is taken for each sample and not for all
    tokens at once: so neither packing nor the number of micro-batches or ranks changes a step's mean.
    """
    return torch.stack([router.imbalance_N for router in routers if router.imbalance_N is not None]).mean(0)


def rerouted(routers: Sequence[Router], predicting_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) True where a layer sent the token that predicts a completion token to other experts than recorded, and the
    share of layers that have; both False and 0 where nothing is recorded."""
    differs_LT = torch.stack([router.differs_S for router in routers if router.differs_S is not None])[:, predicting_T]
    return differs_LT.any(0), differs_LT.float().mean(0)


def with_routing(
    partial: PartialLoss,
    routers: Sequence[Router],
    inputs: PackedInputs,
    masks: Sequence[BoolArray],
    balance: float,
    total: str = "loss/total",
) -> PartialLoss:
    """A micro-batch's loss with its part of the routers' loss, and the share of its tokens with other experts.

    Args:
        masks: The tokens in the loss, of each sample.
        balance: The factor of a sample's ``imbalances`` in the loss; 0 for none.
        total: The name of the whole loss among the sums.
    """
    loss, sums = partial.loss, dict(partial.sums)
    if balance:
        imbalance = balance * imbalances(routers)[: len(masks)].sum()
        loss = loss + imbalance.to(loss)
        own = float(imbalance.detach())
        sums[f"{total.removesuffix('/total')}/router_aux"] = own
        sums[total] += own
    if inputs.routing.recorded_SLK is not None:
        mask_T = torch.from_numpy(np.concatenate(masks)).to(inputs.predicting_T.device)
        tokens_T, layers_T = rerouted(routers, inputs.predicting_T[: len(mask_T)])
        sums["mismatch/rerouted_tokens"] = float((tokens_T & mask_T).sum())
        sums["mismatch/rerouted_choices"] = float((layers_T * mask_T).sum())
    return replace(partial, loss=loss, sums=sums)


def grouped(experts: Any, hidden_SH: torch.Tensor, chosen_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
    """(S, H): the experts' outputs, weighed and summed; a product for each of their matrices, in groups of tokens.

    transformers' function with the same products adds gradients of a token's several experts in any order.
    """
    top_k = chosen_SK.shape[1]
    sorted_N, order_N = chosen_SK.flatten().sort(stable=True)
    places_N = torch.empty_like(order_N)
    places_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    numbers_E = torch.arange(len(experts.gate_up_proj), device=sorted_N.device)
    ends_E = torch.searchsorted(sorted_N, numbers_E, right=True, out_int32=True)
    tokens_NH = rows_at(hidden_SH, order_N // top_k)
    gate_NI, up_NI = F.grouped_mm(tokens_NH, experts.gate_up_proj.transpose(1, 2), offs=ends_E).chunk(2, -1)
    outputs_NH = F.grouped_mm(experts.act_fn(gate_NI) * up_NI, experts.down_proj.transpose(1, 2), offs=ends_E)
    outputs_SKH = rows_at(outputs_NH, places_N).unflatten(0, chosen_SK.shape)
    summed_SH: torch.Tensor = (outputs_SKH * weights_SK[..., None]).sum(1)
    return summed_SH.to(hidden_SH.dtype)


def register() -> None:
    """Make ``grouped`` known to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(KERNEL, grouped)


def routed(model: Any) -> tuple[Router, ...]:
    """Put routers of float32 into a transformers model, and let ``grouped`` compute its experts.

    Returns:
        The routers in the order of their layers; none for a dense model.
    """
    blocks = [module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts")]
    if blocks:
        register()
        model.set_experts_implementation(KERNEL)
    for layer, block in enumerate(blocks):
        block.gate = Router(block.gate, layer)
    return tuple(block.gate for block in blocks)


def experts_refusal(
    folder: ModelFolder, config: Config, kind: DeviceKind, *, learns: bool = True
) -> ConfigError | None:
    """An error if vLLM's kernels cannot take a mixture's experts, or do not tell which ones they choose.

    Args:
        kind: The kind of device that vLLM runs on.
        learns: True if the run trains; an evaluation has no use for the experts.
    """
    sampler, mixture = config.sampler, model_shape(folder.config).mixture
    if mixture is None or sampler.name != "vllm":
        return None
    width, columns = mixture.width // sampler.tensor_parallel_size, expert_columns(kind)
    if width % columns:
        return ConfigError(
            f"vLLM's kernels for a CPU need a multiple of {columns} columns of each expert: a rank has {width}",
            where=f"model.path: {folder.name}; sampler.tensor_parallel_size: {sampler.tensor_parallel_size}",
            remedy="set sampler.name: hf, or share the experts among fewer ranks",
        )
    if learns and config.learner.routing != "own" and not returns_experts(kind, sampler.pipeline_parallel_size):
        why = (
            "on a CPU"
            if kind == "cpu"
            else "with a pipeline"
            if sampler.pipeline_parallel_size > 1
            else "of this version"
        )
        return ConfigError(
            f"vLLM {why} does not tell the experts that it chooses",
            where=f"learner.routing: {config.learner.routing}",
            possible="own; or any with sampler.name: hf, or on a GPU without a pipeline",
            remedy="set sampler.name: hf, or remove learner.routing",
        )
    return None
