"""The part of a micro-batch's loss and metrics that routers of a mixture of experts give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mmrl.engine.collation import PackedInputs
from mmrl.engine.experts import Router, imbalances, rerouted
from mmrl.ops.objective import PartialLoss
from mmrl.types import TrainingRow


def with_experts(
    partial: PartialLoss, routers: Sequence[Router], inputs: PackedInputs, rows: Sequence[TrainingRow], share: float
) -> PartialLoss:
    """A micro-batch's loss with its share of the routers' loss, and the share of tokens with other experts.

    Args:
        routers: They have just computed the row of ``inputs``.
        share: The factor of each row's imbalance; 0 for no loss.
    """
    loss, sums = partial.loss, dict(partial.sums)
    if share:
        balance = share * imbalances(routers)[: len(rows)].sum()
        loss = loss + balance.to(loss)
        sums["loss/router_aux"] = float(balance.detach())
        sums["loss/total"] += sums["loss/router_aux"]
    if inputs.routing.recorded_SLK is not None:
        mask_T = torch.from_numpy(np.concatenate([row.mask for row in rows])).to(inputs.predicting_T.device)
        tokens_T, layers_T = rerouted(routers, inputs.predicting_T[: len(mask_T)])
        sums["mismatch/rerouted_tokens"] = float((tokens_T & mask_T).sum())
        sums["mismatch/rerouted_choices"] = float((layers_T * mask_T).sum())
    return PartialLoss(loss, sums, partial.tokens)
