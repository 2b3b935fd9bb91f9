"""Counted operations against what torch counts while real models run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.engine.network.family import FAMILIES, family_of
from mmrl.engine.network.image_form import Budget
from mmrl.engine.network.shape import model_shape
from mmrl.ops.cost import (
    ModelShape,
    TowerShape,
    Training,
    Work,
    causal_pairs,
    imbalance,
)
from mmrl.ops.layer_shapes import LinearAttentionShape, MixtureShape
from tests.proofs import families

GRIDS = ((1, 4, 6), (1, 18, 10))
"""One image smaller than a window of 8 patches, one of whole windows and parts of them."""
TILES = ((1, 4, 4), (3, 4, 4))
"""An image of one tile, and one of two with its small copy."""
SQUARES = ((1, 8, 6), (1, 6, 8))
"""Two images of as many patches: the tower takes them as a batch."""
PREDICTED = 7


@dataclass(frozen=True)
class Counted:
    shape: ModelShape
    tokens: int
    forward: int
    backward: int
    images: tuple[tuple[int, int, int], ...]

    def work(self, pairs: int) -> Work:
        return self.shape.work(tokens=self.tokens, pairs=pairs, predicted=PREDICTED, images=self.images)


@pytest.fixture
def run(models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counted]:
    """Runs a family's tiny model on one sequence under torch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    # An engine with ZeRO 3 leaves DeepSpeed's here, which computes a layer's last product again too.
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)

    def counted(family: str, freeze: Sequence[str] = (), *, checkpointing: bool = False) -> Counted:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        config = AutoConfig.from_pretrained(models(family))
        vision = FAMILIES[family].vision
        images = {"internvl": TILES, "gemma4": SQUARES}.get(family, GRIDS) if vision else ()
        # The fused kernel of a CPU is not counted; plain products are, those above the diagonal included.
        model = (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_pretrained(
            models(family), attn_implementation="eager", experts_implementation="eager"
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(family_of(family, "").part_of(name) not in freeze)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.disable_input_require_grads()
        model.train()
        inputs = _inputs(config, images)
        if (linear := model_shape(config).linear) is not None:
            # The counter would see a kernel's own operations, and not those that are needed.
            for layer in model.modules():
                if hasattr(layer, "linear_attn"):
                    layer.linear_attn = _Projections(layer.linear_attn, linear)
        with FlopCounterMode(display=False) as forward:
            hidden_SH = model.base_model(**inputs, use_cache=False).last_hidden_state[0]
            loss = model.get_output_embeddings()(hidden_SH[-PREDICTED:]).sum()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        tokens = inputs["input_ids"].shape[1]
        counts = forward.get_total_flops(), backward.get_total_flops()
        return Counted(model_shape(config), tokens, *counts, images)

    return counted


class _Projections(torch.nn.Module):
    """The matrices of a layer of linear attention alone."""

    def __init__(self, layer: Any, shape: LinearAttentionShape) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        layer = self.layer
        projected = [p(hidden_states) for p in (layer.in_proj_qkv, layer.in_proj_b, layer.in_proj_a)]
        gate = layer.in_proj_z(hidden_states)
        return layer.out_proj(gate * sum(each.sum(-1, keepdim=True) for each in projected))


def _inputs(config: Any, grids: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    torch.manual_seed(0)
    text = torch.randint(20, 200, (1, 30))
    if not grids:
        return {"input_ids": text}
    merged = [frames * height * width // 4 for frames, height, width in grids]
    images = torch.cat(
        [torch.cat([torch.full((1, n), config.image_token_id), text[:, i : i + 1]], 1) for i, n in enumerate(merged)], 1
    )
    ids = torch.cat([text[:, :5], images, text[:, 5:]], 1)
    if config.model_type == "gemma4":  # with another image of as many patches, so that none is padding
        form = Budget(config)
        patches = torch.rand(sum(height * width for _, height, width in grids), form.tower.patch_values)
        return {"input_ids": ids, **form.generate_inputs(patches, torch.tensor(grids))}
    if grids is TILES:
        return {"input_ids": ids, "pixel_values": torch.randn(sum(frames for frames, *_ in grids), 3, 56, 56)}
    patches = sum(height * width for _, height, width in grids)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(patches, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


FROZEN = {
    "nothing": (),
    "vision": ("vision",),
    "vision and projector": ("vision", "projector"),
    "language": ("language",),
    "projector": ("projector",),
    "vision and language": ("vision", "language"),
}
CASES = [
    pytest.param(family, freeze, marks=marks, id=f"{family}, {name} frozen")
    for (family,), marks, _ in families()
    for name, freeze in FROZEN.items()
    if FAMILIES[family].vision or not freeze
]


@pytest.mark.parametrize(("family", "freeze"), CASES)
def test_a_pass_costs_what_torch_counts(run: Callable[..., Counted], family: str, freeze: tuple[str, ...]) -> None:
    found = run(family, freeze)
    dense, training = found.work(found.tokens**2), Training(freeze)
    states = 0
    if (linear := found.shape.linear) is not None:
        # Of 128 x 128 numbers a state is read twice and changed once for a token; 4 taps of 3 x 128 and 128 channels.
        states = linear.layers * found.tokens * (2 * 4 * 512 + 2 * 6 * 128 * 128)
    pooling = 0
    if (tower := found.shape.tower) is not None and tower.pooled:
        # transformers writes the means of squares of patches as a product of matrices with mostly zeros.
        pooling = 2 * tower.width * sum((height * width) ** 2 // tower.merge**2 for _, height, width in found.images)
    assert found.shape.forward_flops(dense) == found.forward + states - pooling
    again = 2 * states * training.reaches("language") - pooling * ("vision" not in freeze)
    assert found.shape.backward_flops(dense, training) == found.backward + again


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama"])
def test_causality_saves_the_pairs_above_the_diagonal_and_nothing_else(
    run: Callable[..., Counted], family: str
) -> None:
    found = run(family)
    n, shape = found.tokens, found.shape
    spared = 4 * shape.layers * shape.heads * shape.head_size * (n * (n - 1) // 2)
    causal = found.work(causal_pairs(n))
    assert shape.forward_flops(causal) == found.forward - spared
    assert shape.update_flops(causal) == found.forward + found.backward - 3 * spared


@pytest.mark.parametrize("freeze", [(), ("vision", "projector"), ("vision",)], ids=str)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "qwen3", "qwen3_moe"])
def test_checkpointing_recomputes_what_is_told_apart(
    run: Callable[..., Counted], family: str, freeze: tuple[str, ...]
) -> None:
    found, plain = run(family, freeze, checkpointing=True), run(family, freeze)
    dense = found.work(found.tokens**2)
    assert found.backward - plain.backward == found.shape.recomputed_flops(dense, Training(freeze))


def test_ranks_wait_in_every_row_for_the_one_that_has_most():
    assert imbalance([[4, 3], [4, 3]]) == 1.0
    assert imbalance([[4, 2], [2, 4]]) == pytest.approx(8 / 6)
    assert imbalance([[5, 1], [3, 0]]) == pytest.approx(6 / 4.5)
    assert imbalance([[0], [0]]) == 1.0


TOWER = TowerShape(layers=32, width=1280, mlp_width=3420, mlp_matrices=3, patch_values=1176, merge=2, out=1, heads=16)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mlp_width", "sizes", "stands"),
    [
        (16, 2, 11008, [1, 2, 4], "the vision tower's MLP has 3420 columns"),  # Qwen2.5-VL-3B at 8
        (28, 4, 18944, [1, 2, 4], "the model has 28 attention heads"),  # 7B at 8
        (40, 8, 27648, [1, 2, 4], "the vision tower's MLP has 3420 columns"),
        (48, 6, 27648, [1, 2], "the model has 6 key-value heads"),
    ],
)
def test_layers_are_divided_by_whole_heads_and_columns(heads, kv_heads, mlp_width, sizes, stands):
    text = {"heads": heads, "kv_heads": kv_heads, "mlp_width": mlp_width}
    shape = ModelShape(layers=1, width=1, head_size=128, vocabulary=1, tower=TOWER, **text)
    assert stands == shape.indivisible(8)
    assert [n for n in (1, 2, 3, 4, 8) if not shape.indivisible(n)] == sizes


def test_a_tower_that_each_rank_has_whole_stands_in_no_way():
    shape = ModelShape(
        layers=1, width=1, heads=16, kv_heads=2, head_size=128, mlp_width=11008, vocabulary=1, tower=TOWER
    )
    assert shape.indivisible(8) and not shape.indivisible(8, whole_tower=True)


@pytest.mark.parametrize(
    ("experts", "columns", "sizes", "stands"),
    [
        (128, 768, [1, 2, 4, 8], ""),  # Qwen3-30B-A3B
        (60, 1404, [1, 2, 4], "each of the model's experts has 1404 columns"),
        (4, 768, [1, 2, 4], "the model has 4 experts"),
    ],
)
def test_each_expert_is_divided_by_its_columns(experts, columns, sizes, stands):
    mixture = MixtureShape(layers=1, experts=experts, chosen=2, width=columns)
    shape = ModelShape(
        layers=1, width=1, heads=32, kv_heads=4, head_size=128, mlp_width=1, vocabulary=1, mixture=mixture
    )
    assert stands == shape.indivisible(8)
    assert [n for n in (1, 2, 4, 8) if not shape.indivisible(n)] == sizes
