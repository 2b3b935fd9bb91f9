"""Batches for checks, in the schema of ``replay``: random, ragged, with holes, and the odd ones that a run can meet.

Letters: ``B`` rows, ``T`` tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mmrl.interfaces import Needs
from mmrl.testing.recorded import PER_TOKEN, Arrays
from mmrl.testing.trees import moved_trees, with_trees
from mmrl.token_columns import COLUMNS, CRITIC, POLICY, REWARD
from mmrl.types import ENVIRONMENT

_GROUPS = {401: 4, 17: 3, 93: 4, 5: 2, 230: 1}
"""Sizes by id. The ids say nothing, as in a run."""
_EQUAL_GROUP, _FAILED_GROUP, _SINGLE_GROUP, _TEXT_GROUP = 17, 93, 230, 5
_LONGEST = 8


def random_batch(
    needs: Needs, *, binary_rewards: bool, seed: int, components: Sequence[str] = ("reward",), network: str = POLICY
) -> dict[str, Any]:
    """A batch of groups whose rows are mixed, with only those fields that ``needs`` asks for.

    It has a group of equal rewards, a group with only one valid reward, a row without a token in the loss, holes within
    rows, and a group of one if the algorithm allows that. The last of several components counts as a penalty. If turns
    are asked for, there is one more component, of the environment, which is the sum of the turns' rewards.
    """
    rng = np.random.default_rng(seed)
    groups = {i: n for i, n in _GROUPS.items() if i != _SINGLE_GROUP or needs.min_group_size <= n}
    ids_B = rng.permutation(np.repeat(list(groups), list(groups.values())))
    rows = len(ids_B)
    lengths_B = rng.permutation(1 + np.arange(rows) % _LONGEST)
    mask_BT = np.arange(_LONGEST) < lengths_B[:, None]
    mask_BT &= (rng.random((rows, _LONGEST)) > 0.2) | (np.arange(_LONGEST) == 0)
    named = {}
    for name in components:
        named[name] = rng.integers(0, 2, rows).astype(float) if binary_rewards else rng.normal(size=rows)
        named[name][np.flatnonzero(ids_B == 401)[:2]] = [1.0, 0.0]  # never equal by chance
        named[name][ids_B == _EQUAL_GROUP] = 0.7
    valid_B = np.ones(rows, bool)
    valid_B[np.flatnonzero(ids_B == _FAILED_GROUP)[1:]] = False
    mask_BT[np.flatnonzero(ids_B == _EQUAL_GROUP)[0]] = False
    old_BT = -rng.exponential(1.0, (rows, _LONGEST))

    def near(scale: float) -> Any:
        return np.minimum(old_BT + rng.normal(0, scale, old_BT.shape), 0.0)

    batch: dict[str, Any] = {
        "group_ids": ids_B,
        "components": named,
        "weights": {name: 1 / (1 + place) for place, name in enumerate(components)},
        "penalties": components[1:][-1:],
        "reward_valid": valid_B,
        "truncated": lengths_B == _LONGEST,
        "response_mask": mask_BT,
        "log_probs": near(0.3),
        "rollout_log_probs": near(0.05),
        "entropy": rng.exponential(1.0, old_BT.shape),
        "old_log_probs": old_BT,
        "max_len": _LONGEST,
    }
    for column in needs.columns(1, network):
        if column.known == "before the step" and column.role not in (POLICY, CRITIC):
            batch[column.replayed] = near(0.2)
    if needs.values:
        batch["values"] = rng.normal(size=old_BT.shape)
        batch["vpreds"] = batch["values"] + rng.normal(0.0, 0.4, old_BT.shape)
        batch |= {"final_values": rng.normal(size=rows)} if needs.last_state else {}
    if needs.greedy_rollout:
        batch["greedy_components"] = {}
        for name in components:
            baseline = dict(zip(groups, rng.integers(0, 2, len(groups)), strict=True))
            batch["greedy_components"][name] = np.array([baseline[i] for i in ids_B], float)
    if needs.turns:
        batch |= _turns(rng, lengths_B, valid_B, binary_rewards=binary_rewards)
    if needs.branches is not None:
        batch = with_trees(rng, batch, lengths_B)
    if needs.turns:
        batch["components"] = {**named, ENVIRONMENT: np.array([sum(each) for each in batch["turn_rewards"]])}
        batch["weights"] = {**batch["weights"], ENVIRONMENT: 1.0}
    last_B = np.array([row == np.flatnonzero(ids_B == ids_B[row])[-1] for row in range(rows)])
    if needs.demonstration:
        batch |= {"given": last_B, "rollout_log_probs": np.where(last_B[:, None], 0.0, batch["rollout_log_probs"])}
    if needs.experience:
        batch["recalled"] = ~last_B & (rng.random(rows) < 0.3)
    if needs.token_rewards:
        batch["token_rewards"] = rng.normal(size=old_BT.shape) * (rng.random(old_BT.shape) < 0.4) * mask_BT
    if network == REWARD:
        batch = {key: value for key, value in batch.items() if key not in PER_TOKEN}
        batch["scores"] = rng.normal(size=rows)
    if needs.mismatched:
        batch |= _mismatched(rng, needs, rows)
    if needs.views:
        batch |= _views(rng, needs, ids_B, near)
    return _with_components(batch, lambda values_B: values_B)


def _mismatched(rng: np.random.Generator, needs: Needs, rows: int) -> dict[str, Any]:
    """Log-probs of other rows' completions, ragged; one row has none."""
    lengths_B = np.arange(rows) % (_LONGEST + 1)
    values_BT = np.where(np.arange(_LONGEST) < lengths_B[:, None], -rng.exponential(1.0, (rows, _LONGEST)), np.nan)
    return {
        column.mismatched_replayed: values_BT + rng.normal(0.0, 0.2, values_BT.shape)
        for column in needs.mismatched_columns
    }


def _views(rng: np.random.Generator, needs: Needs, ids_B: Any, near: Callable[[float], Any]) -> dict[str, Any]:
    """Numbers given each view; the rows of one group have no images, and so no views."""
    has_images_B = ids_B != _TEXT_GROUP
    found: dict[str, Any] = {"has_images": has_images_B, "views": {}}
    for name in needs.scored_views:
        found["views"][name] = {"log_probs": near(0.5), "entropy": rng.exponential(1.0, near(0.5).shape)}
    if names := [view.name for view in needs.views if view.sampled]:
        chosen = rng.integers(0, 1 + len(names), len(ids_B)) * has_images_B
        found["sampled_from"] = [["", *names][place] for place in chosen]
    return found


def _turns(rng: np.random.Generator, lengths_B: Any, valid_B: Any, *, binary_rewards: bool) -> dict[str, Any]:
    """Episodes of one to four turns, which act upon few states, some of them again; one that failed has no turns."""
    turns_BT = np.array([np.arange(_LONGEST) * rng.integers(1, 5) // length for length in lengths_B]).clip(max=3)
    counts = 1 + turns_BT.max(1)
    rewards = [rng.integers(0, 2, k).astype(float) if binary_rewards else rng.normal(size=k) for k in counts]
    states = [["start", *(f"state {n}" for n in rng.integers(0, 3, k - 1))] for k in counts]
    for row in np.flatnonzero(~valid_B)[:1]:
        rewards[row], states[row] = np.zeros(0), []
    return {"turns": turns_BT, "turn_rewards": rewards, "turn_states": states}


def _with_views(batch: Arrays, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The batch with other numbers given its views, each (B, T)."""
    views = batch.get("views", {}).items()
    changed = {name: {key: change(values) for key, values in arrays.items()} for name, arrays in views}
    return {**batch, **({"views": changed} if changed else {})}


def other_rewards(batch: Arrays) -> dict[str, Any]:
    """The batch with other rewards, in another order within each group."""
    return _with_components(batch, lambda values_B: 1 - 2 * values_B)


def _with_components(batch: Arrays, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The batch with other values of each component, and the rewards that follow from them."""
    components = {name: change(values_B) for name, values_B in batch["components"].items()}
    rewards_B = np.sum([batch["weights"][name] * values_B for name, values_B in components.items()], axis=0)
    return {**batch, "components": components, "rewards": rewards_B}


def without(batch: Arrays, name: str) -> dict[str, Any]:
    """The batch without ``name``, as in a run that does not compute it."""
    return {key: value for key, value in batch.items() if key != name}


def polluted(batch: Arrays, garbage: float) -> dict[str, Any]:
    """The batch with garbage where it must not matter: masked tokens, rewards of invalid rows."""
    mask_BT = batch["response_mask"]
    dirty: dict[str, Any] = {name: np.where(mask_BT, batch[name], garbage) for name in PER_TOKEN if name in batch}
    if "scores" in batch:
        dirty["scores"] = np.where(batch["reward_valid"] & mask_BT.any(1), batch["scores"], garbage)
    if "final_values" in batch:
        dirty["final_values"] = np.where(batch["reward_valid"] & batch["truncated"], batch["final_values"], garbage)
    if "token_rewards" in batch:
        dirty["token_rewards"] = np.where(mask_BT & batch["reward_valid"][:, None], batch["token_rewards"], garbage)
    if "turn_rewards" in batch:
        rows = zip(batch["turn_rewards"], batch["reward_valid"], strict=True)
        dirty["turn_rewards"] = [np.where(valid, values_K, garbage) for values_K, valid in rows]
    seen_BT = mask_BT & np.asarray(batch.get("has_images", True)).reshape(-1, 1)
    batch = _with_views(batch, lambda values_BT: np.where(seen_BT, values_BT, garbage))
    return _with_components({**batch, **dirty}, lambda values_B: np.where(batch["reward_valid"], values_B, garbage))


def padded(batch: Arrays, extra: int) -> dict[str, Any]:
    """The batch with further masked tokens at the end of every row."""
    names = [name for name in (*PER_TOKEN, "response_mask", "token_rewards") if name in batch]
    longer = {name: np.pad(batch[name], ((0, 0), (0, extra))) for name in names}
    if "turns" in batch:
        longer["turns"] = np.pad(batch["turns"], ((0, 0), (0, extra)), "edge")
    return _with_views({**batch, **longer}, lambda values_BT: np.pad(values_BT, ((0, 0), (0, extra))))


def another_order(ids_B: Any, *, whole: bool) -> Any:
    """Places of the rows in another order; in groups that stay whole the first of equal rows stays the first."""
    order = np.random.default_rng(0).permutation(len(ids_B))
    if whole:
        for group in np.unique(ids_B):
            members = ids_B[order] == group
            order[members] = np.sort(order[members])
    return order


def reordered(batch: Arrays, order: Any) -> dict[str, Any]:
    """The batch with its rows in another order and its groups under other ids."""
    rows: dict[str, Any] = {name: value[order] for name, value in batch.items() if isinstance(value, np.ndarray)}
    for key in ("components", "greedy_components"):
        if key in batch:
            rows[key] = {name: values_B[order] for name, values_B in batch[key].items()}
    for key in ("turn_rewards", "turn_states", "sampled_from"):
        if key in batch:
            rows[key] = [batch[key][index] for index in order]
    rows |= moved_trees(batch, order)
    batch = _with_views(batch, lambda values_BT: values_BT[order])
    return {**batch, **rows, "group_ids": rows["group_ids"] * 3 + 1}


def odd_batches(batch: Arrays) -> dict[str, dict[str, Any]]:
    """Odd batches that a run can meet and no estimator should fail on, by description."""
    none_B, no_token_BT = np.zeros_like(batch["reward_valid"]), np.zeros_like(batch["response_mask"])
    first = np.flatnonzero(batch["reward_valid"] & batch["response_mask"].any(1))[:1]
    others = [column.replayed for column in COLUMNS if column.known in ("sampled", "before the step")]
    below = {name: batch[name] - 100.0 for name in others if name in batch}
    found = {
        "no reward is valid": {**batch, "reward_valid": none_B},
        "all rewards are 0": _with_components(batch, np.zeros_like),
        "all rewards are 0.7": _with_components(batch, lambda values_B: np.full_like(values_B, 0.7)),
        "no token is in the loss": {**batch, "response_mask": no_token_BT},
        "every completion was cut off": {**batch, "truncated": ~none_B},
        "there is only one row": reordered(batch, first),
    }
    if "scores" in batch:
        far_B = 100.0 * (-1.0) ** np.arange(len(batch["scores"]))
        return {**found, "scores are 200 apart": {**batch, "scores": far_B}}
    policy = {**batch, "log_probs": batch["log_probs"] - 100.0}
    others_below = _with_views({**batch, **below}, lambda values_BT: values_BT - 100.0)
    return {
        **found,
        "the policy is 100 nats below all others": policy,
        "all other policies are 100 nats below": others_below,
    }
