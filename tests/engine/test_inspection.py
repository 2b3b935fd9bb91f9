"""Weights are found again by hashes in whatever an engine has made of them, and images in the tower's own calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mmrl.engine.aids.inspection import report
from mmrl.engine.network.eye import Eye
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.weight_hashes import WeightHashes
from mmrl.types import EncodedPrompt, ImageRef, ImageReport, Inspection, Prompt, WeightReport, worst

SIZES = ((56, 84), (140, 112))


class Packed(nn.Module):
    """A linear layer that has dropped its matrix, as vLLM's do on a CPU."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.input_size = nn.Parameter(torch.empty(0, dtype=weight.dtype)), weight.shape[1]
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ weight.T)


def holding(*weights: torch.Tensor) -> WeightHashes:
    model = nn.ParameterList([nn.Parameter(weight) for weight in weights])
    return WeightHashes.of(model, weights[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_found_whatever_was_made_of_it_and_not_if_one_element_differs(dtype):
    q, k, v = (torch.randn(size, 12).to(dtype) for size in (8, 4, 4))
    bias = torch.randn(8).to(dtype)
    experts = torch.randn(3, 6, 12).to(dtype)
    order = torch.randperm(16)
    found = {
        "fused, its rows in another order": holding(torch.cat([q, k, v])[order]),
        "its rows in two parts": holding(*q.chunk(2, 1)),
        "its elements in another order, with padding": holding(
            torch.cat([q.flatten()[torch.randperm(96)], torch.zeros(4).to(dtype)]).reshape(10, 10)
        ),
        "packed": WeightHashes.of(nn.ModuleList([Packed(q)]), dtype),
    }
    wrong = q.clone()
    wrong[5, 7] += 1
    for what, held in found.items():
        assert held.holds(q, dtype, 2), what
        assert not held.holds(wrong, dtype, 2), what
    fused = holding(torch.cat([torch.ones(4).to(dtype), bias]))
    assert fused.holds(bias, dtype, 1) and not fused.holds(bias + 1, dtype, 1)
    assert holding(experts.transpose(1, 2)).holds(experts, dtype, 1)
    assert not holding(experts.transpose(1, 2)).holds(experts + 1, dtype, 1)


def test_a_weight_that_only_one_tensor_parallel_rank_has_is_found_once_the_others_are_asked():
    whole = torch.randn(4, 12)
    left, right = (holding(part) for part in whole.chunk(2, 1))
    assert not left.holds(whole, torch.float32, 2)
    fused = torch.randn(12)
    of_ranks = [torch.cat([part[2 * rank : 2 * rank + 2] for part in fused.chunk(3)]) for rank in range(2)]
    assert holding(*of_ranks).holds(fused, torch.float32, 2)
    assert not holding(*of_ranks).holds(fused + 1, torch.float32, 2)
    left.add(right)
    assert left.holds(whole, torch.float32, 2)


def shuffled(part: torch.Tensor) -> torch.Tensor:
    """A matrix as a kernel packs it, with its elements in another order."""
    return part.flatten()[torch.randperm(part.numel())].reshape(part.shape)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("is_turned", [True, False])
def test_experts_of_which_tensor_parallel_ranks_hold_parts_are_found_and_not_if_one_element_differs(
    is_packed, is_turned
):
    gates_and_ups, downs = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    gates, ups = gates_and_ups.chunk(2, 1)
    ranks = zip(gates.chunk(2, 1), ups.chunk(2, 1), downs.chunk(2, 2), strict=True)
    parts = [[torch.cat([gate, up], 1), down] for gate, up, down in ranks]
    first, other = (holding(*map(shuffled, own) if is_packed else own) for own in parts)
    for weight in (gates_and_ups, downs):
        own = weight.transpose(1, 2) if is_turned else weight
        wrong = own.clone()
        wrong[2, 3, 1] += 1
        assert not first.holds(own, torch.float32, 2)
        held = WeightHashes(set(first.rows), set(first.sums))
        held.add(other)
        assert held.holds(own, torch.float32, 2) and not held.holds(wrong, torch.float32, 2)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(4, 6)

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        return self.patch_embed(pixels)[::4]


def test_an_eye_sees_what_each_call_of_the_tower_is_given_and_gives_until_it_is_closed():
    model = nn.Module()
    model.visual, eye = Tower(), Eye(FAMILIES["qwen2_5_vl"])
    pixels, grid = torch.randn(16, 4), torch.tensor([[1, 4, 4]])
    eye.open(model)
    model.visual(pixels, grid_thw=grid)
    eye.close()
    model.visual(pixels, grid_thw=grid)
    assert [each.tolist() for each in eye.pixels] == [pixels.tolist()]
    assert [each.tolist() for each in eye.grids] == [[[1, 4, 4]]] and eye.num_features == [4]


class Seen(Eye):
    """An eye that has seen images in this order, in a batch with so many values of padding at least."""

    def __init__(
        self, folder: ModelFolder, *images: tuple[int, int], blank: bool = False, shift: float = 0.0, padding: int = 0
    ) -> None:
        super().__init__(folder.family)
        form = folder.images
        grids, parts = [form.grid(*size) for size in images], []
        for width, height in images:
            grid = form.grid(width, height)
            rows = np.arange(int(np.prod(grid)), dtype=np.float32)[:, None] + width + shift
            parts.append(np.repeat(rows, form.tower.patch_values, 1).reshape(form.seen(grid)))
        tokens = sum(form.tokens(*size) for size in images)
        if blank:
            _, grid = form.blank()
            parts.insert(0, np.full(form.seen(form.grid(0, 0)), form.blank_value, np.float32))
            grids.insert(0, tuple(grid.tolist()))
            tokens += form.tokens(0, 0)
        longest = max(part.shape[1] for part in parts) + padding
        parts = [np.pad(p, ((0, 0), (0, longest - p.shape[1])), constant_values=form.blank_value) for p in parts]
        self.pixels, self.grids, self.num_features = [np.concatenate(parts)], [np.array(grids)], [tokens]


@pytest.fixture(scope="module")
def folder(models) -> ModelFolder:
    return ModelFolder.open(str(models("qwen2_5_vl")))


def compared(folder: ModelFolder, sampler: Eye, learner: Eye) -> ImageReport:
    ids = [i for size in SIZES for i in folder.images.expansion(*size)]
    refs = tuple(ImageRef(str(size), *size, path="") for size in SIZES)
    prompt = EncodedPrompt(prompt=Prompt("p", ()), text="", token_ids=np.array(ids, np.int32), images=refs)
    learner.forget_blanks(folder)
    return report(prompt, sampler, learner, folder)


def test_the_same_images_agree_in_any_order_and_with_a_blank_one_among_them(folder):
    for learner in (Seen(folder, *SIZES), Seen(folder, *SIZES[::-1]), Seen(folder, *SIZES, blank=True)):
        found = compared(folder, Seen(folder, *SIZES), learner)
        tokens = sum(folder.image_tokens(*size) for size in SIZES)
        assert found == ImageReport("p", 0.0, True, 0, tokens, tokens, tokens)


@pytest.mark.parametrize(
    ("sampler", "gap", "grids"),
    [
        ({"images": SIZES, "shift": 0.25}, 0.25, 0),
        ({"images": SIZES[:1]}, float("inf"), 1),
        ({"images": ((84, 56), SIZES[1])}, 28.0, 1),
    ],
)
def test_other_pixels_an_image_that_is_lacking_and_sides_that_are_exchanged_show(sampler, gap, grids, folder):
    found = compared(folder, Seen(folder, *sampler.pop("images"), **sampler), Seen(folder, *SIZES))
    assert (found.pixel_gap, found.grids_differ, found.same_pixels) == (gap, grids, False)


def test_images_of_a_batch_are_compared_without_their_padding(models):
    folder = ModelFolder.open(str(models("gemma4")))
    for learner in ({}, {"blank": True}, {"padding": 900}, {"shift": 0.25, "blank": True}):
        found = compared(folder, Seen(folder, *SIZES, padding=432), Seen(folder, *SIZES, **learner))
        shift, tokens = learner.get("shift", 0.0), sum(folder.image_tokens(*size) for size in SIZES)
        assert found == ImageReport("p", shift, not shift, 0, tokens, tokens, tokens), learner
    cut = Seen(folder, *SIZES)
    cut.pixels = [each[:, :-432] for each in cut.pixels]
    assert compared(folder, cut, Seen(folder, *SIZES)).pixel_gap == float("inf")


def test_several_ranks_are_as_good_as_the_worst_of_them():
    fine, lacks = WeightReport(9, (), (1, 1)), WeightReport(9, ("lm_head.weight",), (1, 0))
    good = ImageReport("p", 0.0, True, 0, 4, 4, 4)
    bad: dict[str, Any] = {"pixel_gap": 0.5, "same_pixels": False, "grids_differ": 1}
    other = ImageReport("p", image_tokens=4, sampler_features=4, learner_features=3, **bad)
    found = worst([Inspection((good,), lacks), Inspection((other,), fine)])
    assert found == Inspection((other,), WeightReport(9, ("lm_head.weight",), (1, 0)))
