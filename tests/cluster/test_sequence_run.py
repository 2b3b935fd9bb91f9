"""Whole runs with images whose learner's ranks hold rows together tell what runs of whole rows tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.rollout.records import read_lines, recorded_steps
from tests.cluster.test_split import folder, lines, trained

__all__ = ["folder", "trained"]
pytestmark = pytest.mark.slow

TWO = ("cluster.name=ray", "cluster.ranks=2")
APART = ("cluster.name=ray", "cluster.sampler_ranks=1", "cluster.learner_ranks=2")
CALM = (
    "learner.zero_stage=3", "learner.lr=1e-3", "learner.deepspeed={optimizer: {params: {eps: 1e-5}}}",
    "learner.tokens_per_microbatch=150",
)  # fmt: skip
"""With AdamW's own epsilon, weights whose gradient is rounding alone go by the sign of that."""


def sampled(run: Path) -> dict[int, list[Any]]:
    """The tokens of each step's rollouts."""
    return {step: [line["token_ids"] for line in read_lines(path)] for step, path in recorded_steps(run).items()}


@pytest.mark.parametrize("layout", [TWO, APART], ids=["in turns", "apart"])
def test_runs_sample_the_same_tokens_and_tell_the_same_numbers(
    layout: tuple[str, ...], trained: Callable[..., Path]
) -> None:
    """vLLM samples; the start sees that the tower has read all images, and each step that the log-probs agree."""
    whole = trained("images", *layout, *CALM)
    together = trained("images", *layout, *CALM, "learner.sequence_parallel_size=2")
    assert sampled(together) == sampled(whole) and len(sampled(whole)) == 3
    found, expected = (lines(run / "metrics.jsonl") for run in (together, whole))
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for mine, its in zip(found, expected, strict=True):
        noise = {name for name in its if name.startswith("mismatch/")}
        assert {name: mine[name] for name in its if name not in noise} == pytest.approx(
            {name: value for name, value in its.items() if name not in noise}, rel=1e-3, abs=1e-5
        )
        assert {name: mine[name] for name in noise} == pytest.approx({name: its[name] for name in noise}, abs=1e-4)
