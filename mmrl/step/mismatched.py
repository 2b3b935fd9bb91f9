"""Log-probs of prompts with completions that other prompts have, as ``Needs.mismatched`` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmrl.engine_api import Learner
from mmrl.interfaces import Needs
from mmrl.types import Batch, FloatArray, IntArray, Sample


def mismatched_logprobs(batch: Batch, samples: Sequence[Sample], needs: Needs, learner: Learner) -> dict[str, Any]:
    """The fields of ``Batch`` that are asked for and that it lacks, B arrays each; empty where a row has no partner."""
    columns = [column for column in needs.mismatched_columns if getattr(batch, column.mismatched) is None]
    if not columns:
        return {}
    partners = partners_of(samples)
    rows = [row for row, partner in enumerate(partners) if partner is not None]
    swapped = [Sample(samples[i].prompt, samples[j].segments) for i, j in enumerate(partners) if j is not None]
    fields = dict[str, Any]()
    for column in columns:
        found: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
        scored = learner.network(column.role).score(swapped) if swapped else ()
        for row, values in zip(rows, scored, strict=True):
            found[row] = values
        fields[column.mismatched] = found
    return fields


def partners_of(samples: Sequence[Sample]) -> list[int | None]:
    """For each sample the place of the next one, cyclically, whose prompt and completion both differ; None if there is
    none.

    Prompts are equal if their tokens and images are, whatever row they are from. A sample without tokens has no
    partner and is none.
    """
    prompts = _numbered(
        [(each.prompt.token_ids.tobytes(), tuple(ref.hash for ref in each.prompt.images)) for each in samples]
    )
    completions = _numbered([each.token_ids.tobytes() for each in samples])
    has_tokens = np.array([len(each.token_ids) > 0 for each in samples], bool)
    partners = list[int | None]()
    for place in range(len(samples)):
        fits = has_tokens & has_tokens[place] & (prompts != prompts[place]) & (completions != completions[place])
        later = np.flatnonzero(np.roll(fits, -place - 1))
        partners.append(int(place + 1 + later[0]) % len(samples) if len(later) else None)
    return partners


def _numbered(keys: Sequence[object]) -> IntArray:
    """A number for each key, the same for equal ones."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)
