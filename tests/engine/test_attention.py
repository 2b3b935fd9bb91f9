"""Attention over packed rows: the CPU's and CUDA's functions against each other, and against a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.varlen

from mmrl.engine.attention import PackedLayout, packed_sdpa, packed_varlen

LENGTHS = [3, 1, 7, 3, 5]
HEADS = [(4, 2), (4, 4), (6, 1)]


@pytest.fixture(params=HEADS, ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
def qkv(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    """Query, key and value, (1, heads, T, D) each, as transformers passes them."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = request.param
    shapes = [(1, heads, sum(LENGTHS), 8) for heads in (queries, keys, keys)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Replaces torch's kernel, which needs CUDA, by its definition; returns the calls' other arguments."""
    calls: list[dict[str, object]] = []

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key)
        assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
        assert options.pop("window_size") == (-1, 0)  # causal, aligned at the bottom right
        scale, grouped = options.pop("scale"), options.pop("enable_gqa")
        assert not options
        calls.append({"scale": scale, "enable_gqa": grouped})
        repeats = query.shape[1] // key.shape[1]
        assert grouped == (repeats > 1)
        outputs = []
        for start_q, end_q, start_k, end_k in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:], strict=False):
            q, k, v = query[start_q:end_q], key[start_k:end_k], value[start_k:end_k]
            k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
            allowed = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
            outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v))
        return torch.cat(outputs)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    return calls


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """(1, T, H, D) by one call with a block-diagonal causal mask."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (sequence[:, None] == sequence) & torch.ones(sum(LENGTHS), sum(LENGTHS)).tril().bool()
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, mask, scale=scaling, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("function", [packed_sdpa, packed_varlen])
def test_values_and_gradients_are_those_of_a_block_diagonal_mask(function, scaling, qkv, varlen_on_cpu):
    layout = PackedLayout.of(LENGTHS, "cpu")
    output, weights = function(torch.nn.Identity(), *qkv, None, layout=layout, scaling=scaling)
    assert weights is None
    expected = masked(*qkv, scaling)
    torch.testing.assert_close(output, expected)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    gradients = torch.autograd.grad((output * direction).sum(), qkv)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * direction).sum(), qkv))
    assert len(varlen_on_cpu) == (function is packed_varlen)


def test_the_reference_has_the_arguments_of_torchs_function():
    import inspect

    names = set(inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters)
    assert {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"} <= names
    assert {"scale", "window_size", "enable_gqa"} <= names


def test_a_layout_knows_bounds_and_sequences_of_one_length():
    layout = PackedLayout.of(LENGTHS, "cpu")
    assert layout.bounds.tolist() == [0, 3, 4, 11, 14, 19] and layout.bounds.dtype == torch.int32
    assert layout.max_length == 7
    assert [index.tolist() for index in layout.same_length] == [
        [[3]], [[0, 1, 2], [11, 12, 13]], [[14, 15, 16, 17, 18]], [[4, 5, 6, 7, 8, 9, 10]],
    ]  # fmt: skip
