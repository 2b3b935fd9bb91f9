"""Groups that nobody sampled: a row's demonstration, or its candidates with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmrl.config.sections import Config
from mmrl.data.bad_rows import TOO_LONG
from mmrl.engine_api import PromptEncoder
from mmrl.errors import DataError, UselessRow, plural
from mmrl.interfaces import Needs
from mmrl.ops.credit import best_and_worst
from mmrl.rollout.batch import SampledStep
from mmrl.step.source import Draw, Source
from mmrl.system.clock import Clock
from mmrl.types import GIVEN, SCORE, Candidate, EncodedPrompt, Prompt, Rollout, RolloutGroup, Sample, ScoredGroup

EQUAL, TIES = "data/equal_pairs", "data/ties"
"""Counts of rows that are left out."""
_LARGEST = float(np.finfo(np.float32).max)
"""The largest score: a loss takes scores as float32."""
_COLUMNS = "name the columns of the answers (chosen and rejected, or candidates and scores), or mend or remove the row"


class Given(Source):
    """The dataset's own completions: each demonstration or document is a group of one, without a reward."""

    samples, texts = False, "demonstrations"

    def make(self, prompt: Prompt) -> ScoredGroup:
        return self.group(self._encoder.encode(prompt), self._algorithm.needs(), self._encoder)

    def gather(self, step: int, draw: Draw, clock: Clock, version: int | None = None) -> SampledStep:
        with clock.phase("prompts"):
            drawn = draw(self._config.trainer.prompts_per_step)
            groups = [self._placed(group, epoch, place, step) for place, (epoch, group) in enumerate(drawn)]
        return SampledStep(step, GIVEN, groups, self._views.metrics(step), learned=groups)

    def _placed(self, group: ScoredGroup, epoch: int, place: int, step: int) -> ScoredGroup:
        """The group in its place of the step, with the views of its prompt."""
        prompt = self._views(replace(group.group.prompt, epoch=epoch), step)
        rollouts = tuple(replace(rollout, prompt=prompt) for rollout in group.rollouts)
        return replace(group, group=RolloutGroup(prompt, rollouts), place=(0, place))

    @classmethod
    def check_row(cls, prompt: Prompt, config: Config, needs: Needs, encoder: PromptEncoder) -> None:
        if not prompt.is_document:
            check_demonstration(prompt)

    @classmethod
    def evaluates_given(cls, config: Config) -> bool:
        return not config.rewards and config.environment is None

    @classmethod
    def group(cls, prompt: EncodedPrompt, needs: Needs, encoder: PromptEncoder) -> ScoredGroup:
        shown = encoder.demonstrate(prompt, all_turns=needs.all_turns)
        row = prompt.prompt
        text = row.messages[0].content if row.is_document else row.demonstration or ""
        return _group(shown.prompt, [shown], [text])


class Comparisons(Given):
    """The dataset's own candidates: those of a row are a group, whose rewards are their scores."""

    compares, texts, left_out = True, "comparisons", (EQUAL, TIES, TOO_LONG)

    @classmethod
    def check_row(cls, prompt: Prompt, config: Config, needs: Needs, encoder: PromptEncoder) -> None:
        candidates = _scored_candidates(prompt)
        if len(candidates) < needs.min_group_size:
            raise DataError(
                f"The row has {plural(len(candidates), 'candidate')}, and {config.algorithm.name!r} compares "
                f"{needs.min_group_size}",
                where=prompt.id,
                remedy=_COLUMNS,
            )
        given = encoder.given(encoder.rendered(prompt), closed=needs.last_state)
        check_length("a candidate", given, prompt, config)
        if needs.min_group_size > 1:
            scores = np.array([candidate.score for candidate in candidates], np.float64)
            best_M, worst_M = best_and_worst(scores, np.zeros(len(scores), np.int64), np.ones(len(scores), np.bool_))
            if not len(best_M):
                raise UselessRow("all candidates have the same score", counted=TIES, where=prompt.id)
            if np.array_equal(given[best_M[0]].token_ids, given[worst_M[0]].token_ids):
                raise UselessRow("the best and the worst candidate are equal", counted=EQUAL, where=prompt.id)

    @classmethod
    def group(cls, prompt: EncodedPrompt, needs: Needs, encoder: PromptEncoder) -> ScoredGroup:
        candidates = _scored_candidates(prompt.prompt)
        scores = [candidate.score or 0.0 for candidate in candidates]
        samples = encoder.given(prompt, closed=needs.last_state)
        return _group(samples[0].prompt, samples, [candidate.text for candidate in candidates], scores)


def check_demonstration(prompt: Prompt) -> None:
    """See that a row has a completion to learn from.

    Raises:
        DataError: It has none, or an empty one.
    """
    if not (prompt.demonstration or "").strip():
        raise DataError(
            f"The row has {'no' if prompt.demonstration is None else 'an empty'} demonstration to learn from",
            where=prompt.id,
            remedy="name the column that holds the completions, or choose an algorithm that samples",
        )


def check_length(what: str, given: Sequence[Sample], prompt: Prompt, config: Config) -> None:
    """See that completions of a row are no longer than one that is sampled.

    Args:
        what: The words for one of them.

    Raises:
        DataError: One is, and ``data.overlong`` is fail.
        UselessRow: One is; the row is left out.
    """
    longest, most = max(len(sample.token_ids) for sample in given), config.sampler.max_new_tokens
    if longest > most:
        what = f"{what} is longer than sampler.max_new_tokens = {most}"
        if config.data.overlong == "fail":
            remedy = "raise sampler.max_new_tokens, or set data.overlong to drop"
            raise DataError(f"{what}: {plural(longest, 'token')}", where=prompt.id, remedy=remedy)
        raise UselessRow(what, counted=TOO_LONG, where=prompt.id)


def _scored_candidates(prompt: Prompt) -> tuple[Candidate, ...]:
    """The row's candidates, each with a score and without images."""
    if not prompt.candidates:
        raise DataError("The row has no candidates to compare", where=prompt.id, remedy=_COLUMNS)
    for place, candidate in enumerate(prompt.candidates):
        if candidate.images:
            raise DataError(
                f"candidate {place} has images of its own",
                where=prompt.id,
                possible="answers under one prompt and one set of images",
                remedy="mend or remove the row",
            )
        if candidate.score is None or not abs(candidate.score) <= _LARGEST:
            what = "no score" if candidate.score is None else f"the score {candidate.score}"
            raise DataError(f"candidate {place} has {what}", where=prompt.id, remedy=_COLUMNS)
    return prompt.candidates


def _group(
    prompt: EncodedPrompt, samples: Sequence[Sample], texts: Sequence[str], scores: Sequence[float] | None = None
) -> ScoredGroup:
    """Completions of the dataset as a group; the row's other columns, which no reward reads, stay there."""
    row = replace(prompt.prompt, demonstration=None, candidates=(), columns={})
    prompt = replace(prompt, prompt=row)
    rollouts = tuple(
        Rollout(prompt, sample.segments, place, text, "stop", GIVEN)
        for place, (sample, text) in enumerate(zip(samples, texts, strict=True))
    )
    rewards = np.array([0.0] * len(samples) if scores is None else scores, np.float64)
    components = {} if scores is None else {SCORE: rewards}
    return ScoredGroup(RolloutGroup(prompt, rollouts), rewards, np.ones(len(samples), np.bool_), components)
