"""Updates of a policy and a critic, in turn, for tests that compare them to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.network.policy import gathered
from mmrl.types import FloatArray, PreUpdateStatistics
from tests.engine.critics import critic_rows, policy_rows, samples_of, valued

LORA = {"rank": 4, "alpha": 8, "targets": ["language"]}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"model": {"lora": LORA}},
    "full, ZeRO 3": {"learner": {"zero_stage": 3}},
    "frozen towers": {"model": {"freeze": ["vision", "projector"]}, "critic": {"freeze": ["vision", "projector"]}},
    "lora, ZeRO 1": {"model": {"lora": LORA}, "learner": {"zero_stage": 1}},
    "lora, bf16, ZeRO 2": {"model": {"lora": LORA, "dtype": "bfloat16"}, "learner": {"zero_stage": 2}},
    "lora, ZeRO 3": {"model": {"lora": LORA}, "learner": {"zero_stage": 3}},
    "lora of all parts": {"model": {"lora": {**LORA, "targets": ["language", "vision", "projector"]}}},
    "head alone": {"critic": {"freeze": ["vision", "projector", "language"]}},
    "lora, recomputed": {"model": {"lora": LORA, "gradient_checkpointing": True}},
    "lora, offloaded": {"model": {"lora": LORA}, "learner": {"zero_stage": 2, "offload": "optimizer"}},
    "bf16": {"model": {"dtype": "bfloat16"}},
    "quantised": {"model": {"lora": LORA, "quantize": "nf4", "dtype": "bfloat16"}},
}
SHORT = ("full", "lora")
FULL = ("full, ZeRO 3", "frozen towers", "lora, bf16, ZeRO 2", "lora, ZeRO 3")
UPDATES = 3
ROLES = {"p": "policy", "c": "critic"}


def ways() -> list[Any]:
    """Values of a parameter ``way``."""
    marks = dict.fromkeys(WAYS, pytest.mark.slow) | dict.fromkeys(FULL, pytest.mark.full)
    return [pytest.param(name, marks=() if name in SHORT else marks[name]) for name in WAYS]


@dataclass(frozen=True)
class Outcome:
    """Holds what some updates have left.

    Attributes:
        metrics: By role, of each update, times aside; likewise ``statistics``.
        weights: By role, those that are trained.
        values: The critic's, of all samples.
    """

    metrics: Mapping[str, list[Mapping[str, float]]]
    statistics: Mapping[str, list[list[PreUpdateStatistics]]]
    weights: Mapping[str, Mapping[str, torch.Tensor]]
    values: FloatArray

    def equals(self, other: Outcome, role: str, first: int = 0) -> None:
        """See that a role's outcome is another one's, to the bit.

        Args:
            first: The other one's update that is this one's first.
        """
        assert self.metrics[role] == other.metrics[role][first:]
        for mine, its in zip(self.statistics[role], other.statistics[role][first:], strict=True):
            for a, b in zip(mine, its, strict=True):
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
                np.testing.assert_array_equal(a.vpreds, b.vpreds)
                assert len(a.logprobs) + len(a.vpreds)
        assert self.weights[role].keys() == other.weights[role].keys()
        assert all(torch.equal(value, other.weights[role][name]) for name, value in self.weights[role].items())


def sections_of(way: str, **further: Any) -> dict[str, Any]:
    """The sections of a config."""
    base: dict[str, Any] = {
        "learner": {"tokens_per_microbatch": 200, "lr": 1e-3, "weight_decay": 0.1, "zero_stage": 0},
        "critic": {"lr": 3e-3, "weight_decay": 0.1, "head": "normal"},
        "trainer": {"steps": 3 * UPDATES, "seed": 5},
    }
    for own in (WAYS[way], further):
        base |= {key: {**base.get(key, {}), **value} for key, value in own.items()}
    return base


def run(
    engine: Any, setting: Any, order: str, *, first: int = 0, save: Path | None = None, also: Callable[[Any], Any] = id
) -> Outcome:
    """Let an engine take updates.

    Args:
        order: ``p`` is an update of the policy, ``c`` one of the critic.
        first: The number of the first of each.
        also: Called with the learner at the end.
    """
    samples, taken = samples_of(setting), dict.fromkeys(ROLES, first)
    found: dict[str, list[Any]] = {role: [] for role in ROLES.values()}
    with engine.learning() as learner:
        for letter in order:
            rows = (policy_rows if letter == "p" else critic_rows)(samples, taken[letter])
            taken[letter] += 1
            found[ROLES[letter]].append(learner.network(ROLES[letter]).update(rows))
        local = hasattr(learner, "policy")
        weights = {role: trained_weights(learner.network(role)) for role in found} if local else {}
        values = np.concatenate(learner.network("critic").score(samples))
        if save is not None:
            learner.save(save)
        also(learner)
    metrics = {
        role: [{k: v for k, v in each.metrics.items() if "perf/" not in k} for each in results]
        for role, results in found.items()
    }
    statistics = {role: [each.statistics for each in results] for role, results in found.items()}
    return Outcome(metrics, statistics, weights, values)


def trained_weights(network: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in network.policy.model.named_parameters():
        if parameter.requires_grad:
            with gathered(parameter):
                found[name] = parameter.detach().clone()
    return found


def take(start: Callable[..., Any], setting: Any, way: str, order: str, **options: Any) -> Outcome:
    """The outcome of a new engine on one rank; ``options``: of ``run``, a checkpoint, sections of the config."""
    own = {key: options.pop(key) for key in ("first", "save", "also") if key in options}
    checkpoint = options.pop("checkpoint", None)
    engine = start(bench=setting, algorithm=valued(), checkpoint=checkpoint, **sections_of(way, **options))
    return run(engine, setting, order, **own)
