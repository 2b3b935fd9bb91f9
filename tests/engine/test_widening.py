"""Weights that are wider while a module computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mmrl.engine.network import widening
from mmrl.engine.network.widening import Widening


class Layers(torch.nn.Module):
    """Functions that models call with their weights, and what a model asks of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 6)
        self.conv = torch.nn.Conv1d(6, 6, 2, padding=1)
        self.norm = torch.nn.LayerNorm(6)
        self.up, self.bare = torch.nn.Linear(6, 31), torch.nn.Linear(31, 5, bias=False)
        self.experts = torch.nn.Parameter(torch.rand(3, 4, 5))
        self.decay = torch.nn.Parameter(torch.rand(4))
        self.asked = list[torch.dtype]()

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        self.asked.append(self.norm.weight.dtype)
        x_TH = self.words(ids_T).to(self.conv.weight.dtype)
        x_TH = self.norm(self.conv(x_TH.T)[:, :-1].T)
        x_TH = functional.linear(self.bare(self.up(x_TH)), self.experts[1])
        return torch.cat([x_TH, (1 + self.decay.exp())[None]]) @ self.experts.mean(0)


@pytest.mark.parametrize(("own", "wider"), [("float32", "float64"), ("bfloat16", "float32")])
@pytest.mark.parametrize("numbers", [1, 40, 10_000])
def test_a_module_computes_as_if_all_its_weights_were_wide(own, wider, numbers, monkeypatch):
    monkeypatch.setitem(widening.CHUNK_NUMBERS, "cpu", numbers)
    torch.manual_seed(0)
    layers, ids_T = Layers().to(getattr(torch, own)), torch.tensor([3, 1, 10, 1])
    narrow = layers(ids_T)
    with torch.no_grad(), Widening(getattr(torch, own), getattr(torch, wider)):
        found = layers(ids_T)
    exact = layers.to(getattr(torch, wider))(ids_T)
    rounding = torch.finfo(getattr(torch, wider)).eps
    torch.testing.assert_close(found, exact, rtol=32 * rounding, atol=32 * rounding)
    assert (narrow - exact).abs().max() > 1e4 * rounding
    assert [str(each).removeprefix("torch.") for each in layers.asked] == [own, wider, wider]


class Largest(TorchFunctionMode):
    """Notes the size of the largest wide tensor that is made, by the widening too if it is entered later."""

    numbers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
            self.numbers = max(self.numbers, found.numel())
        return found


def test_no_more_than_some_rows_of_a_weight_are_wide_at_a_time(monkeypatch):
    monkeypatch.setitem(widening.CHUNK_NUMBERS, "cpu", 64)
    # DeepSpeed leaves a function of its own there at ZeRO 3, which multiplies by the whole weight.
    monkeypatch.setattr(functional, "linear", torch._C._nn.linear)
    layer, x_1H = torch.nn.Linear(16, 40), torch.ones(1, 16, dtype=torch.float64)
    words = torch.nn.Embedding(40, 16)
    with torch.no_grad(), Largest() as largest, Widening(torch.float32, torch.float64):
        layer(x_1H + words(torch.tensor([39])))
    assert largest.numbers == 64
