"""The learner: DeepSpeed around a policy, fed with packed micro-batches of uneven number and size.

Ranks wait for each other in every micro-batch. They agree on the number, and a rank that has fewer adds rows of weight
zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from mmrl.config.sections import LearnerConfig, LoraConfig
from mmrl.engine import device
from mmrl.engine.learner.collation import Collator
from mmrl.engine.learner.counting import UnitCost, UpdateCost, UpdateMemory
from mmrl.engine.learner.learner_settings import compiles, lossy_sum
from mmrl.engine.learner.learner_state import SavedState, check_optimizer, save_state
from mmrl.engine.learner.optimizer_state import OptimizerState
from mmrl.engine.learner.packed_values import of_all, values_of
from mmrl.engine.machine.full_device import TokenBudget, memory_of
from mmrl.engine.network.experts import with_routing
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.image_form import Features
from mmrl.engine.network.packed_inputs import OWN
from mmrl.engine.network.placement import Reference
from mmrl.engine.network.plain_model import WidePass
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.vision import BLANK, idle_sample
from mmrl.engine.network.weights import Failures, save_adapter, save_model
from mmrl.engine_api import Learner, UpdateResult, Way
from mmrl.errors import ConfigError, MMRLError
from mmrl.interfaces import Algorithm
from mmrl.ops.cost import imbalance
from mmrl.ops.objective import PartialLoss, partial_loss, reduce_partials
from mmrl.ops.packing import Unit, first_fit, plan_microbatches
from mmrl.ops.schedule import learning_rate
from mmrl.types import FloatArray, Sample, TrainingRow


@dataclass(frozen=True, slots=True)
class _OfRole:
    """Implements ``engine_api.Network`` by its learner."""

    learner: DeepSpeedLearner
    role: str

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        return self.learner.score(self.role, samples, way)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        assert self.role == "policy", f"the {self.role} is frozen"
        return self.learner.update(rows)


class DeepSpeedLearner(Learner):
    """Implements ``engine_api.Learner`` on one rank, for this rank's share of the rows; all ranks call it together.

    Args:
        policy: The weights to train.
        wide: Computes with them in a wider type.
        reference: The frozen initial policy; None if the algorithm does not need it, or if the policy without its
            adapters is the initial policy.
        settings: DeepSpeed's configuration; kept as ``settings``.
        total_steps: Optimizer steps of the run, for the schedule.
        lora: The policy's adapters; checkpoints then hold the adapters alone.
        saves_optimizer: False if checkpoints leave the optimizer's state out.

    Attributes:
        memory: Peak memory of updates.
        sent: Metrics of the weights that the sampler has got last; each update gives them with its own.
    """

    def __init__(
        self,
        policy: Policy,
        wide: WidePass,
        reference: Reference | None,
        collator: Collator,
        algorithm: Algorithm,
        config: LearnerConfig,
        *,
        settings: dict[str, Any],
        folder: ModelFolder,
        gradient_checkpointing: bool,
        total_steps: int,
        lora: LoraConfig | None = None,
        saves_optimizer: bool = True,
    ) -> None:
        import deepspeed

        check_optimizer(settings)
        self._cost = UpdateCost.of(policy, folder)
        if gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
            policy.model.disable_input_require_grads()  # it is on now, and would take a gradient through a frozen tower
        trained = [p for p in policy.parameters() if p.requires_grad]
        try:
            self._engine, *_ = deepspeed.initialize(model=policy, model_parameters=trained, config=settings)
        except ValidationError as error:  # DeepSpeed's own check of its settings
            first = error.errors()[0]
            key, value = ".".join(map(str, first["loc"])), first["input"]
            raise ConfigError(
                f"DeepSpeed does not take {key}: {first['msg']} (it is {value!r})",
                where="learner.deepspeed",
                remedy="write it as DeepSpeed's documentation does, or remove it",
            ) from error
        if compiles(self._engine.device.type, settings):
            self._engine.compile()  # else DeepSpeed leaves it at a notice
        self.settings = settings
        self._policy, self._wide, self._reference = policy, wide, reference
        roles = algorithm.needs().roles
        self.networks = {role: _OfRole(self, role) for role in roles}
        self._collate, self._algorithm, self._config, self._folder = collator, algorithm, config, folder
        self._idle, self._lora, self._saves_optimizer = idle_sample(folder), lora, saves_optimizer
        self._features: dict[str, Features] = {}
        self._keeps_features = collator.share and folder.family.vision and not self._cost.trains_tower
        self._estimate = UnitCost(folder, tower=not self._keeps_features)
        self._total_steps, self._step = total_steps, 0
        self._budget = TokenBudget(config.tokens_per_microbatch)
        self._goes_backward = False
        self._balances = config.router_aux_loss_coef > 0
        self._row_flops, self._told = list[int](), False
        self.memory, self.sent = UpdateMemory(self._engine.device.type), dict[str, float]()

    @property
    def weight_version(self) -> int:
        """Optimizer steps taken; each makes a new version of the weights."""
        return self._step

    @property
    def policy(self) -> Policy:
        return self._policy

    def score(self, role: str, samples: Sequence[Sample], way: Way) -> list[FloatArray]:
        """As ``Network.score``."""
        if way == "wide":
            with memory_of("the log-probs in a wider type"):
                return self._wide.logprobs(self._policy, samples) if role == "policy" else []
        forward = self._of_policy if role == "policy" else self._of_reference
        phase, packed = "log-probs" if role == "policy" else f"{role} log-probs", way == "packed"

        def run() -> list[FloatArray]:
            return forward(samples, self._budget.tokens if packed else 0)

        return self._budget.within(phase, samples if packed else (), run, self.forget_images)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """One optimizer step of all ranks; the metrics are of all ranks, the log-probs of this rank's rows.

        A loss or a gradient that is not finite on any rank is the result's ``fault``: no rank takes the step, and the
        metrics are those that are finite. A single rank that runs out of memory halves its micro-batches, see
        ``TokenBudget``, and starts the step again.

        Raises:
            DeviceMemoryError: There is not enough memory; the learner cannot go on.
        """
        samples = [row.sample for row in rows]
        result = self._budget.within("the update", samples, lambda: self._measured_update(rows), self._forget_update)
        notices = filter(None, (self._budget.take_notice(), result.notice))
        return replace(result, notice="; ".join(notices))

    def save(self, folder: Path) -> None:
        """Write ``model/`` and ``state/``: each rank writes some files of the weights, and its part of the state."""
        failures = Failures()
        save = save_model if self._lora is None else partial(save_adapter, self._lora)
        with memory_of("the checkpoint"):
            save(self._policy, self._folder, folder / "model", failures)
            failures.raise_first()
            state = OptimizerState(self._engine, self._policy)
            save_state(state, self._step, folder / "state", failures, with_optimizer=self._saves_optimizer)
        failures.raise_first()

    def restore(self, folder: Path) -> None:
        """Go on from the ``state/`` that ``save`` wrote; the policy has the weights of its ``model/`` already.

        Raises:
            ConfigError: It belongs to another model, other trained parts or another precision.
            ResourceError: A file is missing or damaged.
        """
        failures, state = Failures(), OptimizerState(self._engine, self._policy)
        try:
            saved = SavedState(folder)
            saved.check(state)
        except MMRLError as error:
            failures.add(error)
        failures.raise_first()
        if saved.adam_step and self._config.zero_stage:
            self._step_without_effect(0.0)  # in its first step, DeepSpeed makes the optimizer's state
        try:
            saved.restore(state)
        except MMRLError as error:
            failures.add(error)
        failures.raise_first()
        self._step = saved.optimizer_steps

    def _measured_update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        self._row_flops.clear()
        with self.memory.measured():
            result = self._update(rows)
        return replace(result, flops=sum(self._row_flops), memory_bytes=self.memory.above)

    def _update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        self._goes_backward = False
        rate = self._set_learning_rate()
        self._remember_images([row.sample for row in rows])
        self._engine.train()
        plan = self._plan([row.sample for row in rows], self._budget.tokens)
        num_rows = self._total(len(rows)) if self._balances else 0
        logprobs, entropies = ([np.zeros(0, np.float32)] * len(rows) for _ in range(2))
        found: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        partials: list[PartialLoss] = []
        strange: set[str] = set()
        for number, indices in enumerate(plan):
            last = number == len(plan) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            part = [rows[i] for i in indices]
            partial, logprobs_T, entropy_T = self._backward(part, num_rows)
            partials.append(partial)
            if not math.isfinite(partial.sums.get("loss/total", 0.0)):
                strange.update(row.sample.prompt.id for row in part)
            found.append((indices, logprobs_T, entropy_T))
            if not last:
                self._engine.step()
        if not plan:
            return UpdateResult({"lr": rate}, logprobs, entropies)
        grad_norm = self._finish_step()
        for indices, *packed in found:  # only now: to copy them earlier would wait for each backward pass
            parts = [values_of(values_T, [rows[i] for i in indices]) for values_T in packed]
            for i, *values in zip(indices, *parts, strict=True):
                logprobs[i], entropies[i] = values
        partials, strange, costs = of_all(partials, strange, self._row_flops)
        metrics = reduce_partials(partials) | {"lr": rate, "policy/grad_norm": grad_norm, **self.sent}
        metrics |= {"perf/microbatches": float(len(plan)), "perf/imbalance": imbalance(costs)}
        if math.isfinite(grad_norm):
            self._step += 1
            dtype = str(self._policy.model.dtype).removeprefix("torch.")
            notice = "" if self._told else lossy_sum(dtype, self._config.zero_stage, len(plan))
            self._told = self._told or bool(notice)
            return UpdateResult(metrics, logprobs, entropies, notice=notice)
        fault = f"the gradient's norm is {grad_norm}"
        if strange:
            fault = f"the loss is not finite: prompt ids {', '.join(sorted(strange)[:8])}"
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return UpdateResult(finite, logprobs, entropies, fault)

    def _plan(self, samples: Sequence[Sample], budget: int) -> list[list[int]]:
        """This rank's micro-batches, empty ones at the end where other ranks have more."""

        def cost(unit: Unit) -> float:
            return self._estimate(unit, samples)

        rows = plan_microbatches(self._collate.units(samples, budget), budget, cost)
        plan = [[index for unit in row for index in unit.indices] for row in rows]
        if not self._features:
            self._collate.announce(ref for row in plan for i in row for ref in samples[i].all_images)
        most = torch.tensor(len(plan), device=self._engine.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return plan + [[] for _ in range(int(most) - len(plan))]

    def _total(self, number: int) -> int:
        """The sum of a number over the ranks."""
        total = torch.tensor(number, device=self._engine.device)
        torch.distributed.all_reduce(total)
        return int(total)

    @torch.no_grad()
    def _remember_images(self, samples: Sequence[Sample]) -> None:
        """Compute the features of new images, if the vision tower is not trained; keep all, or none for lack of room.

        All ranks take as many rounds as the rank with most images needs. The reference has the same tower.
        """
        if not self._keeps_features:
            return
        refs = {ref.hash: ref for ref in (BLANK, *(ref for sample in samples for ref in sample.all_images))}
        new = [ref for name, ref in refs.items() if name not in self._features]
        sizes = [self._folder.image_tokens(ref.width, ref.height) for ref in new]
        batches = [[new[i] for i in part] for part in first_fit(sizes, self._budget.tokens)]
        known = sum(feature.nbytes for features in self._features.values() for feature in features)
        room = device.FEATURE_BYTES[self._engine.device.type] - known
        is_too_much = sum(sizes) * self._cost.image_token_bytes(self._policy.model.dtype.itemsize) > room
        most = torch.tensor([len(batches), is_too_much], device=self._engine.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if most[1]:
            self._features.clear()
            return
        self._engine.eval()
        self._collate.announce(ref for batch in batches for ref in batch)
        for number in range(int(most[0])):
            batch = batches[number] if number < len(batches) else [BLANK]
            images = self._collate.images(batch)
            self._row_flops.append(self._cost.tower_flops(images))
            self._features |= {ref.hash: found for ref, found in zip(batch, self._engine(images), strict=True)}

    def forget_images(self) -> None:
        """Drop the features of images, so that the next step is computed as in a fresh process."""
        self._features.clear()

    def release(self) -> None:
        """Give weights and optimizer up for another learner in this process; this one cannot be used again.

        At stages 1 and 2, DeepSpeed's hooks keep the memory until they are removed. At stage 3 DeepSpeed 0.19 keeps it
        even then.
        """
        self.forget_images()
        self._engine.destroy()

    def _idles(self, samples: Sequence[Sample]) -> list[Sample]:
        """Samples that a packed row needs besides its own; see ``idle_sample``."""
        reads = self._folder.family.vision and not self._features
        lacks = reads and not any(sample.all_images for sample in samples)
        return [self._idle] if lacks or not samples else []

    def _backward(self, rows: Sequence[TrainingRow], num_rows: int) -> tuple[PartialLoss, torch.Tensor, torch.Tensor]:
        """Add the gradient of one micro-batch.

        Args:
            num_rows: Rows of the step, of all ranks, if the load of experts is balanced; else 0.
        """
        samples = [row.sample for row in rows]
        self._goes_backward = False
        inputs = self._collate(samples + self._idles(samples), self._features)
        self._row_flops.append(self._cost.flops(inputs) if rows else 0)
        logprobs_T, entropy_T = self._engine(inputs)
        length = sum(len(row.mask) for row in rows)
        idle = 0.0 * logprobs_T[length:].sum()
        partial = PartialLoss(torch.zeros(()), {}, 0)
        loss = idle  # the other ranks have more micro-batches
        if rows:
            partial = partial_loss(self._algorithm, rows, logprobs_T[:length], entropy_T[:length])
            balance = self._config.router_aux_loss_coef / num_rows if num_rows else 0.0
            partial = with_routing(partial, self._policy.routers, inputs, [row.mask for row in rows], balance)
            # DeepSpeed averages gradients over ranks; the sequence weights already span all of them.
            loss = partial.loss * self._engine.world_size + idle
            if not math.isfinite(partial.sums["loss/total"]):
                # A gradient of NaN, which all ranks see, so that none takes the step.
                loss = math.nan * logprobs_T.sum()
        self._goes_backward = True
        self._engine.backward(loss)
        partial = PartialLoss(partial.loss.detach(), partial.sums, partial.tokens)
        return partial, logprobs_T.detach(), entropy_T.detach()

    def _finish_step(self) -> float:
        """Let DeepSpeed take its optimizer step; returns the norm of all ranks' gradient before clipping.

        Without ZeRO, DeepSpeed clips and does not tell the norm. With ZeRO the gradients are elsewhere, and DeepSpeed
        tells the norm afterwards. If the norm is not finite, no step is taken, and this method or DeepSpeed drops the
        gradient.
        """
        norm = 0.0
        if self._config.zero_stage == 0:
            gradients = [p.grad for p in self._policy.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return norm
        with memory_of("the optimizer step"):  # the weights may have moved, and smaller micro-batches would not help
            self._engine.step()
        return float(self._engine.get_global_grad_norm() or norm)

    def _step_without_effect(self, factor: float) -> None:
        """A step of learning rate 0 on an idle sample's log-probs times ``factor``, 0 or NaN."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = 0.0
        self._engine.train()
        self._engine.set_gradient_accumulation_boundary(True)
        logprobs_T, _ = self._engine(self._collate([self._idle]))
        self._engine.backward(factor * logprobs_T.sum())
        self._engine.step()

    def _forget_update(self) -> None:
        """Drop the gradients that an interrupted forward or backward pass left behind.

        With ZeRO the pass is brought to its end with a gradient that is not finite, which DeepSpeed drops.
        """
        self.forget_images()
        if self._config.zero_stage == 0:
            self._engine.zero_grad()
            return
        self._engine.set_gradient_accumulation_boundary(True)
        if self._goes_backward:
            self._engine.allreduce_gradients()
        self._step_without_effect(math.nan)

    def _set_learning_rate(self) -> float:
        rate = learning_rate(
            self._step,
            peak=self._config.lr,
            warmup_steps=self._config.warmup_steps,
            total_steps=self._total_steps,
            schedule=self._config.schedule,
        )
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _of_policy(self, samples: Sequence[Sample], budget: int) -> list[FloatArray]:
        return self._forward(self._engine, samples, budget)

    def _of_reference(self, samples: Sequence[Sample], budget: int) -> list[FloatArray]:
        if self._reference is None:
            with self._policy.without_adapters():
                return self._forward(self._engine, samples, budget, routed=False)
        with self._reference.in_use() as reference:
            return self._forward(reference, samples, budget, routed=False)

    @torch.no_grad()
    def _forward(self, policy: Any, samples: Sequence[Sample], budget: int, *, routed: bool = True) -> list[FloatArray]:
        """Log-probs; ``routed`` is False for other weights than those of the sampler, whose experts are not theirs."""
        policy.eval()
        self._remember_images(samples)
        logprobs: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
        for indices in self._plan(samples, budget):
            part = [samples[i] for i in indices]
            inputs = self._collate(part + self._idles(part), self._features)
            logprobs_T, _ = policy(inputs if routed else replace(inputs, routing=OWN))
            for i, values in zip(indices, values_of(logprobs_T, part), strict=True):
                logprobs[i] = values
        return logprobs
