"""Gated delta-rule layers over packed rows (Yang et al., 2024, arXiv:2412.06464, section 3), as in Qwen3.5.

Such a layer hands a state from token to token. In a packed row the state of a prompt starts at zero, and each of its
completions starts with the prompt's last state and the inputs of its last convolution. transformers' own layer takes a
packed row for one sequence, and its state leaks from sample to sample.

Where several ranks hold a row together, each of them computes some heads of all tokens: their channels of the
convolution, and their states.

Letters: ``S`` tokens of the row, ``O`` those that this rank holds, ``C`` channels of the convolution, ``K`` taps, ``V``
heads of values, ``D`` head size, ``R`` ranks that hold the row; and those of ``layout``. A small ``c``, ``k`` or ``v``
is this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from mmrl.engine.network.layout import PackedLayout, StateBlock, Taps, rows_at
from mmrl.engine.network.sequence import SequenceGroup
from mmrl.ops.sequence import repeats_of

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
        """(1, O, width): the layer's output for a row."""
        group, hidden_OW = layout.group, hidden_states[0]
        projected = self.in_proj_qkv(hidden_OW), self.in_proj_b(hidden_OW), self.in_proj_a(hidden_OW)
        mixed_Sc, b_Sv, a_Sv = projected if group.size == 1 else self._of_own_heads(projected, layout)
        mixed_Sc = self.conv1d(mixed_Sc, layout.taps(self.conv1d.taps), partial(self._own_channels, group))
        heads = group.part(self._value_heads)
        num_heads, values = heads.stop - heads.start, self._value_heads * self._value_size // group.size
        q_Sc, k_Sc, v_Sc = mixed_Sc.split([*[(mixed_Sc.shape[-1] - values) // 2] * 2, values], -1)
        q_SkD, k_SkD = (x.unflatten(-1, (-1, self._key_size)) for x in (q_Sc, k_Sc))
        q_SvD, k_SvD = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (q_SkD, k_SkD))
        decay_Sv = -self.A_log[heads].float().exp() * F.softplus(a_Sv.float() + self.dt_bias[heads])
        v_SvD = v_Sc.unflatten(-1, (-1, self._value_size))
        out_SvD = packed_delta_rule(q_SvD, k_SvD, v_SvD, decay_Sv, b_Sv.sigmoid(), layout)
        out_OVD = out_SvD if group.size == 1 else self._of_own_tokens(out_SvD, layout)
        gate_OVD = self.in_proj_z(hidden_OW).unflatten(-1, (-1, self._value_size))
        normed = self.norm(out_OVD.flatten(0, 1), gate_OVD.flatten(0, 1)).view(hidden_OW.shape[0], -1)
        return cast(torch.Tensor, self.out_proj(normed)[None])

    def _by_rank(self, channels_XC: torch.Tensor, group: SequenceGroup) -> list[torch.Tensor]:
        """(X, R, c) channels of queries, keys and values of each rank's heads; heads of keys are repeated if they are
        fewer than the ranks."""
        keys, values = self._key_heads * self._key_size, self._value_heads * self._value_size
        q_XC, k_XC, v_XC = channels_XC.split([keys, keys, values], -1)
        repeats = repeats_of(self._key_heads, group.size)
        if repeats > 1:
            heads = (x.unflatten(-1, (-1, self._key_size)) for x in (q_XC, k_XC))
            q_XC, k_XC = (x.repeat_interleave(repeats, 1).flatten(1) for x in heads)
        return [x.unflatten(-1, (group.size, -1)) for x in (q_XC, k_XC, v_XC)]

    def _own_channels(self, group: SequenceGroup, channels_XC: torch.Tensor) -> torch.Tensor:
        """(X, c): those of this rank's heads."""
        return torch.cat([x[:, group.rank] for x in self._by_rank(channels_XC, group)], -1)

    def _of_own_heads(self, projected: Sequence[torch.Tensor], layout: PackedLayout) -> Sequence[torch.Tensor]:
        """(S, c), (S, v), (S, v) of all tokens, from what is projected of this rank's."""
        group, (mixed_OC, *others) = layout.group, projected
        mixed_ORc = torch.cat(self._by_rank(mixed_OC, group), -1)
        by_rank = [mixed_ORc, *(x.unflatten(-1, (group.size, -1)) for x in others)]
        part_SF = group.to_parts(torch.cat(by_rank, -1).transpose(0, 1), layout.tokens)
        return cast(Sequence[torch.Tensor], part_SF.split([x.shape[-1] for x in by_rank], -1))

    def _of_own_tokens(self, out_SvD: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """(O, V, D): all heads of this rank's tokens."""
        own_ROF = layout.group.to_tokens(out_SvD.flatten(1))
        return own_ROF.transpose(0, 1).reshape(own_ROF.shape[1], self._value_heads, self._value_size)


class PackedConvolution(torch.nn.Module):
    """A causal convolution of each channel, and SiLU; a module of its own, so that ZeRO 3 gathers its weight.

    Attributes:
        taps: Inputs that a token's output depends on, its own included.
    """

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.weight = convolution.weight
        self.taps = int(convolution.kernel_size[0])

    def forward(
        self, inputs_Sc: torch.Tensor, taps: Taps, chosen: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """(S, c): summed in float32.

        Args:
            chosen: Takes the channels of the inputs out of (K, C) all channels.
        """
        total_Sc: torch.Tensor | float = 0.0
        for weight_c, place_S, there_S1 in zip(chosen(self.weight[:, 0].float().T), *taps, strict=True):
            total_Sc = total_Sc + rows_at(inputs_Sc, place_S).float() * weight_c * there_S1
        assert isinstance(total_Sc, torch.Tensor)
        return F.silu(total_Sc).to(inputs_Sc.dtype)


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
