"""Whole updates in nothing but transformers: AdamW, its schedule and its clipping, written out.

Groups of candidates are ragged: of two to five, of one to twelve words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.network.family import FAMILIES
from mmrl.interfaces import Needs
from mmrl.step.given import Comparisons
from mmrl.types import Candidate, ScoredGroup
from tests.engine.test_policy import DECAY

UPDATES = 4
LR, WEIGHT_DECAY = 1e-3, 0.1
RATES = (LR / 2, LR, LR, LR / 2)
"""Two steps of warm-up, and a linear fall over the other two."""
WORDS = ("red", "left", "box", "seven", "the", "under", "not", "blue")


def learner_section(eps: float, max_norm: float) -> dict[str, Any]:
    """The section ``learner`` of a config that updates so.

    AdamW's own epsilon is 1e-8: a weight whose gradient is rounding alone would go by the sign of that.
    """
    own = {"optimizer": {"params": {"eps": eps}}}
    schedule = {"warmup_steps": 2, "schedule": "linear"}
    return {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": max_norm, "deepspeed": own, **schedule}


def ragged_groups(setting: Any, needs: Needs) -> list[list[ScoredGroup]]:
    """The groups of each update: three prompts, in turn."""
    rng, made = np.random.default_rng(5), []
    for number in range(3 * UPDATES):
        prompt, count = setting.prompts[number % len(setting.prompts)], (2, 5, 3, 4)[number % 4]
        texts = [" ".join([str(i), *rng.choice(WORDS, rng.integers(0, 12))]) for i in range(count)]
        candidates = tuple(map(Candidate, texts, rng.permutation(count).astype(float)))
        row = replace(prompt.prompt, id=f"r{number}", candidates=candidates)
        made.append(Comparisons.group(replace(prompt, prompt=row), needs, setting.encoder))
    return [made[i : i + 3] for i in range(0, len(made), 3)]


@dataclass(frozen=True)
class Trained:
    """A model after its updates.

    Attributes:
        weights: Those that the family uses, by name.
        moved: The largest change of one.
        losses: Before each update, likewise ``norms``: the gradient's, before it is clipped.
    """

    weights: Mapping[str, torch.Tensor]
    moved: float
    losses: Sequence[float]
    norms: Sequence[float]

    @classmethod
    def by(
        cls, model: torch.nn.Module, backwards: Sequence[Callable[[], float]], setting: Any, eps: float, max_norm: float
    ) -> Trained:
        """A model that takes one update with each of these, which add a gradient and return the loss."""
        weights = {name: p for name, p in model.named_parameters() if setting.folder.family.uses(name)}
        before, means, squares = {name: p.detach().clone() for name, p in weights.items()}, {}, {}
        losses, norms = [], []
        for step, (backward, rate) in enumerate(zip(backwards, RATES, strict=True), 1):
            model.zero_grad()
            losses.append(backward())
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in weights.items()}
            norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())))
            for name, g in gradients.items():
                g = g * min(1.0, max_norm / norms[-1])
                means[name] = 0.9 * means.get(name, 0.0) + 0.1 * g
                squares[name] = 0.999 * squares.get(name, 0.0) + 0.001 * g * g
                root = (squares[name] / (1 - 0.999**step)).sqrt() + eps
                with torch.no_grad():
                    weights[name] -= rate * (WEIGHT_DECAY * weights[name] + means[name] / (1 - 0.9**step) / root)
        moved = max(float((p.detach() - before[name]).abs().max()) for name, p in weights.items())
        return cls({name: p.detach() for name, p in weights.items()}, moved, losses, norms)

    def check(self, metrics: Sequence[Mapping[str, float]], saved: torch.nn.Module, names: Sequence[str]) -> None:
        """See that metrics, one mapping an update, and saved weights are these.

        Args:
            names: The metrics of the loss, the gradient's norm and the learning rate.
        """
        for name, expected in zip(names, (self.losses, self.norms, RATES), strict=True):
            assert [each[name] for each in metrics] == pytest.approx(expected, rel=1e-4)
        weights = dict(saved.named_parameters())
        errors = {name: float((p - weights[name]).abs().max()) for name, p in self.weights.items()}
        error = max(each / (10 if name.endswith(DECAY) else 1) for name, each in errors.items())
        # Adam divides by a root that is near 0 where gradients are: there rounding moves single weights further, and by
        # how much depends on the processor (1.13e-5 was seen, with weights that move by 3.3e-3).
        assert error < 2e-5
        assert self.moved > 1e-3


POLICYS = ("loss/total", "policy/grad_norm", "lr")
"""The metrics of a network that is trained alone."""

CASES = [
    ("qwen2_5_vl", 0, 1, 4096),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("qwen2_5_vl", 3, 2, 10),
            ("qwen3_vl", 3, 1, 10),
            ("internvl", 0, 2, 10),
            ("qwen2", 1, 2, 4096),
            ("qwen2", 2, 1, 10),
        )
    ),
]
"""Family, ZeRO stage, ranks, and tokens of a micro-batch, of which 10 are below one row: each value once."""
OTHERS = [name for name in FAMILIES if name not in ("qwen2_5_vl", "qwen3_vl", "internvl", "qwen2")]
"""Families of which no case is."""
