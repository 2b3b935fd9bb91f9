"""Reads recorded numbers for ``replay``, and refuses those that would be misunderstood.

Letters: ``B`` rows, ``T`` tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmrl.config.problems import suggestion
from mmrl.errors import DataError
from mmrl.interfaces import Needs
from mmrl.token_columns import COLUMNS, CRITIC_COLUMNS, POLICY, REWARD

Arrays = Mapping[str, Any]
PER_TOKEN = tuple(column.replayed for column in COLUMNS if column.replayed)
_ROWS = {
    "group_ids": "int64",
    "parents": "int64",
    "shared_tokens": "int64",
    "rewards": "float64",
    "greedy_rewards": "float64",
}
_ROWS |= {
    "scores": "float64",
    "final_values": "float64",
    "reward_valid": "bool",
    "truncated": "bool",
    "has_images": "bool",
    "given": "bool",
    "recalled": "bool",
}
_TOKENS = {"response_mask": "bool", "turns": "int64", **dict.fromkeys((*PER_TOKEN, "token_rewards"), "float64")}
_OF_CRITIC = tuple(column.replayed for column in CRITIC_COLUMNS if column.replayed)
_NAMED = ("components", "greedy_components")
_TURNS = ("turn_rewards", "turn_states")
_REQUIRED = ("group_ids", "response_mask", "log_probs", "rollout_log_probs")
_REQUIRED_OF_SCORES = ("group_ids", "scores")
_VIEWS = ("views", "sampled_from")
_MISMATCHED = {column.mismatched_replayed: column.mismatched for column in COLUMNS if column.known == "before the step"}
"""Attributes of ``Batch`` by key."""
_KNOWN = (*_ROWS, *_TOKENS, *_NAMED, *_TURNS, *_VIEWS, *_MISMATCHED, "weights", "penalties", "max_len", "pretrains")


def read_batch(batch: Arrays, needs: Needs, network: str = POLICY) -> dict[str, Any]:
    """Copies of the arrays, of the right types; optional ones that follow from the rest are added.

    Args:
        network: The one that the algorithm trains.

    Raises:
        DataError: A key is missing, or nearly a known one; shapes do not fit; rewards are not their components' sum.
    """
    _check_keys(batch, needs, network)
    batch = batch if needs.values else {key: value for key, value in batch.items() if key not in _OF_CRITIC}
    batch = _with_zeros(batch) if network == REWARD else batch
    shape = _array("log_probs", batch["log_probs"], "float64").shape
    if len(shape) != 2:
        raise DataError(f"log_probs has shape {shape}, and not (B, T)", where="batch", remedy="pad rows to the longest")
    read = {key: _array(key, batch[key], kind, shape[:1]) for key, kind in _ROWS.items() if key in batch}
    read |= {key: _array(key, batch[key], kind, shape) for key, kind in _TOKENS.items() if key in batch}
    for key in _NAMED:
        if key in batch:
            named = batch[key].items()
            read[key] = {name: _array(f"{key}[{name!r}]", values, "float64", shape[:1]) for name, values in named}
    read.setdefault("components", {"reward": read.get("rewards", np.zeros(0)).copy()})
    read |= _turns(batch, read, shape[0]) if "turns" in read else {}
    read |= _views(batch, needs, shape)
    found = {name: _mismatched(key, batch[key], shape[0]) for key, name in _MISMATCHED.items() if key in batch}
    read["mismatched"] = found
    names = list(read["components"])
    if "greedy_rewards" in read:
        read.setdefault("greedy_components", {"reward": read.pop("greedy_rewards")})
    read["weights"] = {name: float(batch.get("weights", {}).get(name, 1.0)) for name in names}
    read["penalties"] = frozenset(batch.get("penalties", ()))
    for key in ("weights", "penalties"):
        _check_names(key, set(batch.get(key, ())) - set(names), names)
    _check_names("greedy_components", set(read.get("greedy_components", names)) ^ set(names), names)
    return _with_sum(read)


def _turns(batch: Arrays, read: Arrays, rows: int) -> dict[str, Any]:
    """The rewards and states of each row's turns."""
    for key in _TURNS:
        if key not in batch or len(batch[key]) != rows:
            what = f"turns go with {' and '.join(_TURNS)}, a sequence for each of {rows} rows"
            raise DataError(what, where="batch", remedy=f"add {key}, one entry for each turn of a row")
    rewards = [_array(f"turn_rewards[{row}]", values, "float64") for row, values in enumerate(batch["turn_rewards"])]
    states = [tuple(map(str, values)) for values in batch["turn_states"]]
    for row, (rewards_K, states_K, turns_T) in enumerate(zip(rewards, states, read["turns"], strict=True)):
        if "reward_valid" in read and not read["reward_valid"][row]:
            continue  # of an episode that failed there may be no turns
        if not (rewards_K.shape == (len(states_K),) and 0 <= turns_T.min() <= turns_T.max() < len(states_K)):
            found = f"{rewards_K.size} rewards, {len(states_K)} states, and tokens of turns up to {turns_T.max()}"
            raise DataError(f"row {row} has {found}", where="batch", remedy="count turns from 0, in each row anew")
    return {"turn_rewards": rewards, "turn_states": states}


def _views(batch: Arrays, needs: Needs, shape: tuple[int, ...]) -> dict[str, Any]:
    """Numbers given views: of each that is scored, and the view that each row was sampled from."""
    given, missing = batch.get("views", {}), set(needs.scored_views) - set(batch.get("views", {}))
    if missing:
        what = f"the batch lacks the views {', '.join(sorted(missing))}"
        raise DataError(what, where="batch", remedy="add views: from names to log_probs and entropy, (B, T) each")
    views = {}
    for name, arrays in given.items():
        _check_names(f"views[{name!r}]", set(arrays) - {"log_probs", "entropy"}, ["log_probs", "entropy"])
        found = {key: _array(f"views[{name!r}][{key!r}]", each, "float64", shape) for key, each in arrays.items()}
        if "log_probs" not in found:
            raise DataError(f"views[{name!r}] lacks log_probs", where="batch", remedy="add them, (B, T)")
        found.setdefault("entropy", np.zeros(shape))
        views[name] = found
    sampled = list(map(str, batch.get("sampled_from", [""] * shape[0])))
    if len(sampled) != shape[0]:
        what = f"sampled_from has {len(sampled)} entries, and there are {shape[0]} rows"
        raise DataError(what, where="batch", remedy="give each row the name of its view, or an empty text")
    return {"views": views, "sampled_from": sampled}


def _mismatched(key: str, values: Any, rows: int) -> list[Any]:
    """Each row's log-probs of another row's completion; a sum is that of one token, NaN is padding."""
    array = _array(key, values, "float64")
    if array.ndim not in (1, 2) or len(array) != rows:
        what = f"{key} has shape {array.shape}, and not (B,) or (B, T') with B = {rows}"
        raise DataError(what, where="batch", remedy="give each row a sum, or its tokens, padded with NaN")
    return [each[~np.isnan(each)] for each in array.reshape(rows, -1)]


def _check_names(key: str, wrong: set[str], names: list[str]) -> None:
    if wrong:
        what = f"{key} does not fit the components: {', '.join(sorted(wrong))}"
        raise DataError(what, where="batch", possible=", ".join(names))


def _with_zeros(batch: Arrays) -> Arrays:
    """The batch of a network without log-probs, which are 0; each row has one token if nothing else is said."""
    scores = _array("scores", batch["scores"], "float64")
    if scores.ndim != 1:
        remedy = "give one score for each row"
        raise DataError(f"scores have shape {scores.shape}, and not (B,)", where="batch", remedy=remedy)
    mask = np.asarray(batch.get("response_mask", np.ones((len(scores), 1))))
    return {"response_mask": mask, **batch, **{key: np.zeros(mask.shape) for key in ("log_probs", "rollout_log_probs")}}


def _check_keys(batch: Arrays, needs: Needs, network: str) -> None:
    for key in sorted(set(batch) - set(_KNOWN)):
        part_of = next((f"did you mean {known}?" for known in _KNOWN if known.endswith(f"_{key}")), "")
        if hint := part_of or suggestion(key, _KNOWN, nearness=0.7):
            raise DataError(f"replay knows no {key!r}", where="batch", possible=", ".join(_KNOWN), remedy=hint)
    required = _REQUIRED_OF_SCORES if network == REWARD else _REQUIRED
    needed = [*required, *(["rewards"] if "components" not in batch else [])]
    needed += [column.replayed for column in needs.columns(1, network) if column.known == "before the step"]
    needed += ["turns", *_TURNS] if needs.turns else []
    needed += ["parents", "shared_tokens"] if needs.branches is not None or "parents" in batch else []
    needed += ["vpreds"] if needs.values else []
    needed += ["token_rewards"] if needs.token_rewards else []
    needed += ["given"] if needs.demonstration else []
    needed += ["recalled"] if needs.experience else []
    needed += ["final_values"] if needs.values and needs.last_state else []
    needed += [column.mismatched_replayed for column in needs.mismatched_columns]
    if needs.greedy_rollout and "greedy_components" not in batch:
        needed += ["greedy_rewards" if "components" not in batch else "greedy_components"]
    missing = [key for key in needed if key not in batch]
    if missing:
        remedy = "add it; the algorithm's needs() ask for it" if missing[0] not in required else "add it"
        remedy = "add it, or components" if missing[0] == "rewards" else remedy
        raise DataError(f"the batch lacks {', '.join(missing)}", where="batch", remedy=remedy)


def _array(name: str, values: Any, kind: str, shape: tuple[int, ...] | None = None) -> Any:
    """A copy, which an algorithm may spoil."""
    try:
        array = np.array(values, kind)
    except (TypeError, ValueError) as error:
        remedy = "give one number for each row, or for each token with rows padded to the longest"
        raise DataError(f"{name} is no array of {kind}: {error}", where="batch", remedy=remedy) from error
    if shape is not None and array.shape != shape:
        letters = "(B,)" if len(shape) == 1 else "(B, T)"
        what = f"{name} has shape {array.shape}, and not {letters} = {shape}"
        raise DataError(what, where="batch", remedy="pad rows to the longest; B and T are those of log_probs")
    return array


def _with_sum(read: dict[str, Any]) -> dict[str, Any]:
    """The batch with rewards and their validity, which follow from the components if they are not given.

    A component that is NaN in a valid row does not apply to it, and adds nothing.
    """
    components, weights = read["components"], read["weights"]
    valid_B = read.setdefault("reward_valid", ~np.any([np.isnan(values) for values in components.values()], axis=0))
    sums = [weights[name] * np.where(np.isnan(values), 0.0, values) for name, values in components.items()]
    total_B = np.sum(sums, axis=0)
    rewards_B = read.setdefault("rewards", np.where(valid_B, total_B, 0.0))
    if not np.allclose(rewards_B[valid_B], total_B[valid_B]):
        remedy = "leave rewards out, or correct components and weights"
        raise DataError("rewards are not the weighted sum of components where they are valid", remedy=remedy)
    return read
