"""The critic: a network that is trained beside the policy, and answers values where a policy answers log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mmrl.engine import device
from mmrl.engine.learner.counting import UpdateCost
from mmrl.engine.learner.deepspeed_engine import deepspeed_engine
from mmrl.engine.learner.frozen import shared_hash
from mmrl.engine.learner.learner_settings import deepspeed_settings
from mmrl.engine.learner.microbatches import Microbatches, values_of
from mmrl.engine.learner.own_batches import own_batches
from mmrl.engine.learner.trained_models import place_trained, read_trained
from mmrl.engine.learner.trained_network import TrainedNetwork
from mmrl.engine.network.packed_inputs import PackedInputs, Routing
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.reward_model import CriticLoading
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Way
from mmrl.ops.objective import CRITIC_LOSS, PartialLoss, seen_samples, value_loss, weighed_loss
from mmrl.token_columns import CRITIC
from mmrl.types import FloatArray, PreUpdateStatistics, Sample, TrainingRow


class TrainedCritic(TrainedNetwork):
    """A critic; nothing samples from it, and its experts are its own."""

    scored = "values"
    _phase = "the critic's update"
    _total_loss, _rate_metric, _norm_metric = CRITIC_LOSS, "critic/lr", "critic/grad_norm"

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        """(T_i,) float32 values of the states that each token was chosen in, also of tokens that others wrote."""
        return [] if way == "wide" else super().score(samples, way=way)

    @property
    def _all_updates(self) -> int:
        return self._run.trainer.steps * self._config.minibatches * self._config.epochs

    def _inputs(self, samples: Sequence[Sample], batches: Microbatches | None = None) -> PackedInputs:
        inputs = super()._inputs(samples, batches)
        return replace(inputs, routing=Routing(inputs.routing.members_NO))

    def _metrics_of_passes(self, microbatches: int, costs: Sequence[Sequence[int]]) -> dict[str, float]:
        return {}

    def _partial(self, rows: Sequence[TrainingRow], found: Sequence[torch.Tensor]) -> PartialLoss:
        (values_T,) = found
        return weighed_loss(rows, *value_loss(self._algorithm, rows, values_T))

    def _statistics(self, rows: Sequence[TrainingRow], packed: Sequence[torch.Tensor]) -> list[PreUpdateStatistics]:
        nothing, (values_T,) = np.zeros(0, np.float32), packed
        return [PreUpdateStatistics(nothing, nothing, vpreds=each) for each in values_of(values_T, seen_samples(rows))]


def build_critic(
    spec: EngineSpec,
    policy: Policy,
    policys: Microbatches,
    images: ImageInputs,
    tower: str,
    kind: device.DeviceKind,
    precision: str,
) -> TrainedCritic:
    """The critic of ranks whose policy is in its place; collective.

    Args:
        policys: The policy's micro-batches.
        images: The policy's.
        tower: The hash of the policy's tower, where a critic has a folder of its own.
        precision: ``float32`` or ``bfloat16``.

    Raises:
        MMRLError: A rank cannot read it; raised on all of them.
    """
    config, folder = spec.critic_config, spec.critic or spec.folder
    settings = deepspeed_settings(config.learner, precision, kind)
    assert config.critic is not None and spec.algorithm is not None
    loading = CriticLoading(config.trainer.seed if config.critic.head == "normal" else None)
    base = policy if spec.shares_base else None
    critic = read_trained(spec, CRITIC, folder, config, loading, kind, precision, base=base)
    same_tower = spec.critic is None or (bool(tower) and shared_hash(spec, critic, folder) == tower)
    place_trained(critic, settings, kind)
    engine = deepspeed_engine(critic, settings, checkpoints=config.model.gradient_checkpointing)
    batches, shares = own_batches(
        spec,
        folder,
        critic,
        engine,
        policys,
        images,
        kind,
        precision,
        same_tower=same_tower,
        balances=config.learner.router_aux_loss_coef > 0,
    )
    if shares and folder is spec.folder:
        batches = policys  # with the positions that they know
    cost = UpdateCost.of(critic, folder)
    return TrainedCritic(CRITIC, critic, engine, batches, cost, spec.algorithm, config, folder, wide=None)
