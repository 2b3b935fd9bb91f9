"""A network with an optimizer and a schedule of its own.

Ranks wait for each other in every micro-batch. They agree on the number, and a rank that has fewer adds rows of weight
zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.config.sections import Config
from mmrl.engine.learner.counting import UpdateCost, UpdateMemory
from mmrl.engine.learner.learner_settings import lossy_sum
from mmrl.engine.learner.learner_state import SavedState, save_state
from mmrl.engine.learner.microbatches import Microbatches, values_of
from mmrl.engine.learner.network import Network, tensors
from mmrl.engine.learner.optimizer_state import OptimizerState
from mmrl.engine.machine.full_device import memory_of
from mmrl.engine.network.experts import with_routing
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.packed_inputs import PackedInputs
from mmrl.engine.network.plain_model import WidePass
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.weights import Failures, of_all_ranks, save_adapter, save_model
from mmrl.engine_api import NetworkFiles, UpdateResult, Way
from mmrl.interfaces import Algorithm
from mmrl.ops.cost import imbalance
from mmrl.ops.objective import PartialLoss, partial_loss, reduce_partials, seen_samples
from mmrl.ops.schedule import learning_rate
from mmrl.types import FloatArray, PreUpdateStatistics, Sample, TrainingRow


class TrainedNetwork(Network):
    """The policy, whose weights the sampler gets; others that are trained differ in what they answer.

    Args:
        engine: DeepSpeed's, around the policy.
        wide: Computes with its weights in a wider type; None if ``score`` never goes that way.
        cost: The cost of its rows.
        config: The run's.

    Attributes:
        optimizer_steps: Optimizer steps taken; each makes a new version of the weights.
        sent: Metrics of the weights that the sampler has got last; each update gives them with its own.
    """

    _phase = "the update"
    _total_loss, _rate_metric, _norm_metric = "loss/total", "lr", "policy/grad_norm"

    def __init__(
        self,
        role: str,
        policy: Policy,
        engine: Any,
        batches: Microbatches,
        cost: UpdateCost,
        algorithm: Algorithm,
        config: Config,
        folder: ModelFolder,
        wide: WidePass | None,
    ) -> None:
        super().__init__(role, policy, engine, batches)
        self._wide = wide
        self.engine, self._cost, self._algorithm, self._folder = engine, cost, algorithm, folder
        self._run, self._config = config, config.learner
        self._goes_backward = self._told = False
        self._memory = UpdateMemory(engine.device.type)
        self.optimizer_steps, self.sent = 0, dict[str, float]()

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        if way == "wide":
            assert self._wide is not None, f"the {self.role} goes no wide way"
            with memory_of("the log-probs in a wider type"):
                return self._wide.logprobs(self.policy, samples)
        return super().score(samples, way=way)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """One optimizer step of all ranks; the metrics are of all ranks, the log-probs of this rank's rows.

        A loss or a gradient that is not finite on any rank is the result's ``fault``: no rank takes the step, and the
        metrics are those that are finite. A single rank that runs out of memory halves its micro-batches, see
        ``TokenBudget``, and starts the step again.

        Raises:
            DeviceMemoryError: There is not enough memory; the learner cannot go on.
        """

        def run() -> UpdateResult:
            with self._memory.measured():
                result = self._update(rows)
            return replace(result, memory_bytes=self._memory.above)

        budget = self._batches.budget
        result = budget.within(self._phase, [row.sample for row in rows], run, self._forget_update)
        return replace(result, notice="; ".join(filter(None, (budget.take_notice(), result.notice))))

    def save(self, folder: Path) -> NetworkFiles:
        """Write a model and a state: each rank writes some files of the weights, and its part of the state."""
        files = NetworkFiles.of(self.role, optimizer=self._run.trainer.save_optimizer != "none")
        failures, lora = Failures(), self._run.model.lora
        save = save_model if lora is None else partial(save_adapter, lora)
        with memory_of("the checkpoint"):
            save(self.policy, self._folder, folder / files.model, failures)
            failures.raise_first()
            state = OptimizerState(self.engine, self.policy)
            save_state(state, self.optimizer_steps, folder / files.state, failures, with_optimizer=files.optimizer)
        failures.raise_first()
        return files

    def restore(self, folder: Path) -> None:
        """Go on from the state that ``save`` wrote; the policy has the weights of its model already.

        Args:
            folder: The checkpoint's.

        Raises:
            ConfigError: It belongs to another model, other trained parts or another precision.
            ResourceError: A file is missing or damaged.
        """
        state = OptimizerState(self.engine, self.policy)
        with Failures().raising():
            saved = SavedState(folder / NetworkFiles.of(self.role).state)
            saved.check(state)
        if saved.adam_step and self._config.zero_stage:
            self._step_without_effect(0.0)  # in its first step, DeepSpeed makes the optimizer's state
        with Failures().raising():
            saved.restore(state)
        self.optimizer_steps = saved.optimizer_steps

    def _inputs(self, samples: Sequence[Sample], batches: Microbatches | None = None) -> PackedInputs:
        return (batches or self._batches).inputs(samples)

    def _update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        self._goes_backward = False
        rate, samples = self._set_learning_rate(), [row.sample for row in rows]
        flops = self._batches.remember_images(seen_samples(rows))
        self.engine.train()
        plan = self._batches.plan(samples, self._batches.budget.tokens, rows)
        size = self.group.size
        num_rows = self._total(len(rows)) // size if self._config.router_aux_loss_coef > 0 else 0
        nothing = np.zeros(0, np.float32)
        statistics = [PreUpdateStatistics(nothing, nothing)] * len(rows)
        found: list[tuple[list[int], tuple[torch.Tensor, ...]]] = []
        partials: list[PartialLoss] = []
        strange: set[str] = set()
        for number, indices in enumerate(plan):
            last = number == len(plan) - 1
            self.engine.set_gradient_accumulation_boundary(last)
            part = [rows[i] for i in indices]
            partial, packed = self._backward(part, num_rows, flops)
            partials.append(partial)
            if not math.isfinite(partial.sums.get(self._total_loss, 0.0)):
                strange.update(row.sample.prompt.id for row in part)
            found.append((indices, packed))
            if not last:
                self.engine.step()
        if not plan:
            return UpdateResult({self._rate_metric: rate}, [], [], flops=sum(flops))
        grad_norm = self._finish_step()
        for indices, packed in found:  # only now: to copy them earlier would wait for each backward pass
            for i, values in zip(indices, self._statistics([rows[i] for i in indices], packed), strict=True):
                statistics[i] = values
        partials, strange, costs = _of_all_ranks(partials, strange, flops, size)
        metrics = reduce_partials(partials) | {self._rate_metric: rate, self._norm_metric: grad_norm}
        metrics |= self._metrics_of_passes(len(plan), costs)
        fault = notice = ""
        if math.isfinite(grad_norm):
            self.optimizer_steps += 1
            notice = self._notice(len(plan))
        else:
            fault = f"the gradient's norm is {grad_norm}"
            if strange:
                fault = f"the loss is not finite: prompt ids {', '.join(sorted(strange)[:8])}"
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return UpdateResult.of(metrics, statistics, fault=fault, notice=notice, flops=sum(flops))

    def _metrics_of_passes(self, microbatches: int, costs: Sequence[Sequence[int]]) -> dict[str, float]:
        """Further metrics of an update.

        Args:
            costs: The operations of the micro-batches of each rank, or of ranks that hold rows together.
        """
        passes = {"perf/microbatches": float(microbatches), "perf/imbalance": imbalance(costs)}
        return {**self.sent, **passes}

    def _notice(self, microbatches: int) -> str:
        """Words on sums of gradients that lose digits, once."""
        dtype = str(self.policy.model.dtype).removeprefix("torch.")
        notice = "" if self._told else lossy_sum(dtype, self._config.zero_stage, microbatches)
        self._told = self._told or bool(notice)
        return notice

    def _total(self, number: int) -> int:
        """The sum of a number over the ranks."""
        total = torch.tensor(number, device=self.engine.device)
        torch.distributed.all_reduce(total)
        return int(total)

    def _backward(
        self, rows: Sequence[TrainingRow], num_rows: int, flops: list[int]
    ) -> tuple[PartialLoss, tuple[torch.Tensor, ...]]:
        """Add the gradient of one micro-batch.

        Args:
            num_rows: Rows of the step, of all ranks, if the load of experts is balanced; else 0.
            flops: Operations of each pass, to which those of this one are added.

        Returns:
            Its share of the loss, and the answer of the network without its gradient.
        """
        self._goes_backward = False
        samples = seen_samples(rows)
        inputs = self._inputs(samples)
        flops.append(self._cost.flops(inputs) if rows else 0)
        packed = tensors(self.engine(inputs))
        count = self._num_values(samples)
        idle = 0.0 * packed[0][count:].sum()
        partial = PartialLoss(torch.zeros(()), {}, 0)
        loss = idle  # the other ranks have more micro-batches
        if rows:
            partial = self._partial(rows, [values[:count] for values in packed])
            balance = self._config.router_aux_loss_coef / num_rows if num_rows else 0.0
            masks = [row.mask for row in rows]
            partial = with_routing(partial, self.policy.routers, inputs, masks, balance, self._total_loss)
            # DeepSpeed averages gradients over ranks; the sequence weights already span all of them.
            loss = partial.loss * self.engine.world_size + idle
            if not math.isfinite(partial.sums[self._total_loss]):
                # A gradient of NaN, which all ranks see, so that none takes the step.
                loss = math.nan * packed[0].sum()
        self._goes_backward = True
        self.engine.backward(loss)
        partial = replace(partial, loss=partial.loss.detach())
        return partial, tuple(values.detach() for values in packed)

    def _num_values(self, samples: Sequence[Sample]) -> int:
        """The values that the network answers for these samples; those of an idle one follow."""
        return sum(len(sample.mask) for sample in samples)

    def _partial(self, rows: Sequence[TrainingRow], found: Sequence[torch.Tensor]) -> PartialLoss:
        """The rows' share of the step's loss, from what the network answers."""
        return partial_loss(self._algorithm, rows, *found)

    def _statistics(self, rows: Sequence[TrainingRow], packed: Sequence[torch.Tensor]) -> list[PreUpdateStatistics]:
        """Each row's, from what the network has answered."""
        pairs = zip(*(values_of(values_T, seen_samples(rows)) for values_T in packed), strict=True)
        (*found,) = (PreUpdateStatistics(*pair) for pair in pairs)
        of_views = iter(found[len(rows) :])
        return [
            replace(own, views={name: next(of_views) for name in row.own_views}) if row.own_views else own
            for row, own in zip(rows, found, strict=False)
        ]

    def _finish_step(self) -> float:
        """Let DeepSpeed take its optimizer step; returns the norm of all ranks' gradient before clipping.

        Without ZeRO, DeepSpeed clips and does not tell the norm. With ZeRO the gradients are elsewhere, and DeepSpeed
        tells the norm afterwards. If the norm is not finite, no step is taken, and this method or DeepSpeed drops the
        gradient.
        """
        norm = 0.0
        if self._config.zero_stage == 0:
            gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if not math.isfinite(norm):
                self.engine.zero_grad()
                return norm
        with memory_of("the optimizer step"):  # the weights may have moved, and smaller micro-batches would not help
            self.engine.step()
        return float(self.engine.get_global_grad_norm() or norm)

    def _step_without_effect(self, factor: float) -> None:
        """A step of learning rate 0 on an idle sample's values times ``factor``, 0 or NaN."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = 0.0
        self.engine.train()
        self.engine.set_gradient_accumulation_boundary(True)
        values, *_ = tensors(self.engine(self._inputs([])))
        self.engine.backward(factor * values.sum())
        self.engine.step()

    def _forget_update(self) -> None:
        """Drop the gradients that an interrupted forward or backward pass left behind.

        With ZeRO the pass is brought to its end with a gradient that is not finite, which DeepSpeed drops.
        """
        self._batches.forget_images()
        if self._config.zero_stage == 0:
            self.engine.zero_grad()
            return
        self.engine.set_gradient_accumulation_boundary(True)
        if self._goes_backward:
            self.engine.allreduce_gradients()
        self._step_without_effect(math.nan)

    @property
    def _all_updates(self) -> int:
        """The network's optimizer steps in the whole run."""
        return self._run.policy_updates

    def _set_learning_rate(self) -> float:
        config = self._config
        rate = learning_rate(
            self.optimizer_steps,
            peak=config.lr,
            warmup_steps=config.warmup_steps,
            total_steps=self._all_updates,
            schedule=config.schedule,
        )
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        return rate


def _of_all_ranks(
    partials: Sequence[PartialLoss], strange: set[str], costs: Sequence[int], size: int
) -> tuple[list[PartialLoss], set[str], list[Sequence[int]]]:
    """Partial sums of all ranks without their losses, the prompts that the ranks have named, and the costs of each
    rank's micro-batches.

    Args:
        size: Neighbouring ranks that hold rows together, and have the same ones: one of them counts.
    """
    sums = [(partial.sums, partial.tokens, partial.sequences) for partial in partials]
    ranks = of_all_ranks((sums, strange, costs))[::size]
    found = [PartialLoss(torch.zeros(()), *each) for own, *_ in ranks for each in own]
    return found, {name for _, names, _ in ranks for name in names}, [costs for *_, costs in ranks]
