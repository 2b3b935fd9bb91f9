"""Rows that a policy has sampled: whether the run's model reads and writes them in the tokens that they had then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mmrl.data.prompts import PromptSource
from mmrl.errors import DataError
from mmrl.interfaces import SampledRow
from mmrl.runs.setup import RunSetup
from mmrl.types import EncodedPrompt, IntArray, Rollout

_MANY = 0.5
"""Share of completions in other tokens from which they are told: a policy need not sample a text's usual tokens."""
_AROUND = 24
"""Characters before and after a difference that are shown."""


def sampled_warnings(setup: RunSetup, source: PromptSource) -> list[str]:
    """Warnings of datasets whose rows another chat template or tokenizer has written when they were sampled.

    Raises:
        PluginError: A loader fails.
    """
    loaded = setup.loaded_for(source.name)
    return [
        f"{source.name if len(loaded) == 1 else key}: {warning}"
        for key, dataset in loaded.items()
        if (sampled := dataset.sampled())
        for warning in _differences(setup, source, sampled)
    ]


def _differences(setup: RunSetup, source: PromptSource, sampled: list[SampledRow]) -> Iterator[str]:
    ours, theirs = f"{setup.config.model.path} (model.path)", sampled[0].by
    pairs, prompts, completions = list[tuple[EncodedPrompt, Rollout]](), list[str](), 0
    for row in sampled:
        try:
            pairs.append((setup.encoder.encode(source.prepared(row.prompt)), row.rollout))
        except DataError:  # a bad row is told of when it is drawn
            continue
    for encoded, rollout in pairs:
        if difference := _prompts_differ(encoded, rollout.prompt, ours, theirs):
            prompts.append(f"{difference} (row {encoded.id})")
        elif not _writes(setup, encoded, rollout):
            completions += 1
    if prompts:
        what = f"{len(prompts)} of {len(pairs)} rows that were looked at are read otherwise than where"
        yield f"{what} {theirs} sampled their completions: {prompts[0]}"
    elif completions > _MANY * len(pairs):
        what = f"{completions} of {len(pairs)} completions that were looked at have other tokens by the tokenizer of"
        yield f"{what} {ours} than those that {theirs} sampled"


def _prompts_differ(encoded: EncodedPrompt, then: EncodedPrompt, ours: str, theirs: str) -> str:
    """The difference of a prompt as this run's model and the recorded one read it; empty if there is none."""
    if encoded.text != then.text:
        pairs = enumerate(zip(encoded.text, then.text, strict=False))
        shortest = min(len(encoded.text), len(then.text))
        place = next((place for place, (one, other) in pairs if one != other), shortest)
        now, before = (repr(text[max(0, place - _AROUND) : place + _AROUND]) for text in (encoded.text, then.text))
        return f"from character {place} on {now} by {ours}, {before} by {theirs}"
    if [(ref.width, ref.height) for ref in encoded.images] != [(ref.width, ref.height) for ref in then.images]:
        now, before = (" and ".join(f"{r.width}x{r.height}" for r in each.images) for each in (encoded, then))
        return f"images of {now} by {ours}, of {before} by {theirs}"
    if not np.array_equal(encoded.token_ids, then.token_ids):
        return f"{len(encoded.token_ids)} tokens by {ours}, {len(then.token_ids)} others by {theirs}"
    return ""


def _writes(setup: RunSetup, encoded: EncodedPrompt, rollout: Rollout) -> bool:
    """True if the run learns a completion in the tokens that were sampled, whichever token ends it."""
    row = replace(encoded.prompt, demonstration=rollout.text)
    try:
        shown = setup.encoder.demonstrate(replace(encoded, prompt=row))
    except DataError:  # special tokens, or thoughts that do not go with the template: the row is a bad one
        return True
    sampled: IntArray = rollout.token_ids if rollout.truncated else rollout.token_ids[:-1]
    return np.array_equal(shown.token_ids[:-1], sampled)
