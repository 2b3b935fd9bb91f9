"""The probe of weight syncs: some tokens that sampler and learner score under every version of the weights.

A step whose tokens were sampled under older weights has nothing by which sampler and learner could be compared, since
there they are meant to differ. So the same tokens are scored by the learner when it publishes a version, and by every
rank that samples when it has that version. Some of them stand after another image than the one that they were sampled
from: a sampler that does not see images cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import Engine, Learner, PromptEncoder, Sampler
from mmrl.ops.metrics import probe_metrics
from mmrl.step.audit.probe_prompts import PROMPT_TOKENS, fitting
from mmrl.step.audit.probed import Answered, crossed, sampled
from mmrl.step.audit.ranks import Compared, compare
from mmrl.token_columns import POLICY
from mmrl.types import FloatArray, Sample, Segment

SAMPLES, TOKENS = 8, 16
"""Completions of a probe, at least, and most tokens of each."""


class SyncProbe:
    """Keeps the answers of both sides by version until they are compared.

    Its two questions may be asked in two threads, and in either order. It is empty until ``sample`` is called.
    """

    def __init__(self) -> None:
        self._answered: Sequence[Answered] = ()
        self._samples: Sequence[Sample] = ()
        self._temperature, self._newest = 1.0, 0
        self._of_learner = dict[int, Sequence[FloatArray]]()
        self._of_sampler = dict[int, Sequence[Sequence[FloatArray]]]()

    @classmethod
    def of(cls, config: Config) -> Self | None:
        """One for a run whose sampler may be behind; None for others, which compare every token."""
        return cls() if config.trainer.staleness or config.sampler.partial is not None else None

    def sample(self, engine: Engine, encoder: PromptEncoder, config: Config) -> None:
        """Take completions of the audit's prompts, which are sampled now; none if none of them fits the run.

        The images of these prompts have to stay in the run's folder.
        """
        facts = engine.describe()
        if "model_type" not in facts:
            return
        most, max_images = config.data.max_prompt_tokens, int(facts.get("max_images", 0))
        prompts = fitting(encoder, max_tokens=most, max_images=max_images, total_tokens=PROMPT_TOKENS).prompts
        few = -(-SAMPLES // max(len(prompts), 1))
        prompts = [replace(each, members=max(each.members, few)) for each in prompts]
        self._temperature = config.sampler.temperature
        found = sampled(engine, encoder, prompts, config, TOKENS, {}) if prompts else []
        self._take([each for each in found if len(each.sample.segments) == 1])  # no second turns

    def state(self) -> list[dict[str, Any]]:
        """The completions, as JSON can hold them."""
        own = (each for each in self._answered if not each.is_crossed)
        return [
            {"prompt": each.source, "member": each.member, "token_ids": each.sample.token_ids.tolist()} for each in own
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take over completions of an earlier attempt in place of those that were sampled, as far as their prompts
        still fit the run."""
        prompts = {each.source: each.prompt for each in self._answered if not each.is_crossed}
        found = list[Answered]()
        for record in (each for each in state if each["prompt"] in prompts):
            prompt, ids = prompts[record["prompt"]], np.array(record["token_ids"], np.int32)
            sample = Sample(prompt.encoded, (Segment(ids, True, np.zeros(len(ids), np.float32)),))
            found.append(Answered(prompt, record["prompt"], int(record["member"]), sample, is_sampled=True))
        if found:
            self._take(found)

    def _take(self, answered: Sequence[Answered]) -> None:
        self._answered = crossed(answered)
        # Experts that were chosen under one version say nothing about the next one.
        self._samples = [Sample(each.sample.prompt, each.sample.segments) for each in self._answered]

    def ask_learner(self, learner: Learner, version: int) -> None:
        """Score the tokens with the learner's weights, which are of this version."""
        self._newest = version
        if self._samples and version not in self._of_learner:
            self._of_learner[version] = learner.network(POLICY).score(self._samples)

    def ask_sampler(self, sampler: Sampler, version: int | None) -> dict[str, float]:
        """Score the tokens on every rank that samples; no request may be left. Returns metrics of both sides, if the
        learner was asked before.

        Args:
            version: That of the sampler's weights; None is the one that the learner was last asked under.
        """
        if not self._samples:
            return {}
        version = self._newest if version is None else version
        found = self._of_sampler[version] = sampler.score(self._samples, self._temperature)
        of_learner = self._of_learner.get(version)
        if of_learner is None:
            return {}
        return probe_metrics(compare(version, self._answered, of_learner, found).gaps)

    def compared(self, version: int) -> Compared | None:
        """Both sides' answers of a version; None if one is missing. Those of earlier versions are dropped."""
        for known in (self._of_learner, self._of_sampler):
            for old in [each for each in list(known) if each < version]:
                del known[old]
        of_learner, of_sampler = self._of_learner.get(version), self._of_sampler.get(version)
        if of_learner is None or of_sampler is None:
            return None
        return compare(version, self._answered, of_learner, of_sampler)
