"""The learner: DeepSpeed around a policy, fed with packed micro-batches of uneven number and size.

Ranks wait for each other in every micro-batch: they agree on the number, and one that has fewer fills up with rows of
weight zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.config import LearnerConfig
from mmrl.engine.collation import Collator
from mmrl.engine.folder import ModelFolder
from mmrl.engine.policy import Policy
from mmrl.engine.vision import idle_sample
from mmrl.errors import NumericsError
from mmrl.interfaces import Algorithm, UpdateResult
from mmrl.ops.objective import PartialLoss, partial_loss, reduce_partials
from mmrl.ops.packing import plan_microbatches
from mmrl.ops.schedule import learning_rate
from mmrl.types import FloatArray, Sample, TrainingRow


class DeepSpeedLearner:
    """Implements ``interfaces.Learner`` on one rank, for this rank's share of the rows; all ranks call it together.

    Args:
        policy: The weights to train.
        reference: The frozen initial policy; None if the algorithm does not need it.
        settings: DeepSpeed's configuration; kept as ``settings``.
        total_steps: Optimizer steps of the run, for the schedule.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        collator: Collator,
        algorithm: Algorithm,
        config: LearnerConfig,
        *,
        settings: dict[str, Any],
        folder: ModelFolder,
        gradient_checkpointing: bool,
        total_steps: int,
    ) -> None:
        import deepspeed

        if gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        trained = [p for p in policy.parameters() if p.requires_grad]
        self._engine, *_ = deepspeed.initialize(model=policy, model_parameters=trained, config=settings)
        self.settings = settings
        self._policy, self._reference = policy, reference
        self._collate, self._algorithm, self._config, self._folder = collator, algorithm, config, folder
        self._idle = idle_sample(folder)
        self._total_steps, self._step = total_steps, 0

    @property
    def weight_version(self) -> int:
        """Optimizer steps taken: a new version of the weights each."""
        return self._step

    @property
    def policy(self) -> Policy:
        return self._policy

    def logprobs(self, samples: Sequence[Sample], *, packed: bool = True) -> list[FloatArray]:
        return self._forward(self._engine, samples, self._config.tokens_per_microbatch if packed else 0)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        assert self._reference is not None, "the algorithm did not ask for a reference policy"
        return self._forward(self._reference, samples, self._config.tokens_per_microbatch)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """One optimizer step of all ranks; the metrics are theirs together, the log-probs those of the own rows.

        Raises:
            NumericsError: The loss or the gradient is not finite; no step was taken.
        """
        rate = self._set_learning_rate()
        self._engine.train()
        grad_norm = 0.0
        plan = self._plan([row.sample for row in rows], self._config.tokens_per_microbatch)
        logprobs: list[FloatArray] = [np.zeros(0, np.float32)] * len(rows)
        partials: list[PartialLoss] = []
        for number, indices in enumerate(plan):
            last = number == len(plan) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            part = [rows[i] for i in indices]
            partial, logprobs_T = self._backward(part)
            partials.append(partial)
            for i, values in zip(indices, _split(logprobs_T, part), strict=True):
                logprobs[i] = values
            if last:
                grad_norm = self._finish_step()
            else:
                self._engine.step()
        if not plan:
            return UpdateResult({"lr": rate}, logprobs)
        self._step += 1
        metrics = reduce_partials(_of_all_ranks(partials))
        return UpdateResult(metrics | {"lr": rate, "policy/grad_norm": grad_norm}, logprobs)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder: rank 0 does, with what all ranks gather."""
        weights = self._policy.named_weights(self._policy.model.dtype, tied=False)
        writes = torch.distributed.get_rank() == 0
        state = {name: weight.cpu() for name, weight in weights if writes}
        if writes:
            self._policy.model.save_pretrained(folder, state_dict=state)
            self._folder.save_files(folder)

    def _plan(self, samples: Sequence[Sample], budget: int) -> list[list[int]]:
        """This rank's micro-batches, empty ones at the end where other ranks have more."""
        plan = plan_microbatches([sample.num_tokens for sample in samples], budget)
        most = torch.tensor(len(plan), device=self._engine.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return plan + [[] for _ in range(int(most) - len(plan))]

    def _idles(self, samples: Sequence[Sample]) -> list[Sample]:
        """What a packed row needs besides the samples; see ``idle_sample``."""
        lacks = self._folder.family.vision and not any(sample.prompt.images for sample in samples)
        return [self._idle] if lacks or not samples else []

    def _backward(self, rows: Sequence[TrainingRow]) -> tuple[PartialLoss, torch.Tensor]:
        samples = [row.sample for row in rows]
        logprobs_T, entropy_T = self._engine(self._collate(samples + self._idles(samples)))
        length = sum(len(row.mask) for row in rows)
        if not rows:  # the other ranks have more micro-batches
            self._engine.backward(0.0 * logprobs_T.sum())
            return PartialLoss(torch.zeros(()), {}, 0), logprobs_T.detach()
        partial = partial_loss(self._algorithm, rows, logprobs_T[:length], entropy_T[:length])
        if not math.isfinite(partial.sums["loss/total"]):
            raise NumericsError(
                "the loss is not finite; no optimizer step was taken",
                where=", ".join(sorted({row.sample.prompt.id for row in rows})[:8]),
                remedy="lower learner.lr, or look at the rollouts of this step",
            )
        # DeepSpeed averages gradients over ranks; the sequence weights already span all of them.
        self._engine.backward(partial.loss * self._engine.world_size + 0.0 * logprobs_T[length:].sum())
        return PartialLoss(partial.loss.detach(), partial.sums, partial.tokens), logprobs_T.detach()

    def _finish_step(self) -> float:
        """Let DeepSpeed take its optimizer step; returns the norm of the gradient before clipping.

        Without ZeRO, DeepSpeed clips but tells no norm; with it, the gradients are not here, DeepSpeed tells the norm
        afterwards, and skips the step by itself if that is not finite.
        """
        norm = 0.0
        if self._config.zero_stage == 0:
            gradients = [p.grad for p in self._policy.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            _require_finite(norm)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm() or norm)
        _require_finite(norm)
        return norm

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

    @torch.no_grad()
    def _forward(self, policy: Any, samples: Sequence[Sample], budget: int) -> list[FloatArray]:
        policy.eval()
        logprobs: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
        for indices in self._plan(samples, budget):
            part = [samples[i] for i in indices]
            logprobs_T, _ = policy(self._collate(part + self._idles(part)))
            for i, values in zip(indices, _split(logprobs_T, part), strict=True):
                logprobs[i] = values
        return logprobs


def _of_all_ranks(partials: Sequence[PartialLoss]) -> list[PartialLoss]:
    """Every rank's partial sums, without their losses."""
    own: list[tuple[Mapping[str, float], int]] = [(partial.sums, partial.tokens) for partial in partials]
    ranks: list[Any] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, own)
    return [PartialLoss(torch.zeros(()), sums, tokens) for rank in ranks for sums, tokens in rank]


def _require_finite(grad_norm: float) -> None:
    if not math.isfinite(grad_norm):
        raise NumericsError(
            f"the gradient's norm is {grad_norm}; no optimizer step was taken",
            where="policy/grad_norm",
            remedy="lower learner.lr, or look at the rollouts of this step",
        )


def _split(values_T: torch.Tensor, parts: Sequence[TrainingRow] | Sequence[Sample]) -> list[FloatArray]:
    """A packed row's values as one array per sample; those of an idle one at the end are dropped."""
    lengths = [len(part.mask) for part in parts]
    return list(np.split(values_T.float().cpu().numpy(), np.cumsum(lengths)))[: len(parts)]
