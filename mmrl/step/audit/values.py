"""Rows of a critic: its values in packed rows and one by one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmrl.engine_api import Way
from mmrl.ops.parity import LIMITS
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import Probed
from mmrl.token_columns import CRITIC
from mmrl.types import FloatArray

SHARED = "a shared prompt, or other samples in the row"


def value_rows(probed: Probed) -> Iterator[ProbeRow]:
    """A row for the values of each prompt's completions.

    None without a critic, and none while its head is of zeros: then all values are 0, and nothing can be compared.
    """
    with probed.engine.learning() as learner:
        if CRITIC not in learner.networks or not probed.samples:
            return
    packed, alone = _values(probed, "packed"), _values(probed, "single")
    largest = max(float(np.abs(values).max(initial=0.0)) for values in alone)
    if not largest:
        return
    for prompt in probed.prompts:
        gaps = [np.abs(packed[place] - alone[place]).max(initial=0.0) for place in probed.of(prompt.name)]
        gap = float(max(gaps)) / max(1.0, largest)
        told = f"the critic's values, packed, are {gap:.1e} of the largest one from themselves one by one"
        bound, finds = LIMITS[probed.precision].noise_stop, f"{prompt.finds}; {SHARED}"
        yield ProbeRow.at_most(f"critic: packed = one by one, {prompt.name}", gap, bound, told, finds)


def _values(probed: Probed, way: Way) -> list[FloatArray]:
    """Each call takes the learner anew, so that what one keeps of images serves no other."""
    with probed.engine.learning() as learner:
        return learner.network(CRITIC).score([each.sample for each in probed.samples], way=way)
