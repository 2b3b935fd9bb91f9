"""Samples from the probes' prompts, and their log-probs in the sampler, the learner and plain transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mmrl.config.sections import Config
from mmrl.data.order import request_seed
from mmrl.engine_api import Engine, PromptEncoder, SamplingRequest, Way
from mmrl.errors import DataError
from mmrl.ops.parity import LIMITS, WIDER, Gap, Limits
from mmrl.step.audit.probe_prompts import IMAGE, MOVED, OTHER, PROMPT_TOKENS, ProbePrompt, fitting
from mmrl.step.audit.second_turn import second_turns
from mmrl.step.token_gap import gap_of
from mmrl.step.token_gap import sampled as told_by_sampler
from mmrl.token_columns import POLICY
from mmrl.types import FloatArray, Sample

NEW_TOKENS = 6
"""Most tokens of a completion."""
CROSSED = ((IMAGE, OTHER), (IMAGE, MOVED))
"""Prompts, and those whose first completion each gets besides its own; so it is shared in the packed row."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A completion after a prompt.

    Attributes:
        prompt: The prompt.
        source: The name of the prompt that it was sampled from.
        member: Its place among those that were sampled from there.
        is_sampled: True if the sampler has told its log-probs after this prompt.
    """

    prompt: ProbePrompt
    source: str
    member: int
    sample: Sample
    is_sampled: bool

    @property
    def is_crossed(self) -> bool:
        """True if it was sampled from another prompt."""
        return self.source != self.prompt.name


@dataclass(frozen=True)
class Probed:
    """The probes' samples with their log-probs, (T_i,) of each.

    Attributes:
        precision: The run's.
        packed: The learner's, samples in one row and prompts shared.
        alone: Plain transformers' in a wider type, or the learner's one by one where a device has no room for that.
        plain: The wider type; empty if ``alone`` is the learner's.
        left_out: Why prompts were not asked, by their names.
        engine: Asked again where a row needs it.
    """

    precision: str
    samples: Sequence[Answered]
    packed: Sequence[FloatArray]
    alone: Sequence[FloatArray]
    plain: str
    left_out: Mapping[str, str]
    engine: Engine = field(repr=False)

    @property
    def prompts(self) -> list[ProbePrompt]:
        """The prompts, each once."""
        return list({each.prompt.name: each.prompt for each in self.samples}.values())

    @property
    def limits(self) -> Limits:
        """Limits of this network: its rounding is that of the prompts without images, which most faults leave right."""
        texts = [place for place, each in enumerate(self.samples) if not each.prompt.has_images]
        return LIMITS[self.precision].widened(self.gap(texts or range(len(self.samples))))

    @property
    def noise(self) -> float:
        """Mean rounding of the learner's log-probs, without images, in nats."""
        texts = [place for place, each in enumerate(self.samples) if not each.prompt.has_images]
        return self.gap(texts or range(len(self.samples))).abs_mean

    @property
    def least_noise(self) -> float:
        """The noise of the prompt without images that has the least."""
        texts = [self.of(prompt.name) for prompt in self.prompts if not prompt.has_images]
        return min((self.gap(places).abs_mean for places in texts), default=self.noise)

    def gap(self, places: Sequence[int] | range) -> Gap:
        """The gap between the learner, packed, and ``alone``."""
        samples = [self._samples[i] for i in places]
        return gap_of(samples, [self.alone[i] for i in places], [self.packed[i] for i in places])

    def sampler_gap(self, places: Sequence[int]) -> Gap:
        """The gap between the sampler and the learner, of samples that the sampler has told of."""
        samples = [self._samples[i] for i in places]
        return gap_of(samples, told_by_sampler(samples), [self.packed[i] for i in places])

    def of(self, prompt: str, *, sampled: bool = False) -> list[int]:
        """Places of the completions after a prompt; if ``sampled``, of those that the sampler has told of."""
        return [i for i, each in enumerate(self.samples) if each.prompt.name == prompt and each.is_sampled >= sampled]

    def place(self, prompt: str, source: str) -> int | None:
        """The place of the first completion from ``source`` after a prompt."""
        return place_of(self.samples, prompt, source)

    def told(self, place: int) -> FloatArray:
        """(T,) log-probs that the sampler has told of a completion."""
        return told_by_sampler([self._samples[place]])[0]

    def one_by_one(self) -> list[FloatArray]:
        """The learner's log-probs of all samples, one by one."""
        return score(self.engine, self._samples, "single")

    @property
    def _samples(self) -> list[Sample]:
        return [each.sample for each in self.samples]


def place_of(samples: Sequence[Answered], prompt: str, source: str) -> int | None:
    """The place of the first completion from ``source`` after a prompt."""
    sought = (prompt, source, 0)
    return next((i for i, e in enumerate(samples) if (e.prompt.name, e.source, e.member) == sought), None)


def pair_places(samples: Sequence[Answered]) -> Iterator[tuple[str, int, int]]:
    """The name of each prompt whose completion stands after another image too, and both places of that one."""
    for name, source in CROSSED:
        own, other = place_of(samples, source, source), place_of(samples, name, source)
        if own is not None and other is not None:
            yield source, own, other


def probed(
    engine: Engine,
    encoder: PromptEncoder,
    config: Config,
    *,
    new_tokens: int = NEW_TOKENS,
    total_tokens: float = PROMPT_TOKENS,
) -> Probed | None:
    """Sample from the prompts that fit, and score; without samples if none fits.

    An engine that describes no model has none to compare with: None. One that samples nothing is given completions.

    Args:
        new_tokens: Most tokens of a completion.
        total_tokens: As of ``fitting``.
    """
    facts = engine.describe()
    if "model_type" not in facts:
        return None
    most, max_images = config.data.max_prompt_tokens, int(facts.get("max_images", 0))
    fit = fitting(encoder, max_tokens=most, max_images=max_images, total_tokens=total_tokens)
    left_out = dict(fit.left_out)
    if not fit.prompts:
        samples = list[Answered]()
    elif facts.get("sampler") is None:
        samples = given(encoder, fit.prompts, left_out)
    else:
        samples = sampled(engine, encoder, fit.prompts, config, new_tokens, left_out)
    samples = crossed(samples)
    every = [each.sample for each in samples]
    packed, alone = score(engine, every, "packed"), score(engine, every, "wide")
    plain = f"plain transformers in {WIDER[engine.precision]}" if alone else ""
    alone = alone or score(engine, every, "single")
    return Probed(engine.precision, samples, packed, alone, plain, left_out, engine)


def sampled(
    engine: Engine,
    encoder: PromptEncoder,
    prompts: Sequence[ProbePrompt],
    config: Config,
    new_tokens: int,
    left_out: dict[str, str],
) -> list[Answered]:
    """The sampler's completions, at the run's temperature and from seeds of the probes' names; and second turns.

    Args:
        left_out: Takes why second turns are not asked, by their names.
    """
    tokens = min(new_tokens, config.sampler.max_new_tokens)
    requests = [
        SamplingRequest(
            each.encoded, each.members, config.sampler.temperature, tokens, request_seed(0, 0, each.name, 0)
        )
        for each in prompts
    ]
    with engine.sampling() as sampler:
        groups = dict(sampler.generate(requests))
        found = [
            Answered(prompts[index], prompts[index].name, rollout.index, rollout, is_sampled=True)
            for index in sorted(groups)
            for rollout in groups[index].rollouts
            if len(rollout.token_ids)
        ]
        firsts = [(each.prompt, each.sample) for each in found if not each.member]
        later = list(second_turns(encoder, config, firsts, tokens, left_out))
        after = dict(sampler.generate([request for _, request in later]))
        sampler.forget_prompts()  # a run's prompts may begin as these do, and are computed as without an audit
    for index, (prompt, _) in enumerate(later):
        found += [Answered(prompt, prompt.name, 0, rollout, is_sampled=True) for rollout in after[index].rollouts]
    return found


def given(encoder: PromptEncoder, prompts: Sequence[ProbePrompt], left_out: dict[str, str]) -> list[Answered]:
    """Completions that are given, for a run that samples none.

    Args:
        left_out: Takes why prompts have none, by their names.
    """
    found = list[Answered]()
    for prompt in prompts:
        try:
            sample = encoder.demonstrate(prompt.encoded)
        except DataError as error:  # a template whose thoughts it does not carry
            left_out[prompt.name] = error.what
            continue
        found += [Answered(prompt, prompt.name, i, sample, is_sampled=False) for i in range(prompt.members)]
    return found


def crossed(samples: Sequence[Answered]) -> list[Answered]:
    """The samples, and completions after another image than the one that they were sampled from."""
    firsts = {each.source: each for each in samples if not each.member}
    found = list(samples)
    for name, source in CROSSED:
        if name in firsts and source in firsts:
            prompt, other = firsts[name].prompt, firsts[source]
            sample = Sample(prompt.encoded, tuple(replace(s, weight_version=None) for s in other.sample.segments))
            found.append(Answered(prompt, source, 0, sample, is_sampled=False))
    return found


def score(engine: Engine, samples: Sequence[Sample], way: Way) -> list[FloatArray]:
    """The policy's log-probs; each call takes the learner anew, so that what one keeps of images serves no other."""
    if not samples:
        return []
    with engine.learning() as learner:
        return learner.network(POLICY).score(samples, way=way)


def mean_abs(values: FloatArray) -> float:
    """Mean size of the values; 0 of none."""
    return float(np.abs(values).mean()) if len(values) else 0.0
