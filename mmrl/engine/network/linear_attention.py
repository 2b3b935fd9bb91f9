"""Gated delta-rule layers over packed rows (Yang et al., 2024, arXiv:2412.06464, section 3), as in Qwen3.5.

Such a layer hands a state from token to token. In a packed row the state of a prompt starts at zero, and each of its
completions starts with the prompt's last state and the inputs of its last convolution. transformers' own layer takes a
packed row for one sequence, and its state leaks from sample to sample.

Letters: ``S`` tokens of the row, ``C`` channels of the convolution, ``K`` taps, ``V`` heads of values, ``D`` head size;
and those of ``layout``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from mmrl.engine.network.layout import PackedLayout, StateBlock, Taps, rows_at

SHORT = 128
"""Blocks of up to so many tokens are computed in chunks of 16: sums of decays over 64 tokens lose three digits of a
float32, which the gradient of ``A_log`` shows. With more chunks than that, plain torch's backward pass is slow."""


class PackedDeltaNet(torch.nn.Module):
    """A gated delta-rule layer with the parameters of transformers' layer, under the same names.

    Args:
        layer: transformers' ``GatedDeltaNet`` of a Qwen3.5 model.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_proj_qkv, self.in_proj_z = layer.in_proj_qkv, layer.in_proj_z
        self.in_proj_b, self.in_proj_a = layer.in_proj_b, layer.in_proj_a
        self.conv1d = PackedConvolution(layer.conv1d)
        self.A_log, self.dt_bias = layer.A_log, layer.dt_bias
        self.norm, self.out_proj = layer.norm, layer.out_proj
        self._key_heads, self._value_heads = layer.num_k_heads, layer.num_v_heads
        self._key_size, self._value_size = layer.head_k_dim, layer.head_v_dim

    def forward(self, hidden_states: torch.Tensor, *, layout: PackedLayout, **_: Any) -> torch.Tensor:
        """(1, S, width): the layer's output for a row."""
        keys, values = self._key_heads * self._key_size, self._value_heads * self._value_size
        hidden_SW = hidden_states[0]
        mixed_SC = self.conv1d(self.in_proj_qkv(hidden_SW), layout.taps(self.conv1d.taps))
        q_SC, k_SC, v_SC = mixed_SC.split([keys, keys, values], -1)
        repeats = self._value_heads // self._key_heads
        q_SVD, k_SVD = (x.unflatten(-1, (-1, self._key_size)).repeat_interleave(repeats, 1) for x in (q_SC, k_SC))
        decay_SV = -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden_SW).float() + self.dt_bias)
        out_SVD = packed_delta_rule(
            q_SVD,
            k_SVD,
            v_SC.unflatten(-1, (-1, self._value_size)),
            decay_SV,
            self.in_proj_b(hidden_SW).sigmoid(),
            layout,
        )
        gate_SVD = self.in_proj_z(hidden_SW).unflatten(-1, (-1, self._value_size))
        normed = self.norm(out_SVD.flatten(0, 1), gate_SVD.flatten(0, 1)).view(hidden_SW.shape[0], -1)
        return cast(torch.Tensor, self.out_proj(normed)[None])


class PackedConvolution(torch.nn.Module):
    """A causal convolution of each channel, and SiLU; a module of its own, so that ZeRO 3 gathers its weight.

    Attributes:
        taps: Inputs that a token's output depends on, its own included.
    """

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.weight = convolution.weight
        self.taps = int(convolution.kernel_size[0])

    def forward(self, inputs_SC: torch.Tensor, taps: Taps) -> torch.Tensor:
        """(S, C): summed in float32."""
        total_SC: torch.Tensor | float = 0.0
        for weight_C, place_S, there_S1 in zip(self.weight[:, 0].float().unbind(1), *taps, strict=True):
            total_SC = total_SC + rows_at(inputs_SC, place_S).float() * weight_C * there_S1
        assert isinstance(total_SC, torch.Tensor)
        return F.silu(total_SC).to(inputs_SC.dtype)


def packed_delta_rule(
    q_SVD: torch.Tensor,
    k_SVD: torch.Tensor,
    v_SVD: torch.Tensor,
    decay_SV: torch.Tensor,
    beta_SV: torch.Tensor,
    layout: PackedLayout,
) -> torch.Tensor:
    """(S, V, D): what each token reads from its state, ``S_t = exp(decay_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t
    k_t^T``, with normalised queries and keys.

    Blocks of spans of about one size are padded with tokens that leave the state as it is.
    """
    states = list[torch.Tensor]()
    outputs = list[torch.Tensor]()
    for block in layout.states.blocks:
        begin = None if block.parents is None else rows_at(torch.cat(states), block.parents)
        out_NLVD, end = _block(q_SVD, k_SVD, v_SVD, decay_SV, beta_SV, block, begin)
        outputs.append(out_NLVD.flatten(0, 1))
        if block.parents is None:
            states.append(end)
    return rows_at(torch.cat(outputs), layout.states.place_S)


def _block(
    q_SVD: torch.Tensor,
    k_SVD: torch.Tensor,
    v_SVD: torch.Tensor,
    decay_SV: torch.Tensor,
    beta_SV: torch.Tensor,
    block: StateBlock,
    begin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, L, V, D) outputs and the last states of a block."""
    # The kernel of flash-linear-attention if it is installed, and a GPU's then; else plain torch.
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    def of_block(x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, rows_at(x, block.places).unflatten(0, block.shape))

    is_padding = block.is_padding_NL[..., None]
    options = {} if q_SVD.is_cuda else {"chunk_size": 16 if block.shape[1] <= SHORT else 64}
    out, end = torch_chunk_gated_delta_rule(
        of_block(q_SVD),
        of_block(k_SVD),
        of_block(v_SVD),
        g=of_block(decay_SV).masked_fill(is_padding, 0.0),
        beta=of_block(beta_SV).masked_fill(is_padding, 0.0),
        initial_state=begin,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **options,
    )
    return cast(tuple[torch.Tensor, torch.Tensor], (out, end))


def pack_states(model: Any) -> None:
    """Replace the model's gated delta-rule layers by packed ones; parameters keep their names."""
    for layer in list(model.modules()):
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = PackedDeltaNet(layer.linear_attn)
