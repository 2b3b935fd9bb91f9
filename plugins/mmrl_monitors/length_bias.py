"""Length that is learned for quality, from the dataset's comparisons (Disentangling length from quality in DPO,
arXiv:2403.19159).

- ``order``: pairs whose better answer is the shorter one are decided wrongly, and the others rightly; or the other way
  round.
- ``data``: there are hardly any such pairs, and the policy's margin grows with the difference of lengths.

Both are of the training pairs as a step meets them, before it learns from them: in the first epoch these are new to the
policy. For pairs that the policy itself samples ``length_hacking`` tells what a reward pays for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView
from mmrl.types import CreditedGroup
from mmrl_monitors.within import correlation

WINDOW = 10
"""Last steps whose pairs are taken together."""
LEARNED = 0.55
"""Accuracy on pairs of different lengths from which on something was learned of them."""
LEAST_PAIRS = 20
"""Pairs of a kind without which their share says nothing."""
_REMEDY = (
    "look at such pairs (`mmrl view RUN`); balance the lengths of the data, lower learner.lr, or take a loss of means "
    "over tokens (simpo, or dpo with variant ipo)"
)


class _Pair(NamedTuple):
    """A pair as the policy decides it.

    Attributes:
        margin: The chosen's reward less the rejected's, as far as its sign and size among others tell.
        longer: Tokens that the chosen has more than the rejected.
    """

    margin: float
    longer: int


class LengthBias(Monitor):
    """The policy prefers longer answers, or shorter ones, whether they are better or not."""

    class Config(PluginConfig):
        wrong: Annotated[float, Field(gt=0, lt=1)] = 0.3
        """Accuracy on pairs whose chosen answer is the shorter one (or the longer one), at most."""
        gap: Annotated[float, Field(gt=0, le=1)] = 0.5
        """Accuracy on the others, less that, at least."""
        steps: Annotated[int, Field(ge=1)] = 20
        """Steps in a row of that: a policy may prefer a length for a while before it has learned anything else."""
        longer: Annotated[float, Field(gt=0, le=1)] = 0.85
        """Share of the pairs whose chosen answer is longer, of those of different lengths."""
        correlation: Annotated[float, Field(gt=0, lt=1)] = 0.5
        """Correlation of margin and difference of lengths over a step's pairs, where so many are longer."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        """``pairs_longer``, ``pairs_shorter``: pairs whose chosen answer is the longer or the shorter one;
        ``accuracy_longer``, ``accuracy_shorter``: the share of them that the policy decides as the dataset does, ties
        one half; ``correlation``: of margin and difference of lengths over all pairs."""
        pairs = [pair for group in record.given if group.trained for pair in _pairs(group)]
        if not pairs:
            return {}
        margins, longer = np.array([pair.margin for pair in pairs]), np.array([pair.longer for pair in pairs], float)
        found = dict[str, float]()
        for name, chosen in (("longer", longer > 0), ("shorter", longer < 0)):
            found[f"pairs_{name}"] = float(np.count_nonzero(chosen))
            if chosen.any():
                found[f"accuracy_{name}"] = float(np.mean(0.5 * (1 + np.sign(margins[chosen]))))
        related = correlation(margins, longer)
        return found if related is None else {**found, "correlation": related}

    def look(self, step: StepView) -> Sequence[Finding]:
        return [finding for finding in (self._order(step), self._data(step)) if finding is not None]

    def _order(self, step: StepView) -> Finding | None:
        (num_longer, longer), (num_shorter, shorter) = (_decided(step, name) for name in ("longer", "shorter"))
        if step.measured("pairs_shorter") is None or min(num_longer, num_shorter) < LEAST_PAIRS:
            return None
        least, most = sorted((longer, shorter))
        words = ("longer", "shorter") if shorter <= longer else ("shorter", "longer")
        accuracy = (num_longer * longer + num_shorter * shorter) / (num_longer + num_shorter)
        bias = min((1 - least) / (1 - self.config.wrong), (most - least) / self.config.gap)
        return Finding(
            min(bias, accuracy / LEARNED),
            f"the {words[0]} answer is preferred, also where the {words[1]} one is better",
            _REMEDY,
            {"accuracy_where_the_longer_is_better": longer, "accuracy_where_the_shorter_is_better": shorter},
            "order",
            self.config.steps,
        )

    def _data(self, step: StepView) -> Finding | None:
        related = step.measured_curve("correlation").tail(WINDOW)
        (num_longer, _), (num_shorter, _) = (_decided(step, name) for name in ("longer", "shorter"))
        if step.measured("correlation") is None or num_longer + num_shorter < LEAST_PAIRS or len(related) < WINDOW:
            return None
        share, found = num_longer / (num_longer + num_shorter), float(related.mean())
        return Finding(
            max(min(share / self.config.longer, found / self.config.correlation), 0.0),
            "the chosen answer is nearly always the longer one, and the more so, the surer the policy is",
            _REMEDY,
            {"chosen_longer": share, "correlation": found},
            "data",
            WINDOW,
        )


def _decided(step: StepView, name: str) -> tuple[float, float]:
    """The number of pairs of the last steps whose chosen answer is so, and the accuracy on them."""
    counts, shares = step.measured_curve(f"pairs_{name}"), step.measured_curve(f"accuracy_{name}")
    first = counts.steps[-WINDOW] if len(counts) >= WINDOW else 0
    weights = dict(zip(counts.steps.tolist(), counts.values.tolist(), strict=True))
    last = [
        (weights[at], value)
        for at, value in zip(shares.steps.tolist(), shares.values.tolist(), strict=True)
        if at >= first
    ]
    number = sum(weight for weight, _ in last)
    return number, sum(weight * value for weight, value in last) / max(number, 1.0)


def _pairs(group: CreditedGroup) -> Iterator[_Pair]:
    """The pair of a group, if two of its members are in the loss, one for and one against."""
    signs = [
        float(np.sign(values.sum())) if len(logprobs) else 0.0
        for values, logprobs in zip(group.advantages, group.logprobs, strict=True)
    ]
    if signs.count(1.0) != 1 or signs.count(-1.0) != 1:
        return
    chosen, rejected = signs.index(1.0), signs.index(-1.0)
    lengths = [int(np.count_nonzero(rollout.mask)) for rollout in group.scored.rollouts]
    yield _Pair(_reward(group, chosen) - _reward(group, rejected), lengths[chosen] - lengths[rejected])


def _reward(group: CreditedGroup, member: int) -> float:
    """The log-ratio of policy and reference of a whole answer; without a reference its mean log-prob."""
    mask, logprobs = group.scored.rollouts[member].mask, np.asarray(group.logprobs[member], np.float64)
    ratio = group.log_ratio(member)
    return float(logprobs[mask].mean()) if ratio is None else float(ratio[mask].sum())
