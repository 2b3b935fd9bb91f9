"""Mixtures of experts: their routers in float32, and their experts as products of groups of tokens.

Letters: ``O`` tokens of the row that this rank holds, all unless several ranks hold it together, ``E`` experts of a
layer, ``K`` of them that a token goes to, ``L`` layers with experts, ``N`` samples of the row.
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
from mmrl.engine.network.packed_inputs import OWN, PackedInputs, Reads
from mmrl.engine.network.sequence import ALONE, SequenceGroup
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
        sums_2NE: Sums over the tokens of each sample of the numbers of their experts, and of the probabilities of
            experts, if the row has asked; see ``imbalances``.
        differs_O: True for tokens with other experts than recorded, if experts were.
    """

    def __init__(self, router: Any, layer: int) -> None:
        super().__init__()
        self.routing, self.layer = OWN, layer
        self.sums_2NE: torch.Tensor | None = None
        self.differs_O: torch.Tensor | None = None
        self.weight = router.weight
        self.top_k = int(router.top_k)
        self._normalised = bool(getattr(router, "norm_topk_prob", True))

    def forward(self, hidden_OH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(O, E) logits; (O, K) weights, and the experts that they are for."""
        logits_OE = F.linear(hidden_OH.float(), self.weight.float())
        probabilities_OE = logits_OE.softmax(-1)
        chosen_OK = self._chosen(probabilities_OE.topk(self.top_k).indices)
        if (members_NO := self.routing.members_NO) is not None and torch.is_grad_enabled():
            counts_OE = F.one_hot(chosen_OK, probabilities_OE.shape[1]).sum(1).to(probabilities_OE.dtype)
            self.sums_2NE = torch.stack([members_NO @ counts_OE, members_NO @ probabilities_OE])
        weights_OK = probabilities_OE.gather(-1, chosen_OK)
        if self._normalised:
            weights_OK = weights_OK / weights_OK.sum(-1, keepdim=True)
        return logits_OE, weights_OK, chosen_OK

    def _chosen(self, own_OK: torch.Tensor) -> torch.Tensor:
        """The experts to use."""
        if self.routing.recorded_OLK is None:
            return own_OK
        recorded_OK = self.routing.recorded_OLK[:, self.layer]
        known_OK = recorded_OK >= 0
        self.differs_O = ((own_OK.sort(-1).values != recorded_OK.sort(-1).values) & known_OK).any(-1)
        return torch.where(known_OK, recorded_OK, own_OK) if self.routing.replays else own_OK


def imbalances(routers: Sequence[Router], group: SequenceGroup = ALONE) -> torch.Tensor:
    """(N,) means over the layers of ``E sum_e f_e p_e`` of the last row's samples, with gradient: for the number f of a
    token's experts that are expert e, and the probability p of e, both means over a sample's tokens.

    It is least, K, where each expert gets as many tokens as the others. For a sample and a layer it is the
    load-balancing loss of transformers. It is taken for each sample and not for all tokens at once: so neither packing
    nor the number of micro-batches or ranks changes a step's mean.

    Args:
        group: The ranks that hold the row together; each has the sums over its own tokens.
    """
    sums_2LNE = group.summed(torch.stack([each.sums_2NE for each in routers if each.sums_2NE is not None], 1))
    counts_LNE, probabilities_LNE = sums_2LNE
    # Each of a sample's tokens has K experts, and probabilities that add up to one.
    lengths_LN = counts_LNE.sum(-1) / routers[0].top_k
    found_LN: torch.Tensor = counts_LNE.shape[-1] * (counts_LNE * probabilities_LNE).sum(-1) / lengths_LN.square()
    return found_LN.mean(0)


def rerouted(routers: Sequence[Router], predicting: Reads) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) True where a layer sent the token that predicts a completion token to other experts than recorded, and the
    share of layers that have; both False and 0 where nothing is recorded."""
    differs_LO = torch.stack([router.differs_O for router in routers if router.differs_O is not None])
    share_T = predicting.whole(differs_LO[:, predicting.positions].float().mean(0))
    return share_T > 0, share_T


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
        imbalance = balance * imbalances(routers, inputs.predicting.group)[: len(masks)].sum()
        loss = loss + imbalance.to(loss)
        own = float(imbalance.detach())
        sums[f"{total.removesuffix('/total')}/router_aux"] = own
        sums[total] += own
    if inputs.routing.recorded_OLK is not None:
        mask_T = torch.from_numpy(np.concatenate(masks)).to(inputs.targets_T.device)
        tokens_T, layers_T = (found[: len(mask_T)] for found in rerouted(routers, inputs.predicting))
        sums["mismatch/rerouted_tokens"] = float((tokens_T & mask_T).sum())
        sums["mismatch/rerouted_choices"] = float((layers_T * mask_T).sum())
    return replace(partial, loss=loss, sums=sums)


def grouped(experts: Any, hidden_OH: torch.Tensor, chosen_OK: torch.Tensor, weights_OK: torch.Tensor) -> torch.Tensor:
    """(O, H): the experts' outputs, weighed and summed; a product for each of their matrices, in groups of tokens.

    transformers' function with the same products adds gradients of a token's several experts in any order.
    """
    top_k = chosen_OK.shape[1]
    sorted_N, order_N = chosen_OK.flatten().sort(stable=True)
    places_N = torch.empty_like(order_N)
    places_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    numbers_E = torch.arange(len(experts.gate_up_proj), device=sorted_N.device)
    ends_E = torch.searchsorted(sorted_N, numbers_E, right=True, out_int32=True)
    tokens_NH = rows_at(hidden_OH, order_N // top_k)
    gate_NI, up_NI = F.grouped_mm(tokens_NH, experts.gate_up_proj.transpose(1, 2), offs=ends_E).chunk(2, -1)
    outputs_NH = F.grouped_mm(experts.act_fn(gate_NI) * up_NI, experts.down_proj.transpose(1, 2), offs=ends_E)
    outputs_OKH = rows_at(outputs_NH, places_N).unflatten(0, chosen_OK.shape)
    summed_OH: torch.Tensor = (outputs_OKH * weights_OK[..., None]).sum(1)
    return summed_OH.to(hidden_OH.dtype)


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
