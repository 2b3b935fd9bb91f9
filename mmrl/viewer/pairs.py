"""Pairs in documents: the best and the worst answer of a group, and which of them the policy, or the reward model,
prefers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmrl.rollout.records.paging import GroupPages
from mmrl.rollout.records.pairs import RECORDED, Likelihood, Pair, pair_of, score_of
from mmrl.token_columns import COLUMNS, POLICY, REFERENCE
from mmrl.types import GIVEN, SCORE
from mmrl.viewer.documents import Document

_UPDATES = next(column.record for column in COLUMNS if column.is_per_update)
"""The log-probs of each update; those of a single one are the policy's before the step, and are recorded once."""
_BOTH = 2


def given_scores(rollouts: Mapping[str, Sequence[Any]]) -> list[float | None]:
    """The dataset's scores of a group's members; None for demonstrations and for what was sampled."""
    columns = zip(rollouts["rewards"], rollouts["weight_version"], strict=True)
    return [(rewards or {}).get(SCORE) if version == GIVEN else None for rewards, version in columns]


def add_pairs(document: Document, pages: GroupPages) -> None:
    """Add to the table of a step with candidates the log-ratio or the reward model's score of each, and each group's
    pair."""
    rows, first, of_groups = document["rows"], 0, list(likelihoods(pages))
    measure = "value" if any(each.value is not None for found in of_groups for each in found) else "log_ratio"
    rows[measure] = []
    for group, found in zip(document["groups"], of_groups, strict=True):
        rows[measure] += [getattr(each, measure) for each in found]
        pair = pair_of(rows["score"][first : first + len(found)], found)
        group |= {"pair": pair_entry(pair)} if pair else {}
        first += len(found)


def likelihoods(pages: GroupPages) -> Iterable[list[Likelihood]]:
    """Those of each group's members."""
    counts = pages.index(("group",), ("mask", "final_value"))
    for group, sums in zip(counts, pages.sums(list(RECORDED.values())), strict=True):
        own = group.of_rollouts
        columns = own["mask"], sums[RECORDED[POLICY]], sums[RECORDED[REFERENCE]], own["final_value"]
        yield [Likelihood(*each) for each in zip(*columns, strict=True)]


def preferences(pages: GroupPages) -> list[float | None]:
    """For each group 1 if the network prefers the answer with the highest score to that with the lowest, 0 if not, and
    0.5 if neither; None where it is not known."""
    groups = zip(pages.index(("group",), ("rewards", "weight_version")), likelihoods(pages), strict=True)
    pairs = [pair_of(given_scores(group.of_rollouts), found) for group, found in groups]
    return [None if pair is None else pair.preferred for pair in pairs]


def pair_entry(pair: Pair) -> Document:
    """A pair as the page gets it: places among the group's members, the margin and what it is a difference of."""
    return {
        "chosen": pair.chosen,
        "rejected": pair.rejected,
        "measure": pair.measure,
        "margin": pair.margin,
        "preferred": pair.preferred,
    }


def pair_document(records: Sequence[Mapping[str, Any]]) -> Document:
    """The pair of a group's records, empty if it has none.

    ``compared`` is true if the loss is of the two: the dataset gave them, or they alone of several were in it.
    """
    found, scores = [Likelihood.of(each) for each in records], [score_of(each) for each in records]
    pair = pair_of(scores, found)
    if pair is None:
        return {}
    updated = [any(len(update) for update in each.get(_UPDATES) or ()) for each in records]
    in_loss = updated if any(updated) else [each.policy is not None for each in found]
    compared = records[0]["weight_version"] == GIVEN or sum(in_loss) == _BOTH < len(scores) - scores.count(None)
    return {"pair": {**pair_entry(pair), "compared": compared}}


def likelihood_document(record: Mapping[str, Any]) -> Document:
    """The score of a candidate, and what networks make of a completion; keys that have nothing to tell lack."""
    found = Likelihood.of(record)
    values = {
        "score": score_of(record) if record["weight_version"] == GIVEN else None,
        "policy": found.policy,
        "reference": found.reference,
        "log_ratio": found.log_ratio,
        "per_token": found.per_token,
        "value": found.value,
    }
    known = {name: value for name, value in values.items() if value is not None}
    score = {"score": known.pop("score")} if "score" in known else {}
    return score | ({"likelihood": known} if known else {})
