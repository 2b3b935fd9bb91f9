"""Trees of episodes for checks: batches whose rows go on from others, and groups of which ``branch`` is asked.

Letters: ``B`` rows, ``T`` tokens of the longest row.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.errors import DataError, PluginError
from mmrl.interfaces import Algorithm, Branches
from mmrl.rollout.episodes.branching import Branching
from mmrl.testing.recorded import PER_TOKEN, Arrays
from mmrl.testing.rollouts import make_rollouts
from mmrl.testing.rules import broken, failed
from mmrl.types import BranchedRows, IntArray, PlayedTurn, Rollout, Segment, Turn

PARENTS, SHARED = "parents", "shared_tokens"


def with_trees(rng: np.random.Generator, batch: Arrays, lengths_B: IntArray) -> dict[str, Any]:
    """The batch with rows that go on from others of their group, as many as half of it, and have their first tokens.

    A row without turns is none of them.
    """
    found: dict[str, Any] = {**batch, **{name: batch[name].copy() for name in _per_token(batch)}}
    parents_B, shared_B = np.full(len(lengths_B), -1), np.zeros(len(lengths_B), np.int64)
    rewards = [each.copy() for each in batch.get("turn_rewards", [])]
    states = [list(each) for each in batch.get("turn_states", [])]
    for group in np.unique(batch["group_ids"]):
        rows = [row for row in np.flatnonzero(batch["group_ids"] == group) if not rewards or len(rewards[row])]
        for place in range((len(rows) + 1) // 2, len(rows)):
            row, parent = rows[place], rows[int(rng.integers(place))]
            most = int(min(lengths_B[row], lengths_B[parent])) - 1
            if rewards:  # up to where the turns of both have the same tokens
                most = min(most, int(np.argmin(np.append(batch["turns"][row] == batch["turns"][parent], False))))
            shared = int(rng.integers((most + 1) // 2, most + 1))
            parents_B[row], shared_B[row] = parent, shared
            for name in _per_token(batch):
                found[name][row, :shared] = found[name][parent, :shared]
            if rewards:
                before = int(batch["turns"][row, shared])
                rewards[row][:before], states[row][:before] = rewards[parent][:before], states[parent][:before]
    if rewards:
        found |= {"turn_rewards": rewards, "turn_states": states}
    return {**found, PARENTS: parents_B, SHARED: shared_B}


def _per_token(batch: Arrays) -> list[str]:
    return [name for name in (*PER_TOKEN, "response_mask") if name in batch]


def moved_trees(batch: Arrays, order: Any) -> dict[str, Any]:
    """The trees of a batch whose rows are in another order; a row whose parent is left out begins by itself."""
    if PARENTS not in batch:
        return {}
    places = {int(row): place for place, row in enumerate(order)}
    parents_B = np.array([places.get(int(batch[PARENTS][row]), -1) for row in order])
    return {PARENTS: parents_B, SHARED: np.where(parents_B < 0, 0, batch[SHARED][order])}


def rows_in_use(batch: Arrays) -> Any:
    """Places of the valid rows, and of those that others go on from."""
    is_parent_B = np.isin(np.arange(len(batch["reward_valid"])), batch.get(PARENTS, ()))
    return np.flatnonzero(batch["reward_valid"] | is_parent_B)


def read_trees(read: Arrays) -> BranchedRows | None:
    """The trees of a batch; None if it has none.

    Raises:
        DataError: They are not such as a run has.
    """
    if PARENTS not in read:
        return None
    parents_B, shared_B = read[PARENTS], read[SHARED]
    for row, (parent, shared) in enumerate(zip(parents_B.tolist(), shared_B.tolist(), strict=True)):
        length = read["response_mask"].shape[1] if parent >= 0 else 0
        is_right = -1 <= parent < row and 0 <= shared <= length
        if not is_right or (parent >= 0 and read["group_ids"][row] != read["group_ids"][parent]):
            raise DataError(
                f"row {row} goes on from row {parent} after {shared} tokens",
                where=f"batch: {PARENTS}, {SHARED}",
                possible=f"an earlier row of its group, after 0 to {length} tokens; -1 and 0 for none",
            )
    return BranchedRows(parents_B, shared_B)


def check_branch(algorithm: Algorithm, branches: Branches) -> None:
    """See that ``branch`` names places of any group, and the same ones of the same group.

    Raises:
        PluginError: It does not.
    """
    for first in (1, 4):
        for size in [first + number * branches.per_round for number in range(min(branches.rounds, 3))]:
            for seed in range(3):
                group = _episodes(size, np.random.default_rng(seed))
                try:
                    one, other = (Branching(copy.deepcopy(algorithm), branches, 1).chosen(group) for _ in range(2))
                except PluginError as error:
                    rule = f"branch names {branches.per_round} places of a group of {size} episodes"
                    raise failed(
                        algorithm, rule, error, "answer Branch(member, turn) of members and turns there are"
                    ) from error
                if one != other:
                    remedy = "draw from mmrl.ops.branching.generator(group), and from no other"
                    raise broken(algorithm, "branch answers the same group in one way", f"{one} and {other}", remedy)


def _episodes(count: int, rng: np.random.Generator) -> list[Rollout]:
    """Episodes of one to four turns with observations; the environment has failed at the reset of the last of four."""
    return [
        _episode(each, 0 if each.index == 3 else int(rng.integers(1, 5)), rng) for each in make_rollouts([""] * count)
    ]


def _episode(rollout: Rollout, turns: int, rng: np.random.Generator) -> Rollout:
    segments, played = list[Segment](), list[PlayedTurn]()
    for index in range(turns):
        ids = rng.integers(0, 256, int(rng.integers(1, 6))).astype(np.int32)
        logprobs = -rng.exponential(1.0, len(ids)).astype(np.float32)
        is_last = index == turns - 1
        inserted = np.zeros(0 if is_last else 3, np.int32)
        segments.append(Segment(ids, True, logprobs, 1, finish_reason="stop"))
        segments += [] if is_last else [Segment(inserted, False, np.zeros(3, np.float32), role="tool")]
        turn = Turn(f"turn {index}", (), index, "stop", 100 - index)
        played.append(PlayedTurn(turn, ("seen",), reward=float(is_last), done=is_last))
    facts: dict[str, Any] = {"finish_reason": "environment", "components": {"environment": float(rng.integers(2))}}
    if not turns:
        facts = {"finish_reason": "failed", "components": {"environment": None}, "failure": "raised KeyError"}
    return replace(rollout, segments=tuple(segments), episode=tuple(played), **facts)
