"""The learner of one rank: networks by role, each of which is read, placed, and given an engine of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from mmrl.engine import device
from mmrl.engine.learner.collation import Collator, shares_prefix
from mmrl.engine.learner.counting import UpdateCost
from mmrl.engine.learner.critic_network import build_critic
from mmrl.engine.learner.deepspeed_engine import deepspeed_engine
from mmrl.engine.learner.frozen import load_frozen, reference_network, shared_hash
from mmrl.engine.learner.image_features import ImageFeatures
from mmrl.engine.learner.learner_settings import deepspeed_settings
from mmrl.engine.learner.learner_state import check_optimizer
from mmrl.engine.learner.microbatches import Microbatches
from mmrl.engine.learner.network import Network
from mmrl.engine.learner.reset import AdapterCopy, PolicyCopy, WholeCopy
from mmrl.engine.learner.reward_network import TrainedRewardModel
from mmrl.engine.learner.teachers import Teachers
from mmrl.engine.learner.trained_models import place_trained, read_trained
from mmrl.engine.learner.trained_network import TrainedNetwork
from mmrl.engine.machine.full_device import TokenBudget, memory_of
from mmrl.engine.network.adapters import read
from mmrl.engine.network.plain_model import WidePass
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.reward_model import RewardLoading
from mmrl.engine.network.sequence import SequenceGroup
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.network.weights import Failures
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Learner, NetworkFiles
from mmrl.engine_api import Network as AnyNetwork
from mmrl.token_columns import CRITIC, POLICY, REFERENCE, REWARD


class DeepSpeedLearner(Learner):
    """Implements ``engine_api.Learner`` on one rank; all ranks call it together.

    Args:
        trained: The networks that are trained: the policy, and a critic beside it; or a reward model alone. The first
            one is kept as ``trained``.
        frozen: The other networks, by role.
        settings: DeepSpeed's configuration of the first one; kept as ``settings``.
        copy: The reference, if it may become the policy.
    """

    def __init__(
        self,
        trained: Sequence[TrainedNetwork],
        frozen: Mapping[str, AnyNetwork],
        settings: dict[str, Any],
        copy: PolicyCopy | None,
    ) -> None:
        self.networks = {**{each.role: each for each in trained}, **frozen}
        self._all, self.settings = trained, settings
        self._copy = copy

    @property
    def trained(self) -> TrainedNetwork:
        """The policy, or a reward model that is trained alone."""
        return self._all[0]

    @property
    def weight_version(self) -> int:
        """The number of the weights that the sampler is to get: the policy's optimizer steps."""
        return self.trained.optimizer_steps

    @property
    def policy(self) -> Policy:
        """The weights that the sampler is to get."""
        return self.trained.policy

    def reset_reference(self) -> None:
        assert self._copy is not None, "the reference is a teacher, or there is none"
        with memory_of("the copy of the policy"):
            self._copy.take()

    def save(self, folder: Path) -> Mapping[str, NetworkFiles]:
        files = {each.role: each.save(folder) for each in self._all}
        if self._copy is not None and self._copy.is_reset:
            files[REFERENCE] = NetworkFiles.of(REFERENCE, trained=False)
            failures = Failures()
            with memory_of("the checkpoint"):
                self._copy.save(folder / files[REFERENCE].model, failures)
            failures.raise_first()
        return files

    def forget_images(self) -> None:
        """As ``Microbatches.forget_images``, of all networks that are trained."""
        for each in self._all:
            each.forget_images()

    def release(self) -> None:
        """Give weights and optimizer up for another learner in this process; this one cannot be used again.

        At stages 1 and 2, DeepSpeed's hooks keep the memory until they are removed. At stage 3 DeepSpeed 0.19 keeps it
        even then.
        """
        self.forget_images()
        for each in self._all:
            each.engine.destroy()


def build_learner(spec: EngineSpec, images: ImageInputs, kind: device.DeviceKind, precision: str) -> DeepSpeedLearner:
    """The learner of ranks that have met, with the weights and the state of the spec's checkpoint; collective.

    Args:
        spec: It has an algorithm.

    Raises:
        ConfigError: The checkpoint has another model, other trained parts or another precision.
        ResourceError: The checkpoint is damaged.
    """
    config, folder, algorithm = spec.config, spec.folder, spec.algorithm
    assert algorithm is not None, "an engine without an algorithm only samples"
    torch_device = device.torch_device(kind)
    settings = deepspeed_settings(config.learner, precision, kind)
    loading = None if spec.trained_role == POLICY else RewardLoading(config.trainer.seed)
    policy = read_trained(spec, spec.trained_role, folder, config, loading, kind, precision)
    tower = shared_hash(spec, policy, folder) if spec.teachers or spec.critic else ""
    copies = _saved_adapters(spec, policy, torch_device)
    # Each model is out of the host's memory, or has what it keeps of it, before the next one is read.
    place_trained(policy, settings, kind)
    frozen = [load_frozen(spec, each, kind, precision, settings) for each in spec.frozen_folders]
    group = SequenceGroup.joined(config.learner.sequence_parallel_size)
    collator = Collator(
        folder,
        policy.model.base_model,
        images,
        torch_device,
        getattr(torch, precision),
        share=shares_prefix(config.learner, folder),
        balances=config.learner.router_aux_loss_coef > 0,
        replays=config.learner.routing == "replayed",
        keeps_last=spec.trained_role == REWARD,
        group=group,
    )
    check_optimizer(settings)
    cost = UpdateCost.of(policy, folder)
    engine = deepspeed_engine(policy, settings, checkpoints=config.model.gradient_checkpointing)
    budget = TokenBudget(config.learner.tokens_per_microbatch * group.size)
    features = ImageFeatures(collator, policy, engine, cost, folder, budget, engine.device)
    batches = Microbatches(collator, features, folder, budget)
    wide = WidePass(folder, images, kind, precision)
    network = TrainedNetwork if spec.trained_role == POLICY else TrainedRewardModel
    trained = [network(spec.trained_role, policy, engine, batches, cost, algorithm, config, folder, wide)]
    others, copy = dict[str, AnyNetwork](), cast(PolicyCopy | None, None)
    networks = [reference_network(spec, each, batches, images, tower, kind, precision) for each in frozen]
    if networks:
        taught = config.reference.models
        others[REFERENCE] = Teachers(taught, networks) if len(taught) > 1 else networks[0]
        if not taught:
            is_reset = spec.reset_reference is not None
            copy = WholeCopy(policy, networks[0].policy, folder, is_reset=is_reset)
    if REFERENCE in spec.roles and not frozen:
        assert config.model.lora is not None, "the reference is the policy, without its adapters or with earlier ones"
        copy = AdapterCopy(policy, folder, config.model.lora, copies)
        others[REFERENCE] = Network(REFERENCE, policy, engine, batches, in_use=copy.in_use)
    if CRITIC in spec.roles:
        trained.append(build_critic(spec, policy, batches, images, tower, kind, precision))
    if spec.checkpoint is not None:
        for each in trained:
            each.restore(spec.checkpoint)
    return DeepSpeedLearner(trained, others, settings, copy)


def _saved_adapters(spec: EngineSpec, policy: Policy, torch_device: str) -> list[torch.Tensor] | None:
    """The adapters of a checkpoint's reference; None if it has none.

    Raises:
        MMRLError: A rank cannot read them; raised on all of them.
    """
    if not policy.adapted or spec.reset_reference is None:
        return None
    with Failures().raising():
        found = read(policy.adapted, spec.reset_reference)
    return [each.to(torch_device, policy.model.dtype) for each in found]
