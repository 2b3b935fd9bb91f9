"""Attention over packed rows: the CPU's and CUDA's functions against each other, and against a mask."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from mmrl.engine import device
from mmrl.engine.device import DeviceKind
from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.attention import packed_sdpa, packed_varlen
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.layout import PackedLayout
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.shape import model_shape
from mmrl.engine.network.vision import ImageInputs
from mmrl.ops.packing import Span, Unit, offsets
from tests.proofs import families

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest

LENGTHS = [3, 1, 7, 3, 5]
ALONE = [Span(start, length) for start, length in zip(offsets(LENGTHS), LENGTHS, strict=False)]
PROMPTED = [
    Span(0, 4), Span(4, 2, 0, 4), Span(6, 0, 0, 4), Span(6, 3, 0, 4),
    Span(9, 1), Span(10, 1, 9, 1), Span(11, 5, 9, 1),
    Span(16, 3),
]  # fmt: skip
"""Two prompts with completions, one of them empty, and a sequence of its own."""
LAYOUTS = {"alone": ALONE, "prompted": PROMPTED}
HEADS = [(4, 2), (4, 4), (6, 1)]
VISION = [name for name, family in FAMILIES.items() if family.images is not None and family.images.packed_tower]
"""Families whose towers take all images as one sequence; the others need no attention of ours."""
TOWER_LAYERS = 2


@pytest.fixture(params=HEADS, ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
def qkv(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    """Query, key and value, (1, heads, T, D) each, as transformers passes them."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = request.param
    shapes = [(1, heads, sum(LENGTHS), 8) for heads in (queries, keys, keys)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The result of torch's function, by its definition and in float32 at least; asserts what its kernel requires."""
    assert query.dtype == key.dtype == value.dtype and query.shape[-1] % 8 == 0
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert cu_seq_k is not None and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key)
    assert type(max_q) is type(max_k) is int
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    assert window_size[1] == 0 or window_size == (-1, -1), "causal, or everything"
    assert return_aux is seqused_k is block_table is num_splits is None, "not written here"
    repeats = query.shape[1] // key.shape[1]
    assert enable_gqa == (repeats > 1)
    dtype = torch.promote_types(query.dtype, torch.float32)
    outputs = []
    for start_q, end_q, start_k, end_k in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:], strict=False):
        q, k, v = (x.to(dtype) for x in (query[start_q:end_q], key[start_k:end_k], value[start_k:end_k]))
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        allowed = torch.ones(len(q), len(k)).bool()
        if window_size[1] == 0:
            allowed = allowed.tril(len(k) - len(q))  # aligned at the bottom right
        if window_size[0] >= 0:
            allowed = allowed.triu(len(k) - len(q) - window_size[0])
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v))
    return torch.cat(outputs).to(query.dtype)


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Replaces torch's function, which needs CUDA; returns the types that it was called with."""
    calls: list[torch.dtype] = []

    def recorded(query: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(query.dtype)
        return varlen_attn(query, *args, **options)

    # As a function with torch's own signature: what is asked for depends on it.
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", functools.wraps(varlen_attn)(recorded))
    return calls


def varlen_attn_of_torch_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The oldest allowed version's, which knows one number of heads."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    return varlen_attn(query, key, value, *lengths, return_aux=return_aux, scale=scale, window_size=window_size)


def masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: list[Span],
    scaling: float | None,
    window: int | None = None,
    images: np.ndarray | None = None,
) -> torch.Tensor:
    """(1, T, H, D) by one call with a mask of the whole row, written token by token."""
    mask = torch.zeros(query.shape[2], query.shape[2], dtype=torch.bool)
    for span in spans:
        prefix = range(span.prefix_start, span.prefix_start + span.prefix_length)
        sequence = np.array([*prefix, *range(span.start, span.start + span.length)])
        for q in range(span.prefix_length, len(sequence)):
            seen = np.arange(len(sequence)) <= q
            if images is not None and images[sequence[q]] >= 0:
                seen |= images[sequence] == images[sequence[q]]
            if window is not None:
                seen[: max(q - window + 1, 0)] = False
            mask[sequence[q], torch.from_numpy(sequence)] = torch.from_numpy(seen)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, mask, scale=scaling, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("spans", LAYOUTS)
@pytest.mark.parametrize("function", [packed_sdpa, packed_varlen])
def test_values_and_gradients_are_those_of_a_mask(function, spans, scaling, qkv, varlen_on_cpu):
    spans = LAYOUTS[spans]
    layout = PackedLayout(spans, "cpu", torch.float64)
    output, weights = function(torch.nn.Identity(), *qkv, None, layout=layout, scaling=scaling)
    assert weights is None
    expected = masked(*qkv, spans, scaling)
    torch.testing.assert_close(output, expected)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    gradients = torch.autograd.grad((output * direction).sum(), qkv)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * direction).sum(), qkv))
    assert len(varlen_on_cpu) == (function is packed_varlen)


@pytest.mark.parametrize("spans", LAYOUTS)
def test_torch_2_11_gets_as_many_heads_of_keys_and_values_as_of_queries(spans, qkv, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn_of_torch_2_11)
    layout = PackedLayout(LAYOUTS[spans], "cpu", torch.float64)
    output, _ = packed_varlen(torch.nn.Identity(), *qkv, None, layout=layout)
    expected = masked(*qkv, LAYOUTS[spans], None)
    torch.testing.assert_close(output, expected)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    gradients = torch.autograd.grad((output * direction).sum(), qkv)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * direction).sum(), qkv))


@pytest.mark.parametrize("spans", LAYOUTS)
def test_float32_on_a_gpu_gets_as_many_heads_of_keys_and_values_as_of_queries(spans, qkv, monkeypatch):
    """torch's kernel that keeps no scores refuses other numbers (``sdp_utils_cpp.h``: ``supports_gqa``)."""
    expected = masked(*qkv, LAYOUTS[spans], None)
    attend, heads = torch.nn.functional.scaled_dot_product_attention, set()

    def attend_and_note(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        heads.add((q.shape[1], k.shape[1], v.shape[1], options["enable_gqa"]))
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_and_note)
    on_gpu = functools.partial(device.repeats_heads, "cuda:0", torch.float32)
    monkeypatch.setattr("mmrl.engine.network.attention.repeats_heads", lambda *_, **__: on_gpu())
    layout = PackedLayout(LAYOUTS[spans], "cpu", torch.float64)
    output, _ = packed_sdpa(torch.nn.Identity(), *qkv, None, layout=layout)
    assert heads == {(qkv[0].shape[1], qkv[0].shape[1], qkv[0].shape[1], False)}
    torch.testing.assert_close(output, expected)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    gradients = torch.autograd.grad((output * direction).sum(), qkv)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * direction).sum(), qkv))


def test_the_reference_has_the_signature_of_torchs_function():
    from torch.nn.attention import varlen

    def plain(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert plain(varlen_attn) == plain(varlen.varlen_attn)


def run(setting: Any, kind: DeviceKind, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and gradients of a policy that is loaded for a device and runs here."""
    policy = load_policy(setting.folder, kind, "bfloat16", freeze=(), temperature=0.8).to(dtype)
    images = ImageInputs(setting.folder, setting.media)
    collate = Collator(setting.folder, policy.model.base_model, images, "cpu", dtype)
    logprobs_T, _ = policy(collate(setting.samples(LENGTHS)))
    direction_T = torch.randn(logprobs_T.shape, generator=torch.Generator().manual_seed(2))
    (logprobs_T * direction_T).sum().backward()
    return logprobs_T.detach(), {
        name: p.grad.float() for name, p in policy.model.named_parameters() if p.grad is not None
    }


def gradient_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of a parameter's gradient, relative to the largest gradient."""
    assert one.keys() == other.keys()
    largest = max(float(value.norm()) for value in other.values())
    return max(float((one[name] - other[name]).norm()) for name in other) / largest


@pytest.mark.parametrize("family", families())
def test_a_whole_model_loaded_for_cuda_computes_what_the_cpus_does(family, bench, varlen_on_cpu):
    one, gradients = run(bench(family), "cuda", torch.float32)
    layers = len(varlen_on_cpu)
    other, expected = run(bench(family), "cpu", torch.float32)
    attending = model_shape(bench(family).folder.config).attending_layers
    assert layers == len(varlen_on_cpu) == attending + TOWER_LAYERS * (family in VISION)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert gradient_gap(gradients, expected) < 1e-5


@pytest.mark.parametrize("family", families())
def test_in_bfloat16_the_kernel_gets_bfloat16_from_every_family(family, bench, varlen_on_cpu):
    one, gradients = run(bench(family), "cuda", torch.bfloat16)
    assert {*varlen_on_cpu} == {torch.bfloat16}
    other, expected = run(bench(family), "cpu", torch.bfloat16)
    gap = (one - other).abs()
    # Rounding alone sends some tokens of a mixture to other experts.
    slack = 5 if FAMILIES[family].mixture else 1
    assert gap.mean() < 4e-3 * slack and gap.max() < 2e-2 * slack
    assert gradient_gap(gradients, expected) < 3e-2 * slack


def tower(setting: Any, kind: DeviceKind) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Everything that a tower loaded for a device makes of images of three sizes, and its gradients."""
    policy = load_policy(setting.folder, kind, "bfloat16", freeze=(), temperature=1.0).float()
    body = policy.model.base_model
    collate = Collator(setting.folder, body, ImageInputs(setting.folder, setting.media), "cpu", torch.float32)
    features = policy(collate.images([ref for prompt in setting.prompts for ref in prompt.images]))
    values = torch.cat([level.flatten() for image in features for level in image])
    (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    return values.detach(), {name: p.grad for name, p in body.visual.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", VISION)
def test_a_tower_loaded_for_cuda_computes_in_one_call_a_layer_what_the_cpus_loop_does(
    family, bench, varlen_on_cpu, monkeypatch
):
    one, gradients = tower(bench(family), "cuda")
    assert len(varlen_on_cpu) == TOWER_LAYERS
    looped: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        looped.append(query.shape[2])
        return attend(query, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    other, expected = tower(bench(family), "cpu")
    assert len(varlen_on_cpu) == TOWER_LAYERS
    # Every image by itself in a layer; Qwen2.5-VL's first layer has more windows than that.
    assert len(looped) > 2 * 3 if family == "qwen2_5_vl" else len(looped) == TOWER_LAYERS * 3
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert gradient_gap(gradients, expected) < 1e-5


@pytest.mark.parametrize("family", VISION)
def test_a_tower_on_a_gpu_never_waits_for_it(family, bench, monkeypatch):
    """A tensor without values stands for one whose values the host would have to wait for."""

    def shaped(query: torch.Tensor, key: Any, value: Any, starts: Any, ends: Any, *longest: int, **_: Any) -> Any:
        assert starts is ends and starts.is_meta and starts.dtype == torch.int32
        assert [type(length) for length in longest] == [int, int]
        return torch.empty_like(query)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", shaped)
    monkeypatch.setattr(device, "tower_bounds", lambda where, dtype: where)
    setting = bench(family)
    body = load_policy(setting.folder, "cuda", "bfloat16", freeze=(), temperature=1.0).model.base_model
    body.visual.to("meta")
    collate = Collator(setting.folder, body, ImageInputs(setting.folder, setting.media), "meta", torch.bfloat16)
    images = collate.images([ref for prompt in setting.prompts for ref in prompt.images])
    assert images.pixels.is_meta
    found = body.get_image_features(images.pixels, images.grids_U3, return_dict=True, **images.derived)
    assert [len(each) for each in found.pooler_output] == [int(grid.prod()) // 4 for grid in images.grids_U3]
    lacking = {name: value for name, value in images.derived.items() if name != "max_seqlen"}
    with pytest.raises(RuntimeError, match="meta"):
        body.get_image_features(images.pixels, images.grids_U3, return_dict=True, **lacking)


@pytest.mark.parametrize("family", VISION)
def test_what_a_tower_is_given_is_what_it_would_work_out_itself(family, bench):
    setting = bench(family)
    body = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=1.0).model.base_model
    visual = body.visual
    grids = torch.tensor([[1, 4, 6], [1, 12, 10], [1, 2, 2]])
    patches = torch.randn(int(grids.prod(1).sum()), 3 * 2 * visual.config.patch_size**2)
    derived = setting.folder.images.tower_inputs(body, grids, "cpu", torch.float32)
    given, alone = visual(patches, grids, **derived), visual(patches, grids)
    assert torch.equal(given.pooler_output, alone.pooler_output)
    assert derived["cu_seqlens"].tolist() == [0, 24, 144, 148] and derived["max_seqlen"] == 120


def test_bounds_of_a_row_with_shared_prompts():
    row = PackedLayout(PROMPTED, "cpu", torch.float32).bounds
    assert row.queries.tolist() == [0, 4, 6, 9, 10, 11, 16, 19] and row.queries.dtype == torch.int32
    assert row.keys.tolist() == [0, 4, 10, 17, 18, 20, 26, 29] and row.keys.dtype == torch.int32
    assert row.longest == (5, 7)
    assert row.key_order is not None
    assert row.key_order[4:17].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7, 8]
    assert PackedLayout(ALONE, "cpu", torch.float32).bounds.key_order is None


def any_row(rng: np.random.Generator) -> tuple[list[Span], int]:
    """Spans of prompts and completions of any lengths, and their tokens."""
    spans, start = list[Span](), 0
    for _ in range(rng.integers(1, 6)):
        unit = Unit((), int(rng.integers(1, 60)), tuple(map(int, rng.integers(0, 50, rng.integers(1, 9)))))
        spans += unit.spans(start)
        start += unit.tokens
    return spans, start


@pytest.mark.parametrize("window", [1, 7, 32, 500])
@pytest.mark.parametrize("seed", range(4))
def test_in_a_layer_with_a_window_any_row_equals_a_mask(seed, window, varlen_on_cpu):
    """The window goes back into a shared prompt, and images, if their tokens see each other, forward to their ends."""
    rng = np.random.default_rng(seed)
    spans, total = any_row(rng)
    images = np.full(total, -1)
    for number, span in enumerate(spans):
        if span.length >= 8 and number % 2 == 0:
            first, end = span.start + span.length // 4, span.start + span.length // 2
            images[first:end], images[end + 1 : end + 3] = 2 * number, 2 * number + 1
    qkv = [torch.from_numpy(rng.normal(size=(1, heads, total, 8))).requires_grad_() for heads in (4, 2, 2)]
    for seen, functions in ((None, (packed_sdpa, packed_varlen)), (images, (packed_sdpa, packed_varlen))):
        expected = masked(*qkv, spans, None, window, seen)
        direction = torch.from_numpy(rng.normal(size=expected.shape))
        gradients = torch.autograd.grad((expected * direction).sum(), qkv)
        layout = PackedLayout(spans, "cpu", torch.float64, seen)
        pairs = sum(max(min(span.prefix_length + i + 1, window), 0) for span in spans for i in range(span.length))
        assert layout.pairs_within(window) == pairs
        for function in functions:
            output, _ = function(torch.nn.Identity(), *qkv, None, layout=layout, sliding_window=window)
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(torch.autograd.grad((output * direction).sum(), qkv), gradients)
        output, _ = packed_sdpa(torch.nn.Identity(), *qkv, None, layout=layout)
        torch.testing.assert_close(output, masked(*qkv, spans, None))
    assert len(varlen_on_cpu) == 1, "the kernel computes the windows, and not images whose tokens see each other"


def test_a_window_costs_a_multiple_of_itself_and_not_the_square_of_the_row():
    row = PackedLayout([Span(0, 1000)], "cpu", torch.float32)
    computed = [N * L * M for N, L, M in (block.shape for block in row.windowed(50).blocks)]
    assert sum(computed) <= 2.5 * 50 * 1000
    assert row.windowed(1000) is row.windowed(None) is row.blocks


def test_the_kernel_gets_no_layer_that_it_cannot_compute(varlen_on_cpu):
    wide = [torch.randn(1, heads, 19, 512, dtype=torch.float64) for heads in (4, 2, 2)]
    layout = PackedLayout(PROMPTED, "cpu", torch.float64)
    output, _ = packed_varlen(torch.nn.Identity(), *wide, None, layout=layout)
    torch.testing.assert_close(output, masked(*wide, PROMPTED, None))
    assert not varlen_on_cpu


@pytest.mark.parametrize("seed", range(10))
def test_any_row_of_prompts_and_completions_equals_a_mask(seed, varlen_on_cpu):
    rng = np.random.default_rng(seed)
    spans, start = any_row(rng)
    qkv = [torch.from_numpy(rng.normal(size=(1, heads, start, 8))).requires_grad_() for heads in (4, 2, 2)]
    expected = masked(*qkv, spans, None)
    direction = torch.from_numpy(rng.normal(size=expected.shape))
    gradients = torch.autograd.grad((expected * direction).sum(), qkv)
    layout = PackedLayout(spans, "cpu", torch.float64)
    for function in (packed_sdpa, packed_varlen):
        output, _ = function(torch.nn.Identity(), *qkv, None, layout=layout)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad((output * direction).sum(), qkv), gradients)


def test_completions_that_are_short_beside_their_prompt_are_one_call_and_long_ones_a_batch():
    short = PackedLayout(Unit((), 300, (20,) * 8).spans(0), "cpu", torch.float32).blocks
    assert [block.shape for block in short.blocks] == [(1, 300, 300), (1, 160, 460)]
    long = PackedLayout(Unit((), 40, (97, 100, 104, 100)).spans(0), "cpu", torch.float32).blocks
    assert [block.shape for block in long.blocks] == [(1, 40, 40), (4, 104, 144)]
