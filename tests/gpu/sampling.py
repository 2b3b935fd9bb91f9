"""What a seed per request costs a decode step: a draw for each of them, or one for all."""

from __future__ import annotations

from functools import partial

from tests.gpu.bench import Bench, milliseconds
from tests.gpu.row import Row

VOCABULARY = 151_936


def run(bench: Bench) -> None:
    for requests in bench.pick((320, 1024), (4, 8)):
        bench.attempt(f"{requests} requests", partial(_draw, bench, requests))


def _draw(bench: Bench, requests: int, name: str) -> Row:
    """Exponential noise over the vocabulary, as vLLM's first model runner draws it, and in one call."""
    import torch

    noise_RV = torch.empty(requests, bench.pick(VOCABULARY, 1000), device=bench.device)
    generators = [torch.Generator(bench.device).manual_seed(seed) for seed in range(requests)]

    def each() -> None:
        for row_V, generator in zip(noise_RV, generators, strict=True):
            row_V.exponential_(generator=generator)

    slow, fast = bench.seconds(each), bench.seconds(noise_RV.exponential_)
    last = generators[-1].manual_seed(requests - 1)
    each()
    among_others_V = noise_RV[-1].clone()
    alone_V = torch.empty_like(among_others_V).exponential_(generator=last.manual_seed(requests - 1))
    same = torch.equal(among_others_V, alone_V)
    value = f"one draw each {milliseconds(slow)}, one for all {milliseconds(fast)} a decode step"
    why = "" if same else "a request's draw depends on the requests beside it"
    return bench.row(name, value, good=same, why=why)
