"""The evaluations of a run: its held-out prompts, and some of them with blank images in place of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from mmrl.config.evaluation_names import metric_of
from mmrl.config.evaluations import EvaluationSet
from mmrl.config.sections import Config
from mmrl.data.prompts import PromptSource
from mmrl.engine_api import PromptEncoder
from mmrl.ops.categories import category_metrics
from mmrl.ops.metrics import right_of
from mmrl.rollout.collector import Collector
from mmrl.step.forward import Judge, Judged
from mmrl.step.gather import not_trained_on
from mmrl.types import CreditedGroup, EncodedPrompt, ScoredGroup

MAX_HELD_OUT = 4096
"""Encoded prompts of an evaluation that are kept for the next one, a few kB each; more are encoded again."""
NUM_BLANK = 64
"""Prompts that are answered again with blank images, evenly spread over those that have images."""


class EvaluationRecorder(Protocol):
    """The recorder of an evaluation's rollouts."""

    def evaluation(self, step: int, groups: Sequence[CreditedGroup], *, name: str, blank: bool) -> None:
        """Note the groups of the evaluation after a step; they may be written later.

        Args:
            name: The set's name; empty for the only one.
            blank: True for those of prompts whose images were blank.

        Raises:
            ResourceError: Rollouts of an earlier evaluation cannot be written.
        """
        ...


class Evaluator:
    """Evaluates a policy.

    Args:
        sources: Held-out prompts of each set of the config, by its name.
    """

    def __init__(
        self,
        config: Config,
        sources: Mapping[str, PromptSource],
        encoder: PromptEncoder,
        collector: Collector,
        recorder: EvaluationRecorder,
    ) -> None:
        self._config, self._sources, self._encoder = config, sources, encoder
        self._collector, self._recorder = collector, recorder
        self._held_out: dict[str, Sequence[EncodedPrompt]] = {}

    @property
    def reads(self) -> bool:
        """True if the next evaluation reads prompts from a dataset."""
        return len(self._held_out) < len(self._sources)

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics of the evaluation after a step, of those with blank images too if they are due.

        The sets are evaluated one after the other; a step has the metrics of all, or of none.

        Raises:
            ConfigError, PluginError: As ``Collector.evaluate``.
            ResourceError: Its rollouts cannot be recorded.
        """
        values = dict[str, float]()
        for name, how in self._config.evaluations.items():
            prompts = self._prompts(name)
            found = self._judged(prompts, how)
            self._record(step, found, name, blank=False)
            values |= _renamed(found.metrics, name, "eval")
            by_category = category_metrics(found.right, [prompt.prompt.category for prompt in prompts])
            values |= {metric_of(name, key): value for key, value in by_category.items()}
            if self._config.trainer.blanks(step):
                values |= _renamed(self._with_blank_images(step, how, prompts, found), name, "eval_blank")
        return values

    def _judged(self, prompts: Sequence[EncodedPrompt], how: EvaluationSet) -> Judged:
        """Completions of prompts and their scores."""
        found = self._collector.evaluate(prompts, how)
        right = [right_of(group.component(how.judge)) for group in found.groups]
        return Judged([not_trained_on(group) for group in found.groups], found.metrics, {"accuracy": right})

    def _prompts(self, name: str) -> Sequence[EncodedPrompt]:
        """The prompts of a set, which are kept for the next evaluation if they are few."""
        if (known := self._held_out.get(name)) is not None:
            return known
        prompts = self._sources[name].each(self._encoder.encode)
        if len(prompts) <= MAX_HELD_OUT and self._config.environment is None:  # which is given raw images
            self._held_out[name] = prompts
        return prompts

    def _record(self, step: int, found: Judged, name: str, *, blank: bool) -> None:
        self._recorder.evaluation(step, found.groups, name=name, blank=blank)

    def _with_blank_images(
        self, step: int, how: EvaluationSet, prompts: Sequence[EncodedPrompt], whole: Judged
    ) -> dict[str, float]:
        """As ``eval/*``, of prompts whose images are mid-grey ones of the same size; these are ``eval_blank/*``.

        - ``eval_blank/accuracy_gap``: the accuracy of the same prompts with their images, less ``eval_blank/accuracy``;
          the part of a preference that was learned from the images, where candidates are compared.
        - ``eval_blank/mean_gap``: the same of the mean of what tells right from wrong, which may be graded.

        Args:
            whole: The evaluation with their own images.
        """
        known = [how.accuracy is None or not np.isnan(right).all() for right in whole.right]
        chosen = _spread([at for at, prompt in enumerate(prompts) if prompt.images and known[at]])
        if not chosen:
            return {}
        found = self._judged([self._encoder.blanked(prompts[at]) for at in chosen], how)
        self._record(step, found, how.name, blank=True)
        values, right = dict(found.metrics), np.concatenate([whole.right[at] for at in chosen])
        if "eval/accuracy" in values and not np.isnan(right).all():
            values["eval/accuracy_gap"] = float(np.nanmean(right)) - values["eval/accuracy"]
        if how.accuracy is not None:
            pictured, blank = (
                np.concatenate([group.scored.component(how.accuracy) for group in groups])
                for groups in ([whole.groups[at] for at in chosen], found.groups)
            )
            if not np.isnan(blank).all():
                values["eval/mean_gap"] = float(np.nanmean(pictured) - np.nanmean(blank))
        return values


class ComparisonEvaluator(Evaluator):
    """Evaluates a policy by the candidates of held-out rows, in forward passes; nothing is sampled.

    Args:
        judge: Judges the groups.
        group: The group that a row has itself.
    """

    def __init__(
        self,
        config: Config,
        sources: Mapping[str, PromptSource],
        encoder: PromptEncoder,
        collector: Collector,
        recorder: EvaluationRecorder,
        judge: Judge,
        group: Callable[[EncodedPrompt], ScoredGroup],
    ) -> None:
        super().__init__(config, sources, encoder, collector, recorder)
        self._judge, self._group = judge, group

    def _judged(self, prompts: Sequence[EncodedPrompt], how: EvaluationSet) -> Judged:
        found = self._judge([self._group(prompt) for prompt in prompts])
        return replace(found, metrics={f"eval/{name}": value for name, value in found.metrics.items()})


_T = TypeVar("_T")


def _spread(items: Sequence[_T]) -> list[_T]:
    """At most ``NUM_BLANK`` of them, evenly spread."""
    count = min(len(items), NUM_BLANK)
    return [items[len(items) * place // count] for place in range(count)]


def _renamed(values: Mapping[str, float], name: str, section: str) -> dict[str, float]:
    """``eval/*`` of a set as metrics of a run."""
    return {metric_of(name, key.removeprefix("eval/"), section): value for key, value in values.items()}
