"""A critic that predicts nothing: its values explain none of what the returns differ by.

Advantages are then the returns less a number that says nothing of the state, so the critic costs its memory and time
and adds noise. Below 0 its values are worse than one constant would be. The steps in which the critic alone learns do
not count, and a zero head begins at 0, so it has ``steps`` steps of the policy to learn. Where rewards hardly differ
any more, as in a run that has solved its prompts, there is nothing to explain, and nothing is told.

Evidence: What's behind PPO's collapse in long-CoT (arXiv:2503.01491), where an untrained critic is a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepView

START = 5
"""Steps at the start with whose rewards later ones are compared."""


class IdleCritic(Monitor):
    """The median of the explained variance stays close to 0, or under it."""

    class Config(PluginConfig):
        least: Annotated[float, Field(lt=1)] = 0.02
        """Explained variance up to which the critic predicts nothing."""
        steps: Annotated[int, Field(ge=1)] = 20
        """Steps of the policy of which it is the median."""
        spread: Annotated[float, Field(ge=0, lt=1)] = 0.4
        """Share of the rewards' deviation at the start under which they hardly differ any more."""

    config: Config

    def look(self, step: StepView) -> Sequence[Finding]:
        explained, learned = step.curve("critic/explained_variance"), step.curve("advantage/abs_mean")
        if step.get("critic/explained_variance") is None or not len(learned):
            return ()
        values = explained.values[np.searchsorted(explained.steps, learned.steps[0]) :][-self.config.steps :]
        if len(values) < self.config.steps:
            return ()
        rewards = step.curve("reward/std")
        start, now = rewards.baseline(START), float(np.median(rewards.tail(self.config.steps))) if len(rewards) else 0.0
        differs = start is None or now >= self.config.spread * start.median
        median = float(np.median(values))
        return (
            Finding(
                max(1 + self.config.least - median, 0.0) if differs else 0.0,
                "the critic predicts " + ("nothing" if median > -self.config.least else "worse than one number would"),
                "let it learn before the policy does (critic.pretrain_steps), raise critic.lr, bring rewards to a "
                "scale of about 1, or begin from a reward model (critic.path)",
                {"explained_variance": median},
            ),
        )
