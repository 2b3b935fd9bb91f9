"""The learner of one rank: networks by role, each of which is read, placed, and given an engine of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError

from mmrl.engine import device
from mmrl.engine.learner.collation import Collator, shares_prefix
from mmrl.engine.learner.counting import UpdateCost
from mmrl.engine.learner.frozen import load_frozen, reference_network, shared_hash
from mmrl.engine.learner.image_features import ImageFeatures
from mmrl.engine.learner.learner_settings import check_overlap, compiles, deepspeed_settings
from mmrl.engine.learner.learner_state import check_optimizer
from mmrl.engine.learner.microbatches import Microbatches
from mmrl.engine.learner.network import Network, TrainedNetwork
from mmrl.engine.learner.reset import AdapterCopy, PolicyCopy, WholeCopy
from mmrl.engine.learner.reward_network import TrainedRewardModel
from mmrl.engine.learner.teachers import Teachers
from mmrl.engine.machine.full_device import TokenBudget, memory_of
from mmrl.engine.network.adapters import is_adapter, read
from mmrl.engine.network.placement import place
from mmrl.engine.network.plain_model import WidePass
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.network.reward_model import RewardLoading
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.network.weights import Failures
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Learner, NetworkFiles
from mmrl.engine_api import Network as AnyNetwork
from mmrl.errors import ConfigError
from mmrl.token_columns import POLICY, REFERENCE


class DeepSpeedLearner(Learner):
    """Implements ``engine_api.Learner`` on one rank; all ranks call it together.

    Args:
        trained: The network that is trained, a policy or a reward model; kept as ``trained``.
        frozen: The other networks, by role.
        settings: DeepSpeed's configuration; kept as ``settings``.
        copy: The reference, if it may become the policy.
    """

    def __init__(
        self,
        trained: TrainedNetwork,
        frozen: Mapping[str, AnyNetwork],
        batches: Microbatches,
        settings: dict[str, Any],
        copy: PolicyCopy | None,
    ) -> None:
        self.networks = {trained.role: trained, **frozen}
        self.trained, self.settings, self._batches = trained, settings, batches
        self._copy = copy

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
        files = {self.trained.role: self.trained.save(folder)}
        if self._copy is not None and self._copy.is_reset:
            files[REFERENCE] = NetworkFiles.of(REFERENCE, trained=False)
            failures = Failures()
            with memory_of("the checkpoint"):
                self._copy.save(folder / files[REFERENCE].model, failures)
            failures.raise_first()
        return files

    def forget_images(self) -> None:
        """As ``Microbatches.forget_images``."""
        self._batches.forget_images()

    def release(self) -> None:
        """Give weights and optimizer up for another learner in this process; this one cannot be used again.

        At stages 1 and 2, DeepSpeed's hooks keep the memory until they are removed. At stage 3 DeepSpeed 0.19 keeps it
        even then.
        """
        self.forget_images()
        self.trained.engine.destroy()


def join_deepspeed(kind: device.DeviceKind) -> None:
    """Let DeepSpeed use the group of ranks that have met, before it places weights."""
    import deepspeed

    if kind == "cpu":
        # DeepSpeed would compile a shared-memory collective for a minute before it makes the group. Its
        # inference_all_reduce alone uses it, which nothing here calls. DeepSpeed keeps edits of this table.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=device.process_group_backend(kind), verbose=False)


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
    policy = _load_policy(spec, kind, precision)
    check_overlap(kind, settings, max((p.numel() for p in policy.parameters() if p.requires_grad), default=0))
    tower = shared_hash(spec, policy, folder) if spec.teachers else ""
    copies = _saved_adapters(spec, policy, torch_device)
    # Each model is out of the host's memory, or has what it keeps of it, before the next one is read.
    place(policy, settings, torch_device)
    frozen = [load_frozen(spec, each, kind, precision, settings) for each in spec.frozen_folders]
    collator = Collator(
        folder,
        policy.model.base_model,
        images,
        torch_device,
        getattr(torch, precision),
        share=shares_prefix(config.learner, folder),
        balances=config.learner.router_aux_loss_coef > 0,
        replays=config.learner.routing == "replayed",
        keeps_last=algorithm.needs().last_state,
    )
    check_optimizer(settings)
    cost = UpdateCost.of(policy, folder)
    engine = _engine(policy, settings, checkpoints=config.model.gradient_checkpointing)
    budget = TokenBudget(config.learner.tokens_per_microbatch)
    features = ImageFeatures(collator, policy, engine, cost, folder, budget, engine.device)
    batches = Microbatches(collator, features, folder, budget)
    wide = WidePass(folder, images, kind, precision)
    network = TrainedNetwork if spec.trained_role == POLICY else TrainedRewardModel
    trained = network(spec.trained_role, policy, engine, batches, cost, algorithm, config, folder, wide)
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
    if spec.checkpoint is not None:
        trained.restore(spec.checkpoint)
    return DeepSpeedLearner(trained, others, batches, settings, copy)


def _load_policy(spec: EngineSpec, kind: device.DeviceKind, precision: str) -> Policy:
    """Read the policy on rank 0, and build it without content on the others; see ``placement``.

    Raises:
        MMRLError: A rank cannot; raised on all of them.
    """
    config, folder, algorithm = spec.config, spec.folder, spec.algorithm
    lora = config.model.lora
    saved = None if spec.checkpoint is None else spec.checkpoint / NetworkFiles.of(spec.trained_role).model
    if saved is not None and is_adapter(saved) != (lora is not None):
        raise ConfigError(
            "the checkpoint holds " + ("a whole model" if lora else "an adapter"),
            where=f"model.lora; {spec.checkpoint}",
            remedy="go on with the checkpoint's model.lora, or export it and start a new run from that folder",
        )
    with Failures().raising():
        policy = load_policy(
            folder if lora or saved is None else replace(folder, path=str(saved)),
            kind,
            precision,
            freeze=config.model.freeze,
            temperature=config.sampler.temperature,
            entropy_gradient=algorithm is not None and algorithm.needs().entropy_gradient,
            lora=lora,
            adapter=saved,
            seed=config.trainer.seed,
            with_weights=torch.distributed.get_rank() == 0,
            quantize=lora is not None and config.model.quantize is not None,
            loading=None if spec.trained_role == POLICY else RewardLoading(config.trainer.seed),
        )
    return policy  # noqa: RET504 (the block raises at its end what went wrong on a rank)


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


def _engine(policy: Policy, settings: dict[str, Any], *, checkpoints: bool) -> Any:
    """DeepSpeed's engine around a policy, with an optimizer; ``checkpoints``: activations are computed again."""
    import deepspeed

    if checkpoints:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.model.disable_input_require_grads()  # it is on now, and would take a gradient through a frozen tower
    trained = [p for p in policy.parameters() if p.requires_grad]
    try:
        engine, *_ = deepspeed.initialize(model=policy, model_parameters=trained, config=settings)
    except ValidationError as error:  # DeepSpeed's own check of its settings
        first = error.errors()[0]
        key, value = ".".join(map(str, first["loc"])), first["input"]
        raise ConfigError(
            f"DeepSpeed does not take {key}: {first['msg']} (it is {value!r})",
            where="learner.deepspeed",
            remedy="write it as DeepSpeed's documentation does, or remove it",
        ) from error
    if compiles(engine.device.type, settings):
        engine.compile()  # else DeepSpeed leaves it at a notice
    return engine
