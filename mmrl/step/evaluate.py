"""The evaluations of a run: its held-out prompts, and some of them with blank images in place of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mmrl.config.sections import Config
from mmrl.data.prompts import PromptSource
from mmrl.engine_api import PromptEncoder
from mmrl.ops.metrics import right_of
from mmrl.rollout.collector import Collector
from mmrl.step.gather import not_trained_on
from mmrl.types import CreditedGroup, EncodedPrompt, ScoredGroup

MAX_HELD_OUT = 4096
"""Encoded prompts of an evaluation that are kept for the next one, a few kB each; more are encoded again."""
NUM_BLANK = 64
"""Prompts that are answered again with blank images, evenly spread over those that have images."""


class EvaluationRecorder(Protocol):
    """The recorder of an evaluation's rollouts."""

    def evaluation(self, step: int, groups: Sequence[CreditedGroup], *, blank: bool) -> None:
        """Note the groups of the evaluation after a step; they may be written later.

        Args:
            blank: True for those of prompts whose images were blank.

        Raises:
            ResourceError: Rollouts of an earlier evaluation cannot be written.
        """
        ...


class Evaluator:
    """Evaluates a policy.

    Args:
        source: Held-out prompts.
    """

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        encoder: PromptEncoder,
        collector: Collector,
        recorder: EvaluationRecorder,
    ) -> None:
        self._config, self._source, self._encoder = config, source, encoder
        self._collector, self._recorder = collector, recorder
        self._held_out: Sequence[EncodedPrompt] | None = None

    @property
    def reads(self) -> bool:
        """True if the next evaluation reads its prompts from the dataset."""
        return self._held_out is None

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics of the evaluation after a step, of the one with blank images too if that is due.

        Raises:
            ConfigError, PluginError: As ``Collector.evaluate``.
            ResourceError: Its rollouts cannot be recorded.
        """
        prompts = self._held_out
        if prompts is None:
            prompts = self._source.each(self._encoder.encode)
            is_small = len(prompts) <= MAX_HELD_OUT and self._config.environment is None  # which is given raw images
            self._held_out = prompts if is_small else None
        found = self._collector.evaluate(prompts)
        self._recorder.evaluation(step, [not_trained_on(group) for group in found.groups], blank=False)
        values = dict(found.metrics)
        if self._config.trainer.blanks(step):
            values |= self._with_blank_images(step, found.groups)
        return values

    def _with_blank_images(self, step: int, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """``eval_blank/*``: as ``eval/*``, of prompts whose images are mid-grey ones of the same size.

        - ``eval_blank/accuracy_gap``: the accuracy of the same prompts with their images, less ``eval_blank/accuracy``.
        - ``eval_blank/mean_gap``: the same of the mean of what tells right from wrong, which may be graded.
        """
        right = self._collector.accuracy_of
        shown = [g for g in groups if g.group.prompt.images and not np.isnan(g.component(right)).all()]
        if not shown:
            return {}
        count = min(len(shown), NUM_BLANK)
        chosen = [shown[len(shown) * place // count] for place in range(count)]
        found = self._collector.evaluate([self._encoder.blanked(group.group.prompt) for group in chosen])
        self._recorder.evaluation(step, [not_trained_on(group) for group in found.groups], blank=True)
        values = {f"eval_blank/{name.removeprefix('eval/')}": value for name, value in found.metrics.items()}
        pictured, blank = (np.concatenate([each.component(right) for each in some]) for some in (chosen, found.groups))
        values["eval_blank/accuracy_gap"] = float(np.nanmean(right_of(pictured))) - values["eval_blank/accuracy"]
        known = not np.isnan(blank).all()
        return values | ({"eval_blank/mean_gap": float(np.nanmean(pictured) - np.nanmean(blank))} if known else {})
