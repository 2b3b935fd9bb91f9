"""Episodes and views in records: segments that a mask cannot tell, turns with their observations, environments' scores.

A record of a rollout without an environment has none of these fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.rollout.nesting import bounded
from mmrl.types import (
    BoolArray,
    Branch,
    Call,
    EncodedPrompt,
    FloatArray,
    ImageRef,
    IntArray,
    PlayedTurn,
    Rollout,
    Segment,
    Turn,
)


def episode_fields(rollout: Rollout) -> dict[str, Any]:
    """The fields of a record that only some rollouts have."""
    fields = {
        "segments": segment_records(rollout.segments),
        "episode": [_turn_record(played) for played in rollout.episode] or None,
        "components": {name: _known(value) for name, value in rollout.components.items()} or None,
        "failure": rollout.failure or None,
        "branch": None if rollout.branch is None else asdict(rollout.branch),
    }
    return {name: value for name, value in fields.items() if value is not None}


def episode_of(record: Mapping[str, Any], media: Path) -> dict[str, Any]:
    """The arguments of ``Rollout`` that such fields are of.

    Args:
        media: The folder of their images.
    """
    episode, branch = enumerate(record.get("episode") or ()), record.get("branch")
    return {
        "episode": tuple(_played(each, index, media) for index, each in episode),
        "components": dict(record.get("components") or {}),
        "failure": record.get("failure") or "",
        "branch": None if branch is None else Branch(branch["member"], branch["turn"]),
    }


def view_records(prompt: EncodedPrompt) -> list[dict[str, Any]] | None:
    """The views of a prompt; None if it has none."""
    return [
        {
            "name": name,
            "images": list(map(image_record, view.images)),
            "prompt_token_ids": None if np.array_equal(view.token_ids, prompt.token_ids) else view.token_ids.tolist(),
        }
        for name, view in prompt.views.items()
    ] or None


def with_views(prompt: EncodedPrompt, records: Sequence[Mapping[str, Any]], media: Path) -> EncodedPrompt:
    """The prompt with the views of its record.

    Args:
        media: The folder of their images.
    """
    views = {}
    for each in records:
        images, ids = tuple(image_of(image, media) for image in each["images"]), each["prompt_token_ids"]
        tokens = prompt.token_ids if ids is None else np.array(ids, np.int32)
        views[each["name"]] = replace(prompt, images=images, token_ids=tokens)
    return replace(prompt, views=views) if views else prompt


def segment_records(segments: Sequence[Segment]) -> list[dict[str, Any]] | None:
    """Segments that the mask alone does not tell."""
    authors = [each.by_policy for each in segments]
    if all(map(_is_plain, segments)) and all(one != other for one, other in pairwise(authors)):
        return None
    return [
        {
            "tokens": len(each.token_ids),
            "by_policy": each.by_policy,
            "weight_version": each.weight_version,
            "images": [image_record(image) for image in each.images],
            "role": each.role,
            "finish_reason": each.finish_reason,
            **({"continues": True} if each.continues else {}),
        }
        for each in segments
    ]


def segments_of(record: Mapping[str, Any], ids: IntArray, logprobs: FloatArray, media: Path) -> tuple[Segment, ...]:
    """Stretches with one author; neighbours by the same author are one, unless the record has its own segments."""
    if "segments" not in record:
        mask: BoolArray = np.array(record["mask"], np.bool_)
        changes = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
        bounds = pairwise([0, *changes, len(mask)] if len(mask) else [])
        return tuple(Segment(ids[first:end], bool(mask[first]), logprobs[first:end]) for first, end in bounds)
    ends = accumulate((each["tokens"] for each in record["segments"]), initial=0)
    return tuple(
        Segment(
            ids[first:end],
            each["by_policy"],
            logprobs[first:end],
            each["weight_version"],
            tuple(image_of(image, media) for image in each.get("images") or ()),
            each.get("role") or "assistant",  # older records have none
            each.get("finish_reason"),
            bool(each.get("continues")),
        )
        for (first, end), each in zip(pairwise(ends), record["segments"], strict=True)
    )


def image_record(image: ImageRef) -> dict[str, Any]:
    known = {} if image.file_size is None else {"file_size": list(image.file_size)}
    return {"hash": image.hash, "width": image.width, "height": image.height, **known}


def image_of(record: Mapping[str, Any], media: Path) -> ImageRef:
    """The image of a record, in this folder."""
    path, size = str(media / f"{record['hash']}.png"), record.get("file_size")
    known = None if size is None else (int(size[0]), int(size[1]))
    return ImageRef(record["hash"], record["width"], record["height"], path, known)


def _is_plain(segment: Segment) -> bool:
    """True if a segment is no more than its stretch of the mask."""
    is_default = segment.weight_version is None and segment.finish_reason is None and segment.role == "assistant"
    return is_default and not segment.images and not segment.continues and len(segment.token_ids) > 0


def _turn_record(played: PlayedTurn) -> dict[str, Any]:
    turn = played.turn
    return {
        "text": turn.text,
        "calls": [
            {"name": call.name, "arguments": bounded(call.arguments), "error": call.error} for call in turn.calls
        ],
        "finish_reason": turn.finish_reason,
        "tokens_left": turn.tokens_left,
        "content": None if played.content is None else [_part_record(part) for part in played.content],
        "role": played.role,
        "reward": float(played.reward),
        "done": bool(played.done),
        "info": bounded(played.info) or {},
        "began": played.began,
        "finished": played.finished,
    }


def _part_record(part: str | ImageRef) -> dict[str, Any]:
    return {"text": part} if isinstance(part, str) else {"image": image_record(part)}


def _played(record: Mapping[str, Any], index: int, media: Path) -> PlayedTurn:
    calls = tuple(Call(each["name"], each["arguments"], each["error"]) for each in record["calls"])
    content = record["content"]
    return PlayedTurn(
        turn=Turn(record["text"], calls, index, record["finish_reason"], record["tokens_left"]),
        content=None if content is None else tuple(_part(each, media) for each in content),
        role=record["role"],
        reward=record["reward"],
        done=record["done"],
        info=record["info"],
        began=record["began"],
        finished=record["finished"],
    )


def _part(record: Mapping[str, Any], media: Path) -> str | ImageRef:
    return image_of(record["image"], media) if "image" in record else str(record["text"])


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
