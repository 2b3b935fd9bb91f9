"""Rows as rewards see them before anything starts: with the sizes of their images, without tokens and pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from mmrl.config.plugin_specs import RewardSpec
from mmrl.data.prompts import PromptSource
from mmrl.errors import DataError, plugin_errors
from mmrl.interfaces import Reward
from mmrl.plugin_host import registry
from mmrl.runs.setup import RunSetup
from mmrl.types import EncodedPrompt

FIRST = 32
"""Rows at which a run looks."""


def row_warnings(setup: RunSetup, source: PromptSource, places: Iterable[int] = range(FIRST)) -> list[str]:
    """Warnings of the run's rewards about rows of a dataset, each with the dataset, its answers' column and the reward.

    Args:
        places: Places of the rows that are looked at; by default the first ones.

    Raises:
        PluginError: A reward fails.
    """
    if source.name == "data.train" and not setup.step_source.samples:
        return []
    looking = [
        (place, spec)
        for place, spec in enumerate(setup.config.rewards)
        if cast(type[Reward], registry.resolve("reward", spec)).check_rows is not Reward.check_rows
    ]
    rows = list(_rows(setup, source, places)) if looking else []
    where, found = _where(setup, source), list[str]()
    for place, spec in looking:
        reward = registry.create("reward", spec)
        scored = [row for row in rows if spec.sources is None or row.prompt.source in spec.sources]
        with plugin_errors(reward, "check_rows"):
            warnings = reward.check_rows(scored)
            if isinstance(warnings, str) or not all(isinstance(text, str) for text in warnings):
                raise TypeError(f"expected a list of texts, got {warnings!r:.200}")
        found += [f"{where}, rewards.{place}: {spec.name}: {warning}" for warning in warnings]
    return found


def writing(spec: RewardSpec) -> Reward | None:
    """The reward, if it writes right answers itself."""
    cls = cast(type[Reward], registry.resolve("reward", spec))
    return None if cls.right_answer is Reward.right_answer else registry.create("reward", spec)


def right_answer(reward: Reward, prompt: EncodedPrompt) -> str | None:
    """The reward's own form of a right answer; None if it has none.

    Raises:
        PluginError: It fails.
    """
    with plugin_errors(reward, "right_answer"):
        text = reward.right_answer(prompt)
        if not isinstance(text, str | None):
            raise TypeError(f"expected a text or None, got {text!r:.200}")
    return text


def _rows(setup: RunSetup, source: PromptSource, places: Iterable[int]) -> Iterator[EncodedPrompt]:
    for place in places:
        if place >= len(source):
            return
        try:
            yield setup.encoder.measure(source[place])
        except DataError:  # a bad row is told of when it is drawn
            continue


def _where(setup: RunSetup, source: PromptSource) -> str:
    """The dataset and the columns of its reference answers."""
    columns = dict.fromkeys(
        each.about["answer"] for each in setup.loaded_for(source.name).values() if "answer" in each.about
    )
    return f"{source.name}, column {', '.join(columns)}" if columns else source.name
