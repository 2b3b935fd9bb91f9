"""The document of one group: its prompt, and each member with its scores, tokens and turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.rollout.records.pairs import RECORDED
from mmrl.token_columns import COLUMNS, POLICY, REFERENCE
from mmrl.types import GIVEN
from mmrl.viewer.documents import Document, NotThere
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.pairs import likelihood_document, pair_document
from mmrl.viewer.steps import step_index, why
from mmrl.viewer.tokens import Vocabulary

_OF_GROUP = ("group", "prompt_id", "source", "kept", "messages", "prompt", "answer", "choices", "columns", "images")
_OF_MEMBER = ("index", "greedy", "finish_reason", "weight_version", "reward", "rewards", "valid")


def group_document(run: ViewedRun, kind: str, step: int, group: int) -> Document:
    """All that a group's record has, with the texts of its tokens."""
    places = step_index(run, kind, step).places
    if group not in places:
        raise NotThere(f"step {step} has no group {group}", where=str(run.path), possible=f"0 to {len(places) - 1}")
    records = run.pages(kind, step).records(places[group])
    first, vocabulary = records[0], run.vocabulary
    trained = bool(first.get("trained", first["kept"]))
    is_given = all(each["weight_version"] == GIVEN for each in records)
    sampled = [each for each in records if not each["greedy"] and each["weight_version"] != GIVEN]
    rewards = [each["reward"] for each in sampled if each["valid"]]
    return {
        **{name: first[name] for name in _OF_GROUP},
        "columns_as_text": first.get("columns_as_text") or {},
        "demonstration": first.get("demonstration"),
        "epoch": first.get("epoch", 0),
        "trained": trained,
        "why": why(kind, bool(first["kept"]), trained, rewards, is_given),
        "prompt_tokens": len(first["prompt_token_ids"]),
        "members": [_member(each, vocabulary, is_given) for each in records],
        **pair_document(records),
        **({"retries": first["retries"]} if first.get("retries") else {}),
        **({"candidates": first["candidates"]} if first.get("candidates") else {}),
        **({"views": _views(first["views"])} if first.get("views") else {}),
    }


def _views(records: Sequence[Mapping[str, Any]]) -> list[Document]:
    return [{"name": each["name"], "images": each["images"]} for each in records]


def _member(record: Mapping[str, Any], vocabulary: Vocabulary, of_dataset: bool) -> Document:
    """A member of a group.

    Args:
        of_dataset: True if the dataset gives the whole group.
    """
    episode = record.get("episode")
    return {
        **{name: record[name] for name in _OF_MEMBER},
        "reward": None if of_dataset else record["reward"],
        **likelihood_document(record),
        "text": record["completion"],
        "answers": record.get("answers") or {},
        "failure": record.get("failure") or None,
        "components": record.get("components") or {},
        "turn_rewards": None if episode is None else [turn["reward"] for turn in episode],
        "tokens": _tokens(record, vocabulary),
        **({} if episode is None else {"episode": episode}),
        **({"view": record["view"]} if record.get("view") else {}),
        **({"recalled": True} if record.get("recalled") else {}),
        **({"shown": True} if record["weight_version"] == GIVEN and not of_dataset else {}),
        **({"branch": record["branch"]} if record.get("branch") else {}),
    }


def _tokens(record: Mapping[str, Any], vocabulary: Vocabulary) -> Document:
    """A value of each token by name; names that have nothing to tell are left out."""
    ids, mask = np.asarray(record["token_ids"], np.int64).tolist(), np.asarray(record["mask"], bool)
    unknown = "sampled" if record["weight_version"] == GIVEN else ""  # zeros, which nobody computed
    plain = [column.record for column in COLUMNS if not column.is_per_update and column.known != unknown]
    numbers = {name.removesuffix("s"): _numbers(record, name, mask) for name in (*plain, "token_rewards")}
    sampler, value, returns = (numbers.get(name) for name in ("sampler_logprob", "value", "return"))
    learner, reference = (numbers[RECORDED[role].removesuffix("s")] for role in (POLICY, REFERENCE))
    updates = [np.asarray(each, np.float64) for each in record.get("update_logprobs") or () if len(each)]
    entropies = [np.asarray(each, np.float64) for each in record.get("update_entropy") or () if len(each)]
    found = {
        **numbers,
        "log_ratio": None if learner is None or reference is None else learner - reference,
        "entropy": np.where(mask, entropies[0], np.nan) if entropies else None,
        "ratio": np.where(mask, np.exp(updates[-1] - updates[0]), np.nan) if len(updates) > 1 else None,
        "gap": None if sampler is None or learner is None else sampler - learner,
        "value_error": None if value is None or returns is None else returns - value,
    }
    texts = vocabulary.pieces(ids)
    return {
        **({} if texts is None else {"text": texts}),
        "ids": ids,
        "mask": mask.tolist(),
        **_versions(record, mask),
        **{name: _short(values) for name, values in found.items() if values is not None},
    }


def _versions(record: Mapping[str, Any], mask: Any) -> Document:
    """The weights that sampled each token, null for what they did not write; nothing where they are one version."""
    segments = record.get("segments") or ()
    counts, own = [each["tokens"] for each in segments], [each["weight_version"] for each in segments]
    versions = np.repeat([record["weight_version"] if each is None else each for each in own], counts)
    if len(versions) != len(mask) or len(np.unique(versions[mask])) < 2:
        return {}
    return {"version": [int(version) if is_own else None for version, is_own in zip(versions, mask, strict=True)]}


def _numbers(record: Mapping[str, Any], name: str, mask: Any) -> Any:
    """One number for each token that the policy wrote, NaN for others; None if there are none."""
    values = record.get(name)
    if values is None or len(values) != len(mask) or not len(mask):
        return None
    return np.where(mask, np.asarray(values, np.float64), np.nan)


def _short(values: Any) -> Sequence[float | None]:
    """Numbers of six digits: more than a colour shows, and a third of the bytes. NaN is None."""
    with np.errstate(all="ignore"):
        scale = 10.0 ** (5 - np.floor(np.log10(np.abs(values))))
        rounded = np.round(values * scale) / scale
    short = np.where(np.isfinite(rounded), rounded, values)
    found: list[float | None] = short.tolist()
    for place in np.flatnonzero(~np.isfinite(short)):
        found[place] = None
    return found
