"""A step's groups between sampling and learning, and groups as one batch."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import Any

import numpy as np

from mmrl.config.sections import Config
from mmrl.errors import MMRLError
from mmrl.rollout.unfinished import CarriedGroup
from mmrl.token_columns import COLUMNS
from mmrl.types import GIVEN, Batch, BoolArray, BranchedRows, Content, CreditedGroup, FloatArray, Rollout, ScoredGroup


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The groups of one step, between sampling and learning.

    Attributes:
        weight_version: The version of the weights that sampled them; ``GIVEN`` if nobody did.
        groups: All that the step sampled or took from its rows, round by round, each in the order of its prompts.
        stats: Metrics of their gathering, which the groups do not tell.
        learned: The groups to learn from, those carried over from earlier steps first; none if the step is left out.
        fault: The error that ends the run, once the groups are recorded.
        carried: The groups for the next step, in the order in which they were drawn.
    """

    step: int
    weight_version: int
    groups: Sequence[ScoredGroup]
    stats: Mapping[str, float] = field(default_factory=dict)
    learned: Sequence[ScoredGroup] = ()
    fault: MMRLError | None = None
    carried: Sequence[CarriedGroup] = ()

    @property
    def is_given(self) -> bool:
        """True if nobody sampled its groups."""
        return self.weight_version == GIVEN

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of all its groups."""
        return rollouts_of(self.groups)

    @property
    def own_rollouts(self) -> list[Rollout]:
        """Those of them that the step has sampled itself, and those of groups that the dataset gives."""
        return own_rollouts_of(self.groups)

    @property
    def kept(self) -> list[ScoredGroup]:
        """The groups that the algorithm keeps, of those of this step."""
        return [group for group in self.groups if group.kept]

    @property
    def learns_all(self) -> bool:
        """True if the step learns from its own groups, from all of them and in their order."""
        return len(self.learned) == len(self.groups) and all(map(operator.is_, self.learned, self.groups))

    @property
    def with_views(self) -> float | None:
        """The share of its groups whose prompts have views; None if none has."""
        found = [bool(group.group.prompt.views) for group in self.groups]
        return float(np.mean(found)) if any(found) else None

    @property
    def rounds(self) -> int:
        """Times that prompts were sampled."""
        return len({group.place[0] for group in self.groups if group.place})


def rollouts_of(groups: Sequence[ScoredGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def own_rollouts_of(groups: Sequence[ScoredGroup]) -> list[Rollout]:
    """Those that the step has sampled itself, and those of groups that the dataset gives."""
    return [rollout for group in groups for rollout in group.rollouts if rollout.is_own or group.is_given]


def weights_of(config: Config) -> dict[str, float]:
    """Factors of the components in the rewards, as the config names them."""
    weights = {reward.metric: reward.weight for reward in config.rewards}
    return weights if config.environment is None else {**weights, **config.environment.weights}


def batch_of(
    groups: Sequence[ScoredGroup], weights: Mapping[str, float], penalties: frozenset[str] = frozenset()
) -> Batch:
    """The groups' rollouts as one batch, without learner log-probs yet.

    Args:
        groups: At least one; all of them with a greedy rollout, or none.
        weights: Factor of each component in the rewards; that of others is 0, and what environments score counts once.
        penalties: Names of the components that are penalties.
    """
    components = _components(groups)
    rollouts = rollouts_of(groups)
    weights = {**dict.fromkeys((name for rollout in rollouts for name in rollout.components), 1.0), **weights}
    sizes = [len(group.rollouts) for group in groups]
    greedy = [group.greedy for group in groups if group.greedy is not None]
    return Batch(
        rewards=np.concatenate([group.rewards for group in groups]),
        valid=np.concatenate([group.valid for group in groups]),
        group_ids=np.repeat(np.arange(len(groups)), sizes),
        masks=[rollout.mask for rollout in rollouts],
        truncated=np.array([rollout.truncated for rollout in rollouts]),
        components=components,
        **_columns(rollouts),
        weights={**dict.fromkeys(components, 0.0), **weights},
        penalties=penalties,
        greedy_components={name: np.repeat(values, sizes) for name, values in _components(greedy).items()}
        if greedy
        else None,
        **(turns_of(rollouts) if has_episodes(rollouts) else {}),
        branches=branches_of([group.rollouts for group in groups]),
        sampled_from=[rollout.view for rollout in rollouts] if any(rollout.view for rollout in rollouts) else None,
        token_rewards=_token_rewards(groups),
        given=_flags([rollout.is_given for group in groups if not group.is_given for rollout in group.rollouts]),
        recalled=_flags([rollout.recalled for rollout in rollouts]),
    )


def own_rows(batch: Batch) -> Batch:
    """The rows that the step itself has sampled, with what its metrics are of; all rows of the dataset's own groups."""
    others = [rows_B for rows_B in (batch.given, batch.recalled) if rows_B is not None]
    if not others:
        return batch
    own_B = ~np.any(others, axis=0)
    seen = batch.sampled_from
    return replace(
        batch,
        rewards=batch.rewards[own_B],
        valid=batch.valid[own_B],
        group_ids=batch.group_ids[own_B],
        masks=list(compress(batch.masks, own_B)),
        truncated=batch.truncated[own_B],
        components={name: values_B[own_B] for name, values_B in batch.components.items()},
        sampled_from=None if seen is None else list(compress(seen, own_B)),
    )


def _flags(found: Sequence[bool]) -> BoolArray | None:
    return np.array(found, np.bool_) if any(found) else None


def _columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The token columns of a batch before any network was asked."""
    return {
        column.name: [getattr(rollout, column.name) for rollout in rollouts] if column.known == "sampled" else None
        for column in COLUMNS
        if column.known in ("sampled", "before the step")
    }


def _token_rewards(groups: Sequence[ScoredGroup]) -> list[FloatArray] | None:
    """``Batch.token_rewards``; None unless all groups have them."""
    if not all(group.token_rewards for group in groups):
        return None
    pairs = [pair for group in groups for pair in zip(group.token_rewards, group.valid, strict=True)]
    return [values_T if is_valid else np.zeros(len(values_T)) for values_T, is_valid in pairs]


def has_episodes(rollouts: Sequence[Rollout]) -> bool:
    """True if there was an environment."""
    return any(rollout.episode or rollout.failure for rollout in rollouts)


def turns_of(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """``Batch.turns``, ``turn_rewards`` and ``turn_states`` of episodes."""
    return {
        "turns": [rollout.turn_of_token for rollout in rollouts],
        "turn_rewards": [np.array([played.reward for played in rollout.episode], np.float64) for rollout in rollouts],
        "turn_states": [_states(rollout) for rollout in rollouts],
    }


def branches_of(groups: Sequence[Sequence[Rollout]]) -> BranchedRows | None:
    """``Batch.branches`` of the rollouts of some groups; None if none goes on from another."""
    parents, shared, first = list[int](), list[int](), 0
    for group in groups:
        parents += [-1 if rollout.branch is None else first + rollout.branch.member for rollout in group]
        shared += [rollout.num_shared for rollout in group]
        first += len(group)
    if all(parent < 0 for parent in parents):
        return None
    return BranchedRows(np.array(parents, np.int64), np.array(shared, np.int64))


def _states(rollout: Rollout) -> list[str]:
    """For each turn, a hash of what the policy last read before it: the prompt, then observations."""
    if not rollout.episode:
        return []
    first = hashlib.sha256(rollout.prompt.id.encode("utf-8", "surrogatepass") + rollout.prompt.token_ids.tobytes())
    return [first.hexdigest(), *(_content_hash(played.content or ()) for played in rollout.episode[:-1])]


def _content_hash(content: Content) -> str:
    parts = [["text", part] if isinstance(part, str) else ["image", part.hash] for part in content]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _components(groups: Sequence[ScoredGroup]) -> dict[str, FloatArray]:
    names = dict.fromkeys(name for group in groups for name in group.components)
    return {name: np.concatenate([group.component(name) for group in groups]) for name in names}


def part_of(scored: ScoredGroup, places: Sequence[int]) -> ScoredGroup:
    """A group of these members alone."""
    rollouts = tuple(scored.rollouts[place] for place in places)
    return replace(
        scored,
        group=replace(scored.group, rollouts=rollouts),
        rewards=scored.rewards[list(places)],
        valid=scored.valid[list(places)],
        components={name: values_G[list(places)] for name, values_G in scored.components.items()},
        answers={name: [found[place] for place in places] for name, found in scored.answers.items()},
        token_rewards=[scored.token_rewards[place] for place in places] if scored.token_rewards else (),
    )


def own_part(group: CreditedGroup) -> CreditedGroup:
    """The members of a group that the step itself has sampled; all of the dataset's own."""
    places = [place for place, rollout in enumerate(group.scored.rollouts) if rollout.is_own]
    if group.scored.is_given or len(places) == len(group.scored.rollouts):
        return group
    own: dict[str, Any] = {"scored": part_of(group.scored, places), "trained": group.trained}
    for each in fields(group):
        if each.name not in own:
            of_group = getattr(group, each.name)
            chosen = [of_group[place] for place in places] if len(of_group) else of_group
            own[each.name] = np.array(chosen, np.float32) if each.name == "final_values" else chosen
    return CreditedGroup(**own)


def sampled_and_given(groups: Sequence[CreditedGroup]) -> tuple[Sequence[CreditedGroup], Sequence[CreditedGroup]]:
    """The groups that were sampled, as far as the step itself has sampled them, and those that were taken from rows."""
    found = [[group for group in groups if group.scored.is_given == is_given] for is_given in (False, True)]
    return list(map(own_part, found[0])), found[1]


def with_greedy(scored: ScoredGroup, greedy: ScoredGroup) -> ScoredGroup:
    """The group with its greedy rollout; without that one's score no rollout of the group can be credited."""
    valid = scored.valid & greedy.valid[0]
    return replace(scored, greedy=greedy, valid=valid, rewards=np.where(valid, scored.rewards, 0.0))
