"""A learner of networks that nothing trains: they compute log-probs, and need no optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmrl.engine import device
from mmrl.engine.learner.collation import Collator, shares_prefix
from mmrl.engine.learner.counting import UpdateCost
from mmrl.engine.learner.image_features import ImageFeatures
from mmrl.engine.learner.learner_settings import deepspeed_settings
from mmrl.engine.learner.microbatches import Microbatches
from mmrl.engine.learner.network import Network
from mmrl.engine.machine.full_device import TokenBudget
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.placement import place_frozen
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.reward_model import RewardLoading
from mmrl.engine.network.sequence import SequenceGroup
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.network.weights import Failures
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Learner, NetworkFiles
from mmrl.token_columns import CRITIC, REWARD


class FrozenLearner(Learner):
    """Implements ``engine_api.Learner`` on one rank, without updates; all ranks call it together.

    Args:
        networks: The networks by role.
        settings: DeepSpeed's configuration; kept as ``settings``.
    """

    def __init__(self, networks: Mapping[str, Network], settings: dict[str, Any]) -> None:
        self.networks, self.settings = networks, settings

    def save(self, folder: Path) -> Mapping[str, NetworkFiles]:
        raise AssertionError("nothing is trained")

    def forget_images(self) -> None:
        """Nothing: features of images are not kept, as the networks' towers may differ."""


def build_frozen_learner(
    spec: EngineSpec, images: ImageInputs, kind: device.DeviceKind, precision: str
) -> FrozenLearner:
    """The learner of ranks that have met, whose policy has the weights of the spec's folder; collective.

    Any other network has those of ``spec.initial``.

    Raises:
        ConfigError: A folder's files cannot be read.
    """
    settings = deepspeed_settings(spec.config.learner, precision, kind)
    group = SequenceGroup.joined(spec.config.learner.sequence_parallel_size)
    networks = {}
    for role in (role for role in spec.roles if role != CRITIC):  # values are of use to updates alone
        folder = spec.folder if role == spec.trained_role else spec.initial
        assert folder is not None, f"the {role} has a folder of its own"
        networks[role] = _network(role, folder, spec, images, kind, precision, settings, group)
    return FrozenLearner(networks, settings)


def _network(
    role: str,
    folder: ModelFolder,
    spec: EngineSpec,
    images: ImageInputs,
    kind: device.DeviceKind,
    precision: str,
    settings: dict[str, Any],
    group: SequenceGroup,
) -> Network:
    config = spec.config
    with Failures().raising():
        policy = load_policy(
            folder,
            kind,
            precision,
            freeze=("vision", "projector", "language"),
            temperature=config.sampler.temperature,
            with_weights=torch.distributed.get_rank() == 0,
            loading=RewardLoading(begins=False) if role == REWARD else None,
        )
    cost = UpdateCost.of(policy, folder)
    module, in_use = place_frozen(policy, settings, kind)
    torch_device = device.torch_device(kind)
    share = shares_prefix(config.learner, folder)
    collator = Collator(
        folder,
        policy.model.base_model,
        images,
        torch_device,
        getattr(torch, precision),
        share=share,
        keeps_last=role == REWARD,
        group=group,
    )
    budget = TokenBudget(config.learner.tokens_per_microbatch * group.size)
    where = torch.device(torch_device)
    features = ImageFeatures(collator, policy, module, cost, folder, budget, where, keeps=False)
    batches = Microbatches(collator, features, folder, budget)
    return Network(role, policy, module, batches, in_use=in_use)
