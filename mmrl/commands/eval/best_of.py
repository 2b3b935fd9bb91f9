"""Best of n: the gain of a reward that chooses among n completions, judged by itself or by another one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmrl.config.forms import installed
from mmrl.config.load import from_mapping
from mmrl.config.problems import suggestion
from mmrl.config.sections import Config, is_component
from mmrl.config.yaml_tree import read_tree
from mmrl.errors import ConfigError
from mmrl.ops.estimation import Estimate, best_of_n, mean_estimate
from mmrl.ops.metrics import right_of
from mmrl.plugin_host.registry import options_class
from mmrl.types import ENVIRONMENT, Batch, FloatArray

REWARD = "reward"
"""The weighted sum of the rewards, which chooses where nothing else is named."""
SHOWN = 16
"""Points of a curve of which each has a row; of longer ones n = 1, 2, 4, ... and the last have."""


@dataclass(frozen=True, slots=True)
class BestOf:
    """The expected outcome of the best of n completions, for each n from 1 on.

    Attributes:
        by: The component that chooses, or ``reward``.
        prompts: Prompts with enough scored completions.
        accuracy: The chance that the chosen completion is right.
        reward: Its mean weighted sum of rewards.
    """

    by: str
    prompts: int
    accuracy: Sequence[Estimate]
    reward: Sequence[Estimate]

    def data(self) -> dict[str, Any]:
        """For a program; the first value of each curve is that of n = 1."""
        curves = {"accuracy": self.accuracy, "reward": self.reward}
        return {"by": self.by, "prompts": self.prompts} | {
            name: [asdict(each) for each in curve] for name, curve in curves.items()
        }

    def points(self) -> Iterator[tuple[int, Estimate, Estimate]]:
        """The points to show: n, accuracy and reward."""
        most = len(self.accuracy)
        for n, (accuracy, reward) in enumerate(zip(self.accuracy, self.reward, strict=True), 1):
            if most <= SHOWN or n == most or n & (n - 1) == 0:
                yield n, accuracy, reward


def best_of(batch: Batch, most: int, by: str | None, judge: str) -> BestOf:
    """The curves of ``best_of_n`` from 1 to ``most``, each the mean over the prompts with as many completions that both
    what chooses and what judges have scored: all points are of the same prompts.

    Args:
        by: The component that chooses; None for the weighted sum of all.
        judge: The component that tells right from wrong.

    Raises:
        ConfigError: Nothing has such a component, or no prompt has so many.
    """
    if by is not None and by not in batch.components:
        possible = ", ".join([REWARD, *batch.components])
        raise ConfigError(f"no reward has answered a component {by!r}", where=f"--by {by}", possible=possible)
    reward, right = np.where(batch.valid, batch.rewards, np.nan), right_of(batch.component(judge))
    scores = reward if by is None else batch.component(by)
    known = ~np.isnan(scores) & ~np.isnan(reward) & ~np.isnan(right)
    groups = [np.flatnonzero((batch.group_ids == group) & known) for group in np.unique(batch.group_ids)]
    groups = [members for members in groups if len(members) >= most]
    if not groups:
        what = f"no prompt has {most} completions that are scored by what chooses and by what judges"
        raise ConfigError(what, where=f"--best-of {most}", remedy="look at the rewards' sources, and at what failed")

    def curve(values: FloatArray) -> list[Estimate]:
        expected = np.array([best_of_n(scores[each], values[each], most) for each in groups])
        return [mean_estimate(expected[:, place], np.arange(len(groups))) for place in range(most)]

    return BestOf(REWARD if by is None else by, len(groups), curve(right), curve(reward))


def with_chooser(config: Config, by: str | None) -> tuple[Config, str | None]:
    """The config with what chooses among its rewards, and the name of its component; None for their weighted sum.

    Args:
        by: ``reward``, a component, or a reward as the config names one: a name, ``path/to/file.py:name``, or
            ``{name: ..., OPTION: ...}``. A reward that the config has not scores with weight 0.

    Raises:
        ConfigError: It is none of these, or its options are wrong.
    """
    labels = [spec.metric for spec in config.rewards]
    if by is None or (by == REWARD and REWARD not in labels):
        return config, None
    if is_component(by, [*labels, *([ENVIRONMENT] if config.environment is not None else [])]):
        return config, by
    if not (by.startswith("{") or ":" in by or by in installed("reward")):
        if config.environment is not None:  # which may score components of its own
            return config, by
        known = [REWARD, *labels, *installed("reward")]
        what = f"{by!r} is no component, and no installed reward"
        raise ConfigError(what, where=f"--by {by}", possible=", ".join(known), remedy=suggestion(by, known))
    entry = _entry(by)
    rewards = [spec.model_dump(mode="json") for spec in config.rewards]
    plain = {**config.model_dump(mode="json"), "rewards": [*rewards, {**entry, "weight": 0.0}]}
    try:
        config = from_mapping(plain, options_class=options_class)
    except ConfigError as error:
        raise ConfigError(error.what, where=f"--by {by}", possible=error.possible, remedy=error.remedy) from error
    return config, config.rewards[-1].metric


def _entry(by: str) -> dict[str, Any]:
    """A reward's entry of a word of the command line."""
    if not by.startswith("{"):
        return {"name": by}
    tree, _ = read_tree([], [f"by={by}"])
    found = tree.plain()["by"]
    if not isinstance(found, dict):
        raise ConfigError(f"{json.dumps(by)} is no mapping", where="--by", possible="{name: ..., OPTION: ...}")
    return found
