"""The probe of weight syncs: some tokens that sampler and learner score under every version of the weights.

A step whose tokens were sampled under older weights has nothing by which sampler and learner could be compared, since
there they are meant to differ. So the same tokens are scored by the learner when it publishes a version, and by every
rank that samples when it has that version. Some of them stand after another image than the one that they were sampled
from: a sampler that does not see images cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmrl.config.sections import Config
from mmrl.engine_api import Engine, Learner, PromptEncoder, Sampler
from mmrl.step.audit.probe_prompts import PROMPT_TOKENS, fitting
from mmrl.step.audit.probed import Answered, crossed, sampled
from mmrl.step.audit.ranks import Compared, compare
from mmrl.token_columns import POLICY
from mmrl.types import FloatArray, Sample

SAMPLES, TOKENS = 8, 16
"""Completions of a probe, at least, and most tokens of each."""


class SyncProbe:
    """Keeps the answers of both sides by version until they are compared.

    Its two questions may be asked in two threads, and in either order.

    Args:
        answered: Completions, some of them after another image.
        temperature: That of sampling.
    """

    def __init__(self, answered: Sequence[Answered], temperature: float) -> None:
        # Experts that were chosen under one version say nothing about the next one.
        self._samples = [Sample(each.sample.prompt, each.sample.segments) for each in answered]
        self._answered, self._temperature = answered, temperature
        self._of_learner = dict[int, Sequence[FloatArray]]()
        self._of_sampler = dict[int, Sequence[Sequence[FloatArray]]]()

    def ask_learner(self, learner: Learner, version: int) -> None:
        """Score the tokens with the learner's weights, which are of this version."""
        if self._samples and version not in self._of_learner:
            self._of_learner[version] = learner.network(POLICY).score(self._samples)

    def ask_sampler(self, sampler: Sampler, version: int) -> None:
        """Score the tokens on every rank that samples, with weights of this version; no request may be left."""
        if self._samples:
            self._of_sampler[version] = sampler.score(self._samples, self._temperature)

    def compared(self, version: int) -> Compared | None:
        """Both sides' answers of a version; None if one is missing. Those of earlier versions are dropped."""
        for known in (self._of_learner, self._of_sampler):
            for old in [each for each in list(known) if each < version]:
                del known[old]
        of_learner, of_sampler = self._of_learner.get(version), self._of_sampler.get(version)
        if of_learner is None or of_sampler is None:
            return None
        return compare(version, self._answered, of_learner, of_sampler)


def sync_probe(engine: Engine, encoder: PromptEncoder, config: Config) -> SyncProbe:
    """A probe of the audit's prompts, whose completions are sampled now; empty if none of them fits the run.

    The images of these prompts have to stay in the run's folder.
    """
    facts = engine.describe()
    if "model_type" not in facts:
        return SyncProbe((), config.sampler.temperature)
    most, max_images = config.data.max_prompt_tokens, int(facts.get("max_images", 0))
    prompts = fitting(encoder, max_tokens=most, max_images=max_images, total_tokens=PROMPT_TOKENS).prompts
    few = -(-SAMPLES // max(len(prompts), 1))
    prompts = [replace(each, members=max(each.members, few)) for each in prompts]
    left_out: dict[str, str] = {}
    answered = crossed(sampled(engine, encoder, prompts, config, TOKENS, left_out)) if prompts else []
    return SyncProbe(answered, config.sampler.temperature)
