"""Mixtures of experts: their routers in float32, and their experts as products of groups of tokens.

Letters: ``S`` tokens of the row, ``E`` experts of a layer, ``K`` of them that a token goes to, ``L`` layers with
experts, ``N`` samples of the row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mmrl.engine.layout import rows_at

KERNEL = "mmrl_grouped"
"""The name of ``grouped`` in transformers."""


class Router(torch.nn.Module):
    """A layer's router in float32, with the parameter of the one that it stands for.

    transformers rounds logits and weights to the model's type; in bfloat16 that alone lets tokens go to other experts.

    Args:
        router: transformers' router.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight = router.weight
        self._top_k = int(router.top_k)
        self._normalised = bool(getattr(router, "norm_topk_prob", True))

    def forward(self, hidden_SH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(S, E) logits; (S, K) weights, and the experts that they are for."""
        logits_SE = F.linear(hidden_SH.float(), self.weight.float())
        probabilities_SE = logits_SE.softmax(-1)
        chosen_SK = probabilities_SE.topk(self._top_k).indices
        weights_SK = probabilities_SE.gather(-1, chosen_SK)
        if self._normalised:
            weights_SK = weights_SK / weights_SK.sum(-1, keepdim=True)
        return logits_SE, weights_SK, chosen_SK


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
    for block in blocks:
        block.gate = Router(block.gate)
    return tuple(block.gate for block in blocks)
