"""Two answers to a prompt beside each other, by what a run recorded: the one that the policy prefers, and by how much.

The log-probs are those before the step's first update. Of a completion, the log-ratio is the sum over its tokens of the
policy's log-prob less the reference's; the implicit reward of a preference loss is a multiple of it. A run without a
reference has the policy's mean log-prob per token in its place, as completions differ in length. A reward model has a
score of each completion, and no log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from mmrl.token_columns import COLUMNS, POLICY, REFERENCE
from mmrl.types import GIVEN, SCORE

Measure = Literal["log_ratio", "per_token", "value"]
RECORDED: Mapping[str, str] = {
    each.role: each.record for each in COLUMNS if each.known == "before the step" and each.role in (POLICY, REFERENCE)
}
"""The fields of records with the log-probs of policy and reference, by role."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The probability that networks give a completion, or a reward model's score of it.

    Attributes:
        tokens: Those that count: a demonstration or a candidate has no others, a rollout those that the policy wrote.
        policy: The sum of the policy's log-probs of them; None if they were not recorded.
        reference: Likewise the reference's.
        value: The score of a reward model; None in any other run.
    """

    tokens: int
    policy: float | None = None
    reference: float | None = None
    value: float | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """The likelihood of a recorded completion."""
        mask = np.asarray(record["mask"], np.bool_)
        policy, reference = (own_sum(record.get(RECORDED[role]), mask) for role in (POLICY, REFERENCE))
        score = record.get("final_value") if record["weight_version"] == GIVEN else None  # else it is a critic's
        return cls(int(mask.sum()), policy, reference, score)

    @property
    def log_ratio(self) -> float | None:
        """The policy's log-prob of the whole completion less the reference's."""
        return None if self.policy is None or self.reference is None else self.policy - self.reference

    @property
    def per_token(self) -> float | None:
        """The policy's mean log-prob of a token."""
        return None if self.policy is None or not self.tokens else self.policy / self.tokens


@dataclass(frozen=True, slots=True)
class Pair:
    """The best and the worst completion of a group.

    Attributes:
        chosen: The place of the best one in the group, the first of ties; likewise ``rejected`` of the worst one.
        measure: The values that the margin is a difference of.
        margin: The chosen's value less the rejected's; None if one of them has none, as if it was in no loss.
    """

    chosen: int
    rejected: int
    measure: Measure
    margin: float | None

    @property
    def preferred(self) -> float | None:
        """1 if the network prefers the chosen one, 0 if the rejected one, 0.5 if neither; None if it is not known."""
        return None if self.margin is None else 0.5 * (1.0 + float(np.sign(self.margin)))


def pair_of(scores: Sequence[float | None], likelihoods: Sequence[Likelihood]) -> Pair | None:
    """The pair of a group; None if no score is above another.

    Args:
        scores: Each completion's; None for one that is not compared.
    """
    places = [place for place, score in enumerate(scores) if score is not None]
    values = np.array([scores[place] for place in places], np.float32)
    if not len(values) or not values.max() > values.min():
        return None
    chosen, rejected = places[int(values.argmax())], places[int(values.argmin())]
    both = likelihoods[chosen], likelihoods[rejected]
    measure: Measure = "per_token" if all(each.reference is None for each in both) else "log_ratio"
    if any(each.value is not None for each in likelihoods):
        measure = "value"
    better, worse = (getattr(each, measure) for each in both)
    return Pair(chosen, rejected, measure, None if better is None or worse is None else better - worse)


def score_of(record: Mapping[str, Any]) -> float | None:
    """The number by which a record's completion is better or worse than others of its group.

    The dataset's score of a candidate, the reward of a rollout; None for a demonstration, for a greedy rollout, and for
    what was not scored.
    """
    if record["weight_version"] == GIVEN:
        score: float | None = (record["rewards"] or {}).get(SCORE)
        return score
    return record["reward"] if record["valid"] and not record["greedy"] else None


def log_ratios(record: Mapping[str, Any]) -> dict[int, float] | None:
    """By place, the policy's log-prob of each token that it wrote, less the reference's; None if not all are known."""
    mask = np.asarray(record["mask"], np.bool_)
    policy, reference = (record.get(RECORDED[role]) for role in (POLICY, REFERENCE))
    if own_sum(policy, mask) is None or own_sum(reference, mask) is None:
        return None
    gaps = np.asarray(policy, np.float64) - np.asarray(reference, np.float64)
    return {int(place): float(gaps[place]) for place in np.flatnonzero(mask)}


def own_sum(values: Any, mask: npt.NDArray[np.bool_]) -> float | None:
    """The sum of numbers over the tokens that the policy wrote; None if there is not one for each token."""
    if values is None or len(values) != len(mask) or not mask.any():
        return None
    return float(np.asarray(values, np.float64)[mask].sum())
