"""One weight per sequence: how per-token losses become one number, whatever the packing.

The loss of an optimizer step is ``sum_i w_i sum_t m_it L_it``. The weights are computed once, over all ranks and
micro-batches, after every mask is final; partial sums then add up to the same loss and gradient for any packing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmrl.interfaces import Aggregation
from mmrl.types import BoolArray, FloatArray, IntArray


def sequence_weights(
    aggregation: Aggregation, masks: Sequence[BoolArray], group_ids: IntArray, *, count_empty: bool = False
) -> FloatArray:
    """(B,) float64 weights of one optimizer step's rows; 0 for a row without a token in the loss.

    With ``n_i`` tokens in the loss of row ``i``, ``S`` rows that have any and ``P`` prompts that have any:

    - ``token-mean``: ``1 / sum_j n_j``
    - ``seq-mean-token-mean``: ``1 / (S n_i)``
    - ``seq-mean-token-sum``: ``1 / S``
    - ``seq-mean-token-sum-norm``: ``1 / (S L)`` with the constant ``L``, which must be set
    - ``prompt-mean-token-mean``: ``1 / (P sum_{j in g(i)} n_j)``

    Args:
        masks: B arrays (T_i,), the final masks of all ranks and micro-batches.
        group_ids: (B,) one id per prompt instance.
        count_empty: Count rows without tokens in ``S``.
    """
    lengths_B = np.array([np.count_nonzero(mask) for mask in masks], np.float64)
    filled_B = lengths_B > 0
    if not filled_B.any():
        return np.zeros_like(lengths_B)
    num_sequences = len(masks) if count_empty else np.count_nonzero(filled_B)
    denominators_B: FloatArray
    if aggregation.mode == "token-mean":
        denominators_B = np.full_like(lengths_B, lengths_B.sum())
    elif aggregation.mode == "seq-mean-token-mean":
        denominators_B = num_sequences * lengths_B
    elif aggregation.mode == "seq-mean-token-sum":
        denominators_B = np.full_like(lengths_B, num_sequences)
    elif aggregation.mode == "seq-mean-token-sum-norm":
        if aggregation.constant is None:
            raise ValueError("seq-mean-token-sum-norm needs its length constant")
        denominators_B = np.full_like(lengths_B, num_sequences * aggregation.constant)
    else:
        _, members_B = np.unique(group_ids, return_inverse=True)
        group_lengths = np.bincount(members_B, weights=lengths_B)
        denominators_B = float(np.count_nonzero(group_lengths)) * group_lengths[members_B]
    return np.divide(1.0, denominators_B, out=np.zeros_like(lengths_B), where=filled_B)
