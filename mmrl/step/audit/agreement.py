"""Rows on agreement: the learner with plain transformers, and the sampler with the learner, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from mmrl.ops.parity import LIMITS, Gap, Limits
from mmrl.step.audit.probe_prompts import ProbePrompt
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import Probed

FEW = 2.0
"""The mean over a prompt's few tokens may be this many times the bound of one over many, up to a quantile's."""
FAR = {"float32": 30.0, "bfloat16": inf}
"""Gaps with images may be this many times those without; in bfloat16, one token at another expert is far off."""
SHARED = "a shared prompt, or other samples in the row"


def agreement_rows(probed: Probed) -> Iterator[ProbeRow]:
    """A row for each prompt and pair of computations."""
    yield from _learner_rows(probed)
    told_of = {prompt.name: probed.of(prompt.name, sampled=True) for prompt in probed.prompts}
    texts = [i for prompt in probed.prompts if not prompt.has_images for i in told_of[prompt.name]]
    noise = max(probed.noise, probed.sampler_gap(texts).abs_mean)
    for prompt in probed.prompts:
        if not (places := told_of[prompt.name]):
            continue
        gap = probed.sampler_gap(places)
        bound = sharp(probed, noise) if prompt.has_images else few(probed.limits)
        found = f"sampler and learner are {told(gap)} apart"
        finds = f"in the sampler: {prompt.finds}; weights that did not arrive"
        yield ProbeRow.at_most(f"sampler = learner, {prompt.name}", gap.abs_mean, bound, found, finds)


def few(limits: Limits) -> float:
    """The bound of a mean over the few tokens of a prompt, by the limits alone, in nats."""
    return min(FEW * limits.mean_stop, limits.p99_stop)


def sharp(probed: Probed, noise: float) -> float:
    """The bound of a mean over the few tokens of a prompt, in nats.

    A fault of images or positions may be smaller than the limits of a type, and far above the noise of a network.

    Args:
        noise: The gap of the same two computations, without images.
    """
    return min(few(probed.limits), max(LIMITS[probed.precision].mean_warn, FAR[probed.precision] * noise))


def _learner_rows(probed: Probed) -> Iterator[ProbeRow]:
    """The learner, packed, against the same samples alone.

    A leak in a packed row leaves its first sample right, so the prompt with the least noise is the measure. A network
    may also be sure of that prompt alone. So if a row is beyond, all are scored one by one, for each prompt's noise.
    """
    of = "learner = plain transformers" if probed.plain else "packed = one by one"
    prompts, places = probed.prompts, [probed.of(prompt.name) for prompt in probed.prompts]
    gaps, own = [probed.gap(each) for each in places], list[Gap]()
    noise = probed.least_noise if probed.plain else probed.noise
    bounds = [_bound(probed, prompt, noise) for prompt in prompts]
    if not all(gap.abs_mean <= bound for gap, bound in zip(gaps, bounds, strict=True)):
        single = replace(probed, packed=probed.one_by_one())
        own = [single.gap(each) for each in places]
        if probed.plain:
            bounds = [_bound(probed, p, single.noise, gap.abs_mean) for p, gap in zip(prompts, own, strict=True)]
    for place, (prompt, gap, bound) in enumerate(zip(prompts, gaps, bounds, strict=True)):
        found = f"the learner, packed, is {told(gap)} from {probed.plain or 'itself one by one'}"
        if not gap.abs_mean <= bound:
            off = own[place].abs_mean
            why = f"so {SHARED} change it" if off <= bound else "so it is not the packing"
            found += f"; one by one it is {off:.1e} off, {why}"
        yield ProbeRow.at_most(f"{of}, {prompt.name}", gap.abs_mean, bound, found, f"{prompt.finds}; {SHARED}")


def _bound(probed: Probed, prompt: ProbePrompt, noise: float, own: float = 0.0) -> float:
    """The bound of a prompt's gap between the learner and plain transformers, in nats.

    Args:
        noise: The gap of prompts without images.
        own: This prompt's, where nothing is packed; what makes it large is another fault if there are images.
    """
    limits = LIMITS[probed.precision]
    if prompt.has_images:
        return sharp(probed, noise)
    # No sound network has as much as the last of these.
    return min(max(limits.mean_warn, FAR[probed.precision] * max(noise, own)), limits.noise_stop)


def told(gap: Gap) -> str:
    """A gap in words."""
    return f"{gap.abs_mean:.1e} nats (at most {gap.abs_max:.1e})"
