"""The check that log-probs of the same tokens and weights agree: packed and one by one, sampler and learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from mmrl.engine_api import Engine
from mmrl.errors import NumericsError
from mmrl.ops import metrics
from mmrl.ops.packing import Item, units_of
from mmrl.ops.parity import Gap
from mmrl.types import BoolArray, CreditedGroup, FloatArray, Sample

CHECKED_SAMPLES, CHECKED_MEMBERS = 12, 3
"""Samples of the first batch that are computed one by one as well as packed, and how many of one prompt, which share
it in the packed row."""


class LogprobCheck:
    """Warns of a disagreement, or stops the run.

    Args:
        precision: ``float32`` or ``bfloat16``; decides how far two computations may be apart.
        on_mismatch: The action when they are further apart than that.
        event: Called with a kind and fields for each disagreement.
    """

    def __init__(self, precision: str, on_mismatch: Literal["stop", "warn"], *, event: Callable[..., None]) -> None:
        self._precision, self._on_mismatch, self._event = precision, on_mismatch, event

    def check_first(self, samples: Sequence[Sample], engine: Engine, *, has_sampler: bool) -> None:
        """On the first batch, before any update: packed against one by one, and sampler against learner.

        Each computation takes the learner anew, so that what one keeps of images does not serve the other.

        Args:
            samples: All that was sampled, kept or not; or demonstrations.
            has_sampler: True if they were sampled.

        Raises:
            NumericsError: They are too far apart.
        """
        if not (samples := [sample for sample in samples if len(sample.token_ids)]):  # the environment failed at once
            return
        members = [unit.indices[:CHECKED_MEMBERS] for unit in units_of([Item.of(sample) for sample in samples])]
        count = max(CHECKED_SAMPLES // max(map(len, members)), 1)
        chosen = members[:: max(len(members) // count, 1)][:count]
        samples = [samples[index] for indices in chosen for index in indices]
        with engine.learning() as learner:
            packed = learner.logprobs(samples)
        with engine.learning() as learner:
            single = learner.logprobs(samples, packed=False)
        written = [
            [_written(values, sample.mask) for sample, values in zip(samples, found, strict=True)]
            for found in (single, packed)
        ]
        self._judge("packed and one-by-one log-probs disagree", Gap.between(*written))
        if has_sampler:
            self._judge("sampler and learner disagree before the first update", _sampler_gap(samples, packed))

    def check_step(self, step: int, groups: Sequence[CreditedGroup]) -> dict[str, float]:
        """Metrics of sampler against learner on the groups that were trained on; none without groups.

        Raises:
            NumericsError: They are too far apart.
        """
        if not groups:
            return {}
        rollouts = [rollout for group in groups for rollout in group.scored.group.rollouts]
        gap = _sampler_gap(rollouts, [each for group in groups for each in group.logprobs])
        self._judge(f"sampler and learner disagree in step {step}", gap)
        return metrics.mismatch_metrics(gap)

    def _judge(self, what: str, gap: Gap) -> None:
        verdict = gap.verdict(self._precision)
        if verdict == "ok":
            return
        found = f"{what}: mean {gap.abs_mean:.2e}, max {gap.abs_max:.2e} nats in {self._precision}"
        self._event("mismatch", message=found, verdict=verdict)
        if verdict == "stop" and self._on_mismatch == "stop":
            raise NumericsError(
                found,
                where="the same tokens and the same weights, computed twice",
                possible="the limits in mmrl/ops/parity.py",
                remedy="check sampler.engine and learner.deepspeed for lossy settings; "
                "trainer.on_mismatch: warn trains all the same",
            )


def _sampler_gap(samples: Sequence[Sample], logprobs: Sequence[FloatArray]) -> Gap:
    """Learner against sampler, on the tokens that the policy wrote, of samples that the learner has seen."""
    seen = [(s, values) for s, values in zip(samples, logprobs, strict=True) if len(values)]
    return Gap.between(
        [_written(s.sampler_logprobs, s.mask) for s, _ in seen], [_written(values, s.mask) for s, values in seen]
    )


def _written(values: FloatArray, mask: BoolArray) -> FloatArray:
    """The values of the tokens that the policy wrote; the array itself where it wrote all of them."""
    return values if mask.all() else values[mask]
