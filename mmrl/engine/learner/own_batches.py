"""Micro-batches of a network beside the policy, packed for its own model; features of images may be shared."""

from __future__ import annotations

from typing import Any

import torch

from mmrl.engine import device
from mmrl.engine.learner.collation import Collator, shares_prefix
from mmrl.engine.learner.counting import UpdateCost
from mmrl.engine.learner.image_features import ImageFeatures
from mmrl.engine.learner.microbatches import Microbatches
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.spec import EngineSpec


def own_batches(
    spec: EngineSpec,
    folder: ModelFolder,
    model: Policy,
    module: Any,
    policys: Microbatches,
    images: ImageInputs,
    kind: device.DeviceKind,
    precision: str,
    *,
    same_tower: bool,
    balances: bool = False,
) -> tuple[Microbatches, bool]:
    """The micro-batches of a network, and True if they share their image features with the policy's.

    They are shared if neither trains its tower.

    Args:
        folder: The network's.
        module: Called in the model's place.
        policys: The policy's.
        images: The policy's.
        precision: ``float32`` or ``bfloat16``.
        same_tower: True if its tower is the policy's, or one with equal weights that reads equal pixels.
        balances: As of ``Collator``.
    """
    features, cost = policys.features, UpdateCost.of(model, folder)
    if not same_tower and folder is not spec.folder:
        images = ImageInputs(folder, spec.media, threads=device.READING_THREADS[kind])
    collator = Collator(
        folder,
        model.model.base_model,
        images,
        device.torch_device(kind),
        getattr(torch, precision),
        share=shares_prefix(spec.config.learner, folder),
        balances=balances,
        group=policys.group,
    )
    shares = same_tower and features.kept and collator.share and not cost.trains_tower
    if not shares:
        features = ImageFeatures(collator, model, module, cost, folder, policys.budget, features.where)
    return Microbatches(collator, features, folder, policys.budget), shares
