"""The networks that nothing trains: the initial policy, or teachers, each of which computes with a body of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmrl.engine import device
from mmrl.engine.learner.image_features import ImageFeatures, tower_hash
from mmrl.engine.learner.microbatches import Microbatches
from mmrl.engine.learner.network import Network
from mmrl.engine.learner.own_batches import own_batches
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.placement import place_frozen
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.network.weights import Failures, of_all_ranks
from mmrl.engine.spec import EngineSpec
from mmrl.token_columns import REFERENCE

ALL_PARTS = ("vision", "projector", "language")


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A frozen model in its place.

    Attributes:
        tower: As ``tower_hash``; empty for the initial policy, whose tower is the policy's own.
        module: Called in the model's place.
        in_use: Entered while it computes.
    """

    folder: ModelFolder
    policy: Policy
    tower: str
    module: Any
    in_use: Callable[[], AbstractContextManager[object]]


def load_frozen(
    spec: EngineSpec, folder: ModelFolder, kind: device.DeviceKind, precision: str, settings: dict[str, Any]
) -> FrozenModel:
    """Read a model on rank 0, and bring it to its place; collective, see ``placement``.

    Args:
        folder: The run's own for the initial policy, or a teacher's.
        settings: DeepSpeed's for the trained policy.

    Raises:
        MMRLError: A rank cannot; raised on all of them.
    """
    saved = spec.reset_reference if folder is spec.folder else None
    with Failures().raising():
        policy = load_policy(
            folder if saved is None else replace(folder, path=str(saved)),
            kind,
            precision,
            freeze=ALL_PARTS,
            temperature=spec.config.sampler.temperature,
            with_weights=torch.distributed.get_rank() == 0,
        )
    tower = "" if folder is spec.folder else shared_hash(spec, policy, folder)
    return FrozenModel(folder, policy, tower, *place_frozen(policy, settings, kind))


def shared_hash(spec: EngineSpec, policy: Policy, folder: ModelFolder) -> str:
    """The hash of a model's tower, whose weights are still in the host's memory of rank 0 alone; collective."""
    own = tower_hash(policy, folder, spec.media.grid) if torch.distributed.get_rank() == 0 else ""
    return str(of_all_ranks(own)[0])


def reference_network(
    spec: EngineSpec,
    model: FrozenModel,
    batches: Microbatches,
    images: ImageInputs,
    tower: str,
    kind: device.DeviceKind,
    precision: str,
) -> Network:
    """The network of a frozen model.

    Args:
        batches: The policy's.
        images: The policy's.
        tower: The hash of the policy's tower.
        precision: ``float32`` or ``bfloat16``.
    """
    folder, in_use = model.folder, model.in_use
    if folder is spec.folder:
        return Network(REFERENCE, model.policy, model.module, batches, in_use=in_use)
    own, shares = own_batches(
        spec,
        folder,
        model.policy,
        model.module,
        batches,
        images,
        kind,
        precision,
        same_tower=bool(tower) and model.tower == tower,
    )
    if not shares:
        in_use = _forgetting(in_use, own.features)
    return Network(REFERENCE, model.policy, model.module, own, in_use=in_use)


def _forgetting(
    in_use: Callable[[], AbstractContextManager[object]], features: ImageFeatures
) -> Callable[[], AbstractContextManager[object]]:
    """Blocks of ``in_use`` that drop the features of images at their end: a step asks a teacher once."""

    @contextmanager
    def block() -> Iterator[None]:
        try:
            with in_use():
                yield
        finally:
            features.forget()

    return block
