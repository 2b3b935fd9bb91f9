"""Each reward tried on made-up answers to a row, before engines start: a broken one need not wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from mmrl.data.prompts import PromptSource
from mmrl.errors import PluginError
from mmrl.rollout.rewards.failures import Failures
from mmrl.rollout.rewards.scorer import Scorer, Scoring
from mmrl.runs.made_up import completions
from mmrl.runs.reward_scale import scale_warnings
from mmrl.runs.setup import RunSetup
from mmrl.types import EncodedPrompt, RolloutGroup, ScoredGroup

PATIENCE_S = 20.0
"""Most seconds that engines wait for the rewards: one that loads a model or asks a slow server goes on beside them."""
_LOOKED_AT = 16
"""First rows that are looked at for one of each source."""


class RewardTrial:
    """Rewards at work on a right-looking and an empty answer to the first row of each source.

    Only what no answer excuses is an error: an exception (unless ``on_error`` skips it), a wrong type or number of
    values, or a value that is not finite. None, a low value, and a call that takes too long are not. With an
    environment nothing is tried, as rewards may look at episodes; and nothing where rows are measured when they are
    reached. Where a row has no reference answer and no reward gives a value, that is told.

    Attributes:
        warnings: Sentences on what was found so far.
    """

    def __init__(self, scorer: Scorer, setup: RunSetup) -> None:
        prompts = _first_prompts(setup) if setup.config.rewards and setup.config.environment is None else ()
        self._waiting: list[Scoring] = [
            scorer.submit(_made_up(prompt), Failures(bounded=False), needed=_needed(setup)) for prompt in prompts
        ]
        self.warnings: list[str] = []
        self._setup = setup

    def check(self, patience_s: float = PATIENCE_S) -> None:
        """Wait for the answers; later ones are left for the next call.

        Raises:
            PluginError: A reward is broken.
        """
        until = time.monotonic() + patience_s
        left = list[Scoring]()
        for scoring in self._waiting:
            try:
                with suppress(TimeoutError):
                    scored = scoring.result(max(0.0, until - time.monotonic()))
                    row = scored.group.prompt.id
                    self.warnings += [*_told(scored), *scale_warnings(self._setup, scored.rewards[scored.valid], row)]
                    continue
            except PluginError as error:
                tried = "tried on made-up answers to the first row of its source"
                error.where = "; ".join(filter(None, [tried, error.where]))
                raise
            left.append(scoring)
        self._waiting = left


def _first_prompts(setup: RunSetup) -> Iterator[EncodedPrompt]:
    """The first usable prompt of each source among the first rows that rewards score."""
    sources = [setup.training] if setup.step_source.samples else []
    sources += [] if _needed(setup) and sources else setup.evaluations.values()
    known = set[str]()
    for source in sources:
        for prompt in _usable(source, setup) if source.is_scanned else ():
            if prompt.prompt.source not in known:
                known.add(prompt.prompt.source)
                yield prompt


def _needed(setup: RunSetup) -> bool:
    """True if each row must have a reward; else rewards may be for held-out rows alone."""
    return not setup.step_source.samples or setup.algorithm.needs().rewards


def _usable(source: PromptSource, setup: RunSetup) -> Iterator[EncodedPrompt]:
    for place in range(min(len(source), _LOOKED_AT if len(source.sources) > 1 else 1)):
        if (prompt := source.attempt(place, setup.encoder.encode)) is not None:
            yield prompt


def _told(scored: ScoredGroup) -> list[str]:
    """A warning, if no reward can score answers to a row that has no reference answer."""
    row = scored.group.prompt.prompt
    if scored.valid.any() or row.answer not in (None, "", ()):
        return []
    what = f"rewards: none of them scores made-up answers to {row.id}, which has no reference answer"
    return [f"{what}; name the column of answers (data.train.answer), or a reward that needs none"]


def _made_up(prompt: EncodedPrompt) -> RolloutGroup:
    row = prompt.prompt
    texts = [row.demonstration or f"The answer is \\boxed{{{row.answer}}}.", ""]
    return completions(prompt, texts)
