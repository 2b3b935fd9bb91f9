"""Rows on every rank that samples: each scores the same tokens, also after another image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmrl.ops.parity import Gap
from mmrl.step.audit.agreement import few, told
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import Answered, Probed, mean_abs, pair_places
from mmrl.step.audit.sight import FINDS, FOLLOWS, NOISE
from mmrl.step.token_gap import gap_of
from mmrl.types import FloatArray, Sample


@dataclass(frozen=True, slots=True)
class Sight:
    """The movement of the log-probs of the same tokens between two images, in nats a token.

    Attributes:
        name: The prompt whose completion it is.
        movement: In the learner.
        off: The distance of a sampler's movement from it.
        bound: The most of a sampler that sees.
    """

    name: str
    movement: float
    off: float
    bound: float

    @property
    def sees(self) -> bool:
        """True if the sampler moves as the learner does."""
        return self.off <= self.bound


@dataclass(frozen=True, slots=True)
class Compared:
    """Sampler and learner on the probe's tokens, under one version of the weights.

    Attributes:
        gaps: The gap of each rank that samples.
        sights: For each of these ranks, its sight of each image in place of another.
    """

    version: int
    gaps: Sequence[Gap]
    sights: Sequence[Sequence[Sight]]


def rank_rows(probed: Probed, temperature: float) -> Iterator[ProbeRow]:
    """A row for the gap between sampler and learner, and one for each image in place of another, of the worst rank."""
    with probed.engine.sampling() as sampler:
        # Not with the experts that were chosen when they were sampled: those after another image have none.
        of_sampler = sampler.score([Sample(e.sample.prompt, e.sample.segments) for e in probed.samples], temperature)
    found = compare(0, probed.samples, probed.packed, of_sampler)
    rank, gap = max(enumerate(found.gaps), key=lambda each: each[1].abs_mean)
    finds = "weights that did not arrive at a rank, a rank that computes otherwise"
    of = f"rank {rank} of {len(found.gaps)} that sample is the farthest: {told(gap)} from the learner"
    yield ProbeRow.at_most("sampler = learner, every rank", gap.abs_mean, few(probed.limits), of, finds)
    for sights in zip(*found.sights, strict=True):
        rank, sight = max(enumerate(sights), key=lambda each: each[1].off / (each[1].bound or 1.0))
        of = f"the movement of rank {rank} is {sight.off:.1e} nats from the learner's, which is {sight.movement:.1e}"
        finds = f"on a rank that samples: {FINDS[sight.name]}"
        yield ProbeRow.at_most(f"sight of every rank, {sight.name}", sight.off, sight.bound, of, finds)


def compare(
    version: int,
    answered: Sequence[Answered],
    of_learner: Sequence[FloatArray],
    of_sampler: Sequence[Sequence[FloatArray]],
) -> Compared:
    """The gaps and the sights of each rank that samples."""
    samples = [each.sample for each in answered]
    gaps = [gap_of(samples, of_rank, of_learner) for of_rank in of_sampler]
    return Compared(version, gaps, [list(_sights(answered, of_learner, of_rank)) for of_rank in of_sampler])


def _sights(
    answered: Sequence[Answered], of_learner: Sequence[FloatArray], of_rank: Sequence[FloatArray]
) -> Iterator[Sight]:
    """As the audit's rows on the learner's sight, with one rank's sampler in its place."""
    texts = [place for place, each in enumerate(answered) if not each.prompt.has_images]
    samples = [answered[place].sample for place in texts]
    noise = gap_of(samples, [of_rank[i] for i in texts], [of_learner[i] for i in texts]).abs_mean
    for name, own, other in pair_places(answered):
        moved, sampled_moved = (values[own] - values[other] for values in (of_learner, of_rank))
        movement = mean_abs(moved)
        yield Sight(name, movement, mean_abs(sampled_moved - moved), max(FOLLOWS * movement, NOISE * noise))
