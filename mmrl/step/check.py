"""The check that log-probs of the same tokens and weights agree: packed and one by one, sampler and learner.

How far two sound computations are apart depends on the network. So a run first measures its own rounding, the gap
between the learner and plain transformers in a wider type, and judges the other gaps by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import numpy as np

from mmrl.engine_api import Engine
from mmrl.errors import NumericsError
from mmrl.ops import metrics
from mmrl.ops.packing import Item, units_of
from mmrl.ops.parity import LIMITS, WIDER, Gap, Limits
from mmrl.step.audit.ranks import Compared
from mmrl.step.token_gap import gap_of, gap_of_version, sampled
from mmrl.token_columns import POLICY, REWARD
from mmrl.types import CreditedGroup, FloatArray, Rollout

CHECKED_SAMPLES, CHECKED_MEMBERS = 12, 3
"""Samples of the first batch that are computed one by one as well as packed, and how many of one prompt, which share
it in the packed row."""
WIDE_TOKENS = 384
"""Tokens, prompts included, of the samples that are computed in a wider type too; the first one may be longer."""
NOTABLE_RATIO = 1.05
"""Factor between probabilities of sampler and learner from which a run is told how to correct for it."""


class LogprobCheck:
    """Warns of a disagreement, or stops the run.

    Args:
        precision: ``float32`` or ``bfloat16``; decides how far two computations may be apart at least.
        on_mismatch: The action when they are further apart than that.
        event: Called with a kind and fields for the measured rounding, and for each disagreement.
    """

    def __init__(self, precision: str, on_mismatch: Literal["stop", "warn"], *, event: Callable[..., None]) -> None:
        self._precision, self._on_mismatch, self._event = precision, on_mismatch, event
        self._limits = LIMITS[precision]

    def check_first(
        self, rollouts: Sequence[Rollout], engine: Engine, network: str = POLICY, version: int | None = None
    ) -> bool:
        """On the first batch, before any update: packed against one by one, and sampler against learner.

        Args:
            rollouts: All that the step has sampled, kept or not, or that the dataset gives: of these the sampler has
                said nothing.
            network: The one that is trained; of a reward model scores are compared.
            version: As of ``check_step``.

        Returns:
            False if the batch tells nothing yet: scores of a new head are all 0.

        Raises:
            NumericsError: They are too far apart.
        """
        if not (chosen := _chosen(list(map(_as_sampled, rollouts)))):  # the environment failed at once
            return True
        if network == REWARD:
            return self._judge_scores(chosen, engine)
        first = _computed(chosen, engine, version)
        self._judge_learner(first)
        if first.wide or self._precision != "float32":
            self._tell(first)
        if (gap := first.gap) is not None:
            self._judge_widening("sampler and learner disagree before the first update", gap, first.sides)
        return True

    def _judge_scores(self, chosen: Sequence[Rollout], engine: Engine) -> bool:
        """Judge a reward model's scores, packed against one by one; False if all are 0."""
        with engine.learning() as learner:
            packed_B = learner.network(REWARD).final_values(chosen)
        with engine.learning() as learner:
            single_B = np.concatenate([learner.network(REWARD).final_values([sample]) for sample in chosen])
        scale = float(np.abs(single_B).max(initial=0.0))
        if not scale and not packed_B.any():
            return False
        scale = max(scale, 1.0)
        limits = LIMITS[self._precision]
        limits = replace(limits, mean_stop=max(limits.mean_stop, limits.noise_stop))
        gap = Gap.between([single_B / scale], [packed_B / scale])
        self._judge("packed and one-by-one scores disagree", gap, limits, unit="of the largest score")
        return True

    def check_step(self, step: int, groups: Sequence[CreditedGroup], version: int | None = None) -> dict[str, float]:
        """Metrics of sampler against learner on the sampled groups that were trained on; none without any.

        Rollouts from a view are left out: the learner has computed them given the prompt itself. So are demonstrations,
        and rollouts of earlier steps.

        Args:
            version: That of the learner's weights at the step's begin. Tokens of other versions are left out: there the
                two are meant to differ. None: all tokens are of this version.

        Raises:
            NumericsError: They are too far apart.
        """
        if not (trained := [group for group in groups if not group.scored.is_given]):
            return {}
        pairs = [pair for group in trained for pair in zip(group.scored.rollouts, group.logprobs, strict=True)]
        pairs = [(rollout, learner) for rollout, learner in pairs if rollout.is_own and not rollout.view]
        rollouts = [rollout for rollout, _ in pairs]
        gap = gap_of_version(rollouts, version, sampled(rollouts), [learner for _, learner in pairs])
        if gap is None:
            return {}
        self._judge(f"sampler and learner disagree in step {step}", gap, self._limits)
        return metrics.mismatch_metrics(gap)

    def check_version(self, step: int, rollouts: Sequence[Rollout], version: int, *, is_whole: bool) -> None:
        """See that weights of this version have sampled a step.

        Args:
            is_whole: True if all of its tokens are of this version; else none is of a later one.

        Raises:
            NumericsError: Other weights have.
        """
        found = {int(each) for rollout in rollouts for each in np.unique(rollout.version_of_token[rollout.mask])}
        wrong = sorted(found - {version} if is_whole else {each for each in found if each > version})
        if wrong:
            versions = ", ".join(map(str, wrong))
            told = f"step {step} was to be sampled with version {version} of the weights, and has tokens of {versions}"
            raise NumericsError(told, where="the sampler", remedy="report this: a sampler has taken other weights")

    def check_probe(self, step: int, found: Compared) -> None:
        """Judge sampler against learner on the probe's tokens, for each rank that samples.

        Args:
            found: The answers under the version that has sampled the step's newest tokens.

        Raises:
            NumericsError: They are too far apart, or a sampler does not see its images.
        """
        of = f"on the probe of version {found.version} of the weights, which sampled step {step}"
        for rank, gap in enumerate(found.gaps):
            self._judge_widening(f"sampler and learner disagree {of} (rank {rank} of those that sample)", gap)
        for rank, sights in enumerate(found.sights):
            for sight in (each for each in sights if not each.sees):
                told = f"its log-probs are {sight.off:.1e} nats from the learner's movement of {sight.movement:.1e}"
                self._report(f"rank {rank} of the sampler does not see images {of}: with another image, {told}", "stop")

    def _judge_learner(self, first: _First) -> None:
        """Judge the learner by a wider type, its packing by its rounding, and set the limits that follow from that."""
        limits = LIMITS[self._precision]
        if first.wide:
            bound = limits.noise_stop
            bounds = replace(limits, mean_warn=bound, mean_stop=bound, p99_stop=inf, max_stop=inf)
            self._judge(f"the learner and plain transformers in {WIDER[self._precision]} disagree", first.noise, bounds)
            packing = self._limits = limits.widened(first.noise)
        else:  # the gap of packing is then the only measure of the rounding, and not told from it
            packing = replace(limits, mean_stop=max(limits.mean_stop, limits.noise_stop))
            self._limits = limits.widened(first.noise)
        self._judge("packed and one-by-one log-probs disagree", first.packing, packing)

    def _judge_widening(self, what: str, gap: Gap, sides: str = "") -> None:
        """Judge sampler and learner; later they have other tokens, and a gap that is sound now stays so."""
        if self._judge(what, gap, self._limits, sides) != "stop":
            self._limits = self._limits.widened(gap)

    def _tell(self, first: _First) -> None:
        """Say how much the run's type rounds away, and what follows from it."""
        noise, wider = first.noise, WIDER[self._precision]
        against = (
            f"plain transformers in {wider}"
            if first.wide
            else f"its own rows one by one ({wider} has no room here, or no kernel)"
        )
        told = [f"the learner is {noise.abs_mean:.1e} nats from {against} on average, {noise.abs_max:.1e} at most"]
        fields = {"noise": noise.abs_mean}
        if (gap := first.gap) is not None:
            fields["gap"] = gap.abs_mean
            told.append(f"sampler and learner are {gap.abs_mean:.1e} apart; {self._limits.mean_stop:.1e} would stop")
            if gap.ratio > NOTABLE_RATIO:
                told.append(
                    f"their probabilities differ by a factor of {gap.ratio:.2f} on average: an algorithm's "
                    "`correction` weighs tokens by it"
                )
        self._event("numerics", message=f"{self._precision}: {'; '.join(told)}", **fields)

    def _judge(self, what: str, gap: Gap, limits: Limits, sides: str = "", unit: str = "nats") -> str:
        verdict = gap.verdict(limits)
        if verdict == "ok":
            return verdict
        found = f"{what}: mean {gap.abs_mean:.2e}, max {gap.abs_max:.2e} {unit} in {self._precision}{sides}"
        self._report(found, verdict, f"{limits.told(unit)}, for a model of this rounding")
        return verdict

    def _report(self, found: str, verdict: str, possible: str = "") -> None:
        """Tell of a disagreement; stop the run if it is one to stop at."""
        self._event("mismatch", message=found, verdict=verdict)
        if verdict == "stop" and self._on_mismatch == "stop":
            raise NumericsError(
                found,
                where="the same tokens and the same weights, computed twice",
                possible=possible,
                remedy="check sampler.engine and learner.deepspeed for lossy settings; "
                "trainer.on_mismatch: warn trains all the same",
            )


@dataclass(frozen=True, slots=True)
class _First:
    """Log-probs of the first samples.

    Attributes:
        packed: The learner's, several samples in a row.
        single: The learner's, one by one.
        wide: Log-probs of plain transformers in a wider type, of the first samples; empty if the device cannot.
        version: That of the learner's weights; None if all samples are of it.
    """

    samples: Sequence[Rollout]
    packed: Sequence[FloatArray]
    single: Sequence[FloatArray]
    wide: Sequence[FloatArray]
    version: int | None

    @property
    def packing(self) -> Gap:
        return gap_of(self.samples, self.single, self.packed)

    @property
    def noise(self) -> Gap:
        """The learner's rounding: its gap to the wider type, or between two ways to compute."""
        few = len(self.wide)
        return gap_of(self.samples[:few], self.wide, self.single[:few]) if few else self.packing

    @property
    def gap(self) -> Gap | None:
        """The gap between sampler and learner; None if the sampler has said nothing of them under these weights."""
        if any(rollout.is_given for rollout in self.samples):
            return None
        return gap_of_version(self.samples, self.version, sampled(self.samples), self.packed)

    @property
    def sides(self) -> str:
        """Which of the two is off, as far as that is known."""
        if not self.wide:
            return ""
        few = self.samples[: len(self.wide)]
        gap = gap_of_version(few, self.version, self.wide, sampled(few))
        if gap is None:
            return ""
        sampler = gap.abs_mean
        return f"; in a wider type, the sampler is off by {sampler:.2e} and the learner by {self.noise.abs_mean:.2e}"


def _as_sampled(rollout: Rollout) -> Rollout:
    """The rollout with the prompt that the sampler has read: a view, where it was sampled from one."""
    return replace(rollout, prompt=rollout.prompt.views[rollout.view], view="") if rollout.view else rollout


def _chosen(samples: Sequence[Rollout]) -> list[Rollout]:
    """Samples from all over the batch, some of one prompt; none if nothing was sampled."""
    samples = [sample for sample in samples if len(sample.token_ids)]
    members = [unit.indices[:CHECKED_MEMBERS] for unit in units_of([Item.of(sample) for sample in samples])]
    count = max(CHECKED_SAMPLES // max(map(len, members), default=1), 1)
    chosen = members[:: max(len(members) // count, 1)][:count]
    return [samples[index] for indices in chosen for index in indices]


def _computed(samples: Sequence[Rollout], engine: Engine, version: int | None) -> _First:
    """Each computation takes the learner anew, so that what one keeps of images does not serve the other."""
    with engine.learning() as learner:
        packed = learner.network("policy").score(samples)
    with engine.learning() as learner:
        single = learner.network("policy").score(samples, way="single")
    lengths = np.cumsum([sample.num_tokens for sample in samples])
    few = samples[: max(int(np.searchsorted(lengths, WIDE_TOKENS, side="right")), 1)]
    with engine.learning() as learner:
        wide = learner.network("policy").score(few, way="wide")
    return _First(samples, packed, single, wide, version)
